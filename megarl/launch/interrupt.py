"""Ctrl-C before a job's processes run: seen even where a library swallows or renames it. Imports nothing heavy."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Self


class Interrupt:
    """While active, SIGINT raises KeyboardInterrupt and is remembered: an import that is interrupted may raise
    ModuleNotFoundError instead, or go on."""

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt when it was swallowed."""
        if self.seen:
            raise KeyboardInterrupt


INTERRUPT = Interrupt()
"""Of this process."""
