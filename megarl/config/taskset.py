"""Settings of tasks: their files, how rows become tasks, and the order in which steps take them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megarl.config.bounds import Count, Number, Positive, Seed
from megarl.core.errors import ConfigError


@dataclass(frozen=True)
class SourceConfig:
    """One of several files of tasks (docs/tasksets.md)."""

    path: str = "???"
    """Parquet, json or jsonl file."""
    weight: Positive = 1.0
    """Share of a step's tasks, relative to the weights of the other sources."""
    columns: dict[str, str] = field(default_factory=dict)
    """As ``taskset.columns``, in place of that."""
    data_source: str | None = None
    """As ``taskset.data_source``, in place of that."""


def by_name(setting: str, files: Sequence[Any]) -> dict[str, dict[str, str]]:
    """Name -> source of a list of files: each file's name without its ending, with its folder's where two are alike.

    Raises:
        ConfigError: an entry is no path, or two of them would have one name.
    """
    if not all(isinstance(path, str) for path in files):
        raise ConfigError(f"{setting}={files} is no list of files; give [FILE, FILE], or {{NAME: {{path: FILE}}}}")
    names = [_word(Path(path).stem) for path in files]
    if len(set(names)) < len(names):
        names = [_word("_".join(Path(path).with_suffix("").parts[-2:])) for path in files]
    if len(set(names)) < len(names):
        raise ConfigError(f"{setting}={files}: two files have one name; name them: {{NAME: {{path: FILE}}}}")
    return {name: {"path": path} for name, path in zip(names, files, strict=True)}


def _word(text: str) -> str:
    return re.sub(r"[^\w-]", "_", text)


@dataclass(frozen=True)
class TasksetConfig:
    train: str | dict[str, SourceConfig] = "???"
    """Parquet, json or jsonl file of tasks, or several with weights, {NAME: {path: FILE, weight: 2}}
    (docs/tasksets.md); a folder of Harbor tasks (docs/environments.md); of demonstrations or preferences where the
    algorithm learns offline (docs/offline.md)."""
    eval: str | dict[str, SourceConfig] = "???"
    """Held-out rows of the same kind; several files also as a list, [a.parquet, b.parquet]."""
    columns: dict[str, str] = field(default_factory=dict)
    """Column of the files for each of a row's fields, where these are not verl's or slime's: {prompt: question,
    ground_truth: answer}; of demonstrations {response: text}, of preferences {chosen: good, rejected: bad}."""
    data_source: str | None = None
    """``data_source`` of tasks whose row has none; it selects the verifier."""
    process: str | None = None
    """Python file with ``def process(task)``, which returns each task as it is to be, or None to drop it; or with
    ``async def process(task, ask)``, which may ask the model at ``reward.judge.url`` (docs/tasksets.md)."""
    prompt_template: str | None = None
    """Text with {prompt}, which stands for the content of a prompt's last message."""
    system_prompt: str | None = None
    """System message of prompts that begin without one."""
    order: Literal["shuffled", "file", "curriculum", "prioritized"] = "shuffled"
    """Order in which steps take training tasks: epochs of permutations, the file's order, from easy to hard, or by
    chance in proportion to 1 - success."""
    difficulty: str | None = None
    """Entry of ``extra_info`` with a task's difficulty, a number; ``a.b`` is b within a."""
    min_difficulty: Number | None = None
    """Least difficulty of a training task; others are left out and counted."""
    max_difficulty: Number | None = None
    """Largest difficulty of a training task."""
    curriculum_steps: Count | None = None
    """Steps over which the curriculum grows to all tasks: step s takes from the easiest s / curriculum_steps."""
    priority_floor: Positive = 0.1
    """Added to 1 - success in the priority of a task, so that solved tasks come again."""
    warm_start: str | None = None
    """Parquet, json or jsonl file of rows with a ``response``."""
    expert: str | None = None
    """Parquet, json or jsonl file of rows with a ``response``: the expert rows of mix, imported into the store at a
    job's start; None keeps what ``megarl data import-experts FILE`` has imported."""
    generate: str | None = None
    """Generator that writes these files when they are missing (``megarl data``): a name, or a Python file
    (docs/own_experiments.md)."""
    seed: Seed = 7
    """Seed of generated rows."""
    train_size: Count = 20000
    """Generated training rows."""
    eval_size: Count = 500
    """Generated held-out rows."""
    warm_start_size: Count = 20000
    """Generated demonstrations for the warm start."""
    expert_size: Count = 2000
    """Generated expert rows."""
    options: dict[str, int] = field(default_factory=dict)
    """Options of the generator, e.g. the digits of its numbers."""
    bad_rows: Literal["refuse", "drop"] = "refuse"
    """Treatment of rows of train, eval and warm_start that no job can use: malformed ones, tasks that no answer can be
    judged by (no readable answer, tests that cannot run), demonstrations and preferences that are too long, pairs of
    equal answers. The job is refused with the first of them, or they are left out and counted (docs/tasksets.md)."""
    multiple_choice: Literal["keep", "drop"] = "keep"
    """True if tasks that offer their answers for choice are trained on: they can be guessed (R1 keeps them, k1.5 drops
    them)."""
    duplicates: Literal["keep", "drop"] = "keep"
    """Treatment of training tasks with the prompt of an earlier one, spaces aside: kept, or left out and counted."""
    overlong_prompts: Literal["refuse", "drop"] = "refuse"
    """Treatment of prompts with more than ``rollout.max_prompt_tokens``: the job is refused with the first of them, or
    they are left out and counted."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the model's chat template for every row, e.g. {enable_thinking: false}; a row's own go before them."""
    date: str | None = None
    """Day (YYYY-MM-DD) that chat templates with ``strftime_now`` write into prompts; None takes that of the run's first
    start."""
