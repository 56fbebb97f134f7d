"""Files of rows: parquet or JSON; rows that are left out.

A row is a JSON object. A list of messages in ShareGPT's form is one too: the column ``conversations`` has it. Messages
count rows and lines from 1.

The start of a run finds them and records them in ``RUN/bad_rows.json``. Trainer ranks leave out the recorded ones, so
they have the rows that the start has checked, after a resume too.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import os
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.config.taskset import TasksetConfig
from megarl.core.durable import whole
from megarl.core.errors import DataError
from megarl.tasks.templates.forms import CONVERSATION, is_conversation

RECIPE = b"megarl.recipe"


@dataclass(frozen=True)
class RowLocation:
    """Position of a value, for error messages."""

    path: Path
    row: int
    """Its number among the rows, from 0."""

    def refuse(self, field: str, expected: str, seen: Any) -> NoReturn:
        """Raise DataError for an unexpected value."""
        raise DataError(f"{place_of(self.path, self.row)}: {field} must be {expected}, got {short(seen)}")


def place_of(path: str | os.PathLike[str], row: int) -> str:
    """``FILE: row N`` for row number ``row`` (from 0) of a file, or ``FILE: line N`` of JSON lines; N counts from
    1. A file of lines that is gone has rows, since its empty lines are not known."""
    lines = None
    if is_json(path) and Path(path).is_file():
        lines = _lines_of_rows(Path(path), Path(path).stat().st_mtime_ns)
    if lines is None:
        return f"{path}: row {row + 1}"
    return f"{path}: line {lines[row] if row < len(lines) else row + 1}"


@functools.lru_cache(maxsize=4)  # a file may have many bad rows
def _lines_of_rows(path: Path, changed_ns: int) -> array[int] | None:
    """Number of the line of each row of a JSON file that has rows as lines; None for one list of rows.

    Args:
        changed_ns: When the file was changed, so that another file of this name is read.
    """
    if is_list(path):
        return None
    with path.open("rb") as file:
        return array("q", (number for number, line in enumerate(file, 1) if line.strip()))


def is_jsonl(path: str | os.PathLike[str]) -> bool:
    """Return True if a file is jsonl by its name."""
    return os.path.splitext(path)[1] == ".jsonl"


def is_json(path: str | os.PathLike[str]) -> bool:
    """Return True if a file is JSON by its name: lines, or one list."""
    return os.path.splitext(path)[1] in (".json", ".jsonl")


def read_table(path: Path, wanted: Sequence[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return (names of all columns, rows with the existing columns of ``wanted``); a missing JSON key is None.

    Raises DataError when there is no such file, it cannot be read, or it has no rows.
    """
    if path.is_dir():
        raise DataError(f"{path}: is a folder; give a parquet, json or jsonl file")
    if not path.is_file():
        raise DataError(f"{path}: no such file; give a parquet, json or jsonl file, or let `megarl data` write it")
    names, rows = _read_json(path, wanted) if is_json(path) else _read_parquet(path, wanted)
    if not rows:
        raise DataError(f"{path}: has no rows")
    return names, rows


def _read_parquet(path: Path, wanted: Sequence[str]) -> tuple[list[str], list[dict[str, Any]]]:
    try:
        with pq.ParquetFile(path) as file:  # pq.read_table imports pyarrow.dataset, for 0.3 s in each process
            table = _in_microseconds(file.read())
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"{path}: not a readable parquet file ({str(error).splitlines()[0]}); a file of JSON must be called "
            ".json or .jsonl"
        ) from error
    names = list(table.column_names)
    found = [name for name in wanted if name in names]
    rows = table.select(found).to_pylist() if found else [{} for _ in range(table.num_rows)]
    return names, rows


def _in_microseconds(table: pa.Table) -> pa.Table:
    """Return the table with times in microseconds, since Python lacks the nanoseconds that pandas writes."""
    schema = pa.schema([field.with_type(_to_microseconds(field.type)) for field in table.schema])
    return table if schema.equals(table.schema) else table.cast(schema, safe=False)


