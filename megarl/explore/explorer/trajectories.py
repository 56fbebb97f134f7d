"""One trajectory of a claimed group: its workflow is run, begun again where it failed, and what it gave is scored."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from megarl.core import heartbeat
from megarl.core.config.rewards import RewardConfig
from megarl.core.schema import End, Reward, Segment, Task, Trajectory
from megarl.engine.client.frames import Completion
from megarl.engine.client.gather import LONGEST_RETRY_S, Gatherer, SampleRequest
from megarl.explore.explorer.claimed import ClaimedGroup
from megarl.explore.explorer.segments import WHOLE_RESPONSES, Forget, Record, SegmentSampler, SegmentSettings
from megarl.explore.explorer.workflow_run import OwnTime, run_workflow
from megarl.explore.recording.images import ImageRules
from megarl.explore.recording.limits import TokenLimits
from megarl.explore.recording.model import NO_LIMITS, NO_OPTIONS, RolloutModel, Sampler
from megarl.explore.rewards import Verdict
from megarl.explore.rewards.verdict import NO_VERDICT, weighed_reward
from megarl.explore.tasksets import ChatTokenizer
from megarl.explore.workflows import Workflow

log = logging.getLogger(__name__)


class Scorer(Protocol):
    """Part of ``rewards.RewardPool``."""

    async def score(self, task: Task, text: str, *, in_thinking: bool = False) -> Verdict: ...


class TrajectoryRunner:
    """Makes trajectories.

    Args:
        retries: Times that a trajectory begins again after an error that is neither the policy's nor the verifier's.
        retry_s: First wait before that; waits double.
        rewards: Weights of the form, repetition and language of responses, for rewards that a workflow gives.
        wrong_ends: Ends that count as a wrong response (``rollout.wrong_ends``).
        timeout_s: Most seconds of a workflow of its own; None for one that has a limit itself.
        options: ``rollout.options``.
        segments: Lengths of segments, and the repetitions that end a response.
        record: Records segments.
        forget: Forgets the segments of a trajectory that begins again.
        images: Rules of images beside the tasks'.
    """

    def __init__(
        self,
        workflow: Workflow,
        scorer: Scorer,
        tokenizer: ChatTokenizer,
        *,
        retries: int,
        retry_s: float,
        rewards: RewardConfig | None = None,
        wrong_ends: Collection[End] = (),
        timeout_s: float | None = None,
        limits: TokenLimits = NO_LIMITS,
        options: Mapping[str, Any] = NO_OPTIONS,
        segments: SegmentSettings = WHOLE_RESPONSES,
        record: Record | None = None,
        forget: Forget | None = None,
        images: ImageRules | None = None,
    ) -> None:
        self._segments, self._record, self._forget = segments, record, forget
        self._workflow = workflow
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._limits = limits
        self._options = options
        self._images = images
        self._retries = retries
        self._retry_s = retry_s
        self._rewards = rewards or RewardConfig()
        self._wrong_ends = wrong_ends
        self._timeout_s = timeout_s
        self._running: set[OwnTime] = set()
        self.scoring = 0
        """Responses that wait for their verdict."""

    @property
    def in_workflow(self) -> int:
        """Trajectories whose workflow waits neither for the engine nor for the verifier; each has a limit."""
        return sum(own.running for own in self._running)

    async def run(
        self, group: ClaimedGroup, index: int, gatherer: Gatherer, generated: Callable[[], Awaitable[None]]
    ) -> Trajectory:
        """Return a trajectory with its reward. ``generated`` is called once no token of it is missing.

        Raises EngineError and JobError.
        """
        model = await self._recorded(group, index, gatherer)
        await generated()
        verdict = self._settled(model, await model.verdict(), group.claim.task)
        if verdict.message is not None:
            log.warning("task %s: reward %s: %s", group.claim.task.task_id, verdict.reward.status, verdict.message)
        message = {} if verdict.message is None else {"reward_message": verdict.message}
        turns = model.record.ordered()
        return Trajectory(
            rollout_id=group.claim.rollout_id,
            task_id=group.claim.task.task_id,
            group_id=group.claim.group_id,
            index=index,
            group_size=group.claim.group_size,
            turns=turns,
            reward=verdict.reward,
            metadata={"reward": verdict.record} | message,
            cause=model.end.cause,
            images=model.record.images_beside(group.claim.task.images, turns),
        )

    async def _recorded(self, group: ClaimedGroup, index: int, gatherer: Gatherer) -> RolloutModel:
        """Run the workflow until it fails no more, or has been begun again ``retries`` times."""
        retry, recorded = 0, group.claim.segments.get(index, ())
        while True:
            model = await self._attempt(group, index, gatherer, recorded)
            cause = model.end.cause
            if cause is None or cause.by_policy or self._is_wrong(model) or retry == self._retries:
                return model
            group.clock.counts["restarts"] += 1
            message = (await model.verdict()).message
            log.warning("task %s: %s: %s; beginning again", group.claim.task.task_id, model.end.cause, message)
            await asyncio.sleep(min(LONGEST_RETRY_S, self._retry_s * 2**retry))
            retry += 1
            recorded = ()
            if self._forget is not None:
                await self._forget(group.claim, index, 0)
            if group.pace is not None:
                group.pace.restart(index)

    async def _attempt(
        self, group: ClaimedGroup, index: int, gatherer: Gatherer, recorded: Sequence[Segment]
    ) -> RolloutModel:
        """Run the workflow once, on a task of its own: what it changes there, no other trajectory sees."""
        own = OwnTime()
        claim, counts = group.claim, group.clock.counts
        of_segments, repeats = (self._limits, self._segments.tokens, self._record), self._segments.max_repeats
        sampler = SegmentSampler(
            gatherer, claim, index, *of_segments, group.pace, counts, recorded, repeats, self._forget
        )
        model = RolloutModel(
            group.claim,
            index,
            group.prompt,
            group.seed,
            _TimedSampler(sampler, own),
            self._tokenizer,
            partial(self._verdict, group, own),
            self._limits,
            self._options,
            self._images,
        )
        self._running.add(own)
        try:
            await run_workflow(self._workflow, group.claim.task.copy(), model, own, self._timeout_s)
        finally:
            self._running.discard(own)
        return model

    def _is_wrong(self, model: RolloutModel) -> bool:
        return model.end.cause in self._wrong_ends and model.record.has_response

    def _settled(self, model: RolloutModel, verdict: Verdict, task: Task) -> Verdict:
        """The verdict of a workflow in the form of a verifier's."""
        if self._is_wrong(model):
            verdict = verdict._replace(reward=Reward(0.0, "wrong"))
        if model.end.given is None or verdict.reward.status in NO_VERDICT:
            return verdict
        last = model.record.last_of_model()
        in_thinking = model.record.begins_in_thinking(last)
        reward = weighed_reward(verdict.reward, model.text(last), task.question, in_thinking, self._rewards)
        return verdict._replace(reward=reward)

    async def _verdict(
        self, group: ClaimedGroup, own: OwnTime, text: str, in_thinking: bool, by: str | None
    ) -> Verdict:
        task = group.claim.task if by is None else replace(group.claim.task, data_source=by)
        group.clock.change("reward", 1)
        self.scoring += 1
        try:
            if own.ended:
                return await self._scorer.score(task, text, in_thinking=in_thinking)
            with own.waiting():
                return await self._scorer.score(task, text, in_thinking=in_thinking)
        finally:
            heartbeat.count_work()
            self.scoring -= 1
            group.clock.change("reward", -1)


class _TimedSampler:
    """A sampler whose time is not the workflow's."""

    def __init__(self, sampler: Sampler, own: OwnTime) -> None:
        self._sampler = sampler
        self._own = own

    async def sample(self, request: SampleRequest) -> Completion:
        with self._own.waiting():
            return await self._sampler.sample(request)
