"""Claimed groups in progress, the samples in flight, and the clocks of an explorer.

With spare trajectories (``rollout.spare``) the first ``group_size`` to end complete the group and the others are
cancelled, which favours short ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from megarl.buffer.experience.pipeline import lacks_reward
from megarl.buffer.store import Claim, EndedGroup, Store
from megarl.buffer.store.engines import BusyTime
from megarl.config.rewards import RewardConfig
from megarl.core.errors import WeightsPassed
from megarl.core.metrics import Timeline
from megarl.core.schema import GREEDY, Trajectory
from megarl.explore.explorer.iterations import GroupPace
from megarl.explore.recording.model import RenderedPrompt

SHORTEST_S, LONGEST_S = 0.2, 10.0
"""Shortest and longest time between two reports."""
COUNTS = ("groups", "samples", "greedy", "prompt_tokens", "response_tokens", "retries", "restarts")
SEGMENT_COUNTS = ("resumed_tokens", "replay_diverged")
"""Recorded tokens of earlier claims that were reused, or discarded."""
SPARE_COUNTS = ("spare_cut", "spare_replaced")
"""Trajectories cancelled because their group was whole, and those replaced because they ended without a reward."""


class RolloutClock:
    """Seconds of a rollout with generation, with rewards, and with both in progress; and its counts."""

    def __init__(
        self,
        rollout_id: str = "",
        timeline: Timeline | None = None,
        now: Callable[[], float] = time.monotonic,
        generates: Callable[[int], None] = lambda by: None,
    ) -> None:
        """``generates``: called too with each change of the samples in generation."""
        self._generates = generates
        self._now = now
        self._timeline = timeline
        self._rollout_id = rollout_id
        self._began: dict[str, float] = {}
        self._active = {"generation": 0, "reward": 0}
        self._last = now()
        self._seconds = {"generation_s": 0.0, "reward_s": 0.0, "overlap_s": 0.0}
        self.counts = dict.fromkeys((*COUNTS, *SEGMENT_COUNTS, *SPARE_COUNTS), 0)

    def change(self, phase: str, by: int) -> None:
        """Add ``by`` samples to ``phase``: generation or reward."""
        self._account()
        if phase == "generation":
            self._generates(by)
        before, after = self._active[phase], self._active[phase] + by
        self._active[phase] = after
        if before == 0 < after:
            self._began[phase] = time.time()
        if after == 0 < before and self._timeline is not None:
            began = self._began[phase]
            self._timeline.add(phase, began, time.time() - began, rollout=self._rollout_id)

    def metrics(self) -> dict[str, float]:
        """Seconds and counts so far."""
        self._account()
        return {**self._seconds, **{name: float(count) for name, count in self.counts.items()}}

    def _account(self) -> None:
        now = self._now()
        passed, self._last = now - self._last, now
        generating, scoring = self._active["generation"] > 0, self._active["reward"] > 0
        self._seconds["generation_s"] += passed * generating
        self._seconds["reward_s"] += passed * scoring
        self._seconds["overlap_s"] += passed * (generating and scoring)


class EngineTime:
    """Seconds with samples in flight, reported to the store when the first begins or the last ends.

    Args:
        call: Calls a function of the store in the store's thread.
    """

    def __init__(
        self, store: Store, worker: str, call: Callable[..., Awaitable[Any]], now: Callable[[], float] = time.time
    ) -> None:
        self._store, self._worker, self._call, self._now = store, worker, call, now
        self._samples, self._busy_s, self._since = 0, 0.0, now()
        self._changed = asyncio.Event()

    def change(self, by: int) -> None:
        """Add ``by`` samples in flight."""
        before, self._samples = self._samples, self._samples + by
        if (before > 0) == (self._samples > 0):
            return
        now = self._now()
        if before > 0:
            self._busy_s += now - self._since
        self._since = now
        self._changed.set()

    def report(self) -> BusyTime:
        """Return the time so far."""
        return BusyTime(self._busy_s, self._since if self._samples > 0 else None, self._now())

    async def keep(self) -> None:
        """Report until cancelled."""
        while True:
            self._changed.clear()
            await self._call(self._store.workers.record_busy, self._worker, self.report())
            await asyncio.sleep(SHORTEST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_S):
                    await self._changed.wait()


log = logging.getLogger(__name__)


class SamplesUnderWay:
    """Counts samples in generation, at most ``capacity``; greedy answers are not counted.

    Samples of evaluations on reserved engines are counted separately, so that the other engines do not idle.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._shared = 0
        self._apart: dict[tuple[str, str], int] = {}
        """(group, token of its claim) -> samples."""

    @property
    def total(self) -> int:
        """Number of all samples in flight."""
        return self._shared + sum(self._apart.values())

    @property
    def free(self) -> int:
        """Number of further samples that may be requested."""
        return self._capacity - self._shared

    @property
    def evaluates(self) -> bool:
        """True while groups of evaluations may be claimed."""
        return sum(self._apart.values()) < self._capacity

    def begin(self, claims: Sequence[Claim], apart: Collection[str] = ()) -> None:
        """Count the samples of these groups; ``apart``: rollouts with reserved engines."""
        for claim in claims:
            if claim.rollout_id in apart:
                self._apart[claim.group_id, claim.token] = claim.num_samples
            else:
                self._shared += claim.num_samples

    def end(self, claim: Claim, samples: int = 1) -> None:
        """Subtract ended ``samples`` of a group."""
        if (key := (claim.group_id, claim.token)) in self._apart:
            self._apart[key] -= samples
        else:
            self._shared -= samples

    def suspend(self, samples: int) -> None:
        """Subtract ``samples`` while they are suspended."""
        self._shared -= samples

    def forget(self) -> None:
        """Reset all counts, after all samples were cancelled."""
        self._shared, self._apart = 0, {}

    @contextmanager
    def until_passed(self, claims: Sequence[Claim]) -> Iterator[None]:
        """Suppress WeightsPassed in the body: the trainer has cancelled these groups' evaluation, so no engine has its
        weights."""
        try:
            yield
        except* WeightsPassed as passed:
            log.warning("%d groups of %s are given up: %s", len(claims), claims[0].rollout_id, passed.exceptions[0])
        finally:
            for claim in claims:
                self._apart.pop((claim.group_id, claim.token), None)


