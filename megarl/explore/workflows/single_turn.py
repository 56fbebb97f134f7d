"""Workflows of one question without tools: one response, the best of several, a second one after a wrong one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from megarl.core.errors import ConfigError
from megarl.core.schema import Reward, Task
from megarl.explore.recording.model import RolloutModel
from megarl.rewards.verdict import NO_VERDICT


async def single_turn(task: Task, model: RolloutModel) -> None:
    """Ask the task, and take the model's response as its answer."""
    model.ask(task)
    await model.generate()


N = 4
"""Default number of responses."""
MOST = 128
SETTINGS = ("n", "by")


async def best_of_n(task: Task, model: RolloutModel) -> None:
    """Sample ``n`` responses to the task and keep the one with the highest score, the first on a tie.

    Options: ``n``; ``by``, a data source whose verifier chooses (a judge, for instance) instead of the task's. The
    trajectory's reward always comes from the task's verifier. Responses without a verdict rank last.
    """
    by = model.options.get("by")
    model.ask(task)
    turns = await asyncio.gather(*(model.generate(after=0) for _ in range(int(model.options.get("n", N)))))
    rewards = await asyncio.gather(*(model.verify(by, of=turn) for turn in turns))
    scores = [_score(reward) for reward in rewards]
    model.keep(turns[scores.index(max(scores))])


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for unknown or invalid ``rollout.options``."""
    if others := sorted(set(options) - set(SETTINGS)):
        raise ConfigError(f"rollout.options.{others[0]} is not an option of best_of_n; options: {', '.join(SETTINGS)}")
    n, by = options.get("n", N), options.get("by")
    if isinstance(n, bool) or not isinstance(n, int) or not 2 <= n <= MOST:
        raise ConfigError(f"rollout.options.n={n!r} of best_of_n must be a whole number from 2 to {MOST}")
    if by is not None and not isinstance(by, str):
        raise ConfigError(f"rollout.options.by={by!r} of best_of_n must be the name of a data source")


def _score(reward: Reward) -> float:
    return float("-inf") if reward.status in NO_VERDICT else reward.score


FEEDBACK = "That is wrong. Try again."


async def reflect(task: Task, model: RolloutModel) -> None:
    """Ask the task; after a wrong response, tell the model and take a second response as the answer.

    The first response is final if it is right, has no verdict, was truncated, or leaves no room.
    """
    model.ask(task)
    first = await model.generate()
    if first.finish_reason != "stop" or (await model.verify()).status != "wrong":
        return
    if model.add("user", FEEDBACK) is not None:
        await model.generate()
