"""One trajectory of a claimed group: runs its workflow, limits its time, retries failures."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from megarl.buffer.experience.pipeline import lacks_reward
from megarl.config import Config
from megarl.config.rewards import RewardConfig
from megarl.core.errors import EngineError, JobError, PromptRefused, describe
from megarl.core.processes import heartbeat
from megarl.core.schema import GREEDY, JUDGED, TOOL_CALLS, End, Reward, Segment, Task, Trajectory
from megarl.engines.client.frames import Completion
from megarl.engines.client.gather import LONGEST_RETRY_S, Gatherer, SampleRequest
from megarl.explore.explorer.claimed import ClaimedGroup
from megarl.explore.explorer.segments import WHOLE_RESPONSES, Forget, Record, SegmentSampler, SegmentSettings
from megarl.explore.recording.images import ImageRules
from megarl.explore.recording.model import NO_LIMITS, RolloutModel, Sampler, TokenLimits, Workflow
from megarl.explore.recording.turns import NoRoom
from megarl.rewards import Verdict
from megarl.rewards.pool.tally import Tally
from megarl.rewards.verdict import NO_VERDICT, weighed_reward
from megarl.tasks import ChatTokenizer

CANCEL_S = 5.0
"""Grace period in seconds of a cancelled workflow to free its resources."""
SHORTEST_WAIT_S = 0.05
"""Shortest time between two checks of a workflow's own time."""