def _to_microseconds(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_to_microseconds(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_to_microseconds(kind.value_type)))
    return kind


def _read_json(path: Path, wanted: Sequence[str]) -> tuple[list[str], list[dict[str, Any]]]:
    names: dict[str, None] = {}
    rows: list[dict[str, Any]] = []
    for place, found, with_halves in _json_values(path):
        row = {CONVERSATION: found} if is_conversation(found) else found
        if not isinstance(row, dict):
            raise DataError(f"{path}: {place} must be a JSON object, got {short(row)}")
        names |= dict.fromkeys(row)
        rows.append({name: row[name] for name in wanted if name in row})
        if with_halves:
            _check_characters(path, place, rows[-1])
    found = [name for name in wanted if name in names]
    return list(names), [{name: row.get(name) for name in found} for row in rows]


def _json_values(path: Path) -> Iterator[tuple[str, Any, bool]]:
    """Each row of a JSON file with its place, and True if its text may have halves of surrogate pairs."""
    if is_list(path):
        text = path.read_bytes()
        try:
            values = json.loads(text.decode())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: begins with '[' and is no JSON list of rows ({error}); fix it") from error
        with_halves = b"\\ud" in text.lower()
        yield from ((f"row {number}", row, with_halves) for number, row in enumerate(values, 1))
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}: line {number} is not JSON ({error}): {short(line)}") from error
            yield f"line {number}", row, b"\\ud" in line.lower()


def is_list(path: Path) -> bool:
    """Return True if a file called ``.json`` is one list of rows. Other JSON has a row a line."""
    if os.path.splitext(path)[1] != ".json":
        return False
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    if not first.lstrip().startswith(b"["):
        return False
    try:
        return not is_conversation(json.loads(first.decode()))
    except (ValueError, RecursionError):
        return True


def _check_characters(path: Path, place: str, row: Mapping[str, Any]) -> None:
    """Raise DataError for a value that UTF-8, and so tokenizers and stores, cannot encode."""
    for name, value in row.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{path}: {place}: {name} has {error.object[error.start]!r}, half of a character, which no "
                "tokenizer takes; write the whole character, or leave it out"
            ) from error


def write_table(
    path: str | os.PathLike[str],
    rows: Sequence[Mapping[str, Any]],
    recipe: Mapping[str, Any] | None,
    schema: pa.Schema | None = None,
) -> None:
    """Write rows as parquet with nested columns.

    Args:
        recipe: The settings that they were made with, for ``read_recipe``.
        schema: Types of the columns; None takes those of the values.

    The file appears whole or not at all. Parquet gives all rows of a nested column the same keys: a key that only some
    rows have reads back as None in the others. Raises DataError when one key has values of different types, or when the
    file cannot be written.
    """
    path = Path(path)
    try:
        table = pa.Table.from_pylist(list(rows), schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(f"{path}: the rows do not share one schema ({error})") from error
    if recipe is not None:
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), RECIPE: json.dumps(recipe)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as temporary:
            pq.write_table(table, temporary)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror or error}); make room or give another path"
        ) from error


