"""The engines of a job: whoever asks them finds them here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection, delete, insert, select

from megarl.explore.store.handle import Handle
from megarl.explore.store.tables import ENGINES


class RegisteredEngine(NamedTuple):
    """An engine that serves, or will."""

    number: int
    """Number of the replica; the ranks of its workers in the weight plan follow from it."""
    url: str
    workers: int
    """Workers that hold its weights: tp * pp."""


class EngineRegistry(Handle):
    """Engines of the running attempt. A supervisor writes, explorer and trainer read."""

    def register_engines(self, engines: Sequence[RegisteredEngine]) -> None:
        """Make ``engines`` the job's. Safe to repeat: the table is written again."""

        def work(connection: Connection, again: bool) -> None:
            connection.execute(delete(ENGINES))
            if engines:
                connection.execute(insert(ENGINES), [engine._asdict() for engine in engines])

        self._write(work)

    def engines(self) -> list[RegisteredEngine]:
        """The job's engines by number; none before its start, or in an offline job."""
        query = select(ENGINES).order_by(ENGINES.c.number)
        return [RegisteredEngine(*row) for row in self._read(lambda connection: connection.execute(query).all())]
