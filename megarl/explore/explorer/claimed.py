"""Claimed groups in progress, and the queue of their writes into the store.

With spare trajectories (``rollout.spare``) the first ``group_size`` to end complete the group and the others are
cancelled, which favours short ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from megarl.buffer.experience.pipeline import lacks_reward
from megarl.buffer.store import Claim, EndedGroup
from megarl.config.rewards import RewardConfig
from megarl.core.schema import GREEDY, Trajectory
from megarl.explore.explorer.clocks import RolloutClock
from megarl.explore.explorer.iterations import GroupPace
from megarl.explore.recording.model import RenderedPrompt


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
