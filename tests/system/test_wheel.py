"""A wheel with and one without CUDA kernels: both build, carry the settings, and import on a machine without a GPU.
Installed in an environment of its own, outside the repository, the wheel runs the main job.

The one with CUDA kernels is built in `make soak`: what `make test` itself installs is built so where nvcc is.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import megarl

ROOT = Path(__file__).resolve().parents[2]

LOAD = """
import importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location("megarl._C", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
x = torch.arange(10.0)
digest = torch.empty(1, dtype=torch.int64)
table = torch.empty(module.DIGEST_BOX_BYTES, dtype=torch.uint8)
pieces = module.digest_table([x.data_ptr(), 4, 0, 1, 10, 1, 1], 1, table.data_ptr())
module.cpu.digests(table.data_ptr(), 1, pieces, digest.data_ptr(), 1)
from megarl import ops
assert int(digest) % 2**64 == ops.slice_digest(x, start=(0,), shape=(10,))
print(hasattr(module, "cuda"), module.CUDA_STATE)
"""


def wheel_of(tmp_path: Path, cuda: str) -> Path:
    """Build a wheel."""
    # PTX alone: the installation that these tests run on was compiled for every architecture.
    defined = {"MEGARL_CUDA": cuda, "CMAKE_CUDA_ARCHITECTURES": "90-virtual"}
    options = ["-C", f"build-dir={tmp_path / 'build'}"]
    for name, value in defined.items():
        options += ["-C", f"cmake.define.{name}={value}"]
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*command, *options, str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    return wheel


def installed(tmp_path: Path, wheel: Path) -> Path:
    """Install a wheel in a new environment, beside the libraries of this one; return its command."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Only the folder is added: the .pth files in it, among them the one of the checkout, are not read.
    (packages / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return python.with_name("megarl")


def said(command: Path, *words: str) -> str:
    """Run the command in a folder outside the repository; return what it prints."""
    folder = command.parents[2] / "elsewhere"
    folder.mkdir(exist_ok=True)
    return subprocess.run([str(command), *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("cuda", ["OFF", pytest.param("ON", marks=pytest.mark.soak)])
def test_wheel(tmp_path: Path, cuda: str) -> None:
    if cuda == "ON" and not shutil.which("nvcc"):
        pytest.skip("nvcc is not on the PATH")
    wheel = wheel_of(tmp_path, cuda)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "wheel")
    (extension,) = (tmp_path / "wheel" / "megarl").glob("_C*.so")
    assert (tmp_path / "wheel" / "megarl" / "_configs" / "train.yaml").exists()
    loaded = subprocess.run([sys.executable, "-c", LOAD, str(extension)], check=True, capture_output=True, text=True)
    has_cuda, state = loaded.stdout.strip().split(" ", 1)
    assert has_cuda == str(cuda == "ON")
    assert state.startswith("built by nvcc" if cuda == "ON" else "not built: MEGARL_CUDA=OFF"), state
    if cuda == "OFF":
        command = installed(tmp_path, wheel)
        assert said(command, "--version") == f"megarl {megarl.__version__}\n"
        assert '"name": "quickstart"' in said(command, "config", "experiment=quickstart")


@pytest.mark.soak
def test_the_main_job_runs_from_a_wheel(tmp_path: Path) -> None:
    command = installed(tmp_path, wheel_of(tmp_path, "OFF"))
    small = ["trainer.steps=2", "trainer.warm_start.steps=20", "taskset.eval_size=20"]
    said(command, "train", "experiment=quickstart", *small)
    assert (tmp_path / "elsewhere" / "runs" / "quickstart" / "hf" / "config.json").is_file()
