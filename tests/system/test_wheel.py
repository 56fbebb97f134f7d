"""A wheel with and one without CUDA kernels: both build, carry the settings, and import on a machine without a GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LOAD = """
import importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location("megarl._C", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
x = torch.arange(10.0)
digest = torch.empty(1, dtype=torch.int64)
module.cpu.digest(x.data_ptr(), 4, [10], [1], 0, [1], digest.data_ptr(), 1)
from megarl import ops
assert int(digest) % 2**64 == ops.slice_digest(x, start=(0,), shape=(10,))
print(hasattr(module, "cuda"), module.CUDA_STATE)
"""


@pytest.mark.slow
@pytest.mark.parametrize("cuda", ["OFF", "ON"])
def test_wheel(tmp_path: Path, cuda: str) -> None:
    if cuda == "ON" and shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on the PATH")
    options = ["-C", f"cmake.define.MEGARL_CUDA={cuda}", "-C", f"build-dir={tmp_path / 'build'}"]
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), *options, str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "wheel")
    (extension,) = (tmp_path / "wheel" / "megarl").glob("_C*.so")
    assert (tmp_path / "wheel" / "megarl" / "_configs" / "train.yaml").exists()
    loaded = subprocess.run([sys.executable, "-c", LOAD, str(extension)], check=True, capture_output=True, text=True)
    has_cuda, state = loaded.stdout.strip().split(" ", 1)
    assert has_cuda == str(cuda == "ON")
    assert state.startswith("built by nvcc" if cuda == "ON" else "not built: MEGARL_CUDA=OFF"), state
