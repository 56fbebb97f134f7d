"""Tables of earlier versions into today's, in the transaction that opens a store.

A schema number is in the table ``job``. A migration finds what there is to change: a damaged store that was made again
may have tables of two versions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import BigInteger, Column, Connection, Table, func, inspect, select, update

from megarl.core import heartbeat
from megarl.core.errors import ConfigError
from megarl.explore.store.checksums import CHECKSUM, sealed
from megarl.explore.store.tables import EARLIER_NAMES, GROUPS, JOB, METADATA, ROLLOUTS, SCHEMA, STEPS, GroupState

SCHEMA_KEY = "schema"


def migrate(connection: Connection) -> None:
    """Bring the tables of an earlier version up to date. Raises ConfigError for those of a later one."""
    names = set(inspect(connection).get_table_names())
    if JOB.name not in names:
        return
    stored = connection.scalar(select(JOB.c.value).where(JOB.c.key == SCHEMA_KEY))
    if stored is not None and int(stored) > SCHEMA:
        raise ConfigError(
            f"the store has tables of schema {stored}, this version reads up to {SCHEMA}; run the version that made it"
        )
    if stored is not None and int(stored) == SCHEMA:
        return
    from alembic.migration import MigrationContext  # 0.2 s, for stores of earlier versions alone
    from alembic.operations import Operations

    op = Operations(MigrationContext.configure(connection))
    for migration in MIGRATIONS:
        migration(connection, op)


def _rename_tables(connection: Connection, op: Any) -> None:
    """Schema 4: trajectories are no longer called experiences, and log-probs of the trainer are not kept."""
    names = set(inspect(connection).get_table_names())
    for name, earlier in EARLIER_NAMES.items():
        if earlier in names and name not in names:
            for index in inspect(connection).get_indexes(earlier):
                op.drop_index(index["name"], earlier)
            op.rename_table(earlier, name)
            for new in METADATA.tables[name].indexes:
                op.create_index(new.name, name, [column.name for column in new.columns])
    if "trained" in names:
        op.drop_table("trained")


def _add_checksums(connection: Connection, op: Any) -> None:
    """Schemas 2 and 3: a checksum in every row."""
    names = set(inspect(connection).get_table_names())
    for table in METADATA.sorted_tables:
        if CHECKSUM not in table.c or table.name not in names:
            continue
        if CHECKSUM not in {column["name"] for column in inspect(connection).get_columns(table.name)}:
            op.add_column(table.name, Column(CHECKSUM, BigInteger))
        _seal(connection, table)


def _add_consumption(connection: Connection, op: Any) -> None:
    """Schema 5: groups know the step that used them. Of those that were done, recorded steps have consumed theirs."""
    new = ((GROUPS, ("used_by", "reason")), (ROLLOUTS, ("weights_step",)))
    for table, columns in new:
        there = {column["name"] for column in inspect(connection).get_columns(table.name)}
        for name in set(columns) - there:
            op.add_column(table.name, Column(name, table.c[name].type))
    last = connection.scalar(select(func.max(STEPS.c.step))) or 0
    step = select(ROLLOUTS.c.step).where(ROLLOUTS.c.rollout_id == GROUPS.c.rollout_id).scalar_subquery()
    done = update(GROUPS).where(GROUPS.c.state == "done")
    connection.execute(done.where(step < last).values(state=GroupState.CONSUMED, used_by=step + 1))
    connection.execute(done.values(state=GroupState.READY))


def _add_indexes(connection: Connection, op: Any) -> None:
    """Schemas 6 and 7: groups are found by the step that used them, and by state, rollout and position together.
    Indexes that no table has any more go."""
    names = set(inspect(connection).get_table_names())
    for table in METADATA.sorted_tables:
        if table.name not in names:
            continue
        there = {index["name"] for index in inspect(connection).get_indexes(table.name)}
        for new in (index for index in table.indexes if index.name not in there):
            heartbeat.beat()
            op.create_index(new.name, table.name, [column.name for column in new.columns])
        for name in there - {index.name for index in table.indexes}:
            if name is not None and name.startswith(f"{table.name}_by_"):
                op.drop_index(name, table.name)


def _seal(connection: Connection, table: Table) -> None:
    """Give rows without a checksum theirs."""
    keys = list(table.primary_key)
    for key in connection.execute(select(*keys).where(table.c[CHECKSUM].is_(None))).all():
        heartbeat.beat()
        this = [column == value for column, value in zip(keys, key, strict=True)]
        row = connection.execute(select(table).where(*this)).one()._asdict()
        connection.execute(update(table).where(*this).values({CHECKSUM: sealed(table, row)[CHECKSUM]}))


MIGRATIONS: tuple[Callable[[Connection, Any], None], ...] = (
    _rename_tables,
    _add_consumption,
    _add_indexes,
    _add_checksums,
)
"""Names first: the others know tables by today's. Checksums last: they read whole rows."""
