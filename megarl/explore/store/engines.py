"""The engines of a run: whoever asks them finds them here, and orders what they shall be."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
    orders: int = 0
    """Number of the last order, which is for ``wanted``."""
    done: int = 0
    """Number of the last order that was carried out; ``state`` is the engine's since then."""


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

    def engines(self, programs: Collection[str] | None = None) -> list[RegisteredEngine]:
        """Engines of all jobs, or of some programs, absent ones too, by program and number; none before a start, or in
        an offline job."""
        query = select(ENGINES)
        return self._engines(query if programs is None else query.where(ENGINES.c.program.in_(programs)))

    def engine_programs(self) -> list[str]:
        """Programs that have registered engines."""
        query = select(ENGINES.c.program).distinct().order_by(ENGINES.c.program)
        return self._read(lambda connection: list(connection.scalars(query)))

    def own_engines(self) -> list[RegisteredEngine]:
        """Engines of this handle's job by number."""
        return self._engines(select(ENGINES).where(ENGINES.c.program == self.program))

    def order_engine(self, number: int, wanted: EngineStatus, program: str | None = None) -> int:
        """Ask the supervisor of a job (None: this handle's) for a state of its engine; return the order's number. Safe
        to repeat.

        Raises ValueError for a state that is reached, not ordered, and for an engine that is not registered.
        """
        if wanted is EngineStatus.STARTING:
            raise ValueError(f"an engine can be ordered to be serving, asleep or absent, not {wanted}")
        which = (ENGINES.c.program == (program or self.program), ENGINES.c.number == number)
        change = update(ENGINES).where(*which).values(wanted=wanted, orders=ENGINES.c.orders + 1)

        def work(connection: Connection, again: bool) -> int | None:
            connection.execute(change)
            return connection.execute(select(ENGINES.c.orders).where(*which)).scalar()

        order = self._write(work)
        if order is None:
            raise ValueError(f"no engine {number} of the job {program or self.program} is registered")
        return order

    def note_engine(self, number: int, state: EngineStatus, order: int) -> None:
        """Write what has become of an engine of this handle's job since an order. Safe to repeat."""
        which = (ENGINES.c.program == self.program, ENGINES.c.number == number)
        change = update(ENGINES).where(*which).values(state=state, done=order)
        self._write(lambda connection, again: connection.execute(change))

    def _engines(self, query: Select[Any]) -> list[RegisteredEngine]:
        rows = self._read(lambda connection: connection.execute(query.order_by(*ENGINES.primary_key)).all())
        return [
            RegisteredEngine(
                row.number,
                row.url,
                row.workers,
                EngineStatus(row.wanted),
                EngineStatus(row.state),
                row.orders,
                row.done,
            )
            for row in rows
        ]

    def _row(self, engine: RegisteredEngine) -> dict[str, object]:
        return {"program": self.program, **engine._asdict()}
