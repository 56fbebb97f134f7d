"""Alarms about training rows that can be read and are odd all the same: lost, repeated, ambiguous, or given away.

They are lines of the log, not refusals: some tasks are meant to be so.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from megarl.config import Config
from megarl.core.schema import Task
from megarl.tasks import ChatTokenizer, encode_rows

log = logging.getLogger(__name__)

FEWEST = 20
"""Rows below which nothing is judged."""
DISTINCT = 0.5
"""Share of different prompts below which most rows repeat another one; files that repeat rows on purpose are rare."""
AMBIGUOUS = 0.1
"""Share of rows with the prompt of a row with another answer; questions asked twice with two answers are below it."""
GIVEN = 0.5
"""Share of prompts that end with their answer, above the share that end with the next row's: chance gives some of both,
as the last option of a multiple choice does."""
LOOKED_AT = 16
"""Dropped rows whose length is computed again."""


def log_odd_rows(config: Config, read: Sequence[Task], kept: Sequence[Task], dropped: int) -> None:
    """Log the alarms of the training rows.

    Args:
        read: Rows that could be read.
        kept: Those of them that are trained on.
        dropped: Number of rows that were dropped while they were read, with a count in the log.
    """
    for name, text in {**lost(config, read, kept, dropped), **odd(kept, config)}.items():
        log.warning("alarm %s: %s", name, text)


def lost(config: Config, read: Sequence[Task], kept: Sequence[Task], dropped: int) -> dict[str, str]:
    """Return alarm -> text if rows of the file are missing without a reason."""
    path, most = config.taskset.train, config.rollout.max_prompt_tokens
    number = num_rows(Path(path)) if isinstance(path, str) and config.taskset.process is None else None
    if number is not None and len(read) + dropped < number:
        return {"lost-rows": f"{path} has {number} rows, and {len(read)} were read and {dropped} dropped"}
    there = {task.task_id for task in kept}
    left = [task for task in read if task.task_id not in there and not task.images][:LOOKED_AT]
    if not left or most is None or config.taskset.overlong_prompts != "drop":
        return {}
    lengths = [len(ids) for ids in encode_rows(left, ChatTokenizer.of(config))]
    short = [(task, length) for task, length in zip(left, lengths, strict=True) if length <= most]
    if not short:
        return {}
    text = f"row {short[0][0].task_id} was dropped as too long, and has {short[0][1]} of at most {most} prompt tokens"
    return {"lost-rows": f"{text}; look at what counts tokens for taskset.overlong_prompts"}


def num_rows(path: Path) -> int | None:
    """Return the number of rows in a parquet or jsonl file, without reading them; None for other files."""
    if path.suffix == ".jsonl" and path.is_file():
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    if path.suffix == ".parquet" and path.is_file():
        with pq.ParquetFile(path) as table:
            return int(table.metadata.num_rows)
    return None


def odd(rows: Sequence[Task], config: Config) -> dict[str, str]:
    """Return alarm -> text for rows that repeat others, share a prompt with another answer, or give the answer away.

    Rows of environments are left out: their prompts are equal, and the answer is in the environment."""
    if len(rows) < FEWEST or config.rollout.workflow == "environment" or any(task.images for task in rows):
        return {}
    found: dict[str, str] = {}
    prompts = [json.dumps(task.prompt, sort_keys=True) for task in rows]
    truths = [json.dumps(task.ground_truth, sort_keys=True) for task in rows]
    answers: defaultdict[str, set[str]] = defaultdict(set)
    for prompt, truth in zip(prompts, truths, strict=True):
        answers[prompt].add(truth)
    ambiguous = sum(len(answers[prompt]) > 1 for prompt in prompts)
    if ambiguous > AMBIGUOUS * len(rows):
        found["same-prompts"] = (
            f"{ambiguous} of {len(rows)} training rows have the prompt of a row with another answer; look at the "
            "columns of the prompt, and at what makes it from the question"
        )
    elif len(answers) < DISTINCT * len(rows):
        most = Counter(prompts).most_common(1)[0][1]
        found["duplicates"] = (
            f"{len(rows)} training rows have {len(answers)} different prompts, one of them {most} times; look at what "
            "wrote the file"
        )
    own = sum(_ends_with(task, task.ground_truth) for task in rows)
    other = sum(_ends_with(task, rows[i - 1].ground_truth) for i, task in enumerate(rows))
    if own - other > GIVEN * len(rows):
        found["answer-in-prompt"] = f"{own} of {len(rows)} prompts end with their answer; look at the prompt's columns"
    return found


def _ends_with(task: Task, truth: object) -> bool:
    text = str(truth).strip()
    return bool(text) and re.search(rf"(?<!\w){re.escape(text)}\W*$", task.question[-len(text) - 20 :]) is not None
