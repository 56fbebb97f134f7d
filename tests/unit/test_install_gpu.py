"""The page, the script and the two images install the same, with the versions of pyproject.toml."""

from __future__ import annotations

import re
import subprocess
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
    docker = {name for line in re.findall(r"^COPY (.*) \S+$", IMAGES[0], re.MULTILINE) for name in line.split()}
    apptainer = re.findall(r"^    (\S+) /opt/megarl/(\S+)$", IMAGES[1], re.MULTILINE)
    assert [source for source, target in apptainer if source != target] == []
    assert docker == {source for source, _ in apptainer}
    assert [name for name in docker if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", ["install_gpu.sh", "first_gpu.sh"])
def test_scripts_are_programs_that_bash_reads(name: str) -> None:
    assert (TOOLS / name).stat().st_mode & 0o111
    subprocess.run(["bash", "-n", TOOLS / name], check=True)
