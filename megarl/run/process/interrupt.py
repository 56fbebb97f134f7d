"""Signals to a supervisor: interrupts before a job's processes run, stop requests while they run. No heavy imports."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Protocol, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While active, SIGINT and SIGTERM raise KeyboardInterrupt and are recorded, because an interrupted import may
    raise ModuleNotFoundError instead or go on. So a job that Slurm stops during its first imports ends like any
    other."""

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal arrived and its exception was swallowed."""
        if self.seen:
            raise KeyboardInterrupt


INTERRUPT = Interrupt()
"""The interrupt of this process."""


class StopAsked(Protocol):
    """Requests to stop a job."""

    @property
    def count(self) -> int:
        """Number of requests: the first one saves, the third one ends at once."""


class StopRequest:
    """Turns SIGINT and SIGTERM into a count: the first requests a resumable end, the third ends immediately."""

    def __init__(self) -> None:
        self.count = 0
        self.at: float | None = None
        """Unix seconds of the first request."""

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_set(self) -> bool:
        return self.count > 0

    def ask(self, count: int) -> None:
        """Count ``count`` requests, unless there were more."""
        self.count = max(count, self.count)
        self.at = self.at or time.time()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.ask(self.count + 1)
