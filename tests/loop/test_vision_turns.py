"""Jobs whose messages show images, of an environment and of an agent: engine and trainer agree on every token."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.buffer.store import Store
from megarl.core.schema import file_digest
from tests.loop import picture_agent, picture_game
from tests.loop.same_run import left_alone, steps_of
from tests.loop.test_vision_job import SETTINGS
from tests.system.jobs import START_S

pytestmark = pytest.mark.timeout(4 * START_S)
TURNS = ("trainer.steps=2", "rollout.max_trajectory_tokens=64", "trainer.warm_start.steps=30")
WORKFLOWS = {
    "environment": ("rollout.workflow=environment", f"rollout.environment={picture_game.__file__}"),
    "agent": ("rollout.workflow=agent", f"rollout.agent={picture_agent.__file__}", "rollout.agent_rewards=true"),
}


@pytest.mark.parametrize(
    "workflow",
    [pytest.param(name, marks=pytest.mark.soak if name == "agent" else ()) for name in WORKFLOWS],  # same turns
)
def test_engine_and_trainer_agree(tmp_path: Path, workflow: str) -> None:
    with left_alone(tmp_path / workflow, (*SETTINGS, *TURNS, *WORKFLOWS[workflow])) as run:
        steps = steps_of(run)
        assert len(steps) == 2 and all(0 < step["training/rollout_logp_diff_max"] < 1e-4 for step in steps)
        store = Store(f"sqlite:///{run}/store.db", read_only=True)
        found = store.groups.trajectories("train-000000")
        shown = [[len(turn.images) for turn in trajectory.turns if turn.author != "model"] for trajectory in found]
        whole = [t for t, images in zip(found, shown, strict=True) if images == [1, 1, 1]]
        assert whole, "some trajectories have seen every picture"
        files = store.tasks.images({trajectory.task_id for trajectory in found})
        beside = store.groups.images([trajectory.group_id for trajectory in found])
        for trajectory in whole:
            [own] = files[trajectory.task_id]
            expected = [own, picture_agent.turned(own), own]
            seen = [digest for turn in trajectory.turns for digest in turn.images]
            assert seen == [file_digest(file) for file in expected] and beside[seen[1]] == expected[1]
        store.close()
