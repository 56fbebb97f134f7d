"""Partial rollouts: trajectories get a token budget per published weights version, and continue with the next version.

An iteration begins when all engines have proven to have the published weights. Groups of steps before the next
publication have no budget and run to their end. All others begin no segment after ``rollout.budget_tokens`` tokens or
``rollout.budget_s`` seconds. With only a token budget, settings and seeds determine the weights of each token, not time
(``sync.order=admission``). Source: Kimi k1.5 (arXiv:2501.12599, section 2.6.2).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from megarl.buffer.order.pacing import Pacing
from megarl.buffer.store import Claim, Store
from megarl.config.schema import RolloutConfig
from megarl.core.schema import GREEDY, Segment, WeightsVersion


@dataclass(frozen=True)
class Budget:
    """Tokens and seconds of a trajectory in an iteration; infinite if not set."""

    tokens: float = math.inf
    seconds: float = math.inf

    @classmethod
    def of(cls, rollout: RolloutConfig) -> Budget | None:
        """Return the budget of a job's partial rollouts; None for none."""
        tokens, seconds = (math.inf if one is None else one for one in (rollout.budget_tokens, rollout.budget_s))
        return cls(tokens, seconds) if rollout.is_partial else None


class Iterations:
    """The current iteration, as recorded in the store.

    Args:
        live_step: ``Store.pacing.live_step``.
        poll_s: Seconds between two polls while a trajectory waits.
        clock: Clock in seconds.
    """

    def __init__(
        self,
        live_step: Callable[[], Awaitable[int | None]],
        pacing: Pacing,
        poll_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._live_step, self._pacing, self._poll_s, self._clock = live_step, pacing, poll_s, clock
        self._waiting = 0
        self._changed = asyncio.Condition()
        self.step = 0
        """Steps in the weights published at its begin."""
        self._began: float | None = None

    @property
    def age_s(self) -> float:
        """Seconds since its begin was observed; a new explorer counts from its first look."""
        return 0.0 if self._began is None else self._clock() - self._began

    @property
    def next_step(self) -> int:
        """Steps done at the next publication."""
        return self.step + self._pacing.interval

    def of(self, step: int) -> int:
        """Return the iteration of weights with ``step`` steps; a start or evaluation may publish within an
        iteration."""
        return self._pacing.published(step)

    async def look(self) -> None:
        """Poll the store."""
        live = await self._live_step()
        if live is not None and ((step := self.of(live)) != self.step or self._began is None):
            self.step, self._began = step, self._clock()
            async with self._changed:
                self._changed.notify_all()

    async def after(self, step: int) -> None:
        """Wait for the end of the iteration of ``step``."""
        self._waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self.step != step)
        finally:
            self._waiting -= 1

    async def keep(self) -> None:
        """Poll while a trajectory waits, until cancelled."""
        while True:
            await asyncio.sleep(self._poll_s)
            if self._waiting:
                await self.look()


