"""Kinds of rows in the files of a job: the algorithm decides, the generator writes what it needs.

Where rows have images, the model's processor counts their tokens.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config import Config
from megarl.core.schema import Preference, Task
from megarl.run.run_dir.changes import has_checkpoints
from megarl.tasks import (
    ChatTokenizer,
    Faults,
    Kind,
    Place,
    encode_rows,
    place_of_row,
    processed,
    read_preferences,
    read_rows,
    read_tasks,
    recorded,
    single_file,
    sources_of,
    with_templates,
)
from megarl.tasks.bad_rows import WHOLE

if TYPE_CHECKING:
    from megarl.tasks.images.processor import Processor

log = logging.getLogger(__name__)

Rows = Sequence[Task | Preference]
SPLITS = ("train", "eval")
OWN_REWARD = "user"
"""``data_source`` of tasks without one, where ``reward.path`` scores them all."""


def splits_of(config: Config) -> tuple[str, ...]:
    """Splits of ``SPLITS`` whose rows a job reads: a bench has no training rows."""
    return ("eval",) if config.run.mode == "bench" else SPLITS


def needs_expert_rows(config: Config) -> bool:
    """Return True if the algorithm trains on ``taskset.expert``.

    Raises:
        ConfigError: there is no such algorithm.
    """
    from megarl.learn import algorithms  # imports torch

    return "expert" in algorithms.get(config.algorithm.name).needs


def kind_of_rows(config: Config) -> Kind:
    """Kind of the rows of train and eval. Rows of warm_start and expert are demonstrations whatever the algorithm.

    Raises:
        ConfigError: there is no such algorithm.
    """
    from megarl.learn import algorithms  # imports torch

    algorithm = algorithms.get(config.algorithm.name)
    if not algorithm.offline:
        return "tasks"
    return "preferences" if "pairs" in algorithm.needs else "demonstrations"


def read_split(config: Config, split: str, dropped: Counter[str] | None = None, faults: Faults | None = None) -> Rows:
    """Rows of train, eval, warm_start or expert; their ids begin with the split's name, since two files may have one.

    With ``taskset.bad_rows=drop`` malformed rows are left out, but for those of expert. A run that goes on leaves out
    the demonstrations and preferences that its start has left out, and no others.

    Args:
        dropped: Is given the number of rows that a user's file drops.
        faults: Is given the bad rows that are left out.

    Raises:
        DataError: a row is not what the algorithm needs, with file, row and field.
    """
    taskset, kind = config.taskset, kind_of_rows(config) if split in SPLITS else "demonstrations"
    found: Faults | None = ({} if faults is None else faults) if drops(config, split) else None
    if kind == "tasks":
        # A function of the user's needs no name of a verifier.
        tasks = read_tasks(taskset, split, OWN_REWARD if config.reward.path is not None else None, found)
        return processed(tasks, taskset, split, dropped, config.reward.judge)
    path, run_dir = Path(single_file(taskset, split)), Path(config.run.dir)
    columns = taskset.columns if split in SPLITS else {}  # warm_start and expert have columns of their own
    skipped = (
        recorded(taskset, run_dir).get(split, frozenset()) if found is not None and has_checkpoints(run_dir) else None
    )
    if skipped is not None:
        (found or {}).update(dict.fromkeys(skipped, ""))
        found = None
    if kind == "preferences":
        return read_preferences(path, split=split, columns=columns, skipped=skipped or (), faults=found)
    rows = read_rows(path, require_response=True, split=split, columns=columns, skipped=skipped or (), faults=found)
    return [with_templates(row, taskset) for row in rows]


def drops(config: Config, split: str) -> bool:
    """Return True if bad rows of a split are left out. Expert rows are imported whole, or not at all."""
    return config.taskset.bad_rows == "drop" and split != WHOLE


def log_bad_rows(split: str, faults: Faults, total: int) -> None:
    """Log how many of a split's rows ``taskset.bad_rows=drop`` leaves out, with the first of them; nothing for none."""
    if not faults:
        return
    first = next(iter(faults.values()))
    more = f"; the first is {first}" if first else ", as at the run's start"
    log.warning("taskset.bad_rows=drop: %d of %d rows of taskset.%s are left out%s", len(faults), total, split, more)


def place(config: Config, split: str, row: Task | Preference) -> str:
    """``FILE: row N (taskset.SPLIT)`` of a row that ``read_split`` has read."""
    return f"{place_of_row(config.taskset, split, row)} (taskset.{split})"


def files(config: Config, split: str) -> str:
    """Name the files of train or eval."""
    return ", ".join(source.path for source in sources_of(config.taskset, split).values())


def processor_of(config: Config, splits: Iterable[Rows]) -> Processor | None:
    """Return the processor of ``model.path``, with the limits of ``model``; None where no row has images.

    Raises:
        CheckpointError: there is none, or it cannot be loaded.
    """
    if not any(row.images for rows in splits for row in rows):
        return None
    from megarl.tasks.images.processor import Processor  # imports torch and transformers

    return Processor.open(config.model.path, config.model.min_image_pixels, config.model.max_image_pixels)


def lengths_with_images(
    rows: Sequence[Task | Preference], tokenizer: ChatTokenizer, processor: Processor | None, *, path: Place
) -> list[int]:
    """Tokens of each row's prompt, images included where there is a processor.

    Raises:
        DataError: naming file and row of a prompt that the chat template or the processor refuses.
    """
    if processor is None:
        return [len(ids) for ids in encode_rows(rows, tokenizer, path=path)]
    from megarl.tasks.images.processor import prompt_lengths

    return prompt_lengths(rows, tokenizer, processor, path=path)
