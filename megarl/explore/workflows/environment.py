"""Responses and observations in turn, until the episode ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from megarl.core.errors import describe
from megarl.core.schema import Reward, Task
from megarl.explore.environments import Environment, EnvironmentFault, MakeEnvironment, Observation
from megarl.explore.workflows.types import RolloutModel, Workflow

log = logging.getLogger(__name__)
T = TypeVar("T")
PART = "turn_{}"
"""Part of the reward that a response got, counted from 1."""


def environment(make: MakeEnvironment) -> Workflow:
    """Workflow of episodes that ``make(task)`` begins.

    The score is the sum of the rewards of all responses. An episode ends when the environment ends it, when a response
    is truncated, or when the trajectory has no room for another; the status is then ``wrong`` unless the environment
    has named a success. An exception of the environment is no verdict: the status is ``error``.
    """

    async def workflow(task: Task, model: RolloutModel) -> None:
        model.ask(task)
        rewards: list[float] = []
        episode: Environment | None = None
        try:
            episode = await _called(make, task)
            while True:
                response = await model.generate()
                seen = await _called(_step, episode, model.text(response))
                rewards.append(float(seen.reward))
                if seen.done or response.finish_reason != "stop" or model.add("environment", seen.text) is None:
                    break
            model.finish(_reward(rewards, seen))
        except EnvironmentFault as fault:
            model.fail(str(fault), fault.cause)
        finally:
            if episode is not None:
                await _closed(episode)

    return workflow


def _step(episode: Environment, response: str) -> Observation:
    seen = episode.step(response)
    if not isinstance(seen, Observation):
        raise TypeError(f"step must return an Observation, got {seen!r:.60}")
    return seen


async def _called(function: Callable[..., T], *args: Any) -> T:
    """Call in a thread. Raises EnvironmentFault."""
    return await asyncio.to_thread(_guarded, function, *args)


def _guarded(function: Callable[..., T], *args: Any) -> T:
    """Call foreign code, whose exceptions stop here: SystemExit would end the process, StopIteration an await."""
    try:
        return function(*args)
    except EnvironmentFault:
        raise
    except BaseException as error:
        raise EnvironmentFault(describe(error)) from error


async def _closed(episode: Environment) -> None:
    """Close an episode; a fault changes nothing of what it has given."""
    try:
        await _called(episode.close)
    except EnvironmentFault as fault:
        log.warning("an environment did not close: %s", fault)


def _reward(rewards: list[float], last: Observation) -> Reward:
    score = sum(rewards)
    success = last.success if last.success is not None else last.done and score >= 1.0
    parts = {PART.format(i + 1): reward for i, reward in enumerate(rewards)}
    return Reward(score, "ok" if success else "wrong", parts)
