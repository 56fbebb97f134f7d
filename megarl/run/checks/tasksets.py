"""Checks of ``taskset`` settings against each other and the kind of job, and of the remaining tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

from megarl.buffer.order.source_shares import Shares
from megarl.config import Config
from megarl.config.taskset import TasksetConfig
from megarl.core.errors import ConfigError
from megarl.core.jobs import Job
from megarl.run.run_dir.rows import Rows, files, kind_of_rows
from megarl.tasks import source_of, sources_of
from megarl.tasks.columns import check_fields
from megarl.tasks.processing import PROMPT

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
