"""Several grids in one world: each model computes the very bits that it computes alone in its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.config.schema import ParallelConfig
from tests.parallel.families import save
from tests.parallel.grid import run_grid
from tests.parallel.models import save_tiny_qwen3

TP2 = ParallelConfig(tp=2)
TP2_SP = ParallelConfig(tp=2, sequence_parallel=True)
PP2 = ParallelConfig(pp=2)
DP2 = ParallelConfig(dp=2)
EP2 = ParallelConfig(dp=2, ep=2)
TOGETHER = {
    "tp2+dp2+pp2": (TP2_SP, DP2, PP2),
    "pp2+tp2+dp2": (PP2, TP2_SP, DP2),  # the first grid is the one that Megatron was made with
    "experts": (EP2, TP2_SP),
}
STEPS = 3


def draws() -> list[torch.Tensor]:
    """Numbers of the default generator and of what tensor parallelism cuts."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        inside = torch.rand(3)
    return [torch.rand(3), inside]


def result(trainee: Any, seed: int) -> dict[str, Any]:
    norm, outputs = trainee.step(seed)
    return {"norm": norm, "outputs": outputs, "draws": draws(), "weights": trainee.snapshot()}


def alone(rank: int, path: str, parallel: ParallelConfig, role: str) -> list[dict[str, Any]]:
    from megarl.learn.parallel import process_groups
    from tests.parallel.trainee import Trainee

    process_groups.initialize(parallel, seed=1)
    trainee = Trainee(Path(path), parallel, "lm" if role == "actor" else "score", score="zeros")
    return [result(trainee, seed) for seed in range(STEPS)]


def together(rank: int, path: str, grids: tuple[ParallelConfig, ...]) -> list[list[dict[str, Any]]]:
    """The first is the actor on the grid that ``initialize`` made; critics on the others take turns with it."""
    from megarl.learn.parallel import process_groups
    from tests.parallel.trainee import Trainee

    assert process_groups.initialize(grids[0], seed=1) == process_groups.position()
    made = [
        process_groups.Grid.initialized(grids[0]),
        *(process_groups.Grid(parallel, seed=1) for parallel in grids[1:]),
    ]
    trainees = []
    for number, grid in enumerate(made):
        with grid.active() as position:
            assert position == process_groups.position()
            trainees.append(Trainee(Path(path), grid.parallel, "score" if number else "lm", score="zeros"))
    found: list[list[dict[str, Any]]] = [[] for _ in made]
    for seed in range(STEPS):
        for number in (range(len(made)), reversed(range(len(made))))[seed % 2]:  # no fixed predecessor
            with made[number].active():
                found[number].append(result(trainees[number], seed))
    return found


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two nested results are not equal to the bit."""
    if isinstance(a, torch.Tensor):
        return [] if torch.equal(a, b) else [where]
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        return [line for key in a for line in differences(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, list):
        assert len(a) == len(b), where
        return [line for i, (x, y) in enumerate(zip(a, b, strict=True)) for line in differences(x, y, f"{where}/{i}")]
    return [] if a == b else [where]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.soak) if case == "pp2+tp2+dp2" else case for case in TOGETHER]
)
def test_models_that_take_turns_compute_what_they_do_alone(tmp_path: Path, case: str) -> None:
    path = save("qwen3_moe", tmp_path / "m") if case == "experts" else save_tiny_qwen3(tmp_path / "m", tied=True)
    answers = run_grid(2, together, str(path), TOGETHER[case])
    for number, parallel in enumerate(TOGETHER[case]):
        expected = run_grid(2, alone, str(path), parallel, "critic" if number else "actor")
        for rank in range(2):
            found = answers[rank][number]
            assert found[0]["weights"].keys() == found[-1]["weights"].keys()
            assert not differences(found, expected[rank], f"rank {rank} of {parallel}")
            assert differences(found[0]["weights"], found[-1]["weights"]), "nothing was learned"


def nesting(rank: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as tracker

    from megarl.learn.parallel import process_groups

    first = process_groups.initialize(TP2, seed=1)

    def state() -> tuple[Any, ...]:
        names = [name for name in vars(parallel_state) if name.isupper() and name != "_GLOBAL_MEMORY_BUFFER"]
        return (
            *(id(getattr(parallel_state, name)) for name in names),
            id(tracker._CUDA_RNG_STATE_TRACKER),
            *torch.get_rng_state().tolist(),
        )

    before = state()
    dp2, pp2 = process_groups.Grid(DP2, seed=2), process_groups.Grid(PP2, seed=3)
    tp2 = process_groups.Grid.initialized(TP2)
    assert state() == before and process_groups.position() == first == tp2.position
    assert (dp2.position.dp_rank, dp2.position.tp_rank) == (rank, 0)
    assert (pp2.position.pp_rank, pp2.position.is_first_stage, pp2.position.is_last_stage) == (
        rank,
        rank == 0,
        rank == 1,
    )
    with dp2.active() as outer:
        assert outer == dp2.position and parallel_state.get_data_parallel_world_size() == 2
        inside = state()
        with pp2.active():
            assert parallel_state.get_pipeline_model_parallel_world_size() == 2
            with pp2.active(), dp2.active(), tp2.active():
                assert parallel_state.get_tensor_model_parallel_world_size() == 2
            assert parallel_state.get_data_parallel_world_size() == 1
        assert state() == inside
        with pytest.raises(RuntimeError, match="on the way"), tp2.active():
            raise RuntimeError("on the way")
        assert state() == inside
    assert state() == before
    drawn = []
    for _ in range(2):
        with dp2.active():
            drawn.append(draws())
            first_in = torch.get_rng_state()
        with dp2.active():
            assert torch.equal(torch.get_rng_state(), first_in), "drawing goes on where it stopped"
    assert not torch.equal(drawn[0][0], drawn[1][0]) and not torch.equal(drawn[0][1], drawn[1][1])
    assert state() == before


def test_grids_nest_and_leave_nothing_behind() -> None:
    run_grid(2, nesting)


def late(rank: int) -> None:
    from megarl.learn.parallel import process_groups

    process_groups.initialize(DP2, seed=1)
    if rank == 1:
        time.sleep(1.0)
        dist.distributed_c10d._get_default_store().add("late", 1)


def test_a_rank_may_ask_the_store_after_the_others_have_returned() -> None:
    """Rank 0 has the store."""
    run_grid(2, late)


def unmade(rank: int) -> tuple[str, bool]:
    """A grid that cannot be made leaves the one before it in place."""
    from megatron.core import parallel_state

    from megarl.learn.parallel import process_groups

    process_groups.initialize(TP2, seed=1)
    try:
        process_groups.Grid(ParallelConfig(tp=2, dp=2), seed=1)
    except ValueError as error:
        return str(error), parallel_state.get_tensor_model_parallel_world_size() == 2
    return "", False


def test_a_grid_of_another_size_is_refused() -> None:
    for message, kept in run_grid(2, unmade):
        assert "WORLD_SIZE=2 is not" in message and kept
