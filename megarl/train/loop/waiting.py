"""Waiting for a rollout, on all ranks together."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from megarl.core import heartbeat
from megarl.engine.client.watch import EngineWatch
from megarl.explore.rewards.pool.tally import EVENT
from megarl.explore.store import Store
from megarl.train.loop.checkpoints import Checkpointer
from megarl.train.rank.context import RunContext
from megarl.train.rank.ranks import Ranks, Stopped
from megarl.train.rank.reporter import Reporter
from megarl.train.rollout.asking import Awaited
from megarl.train.sync.weights import WeightSync

MEET_S = 30.0
"""Seconds between two collectives while ranks wait: a rollout may take longer than a collective waits for its ranks."""
EVENTS_S = 1.0
"""Seconds between two reads of the explorer's news from the store."""
AWAITING_S = 5.0
"""Seconds between two counts of the responses that await a reward."""
LATE_REWARDS = "late rewards"
"""Phase of a rollout that waits for nothing but rewards of people."""
SHARE = 4
"""Seconds between two looks for each second that one takes."""
SETTLE_S = 1.0
"""The same while a checkpoint is being written, which counts only when they have met."""


class EventLines:
    """Lines about failing rewards, which the explorer leaves in the store: its own log is not on the terminal."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen = max((event["number"] for event in store.journal.events(EVENT)), default=0)
        self._looked_at = time.monotonic()

    def lines(self) -> list[str]:
        """New lines; looks every EVENTS_S at most."""
        if time.monotonic() - self._looked_at < EVENTS_S:
            return []
        self._looked_at = time.monotonic()
        found = self._store.journal.events(EVENT, self._seen)
        self._seen = max([self._seen, *(event["number"] for event in found)])
        return [event["data"]["line"] for event in found]


class LateRewardLines:
    """Number of responses whose rewards alone a rollout waits for, and lines that tell a person."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._looked_at = time.monotonic()
        self._logged = 0
        self.num_awaiting = 0

    def line(self) -> str | None:
        """Look every AWAITING_S at most; a line where another number of responses awaits a reward."""
        if time.monotonic() - self._looked_at < AWAITING_S:
            return None
        self._looked_at, self.num_awaiting = time.monotonic(), self._store.late.count()
        if not self.num_awaiting or self.num_awaiting == self._logged:
            return None
        self._logged = self.num_awaiting
        return (
            f"the job waits for the rewards of {self.num_awaiting} responses: write them with `megarl data awaiting "
            "FILE.jsonl`, give their rewards with `megarl data reward FILE.jsonl`"
        )


class RolloutWaiter:
    """Waits for rollouts, shows their progress, and meanwhile settles checkpoints and joins replaced engines."""

    def __init__(
        self,
        context: RunContext,
        store: Store,
        ranks: Ranks,
        reporter: Reporter,
        weights: WeightSync,
        checkpoints: Checkpointer,
    ) -> None:
        self._context = context
        self._store = store
        self._ranks = ranks
        self._reporter = reporter
        self._weights = weights
        self._checkpoints = checkpoints
        self._event_lines = EventLines(store) if context.rank == 0 else None
        self._late = LateRewardLines(store)

    def wait(self, look: Callable[[], Awaited], label: str, *, weights_step: int) -> None:
        """Wait on every rank until all is there, with a progress bar.

        Args:
            look: Says on rank 0 what is there.
            weights_step: Steps of training in the actor's weights.

        Raises Stopped.
        """
        with self._reporter.progress(None, label, "group") as bar:
            while True:
                with self._weights.watch() as watch:
                    if self._wait(look, bar, watch):
                        return
                self._weights.publish_again(watch.lost, weights_step)

    def _wait(self, look: Callable[[], Awaited], bar: Any, watch: EngineWatch) -> bool:
        """Wait as ``wait``; False, on every rank, when a new engine needs the weights that another had in its place."""
        while True:
            done = self._context.rank != 0 or self._follow(look, bar, watch)
            self._checkpoints.settle()
            if self._ranks.agree(done):
                return True
            if self._ranks.stop_requested():
                raise Stopped
            if not self._ranks.agree(watch.lost is None):
                return False

    def _follow(self, look: Callable[[], Awaited], bar: Any, watch: EngineWatch) -> bool:
        """Show the progress until ranks meet; True when all is there.

        Returns False early when the job is asked to stop or an engine needs weights.
        """
        config = self._context.config
        until = time.monotonic() + (SETTLE_S if self._checkpoints.settling else min(MEET_S, config.cluster.stall_s / 3))
        looked = time.monotonic()
        while True:
            heartbeat.beat()  # the explorer has a heartbeat of its own
            looked_at = time.monotonic()
            done, bar.total, complete = look()
            bar.update(done - bar.n)
            for line in self._event_lines.lines() if self._event_lines else ():
                self._reporter.log(line)
            if watch.lost is None and time.monotonic() - looked > EVENTS_S:
                watch.lost, looked = self._weights.deserted(), time.monotonic()
            if complete or self._ranks.stopping or watch.lost is not None or time.monotonic() > until:
                return complete
            if (late := self._late.line()) is not None:
                self._reporter.log(late)
            # The watchdog ends a rollout in which nothing moves, but people may take their time.
            with heartbeat.phase(LATE_REWARDS) if self._late.num_awaiting else nullcontext():
                # A look at many groups is no cheap one: most of the time belongs to those that write them.
                time.sleep(max(config.store.poll_s, SHARE * (time.monotonic() - looked_at)))
