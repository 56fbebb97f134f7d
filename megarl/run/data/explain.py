"""Explanation of verdicts on rows of a file: what a verifier required, read and compared (``megarl rewards explain``).

Verifiers run in a reward worker process, with its limits, since responses are untrusted.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from megarl.config.rewards import RewardConfig
from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Task
from megarl.rewards.pool.process import LocalRewardProcess, Worker, WorkerError, WorkerSpent
from megarl.rewards.routes import JUDGE, check_row, imports_of, route
from megarl.rewards.verdict import LATE
from megarl.tasks.row_files import place_of
from megarl.tasks.rows import read_rows

MAX_SHOWN = 300
"""Maximum characters of a printed text."""


async def explanations(path: Path, config: RewardConfig) -> AsyncIterator[str]:
    """Yield one block of text for each row of a parquet or jsonl file with verl's columns and ``response``.

    Raises:
        DataError: the file or a row cannot be used; the message names file, row, field and fix. All rows are checked
            before the first verdict.
        ConfigError: ``reward.path`` is set.
    """
    if config.path is not None:
        raise ConfigError(f"reward.path={config.path}: only megarl's own verifiers explain a verdict; leave it out")
    tasks = read_rows(path)
    families = [_family(task, place_of(path, number), config) for number, task in enumerate(tasks)]
    worker = Worker(config, LocalRewardProcess(None, imports_of({task.data_source for task in tasks}, config.routes)))
    try:
        for number, (task, family) in enumerate(zip(tasks, families, strict=True)):
            lines = [("verifier", f"{family} (data_source {shown(task.data_source)})"), *await _explained(task, worker)]
            yield "\n".join([place_of(path, number), *(f"  {name:<9} {text}" for name, text in lines)]) + "\n"
    finally:
        await worker.kill()


def _family(task: Task, place: str, config: RewardConfig) -> str:
    """Return the row's verifier. Raises DataError if there is none, or if it cannot judge the row."""
    if not task.response:
        raise DataError(f"{place}: response must be the text to judge, got {task.response!r}; add it to the row")
    try:
        family, _ = route(task.data_source, config.routes)
        check_row(task.data_source, task.reward_model["ground_truth"], task.extra_info, config)
    except DataError as error:
        raise DataError(f"{place}: {error}") from error
    if family in (JUDGE, LATE):
        raise DataError(
            f"{place}: data_source {task.data_source!r} belongs to the family {family}, whose rewards no program here "
            "computes; leave the row out, or send it to a verifier by reward.routes"
        )
    return family


async def _explained(task: Task, worker: Worker) -> list[tuple[str, str]]:
    """Return (name, text) of each line about one row."""
    request = {
        "data_source": task.data_source,
        "solution_str": task.response,
        "ground_truth": task.reward_model["ground_truth"],
        "extra_info": task.extra_info,
        "question": task.question,
        "in_thinking": False,
    }
    try:
        await worker.ready()
        await worker.prepare(task.data_source)
        reply = await worker.explain(request)
    except WorkerSpent as error:
        return [("verdict", f"wrong, score 0: the response costs too much to judge ({error})")]
    except (WorkerError, TimeoutError) as error:
        return [("verdict", f"error, no score: {shown(str(error))}")]
    return [*_steps(reply["steps"], task.response or ""), ("verdict", _verdict(reply))]


def _steps(steps: Sequence[Sequence[str]], response: str) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for kind, rule, text in steps:
        if kind == "asked":
            line = ("asked for", text)
        elif kind == "read":
            line = ("read", f"{shown(text)} by the form '{rule}'{_place(text, response)}")
        else:
            line = ("compared", f"{shown(text)} by '{rule}'")
        if line not in lines:
            lines.append(line)
    return lines


def _verdict(reply: dict[str, Any]) -> str:
    compared = [(rule, text) for kind, rule, text in reply["steps"] if kind == "compared"]
    reason = reply.get("reason")
    if reason is None and compared:
        reason = f"decided by '{compared[-1][0]}'"
    elif reason is None and reply["status"] == "wrong":
        reason = "no answer was read that could be compared"
    score = "no score" if reply["status"] in ("error", "timeout") else f"score {reply['score']:g}"
    return f"{reply['status']}, {score}" + (f": {shown(reason, quote=False)}" if reason else "")


def _place(text: str, response: str) -> str:
    """Return line and column, from 1, of the text's only whole-word occurrence in the response; "" for several or
    none."""
    found = [match.start() for match in re.finditer(rf"(?<!\w){re.escape(text)}(?!\w)", response)] if text else []
    if len(found) != 1:
        return ""
    line = response.count("\n", 0, found[-1]) + 1
    return f", line {line}, column {found[-1] - response.rfind(chr(10), 0, found[-1])} of the response"


def shown(text: str, quote: bool = True) -> str:
    """Return untrusted text on one line, with control characters escaped for the terminal."""
    text = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
    escaped = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)
    return f"`{escaped}`" if quote else escaped
