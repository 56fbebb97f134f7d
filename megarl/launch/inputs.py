"""Rows and reward function against each other, the model's tokenizer and what is held out."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megarl.config import Config
from megarl.errors import ConfigError, DataError
from megarl.rewards import RewardPool, Verdict, scorer_for
from megarl.schema import Task
from megarl.tasksets import ChatTokenizer, encode_rows

log = logging.getLogger(__name__)


def check_rewards(config: Config, tasks: Mapping[str, list[Task]]) -> None:
    """Every row has a verifier; a user's own one loads and scores a row.

    Raises:
        ConfigError, DataError: it does not.
    """
    if config.reward.path is not None:
        if not Path(config.reward.path).is_file():
            raise ConfigError(f"reward.path={config.reward.path}: no such file; give a Python file with compute_score")
        return _try_reward(config, tasks["train"][0])
    known: set[str] = set()
    for split, rows in tasks.items():
        for number, task in enumerate(rows):
            if task.data_source in known:
                continue
            try:
                scorer_for(task.data_source)
            except DataError as error:
                raise DataError(f"row {number} of taskset.{split}: {error}") from error
            known.add(task.data_source)


def _try_reward(config: Config, task: Task) -> None:
    """In a process of its own, as in the job: a file that hangs or ends its process is seen here."""

    async def trial() -> Verdict:
        async with RewardPool(replace(config.reward, workers=1)) as pool:
            return await pool.score(task, str(task.ground_truth))

    verdict = asyncio.run(trial())
    if verdict.message is None:
        return
    if verdict.reported:
        log.warning("reward.path=%s: for row 0 of taskset.train %s", config.reward.path, verdict.message)
        return
    raise ConfigError(
        f"reward.path={config.reward.path} gives no score for row 0 of taskset.train (answered with its ground truth): "
        f"{verdict.message}; mend the function, or raise reward.timeout_s where it needs longer"
    )


def check_demonstrations(
    tasks: Sequence[Task], tokenizer: ChatTokenizer, context: int, *, path: str | os.PathLike[str] | None
) -> None:
    """Each demonstration fits the model's context. Raises DataError naming the row."""
    for number, (task, prompt) in enumerate(zip(tasks, encode_rows(tasks, tokenizer, path=path), strict=True)):
        length = len(prompt) + len(tokenizer.response_ids(task.response or ""))
        if length > context:
            raise DataError(
                f"row {number} of taskset.warm_start has {length} tokens with its response, the model's context is {context} "
                "(max_position_embeddings); drop the row"
            )


def check_held_out(held_out: Sequence[Task], others: Mapping[str, Sequence[Task]]) -> None:
    """No other row asks a held-out question, spaces and capitals aside. Raises DataError naming the row."""
    questions = {_question(task) for task in held_out}
    for name, tasks in others.items():
        for number, task in enumerate(tasks):
            if _question(task) in questions:
                raise DataError(
                    f"row {number} of taskset.{name} asks a question of taskset.eval: {task.prompt[-1]['content']!r}; "
                    "drop it from one of them (spaces and capitals make no difference here)"
                )


def _question(task: Task) -> tuple[tuple[str, str], ...]:
    return tuple((message["role"], " ".join(message["content"].split()).casefold()) for message in task.prompt)
