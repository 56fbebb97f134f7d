"""Every cell of the parity matrix (``tests/parallel/parity.py``) against plain transformers and torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.config.schema import TrainerConfig
from tests.conftest import SOAK
from tests.parallel.parity import (
    ALL_GRIDS,
    CELLS,
    GRIDS,
    MODELS,
    OPTIMIZER,
    PACKED_TOKENS,
    TOLERANCE,
    Cell,
    Errors,
    folder_of,
    in_every_run,
    measure,
    measure_world,
    prepare,
    worlds,
)
from tests.parallel.several import OBJECTIVES, TRAJECTORY, several

pytestmark = pytest.mark.timeout(900)
"""The first test of each batch waits for all its cells."""
MEASURED = [cell for cell in CELLS if SOAK or in_every_run(cell)]
BATCH = 24
"""Most cells of several grids that one set of processes measures. To start them costs more than a tiny model does, and
the first test of a batch waits for all of it."""


def batches() -> list[list[Cell]]:
    """Return batches of cells. A batch has all cells of one or more grids with equal world size."""
    found: list[list[Cell]] = []
    for world in worlds(MEASURED):
        found.append([])
        for grid in (name for name, parallel in ALL_GRIDS.items() if parallel.world_size == world):
            cells = [cell for cell in MEASURED if cell.grid == grid]
            if found[-1] and len(found[-1]) + len(cells) > BATCH:
                found.append([])
            found[-1] += cells
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the models, with what the reference makes of them."""
    folder = tmp_path_factory.mktemp("parity")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def errors_of(root: Path) -> Callable[[Cell], Errors]:
    """Errors of a cell; all cells of its batch are measured together, when the first is asked for."""
    found: dict[Cell, Errors] = {}
    together = batches()

    def of(cell: Cell) -> Errors:
        if cell not in found:
            (batch,) = (cells for cells in together if cell in cells)
            found.update(measure_world(root, ALL_GRIDS[cell.grid].world_size, batch))
        return found[cell]

    return of


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=() if in_every_run(cell) else pytest.mark.soak) for cell in CELLS], ids=str
)
def test_updates_equal_plain_transformers(errors_of: Callable[[Cell], Errors], cell: Cell) -> None:
    found = errors_of(cell)
    assert found.loss < TOLERANCE
    assert found.norm < TOLERANCE
    assert found.gradient < TOLERANCE, f"{found.parameter}: gradient off by {found.gradient:.1e} of its largest entry"
    assert found.later < TOLERANCE


@pytest.mark.parametrize("cell", [cell for cell in CELLS if not in_every_run(cell)], ids=str)
def test_a_cell_left_to_soak_has_one_like_it(cell: Cell) -> None:
    """On the same grid, and one with the same layout, with as much recomputation, of the same kind of trajectory."""
    kept = [c for c in CELLS if in_every_run(c) and c.several == cell.several]
    assert any(c.grid == cell.grid for c in kept)
    assert any((c.rows, c.recompute) == (cell.rows, cell.recompute) and GRIDS[c.grid].world_size > 1 for c in kept)
    assert any(c.model == cell.model and GRIDS[c.grid].world_size > 1 for c in kept)


@pytest.mark.parametrize("model", MODELS)
def test_the_batch_shows_faults(root: Path, model: str) -> None:
    """Updates move the loss by far more than the tolerance, the gradient is clipped, and no gradient vanishes."""
    _, expected = torch.load(folder_of(root, model) / "parity.pt", weights_only=False)
    moves = [abs(a - b) for a, b in zip(expected["losses"], expected["losses"][1:], strict=False)]
    assert min(moves) > 100 * TOLERANCE * max(expected["sizes"])
    assert expected["norms"][0] > 2 * OPTIMIZER.clip_grad
    assert all(bool(gradient.abs().max() > 0) for gradient in expected["gradients"].values())


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
def test_several_samples_are_one_trajectory_by_far(root: Path, model: str) -> None:
    """The losses differ from those of samples that count by themselves, and ratios are clipped."""
    _, expected = torch.load(folder_of(root, model) / "parity.pt", weights_only=False)
    for found, _, gradients in expected["several"]:
        assert abs(float(found.loss) - found.apart) > 100 * TOLERANCE * found.size
        assert 0 < found.metrics["actor/pg_clipfrac"][0] < 1
        assert all(bool(gradient.abs().max() > 0) for gradient in gradients.values())


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.several], ids=str)
def test_samples_of_a_trajectory_are_apart(root: Path, cell: Cell) -> None:
    """On different data-parallel ranks and in different micro-batches."""
    from megarl.learn.batching import micro_batches
    from megarl.learn.training.model import micro_batching_for

    batch, _ = torch.load(folder_of(root, cell.model) / "parity.pt", weights_only=False)
    settings = TrainerConfig(
        max_tokens_per_micro_batch=PACKED_TOKENS, packing=cell.rows is None, micro_batch_size=cell.rows or 1
    )
    parallel = GRIDS[cell.grid]
    limits, sequences = micro_batching_for(parallel, settings), several(batch, OBJECTIVES[0])
    places = [
        (rank, number, int(TRAJECTORY[row]))
        for rank in range(parallel.dp)
        for number, made in enumerate(micro_batches(sequences, limits, rank))
        for row in made.numbers
    ]
    assert len(places) == len(TRAJECTORY)
    for which in (slice(0, 1), slice(0, 2)) if parallel.dp > 1 else (slice(0, 2),):
        assert len({(*place[which], place[2]) for place in places}) > len(set(TRAJECTORY.tolist()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_updates_on_a_gpu_equal_plain_transformers_on_the_cpu(tmp_path: Path) -> None:
    """Float32 on both, whose sums a GPU takes in another order."""
    cells = [cell for cell in CELLS if cell.grid == "one process"]
    for cell, found in measure(tmp_path, cells, "nccl").items():
        assert found.worst < 10 * TOLERANCE, f"{cell}: {found}"
