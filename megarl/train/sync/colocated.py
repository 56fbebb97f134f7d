"""Engines on the trainer's devices, which free their memory while the trainer computes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Literal

from megarl.buffer.store import Store
from megarl.core.errors import EngineError
from megarl.core.processes import heartbeat
from megarl.engines.client.control import EngineControl
from megarl.engines.client.names import KEY_VARIABLE
from megarl.engines.fleet import EngineTurn
from megarl.train.ranks import Ranks, RunContext
from megarl.train.sync.publish import WeightPublisher

log = logging.getLogger(__name__)


def free_devices(context: RunContext, store: Store, ranks: Ranks) -> None:
    """Make engines that earlier ranks have left awake free their memory: models come to their devices. Every rank calls
    it before it builds a model.

    Their requests are aborted, and start again with the next weights. Raises EngineError on every rank.
    """
    _together(ranks, lambda: _put_to_sleep(context, store) if context.rank == 0 else None)


def _together(ranks: Ranks, leave: Callable[[], None]) -> None:
    """Call ``leave``; raise EngineError on every rank if it failed on one."""
    failure: EngineError | None = None
    try:
        leave()
    except EngineError as error:
        failure = error
    if not ranks.agree(failure is None):
        raise failure or EngineError("an engine did not leave the trainer's devices; rank 0's log says why")


def _put_to_sleep(context: RunContext, store: Store) -> None:
    rollout, timeout_s = context.config.rollout, context.config.sync.timeout_s
    asleep, away = list[int](), list[int]()
    rows = store.engines.own()
    for row in rows:
        if row.turn is EngineTurn.AWAY:
            continue
        if rollout.offload != "destroy":
            engine = EngineControl(row.url, os.environ.get(KEY_VARIABLE, ""), timeout_s)
            try:
                engine.sleep(rollout.offload == "memory")
                asleep.append(row.number)
                continue
            except EngineError as error:
                log.warning("engine %d is ended, since it does not sleep: %s", row.number, error)
        away.append(row.number)
    orders = {row.number: row.turn_order for row in rows}  # also those that earlier ranks did not wait for
    orders |= store.engines.turn(asleep, EngineTurn.ASLEEP) | store.engines.turn(away, EngineTurn.AWAY)
    wait_for_turns(context, store, orders)


def wait_for_turns(context: RunContext, store: Store, orders: Mapping[int, int]) -> None:
    """Wait until the supervisor has carried out these orders (number of an engine -> of an order). Raises
    EngineError."""
    rollout = context.config.rollout
    until = time.monotonic() + rollout.start_timeout_s
    while orders:
        left = [e.number for e in store.engines.own() if e.done_turn < orders.get(e.number, 0)]
        if not left:
            return
        if time.monotonic() > until:
            raise EngineError(
                f"engine {left[0]} was ordered to leave the trainer's devices and has not within "
                f"rollout.start_timeout_s={rollout.start_timeout_s:g}; the supervisor carries out such orders"
            )
        heartbeat.beat()
        time.sleep(context.config.store.poll_s)


class ColocatedEngines:
    """The job's engines: asleep or absent (``rollout.offload``) until they are ordered back.

    Every rank makes the same calls; rank 0 writes the orders and the supervisor carries them out. Colocated engines are
    absent when a job starts, and asleep or absent when its ranks start again alone.
    """

    def __init__(self, context: RunContext, store: Store, ranks: Ranks, publisher: WeightPublisher) -> None:
        self._context = context
        self._store = store
        self._ranks = ranks
        self._publisher = publisher

    def come(self) -> None:
        """Order the engines back. A weight sync waits for them, and wakes sleeping ones."""
        if self._context.rank == 0:
            self._turn(EngineTurn.HERE)

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Wake this memory in sleeping engines; the others have it. Raises EngineError on rank 0."""
        if self._sleeps:
            self._publisher.wake(what)

    def leave(self) -> dict[str, float]:
        """Make the engines free their memory and wait for it; return the bytes that their workers freed and still have,
        on rank 0 and if they sleep.

        Raises EngineError on every rank.
        """
        if self._sleeps:
            found = self._asleep(self._turn(EngineTurn.ASLEEP))
            if self._ranks.agree(found is not None):
                return found or {}
        self._publisher.part()
        orders = self._turn(EngineTurn.AWAY)
        _together(self._ranks, lambda: wait_for_turns(self._context, self._store, orders))
        return {}

    @property
    def _sleeps(self) -> bool:
        return self._context.config.rollout.offload != "destroy"

    def _asleep(self, orders: dict[int, int]) -> dict[str, float] | None:
        """Put the engines to sleep; return their metrics, or None on rank 0 if one fails: then all are ended.

        The supervisor restarts an engine that dies before it reads the order; it is then awake.
        """
        try:
            found = self._publisher.sleep()
            wait_for_turns(self._context, self._store, orders)
            if died := self._publisher.died():
                raise EngineError("; ".join(died))
            return found
        except EngineError as error:
            log.warning("the engines are ended, since one does not sleep: %s", error)
            return None

    def _turn(self, turn: EngineTurn) -> dict[int, int]:
        """Order the engines that are in another turn; return each engine's order number, on rank 0."""
        if self._context.rank:
            return {}
        others = [engine.number for engine in self._store.engines.own() if engine.turn is not turn]
        return self._store.engines.turn(others, turn)
