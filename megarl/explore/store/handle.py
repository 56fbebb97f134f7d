"""A process's handle on the database."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.core.jobs import TRAIN
from megarl.explore.store.transactions import Transactions

IDS = 1000
"""Most ids in one statement."""


class Handle:
    """Reads and writes in transactions. The parts of a ``Store`` derive from it."""

    def __init__(
        self,
        url: str,
        *,
        attempt: int | None = None,
        outage_s: float = 0.0,
        read_only: bool = False,
        has_tables: bool = False,
        program: str = TRAIN,
    ) -> None:
        self._database = Transactions(
            url, attempt, outage_s, read_only=read_only, has_tables=has_tables, program=program
        )
        self.program = program
        self._read, self._write = self._database.read, self._database.write

    def close(self) -> None:
        """Close this process's connections."""
        self._database.close()

    def begin_attempt(self, attempt: int) -> None:
        """Count a start of the job, before any of its processes starts: those of earlier ones can write nothing any
        more. This handle belongs to the new attempt. Safe to repeat, see :meth:`Transactions.begin_attempt`.

        Raises FencedError when the stored attempt is not smaller.
        """
        self._database.begin_attempt(attempt)

    def sync(self) -> None:
        """Return when all that any process has committed so far would outlive a power cut. Safe to repeat."""
        self._database.sync()


def chunks(ids: Sequence[str]) -> list[Sequence[str]]:
    """Cut ids into runs for one statement each."""
    return [ids[i : i + IDS] for i in range(0, len(ids), IDS)]
