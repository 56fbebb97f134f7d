"""Rows of preferences, in TRL's form: ``prompt, chosen, rejected``, optionally ``margin, data_source, extra_info``.
ShareGPT's and HH-RLHF's forms are converted to it (``forms.py``).

Answers are texts, or chat messages that end with the assistant's. Messages before it repeat the prompt, and may replace
it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.core.schema import Message, Preference
from megarl.tasks.image_rows import columns_of, images_of, with_messages
from megarl.tasks.row_files import Faults, RowLocation, json_struct, read_table, sound_rows, source_of, write_table
from megarl.tasks.rows import check_required, in_verl_form
from megarl.tasks.templates import forms
from megarl.tasks.templates.messages import ASKING, OPTIONS, answer_of, prompt_of, template_kwargs_of, with_lists

ANSWERS = ("chosen", "rejected")
COLUMNS = ("prompt", *ANSWERS, "margin", "data_source", "extra_info", "images", "image", "videos", *OPTIONS)


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
    names, rows = read_table(path, (*COLUMNS, *forms.COLUMNS, *columns.values()))
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
    rows = [_row(preference) | ({"margin": preference.margin} if margins else {}) for preference in preferences]
    if any(preference.images for preference in preferences):
        rows = [{**row, "images": images} for row, images in zip(rows, columns_of(preferences), strict=True)]
    write_table(path, rows, recipe)


def _row(preference: Preference) -> dict[str, Any]:
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
