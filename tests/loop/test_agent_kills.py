"""Whoever is killed, at whatever moment, a job whose trajectories are an agent's trains every task of its plan once, in
whole groups, and what it learns is what a job learns that was left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.buffer.store import Store
from tests.loop.random_kills import killed_at_random
from tests.loop.same_model import assert_same_model
from tests.loop.same_run import left_alone
from tests.system.jobs import START_S

KILLS, STEPS, TASKS, MEMBERS = 50, 60, 8, 4
LIMIT_S = 15.0 * STEPS
"""Of a job: one that is left alone takes four seconds a step on a slow machine."""
VICTIMS = ("explorer", "reward", "engine", "trainer 0")
GUESS = Path(__file__).parents[2] / "configs" / "agents" / "guess.py"
VERIFIED = """

play = run


async def run(*arguments):
    await play(*arguments)
"""
"""Leaves the score to the verifier, so that reward workers have work."""
SCORER = """
import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.01)
    return float(solution_str.strip() == ground_truth)
"""
SETTINGS = (
    "experiment=guess",
    f"trainer.steps={STEPS}",
    f"trainer.tasks_per_step={TASKS}",
    f"algorithm.group_size={MEMBERS}",
    "trainer.updates_per_step=1",
    "trainer.checkpoint_interval=1",
    "trainer.eval_interval=0",
    "trainer.warm_start.steps=20",
    "taskset.train_size=600",
    "taskset.eval_size=4",
    "taskset.warm_start_size=1000",
    "rollout.workflow=agent",
)


def tasks_of(run_dir: Path) -> list[list[str]]:
    """Tasks of the groups that each step was the first to train on."""
    store = Store(f"sqlite:///{run_dir}/store.db", read_only=True)
    found = []
    for step in range(STEPS):
        groups = [group.group_id for group in store.replays.consumed(step, step + 1)]
        members = [store.groups.read([group]) for group in groups]
        assert all([e.index for e in group] == list(range(MEMBERS)) for group in members)
        found.append([group[0].task_id for group in members])
    store.close()
    return found


@pytest.mark.soak
@pytest.mark.timeout(KILLS * START_S)
def test_fifty_kills(tmp_path: Path) -> None:
    agent, scorer = tmp_path / "agent.py", tmp_path / "scorer.py"
    agent.write_text(GUESS.read_text() + VERIFIED)
    scorer.write_text(SCORER)
    settings = [*SETTINGS, f"rollout.agent={agent}", f"reward.path={scorer}"]
    killed = killed_at_random(tmp_path / "killed", settings, VICTIMS, KILLS, 1, 3.0, further=1, limit_s=LIMIT_S)
    with left_alone(tmp_path / "whole", settings, LIMIT_S) as whole, killed as (job, kills):
        assert kills == KILLS
        trained = tasks_of(job.run_dir)
        assert [len(groups) for groups in trained] == [TASKS] * STEPS
        every = [task for groups in trained for task in groups]
        assert len(set(every)) == len(every), "a task of one pass over the tasks was trained twice"
        assert trained == tasks_of(whole)
        assert_same_model(whole, job.run_dir, STEPS, TASKS * MEMBERS)
