"""Kinds of rows in a job's files, and rows of expert experiences.

The model's processor counts the tokens of images.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.buffer.store import ExpertExperience
from megarl.config import Config, load_resolved
from megarl.core.errors import DataError
from megarl.core.schema import End, Preference, Task, Trajectory
from megarl.run.job_store import store_of_run
from megarl.run.run_dir.changes import has_checkpoints
from megarl.tasks import (
    ChatTokenizer,
    Faults,
    Kind,
    Place,
    encode_demonstrations,
    encode_rows,
    place_of_row,
    processed,
    read_preferences,
    read_rows,
    read_tasks,
    recorded,
    single_file,
    sources_of,
    tokenizer_digest,
    with_templates,
)
from megarl.tasks.row_files import WHOLE, RowLocation, read_table

if TYPE_CHECKING:
    from megarl.tasks.image_processor import Processor


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
    from megarl.tasks.image_processor import Processor  # imports torch and transformers

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
    from megarl.tasks.image_processor import prompt_lengths

    return prompt_lengths(rows, tokenizer, processor, path=path)


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
