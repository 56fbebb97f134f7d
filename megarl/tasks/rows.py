"""Rows of tasks in verl's form (``data_source, prompt, ability, reward_model{style, ground_truth}, extra_info``) or
of other projects, whose rows are brought into it; and rows of preferences in TRL's form.

A demonstration is a prompt with its answer: ``prompt`` and ``response`` (TRL: ``completion``), or ``messages`` whose
last one is the assistant's. A text is the answer as the model is to write it; a message is rendered by the model's chat
template. A row may have ``tools``, ``enable_thinking`` and ``chat_template_kwargs`` (``tasks/templates/messages.py``).
Either may have ``images`` (``tasks/image_rows.py``).

A preference has ``prompt, chosen, rejected``, optionally ``margin, data_source, extra_info``; ShareGPT's and HH-RLHF's
forms are converted to it. Answers are texts, or chat messages that end with the assistant's. Messages before it repeat
the prompt, and may replace it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Message, Preference, Task
from megarl.tasks.harbor import read_folders
from megarl.tasks.image_rows import columns_of, images_of, with_messages, with_text
from megarl.tasks.row_files import (
    Faults,
    RowLocation,
    json_struct,
    read_table,
    sound_rows,
    source_of,
    text_of,
    write_table,
)
from megarl.tasks.templates import forms
from megarl.tasks.templates.forms import CONVERSATION, with_conversations, without_response
from megarl.tasks.templates.messages import (
    ASKING,
    OPTIONS,
    answer_of,
    messages_of,
    prompt_of,
    template_kwargs_of,
    with_lists,
)

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
    changed = [_renamed_row(row, found, data_source) for row in rows]
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


def _renamed_row(row: Mapping[str, Any], columns: Mapping[str, str], data_source: str | None) -> dict[str, Any]:
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


TASK = ("data_source", "prompt", "reward_model")
DEMONSTRATION = ("prompt", "response")
COLUMNS = (
    *("data_source", "prompt", "ability", "reward_model", "extra_info", "response", "images", "image", "videos"),
    *OPTIONS,
)


def read_rows(
    path: str | os.PathLike[str],
    *,
    require_response: bool = False,
    split: str | None = None,
    columns: Mapping[str, str] | None = None,
    data_source: str | None = None,
    skipped: Collection[str] = (),
    faults: Faults | None = None,
) -> list[Task]:
    """Read and check every row of a parquet, json or jsonl file, or every task of a folder in Harbor's form.

    A row's task id is ``<split>/<row>``, the split being the file's stem unless given. With ``require_response`` the
    rows are demonstrations: each has a response, and what only a reward needs (``data_source``, ``reward_model``) may
    be left out.

    Args:
        columns: ``taskset.columns``.
        data_source: That of tasks whose row has none.
        skipped: Ids of rows that are left out unread.
        faults: Is given the bad rows, which are left out; None refuses them.

    Raises DataError naming the file, the row, the field, what was seen and what is expected.
    """
    path, columns = Path(path), columns or {}
    if path.is_dir() and not require_response:
        return read_folders(path, path.stem if split is None else split)
    names, rows = read_table(path, (*COLUMNS, "completion", "messages", *SLIME, *forms.COLUMNS, *columns.values()))
    if not require_response:
        names, rows = in_verl_form(path, names, rows, columns, data_source)
        check_required(path, names, TASK)
    else:
        names, rows = in_verl_form(path, names, rows, columns, kind="demonstrations")
        if "messages" not in names:
            check_required(path, [*names, "response"] if "completion" in names else names, DEMONSTRATION)
    prefix = path.stem if split is None else split
    return sound_rows(path, prefix, rows, _demonstration if require_response else _task, skipped, faults)


def write_rows(path: str | os.PathLike[str], tasks: Sequence[Task], recipe: Mapping[str, Any] | None = None) -> None:
    """Write tasks as verl rows; ``response`` and ``images`` are columns when any task has them. See ``write_table``."""
    assert not any(task.answer or task.chat_template_kwargs for task in tasks), (
        "generated rows are texts without template options"
    )
    with_response = any(task.response is not None for task in tasks)
    rows = [_row(task, with_response) for task in tasks]
    if any(task.images for task in tasks):
        rows = [{**row, "images": images} for row, images in zip(rows, columns_of(tasks), strict=True)]
    write_table(path, rows, recipe)


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


def _task(location: RowLocation, task_id: str, row: Mapping[str, Any]) -> Task:
    row = with_lists(location, row, ("prompt",))
    source = text_of(location, "data_source", row["data_source"])
    images, messages = images_of(location, with_messages(row))
    prompt = prompt_of(location, "prompt", messages)
    if not isinstance(row["reward_model"], dict):
        location.refuse("reward_model", "a struct {style, ground_truth}", row["reward_model"])
    reward_model = json_struct(location, "reward_model", row["reward_model"])
    if reward_model.get("ground_truth") is None:
        location.refuse("reward_model.ground_truth", "the expected answer", reward_model.get("ground_truth"))
    response = row.get("response")
    if not isinstance(response, str | None):
        location.refuse("response", "a non-empty string", response)
    return Task(task_id, source, prompt, *_common(location, row), response, images, template_kwargs_of(location, row))


def _demonstration(location: RowLocation, task_id: str, row: Mapping[str, Any]) -> Task:
    row = with_lists(location, row, ("prompt", "messages", "response", "completion"))
    field = "completion" if row.get("response") is None and row.get("completion") is not None else "response"
    response = row.get(field)
    if response is None and row.get("messages") is not None:
        return _chat(location, task_id, row)
    images, asked = images_of(location, with_messages({"prompt": None, **row}))
    prompt = prompt_of(location, "prompt", asked)
    if isinstance(response, list):
        text, answer, before = answer_of(location, field, response)
    else:
        text, answer, before = text_of(location, field, response), None, ()
    if before:
        location.refuse(field, "a text, or one message of the assistant", response)
    return _demonstrated(location, task_id, row, prompt, text, answer, images)


def _chat(location: RowLocation, task_id: str, row: Mapping[str, Any]) -> Task:
    images, messages = _chat_images(location, row)
    *prompt, answer = messages_of(location, "messages", messages)
    last = len(prompt)
    if answer["role"] != "assistant":
        location.refuse(
            f"messages[{last}].role",
            "assistant, since the last message is what the model learns to say",
            answer["role"],
        )
    if not prompt or prompt[-1]["role"] not in ASKING:
        seen = prompt[-1]["role"] if prompt else None
        location.refuse(
            f"messages[{last - 1}].role" if prompt else "messages", "a user's message before the assistant's", seen
        )
    return _demonstrated(location, task_id, row, tuple(prompt), answer.get("content") or "", answer, images)


def _chat_images(location: RowLocation, row: Mapping[str, Any]) -> tuple[tuple[bytes, ...], Any]:
    """(images of the messages before the answer, all messages with texts for contents that are lists of parts)."""
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        return (), messages
    images, asked = images_of(location, {**row, "prompt": messages[:-1]}, "messages")
    return images, [*asked, with_text(messages[-1])]


def _demonstrated(
    location: RowLocation,
    task_id: str,
    row: Mapping[str, Any],
    prompt: tuple[Message, ...],
    text: str,
    answer: Message | None,
    images: tuple[bytes, ...],
) -> Task:
    kwargs = template_kwargs_of(location, row)
    return Task(task_id, source_of(location, row), prompt, *_common(location, row), text, images, kwargs, answer)


def _common(location: RowLocation, row: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """ability, reward_model, extra_info."""
    ability = row.get("ability") or ""
    if not isinstance(ability, str):
        location.refuse("ability", "a string", ability)
    reward_model = json_struct(location, "reward_model", row.get("reward_model"))
    return ability, reward_model, json_struct(location, "extra_info", row.get("extra_info"))


ANSWERS = ("chosen", "rejected")
PREFERENCE_COLUMNS = ("prompt", *ANSWERS, "margin", "data_source", "extra_info", "images", "image", "videos", *OPTIONS)


def read_preferences(
    path: str | os.PathLike[str],
    *,
    split: str | None = None,
    columns: Mapping[str, str] | None = None,
    skipped: Collection[str] = (),
    faults: Faults | None = None,
) -> list[Preference]:
    """Read and check every row of a parquet, json or jsonl file. A row's id is ``<split>/<row>``, as in ``read_rows``.

    Args:
        columns: ``taskset.columns``.
        skipped: Ids of rows to leave out unread.
        faults: Collects bad rows, which are left out; with None a bad row is an error.

    Raises DataError naming the file, row, field, the value and the expected form.
    """
    path, columns = Path(path), columns or {}
    names, rows = read_table(path, (*PREFERENCE_COLUMNS, *forms.COLUMNS, *columns.values()))
    names, rows = in_verl_form(path, names, rows, columns, kind="preferences")
    check_required(path, names, ANSWERS)
    prefix = path.stem if split is None else split
    return sound_rows(path, prefix, rows, _preference, skipped, faults)


def write_preferences(
    path: str | os.PathLike[str], preferences: Sequence[Preference], recipe: Mapping[str, Any] | None = None
) -> None:
    """Write preferences as rows with text answers; ``margin`` and ``images`` are columns if any row has them. See
    ``write_table``."""
    assert not any(any(row.answers) or row.chat_template_kwargs for row in preferences), (
        "generated rows are texts without template options"
    )
    margins = any(preference.margin for preference in preferences)
    rows = [
        _preference_row(preference) | ({"margin": preference.margin} if margins else {}) for preference in preferences
    ]
    if any(preference.images for preference in preferences):
        rows = [{**row, "images": images} for row, images in zip(rows, columns_of(preferences), strict=True)]
    write_table(path, rows, recipe)


def _preference_row(preference: Preference) -> dict[str, Any]:
    return {
        "data_source": preference.data_source or None,
        "prompt": list(preference.prompt),
        "chosen": preference.chosen,
        "rejected": preference.rejected,
        "extra_info": preference.extra_info or None,  # parquet cannot store an empty struct
    }


def _preference(location: RowLocation, task_id: str, row: Mapping[str, Any]) -> Preference:
    row = with_lists(location, row, ("prompt", *ANSWERS))
    images, given = images_of(location, with_messages({"prompt": None, **row}))
    (chosen, chosen_message, before), (rejected, rejected_message, before_rejected) = (
        answer_of(location, name, row[name]) for name in ANSWERS
    )
    if before != before_rejected:
        location.refuse("rejected", "an answer to the same messages as chosen", row["rejected"])
    if given is None and not before:
        location.refuse(
            "prompt", "a text or messages, where chosen and rejected are not messages that repeat it", given
        )
    prompt = before if given is None and before else prompt_of(location, "prompt", given)
    if before and before != prompt:
        location.refuse("chosen", "an answer to prompt, or the prompt's own messages with one", row["chosen"])
    if prompt[-1]["role"] not in ASKING:
        location.refuse(
            f"chosen[{len(prompt) - 1}].role", "user or tool, since the model answers that message", prompt[-1]["role"]
        )
    if chosen == rejected and _others(chosen_message) == _others(rejected_message):
        location.refuse("rejected", "another answer than chosen", rejected)
    return Preference(
        task_id=task_id,
        data_source=source_of(location, row),
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        margin=_margin(location, row.get("margin")),
        extra_info=json_struct(location, "extra_info", row.get("extra_info")),
        chat_template_kwargs=template_kwargs_of(location, row),
        answers=(chosen_message, rejected_message),
        images=images,
    )


def _others(message: Message | None) -> dict[str, Any]:
    """Return the fields of an answer other than role and content."""
    return {name: value for name, value in (message or {}).items() if name not in ("role", "content")}


def _margin(location: RowLocation, value: Any) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        location.refuse("margin", "a finite number or null", value)
    return float(value)
