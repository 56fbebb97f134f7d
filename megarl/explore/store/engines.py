"""The engines of a run: whoever asks them finds them here, and orders what they shall be."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, delete, insert, select, update

from megarl.explore.store.tables import ENGINES, JOB, EngineStatus
from megarl.explore.store.transactions import Transactions, put


class RegisteredEngine(NamedTuple):
    """An engine of a job."""

    number: int
    """Number of the replica; the ranks of its workers in the weight plan follow from it."""
    url: str
    """Empty until the supervisor of its job has given it a place."""
    workers: int
    """Workers that shall hold its weights: tp * pp."""
    wanted: EngineStatus = EngineStatus.SERVING
    state: EngineStatus = EngineStatus.STARTING
    orders: int = 0
    """Number of the last order, which is for ``wanted``."""
    done: int = 0
    """Number of the last order that was carried out; ``state`` is the engine's since then."""


class EngineRoom(NamedTuple):
    """Room of a job for engines."""

    begun: int
    """Engines that the job begins with, which it may always have again."""
    workers: int
    """Most workers of all engines together, where others are wanted."""
    why: str
    """Settings and devices that it follows from."""

    def most(self, workers: int, begun_with: int) -> int:
        """Most engines of so many workers each, in a job that began with engines of ``begun_with``."""
        return max(self.workers // workers, self.begun if workers == begun_with else 0)


class EngineRegistry:
    """Engines of the run's jobs, by the program of the job that owns them.

    The supervisor of that job registers its engines, carries out orders and notes states. Explorer and trainer read.
    """

    def __init__(self, database: Transactions) -> None:
        self._database = database

    def register(self, engines: Sequence[RegisteredEngine], room: EngineRoom | None = None) -> None:
        """Make ``engines`` those of this handle's job, which has ``room`` for so many. Safe to repeat: they are written
        again."""

        def work(connection: Connection, again: bool) -> None:
            connection.execute(delete(ENGINES).where(ENGINES.c.program == self._database.program))
            if engines:
                connection.execute(insert(ENGINES), [self._row(engine) for engine in engines])
            if room is not None:
                put(connection, JOB, [{"key": _room_key(self._database.program), "value": json.dumps(room)}])

        self._database.write(work)

    def room(self, program: str) -> EngineRoom | None:
        """Room of a job for engines, as its last start has noted it; None where none did."""
        query = select(JOB.c.value).where(JOB.c.key == _room_key(program))
        value = self._database.read(lambda connection: connection.scalar(query))
        return None if value is None else EngineRoom(*json.loads(value))

    def scale(self, program: str, number: int, workers: int | None = None) -> tuple[int, int]:
        """Order a job to have so many engines; return how many were wanted before, and how many are new rows.

        Those with the highest numbers go first, and come back last. New ones have no url until the job's supervisor has
        given them a place. Safe to repeat: only what is missing, too much, or of other workers is ordered.

        Args:
            workers: Of each engine, absent ones too; None leaves them as they are.

        Raises ValueError where the job has registered none, or ``number`` is below 1.
        """
        if number < 1:
            raise ValueError(f"{number} engines: a job has one or more")

        def work(connection: Connection, again: bool) -> tuple[int, int]:
            query = select(ENGINES).where(ENGINES.c.program == program).order_by(ENGINES.c.number)
            # PostgreSQL: who orders at the same moment waits, and reads after that what was ordered meanwhile.
            connection.execute(query.with_for_update()).all()
            rows = connection.execute(query).all()
            if not rows:
                raise ValueError(f"the job {program} has registered no engine")
            if workers is not None:
                others = (ENGINES.c.program == program, ENGINES.c.workers != workers)
                change = update(ENGINES).where(*others)
                connection.execute(change.values(workers=workers, orders=ENGINES.c.orders + 1))
            there = [row.number for row in rows if row.wanted != EngineStatus.ABSENT]
            away = [row.number for row in rows if row.wanted == EngineStatus.ABSENT]
            back = away[: max(0, number - len(there))]
            more = max(0, number - len(there) - len(back))
            for numbers, wanted in ((there[number:], EngineStatus.ABSENT), (back, EngineStatus.SERVING)):
                which = (ENGINES.c.program == program, ENGINES.c.number.in_(numbers))
                connection.execute(update(ENGINES).where(*which).values(wanted=wanted, orders=ENGINES.c.orders + 1))
            for new in range(rows[-1].number + 1, rows[-1].number + 1 + more):
                of_each = rows[0].workers if workers is None else workers
                engine = RegisteredEngine(new, "", of_each, EngineStatus.SERVING, EngineStatus.ABSENT, orders=1)
                connection.execute(insert(ENGINES), [engine._asdict() | {"program": program}])
            return len(there), more

        found: tuple[int, int] = self._database.write(work)
        return found

    def place(self, number: int, url: str) -> None:
        """Write where an engine of this handle's job is. Safe to repeat."""
        which = (ENGINES.c.program == self._database.program, ENGINES.c.number == number)
        self._database.write(
            lambda connection, again: connection.execute(update(ENGINES).where(*which).values(url=url))
        )

    def read(self, programs: Collection[str] | None = None) -> list[RegisteredEngine]:
        """Engines of all jobs, or of some programs, absent ones too, by program and number; none before a start, or in
        an offline job."""
        query = select(ENGINES)
        return self._engines(query if programs is None else query.where(ENGINES.c.program.in_(programs)))

    def programs(self) -> list[str]:
        """Programs that have registered engines."""
        query = select(ENGINES.c.program).distinct().order_by(ENGINES.c.program)
        return self._database.read(lambda connection: list(connection.scalars(query)))

    def own(self) -> list[RegisteredEngine]:
        """Engines of this handle's job by number."""
        return self._engines(select(ENGINES).where(ENGINES.c.program == self._database.program))

    def order(self, number: int, wanted: EngineStatus, program: str | None = None) -> int:
        """Ask the supervisor of a job (None: this handle's) for a state of its engine; return the number of its
        last order. Safe to repeat.

        Raises ValueError for a state that is reached, not ordered, and for an engine that is not registered.
        """
        if wanted is EngineStatus.STARTING:
            raise ValueError(f"an engine can be ordered to be serving, asleep or absent, not {wanted}")
        which = (ENGINES.c.program == (program or self._database.program), ENGINES.c.number == number)
        change = update(ENGINES).where(*which).values(wanted=wanted, orders=ENGINES.c.orders + 1)

        def work(connection: Connection, again: bool) -> int | None:
            connection.execute(change)
            return connection.execute(select(ENGINES.c.orders).where(*which)).scalar()

        order = self._database.write(work)
        if order is None:
            raise ValueError(f"no engine {number} of the job {program or self._database.program} is registered")
        return order

    def give_up(self, number: int, *, since: int) -> bool:
        """Order an engine of this handle's job to be absent, where its last order is still ``since``.

        Return False, and order nothing, where no other engine of the job is wanted. Safe to repeat.
        """
        own = ENGINES.c.program == self._database.program
        query = select(ENGINES.c.number, ENGINES.c.wanted, ENGINES.c.orders).where(own).order_by(ENGINES.c.number)

        def work(connection: Connection, again: bool) -> bool:
            # PostgreSQL: `scale` might order the others away at the same moment.
            connection.execute(query.with_for_update()).all()
            rows = {row.number: row for row in connection.execute(query)}
            if rows[number].orders != since:
                return True
            if not any(row.wanted != EngineStatus.ABSENT for row in rows.values() if row.number != number):
                return False
            change = update(ENGINES).where(own, ENGINES.c.number == number)
            connection.execute(change.values(wanted=EngineStatus.ABSENT, orders=since + 1))
            return True

        return self._database.write(work)

    def fit(self, number: int, workers: int, *, since: int) -> None:
        """Have an engine of this handle's job keep its workers, where its last order is still ``since``. Safe to
        repeat."""
        which = (ENGINES.c.program == self._database.program, ENGINES.c.number == number, ENGINES.c.orders == since)
        change = update(ENGINES).where(*which).values(workers=workers)
        self._database.write(lambda connection, again: connection.execute(change))

    def note(self, number: int, state: EngineStatus, order: int) -> None:
        """Write what has become of an engine of this handle's job since an order. Safe to repeat."""
        which = (ENGINES.c.program == self._database.program, ENGINES.c.number == number)
        change = update(ENGINES).where(*which).values(state=state, done=order)
        self._database.write(lambda connection, again: connection.execute(change))

    def _engines(self, query: Select[Any]) -> list[RegisteredEngine]:
        rows = self._database.read(lambda connection: connection.execute(query.order_by(*ENGINES.primary_key)).all())
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
        return {"program": self._database.program, **engine._asdict()}


def _room_key(program: str) -> str:
    return f"engine_room {program}"
