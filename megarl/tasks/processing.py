"""From files of rows to tasks: sources of a split, a user's own function, templates of prompts.

``taskset.train`` is one file, or several with names and weights.

A task's id has its source's name and its row: ``train/12``, or ``train/gsm8k/12``, counted from 0 in each file.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from megarl.config.rewards import JUDGE_IS_ROLLOUT, JudgeConfig
from megarl.config.taskset import SourceConfig, TasksetConfig
from megarl.core.errors import ConfigError, DataError, describe
from megarl.core.imports import import_file
from megarl.core.schema import Message, Preference, Task
from megarl.tasks.row_files import Faults, place_of
from megarl.tasks.rows import read_rows


def sources_of(taskset: TasksetConfig, split: str) -> dict[str, SourceConfig]:
    """Name -> source of train or eval, in the order of the settings; the name of a single file is empty."""
    given: str | dict[str, SourceConfig] = getattr(taskset, split)
    found = {"": SourceConfig(given)} if isinstance(given, str) else given
    return {
        name: replace(
            source, columns=source.columns or taskset.columns, data_source=source.data_source or taskset.data_source
        )
        for name, source in found.items()
    }


def source_of(task_id: str) -> str:
    """Return the name of a task's source; empty for a single file."""
    parts = task_id.split("/")
    return parts[1] if len(parts) > 2 else ""


def read_tasks(
    taskset: TasksetConfig, split: str, data_source: str | None = None, faults: Faults | None = None
) -> list[Task]:
    """Rows of all sources of train or eval, one source after the other.

    Args:
        data_source: That of rows for which neither the file nor a setting has one; None refuses them.
        faults: Is given the bad rows, which are left out; None refuses them.

    Raises:
        DataError: a row is not sound, with file, row and field.
    """
    return [
        task
        for name, source in sources_of(taskset, split).items()
        for task in read_rows(
            source.path,
            split=f"{split}/{name}" if name else split,
            columns=source.columns,
            data_source=source.data_source or data_source,
            faults=faults,
        )
    ]


def place_of_row(taskset: TasksetConfig, split: str, row: Task | Preference) -> str:
    """Return ``FILE: row N`` of a split's row; N counts from 1."""
    path = getattr(taskset, split)
    if not isinstance(path, str):
        path = path[source_of(row.task_id)].path
    return place_of(path, int(row.task_id.rpartition("/")[2]))


def single_file(taskset: TasksetConfig, split: str) -> str:
    """Return the path of a single-file split. Raises DataError for several files."""
    path = getattr(taskset, split)
    if not isinstance(path, str):
        raise DataError(f"taskset.{split} names several files, and this kind of rows is read from one; give one file")
    return path


SETTING = "taskset.process"
WANTED = "def process(task) or async def process(task, ask), which returns a task, or None to drop it"
PROMPT = "{prompt}"
"""Placeholder of the prompt in ``taskset.prompt_template``."""

Ask = Callable[[str], Awaitable[str]]
"""Returns the response of the model at ``reward.judge.url`` to a prompt."""
Process = Callable[[Task], Task | None]
AsyncProcess = Callable[[Task, Ask], Awaitable[Task | None]]


def processed(
    rows: Sequence[Task],
    taskset: TasksetConfig,
    split: str,
    dropped: Counter[str] | None = None,
    judge: JudgeConfig | None = None,
) -> list[Task]:
    """Tasks of rows: what ``taskset.process`` makes of each, with the templates of ``taskset``.

    Args:
        judge: Settings of the model that an ``async`` function may ask.
        dropped: Is given the number of rows that ``taskset.process`` drops, as ``process``.

    Raises:
        ConfigError: the file lacks the function, or it asks a model and there is none.
        DataError: the function raises, or returns no task, with the row.
    """
    tasks = list(rows)
    if taskset.process is not None:
        process = _load(taskset.process)
        if inspect.iscoroutinefunction(process):
            found = asyncio.run(_asked(process, taskset, split, rows, _checked(judge or JudgeConfig())))
        else:
            found = [_called(process, taskset, split, row) for row in rows]
        tasks = [task for task in found if task is not None]
        if dropped is not None:
            dropped["process"] += len(rows) - len(tasks)
        if not tasks:
            raise DataError(f"{SETTING}={taskset.process} drops all {len(rows)} rows of taskset.{split}; keep some")
    return [with_templates(task, taskset) for task in tasks]


def _load(path: str) -> Any:
    process = getattr(import_file(path, SETTING, WANTED), "process", None)
    if not callable(process):
        raise ConfigError(f"{SETTING}={path} has no {WANTED}")
    return process


def _called(process: Process, taskset: TasksetConfig, split: str, row: Task) -> Task | None:
    """Return the function's task for a row, with the row's id."""
    with _named(process, taskset, split, row):
        task = process(row)
    return _task_of(row, task, taskset, split)


