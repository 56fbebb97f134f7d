"""Offline jobs, rank by rank without a supervisor: a NaN that is skipped or rolled back, and a disk that is full for a
while.

Their algorithm is a user's file, which spoils the loss of one rank, once, at a given update.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.buffer.store import Store
from megarl.config import compose
from megarl.weights.checkpoint.training.manifest import fault_of_files
from tests import disks
from tests.parallel.grid import run_grid
from tests.system.jobs import last_of_each

ALGORITHM = """
import dataclasses, os
from pathlib import Path
from megarl.learn.algorithms.supervised import SFT

CALLS = 0
AT, RANK = int(os.environ.get("SPOILED", "0")), "1"
FILL, UNTIL, BALLAST = (os.environ.get(name, "") for name in ("FILL", "UNTIL", "BALLAST"))

def loss(batch, config):
    global CALLS
    found = SFT.loss(batch, config)
    if not batch.logp.requires_grad or "RANK" not in os.environ:
        return found
    CALLS += 1
    if os.environ["RANK"] == "0" and BALLAST:
        if CALLS == int(FILL):
            free = os.statvfs(Path(BALLAST).parent)
            with open(BALLAST, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, (free.f_bavail - 64) * free.f_frsize)
        if CALLS == int(UNTIL):
            os.unlink(BALLAST)
    if CALLS == AT and os.environ["RANK"] == RANK:
        found = found._replace(total=found.total * float("nan"))
    return found

ALGORITHM = dataclasses.replace(SFT, name="spoiled", loss=loss)
"""
STEPS = 6


def overrides(folder: Path, run_dir: Path, *more: str) -> list[str]:
    files = [f"taskset.{split}={folder}/{split}.jsonl" for split in ("train", "eval")]
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    return last_of_each(
        [
            "experiment=sft",
            "parallel=dp2",
            *files,
            f"run.dir={run_dir}",
            f"algorithm.name={folder}/spoiled.py",
            f"model.path={run_dir}/model",
            *(f"model.from_scratch.{name}={value}" for name, value in shape.items()),
            f"trainer.steps={STEPS}",
            "trainer.tasks_per_step=16",
            "trainer.updates_per_step=2",
            "trainer.checkpoint_interval=2",
            "trainer.keep_checkpoints=9",
            "trainer.eval_interval=0",
            "trainer.optimizer.warmup_steps=0",
            *more,
        ]
    )


def run_ranks(rank: int, settings: list[str], environment: dict[str, str], attempt: int) -> str:
    """One trainer rank's whole life; what it raised."""
    os.environ.update(environment, MEGARL_ATTEMPT=str(attempt))
    from megarl import ops
    from megarl.core.errors import JobError
    from megarl.train.loop.course import Course
    from megarl.train.loop.offline import OfflineSteps
    from megarl.train.loop.rank import TrainerRank

    config = compose(settings)
    ops.use(config.trainer.kernels)
    try:
        with TrainerRank(config) as trainer:
            Course(trainer, OfflineSteps(trainer)).train()
    except JobError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and algorithm of all jobs."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "spoiled.py").write_text(ALGORITHM)
    write_rows(folder)
    return folder


def write_rows(folder: Path) -> None:
    """Write train.jsonl and eval.jsonl, sums with some answer."""
    dice = random.Random(1)
    for split, size in (("train", 80), ("eval", 8)):
        rows = [
            (f"{split} {dice.randint(10, 99)} + {dice.randint(10, 99)} =", str(dice.randint(1, 9999)))
            for _ in range(size)
        ]
        lines = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in rows]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def run(folder: Path, run_dir: Path, *more: str, attempt: int = 1, **environment: str) -> list[str]:
    """What each rank raised."""
    from megarl.run.run_dir.prepare import prepare_model

    settings = overrides(folder, run_dir, *more)
    run_dir.mkdir(exist_ok=True)
    prepare_model(compose(settings))
    (run_dir / "attempt").write_text(str(attempt))
    store = Store(compose(settings).store.url)
    store.begin_attempt(attempt)
    store.journal.open_job()
    store.close()
    return run_grid(2, run_ranks, settings, environment, attempt)


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [
        r for r in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()) if "training/global_step" in r
    ]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run_dir / "hf" / "model.safetensors")


def events(run_dir: Path, kind: str) -> list[Any]:
    store = Store(f"sqlite:///{run_dir}/store.db")
    found = [event["data"] for event in store.journal.events(kind)]
    store.close()
    return found


@pytest.fixture(scope="module")
def rolled_back(folder: Path) -> Path:
    """A job that went back in its fourth step."""
    assert run(folder, folder / "rollback", "trainer.update_filter.on_nonfinite=rollback", SPOILED="8") == ["", ""]
    return folder / "rollback"