class GroupPace:
    """Permission to begin segments, for a claimed group's trajectories.

    Args:
        spent: Tokens sampled under earlier claims of the group, by trajectory and iteration.
        reach: Called with the iteration once no trajectory of the group gets further tokens in it.
        waits: Called with the change in the number of samples that wait for the next iteration.
    """

    def __init__(
        self,
        iterations: Iterations,
        claim: Claim,
        budget: Budget,
        spent: Mapping[int, Counter[int]],
        reach: Callable[[Claim, int], Awaitable[None]],
        waits: Callable[[int], None],
    ) -> None:
        self._iterations, self._claim, self._budget = iterations, claim, budget
        self._spent = {index: Counter(spent.get(index, {})) for index in claim.indices}
        self._reach, self._waits = reach, waits
        self._open = set(claim.indices)
        self._samples = Counter[int]()
        """Index of a trajectory -> number of its responses in flight."""
        self._waiting: dict[int, list[int]] = {index: [] for index in claim.indices}
        """Index of a trajectory -> for each waiting response, the iteration whose end it waits for."""

    @contextmanager
    def sampling(self, index: int) -> Iterator[None]:
        """Count a response of the trajectory as in flight; a workflow may sample several concurrently."""
        self._samples[index] += 1
        try:
            yield
        finally:
            self._samples[index] -= 1

    async def begin(self, index: int) -> None:
        """Return once a trajectory may have another segment."""
        while self._claim.step >= self._iterations.next_step:
            step = self._iterations.step
            if self._spent[index][step] < self._budget.tokens and self._iterations.age_s < self._budget.seconds:
                return
            await self._suspend(index, step)

    def spend(self, index: int, tokens: int) -> None:
        """Count tokens sampled for a trajectory."""
        self._spent[index][self._iterations.step] += tokens

    def restart(self, index: int) -> None:
        """Reset the count of a restarted trajectory."""
        self._spent[index].clear()

    async def ended(self, index: int) -> None:
        """Mark a trajectory as complete."""
        self._open.discard(index)
        await self._report(self._iterations.step)

    async def _suspend(self, index: int, step: int) -> None:
        waiting = self._waiting[index]
        waiting.append(step)
        counts = index != GREEDY and len(waiting) == 1
        self._waits(int(counts))
        try:
            await self._report(step)
            await self._iterations.after(step)
        finally:
            waiting.remove(step)
            self._waits(-int(counts))

    async def _report(self, step: int) -> None:
        if self._open and all(self._is_suspended(index, step) for index in self._open):
            await self._reach(self._claim, step)

    def _is_suspended(self, index: int, step: int) -> bool:
        waiting = self._waiting[index]
        return len(waiting) == self._samples[index] > 0 and all(one == step for one in waiting)


class PartialRollouts:
    """Budgets of the claims of an explorer.

    Args:
        call: Calls a function of the store in the store's thread.
        budget: Budget of partial rollouts; None for none.
        poll_s: As in :class:`Iterations`.
        waits: As in :class:`GroupPace`.
    """

    def __init__(
        self,
        store: Store,
        call: Callable[..., Awaitable[Any]],
        budget: Budget | None,
        pacing: Pacing,
        poll_s: float,
        waits: Callable[[int], None],
    ) -> None:
        self._store, self._call, self._budget, self._waits = store, call, budget, waits
        self._iterations = Iterations(partial(call, store.pacing.live_step), pacing, poll_s)

    async def keep(self) -> None:
        """Follow the iterations until cancelled; do nothing without a budget."""
        if self._budget is not None:
            await self._iterations.keep()

    async def pace(self, claim: Claim) -> GroupPace | None:
        """Return the pace of a claimed group; None for one without budget."""
        if self._budget is None or claim.kind != "train":
            return None
        await self._iterations.look()  # the group was requested after its weights were published
        recorded = [segment for segments in claim.segments.values() for segment in segments]
        versions = {span.version for segment in recorded for span in segment.spans}
        steps = await self._call(self._store.pacing.version_steps, versions) if versions else {}
        spent = tokens_by_iteration(claim.segments, {v: self._iterations.of(step) for v, step in steps.items()})
        reach = partial(self._call, self._store.segments.reach)
        return GroupPace(self._iterations, claim, self._budget, spent, reach, self._waits)


def tokens_by_iteration(
    segments: Mapping[int, Sequence[Segment]], iterations: Mapping[WeightsVersion, int]
) -> dict[int, Counter[int]]:
    """Return trajectory index -> iteration -> tokens sampled by its weights.

    ``iterations``: version -> its iteration.
    """
    found: dict[int, Counter[int]] = {}
    for index, of_trajectory in segments.items():
        counter = found.setdefault(index, Counter())
        for span in (span for segment in of_trajectory for span in segment.spans):
            counter[iterations[span.version]] += span.end - span.start
    return found
