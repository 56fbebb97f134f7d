"""Waiting for a rollout, on all ranks together."""

from __future__ import annotations

import time
from typing import Any

from megarl.core import heartbeat
from megarl.engine.client.watch import EngineWatch
from megarl.explore.rewards.pool.tally import EVENT
from megarl.explore.store import Store
from megarl.train.loop.checkpoints import Checkpointer
from megarl.train.rank.context import RunContext
from megarl.train.rank.ranks import Ranks
from megarl.train.rank.reporter import Reporter
from megarl.train.sync.weights import WeightSync

MEET_S = 30.0
"""Seconds between two collectives while ranks wait: a rollout may take longer than a collective waits for its ranks."""
EVENTS_S = 1.0
"""Seconds between two reads of the explorer's news from the store."""
SETTLE_S = 1.0
"""The same while a checkpoint is being written, which counts only when they have met."""


class EventLines:
    """Lines about failing rewards, which the explorer leaves in the store: its own log is not on the terminal."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen = max((event["at"] for event in store.events(EVENT)), default=0.0)
        self._looked_at = time.monotonic()

    def lines(self) -> list[str]:
        """New lines; looks every EVENTS_S at most."""
        if time.monotonic() - self._looked_at < EVENTS_S:
            return []
        self._looked_at = time.monotonic()
        found = self._store.events(EVENT, self._seen)
        self._seen = max([self._seen, *(event["at"] for event in found)])
        return [event["data"]["line"] for event in found]


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

    def wait(self, rollout_id: str, label: str, *, updated: bool = False) -> bool:
        """Wait on every rank until a rollout is complete, with a progress bar; False when the job is asked to stop.

        Args:
            updated: The actor has other weights than those published last.
        """
        with self._reporter.progress(None, label, "group") as bar:
            while True:
                with self._weights.watch() as watch:
                    done = self._wait(rollout_id, bar, watch)
                if done is not None:
                    return done
                self._weights.publish_again(watch.lost, updated=updated)

    def _wait(self, rollout_id: str, bar: Any, watch: EngineWatch) -> bool | None:
        """Wait as ``wait``; None, on every rank, when a new engine needs the weights that another had in its place."""
        while True:
            done = self._context.rank != 0 or self._follow(rollout_id, bar, watch)
            self._checkpoints.settle()
            if self._ranks.agree(done):
                return True
            if self._ranks.stop_requested():
                return False
            if not self._ranks.agree(watch.lost is None):
                return None

    def _follow(self, rollout_id: str, bar: Any, watch: EngineWatch) -> bool:
        """Show the progress until ranks meet; True when the rollout is complete.

        Returns False early when the job is asked to stop or an engine needs weights.
        """
        config = self._context.config
        until = time.monotonic() + (SETTLE_S if self._checkpoints.settling else min(MEET_S, config.cluster.stall_s / 3))
        looked = time.monotonic()
        while True:
            heartbeat.beat()  # the explorer has a heartbeat of its own
            done, bar.total = self._store.progress(rollout_id)
            bar.update(done - bar.n)
            for line in self._event_lines.lines() if self._event_lines else ():
                self._reporter.log(line)
            if watch.lost is None and time.monotonic() - looked > EVENTS_S:
                watch.lost, looked = self._weights.deserted(), time.monotonic()
            complete = done == bar.total and self._store.is_complete(rollout_id)
            if complete or self._ranks.stopping or watch.lost is not None or time.monotonic() > until:
                return complete
            time.sleep(config.store.poll_s)