def test_a_rollback_is_a_resume_with_other_rows(folder: Path, rolled_back: Path) -> None:
    """The same from the checkpoint that it went back to, by another start of the job."""
    run_dir, again = rolled_back, folder / "again"
    (event,) = events(run_dir, "rollback")
    assert (event["from_step"], event["to_step"]) == (
        3,
        2,
    ) and "step 4, update 2 of the actor: the loss is nan on rank 1" in event["why"]
    found = records(run_dir)
    assert [r["step"] for r in found] == list(range(1, STEPS + 1)), "each step is recorded once"
    assert [r["training/rollbacks"] for r in found] == [0, 0, 1, 1, 1, 1]
    assert all(r["training/skipped_updates"] == 0 for r in found)

    shutil.copytree(run_dir, again)
    for checkpoint in (again / "checkpoints").glob("global_step_*"):
        manifest = checkpoint / "state.json"
        state = json.loads(manifest.read_text())
        assert state["rollbacks"] == (1 if state["step"] > 2 else 0)
        if state["step"] > 2:
            shutil.rmtree(checkpoint)
        elif state["step"] == 2:
            manifest.write_text(json.dumps(state | {"rollbacks": 1}))
    shutil.rmtree(again / "hf")
    assert run(folder, again, attempt=2) == ["", ""]
    want, got = weights(run_dir), weights(again)
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
    took = ("timing_s/", "idle/", "perf/", "training/attempt")
    assert [{k: v for k, v in r.items() if not k.startswith(took)} for r in records(again)] == [
        {k: v for k, v in r.items() if not k.startswith(took)} for r in found
    ]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disks.small_disk(tmp_path / "small", "16m") as place:
        yield place


def test_a_skipped_update_and_a_disk_that_is_full_for_a_while(
    folder: Path, rolled_back: Path, small_disk: Path
) -> None:
    """The checkpoint of step 2 finds no room, that of step 4 does; update 7 is left out, which is half of step 4."""
    run_dir = folder / "full"
    run_dir.mkdir()
    (run_dir / "checkpoints").symlink_to(small_disk)
    assert run(folder, run_dir, SPOILED="7", FILL="2", UNTIL="6", BALLAST=str(small_disk / "ballast")) == ["", ""]
    found = records(run_dir)
    assert [r["training/skipped_updates"] for r in found] == [0, 0, 0, 1, 0, 0]
    failed = [r["checkpoint/failed"] for r in found]
    assert failed[:4] == [0, 1, 1, 1] and failed[4] >= failed[5], (
        "back to 0 when that of step 4 is written, beside the steps behind it"
    )
    assert all(math.isfinite(r["actor/loss"]) for r in found)
    same = [mine["actor/loss"] == other["actor/loss"] for mine, other in zip(found, records(rolled_back), strict=True)]
    assert same[:3] == [True, True, False], "behind a rollback the third step has other rows"
    assert sorted(path.name for path in small_disk.glob("global_step_*")) == [
        "global_step_0",
        "global_step_4",
        "global_step_6",
    ]
    (event,) = events(run_dir, "bad_update")
    assert (event["step"], event["update"], event["action"]) == (4, 1, "skip")
    assert all(bool(tensor.isfinite().all()) for tensor in weights(run_dir).values())


def test_a_disk_that_stays_full_ends_the_job_at_its_last_checkpoint(folder: Path, small_disk: Path) -> None:
    """That of step 1 may fail, that of the end may not; or none may."""
    run_dir = folder / "ends"
    run_dir.mkdir()
    (run_dir / "checkpoints").symlink_to(small_disk)
    short = ("trainer.steps=2", "trainer.checkpoint_interval=1", "trainer.async_checkpoint=false")
    said = run(folder, run_dir, *short, FILL="2", UNTIL="99", BALLAST=str(small_disk / "ballast"))
    assert said[0] == said[1] and said[0].startswith("DiskFullError: ") and "No space left on device" in said[0]
    assert [(r["step"], r["checkpoint/failed"]) for r in records(run_dir)] == [(1, 1), (2, 1)]
    assert fault_of_files(small_disk / "global_step_0") is None
    said = run(folder, run_dir, *short, "trainer.max_failed_checkpoints=1", attempt=2)
    assert "1 checkpoints in a row had no room (trainer.max_failed_checkpoints=1)" in said[0] and said[0] == said[1]
    assert sorted(path.name for path in small_disk.iterdir()) == [
        "ballast",
        "global_step_0",
        "latest_checkpointed_iteration.txt",
    ]
