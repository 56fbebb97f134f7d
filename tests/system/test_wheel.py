"""A wheel with and one without CUDA kernels: both build, carry the settings, and import on a machine without a GPU.

The one with CUDA kernels is built in `make soak`: what `make test` itself installs is built so where nvcc is.
"""

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
table = torch.empty(module.DIGEST_BOX_BYTES, dtype=torch.uint8)
pieces = module.digest_table([x.data_ptr(), 4, 0, 1, 10, 1, 1], 1, table.data_ptr())
module.cpu.digests(table.data_ptr(), 1, pieces, digest.data_ptr(), 1)
from megarl import ops
assert int(digest) % 2**64 == ops.slice_digest(x, start=(0,), shape=(10,))
print(hasattr(module, "cuda"), module.CUDA_STATE)
"""


@pytest.mark.slow
@pytest.mark.parametrize("cuda", ["OFF", pytest.param("ON", marks=pytest.mark.soak)])
def test_wheel(tmp_path: Path, cuda: str) -> None:
    if cuda == "ON" and not shutil.which("nvcc"):
        pytest.skip("nvcc is not on the PATH")
    # PTX alone: the installation that these tests run on was compiled for every architecture.
    defined = {"MEGARL_CUDA": cuda, "CMAKE_CUDA_ARCHITECTURES": "90-virtual"}
    options = ["-C", f"build-dir={tmp_path / 'build'}"]
    for name, value in defined.items():
        options += ["-C", f"cmake.define.{name}={value}"]
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*command, *options, str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "wheel")
    (extension,) = (tmp_path / "wheel" / "megarl").glob("_C*.so")
    assert (tmp_path / "wheel" / "megarl" / "_configs" / "train.yaml").exists()
    loaded = subprocess.run([sys.executable, "-c", LOAD, str(extension)], check=True, capture_output=True, text=True)
    has_cuda, state = loaded.stdout.strip().split(" ", 1)
    assert has_cuda == str(cuda == "ON")
    assert state.startswith("built by nvcc" if cuda == "ON" else "not built: MEGARL_CUDA=OFF"), state
