"""Every cell of the parity matrix (``tests/parallel/parity.py``) against plain transformers and torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parallel.parity import CELLS, MODELS, OPTIMIZER, TOLERANCE, Cell, Errors, folder_of, measure

pytestmark = pytest.mark.timeout(900)
"""The first test waits for all cells."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def errors(root: Path) -> dict[Cell, Errors]:
    return measure(root)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_updates_equal_plain_transformers(errors: dict[Cell, Errors], cell: Cell) -> None:
    found = errors[cell]
    assert found.loss < TOLERANCE
    assert found.norm < TOLERANCE
    assert found.gradient < TOLERANCE, f"{found.parameter}: gradient off by {found.gradient:.1e} of its largest entry"
    assert found.later < TOLERANCE


@pytest.mark.parametrize("model", MODELS)
def test_the_batch_shows_faults(root: Path, errors: dict[Cell, Errors], model: str) -> None:
    """Updates move the loss by far more than the tolerance, the gradient is clipped, and no gradient vanishes."""
    _, expected = torch.load(folder_of(root, model) / "parity.pt")
    moves = [abs(a - b) for a, b in zip(expected["losses"], expected["losses"][1:], strict=False)]
    assert min(moves) > 100 * TOLERANCE * max(expected["sizes"])
    assert expected["norms"][0] > 2 * OPTIMIZER.clip_grad
    assert all(bool(gradient.abs().max() > 0) for gradient in expected["gradients"].values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_updates_on_a_gpu_equal_plain_transformers_on_the_cpu(tmp_path: Path) -> None:
    """Float32 on both, whose sums a GPU takes in another order. Never run on hardware."""
    cells = [cell for cell in CELLS if cell.grid == "one process"]
    for cell, found in measure(tmp_path, cells, "nccl").items():
        assert found.worst < 10 * TOLERANCE, f"{cell}: {found}"
