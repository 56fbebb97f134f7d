"""Processes that a trainer's weight links connect, and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.engines.sync.shared import Places


@dataclass(frozen=True)
class Joined:
    """Engines by number, as they were joined last."""

    starts: Sequence[tuple[str, int]]
    """URL of each engine, and the start of its process; those of two programs may have one number."""
    machines: Sequence[list[str]]
    """Machines of each engine's workers."""
    senders: Sequence[Sequence[Any]]
    """As ``Places`` has them."""

    @property
    def all(self) -> list[int]:
        """Numbers of all engines."""
        return list(range(len(self.starts)))

    def replaced(self, starts: Sequence[tuple[str, int]]) -> list[int]:
        """Numbers of the engines that are other starts now, or were none."""
        before = [*self.starts, *[None] * (len(starts) - len(self.starts))]
        return [i for i, start in enumerate(starts) if start != before[i]]

    def places(self) -> Places:
        """Machines of all workers and trainer ranks."""
        return Places([where for engine in self.machines for where in engine], self.senders)


NONE_JOINED = Joined((), (), ())
