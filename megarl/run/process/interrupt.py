"""Signals to a supervisor: those before a job's processes run, and requests to stop while they do. Imports nothing
heavy."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While active, SIGINT and SIGTERM raise KeyboardInterrupt and are remembered: an import that is interrupted may
    raise ModuleNotFoundError instead, or go on. So a job that Slurm stops at its very start ends as one that it stops
    later."""

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
        """Raise KeyboardInterrupt when it was swallowed."""
        if self.seen:
            raise KeyboardInterrupt


INTERRUPT = Interrupt()
"""The interrupt of this process."""


class StopRequest:
    """Turns SIGINT and SIGTERM into a count: the first asks for a resumable end, the third ends at once."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_set(self) -> bool:
        return self.count > 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
