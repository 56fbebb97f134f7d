"""A job whose episodes fail in 20 ways trains the same model as one without faults: failed episodes begin again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.explore.store import Store
from tests.loop import faulty_guess
from tests.system.jobs import START_S, Job

pytestmark = pytest.mark.timeout(4 * START_S)
STEPS, TASKS = 3, 16
SETTINGS = (
    "experiment=guess",
    f"trainer.steps={STEPS}",
    f"trainer.tasks_per_step={TASKS}",
    "trainer.updates_per_step=2",
    "trainer.eval_interval=3",
    "trainer.warm_start.steps=20",
    "taskset.train_size=100",
    "taskset.eval_size=20",
    "taskset.warm_start_size=1000",
    "rollout.retries=10",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A job without faults, and one of whose episodes every fifth fails."""
    root = tmp_path_factory.mktemp("faults")
    jobs = [
        Job(root / "whole", SETTINGS).start(),
        Job(root / "faulty", (*SETTINGS, f"rollout.environment={faulty_guess.__file__}")).start(),
    ]
    try:
        for job in jobs:
            assert job.wait(2 * START_S) == 0, job.output.read_text()
        yield jobs[0].run_dir, jobs[1].run_dir
    finally:
        for job in jobs:
            job.clean_up()


def steps(run_dir: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "actor/pg_loss" in record]


def test_no_episode_is_lost_and_none_trained_without_a_verdict(runs: tuple[Path, Path]) -> None:
    whole, faulty = map(steps, runs)
    assert sum(record["rollout/restarts"] for record in whole) == 0
    assert sum(record["rollout/restarts"] for record in faulty) > 0.2 * STEPS * TASKS * 8
    for record in whole + faulty:
        assert record["ends/finished"] == TASKS * 8 and record["reward/dropped_groups"] == 0


def test_every_kind_of_fault_has_happened(runs: tuple[Path, Path]) -> None:
    [log] = (runs[1] / "logs").rglob("explorer.log")
    text = log.read_text()
    for kind in faulty_guess.KINDS:
        words = type(kind).__name__ if isinstance(kind, BaseException) else faulty_guess.WORDS[kind]
        assert words in text, kind


def test_the_model_has_the_same_bits(runs: tuple[Path, Path]) -> None:
    first, second = ((run / "hf" / "model.safetensors").read_bytes() for run in runs)
    assert first == second
    stores = [Store(f"sqlite:///{run}/store.db", read_only=True) for run in runs]
    for step in range(STEPS):
        turns = [
            [[turn.token_ids.tolist() for turn in e.turns] for e in store.trajectories(f"train-{step:06d}")]
            for store in stores
        ]
        assert turns[0] == turns[1] and len(turns[0]) == TASKS * 8
    for store in stores:
        store.close()
