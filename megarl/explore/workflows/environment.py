"""Responses and observations in turn, until the episode ends."""

from __future__ import annotations

import logging

from megarl.core.errors import DataError
from megarl.core.schema import Reward, Task
from megarl.explore.environments import (
    EnvironmentFault,
    Episode,
    EpisodeThreads,
    MakeEnvironment,
    Observation,
    asks_verifier,
)
from megarl.explore.environments.types import PARAMETERS
from megarl.explore.recording.model import RolloutModel, Workflow
from megarl.rewards.verdict import MAX_PARTS, NO_VERDICT

log = logging.getLogger(__name__)
PART = "turn_{}"
"""Part with the reward of a response, counted from 1; for the first MAX_PARTS responses."""


def environment(make: MakeEnvironment, threads: EpisodeThreads) -> Workflow:
    """Return the workflow of episodes begun by ``make``.

    The score is the sum of the rewards of all responses. An episode ends when the environment ends it, a response is
    truncated, or no room is left; the status is then ``wrong`` unless the environment reports a success. After an
    exception or timeout of the environment there is no verdict: the status is ``error``. If the environment takes
    scores, a response without a verdict ends the episode without a verdict.
    """

    async def workflow(task: Task, model: RolloutModel) -> None:
        rewards: list[float] = []
        episode = Episode(threads)
        try:
            first = await episode.begin(make, task.copy(), {name: getattr(model, name) for name in PARAMETERS})
            try:
                model.ask(task, *(() if first is None else (first.text, first.images)))
            except (ValueError, DataError) as error:
                raise EnvironmentFault(str(error)) from error
            while True:
                response = await model.generate()
                score: list[float] = []
                if asks_verifier(make):
                    verdict = await model.verdict(response)
                    if verdict.reward.status in NO_VERDICT:
                        return
                    score = [verdict.own_score]  # weights of parts are applied once, at the end
                seen = await episode.step(model.written(response), *score)
                rewards.append(float(seen.reward))
                model.rate(response, rewards[-1])
                if seen.done or response.finish_reason != "stop" or not _add(model, seen):
                    break
            if not seen.done and (more := await episode.end()):
                rewards[-1] += more
                model.rate(response, rewards[-1])
            model.finish(_reward(rewards, seen))
        except EnvironmentFault as fault:
            model.fail(str(fault), fault.cause)
        finally:
            await _closed(episode)

    return workflow


def _add(model: RolloutModel, seen: Observation) -> bool:
    """Add an observation; return False if it has no room. Raises EnvironmentFault for images that do not match its text
    or are unreadable."""
    try:
        return model.add("environment", seen.text, images=seen.images) is not None
    except (ValueError, DataError) as error:
        if seen.images:
            raise EnvironmentFault(str(error)) from error
        raise


async def _closed(episode: Episode) -> None:
    """Close an episode; a fault is only logged."""
    try:
        await episode.close()
    except EnvironmentFault as fault:
        log.warning("an environment did not close: %s", fault)


def _reward(rewards: list[float], last: Observation) -> Reward:
    score = sum(rewards)
    success = last.success if last.success is not None else last.done and score >= 1.0
    parts = {PART.format(i + 1): reward for i, reward in enumerate(rewards[:MAX_PARTS])}
    return Reward(score, "ok" if success else "wrong", parts)
