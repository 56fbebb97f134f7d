"""The page, the script and the two images install the same, with the versions of pyproject.toml."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
PAGE = (ROOT / "docs" / "install_gpu.md").read_text()
SCRIPT = (TOOLS / "install_gpu.sh").read_text()
IMAGES = [(TOOLS / name).read_text() for name in ("Dockerfile", "megarl.def")]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_lines_of_the_page_are_those_of_the_script() -> None:
    [block] = re.findall(r"The script runs these lines:\n\n((?:    .+\n)+)", PAGE)
    lines = [line.strip() for line in block.splitlines()]
    assert [line for line in SCRIPT.splitlines() if line in lines] == lines


def test_both_halves_of_transformer_engine_have_one_version() -> None:
    pins = [Requirement(text) for text in EXTRAS["te"] if text.startswith("transformer-engine")]
    [compiled] = re.findall(r"transformer-engine-torch(==[\d.]+)", SCRIPT)
    assert [str(pin.specifier) for pin in pins] == [compiled, compiled]


def test_the_extra_for_gpus_compiles_nothing() -> None:
    assert [Requirement(text).name for text in EXTRAS["gpu"]] == ["vllm"]


def test_images_are_made_by_the_same_lines() -> None:
    def of(image: str, pattern: str) -> str:
        [found] = set(re.findall(pattern, image, re.MULTILINE))
        return str(found)

    for pattern in (r"nvidia/cuda:\S+", r"python3-venv .*?(?= && |$)", r"python3 -m venv .*$", r"PATH=/opt/venv.*$"):
        docker, apptainer = (of(image, pattern).rstrip(" \\") for image in IMAGES)
        assert docker == apptainer, pattern
    docker = {source for source, _ in copied()}
    apptainer = re.findall(r"^    (\S+) /opt/megarl/(\S+)$", IMAGES[1], re.MULTILINE)
    assert [source for source, target in apptainer if source != target] == []
    assert docker == {source for source, _ in apptainer}
    assert "exec megarl doctor\n" in IMAGES[1] and 'CMD ["megarl", "doctor"]\n' in IMAGES[0]


def test_images_have_the_system_packages_of_ci() -> None:
    """Without Slurm's, which the cluster has; the image names build-essential's parts."""
    ci = (ROOT / ".ci" / "run").read_text()
    wanted = {name for line in re.findall(r'need="\$need (.*)"', ci) for name in line.split()} - {"slurm-wlm", "munge"}
    [line] = re.findall(r"^ +(python3-venv .*?)(?: && \\)?$", IMAGES[0], re.MULTILINE)
    found = set(line.split())
    assert {"g++", "make"} <= found
    assert found - {"g++", "make", "git"} == wanted - {"build-essential"}


def test_the_image_runs_jobs_without_root() -> None:
    lines = IMAGES[0].splitlines()
    user = lines.index("USER megarl")
    assert [i for i, line in enumerate(lines) if "apt-get" in line][-1] < user
    assert user < next(i for i, line in enumerate(lines) if "install_gpu.sh" in line and line.startswith("RUN"))
    assert [line for line in lines[user:] if line.startswith("COPY") and "--chown=megarl " not in line] == []


def copied() -> list[tuple[str, str]]:
    """(source, target) of each file and folder that the Dockerfile copies."""
    found = []
    for line in re.findall(r"^COPY (?:--\S+ )*(.*)$", IMAGES[0], re.MULTILINE):
        *sources, target = line.split()
        found += [(source, f"{target}{source}" if target.endswith("/") else target) for source in sources]
    return found


def test_what_the_image_copies_can_be_installed(tmp_path: Path) -> None:
    """The build backend reads the package from the copied files alone; the soak test below compiles them."""
    copy_files(tmp_path)
    backend = "import scikit_build_core.build as b, sys; print(b.prepare_metadata_for_build_wheel(sys.argv[1]))"
    (tmp_path / "metadata").mkdir()
    command = [sys.executable, "-c", backend, str(tmp_path / "metadata")]
    subprocess.run(command, cwd=tmp_path / "megarl", check=True, stdout=subprocess.PIPE)
    [metadata] = (tmp_path / "metadata").glob("megarl-*/METADATA")
    assert "Description-Content-Type: text/markdown" in metadata.read_text()


@pytest.mark.soak
def test_the_image_works_without_network(tmp_path: Path) -> None:
    """Its lines in a plain environment: megarl compiled from the copied files, its default command without network.

    The libraries are those of this environment; what `tools/install_gpu.sh` downloads and TransformerEngine's build
    are left out, and no GPU is here.
    """
    copy_files(tmp_path)
    folder, python = tmp_path / "megarl", tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    [packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--no-index", "-C", "cmake.define.MEGARL_CUDA=OFF", "-e", "."], cwd=folder, check=True)
    [command] = re.findall(r"^CMD (.*)$", IMAGES[0], re.MULTILINE)
    program, *words = json.loads(command)
    alone = ["bwrap", "--dev-bind", "/", "/", "--unshare-net", python.with_name(program), *words]
    done = subprocess.run(alone, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("ready\n"), done.stdout + done.stderr
    assert f"({python})" in done.stdout and str(tmp_path / "venv") in done.stdout.split("extension: ")[1]


def copy_files(tmp_path: Path) -> None:
    for source, target in copied():
        path = tmp_path / "megarl" / target
        path.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", ROOT / source, path], check=True)


@pytest.mark.parametrize("name", ["install_gpu.sh", "first_gpu.sh"])
def test_scripts_are_programs_that_bash_reads(name: str) -> None:
    assert (TOOLS / name).stat().st_mode & 0o111
    subprocess.run(["bash", "-n", TOOLS / name], check=True)