@dataclass
class ClaimedGroup:
    """A claimed group in progress."""

    claim: Claim
    prompt: RenderedPrompt
    seed: int | None
    clock: RolloutClock
    pace: GroupPace | None = None
    scored: dict[int, Trajectory] = field(default_factory=dict)
    """Ended trajectories by index, in the order of their ends."""
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """Running trajectories by index, without cancelled ones."""
    generating: set[int] = field(init=False)
    """Indices of sampled trajectories that lack tokens."""

    def __post_init__(self) -> None:
        self.generating = set(range(self.claim.num_samples))

    def members(self, rewards: RewardConfig) -> list[Trajectory] | None:
        """Return the sampled members by index; None while some are missing.

        If too few have a usable end, others complete the group, which is then dropped for their reason.
        """
        claim, sampled = self.claim, [e for index, e in self.scored.items() if index != GREEDY]
        usable = [e for e in sampled if e.reward.status == "late" or not lacks_reward(e, rewards)]
        if len(usable) < claim.group_size and len(sampled) < claim.num_samples:
            return None
        others = [e for e in sampled if e not in usable]
        return sorted([*usable, *others][: claim.group_size], key=lambda e: e.index)

    def cut_spare(self) -> int:
        """Cancel the running sampled trajectories; return the number of those that lacked tokens."""
        cut = {index: task for index, task in self.running.items() if index != GREEDY}
        for index, task in cut.items():
            del self.running[index]
            task.cancel()
        self.clock.counts["spare_cut"] += len(cut)
        return len(self.generating & set(cut))

    def ended(self, members: list[Trajectory]) -> EndedGroup:
        """Count the whole group in its rollout's metrics, and return it for the store."""
        answers = [*(e for index, e in self.scored.items() if index == GREEDY), *members]
        counts = self.clock.counts
        counts["groups"] += 1
        counts["samples"] += len(members)
        counts["greedy"] += len(answers) - len(members)
        counts["spare_replaced"] += len(self.scored) - len(answers)
        counts["prompt_tokens"] += sum(e.prompt_length for e in answers)
        counts["response_tokens"] += sum(e.response_length for e in answers)
        return EndedGroup(self.claim, answers, self.clock.metrics())


T = TypeVar("T")


class StoreQueue(Generic[T]):
    """Queue of items to write.

    Args:
        write: Writes many items, such as ``Store.groups.put_all``, in a separate thread; returns False for each with an
            outdated claim.
    """

    def __init__(self, write: Callable[[Sequence[T]], Awaitable[list[bool]]]) -> None:
        self._write = write
        self._queue: list[tuple[T, asyncio.Future[bool]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def put(self, one: T) -> bool:
        """Write one item, batched with others queued during the previous write; return False if its claim is outdated.

        A cancelled caller does not stop the write. Raises the exceptions of ``write``, for the whole batch.
        """
        written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.append((one, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())
        return await written

    async def _write_all(self) -> None:
        """Write until the queue is empty, as a separate task that cancelled callers do not end."""
        while self._queue:
            queue, self._queue = self._queue, []
            try:
                results = await self._write([one for one, _ in queue])
            except BaseException as error:
                for _, future in queue:
                    if not future.done():
                        future.set_exception(error) if isinstance(error, Exception) else future.cancel()
                if not isinstance(error, Exception):
                    raise
                continue
            for (_, future), ours in zip(queue, results, strict=True):
                if not future.done():  # else the caller was cancelled
                    future.set_result(ours)
