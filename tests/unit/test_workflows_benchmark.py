"""benchmarks/workflows.py: megarl takes the settings of every arm, and a right teacher of its rooms has full reward."""

from __future__ import annotations

from itertools import islice

import jobs
import workflows
from look.score import compute_score

from megarl.config import compose
from megarl.tasks.tools import FORMATS
from megarl.tasks.tools.functions import tools_of


def test_settings(tmp_path):
    for name, arm in workflows.ARMS.items():
        overrides = [*workflows.COMMON, *workflows.settings_of(tmp_path, name, 1), "run.dir=-"]
        config = compose(jobs.last_of_each(overrides))
        assert config.rollout.workflow == name and config.trainer.steps == arm.steps


def test_rooms(tmp_path):
    config = compose([*workflows.COMMON, *workflows.STARTS["rooms"].settings, f"run.dir={tmp_path}"])
    look = tools_of(config.rollout)["look"]
    questions = {}
    for split in ("train", "eval"):
        drawn = list(islice(workflows.rooms(0, split), 50))
        questions[split] = {str(task.prompt) for _, task in drawn}
        for drawer, task in drawn:
            (call,) = FORMATS["hermes"].parse(workflows.call_of(drawer))[1]
            look.check(call.arguments)
            assert compute_score("look", str(look.call(call.arguments, task)), task.ground_truth) == 1.0
    assert not questions["train"] & questions["eval"]
