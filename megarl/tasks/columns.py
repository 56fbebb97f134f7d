"""Columns of files in other forms than verl's: slime's (``prompt``, ``label``, ``metadata``), ShareGPT's and ORZ's
(``conversations``), and those that ``taskset.columns`` names, as of HF datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megarl.core.errors import ConfigError, DataError
from megarl.tasks.templates.forms import CONVERSATION, with_conversations, without_response

Kind = Literal["tasks", "demonstrations", "preferences"]
"""Kind of the rows of train and eval; those of warm_start and expert are always demonstrations."""
ALL = ("prompt", "data_source", "extra_info", "tools", "enable_thinking", "chat_template_kwargs")
FIELDS: dict[Kind, tuple[str, ...]] = {
    "tasks": (*ALL, "ground_truth", "ability", "images"),
    "demonstrations": (*ALL, "response", "messages", "ability", "images"),
    "preferences": (*ALL, "chosen", "rejected", "margin", "images"),
}
"""Fields of a row allowed in ``taskset.columns``; ``extra_info.NAME`` is one entry of extra_info."""
SLIME = ("label", "metadata")
"""slime's columns, used if ``reward_model`` and ``extra_info`` are missing."""
ENTRY = "extra_info."


def check_fields(columns: Mapping[str, str], kind: Kind = "tasks") -> None:
    """Raise ConfigError naming the first key that is not a field of this kind of rows."""
    known = FIELDS[kind]
    unknown = [name for name in columns if name not in known and not (name.startswith(ENTRY) and name != ENTRY)]
    if unknown:
        raise ConfigError(
            f"taskset.columns has {unknown[0]!r}, which is not a field of {kind}; the fields are {', '.join(known)} "
            f"and {ENTRY}NAME"
        )


def check_required(path: Path, names: Sequence[str], required: Sequence[str]) -> None:
    """Raise DataError naming the first column of ``required`` that is missing, and the settings that replace it."""
    missing = [name for name in required if name not in names]
    if not missing:
        return
    field = "ground_truth" if missing[0] == "reward_model" else missing[0]
    fixes = [f"name the column that has it (taskset.columns={{{field}: COLUMN}})"]
    if field == "data_source":
        fixes.append("name the verifier of all rows (taskset.data_source=math)")
        fixes.append("score them by a function of yours (reward.path)")
    raise DataError(
        f"{path}: column {missing[0]!r} is missing; the columns are {list(names)}, needed are {list(required)}; "
        f"{', or '.join(fixes)}"
    )


def in_verl_form(
    path: Path,
    names: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    data_source: str | None = None,
    kind: Kind = "tasks",
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return (names of the columns, rows) in verl's form.

    Args:
        names: All columns of the file.
        columns: Field of a row -> column.
        data_source: That of rows that have none.

    Raises:
        ConfigError: ``columns`` has a field that no such row has.
        DataError: the file lacks a column that ``columns`` names.
    """
    check_fields(columns, kind)
    for field, column in columns.items():
        if column not in names:
            raise DataError(
                f"{path}: taskset.columns.{field}={column}: there is no such column; the columns are {list(names)}"
            )
    names, rows = with_conversations(names, rows)
    found = _conversation_fields(names, columns, kind)
    found |= (_slime_fields(names, columns) if kind == "tasks" else {}) | dict(columns)
    changed = [_row(row, found, data_source) for row in rows]
    if kind == "tasks" and found.get("prompt") == CONVERSATION:
        changed = [{**row, "prompt": without_response(row["prompt"])} for row in changed]
    new = [field if field != "ground_truth" else "reward_model" for field in found if not field.startswith(ENTRY)]
    return [*names, *new, *(["data_source"] if data_source else [])], changed


def _conversation_fields(names: Sequence[str], columns: Mapping[str, str], kind: Kind) -> dict[str, str]:
    """Return the field taken from ``conversations`` if the file has neither that field nor a column for it."""
    field = "messages" if kind == "demonstrations" else "prompt"
    others = {field, "prompt", "messages"} & {*names, *columns}
    return {field: CONVERSATION} if CONVERSATION in names and not others else {}


def _slime_fields(names: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Return the fields to take from slime's columns: the file has these, but neither verl's nor one of ``columns``."""
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
