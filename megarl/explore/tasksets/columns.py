"""Columns of task files in other forms than verl's: slime's (``prompt``, ``label``, ``metadata``), and those that
``taskset.columns`` names, as of HF datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.core.errors import ConfigError, DataError

FIELDS = (
    "prompt",
    "ground_truth",
    "data_source",
    "ability",
    "extra_info",
    "images",
    "tools",
    "enable_thinking",
    "chat_template_kwargs",
)
"""Fields of a task that ``taskset.columns`` may name a column for; ``extra_info.NAME`` is one entry of extra_info."""
SLIME = ("label", "metadata")
"""slime's columns, where ``reward_model`` and ``extra_info`` are missing."""
ENTRY = "extra_info."


def check_fields(columns: Mapping[str, str]) -> None:
    """Raise ConfigError naming the first key that is no field of a task."""
    unknown = [name for name in columns if name not in FIELDS and not (name.startswith(ENTRY) and name != ENTRY)]
    if unknown:
        raise ConfigError(
            f"taskset.columns has {unknown[0]!r}, which is no field of a task; there are {', '.join(FIELDS)} and "
            f"{ENTRY}NAME"
        )


def in_verl_form(
    path: Path,
    names: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    data_source: str | None,
) -> tuple[list[str], list[dict[str, Any]]]:
    """(names of the columns, rows) as verl would have written them.

    Args:
        names: All columns of the file.
        columns: Field of a task -> column.
        data_source: That of rows that have none.

    Raises:
        ConfigError: ``columns`` has a field that no task has.
        DataError: the file lacks a column that ``columns`` names.
    """
    check_fields(columns)
    for field, column in columns.items():
        if column not in names:
            raise DataError(
                f"{path}: taskset.columns.{field}={column}: there is no such column; the columns are {list(names)}"
            )
    found = _slime_fields(names, columns) | dict(columns)
    changed = [_row(row, found, data_source) for row in rows]
    new = [field if field != "ground_truth" else "reward_model" for field in found if not field.startswith(ENTRY)]
    return [*names, *new, *(["data_source"] if data_source else [])], changed


def _slime_fields(names: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Fields that are in slime's columns: the file has them, and neither verl's nor one of ``columns``."""
    if "label" not in names or "reward_model" in names or "ground_truth" in columns:
        return {}
    with_info = "metadata" in names and "extra_info" not in names
    return {"ground_truth": "label"} | ({"extra_info": "metadata"} if with_info else {})


def _row(row: Mapping[str, Any], columns: Mapping[str, str], data_source: str | None) -> dict[str, Any]:
    changed = dict(row) | {field: row.get(column) for field, column in columns.items() if not field.startswith(ENTRY)}
    if "ground_truth" in columns:
        changed["reward_model"] = {"style": "rule", "ground_truth": changed.pop("ground_truth")}
    entries = {field[len(ENTRY) :]: row.get(column) for field, column in columns.items() if field.startswith(ENTRY)}
    if entries:
        info = changed.get("extra_info")
        changed["extra_info"] = {**(info if isinstance(info, dict) else {}), **entries}
    if changed.get("data_source") is None and data_source is not None:
        changed["data_source"] = data_source
    return changed
