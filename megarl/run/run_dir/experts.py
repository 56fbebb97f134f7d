"""Rows of expert experiences: from files of demonstrations, and from the trajectories of another run."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.buffer.store import ExpertExperience
from megarl.config import Config, load_resolved
from megarl.core.errors import DataError
from megarl.core.schema import End, Task, Trajectory
from megarl.run.job_store import store_of_run
from megarl.run.run_dir.rows import read_split
from megarl.tasks import ChatTokenizer, encode_demonstrations, tokenizer_digest
from megarl.tasks.row_files import RowLocation, read_table

log = logging.getLogger(__name__)

RUN = "run:"
"""Prefix of a source that is a run's directory."""
SCORE, TEACHER_LOGP = "score", "teacher_logp"
"""Columns of expert rows in addition to those of demonstrations."""


def from_source(config: Config, source: str) -> Config:
    """Return the settings with ``source`` as ``taskset.expert``, so that messages name its rows."""
    return replace(config, taskset=replace(config.taskset, expert=source))


def read_experts(config: Config) -> list[ExpertExperience]:
    """Return the rows of ``taskset.expert``, with the templates of ``taskset`` applied to prompts.

    Raises:
        DataError: a row is not a demonstration, its score is not finite, or its ``teacher_logp`` does not have one
            value per response token.
    """
    path = Path(str(config.taskset.expert))
    tasks = [row for row in read_split(config, "expert") if isinstance(row, Task)]
    names, rows = read_table(path, (SCORE, TEACHER_LOGP))
    if not {SCORE, TEACHER_LOGP} & set(names):
        return [ExpertExperience(task) for task in tasks]
    tokenizer, digest = ChatTokenizer.of(config), tokenizer_digest(Path(config.model.path))
    return [
        _with_teacher(RowLocation(path, i), task, row, tokenizer, digest)
        for i, (task, row) in enumerate(zip(tasks, rows, strict=True))
    ]


def _with_teacher(
    location: RowLocation, task: Task, row: dict[str, Any], tokenizer: ChatTokenizer, digest: str
) -> ExpertExperience:
    score, logp = row.get(SCORE), row.get(TEACHER_LOGP)
    if score is not None and not _is_finite(score):
        location.refuse(SCORE, "a finite number or null", score)
    expert = ExpertExperience(task, None if score is None else float(score))
    if logp is None:
        return expert
    if not isinstance(logp, list) or not all(_is_finite(value) and value <= 0 for value in logp):
        location.refuse(TEACHER_LOGP, "a list of log-probs, none above 0, or null", logp)
    ((_, response),) = encode_demonstrations([task], tokenizer)
    if len(logp) != len(response):
        location.refuse(
            TEACHER_LOGP, f"as long as the response, {len(response)} tokens with its end (model.path)", len(logp)
        )
    return replace(expert, teacher_logp=np.asarray(logp, np.float32), tokenizer=digest)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_run(run_dir: Path, min_score: float) -> list[ExpertExperience]:
    """Return a run's single-turn training responses with a score of at least ``min_score``, and their log-probs.

    Excluded and counted in the log: multi-turn, truncated and empty trajectories. Tasks with images are excluded too. A
    response keeps its log-probs if its text encodes to the same tokens.

    Raises:
        DataError: there is no run, or it has no such response.
    """
    resolved = run_dir / "resolved.json"
    if not resolved.is_file():
        raise DataError(f"{RUN}{run_dir}: no resolved.json; give the directory of a run, e.g. {RUN}runs/quickstart")
    config = load_resolved(resolved)
    tokenizer, digest = ChatTokenizer.of(config), tokenizer_digest(Path(config.model.path))
    found: list[ExpertExperience] = []
    left_out = 0
    with store_of_run(config.store.url, run_dir, read_only=True) as store:
        for task, trajectory in store.experts.scored_trajectories(min_score):
            if len(trajectory.turns) != 2 or trajectory.end is not End.FINISHED:
                left_out += 1
                continue
            expert = _of_trajectory(len(found), task, trajectory, tokenizer, digest)
            if expert.task.response:
                found.append(expert)
            else:
                left_out += 1
    if left_out:
        log.info("%s%s: %d trajectories left out (several turns, truncated, or empty)", RUN, run_dir, left_out)
    if not found:
        raise DataError(f"{RUN}{run_dir}: no single response of training has a score of {min_score:g} or more")
    return found


def _of_trajectory(
    number: int, task: Task, trajectory: Trajectory, tokenizer: ChatTokenizer, digest: str
) -> ExpertExperience:
    response = trajectory.response
    ids = response.token_ids
    ended = len(ids) > 0 and int(ids[-1]) in tokenizer.eos_ids
    text = tokenizer.decode(ids[:-1] if ended else ids, special=True)
    shown = Task(
        f"expert/{number}",
        task.data_source,
        task.prompt,
        "",
        {},
        response=text,
        chat_template_kwargs=task.chat_template_kwargs,
    )
    same = np.array_equal(tokenizer.response_ids(text), ids)
    return ExpertExperience(shown, trajectory.reward.score, response.logp if same else None, digest if same else None)
