"""Engines on the trainer's devices, which leave while it computes and come back for its weights."""

from __future__ import annotations

import logging
import time
from typing import Literal

from megarl.buffer.store import Store
from megarl.core.errors import EngineError
from megarl.core.processes import heartbeat
from megarl.engines.fleet import EngineTurn
from megarl.train.rank.context import RunContext
from megarl.train.rank.ranks import Ranks
from megarl.train.sync.publish import WeightPublisher

log = logging.getLogger(__name__)


class ColocatedEngines:
    """The job's own engines: asleep or absent (``rollout.offload``) until they are ordered to be there.

    Every rank makes the same calls; rank 0 writes the orders, which the supervisor carries out. At its start a job's
    colocated engines are absent.
    """

    def __init__(self, context: RunContext, store: Store, ranks: Ranks, publisher: WeightPublisher) -> None:
        self._context = context
        self._store = store
        self._ranks = ranks
        self._publisher = publisher

    def come(self) -> None:
        """Have the engines take their turn. A weight sync waits for them, and wakes those that are asleep."""
        if self._context.rank == 0:
            self._turn(EngineTurn.HERE)

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Give engines that sleep this memory again; the others have it. Raises EngineError on rank 0."""
        if self._sleeps:
            self._publisher.wake(what)

    def leave(self) -> dict[str, float]:
        """Have the engines give up their memory; return when they have: the bytes that their workers freed and still
        have, on rank 0 and where they sleep.

        Raises EngineError on every rank.
        """
        if self._sleeps:
            found = self._asleep(self._turn(EngineTurn.ASLEEP))
            if self._ranks.agree(found is not None):
                return found or {}
        self._publisher.part()
        failure: EngineError | None = None
        try:
            self._wait_for(self._turn(EngineTurn.AWAY))
        except EngineError as error:
            failure = error
        if not self._ranks.agree(failure is None):
            raise failure or EngineError("an engine did not leave the trainer's devices; rank 0's log says why")
        return {}

    @property
    def _sleeps(self) -> bool:
        return self._context.config.rollout.offload != "destroy"

    def _asleep(self, orders: dict[int, int]) -> dict[str, float] | None:
        """Put the engines to sleep; return their metrics, and None on rank 0 where one does not: it is ended then.

        The supervisor starts an engine again that dies before it has read the order: such a one is awake.
        """
        try:
            found = self._publisher.sleep()
            self._wait_for(orders)
            if died := self._publisher.died():
                raise EngineError("; ".join(died))
            return found
        except EngineError as error:
            log.warning("the engines are ended, since one does not sleep: %s", error)
            return None

    def _turn(self, turn: EngineTurn) -> dict[int, int]:
        """Order the engines that do something else; return the number of each one's order, on rank 0."""
        if self._context.rank:
            return {}
        others = [engine.number for engine in self._store.engines.own() if engine.turn is not turn]
        return self._store.engines.turn(others, turn)

    def _wait_for(self, orders: dict[int, int]) -> None:
        """Wait until the supervisor has carried out these orders. Raises EngineError."""
        rollout = self._context.config.rollout
        until = time.monotonic() + rollout.start_timeout_s
        while orders:
            left = [e.number for e in self._store.engines.own() if e.done_turn < orders.get(e.number, 0)]
            if not left:
                return
            if time.monotonic() > until:
                raise EngineError(
                    f"engine {left[0]} was ordered to leave the trainer's devices and has not within "
                    f"rollout.start_timeout_s={rollout.start_timeout_s:g}; the supervisor carries out such orders"
                )
            heartbeat.beat()
            time.sleep(self._context.config.store.poll_s)
