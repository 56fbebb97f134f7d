"""One trajectory of a claimed group: its workflow is run, begun again where it failed, and what it gave is scored."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from megarl.core import heartbeat
from megarl.core.config.rewards import RewardConfig
from megarl.core.errors import EngineError, JobError, describe
from megarl.core.schema import End, Reward, Task, Trajectory
from megarl.explore.rewards import Verdict
from megarl.explore.rewards.verdict import NO_VERDICT, weighed_reward
from megarl.explore.rollout.gather import LONGEST_RETRY_S, Gatherer
from megarl.explore.store import Claim
from megarl.explore.tasksets import ChatTokenizer
from megarl.explore.workflows import Workflow
from megarl.run.loop.recorder import Recorder, RenderedPrompt
from megarl.run.loop.rollout_clock import RolloutClock

log = logging.getLogger(__name__)


class Scorer(Protocol):
    """Part of ``rewards.RewardPool``."""

    async def score(self, task: Task, text: str, *, opened: bool = False) -> Verdict: ...


@dataclass
class ClaimedGroup:
    """A claimed group on its way."""

    claim: Claim
    prompt: RenderedPrompt
    seed: int | None
    clock: RolloutClock
    scored: dict[int, Trajectory] = field(default_factory=dict)


class TrajectoryRunner:
    """Makes trajectories.

    Args:
        limit: Most tokens of a trajectory; None: whatever fits the engine.
        retries: Times that a trajectory begins again after an error that is neither the policy's nor the verifier's.
        retry_s: First wait before that; waits double.
        rewards: Weights of the form, repetition and language of responses, for rewards that a workflow gives.
        wrong_ends: Ends that count as a wrong response (``rollout.wrong_ends``).
    """

    def __init__(
        self,
        workflow: Workflow,
        scorer: Scorer,
        tokenizer: ChatTokenizer,
        *,
        limit: int | None,
        retries: int,
        retry_s: float,
        rewards: RewardConfig | None = None,
        wrong_ends: Collection[End] = (),
    ) -> None:
        self._workflow = workflow
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._limit = limit
        self._retries = retries
        self._retry_s = retry_s
        self._rewards = rewards or RewardConfig()
        self._wrong_ends = wrong_ends
        self.scoring = 0
        """Responses that wait for their verdict."""

    async def run(
        self, group: ClaimedGroup, index: int, gatherer: Gatherer, generated: Callable[[], None]
    ) -> Trajectory:
        """Return a trajectory with its reward. ``generated`` is called once no token of it is missing.

        Raises EngineError and JobError.
        """
        recorder = await self._recorded(group, index, gatherer)
        generated()
        verdict = self._settled(recorder, await recorder.verdict(), group.claim.task)
        if verdict.message is not None:
            log.warning("task %s: reward %s: %s", group.claim.task.task_id, verdict.reward.status, verdict.message)
        message = {} if verdict.message is None else {"reward_message": verdict.message}
        return Trajectory(
            rollout_id=group.claim.rollout_id,
            task_id=group.claim.task.task_id,
            group_id=group.claim.group_id,
            index=index,
            group_size=group.claim.group_size,
            turns=recorder.recorded(),
            reward=verdict.reward,
            metadata={"reward": verdict.record} | message,
            cause=recorder.cause,
        )

    async def _recorded(self, group: ClaimedGroup, index: int, gatherer: Gatherer) -> Recorder:
        """Run the workflow until it fails no more, or has been begun again ``retries`` times."""
        retry = 0
        while True:
            recorder = Recorder(
                group.claim,
                index,
                group.prompt,
                group.seed,
                gatherer,
                self._tokenizer,
                partial(self._verdict, group),
                self._limit,
            )
            await _run(self._workflow, group.claim.task, recorder)
            cause = recorder.cause
            if cause is None or cause.by_policy or self._is_wrong(recorder) or retry == self._retries:
                return recorder
            group.clock.counts["restarts"] += 1
            message = (await recorder.verdict()).message
            log.warning("task %s: %s: %s; beginning again", group.claim.task.task_id, recorder.cause, message)
            await asyncio.sleep(min(LONGEST_RETRY_S, self._retry_s * 2**retry))
            retry += 1

    def _is_wrong(self, recorder: Recorder) -> bool:
        return recorder.cause in self._wrong_ends and recorder.has_response

    def _settled(self, recorder: Recorder, verdict: Verdict, task: Task) -> Verdict:
        """The verdict of a workflow in the form of a verifier's."""
        if self._is_wrong(recorder):
            verdict = verdict._replace(reward=Reward(0.0, "wrong"))
        if not recorder.is_given or verdict.reward.status in NO_VERDICT:
            return verdict
        text = recorder.text(recorder.last_of_model())
        reward = weighed_reward(verdict.reward, text, task.question, recorder.opened, self._rewards)
        return verdict._replace(reward=reward)

    async def _verdict(self, group: ClaimedGroup, text: str, opened: bool) -> Verdict:
        group.clock.change("reward", 1)
        self.scoring += 1
        try:
            return await self._scorer.score(group.claim.task, text, opened=opened)
        finally:
            heartbeat.count_work()
            self.scoring -= 1
            group.clock.change("reward", -1)


async def _run(workflow: Workflow, task: Task, recorder: Recorder) -> None:
    """Run a workflow; an exception of its own costs its trajectory the verdict.

    Raises EngineError and JobError, which are not the workflow's.
    """
    try:
        await workflow(task, recorder)
        if not recorder.has_response and recorder.cause is None:
            recorder.fail("the workflow ended without a response of the model")
    except (EngineError, JobError):
        raise
    except Exception as error:
        recorder.fail(describe(error))
