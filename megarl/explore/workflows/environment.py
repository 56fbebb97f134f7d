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
from megarl.explore.recording.model import RolloutModel
from megarl.explore.workflows.types import Workflow
from megarl.rewards.verdict import MAX_PARTS, NO_VERDICT

log = logging.getLogger(__name__)
PART = "turn_{}"
"""Part of the reward that a response got, counted from 1; of the first MAX_PARTS responses."""


def environment(make: MakeEnvironment, threads: EpisodeThreads) -> Workflow:
    """Workflow of episodes that ``make`` begins.

    The score is the sum of the rewards of all responses. An episode ends when the environment ends it, when a response
    is truncated, or when the trajectory has no room for another; the status is then ``wrong`` unless the environment
    has named a success. An exception of the environment is no verdict: the status is ``error``. Nor is a call past its
    limit. Where the environment asks for scores, a response without a verdict is the last one, and leaves the
    trajectory without one.
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
                    score = [verdict.own_score]  # weights of parts come at the end, once
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
    """Add an observation; False where it has no room. Raises EnvironmentFault for images that do not fit its text, or
    cannot be read."""
    try:
        return model.add("environment", seen.text, images=seen.images) is not None
    except (ValueError, DataError) as error:
        if seen.images:
            raise EnvironmentFault(str(error)) from error
        raise


async def _closed(episode: Episode) -> None:
    """Close an episode; a fault changes nothing of what it has given."""
    try:
        await episode.close()
    except EnvironmentFault as fault:
        log.warning("an environment did not close: %s", fault)


def _reward(rewards: list[float], last: Observation) -> Reward:
    score = sum(rewards)
    success = last.success if last.success is not None else last.done and score >= 1.0
    parts = {PART.format(i + 1): reward for i, reward in enumerate(rewards[:MAX_PARTS])}
    return Reward(score, "ok" if success else "wrong", parts)
