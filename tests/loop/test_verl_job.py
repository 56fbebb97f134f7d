"""Imported algorithms of verl's published commands train the quickstart's model for a step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.config.load import from_dict, to_dict
from megarl.config.schema import Config
from tests.system.jobs import START_S, TINY, Job
from tests.unit.test_import_verl import COMMANDS, imported, path_of

pytestmark = [pytest.mark.timeout(3 * START_S), pytest.mark.soak]
NOT_AT_TOY_SIZE = (
    "algorithm.group_size", "trainer.optimizer.lr", "critic.optimizer.lr", "model.path", "model.dtype", "parallel.",
    "rollout.", "taskset.", "run.", "critic.path", "critic.parallel", "critic.warmup_steps", "reference.parallel",
    "reward_model.", "reward.weight", "reward.path", "trainer.tasks_per_step", "trainer.updates_per_step",
    "trainer.steps", "trainer.checkpoint_interval", "trainer.eval_interval", "trainer.trackers", "model.fusions",
    "model.moe_dispatcher", "model.router", "model.train_vision_tower", "model.lora.targets", "model.lora.path",
)  # fmt: skip
"""Settings of the machine, the model and the rows, which are the quickstart's here."""
WHOLE = [command for command in COMMANDS if imported(command).is_whole]


def overrides(settings: dict[str, Any]) -> Iterator[str]:
    """Overrides of the imported settings that a toy job has too."""
    toy = {name: value for name, value in settings.items() if not name.startswith(NOT_AT_TOY_SIZE)}
    name = toy.pop("algorithm.name")
    if "model.lora.rank" in toy:
        toy["model.lora.rank"] = min(toy["model.lora.rank"], 64)  # of layers of 128
    yield f"algorithm={name}"
    for setting, value in toy.items():
        yield f"{setting}={json.dumps(value)}"


@pytest.mark.parametrize("command", WHOLE, ids=path_of)
def test_a_step(command: str, tmp_path: Path) -> None:
    found = imported(command).settings
    group = min(4, max(2, found["algorithm.group_size"])) if found["algorithm.name"] != "ppo" else 2
    small = ("trainer.steps=1", "trainer.eval_interval=0", f"algorithm.group_size={group}", "taskset.eval_size=8")
    job = Job(tmp_path / "run", (*TINY, *small, *overrides(found)))
    try:
        assert job.start().wait(2 * START_S) == 0, job.output.read_text()[-2000:]
    finally:
        job.clean_up()
    assert job.steps() == [1]
    resolved = json.loads((tmp_path / "run" / "resolved.json").read_text())
    written = to_dict(from_dict(Config, resolved))
    for name, value in found.items():
        if name.startswith("algorithm.") and not name.startswith(NOT_AT_TOY_SIZE):
            tree: Any = written
            for part in name.split("."):
                tree = tree[part]
            assert tree == value, name
