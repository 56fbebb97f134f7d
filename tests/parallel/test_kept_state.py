"""The state of ranks that nodes keep after each step: the steps after it have the same bits, from copies too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import OptimizerConfig, ParallelConfig
from megarl.core.errors import CheckpointError, JobError
from tests.conftest import SOAK
from tests.parallel.families import save
from tests.parallel.grid import run_grid
from tests.parallel.models import save_tiny_qwen3
from tests.parallel.test_megatron_on_cpu import parts, sft_steps
from tests.parallel.test_written import LR, actor_on

PAIRS = [
    ("qwen3", ParallelConfig(dp=2), "bfloat16"),
    ("qwen3", ParallelConfig(pp=2, vpp=2), "float32"),
    *[("qwen3", ParallelConfig(tp=2), "float32"), ("qwen3", ParallelConfig(cp=2), "bfloat16")][: 2 * SOAK],
]
FOURS = [("moe", ParallelConfig(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True), "float32")]


def kept(rank: int, root: str, case: Any, lost: list[int]) -> tuple[bool, str, str, list[int]]:
    """Runs in each rank, of two nodes: (steps after a resume have the same bits; errors of a second resume without any
    copy, and on another model; steps of the rank's states on its node)."""
    import torch.distributed as dist

    from megarl.weights.checkpoint.training.kept_state import KeptState
    from megarl.weights.checkpoint.training.manifest import KEPT

    actor = actor_on(Path(root), case)
    node = 2 * rank // dist.get_world_size()
    folder = Path(root) / f"node_{node}"
    checkpoint = Path(root) / KEPT / "global_step_2"
    checkpoint.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    states = KeptState(str(folder), node)
    for step in range(3):  # each slot is used again
        sft_steps(actor, range(step, step + 1), lr=LR)
        states.save(step, parts(actor))
    sft_steps(actor, range(3, 5), lr=LR)
    wanted = bits(actor)
    states.settle()
    held = sorted(json.loads(path.read_text())["step"] for path in folder.glob(f"rank_{rank}.*.json"))
    dist.barrier()
    if node in lost and rank in (0, dist.get_world_size() // 2):
        shutil.rmtree(folder)
        folder.mkdir()
    dist.barrier()
    actor.model.load_hf(Path(root) / case[0])
    actor.optimizer.restart(OptimizerConfig(lr=LR))
    again = KeptState(str(folder), node)  # as new processes have it
    again.load(checkpoint, parts(actor))
    again.put_random_states(checkpoint, parts(actor))
    sft_steps(actor, range(3, 5), lr=LR)
    same = all(torch.equal(a, b) for a, b in zip(bits(actor), wanted, strict=True))
    other = ""
    try:
        again.load(checkpoint, {"critic": parts(actor)["actor"]})
    except CheckpointError as error:
        other = str(error)
    dist.barrier()
    if rank == 0:
        for each in Path(root).glob("node_*/*"):
            each.unlink()
    dist.barrier()
    try:
        KeptState(str(folder), node).load(checkpoint, parts(actor))
    except JobError as error:
        return same, str(error), other, held
    return same, "", other, held


def bits(actor: Any) -> list[torch.Tensor]:
    from megarl.weights.checkpoint.training.kept_state import tensors_of

    return [tensor.clone() for tensor in tensors_of(parts(actor)).values()]


@pytest.mark.parametrize(
    ("world", "case", "lost"),
    [*[(2, case, [number % 2]) for number, case in enumerate(PAIRS)], *[(4, case, [1]) for case in FOURS]],
)
def test_steps_after_a_kept_state_have_the_same_bits(
    tmp_path: Path, world: int, case: tuple[str, ParallelConfig, str], lost: list[int]
) -> None:
    save_tiny_qwen3(tmp_path / "qwen3") if case[0] == "qwen3" else save("qwen3_moe", tmp_path / "moe")
    for same, error, other, held in run_grid(world, kept, str(tmp_path), case, lost):
        assert same
        assert held == [1, 2], "one is whole while the other is written"
        assert "is on no node any more" in error
        assert "has the state of another grid or model: critic/0/" in other
    assert not (tmp_path / "kept" / "global_step_2").exists()


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [([0, 0], [None, None]), ([0, 1], [1, 0]), ([0, 0, 1, 1, 2], [2, 3, 4, 4, 0]), ([0, 1, 1], [1, 0, 0])],
)
def test_receivers_are_on_the_next_node(nodes: list[int], wanted: list[int | None]) -> None:
    from megarl.weights.checkpoint.training.kept_state import receivers

    assert receivers(nodes) == wanted
