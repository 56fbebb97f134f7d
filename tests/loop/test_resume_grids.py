"""A checkpoint written in the background while training goes on, and what other grids make of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import ParallelConfig
from tests.parallel.grid import run_grid
from tests.parallel.models import save_tiny_qwen3
from tests.parallel.test_megatron_on_cpu import make_actor, parts, sft_steps, weights_digest

STEP = 2
SAVING, LOADING = ParallelConfig(tp=2, pp=2), {"tp1pp2": ParallelConfig(pp=2), "dp2": ParallelConfig(dp=2)}


def random_numbers() -> list[list[float]]:
    """The next numbers of every generator."""
    import random

    import numpy as np
    import torch
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        cut = torch.rand(2).tolist()
    return [[random.random()], np.random.random(2).tolist(), torch.rand(2).tolist(), cut]


def save_beside_training(rank: int, model: str, folder: str) -> dict[str, Any]:
    """Runs in each rank: a snapshot after two steps, three more steps before it counts, and the same steps again from
    it."""
    from megarl.weights.checkpoint.training import state

    actor = make_actor(model, SAVING)
    sft_steps(actor, range(STEP))
    random_numbers()
    pending = state.begin(Path(folder), STEP, parts(actor), state.Manifest({"phase": "rl"}, attempt=3), background=True)
    numbers, going_on = random_numbers(), sft_steps(actor, range(STEP, STEP + 3))
    counted = state.latest(Path(folder)) is not None
    digest = weights_digest(actor)
    found = pending.finish(keep=1)
    shutil.copytree(found, f"{folder}/copy_{rank}")  # no rank is done before all have it
    state.load(found, parts(actor))
    again = sft_steps(actor, range(STEP, STEP + 3))
    put = state.put_random_states(found, parts(actor))
    return {
        "going_on": (going_on, digest), "again": (again, weights_digest(actor)), "counted": counted,
        "numbers": numbers, "numbers_again": random_numbers(), "put": put,
    }  # fmt: skip


def resume(rank: int, model: str, folder: str) -> dict[str, tuple[Any, bool]]:
    """Runs in each rank: the next steps from the checkpoint on every other grid, one after the other."""
    from megatron.core import parallel_state

    from megarl.weights.checkpoint.training import state

    found = {}
    for name, parallel in LOADING.items():
        actor = make_actor(model, parallel)
        newest = state.latest(Path(folder))
        assert newest is not None
        state.load(newest, parts(actor))
        found[name] = sft_steps(actor, range(STEP, STEP + 3)), state.put_random_states(newest, parts(actor))
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_qwen3(tmp_path_factory.mktemp("qwen3"), layers=2))


@pytest.fixture(scope="module")
def saved(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_grid(4, save_beside_training, model, str(folder))


def test_the_snapshot_is_of_its_moment(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    """What training changed while it was written is not in it: going on from it gives the same bits, and the same
    random numbers."""
    folder, ranks = saved
    for rank in ranks:
        assert not rank["counted"], "the manifest comes last"
        assert rank["again"] == rank["going_on"]
        assert rank["put"] and rank["numbers_again"] == rank["numbers"]
    assert ranks[0]["numbers"][3] != ranks[1]["numbers"][3], "tensor-parallel ranks draw differently what they cut"
    assert sorted(p.name for p in folder.iterdir() if not p.name.startswith("copy")) == [
        "global_step_2",
        "latest_checkpointed_iteration.txt",
    ]


def test_the_manifest_knows_every_file(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    from megarl.weights.checkpoint.training import manifest

    checkpoint = saved[0] / "global_step_2"
    listed = manifest.read_manifest(checkpoint)["files"]
    there = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert there == listed.keys() | {"state.json"}
    assert {f"rng_{rank}.json" for rank in range(4)} | {
        "actor/.metadata",
        "actor/common.pt",
        "actor/__3_0.distcp",
    } <= listed.keys()
    assert manifest.fault_of_files(checkpoint) is None


def test_the_next_losses_on_other_grids(model: str, saved: tuple[Path, list[dict[str, Any]]]) -> None:
    def totals(ranks: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
        """(loss, gradient norm) of each step: ranks have their part of the loss, and all the norm."""
        return [(sum(loss for loss, _ in step), step[0][1]) for step in zip(*ranks, strict=True)]

    folder, ranks = saved
    wanted = totals([rank["going_on"][0] for rank in ranks])
    resumed = run_grid(2, resume, model, str(folder))
    for name in LOADING:
        for (loss, norm), (want, want_norm) in zip(totals([rank[name][0] for rank in resumed]), wanted, strict=True):
            assert loss == pytest.approx(want, rel=1e-5)
            assert norm == pytest.approx(want_norm, rel=1e-5)
        assert not any(rank[name][1] for rank in resumed), "another grid has other generators"


def failures(rank: int, model: str, folder: str) -> dict[str, str]:
    """Runs alone: what is said of saves that must not count, with a finished checkpoint before them."""
    import os
    import resource
    import signal

    from megarl.core.errors import FencedError, JobError
    from megarl.weights.checkpoint.training import state, writer

    root, actor = Path(folder), make_actor(model, ParallelConfig())
    state.save(root, 1, parts(actor), {"phase": "rl"}, keep=2)
    said = {}

    def taken_over() -> None:
        raise FencedError("attempt 2 has taken over")

    def attempt(name: str, step: int, spoil: Any, *, fence: Any = lambda: None) -> None:
        try:
            pending = state.begin(
                root, step, parts(actor), state.Manifest({"phase": "rl"}, 1), background=True, fence=fence
            )
            spoil(pending)
            pending.finish(2)
        except JobError as error:
            said[name] = f"{type(error).__name__}: {error}"
        newest = state.latest(root)
        assert newest is not None and newest.name == "global_step_1", name
        if name != "fenced at the end":  # whose files a later save removes
            assert len(list(root.iterdir())) == 2, name

    attempt("fenced at the beginning", 1, lambda pending: None, fence=taken_over)
    asked = iter([lambda: None, taken_over])
    attempt("fenced at the end", 2, lambda pending: None, fence=lambda: next(asked)())
    attempt("killed", 2, lambda pending: os.kill(writer.of_process().process.pid or 0, signal.SIGKILL))
    pid = writer.of_process().process.pid
    assert pid is not None
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, -1))  # the model's file has more bytes
    attempt("no room", 2, lambda pending: None)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
    found = state.save(root, 2, parts(actor), {"phase": "rl"}, keep=1)
    assert sorted(path.name for path in root.iterdir()) == [found.name, "latest_checkpointed_iteration.txt"]
    return said


def test_what_is_not_written_does_not_count(model: str, tmp_path: Path) -> None:
    (said,) = run_grid(1, failures, model, str(tmp_path))
    assert said["fenced at the beginning"] == said["fenced at the end"] == "FencedError: attempt 2 has taken over"
    unfinished = tmp_path / "global_step_2.attempt_1"
    assert (
        said["killed"]
        == f"JobError: {unfinished} cannot be written (rank 0: the process that writes it ended with status -9)"
    )
    assert said["no room"].startswith(f"JobError: {unfinished} cannot be written (rank 0: [Errno 27] File too large")
