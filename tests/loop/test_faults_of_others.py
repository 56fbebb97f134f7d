"""Jobs of whose calls every fifth fails, each in 20 ways, train the same model as one without faults.

Faults of environments, agents, workflows and verifiers; failed trajectories begin again, failed verdicts too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.loop import faulty_agent, faulty_guess, faulty_verifier, faulty_workflow
from tests.loop.same_model import assert_same_model, steps
from tests.system.jobs import START_S, Job

pytestmark = pytest.mark.timeout(6 * START_S)
STEPS, TASKS = 2, 8
SETTINGS = (
    "experiment=guess",
    f"trainer.steps={STEPS}",
    f"trainer.tasks_per_step={TASKS}",
    "trainer.updates_per_step=2",
    "trainer.eval_interval=2",
    "trainer.warm_start.steps=20",
    "taskset.train_size=100",
    "taskset.eval_size=20",
    "taskset.warm_start_size=1000",
    "rollout.retries=10",
)
FAULTY = {
    "environment": (f"rollout.environment={faulty_guess.__file__}",),
    "agent": ("rollout.workflow=agent", f"rollout.agent={faulty_agent.__file__}", "rollout.agent_rewards=true"),
    "workflow": (
        f"rollout.workflow={faulty_workflow.__file__}",
        f"reward.path={faulty_verifier.__file__}",
        "reward.timeout_s=2",
        "reward.retries=3",
    ),
}
PAIRS = (("whole", "environment"), ("agent", "workflow"))
KINDS = {"environment": faulty_guess, "agent": faulty_agent, "workflow": faulty_workflow}


class Runs:
    """Folder of each job; a pair of jobs runs, beside each other, when the first of the two is asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._jobs = {name: Job(root / name, (*SETTINGS, *more)) for name, more in {"whole": (), **FAULTY}.items()}
        self._started = list[Job]()
        self._ended = set[str]()

    def __getitem__(self, name: str) -> Path:
        [pair] = (pair for pair in PAIRS if name in pair)
        if name not in self._ended:
            self._started += [self._jobs[one].start() for one in pair]
            for one in pair:
                assert self._jobs[one].wait(2 * START_S) == 0, self._jobs[one].output.read_text()
            self._ended.update(pair)
        return self._jobs[name].run_dir

    def clean_up(self) -> None:
        for job in self._started:
            job.clean_up()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """A job without faults, and those with."""
    root = tmp_path_factory.mktemp("faults")
    (root / "verdicts").mkdir()
    os.environ["MEGARL_TEST_FAULTS"] = str(root / "verdicts")
    made = Runs(root)
    try:
        yield made
    finally:
        del os.environ["MEGARL_TEST_FAULTS"]
        made.clean_up()


@pytest.mark.parametrize("name", ["whole", *FAULTY])
def test_no_episode_is_lost_and_none_trained_without_a_verdict(runs: Runs, name: str) -> None:
    records = steps(runs[name])
    restarts = sum(record["rollout/restarts"] for record in records)
    assert restarts == 0 if name == "whole" else restarts > 0.2 * STEPS * TASKS * 8
    for record in records:
        assert record["ends/finished"] == TASKS * 8 and record["reward/dropped_groups"] == 0


@pytest.mark.parametrize("name", FAULTY)
def test_every_kind_of_fault_has_happened(runs: Runs, name: str) -> None:
    [log] = (runs[name] / "logs").rglob("explorer.log")
    text = log.read_text()
    module: Any = KINDS[name]
    assert len(module.KINDS) >= 20
    for kind in module.KINDS:
        words = type(kind).__name__ if isinstance(kind, BaseException) else module.WORDS[kind]
        assert re.search(words, text), kind


def test_every_kind_of_fault_of_a_verifier_has_happened(runs: Runs) -> None:
    marks = {path.name for path in (runs["workflow"].parent / "verdicts").glob("kind_*")}
    assert len(faulty_verifier.KINDS) >= 20 and marks == {f"kind_{i}" for i in range(len(faulty_verifier.KINDS))}


@pytest.mark.parametrize("name", FAULTY)
def test_the_model_has_the_same_bits(runs: Runs, name: str) -> None:
    assert_same_model(runs["whole"], runs[name], STEPS, TASKS * 8)
