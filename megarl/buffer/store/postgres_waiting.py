"""A PostgreSQL connection that sends heartbeats while it waits, with a timeout.

libpq detects a dead server, but not a stopped one: its machine still acknowledges every packet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg

from megarl.core.processes import heartbeat

log = logging.getLogger(__name__)

TICK_S = 0.1
WARN_S = 10.0
"""Seconds of silence after which a warning is logged."""


class Unanswered(psycopg.OperationalError):
    """The server received the statement and does not reply; the connection is closed."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(f"no answer for {waited_s:.0f} s")
        self.waited_s = waited_s


def connect(name: str, answer_s: float, *args: Any, **settings: Any) -> psycopg.Connection[Any]:
    """Connect as ``psycopg.connect``; statements raise ``Unanswered`` after ``answer_s`` seconds. ``name``: for the
    log."""

    class Watched(psycopg.Connection[Any]):
        def wait(self, gen: Generator[Any, Any, Any], *args: Any, **settings: Any) -> Any:
            try:
                return super().wait(watched(gen, name, answer_s), *args, **settings)
            except Unanswered:
                self.pgconn.finish()  # a late reply would match no statement
                raise

    return _marking(lambda: Watched.connect(*args, **settings))


def watched(waiting: Generator[Any, Any, Any], name: str, limit_s: float) -> Generator[Any, Any, Any]:
    """Run ``waiting``, a generator of psycopg that waits for a server, for at most ``limit_s`` seconds without data.
    Sends it the socket's readiness, or 0 after every 0.1 s without any. ``name``: of the store, for the log. Raises
    Unanswered."""
    ready, waited_s, looked, warned = None, 0.0, time.monotonic(), False
    while True:
        try:
            wanted = waiting.send(ready)
        except StopIteration as end:
            return end.value
        ready = yield wanted
        heartbeat.count_wait()
        now = time.monotonic()
        # Time in which this process was stopped too does not count; data restart the timeout.
        waited_s = 0.0 if ready else waited_s + min(now - looked, 1.0)
        looked = now
        if not ready and waited_s > limit_s:
            raise Unanswered(waited_s)
        if not ready and waited_s > WARN_S and not warned:
            log.warning("store %s: no answer for %.0f s; waiting for up to %g s", name, waited_s, limit_s)
            warned = True


def _marking(work: Callable[[], psycopg.Connection[Any]]) -> psycopg.Connection[Any]:
    """Run ``work`` in a thread with heartbeats: libpq blocks while it resolves addresses and connects."""
    with ThreadPoolExecutor(1, thread_name_prefix="connect") as thread:
        future = thread.submit(work)
        while True:
            try:
                return future.result(TICK_S)
            except TimeoutError:
                heartbeat.count_wait()
