"""One explorer among others: its share of their limits, and the lease of its claims."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from megarl.buffer.store import Store
from megarl.buffer.store.engines import Silence
from megarl.config import Config
from megarl.core.errors import ConfigError
from megarl.explore.explorer.held_out import record_evaluations
from megarl.rewards.pool.process import addresses


def check_explorers(config: Config) -> None:
    """Raise ConfigError if an explorer would have no group or no reward worker."""
    number, workers = config.rollout.explorers, config.reward.workers
    if number > workers:
        raise ConfigError(
            f"rollout.explorers={number}: each needs a separate reward worker, but reward.workers={workers}; raise "
            "that, or have fewer explorers"
        )
    if number > config.rollout.concurrent_groups:
        raise ConfigError(
            f"rollout.explorers={number} share rollout.concurrent_groups={config.rollout.concurrent_groups}; raise "
            "that, or have fewer explorers"
        )


def share_of(config: Config, hosts: Sequence[str], number: int) -> Config:
    """Return the settings of explorer ``number``: its part of groups in flight, reward workers, and requests to judge
    and teachers.

    Args:
        hosts: Reward hosts of the job's other nodes, in addition to ``reward.hosts``.
    """
    reward, explorers = config.reward, config.rollout.explorers

    def part(whole: int) -> int:
        return max(1, len(range(number, whole, explorers)))

    judge = replace(reward.judge, concurrency=part(reward.judge.concurrency))
    own = replace(
        reward,
        workers=part(reward.workers),
        hosts=addresses([*reward.hosts, *hosts])[number::explorers],
        backlog=part(reward.backlog),
        judge=judge,
    )
    groups = part(config.rollout.concurrent_groups)
    teachers = {name: replace(each, concurrency=part(each.concurrency)) for name, each in config.teachers.items()}
    rollout = replace(config.rollout, concurrent_groups=groups)
    return replace(config, reward=own, rollout=rollout, teachers=teachers)


BEATS = 4
"""Heartbeats of an explorer per heartbeat timeout."""


class Lease:
    """Sends an explorer's heartbeats and detects dead explorers, whose groups become free.

    Args:
        call: Calls a function of the store in the store's thread.
        silence_s: Silence after which a worker counts as dead.
    """

    def __init__(
        self, store: Store, worker: str, call: Callable[..., Awaitable[Any]], silence_s: float, beats: int = BEATS
    ) -> None:
        self._store, self._worker, self._call = store, worker, call
        self._silence_s, self._every_s = silence_s, silence_s / beats
        self._others = Silence(self._every_s)

    @property
    def silent(self) -> Collection[str]:
        """Names of workers found dead at the last look."""
        return self._others.longer_than(self._silence_s)

    async def keep(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            await self._call(self._store.workers.beat, self._worker)
            self._others.look(await self._call(self._store.workers.beats))
            if self.silent:  # a dead explorer may have left an uncounted evaluation
                await self._call(record_evaluations, self._store, self._worker)
            await asyncio.sleep(self._every_s)