class OwnTime:
    """A workflow's own time in seconds, without waits for the engine and the verifier."""

    def __init__(self) -> None:
        self._waits = 0
        self._spent_s = 0.0
        self._since = time.monotonic()
        self.ended = False

    @property
    def running(self) -> bool:
        """True while the workflow does its own work."""
        return not self._waits and not self.ended

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self._spent_s + (time.monotonic() - self._since if self.running else 0.0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Exclude the body's time from the workflow's own time. Raises RuntimeError after the workflow's end."""
        if self.ended:
            raise RuntimeError("the trajectory has ended")
        self._spent_s = self.seconds
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            self._since = time.monotonic()


async def run_workflow(
    workflow: Workflow, task: Task, model: RolloutModel, own: OwnTime, timeout_s: float | None
) -> None:
    """Run a workflow; if it raises or times out, its trajectory gets no verdict.

    Args:
        timeout_s: Most seconds of its own work; None for workflows with their own limit.

    Raises EngineError and JobError, for which the workflow is not responsible.
    """
    try:
        await _run(workflow, task, model, own, timeout_s)
    finally:
        model.end.close()


async def _run(workflow: Workflow, task: Task, model: RolloutModel, own: OwnTime, timeout_s: float | None) -> None:
    work = asyncio.create_task(_contained(workflow, task, model))
    try:
        while not work.done() and (timeout_s is None or own.seconds < timeout_s):
            left_s = None if timeout_s is None else max(timeout_s - own.seconds, SHORTEST_WAIT_S)
            await asyncio.wait({work}, timeout=left_s)
    finally:
        in_time = work.done()
        if not in_time:
            work.cancel()
            await asyncio.wait({work}, timeout=CANCEL_S)
        own.ended = True
    if in_time and work.cancelled():
        model.fail("the workflow has cancelled its own task")
    elif in_time:
        _settle(model, work.result())
    else:
        model.fail(
            f"the workflow has not ended within rollout.workflow_timeout_s={timeout_s:g} of its own time, in which it "
            "waits neither for the engine nor for the verifier",
            End.WORKFLOW_TIMEOUT,
        )


def _settle(model: RolloutModel, error: BaseException | None) -> None:
    if isinstance(error, EngineError | JobError) and not isinstance(error, PromptRefused):
        raise error
    if isinstance(error, NoRoom):
        model.truncate()
    elif error is not None:
        model.fail(describe(error))
    record, cause = model.record, model.end.cause
    if record.unread and (cause is None or cause.by_policy):
        # the earliest cause of a short trajectory counts
        model.fail(f"the workflow has not waited for {record.unread} of its responses", End.ABANDONED)
    elif not record.has_response and cause is None:
        model.fail("the workflow ended without a response of the model")


async def _contained(workflow: Workflow, task: Task, model: RolloutModel) -> BaseException | None:
    """Run a workflow and return its exception: a raised SystemExit would end the event loop, a CancelledError would
    look like a cancellation."""
    try:
        await workflow(task, model)
    except asyncio.CancelledError as error:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
        return error
    except BaseException as error:
        return error
    return None


log = logging.getLogger(__name__)


class Scorer(Protocol):
    """Part of ``rewards.RewardPool``."""

    async def score(self, task: Task, text: str, *, in_thinking: bool = False) -> Verdict: ...


class Teaching(Protocol):
    """Part of ``rewards.teacher_server.TeacherServers``."""

    tally: Tally

    async def taught(self, trajectory: Trajectory, data_source: str) -> Trajectory: ...


@dataclass(frozen=True)
class TrajectorySettings:
    """Settings of the trajectories of a job."""

    retries: int = 0
    """Retries of a trajectory after an error caused by neither the policy nor the verifier."""
    retry_s: float = 0.5
    """First wait in seconds before a retry of a trajectory or of failed samples; each wait doubles."""
    rewards: RewardConfig = field(default_factory=RewardConfig)
    """Weights of format, repetition and language, for rewards given by a workflow."""
    wrong_ends: Collection[End] = ()
    """Ends that count as a wrong response (``rollout.wrong_ends``)."""
    timeout_s: float | None = None
    """Most seconds of a workflow's own work; None for workflows with their own limit."""
    limits: TokenLimits = NO_LIMITS
    """Most tokens of prompts, responses and trajectories."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """User-defined settings (``rollout.options``)."""
    segments: SegmentSettings = WHOLE_RESPONSES
    """Length of segments, and number of repetitions that ends a response."""
    images: ImageRules | None = None
    """Rules for images besides the tasks' images."""

    @classmethod
    def of(cls, config: Config) -> TrajectorySettings:
        """Settings of a job. Imports torch and transformers if its messages may have images."""
        rollout = config.rollout
        return cls(
            retries=rollout.retries,
            rewards=config.reward,
            wrong_ends=frozenset(map(End, rollout.wrong_ends)),
            # agents have rollout.agent_timeout_s, which includes waits for the engine
            timeout_s=None if rollout.workflow == "agent" else rollout.workflow_timeout_s,
            limits=TokenLimits.of(rollout),
            options=rollout.options,
            segments=SegmentSettings.of(config),
            images=ImageRules.of(config),
        )


class TrajectoryRunner:
    """Makes trajectories.

    Args:
        record: Records segments.
        forget: Deletes the segments of a restarted trajectory.
        teachers: Names the teachers of trajectories to train on, and asks those at URLs; None without teachers.
    """

    def __init__(
        self,
        workflow: Workflow,
        scorer: Scorer,
        tokenizer: ChatTokenizer,
        settings: TrajectorySettings,
        record: Record | None = None,
        forget: Forget | None = None,
        teachers: Teaching | None = None,
    ) -> None:
        self._settings, self._record, self._forget, self._teachers = settings, record, forget, teachers
        self._workflow = workflow
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._running: set[OwnTime] = set()
        self.scoring = 0
        """Responses that wait for their verdict, or for their teacher."""
        self.taught = 0
        """Responses that wait for their teacher; each request has a time limit."""

    @property
    def in_workflow(self) -> int:
        """Number of trajectories whose workflow runs its own code, not waiting for an engine or a verifier; each has a
        time limit."""
        return sum(own.running for own in self._running)

    async def run(
        self, group: ClaimedGroup, index: int, gatherer: Gatherer, generated: Callable[[], Awaitable[None]]
    ) -> Trajectory:
        """Return a trajectory with its reward. ``generated`` is called once all its tokens are sampled.

        Raises EngineError and JobError.
        """
        model = await self._recorded(group, index, gatherer)
        await generated()
        verdict = self._settled(model, await model.verdict(), group.claim.task)
        if verdict.message is not None:
            log.warning("task %s: reward %s: %s", group.claim.task.task_id, verdict.reward.status, verdict.message)
        message = {} if verdict.message is None else {"reward_message": verdict.message}
        number = model.record.num_tool_calls
        calls = {} if number is None else {TOOL_CALLS: number}
        turns, judged = model.record.ordered(), dict[str, str]()
        if model.end.given is None:  # else the workflow gave the reward
            judged[JUDGED] = model.record.judged[model.record.index_of(model.record.last_of_model(), "verdict")]
        found = Trajectory(
            rollout_id=group.claim.rollout_id,
            task_id=group.claim.task.task_id,
            group_id=group.claim.group_id,
            index=index,
            group_size=group.claim.group_size,
            turns=turns,
            reward=verdict.reward,
            metadata={"reward": verdict.record} | message | calls | judged,
            cause=model.end.cause,
            images=model.record.images_beside(group.claim.task.images, turns),
        )
        is_trained = group.claim.kind != "eval" and index != GREEDY
        return await self._taught(found, group) if is_trained else found

    async def _taught(self, trajectory: Trajectory, group: ClaimedGroup) -> Trajectory:
        """Return the trajectory with its teacher, unless it has no reward and will not be trained on."""
        lacking = trajectory.reward.status != "late" and lacks_reward(trajectory, self._settings.rewards)
        if self._teachers is None or lacking:
            return trajectory
        self.scoring, self.taught = self.scoring + 1, self.taught + 1
        group.clock.change("reward", 1)
        try:
            taught = await self._teachers.taught(trajectory, group.claim.task.data_source)
        finally:
            heartbeat.count_work()
            group.clock.change("reward", -1)
            self.scoring, self.taught = self.scoring - 1, self.taught - 1
        if taught.cause is not trajectory.cause:
            log.warning("task %s: %s: %s", taught.task_id, taught.end, taught.metadata["reward_message"])
        return taught

    async def _recorded(self, group: ClaimedGroup, index: int, gatherer: Gatherer) -> RolloutModel:
        """Run the workflow until it succeeds, or ``retries`` retries have failed."""
        retry, recorded = 0, group.claim.segments.get(index, ())
        while True:
            model = await self._attempt(group, index, gatherer, recorded)
            cause = model.end.cause
            if cause is None or cause.by_policy or self._is_wrong(model) or retry == self._settings.retries:
                return model
            group.clock.counts["restarts"] += 1
            message = (await model.verdict()).message
            log.warning("task %s: %s: %s; beginning again", group.claim.task.task_id, model.end.cause, message)
            await asyncio.sleep(min(LONGEST_RETRY_S, self._settings.retry_s * 2**retry))
            retry += 1
            recorded = ()
            if self._forget is not None:
                await self._forget(group.claim, index, 0)
            if group.pace is not None:
                group.pace.restart(index)

    async def _attempt(
        self, group: ClaimedGroup, index: int, gatherer: Gatherer, recorded: Sequence[Segment]
    ) -> RolloutModel:
        """Run the workflow once, on a copy of the task, so that its changes do not affect other trajectories."""
        own = OwnTime()
        claim, counts, settings = group.claim, group.clock.counts, self._settings
        kept = self._record, group.pace, counts, recorded, self._forget
        sampler = SegmentSampler(gatherer, claim, index, settings.limits, settings.segments, *kept)
        model = RolloutModel(
            group.claim,
            index,
            group.prompt,
            group.seed,
            _TimedSampler(sampler, own),
            self._tokenizer,
            partial(self._verdict, group, own),
            settings.limits,
            settings.options,
            settings.images,
        )
        self._running.add(own)
        try:
            await run_workflow(self._workflow, group.claim.task.copy(), model, own, settings.timeout_s)
        finally:
            self._running.discard(own)
        return model

    def _is_wrong(self, model: RolloutModel) -> bool:
        return model.end.cause in self._settings.wrong_ends and model.record.has_response

    def _settled(self, model: RolloutModel, verdict: Verdict, task: Task) -> Verdict:
        """Convert a workflow's verdict into a verifier's form."""
        if self._is_wrong(model):
            verdict = verdict._replace(reward=Reward(0.0, "wrong"))
        if model.end.given is None or verdict.reward.status in NO_VERDICT:
            return verdict
        last = model.record.last_of_model()
        in_thinking = model.record.begins_in_thinking(last)
        reward = weighed_reward(verdict.reward, model.text(last), task.question, in_thinking, self._settings.rewards)
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
    """A sampler that excludes its time from the workflow's own time."""

    def __init__(self, sampler: Sampler, own: OwnTime) -> None:
        self._sampler = sampler
        self._own = own

    async def sample(self, request: SampleRequest) -> Completion:
        with self._own.waiting():
            return await self._sampler.sample(request)
