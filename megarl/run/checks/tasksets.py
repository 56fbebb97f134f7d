"""Checks of ``taskset`` settings, and the tasks of the files that they leave for the store."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from megarl.buffer.order.group_choice import Shares
from megarl.config import Config
from megarl.config.derived import prompt_tokens
from megarl.config.taskset import TasksetConfig
from megarl.core.errors import ConfigError, DataError
from megarl.core.jobs import Job
from megarl.core.schema import Preference, Task
from megarl.explore.workflows import asks_verifier
from megarl.rewards.routes import check_row
from megarl.rewards.school.verifier import is_multiple_choice
from megarl.run.run_dir.rows import Rows, drops, files, kind_of_rows, lengths_with_images, log_bad_rows, place
from megarl.tasks import ChatTokenizer, Faults, difficulty_of, source_of, sources_of
from megarl.tasks.processing import PROMPT, entry_of
from megarl.tasks.row_files import FIX, short
from megarl.tasks.rows import check_fields

if TYPE_CHECKING:
    from megarl.tasks.image_processor import Processor


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selected:
    """Remaining tasks of a split, and counts of the dropped ones."""

    tasks: list[Task]
    dropped: dict[str, int]
    """Reason -> number of tasks."""


def selected(
    config: Config,
    split: str,
    rows: Sequence[Task],
    tokenizer: ChatTokenizer,
    dropped: Counter[str],
    processor: Processor | None = None,
    faults: Faults | None = None,
) -> Selected:
    """Drop tasks as settings of ``taskset`` require; log the counts.

    Args:
        dropped: Counts of tasks dropped so far.
        processor: The model's processor, if rows of the job have images.
        faults: Bad rows dropped so far; further ones are added.

    Raises:
        DataError: a bad row may not be dropped, or no row is left.
    """
    counts, faults = Counter(dropped), {} if faults is None else faults
    tasks = with_difficulty(config, split, verifiable(config, split, list(rows), faults), faults)
    counts["bad_row"] = len(faults)
    log_bad_rows(split, faults, len(faults) + len(tasks))
    for reason, kept in (
        ("multiple_choice", without_choices),
        ("duplicate", without_duplicates),
        ("difficulty", within_difficulty),
    ):
        before = len(tasks)
        tasks = kept(config, split, tasks)
        counts[reason] += before - len(tasks)
    before = len(tasks)
    tasks = without_overlong(config, split, tasks, tokenizer, processor)
    counts["overlong_prompt"] += before - len(tasks)
    found = {reason: count for reason, count in counts.items() if count}
    if found:
        reasons = ", ".join(f"{reason} {count}" for reason, count in found.items())
        log.info("taskset.%s: %d tasks; left out: %s", split, len(tasks), reasons)
    return Selected(tasks, found)


def usable(config: Config, split: str, rows: Rows, check: Callable[[Rows], None], faults: Faults) -> Rows:
    """Return the rows that pass a check if ``taskset.bad_rows=drop``; else all, unchecked.

    Args:
        check: Adds each bad row to ``faults``, or raises DataError if one of the rows is bad.
        faults: Bad rows of the split so far; further ones are added.

    Raises:
        DataError: no row is left.
    """
    if not drops(config, split):
        return rows

    def kept(some: Rows) -> list[Task | Preference]:
        try:
            check(some)
            return [row for row in some if row.task_id not in faults]
        except DataError as error:
            if len(some) == 1:
                faults[some[0].task_id] = str(error)
                return []
        half = len(some) // 2  # halve: bad rows are few, and a tokenizer is fast with many texts
        return kept(some[:half]) + kept(some[half:])

    found = kept(rows)
    if not found:
        raise DataError(f"taskset.bad_rows=drop leaves no row of {files(config, split)}; {next(iter(faults.values()))}")
    return found


def verifiable(config: Config, split: str, rows: list[Task], faults: Faults) -> list[Task]:
    """Return the rows whose answers a verifier can judge.

    Args:
        faults: Rows that no verifier can judge are added, with ``taskset.bad_rows=drop``.

    Raises:
        DataError: such a row exists and may not be dropped, with the first one; or no row is left.
    """
    if config.reward.path is not None or not asks_verifier(config.rollout):
        return rows
    found: Faults = {}
    for task in rows:
        try:
            check_row(task.data_source, task.ground_truth, task.extra_info, config.reward)
        except DataError as error:
            found[task.task_id] = f"{place(config, split, task)}: {error}"
    if found and (config.taskset.bad_rows == "refuse" or len(found) == len(rows)):
        more = f" ({len(found)} such rows)" if len(found) > 1 else ""
        raise DataError(f"{next(iter(found.values()))}{more}; {FIX}")
    faults.update(found)
    return [task for task in rows if task.task_id not in found]


def without_choices(config: Config, split: str, rows: list[Task]) -> list[Task]:
    """Return the training tasks without multiple-choice ones if ``taskset.multiple_choice=drop``; else all.

    Raises:
        DataError: no task is left.
    """
    if config.taskset.multiple_choice == "keep" or split != "train":
        return rows
    kept = [row for row in rows if not is_multiple_choice(vars(row))]
    if not kept:
        raise DataError(
            f"taskset.multiple_choice=drop leaves none of the {len(rows)} rows of {files(config, split)}; set it to "
            "keep, or add others"
        )
    return kept


def without_duplicates(config: Config, split: str, rows: list[Task]) -> list[Task]:
    """Return the first training task of each prompt if ``taskset.duplicates=drop``; else all."""
    if config.taskset.duplicates == "keep" or split != "train":
        return rows
    first: dict[str, Task] = {}
    for row in rows:
        first.setdefault(_prompt_key(row), row)
    return list(first.values())


def _prompt_key(task: Task) -> str:
    """Return a text that is equal for tasks that show a model the same prompt, up to white space."""
    messages = [
        {name: " ".join(value.split()) if isinstance(value, str) else value for name, value in message.items()}
        for message in task.prompt
    ]
    images = [hashlib.sha256(image).hexdigest() for image in task.images]
    return json.dumps([messages, images, task.chat_template_kwargs], sort_keys=True)


def with_difficulty(config: Config, split: str, rows: list[Task], faults: Faults) -> list[Task]:
    """Return the training tasks with a difficulty if ``taskset.difficulty`` is set; else all.

    Args:
        faults: Tasks without one are added, with ``taskset.bad_rows=drop``.

    Raises:
        DataError: a task without a difficulty may not be dropped, with its row; or no task is left.
    """
    key = config.taskset.difficulty
    if key is None or split != "train":
        return rows
    found: Faults = {
        row.task_id: f"{place(config, split, row)}: extra_info.{key} must be a number, a text such as 'Level 5', or a "
        f"word such as 'easy', since it is taskset.difficulty (docs/tasksets.md), got {short(entry_of(row, key))}"
        for row in rows
        if difficulty_of(row, key) is None
    }
    if found and (config.taskset.bad_rows == "refuse" or len(found) == len(rows)):
        raise DataError(f"{next(iter(found.values()))}; {FIX}, or name another entry")
    faults.update(found)
    return [row for row in rows if row.task_id not in found]


def within_difficulty(config: Config, split: str, rows: list[Task]) -> list[Task]:
    """Return the training tasks from ``taskset.min_difficulty`` to ``taskset.max_difficulty``, both included. All tasks
    must have a difficulty.

    Raises:
        DataError: no task is left.
    """
    key, low, high = config.taskset.difficulty, config.taskset.min_difficulty, config.taskset.max_difficulty
    if key is None or split != "train":
        return rows
    values = [difficulty_of(row, key) or 0.0 for row in rows]
    kept = [
        row
        for row, value in zip(rows, values, strict=True)
        if (low is None or value >= low) and (high is None or value <= high)
    ]
    if rows and not kept:
        raise DataError(
            f"taskset.min_difficulty={low} and taskset.max_difficulty={high} leave none of the {len(rows)} tasks, "
            f"whose extra_info.{key} is {min(values):g} to {max(values):g}; widen them"
        )
    return kept


def without_overlong(
    config: Config, split: str, rows: list[Task], tokenizer: ChatTokenizer, processor: Processor | None = None
) -> list[Task]:
    """Return the tasks with prompts of at most ``rollout.max_prompt_tokens``, images included, if
    ``taskset.overlong_prompts=drop``; else all.

    Raises:
        DataError: no task is left.
    """
    if config.taskset.overlong_prompts == "refuse":
        return rows
    limit = prompt_tokens(config.rollout)
    lengths = lengths_with_images(rows, tokenizer, processor, path=lambda row: place(config, split, row))
    kept = [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
    if rows and not kept:
        raise DataError(
            f"taskset.overlong_prompts=drop leaves none of the {len(rows)} tasks of {files(config, split)}: the "
            f"shortest prompt has {min(lengths)} tokens, rollout.max_prompt_tokens is {limit}; raise it"
        )
    return kept


OF_TASKS = (
    "data_source",
    "process",
    "prompt_template",
    "system_prompt",
    "order",
    "difficulty",
    "min_difficulty",
    "max_difficulty",
    "curriculum_steps",
    "priority_floor",
    "duplicates",
    "overlong_prompts",
)
"""Settings that offline jobs refuse, since their rows are demonstrations or preferences."""


def check_taskset(config: Config, job: Job) -> None:
    """Raise ConfigError for task settings without effect, or that contradict each other."""
    taskset = config.taskset
    if not job.rollouts:
        _check_offline(taskset)
        check_fields(taskset.columns, kind_of_rows(config))
        return
    for split in ("train", "eval"):
        for source in sources_of(taskset, split).values():
            check_fields(source.columns)
            if split == "eval" and source.weight != 1:
                raise ConfigError(
                    f"taskset.eval has a source of weight {source.weight:g}: evaluations take every task; leave it out"
                )
    Shares([source.weight for source in sources_of(taskset, "train").values()])
    if taskset.prompt_template is not None and PROMPT not in taskset.prompt_template:
        raise ConfigError(
            f"taskset.prompt_template={taskset.prompt_template!r} has no {PROMPT}, where the prompt goes; add it"
        )
    if taskset.overlong_prompts == "drop" and config.rollout.max_prompt_tokens is None:
        raise ConfigError(
            "taskset.overlong_prompts=drop needs rollout.max_prompt_tokens: left out, it is the longest prompt; set it"
        )
    _check_order(taskset)


def _check_offline(taskset: TasksetConfig) -> None:
    defaults = {field.name: getattr(TasksetConfig(), field.name) for field in fields(taskset)}
    for name in OF_TASKS:
        if (value := getattr(taskset, name)) != defaults[name]:
            raise ConfigError(
                f"taskset.{name}={value} is for tasks, and an offline job has demonstrations or preferences; leave it "
                "out"
            )
    for split in ("train", "eval"):
        if not isinstance(getattr(taskset, split), str):
            raise ConfigError(f"taskset.{split} names several files, and an offline job reads one; give one file")


def _check_order(taskset: TasksetConfig) -> None:
    """Raise ConfigError for settings of other values of ``taskset.order``, and for missing settings of this order."""
    order, low, high = taskset.order, taskset.min_difficulty, taskset.max_difficulty
    if order == "curriculum" and None in (taskset.difficulty, taskset.curriculum_steps):
        missing = "difficulty" if taskset.difficulty is None else "curriculum_steps"
        raise ConfigError(f"taskset.order=curriculum needs taskset.{missing}; set it")
    if order != "curriculum" and taskset.curriculum_steps is not None:
        raise ConfigError(
            f"taskset.curriculum_steps={taskset.curriculum_steps} does nothing with taskset.order={order}; leave it "
            "out, or set the order to curriculum"
        )
    if order != "prioritized" and taskset.priority_floor != (usual := TasksetConfig().priority_floor):
        raise ConfigError(
            f"taskset.priority_floor={taskset.priority_floor:g} does nothing with taskset.order={order}; leave it at "
            f"{usual:g}, or set the order to prioritized"
        )
    if taskset.difficulty is None and (low, high) != (None, None):
        raise ConfigError(
            f"taskset.min_difficulty={low} and taskset.max_difficulty={high} need taskset.difficulty, the entry of "
            "extra_info that has it; set it"
        )
    if low is not None and high is not None and low > high:
        raise ConfigError(
            f"taskset.min_difficulty={low:g} is above taskset.max_difficulty={high:g}; no task is in between"
        )


def check_count(config: Config, rows: Rows) -> None:
    """Check that a step within one epoch uses each row at most once. ``rows``: training rows.

    Raises:
        ConfigError: there are fewer rows than ``trainer.tasks_per_step``, or fewer of a source than a step takes.
    """
    wanted = config.trainer.tasks_per_step
    if wanted > len(rows):
        raise ConfigError(
            f"trainer.tasks_per_step={wanted} is more than the {len(rows)} rows of "
            f"taskset.train={files(config, 'train')} that are trained on; set it to {len(rows)} or less, or add rows"
        )
    if not isinstance(config.taskset.train, str):
        _check_sources(config, [row.task_id for row in rows])


def _check_sources(config: Config, task_ids: Sequence[str]) -> None:
    sources, counts = sources_of(config.taskset, "train"), Counter(map(source_of, task_ids))
    most = Shares([source.weight for source in sources.values()]).most(config.trainer.tasks_per_step)
    for name, number in zip(sources, most, strict=True):
        if number > counts[name]:
            raise ConfigError(
                f"taskset.train.{name}.weight={sources[name].weight:g} takes up to {number} tasks of a step "
                f"(trainer.tasks_per_step={config.trainer.tasks_per_step}), and {sources[name].path} has "
                f"{counts[name]} that are trained on; lower it, or add rows"
            )
