"""verl-style parquet rows: ``data_source, prompt, ability, reward_model{style, ground_truth}, extra_info``.

A demonstration stands in a further column ``response``. Rows are counted from 0, as in every data frame.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.errors import DataError
from megarl.schema import Task

REQUIRED = ("data_source", "prompt", "reward_model")
COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info", "response")
RECIPE = b"megarl.recipe"
ROLES = ("system", "user", "assistant")


def read_rows(path: str | os.PathLike[str], *, require_response: bool = False, split: str | None = None) -> list[Task]:
    """Read and check every row of a parquet file.

    A row's task id is ``<split>/<row>``, the split being the file's stem unless given. With ``require_response`` each
    row must have a non-empty ``response``.

    Raises DataError naming the file, the row, the field, what was seen and what is expected.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; give a parquet file of verl rows, or let `megarl data` write it")
    try:
        table = pq.read_table(path, partitioning=None)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from error
    required = (*REQUIRED, "response") if require_response else REQUIRED
    missing = [name for name in required if name not in table.column_names]
    if missing:
        raise DataError(
            f"{path}: column {missing[0]!r} is missing; the columns are {table.column_names}, "
            f"needed are {list(required)}"
        )
    if table.num_rows == 0:
        raise DataError(f"{path}: has no rows")
    prefix = path.stem if split is None else split
    columns = [name for name in COLUMNS if name in table.column_names]
    return [
        _task(path, i, f"{prefix}/{i}", row, require_response)
        for i, row in enumerate(table.select(columns).to_pylist())
    ]


def write_rows(path: str | os.PathLike[str], tasks: Sequence[Task], recipe: Mapping[str, Any] | None = None) -> None:
    """Write tasks as verl rows with nested columns; ``response`` is a column when any task has one.

    ``recipe``: the settings that they were made with, kept in the file for ``read_recipe``.

    The file appears whole or not at all. Parquet gives all rows of a nested column the same keys: a key that only some
    tasks have reads back as None in the others. Raises DataError when one key has values of different types, or when the
    file cannot be written.
    """
    path = Path(path)
    with_response = any(task.response is not None for task in tasks)
    rows = [_row(task, with_response) for task in tasks]
    try:
        table = pa.Table.from_pylist(rows)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(f"{path}: the rows do not share one schema ({error})") from error
    if recipe is not None:
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), RECIPE: json.dumps(recipe)})
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            pq.write_table(table, temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error}); make room or give another path") from error


def read_recipe(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The settings that a file's rows were made with; None when ``write_rows`` got none, or for a file of other making."""
    try:
        found = (pq.read_schema(path).metadata or {}).get(RECIPE)
        value = json.loads(found) if found else None
    except (pa.ArrowInvalid, OSError, ValueError):
        return None  # read_rows says what is wrong with it
    return value if isinstance(value, dict) else None


def _row(task: Task, with_response: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "data_source": task.data_source,
        "prompt": list(task.prompt),
        "ability": task.ability,
        "reward_model": task.reward_model,
        # Parquet has no empty struct.
        "extra_info": task.extra_info or None,
    }
    return row | {"response": task.response} if with_response else row


def _task(path: Path, number: int, task_id: str, row: dict[str, Any], require_response: bool) -> Task:
    def refuse(field: str, expected: str, seen: Any) -> NoReturn:
        raise DataError(f"{path}: row {number}: {field} must be {expected}, got {_short(seen)}")

    source, prompt, reward_model = row["data_source"], row["prompt"], row["reward_model"]
    if not isinstance(source, str) or not source:
        refuse("data_source", "a non-empty string", source)
    if not isinstance(prompt, list) or not prompt:
        refuse("prompt", "a non-empty list of {role, content} messages", prompt)
    for i, message in enumerate(prompt):
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            refuse(f"prompt[{i}]", "a message {role, content}", message)
        if message["role"] not in ROLES:
            refuse(f"prompt[{i}].role", f"one of {', '.join(ROLES)}", message["role"])
        if not isinstance(message["content"], str) or not message["content"]:
            refuse(f"prompt[{i}].content", "a non-empty string", message["content"])
    if prompt[-1]["role"] != "user":
        refuse(f"prompt[{len(prompt) - 1}].role", "user, since the model answers the last message", prompt[-1]["role"])
    if not isinstance(reward_model, dict):
        refuse("reward_model", "a struct {style, ground_truth}", reward_model)
    if reward_model.get("ground_truth") is None:
        refuse("reward_model.ground_truth", "the expected answer", reward_model.get("ground_truth"))
    ability, extra_info, response = row.get("ability") or "", row.get("extra_info") or {}, row.get("response")
    if not isinstance(ability, str):
        refuse("ability", "a string", ability)
    if not isinstance(extra_info, dict):
        refuse("extra_info", "a struct or null", extra_info)
    if not isinstance(response, str | None) or (require_response and not response):
        refuse("response", "a non-empty string", response)
    for field, value in (("reward_model", reward_model), ("extra_info", extra_info)):
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            refuse(field, f"made of JSON values ({error})", value)
    messages = tuple({"role": message["role"], "content": message["content"]} for message in prompt)
    return Task(task_id, source, messages, ability, reward_model, extra_info, response)


def _short(value: Any, limit: int = 80) -> str:
    text = f"{value!r} ({type(value).__name__})"
    return text if len(text) <= limit else text[: limit - 3] + "..."
