"""The engines of a run: whoever asks them finds them here, and orders what they shall be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, delete, insert, select, update

from megarl.explore.store.handle import Handle
from megarl.explore.store.tables import ENGINES, EngineStatus


class RegisteredEngine(NamedTuple):
    """An engine of a job."""

    number: int
    """Number of the replica; the ranks of its workers in the weight plan follow from it."""
    url: str
    workers: int
    """Workers that hold its weights: tp * pp."""
    wanted: EngineStatus = EngineStatus.SERVING
    state: EngineStatus = EngineStatus.STARTING


class EngineRegistry(Handle):
    """Engines of the run's jobs, by the program of the job that owns them.

    The supervisor of that job registers its engines, carries out orders and notes states. Explorer and trainer read.
    """

    def register_engines(self, engines: Sequence[RegisteredEngine]) -> None:
        """Make ``engines`` those of this handle's job. Safe to repeat: they are written again."""

        def work(connection: Connection, again: bool) -> None:
            connection.execute(delete(ENGINES).where(ENGINES.c.program == self.program))
            if engines:
                connection.execute(insert(ENGINES), [self._row(engine) for engine in engines])

        self._write(work)

    def engines(self) -> list[RegisteredEngine]:
        """Engines of all jobs, absent ones too, by program and number; none before a start, or in an offline job."""
        return self._engines(select(ENGINES))

    def own_engines(self) -> list[RegisteredEngine]:
        """Engines of this handle's job by number."""
        return self._engines(select(ENGINES).where(ENGINES.c.program == self.program))

    def order_engine(self, number: int, wanted: EngineStatus, program: str | None = None) -> None:
        """Ask the supervisor of a job (None: this handle's) for a state of its engine. Safe to repeat.

        Raises ValueError for a state that is reached, not ordered, and for an engine that is not registered.
        """
        if wanted not in (EngineStatus.SERVING, EngineStatus.ABSENT):
            raise ValueError(f"an engine can be ordered to be serving or absent, not {wanted}")
        if not self._set(number, program, wanted=wanted):
            raise ValueError(f"no engine {number} of the job {program or self.program} is registered")

    def note_engine(self, number: int, state: EngineStatus) -> None:
        """Write what has become of an engine of this handle's job. Safe to repeat."""
        self._set(number, None, state=state)

    def _set(self, number: int, program: str | None, **values: EngineStatus) -> bool:
        which = (ENGINES.c.program == (program or self.program), ENGINES.c.number == number)
        change = update(ENGINES).where(*which).values(values)
        return self._write(lambda connection, again: connection.execute(change).rowcount == 1)

    def _engines(self, query: Select[Any]) -> list[RegisteredEngine]:
        rows = self._read(lambda connection: connection.execute(query.order_by(*ENGINES.primary_key)).all())
        return [
            RegisteredEngine(row.number, row.url, row.workers, EngineStatus(row.wanted), EngineStatus(row.state))
            for row in rows
        ]

    def _row(self, engine: RegisteredEngine) -> dict[str, object]:
        return {"program": self.program, **engine._asdict()}