def read_recipe(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The settings that a file's rows were made with; None when it was written without, or for a file of other
    making."""
    if is_json(path):
        return None
    try:
        found = (pq.read_schema(path).metadata or {}).get(RECIPE)
        value = json.loads(found) if found else None
    except (pa.ArrowInvalid, OSError, ValueError):
        return None  # the reader of its rows reports the error
    return value if isinstance(value, dict) else None


# ---------------------------------------------------------------- values of a row


def json_struct(location: RowLocation, field: str, value: Any) -> dict[str, Any]:
    """A dict of JSON values, made by ``json_value``; null is an empty one. Raises DataError otherwise."""
    try:
        value = json_value(value)
    except RecursionError as error:
        location.refuse(field, f"made of JSON values ({error})", "values nested too deep")
    if value is None:
        return {}
    if not isinstance(value, dict):
        location.refuse(field, "a struct or null", value)
    try:
        _STRICT.encode(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        location.refuse(field, f"made of JSON values ({error})", value)
    return value


_STRICT = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_JSON_TYPES = (str, int, bool, type(None))


def json_value(value: Any) -> Any:
    """Return a row's value in JSON types, so that the store and a resumed run have equal values.

    NaN, infinities and missing times are null, times are ISO 8601 text, durations are seconds. A decimal is the number
    that is equal to it, or its text. Other values stay.
    """
    if type(value) in _JSON_TYPES:  # most values: a file of 10,000 rows has 300,000
        return value
    if isinstance(value, dict):
        return {name: json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date; pandas' NaT is a datetime
        return value.isoformat() if value == value else None
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return _number(value)
    return value


def _number(value: Decimal) -> int | float | str | None:
    if not value.is_finite():
        return None
    if value == value.to_integral_value():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)


def text_of(location: RowLocation, field: str, value: Any) -> str:
    """Return a non-empty text. Raises DataError otherwise."""
    if not isinstance(value, str) or not value:
        location.refuse(field, "a non-empty string", value)
    return value


def source_of(location: RowLocation, row: Mapping[str, Any]) -> str:
    """Return an optional ``data_source``."""
    source = row.get("data_source")
    return "" if source is None else text_of(location, "data_source", source)


def short(value: Any, limit: int = 80) -> str:
    """Shorten a value for a message."""
    text = f"{value!r} ({type(value).__name__})"
    return text if len(text) <= limit else text[: limit - 3] + "..."


FILE = "bad_rows.json"
FIX = "fix the row, or leave out all such rows (taskset.bad_rows=drop)"
WHOLE = "expert"
"""Split with rows imported all or none."""

Faults = MutableMapping[str, str]
"""Task id -> error of a row that is left out."""
Row = TypeVar("Row")


def sound_rows(
    path: Path,
    prefix: str,
    rows: Sequence[Mapping[str, Any]],
    read: Callable[[RowLocation, str, Mapping[str, Any]], Row],
    skipped: Collection[str] = (),
    faults: Faults | None = None,
) -> list[Row]:
    """Read the rows of a file.

    Args:
        prefix: Begins a task's id, before ``/`` and the row's number.
        read: Reads one row. Raises DataError for a bad one.
        skipped: Ids of rows that are left out unread.
        faults: Is given the bad rows; None refuses them.

    Raises:
        DataError: a row is bad and may not be left out; or all are left out.
    """
    found: list[Row] = []
    first = ""
    for number, row in enumerate(rows):
        task_id = f"{prefix}/{number}"
        if task_id in skipped:
            continue
        try:
            found.append(read(RowLocation(path, number), task_id, row))
        except DataError as error:
            if faults is None:
                raise DataError(f"{error}; {_fix(prefix, bool(skipped))}") from error
            first = first or str(error)
            faults[task_id] = str(error)
    if not found:
        raise DataError(f"{path}: taskset.bad_rows=drop leaves none of the {len(rows)} rows; the first is {first}")
    return found


def _fix(prefix: str, goes_on: bool) -> str:
    """Name the fix of a bad row that may not be left out."""
    if prefix.partition("/")[0] == WHOLE:
        return "fix the row, or drop it"
    return "fix the row, which was sound at the run's start" if goes_on else FIX


def record(run_dir: Path, faults: Mapping[str, Mapping[str, str]]) -> None:
    """Record the bad rows of each split. Raises DataError if the file cannot be written."""
    path = run_dir / FILE
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with whole(path) as temporary:
            Path(temporary).write_text(json.dumps({split: sorted(found) for split, found in faults.items()}))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror or error}); make room, or set another run.dir"
        ) from error


def recorded(taskset: TasksetConfig, run_dir: Path) -> dict[str, frozenset[str]]:
    """Return split -> ids of bad rows left out at the start of a run; none with ``taskset.bad_rows=refuse``."""
    if taskset.bad_rows == "refuse":
        return {}
    try:
        text = (run_dir / FILE).read_text()
    except FileNotFoundError:
        return {}
    return {split: frozenset(found) for split, found in json.loads(text).items()}