async def _asked(
    process: AsyncProcess, taskset: TasksetConfig, split: str, rows: Sequence[Task], judge: JudgeConfig
) -> list[Task | None]:
    """Call the function for all rows, ``reward.judge.concurrency`` of them concurrently."""
    from megarl.rewards.judge.judge import Judge  # aiohttp: only if a model is asked

    free = asyncio.Semaphore(judge.concurrency)
    async with Judge(judge) as model:

        async def one(row: Task) -> Task | None:
            async with free:
                with _named(process, taskset, split, row):
                    task = await process(row, model.reply)
                return _task_of(row, task, taskset, split)

        running = [asyncio.create_task(one(row)) for row in rows]
        try:
            return await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def _checked(judge: JudgeConfig) -> JudgeConfig:
    """Raise ConfigError unless a model and a file for its responses are set."""
    if judge.url is None or judge.url == JUDGE_IS_ROLLOUT:
        raise ConfigError(
            f"{SETTING} has an async function, which asks the model at reward.judge.url before any engine runs; "
            f"reward.judge.url={judge.url}, give a server's base URL (http://HOST:PORT/v1)"
        )
    if judge.cache is None:
        raise ConfigError(
            f"{SETTING} has an async function, and reward.judge.cache=null: a run that goes on would get other tasks; "
            "give a file"
        )
    return judge


@contextmanager
def _named(process: Callable[..., Any], taskset: TasksetConfig, split: str, row: Task) -> Iterator[None]:
    """Raise errors of a user's function as DataError that names the row."""
    try:
        yield
    except Exception as error:
        where = place_of_row(taskset, split, row)
        raise DataError(f"{where}: {SETTING}: {describe(error, taskset.process, process)}") from error


def _task_of(row: Task, task: Any, taskset: TasksetConfig, split: str) -> Task | None:
    if task is None:
        return None
    if not isinstance(task, Task) or not task.prompt:
        raise DataError(
            f"{place_of_row(taskset, split, row)}: {SETTING}={taskset.process} must return a megarl.core.schema.Task "
            f"with a prompt, or None; got {type(task).__name__}"
        )
    values = [task.data_source, task.prompt, task.ability, task.reward_model, task.extra_info]
    try:
        json.dumps([*values, task.chat_template_kwargs], ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place_of_row(taskset, split, row)}: {SETTING}={taskset.process} returned a task with "
            f"{error.object[error.start]!r}, half of a character, which no tokenizer takes"
        ) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{place_of_row(taskset, split, row)}: {SETTING}={taskset.process} returned a task that is not made of "
            f"JSON values ({error}); convert arrays with tolist(), and numbers of numpy with item()"
        ) from error
    return replace(task, task_id=row.task_id)


def with_templates(task: Task, taskset: TasksetConfig) -> Task:
    """The task with ``taskset.prompt_template`` around its last message, and ``taskset.system_prompt`` before its
    prompt. A prompt that begins with a system message keeps that."""
    template, system = taskset.prompt_template, taskset.system_prompt
    prompt: tuple[Message, ...] = task.prompt
    if template is not None and prompt[-1]["role"] == "user":
        last = {**prompt[-1], "content": template.replace(PROMPT, prompt[-1]["content"])}
        prompt = (*prompt[:-1], last)
    if system is not None and prompt[0]["role"] not in ("system", "developer"):
        prompt = ({"role": "system", "content": system}, *prompt)
    return task if prompt is task.prompt else replace(task, prompt=prompt)


WORDS = {
    **dict.fromkeys(("very easy", "trivial"), 1.0),
    **dict.fromkeys(("easy", "introductory", "beginner"), 2.0),
    **dict.fromkeys(("medium", "intermediate", "interview", "normal"), 3.0),
    **dict.fromkeys(("medium hard",), 4.0),
    **dict.fromkeys(("hard", "difficult", "advanced", "competition"), 5.0),
    **dict.fromkeys(("very hard", "expert"), 6.0),
}
"""Difficulty words of LeetCode, APPS and TACO -> numbers."""
SEPARATOR = re.compile(r"(?<=[a-z])[-_]")
LEVEL = re.compile(r"(?:level |grade |difficulty )?(-?[0-9]{1,9}(?:\.[0-9]{1,9})?)", re.ASCII)
"""A difficulty in digits, as MATH's ``Level 5``."""


def entry_of(task: Task, key: str) -> object:
    """Value that a task has in ``extra_info`` under ``key``; ``a.b`` is b within a. None where there is none.

    A name may have dots of its own: Skywork-OR1 has ``model_difficulty.DeepSeek-R1-Distill-Qwen-1.5B``.
    """
    value: object = task.extra_info
    name, dot, rest = "", ".", key
    while dot and isinstance(value, dict):
        if rest in value:
            return value[rest]
        name, dot, rest = rest.partition(".")
        value = value.get(name)
    return None


def difficulty_of(task: Task, key: str) -> float | None:
    """Number that a task has in ``extra_info`` under ``key`` (``a.b`` is b within a); None where there is none.

    A text is a number (``3.5``), one after a word (``Level 5``), or one of ``WORDS``, capitals and ``_`` aside.
    """
    value = entry_of(task, key)
    if isinstance(value, str):
        text = " ".join(SEPARATOR.sub(" ", value[:100].lower()).split())
        found = LEVEL.fullmatch(text)
        return float(found[1]) if found else WORDS.get(text)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
