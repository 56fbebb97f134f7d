"""Memory that grows from step to step, told with the name of what grew."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.learn.memory.ledger import human
from megarl.learn.memory.phases import Phase

LEAST_BYTES = 256 * 2**20
LEAST_SHARE = 0.1
"""Growth below either is told by nobody: allocators keep some memory, and batches differ."""


class Growth:
    """Compares what a device has in each phase with what it had when that had grown last.

    Memory that grows once is no leak: moments are made in the first update, a checkpoint's buffers with the first one.
    """

    def __init__(self) -> None:
        self._before: dict[Phase, tuple[int, Mapping[str, int]]] = {}
        self._grown: set[Phase] = set()

    def look(self, phase: Phase, measured: int, residents: Mapping[str, int]) -> str | None:
        """Return a warning where memory has grown, the second time and from there on; None else.

        Args:
            measured: Bytes on the device.
            residents: Name -> bytes of models there.
        """
        before, had = self._before.setdefault(phase, (measured, dict(residents)))
        grown = measured - before
        if grown < max(LEAST_BYTES, LEAST_SHARE * before):
            return None
        self._before[phase] = (measured, dict(residents))
        if phase not in self._grown:
            self._grown.add(phase)
            return None
        larger = [
            f"{name} by {human(size - had.get(name, 0))}" for name, size in residents.items() if size > had.get(name, 0)
        ]
        who = ", ".join(larger) if larger else "not a model: their bytes are the same"
        return f"memory in phase {phase} has grown by {human(grown)} to {human(measured)}: {who}"
