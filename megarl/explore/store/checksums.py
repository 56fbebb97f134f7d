"""A checksum in every row that holds what cannot be made again: written with it, compared where it is read.

A row without one is damaged.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from sqlalchemy import Column, Float, Integer, LargeBinary, Table

from megarl.core.errors import StoreDamagedError
from megarl.explore.store.tables import GROUPS, ROLLOUTS

CHECKSUM = "checksum"
_NUMBERED = ("sequence", "event_id")
"""Columns that the database itself fills."""
_CHANGING = {
    GROUPS.name: ("state", "claimed_by", "claimed_at", "claim_token", "attempt", "used_by", "reason"),
    ROLLOUTS.name: ("weights_step",),  # later than the checksum
}
_NONE = b"\xff"
"""Begins no text."""


class _Covered(NamedTuple):
    """The columns of a table that its checksum is of."""

    names: list[str]
    to_bytes: list[Callable[[Any], bytes]]
    """Conversions, one for each."""
    of_row: Callable[[Any], Sequence[Any]]
    """Their values in a row of a query."""


def sealed(table: Table, row: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` with its checksum, where the table has one."""
    if (covered := _COVERED.get(table.name)) is None:
        return dict(row)
    return {**row, CHECKSUM: _checksum(covered, [row[name] for name in covered.names])}


def is_intact(table: Table, row: Mapping[Any, Any]) -> bool:
    """Return True if a row, with all columns of its table, is as it was written."""
    if (covered := _COVERED.get(table.name)) is None:
        return True
    return _equal(covered, [row[name] for name in covered.names], row[CHECKSUM])


def check(table: Table, row: Any, checksum: str = CHECKSUM) -> None:
    """Raise StoreDamagedError where ``row`` is not as it was written; it may have columns of other tables too, and the
    checksum under another name."""
    covered = _COVERED[table.name]
    values = covered.of_row(row)
    if not _equal(covered, values, getattr(row, checksum)):
        found = dict(zip(covered.names, values, strict=True))
        key = ", ".join(f"{column.name} {found[column.name]!r}" for column in table.primary_key if column.name in found)
        raise StoreDamagedError(f"a row of {table.name} is not as it was written, its checksum differs ({key})")


def _equal(covered: _Covered, values: Sequence[Any], checksum: Any) -> bool:
    try:
        return bool(_checksum(covered, values) == checksum)
    except (TypeError, ValueError, OverflowError, struct.error):  # another type than the column's: SQLite keeps any
        return False


def _checksum(covered: _Covered, values: Sequence[Any]) -> int:
    pairs = zip(covered.to_bytes, values, strict=True)
    return zlib.crc32(b"\0".join([_NONE if value is None else to_bytes(value) for to_bytes, value in pairs]))


def _to_bytes(column: Column[Any]) -> Callable[[Any], bytes]:
    if isinstance(column.type, Float):
        return lambda value: struct.pack("<d", float(value) + 0.0)  # SQLite keeps no sign of zero
    if isinstance(column.type, Integer):
        return lambda value: b"%d" % value
    return bytes if isinstance(column.type, LargeBinary) else str.encode


def _covered(table: Table) -> _Covered:
    left_out = (CHECKSUM, *_NUMBERED, *_CHANGING.get(table.name, ()))
    columns = [column for column in table.c if column.name not in left_out]
    names = [column.name for column in columns]
    return _Covered(names, [_to_bytes(column) for column in columns], attrgetter(*names))


_COVERED = {table.name: _covered(table) for table in GROUPS.metadata.sorted_tables if CHECKSUM in table.c}
