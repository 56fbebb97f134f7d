"""Kinds of rows in a job's files, determined by the algorithm.

The model's processor counts the tokens of images.
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
"""``data_source`` of tasks without one, if ``reward.path`` scores all tasks."""


def splits_of(config: Config) -> tuple[str, ...]:
    """Return the splits of ``SPLITS`` that a job reads: a bench has no training rows."""
    return ("eval",) if config.run.mode == "bench" else SPLITS


def needs_expert_rows(config: Config) -> bool:
    """Return True if the algorithm trains on ``taskset.expert``.

    Raises:
        ConfigError: the algorithm does not exist.
    """
    from megarl.learn import algorithms  # imports torch

    return algorithms.get(config.algorithm.name).has_experts(config.algorithm)


def kind_of_rows(config: Config) -> Kind:
    """Return the kind of the rows of train and eval. Rows of warm_start and expert are always demonstrations.

    Raises:
        ConfigError: the algorithm does not exist.
    """
    from megarl.learn import algorithms  # imports torch

    algorithm = algorithms.get(config.algorithm.name)
    if not algorithm.offline:
        return "tasks"
    return "preferences" if "pairs" in algorithm.needs else "demonstrations"


def read_split(config: Config, split: str, dropped: Counter[str] | None = None, faults: Faults | None = None) -> Rows:
    """Return the rows of a split. Their ids begin with the split's name, since two files may have equal ids.

    With ``taskset.bad_rows=drop`` malformed rows are dropped, except expert rows. A resumed run drops the same
    demonstrations and preferences as its start.

    Args:
        split: train, eval, warm_start or expert.
        dropped: The number of rows that the task processor drops is added.
        faults: The dropped bad rows are added.

    Raises:
        DataError: a row does not suit the algorithm; names file, row and field.
    """
    taskset, kind = config.taskset, kind_of_rows(config) if split in SPLITS else "demonstrations"
    found: Faults | None = ({} if faults is None else faults) if drops(config, split) else None
    if kind == "tasks":
        # A user's reward function needs no data_source.
        tasks = read_tasks(taskset, split, OWN_REWARD if config.reward.path is not None else None, found)
        return processed(tasks, taskset, split, dropped, config.reward.judge)
    path, run_dir = Path(single_file(taskset, split)), Path(config.run.dir)
    columns = taskset.columns if split in SPLITS else {}  # only train and eval have ``taskset.columns``
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
    """Return True if bad rows of a split are dropped. Expert rows are imported completely, or not at all."""
    return config.taskset.bad_rows == "drop" and split != WHOLE


def log_bad_rows(split: str, faults: Faults, total: int) -> None:
    """Log the number of rows that ``taskset.bad_rows=drop`` drops from a split, and the first of them, if there are
    any."""
    if not faults:
        return
    first = next(iter(faults.values()))
    more = f"; the first is {first}" if first else ", as at the run's start"
    log.warning("taskset.bad_rows=drop: %d of %d rows of taskset.%s are left out%s", len(faults), total, split, more)


def place(config: Config, split: str, row: Task | Preference) -> str:
    """Return ``FILE: row N (taskset.SPLIT)`` for a row from ``read_split``."""
    return f"{place_of_row(config.taskset, split, row)} (taskset.{split})"


def files(config: Config, split: str) -> str:
    """Return the names of the files of train or eval."""
    return ", ".join(source.path for source in sources_of(config.taskset, split).values())


def processor_of(config: Config, splits: Iterable[Rows]) -> Processor | None:
    """Return the processor of ``model.path``, with the limits of ``model``; None if no row has images.

    Raises:
        CheckpointError: the processor is missing or cannot be loaded.
    """
    if not any(row.images for rows in splits for row in rows):
        return None
    from megarl.tasks.images.processor import Processor  # imports torch and transformers

    return Processor.open(config.model.path, config.model.min_image_pixels, config.model.max_image_pixels)


def lengths_with_images(
    rows: Sequence[Task | Preference], tokenizer: ChatTokenizer, processor: Processor | None, *, path: Place
) -> list[int]:
    """Return the number of tokens of each row's prompt, with its images if there is a processor.

    Raises:
        DataError: names file and row of a prompt that the chat template or the processor refuses.
    """
    if processor is None:
        return [len(ids) for ids in encode_rows(rows, tokenizer, path=path)]
    from megarl.tasks.images.processor import prompt_lengths

    return prompt_lengths(rows, tokenizer, processor, path=path)
