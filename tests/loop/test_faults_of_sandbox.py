"""A job whose programs run at a faulty sandbox service trains the same model as one whose sandbox is whole.

Every third request fails, in more than 40 ways; no failure is a reward of 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megarl.sandbox import client
from tests.loop.faulty_sandbox import KEY, KINDS, FaultySandbox
from tests.loop.same_model import assert_same_model, steps
from tests.system.jobs import START_S, Job

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(3 * START_S)]
STEPS, TASKS = 2, 12
SETTINGS = (
    "experiment=quickstart",
    "taskset=code",
    "parallel=tp1",
    f"trainer.steps={STEPS}",
    f"trainer.tasks_per_step={TASKS}",
    "trainer.eval_interval=2",
    "trainer.checkpoint_interval=2",
    "trainer.warm_start.steps=50",
    "trainer.warm_start.batch_size=64",
    "trainer.warm_start.optimizer.decay_steps=50",
    "taskset.train_size=100",
    "taskset.eval_size=10",
    "taskset.warm_start_size=1000",
    "taskset.options.slip_percent=30",
    "algorithm.group_size=8",
)
FAULTY = ("reward.timeout_s=4", "reward.code.item_s=3", "reward.retries=8", "reward.max_kills=20")


@dataclass
class Runs:
    whole: Path
    faulty: Path
    front: FaultySandbox


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Both at a time: one with this machine's sandbox, one with the faulty service."""
    root = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch, FaultySandbox(root / "service.log") as front:
        patch.setenv(client.KEY_VARIABLE, KEY)
        whole = Job(root / "whole", SETTINGS).start()
        faulty = Job(root / "faulty", (*SETTINGS, *FAULTY, f"reward.code.url={front.url}")).start()
        try:
            for job in (whole, faulty):
                assert job.wait(2 * START_S) == 0, job.output.read_text()
            yield Runs(whole.run_dir, faulty.run_dir, front)
        finally:
            whole.clean_up()
            faulty.clean_up()


def test_no_episode_is_lost_and_none_trained_without_a_verdict(runs: Runs) -> None:
    for run_dir in (runs.whole, runs.faulty):
        for record in steps(run_dir):
            assert record["ends/finished"] == TASKS * 8 and record["reward/dropped_groups"] == 0
            assert record["reward/error_rate"] == 0 and 0 < record["critic/rewards/mean"] < 1
    assert sum(record["reward/code/retries"] for record in steps(runs.whole)) == 0
    assert len(runs.front.given) > 0.2 * STEPS * TASKS * 8


def test_every_kind_of_fault_has_happened(runs: Runs) -> None:
    assert len(KINDS) >= 40 and set(runs.front.given) == set(KINDS)


def test_a_fault_that_costs_a_verdict_is_the_sandbox_s(runs: Runs) -> None:
    """Never an exception that a malformed reply has raised somewhere else."""
    [log] = (runs.faulty / "logs").rglob("explorer.log")
    reasons = re.findall(r": reward (?:error|timeout): (.*); trying again", log.read_text())
    assert len(reasons) > 30
    assert {reason for reason in reasons if not re.match("SandboxError|no verdict within", reason)} == set()


def test_the_model_has_the_same_bits(runs: Runs) -> None:
    assert_same_model(runs.whole, runs.faulty, STEPS, TASKS * 8)
