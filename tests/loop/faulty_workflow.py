"""The game of ``experiment=guess`` as a workflow of a user, of which every fifth run fails in one of 20 ways.

The verifier (``faulty_verifier``) gives the reward.
"""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any

import numpy as np

from megarl.core.schema import Reward, Task
from tests.loop.fault_kinds import EXCEPTIONS, EveryFifth

KINDS = (*EXCEPTIONS, asyncio.CancelledError(), "part", "name", "score", "ids")
WORDS = {"part": "reward", "name": "reward", "score": "reward", "ids": "ids"}
"""In the log, of those that are no exceptions."""
faults = EveryFifth(KINDS)


async def workflow(task: Task, model: Any) -> None:
    """Play one game."""
    fault, fails = faults.next()
    model.ask(task)
    if fails and faults.given // len(KINDS) % 2:
        fail(model, fault)
    number = int(task.ground_truth)
    for tries in range(int(task.extra_info["tries"]), 0, -1):
        response = await model.generate()
        if fails:
            fail(model, fault)
            return
        guesses = re.findall(r"-?\d+", model.text(response))
        if tries == 1 or not guesses or int(guesses[-1]) == number or response.finish_reason != "stop":
            return
        if model.add("environment", "higher" if int(guesses[-1]) < number else "lower") is None:
            return


def fail(model: Any, kind: Any) -> None:
    """Raise an exception, or give what cannot be recorded."""
    if isinstance(kind, BaseException):
        raise kind
    elif kind == "part":
        model.finish(Reward(0.0, "wrong", {"part": math.nan}))
    elif kind == "name":
        model.finish(Reward(0.0, "wrong", {"\ud800": 1.0}))
    elif kind == "score":
        model.finish(Reward("good", "ok"))  # type: ignore[arg-type]
    else:
        model.write("user", np.array([1.5, -1.0]))
