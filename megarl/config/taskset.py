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
    """Replaces ``taskset.columns`` for this file."""
    data_source: str | None = None
    """Replaces ``taskset.data_source`` for this file."""


def by_name(setting: str, files: Sequence[Any]) -> dict[str, dict[str, str]]:
    """Return name -> source for a list of files: each file's stem, with its folder's name if two stems are equal.

    Raises:
        ConfigError: an entry is no path, or two entries would have the same name.
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
    (docs/tasksets.md); a folder of Harbor tasks (docs/environments.md); or files of demonstrations or preferences for
    offline algorithms (docs/offline.md)."""
    eval: str | dict[str, SourceConfig] = "???"
    """Held-out rows of the same kind; several files may also be a list, [a.parquet, b.parquet]."""
    columns: dict[str, str] = field(default_factory=dict)
    """Field of a row -> column of the files, for names other than verl's or slime's: {prompt: question, ground_truth:
    answer}; {response: text} for demonstrations, {chosen: good, rejected: bad} for preferences."""
    data_source: str | None = None
    """``data_source`` of rows without one; it selects the verifier."""
    process: str | None = None
    """Python file with ``def process(task)``, which returns the changed task, or None to drop it; or with
    ``async def process(task, ask)``, which may ask the model at ``reward.judge.url`` (docs/tasksets.md)."""
    prompt_template: str | None = None
    """Template text; {prompt} is replaced by the content of a prompt's last message."""
    system_prompt: str | None = None
    """System message added to prompts without one."""
    order: Literal["shuffled", "file", "curriculum", "prioritized"] = "shuffled"
    """Order in which steps take training tasks: epochs of permutations, the file's order, from easy to hard, or random
    in proportion to 1 - success."""
    difficulty: str | None = None
    """Key of ``extra_info`` with a task's numeric difficulty; ``a.b`` is b within a."""
    min_difficulty: Number | None = None
    """Least difficulty of a training task; easier tasks are left out and counted."""
    max_difficulty: Number | None = None
    """Largest difficulty of a training task; harder tasks are left out and counted."""
    curriculum_steps: Count | None = None
    """Steps over which the curriculum grows to all tasks: step s takes from the easiest s / curriculum_steps."""
    priority_floor: Positive = 0.1
    """Constant added to a task's priority 1 - success, so that solved tasks are drawn again."""
    warm_start: str | None = None
    """Parquet, json or jsonl file of demonstrations for the warm start: rows with a ``response``."""
    expert: str | None = None
    """Parquet, json or jsonl file of rows with a ``response``: the expert rows of mix, imported into the store at a
    job's start; None keeps rows imported by ``megarl data import-experts FILE``."""
    generate: str | None = None
    """Generator that writes these files if they are missing (``megarl data``): a name, or a Python file
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
    """Treatment of unusable rows of train, eval and warm_start: malformed rows, tasks that cannot be judged (no
    readable answer, tests that cannot run), demonstrations and preferences that are too long, pairs of equal answers.
    Refuse the job at the first one, or leave them out and count them (docs/tasksets.md)."""
    multiple_choice: Literal["keep", "drop"] = "keep"
    """Treatment of multiple-choice training tasks, whose answers can be guessed: kept (as in R1) or dropped (k1.5)."""
    duplicates: Literal["keep", "drop"] = "keep"
    """Treatment of training tasks whose prompt repeats an earlier one, ignoring spaces: kept, or left out and
    counted."""
    overlong_prompts: Literal["refuse", "drop"] = "refuse"
    """Treatment of prompts with more than ``rollout.max_prompt_tokens``: refuse the job at the first one, or leave them
    out and count them."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the model's chat template for every row, e.g. {enable_thinking: false}; a row's own options take
    precedence."""
    date: str | None = None
    """Day (YYYY-MM-DD) that chat templates with ``strftime_now`` write into prompts; None takes that of the run's first
    start."""
