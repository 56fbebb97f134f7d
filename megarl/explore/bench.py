"""Measurement of one model on held-out tasks: the driver process, and counts of the answers to each task.

``python -m megarl.run.start bench --config RUN/resolved.json`` with the job's key in ``MEGARL_JOB_KEY`` and its attempt
in ``MEGARL_ATTEMPT``. Exits with 0 when the answers are counted, and on SIGTERM or SIGINT; the next start continues
from the answers in the store. Imports no torch.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from megarl.buffer.experience import by_group
from megarl.buffer.order.draws import evaluation_sampling
from megarl.buffer.store import Store
from megarl.buffer.store.engines import EngineTable
from megarl.config import Config, load_resolved
from megarl.core.durable import write_text
from megarl.core.errors import DataError, EngineError, InputError, JobError
from megarl.core.jobs import PROGRAM
from megarl.core.metrics import Timeline
from megarl.core.processes import heartbeat
from megarl.core.schema import Trajectory, WeightsVersion
from megarl.core.text import as_written, opens_thinking
from megarl.engines.client.control import EngineControl
from megarl.engines.fleet import EngineRow, EngineStatus, Fleet
from megarl.explore.workflows import asks_verifier
from megarl.rewards.routes import extractor
from megarl.rewards.verdict import NO_VERDICT
from megarl.tasks import ChatTokenizer

RESULT = "bench.json"
"""File of a finished bench, in the directory of its model."""
LAST_TOKENS = 32
"""Number of tokens at the end of a prompt that are searched for an open thought."""
Vote = Callable[[Trajectory], str | None]
"""Returns a response's answer: ``""`` if it gives none, None if the task's verifier extracts no answers."""


def written_response(answer: Trajectory, tokenizer: ChatTokenizer) -> str:
    """Return the text of an answer's last response for verifiers, with a ``<think>`` from the end of its prompt."""
    before = answer.turns[answer.response.follows].token_ids[-LAST_TOKENS:]
    return as_written(
        tokenizer.decode(answer.response.token_ids), opens_thinking(tokenizer.decode(before, special=True))
    )


@dataclass
class TaskAnswers:
    """Counts of the answers to one task."""

    task_id: str
    source: str
    """``data_source`` of the task."""
    samples: int = 0
    right: int = 0
    """Right answers; one without a verdict counts as wrong, as in an evaluation."""
    score: float = 0.0
    """Sum of the scores of answers with a verdict."""
    judged: int = 0
    """Answers with a verdict."""
    tokens: int = 0
    truncated: int = 0
    votes: list[tuple[str, int, int]] | None = field(default_factory=list)
    """(answer, number of samples with it, right ones among them); None if the verifier extracts no answers."""

    @property
    def mean_score(self) -> float | None:
        """Mean score of the answers with a verdict; None without any."""
        return self.score / self.judged if self.judged else None

    @classmethod
    def of(cls, task_id: str, source: str, answers: Iterable[Trajectory], vote: Vote) -> TaskAnswers:
        """Count the answers to a task."""
        found, votes = cls(task_id, source), defaultdict[str, list[int]](lambda: [0, 0])
        for answer in answers:
            right = answer.reward.status == "ok"
            found.samples += 1
            found.right += right
            if answer.reward.status not in NO_VERDICT:
                found.judged += 1
                found.score += answer.reward.score
            found.tokens += answer.response_length
            found.truncated += answer.truncated
            given = vote(answer)
            if given is None:
                found.votes = None
            elif given:
                votes[given][0] += 1
                votes[given][1] += right
        if found.votes is not None:
            found.votes = [(given, count, right) for given, (count, right) in sorted(votes.items())]
        return found


@dataclass(frozen=True)
class ModelAnswers:
    """A finished bench of one model."""

    samples: int
    """Answers to each task."""
    temperature: float
    seconds: float
    """Seconds from the driver's (last) start until all answers were stored."""
    tasks: tuple[TaskAnswers, ...]

    def to_json(self) -> str:
        """Return the counts as JSON."""
        return json.dumps(asdict(self), indent=1)


def read_result(path: Path) -> ModelAnswers:
    """Read what ``to_json`` wrote. Raises DataError for a damaged file or another version's."""
    try:
        values: Mapping[str, Any] = json.loads(path.read_text())
        tasks = tuple(TaskAnswers(**task) for task in values["tasks"])
        return ModelAnswers(**{**values, "tasks": tasks})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} cannot be read ({error}); remove it, and the same command measures again") from error


log = logging.getLogger(__name__)

ROLLOUT = "bench"
FROM_FILES = WeightsVersion(0, 0)
"""Version of weights that an engine read from the model's files; attempts count from 1, so none published it."""
LOOK_S = 1.0
"""Seconds between two checks for replaced engines, whose weights must be verified."""
ANSWER_S = 2.0
PROGRESS_S = 10.0
"""Seconds between two lines about progress."""


class ModelFiles:
    """Verifies that a job's engines have the weights of the model's files, and records it in their rows. Engines refuse
    requests until then.

    Args:
        engines: Rows of the job's engines.
        control: Returns the control of an engine.
    """

    def __init__(self, engines: EngineTable, control: Callable[[EngineRow], EngineControl]) -> None:
        self._engines, self._control = engines, control

    def await_engines(self, start_s: float, poll_s: float, stopping: Callable[[], bool]) -> None:
        """Wait until every engine serves. Raises EngineError."""
        began = time.monotonic()
        while left := [row for row in self._present() if row.state is not EngineStatus.SERVING]:
            if stopping():
                raise EngineError(f"the job is asked to stop, and engine {left[0].number} is not ready")
            if (waited := time.monotonic() - began) > start_s:
                raise EngineError(
                    f"engine {left[0].number} was not ready after {waited:.0f} s (rollout.start_timeout_s={start_s:g})"
                )
            heartbeat.beat()
            time.sleep(poll_s)

    def prove(self) -> None:
        """Compare each serving engine with the files, once per start, and let it generate.

        Engines that do not reply are skipped: busy, or dead and replaced later. Raises EngineError if an engine has
        other weights.
        """
        for row in self._present():
            if row.state is EngineStatus.SERVING and row.has is None:
                self._prove(row, self._control(row))

    def _present(self) -> list[EngineRow]:
        return Fleet(self._engines.own()).present()

    def _prove(self, row: EngineRow, engine: EngineControl) -> None:
        if not _is_there(engine, row.start):
            return
        started = time.monotonic()
        try:
            with heartbeat.timeout(engine.timeout_s):
                elements = sum(worker["elements"] for worker in engine.workers("megarl_check_files"))
            engine.refuse(None)
        except EngineError:
            if _is_there(engine, row.start):
                raise
            return
        self._engines.delivered({row.key: row.start}, FROM_FILES)
        log.info(
            "engine at %s: %d weights equal the model's files (%.1f s)",
            engine.url,
            elements,
            time.monotonic() - started,
        )


def _is_there(engine: EngineControl, start: int) -> bool:
    """Return True if this start of the server replies."""
    try:
        return engine.state(ANSWER_S).start == start
    except EngineError:
        return False


class BenchDriver:
    """Requests answers to every held-out task and counts them."""

    def __init__(self, config: Config, store: Store, files: ModelFiles, stopping: Callable[[], bool]) -> None:
        self._config = config
        self._store = store
        self._files = files
        self._stopping = stopping

    def run(self) -> bool:
        """Run the bench; return False if the job is asked to stop before all answers are stored. Raises EngineError,
        JobError."""
        begun, config = time.time(), self._config
        self._files.await_engines(config.rollout.start_timeout_s, config.store.poll_s, self._stopping)
        self._files.prove()
        task_ids = self._store.tasks.ids("eval")
        if self._store.rollouts.is_requested(ROLLOUT):
            log.info("continuing: %d of %d tasks are answered", *self._store.rollouts.progress(ROLLOUT))
        else:
            sampling = evaluation_sampling(config, 0)
            self._store.rollouts.request(ROLLOUT, "eval", 0, FROM_FILES, task_ids, config.evaluation.samples, sampling)
        if not self._wait():
            return False
        answers = ModelAnswers(
            config.evaluation.samples,
            config.evaluation.temperature,
            round(time.time() - begun, 3),
            tuple(self._counted()),
        )
        write_text(Path(config.run.dir) / RESULT, answers.to_json())
        self._store.journal.close_job()
        return True

    def _wait(self) -> bool:
        """Wait for the answers; return False if the job is asked to stop."""
        looked = told = time.monotonic()
        with heartbeat.phase("evaluation"):
            while not self._store.rollouts.is_complete(ROLLOUT):
                if self._stopping():
                    return False
                if (now := time.monotonic()) - looked > LOOK_S:
                    self._files.prove()
                    looked = now
                if now - told > PROGRESS_S:
                    log.info("answers to %d of %d tasks", *self._store.rollouts.progress(ROLLOUT))
                    told = now
                heartbeat.beat()
                time.sleep(self._config.store.poll_s)
        return True

    def _counted(self) -> list[TaskAnswers]:
        """Count the answers to each task, in task order, with only part of them in memory."""
        tokenizer = ChatTokenizer.of(self._config)
        tasks = {task.task_id: task for task in self._store.tasks.read("eval", images=False)}
        reads = {
            task_id: extractor(task, self._config.reward) if asks_verifier(self._config.rollout) else None
            for task_id, task in tasks.items()
        }

        def vote(answer: Trajectory) -> str | None:
            read = reads[answer.task_id]
            return None if read is None else read(written_response(answer, tokenizer))

        found = []
        for part in self._store.groups.parts(self._store.groups.ids(ROLLOUT)):
            groups = {group[0].task_id: group for group in by_group(self._store.groups.read(part))}
            heartbeat.beat()
            found += [TaskAnswers.of(i, tasks[i].data_source, answers, vote) for i, answers in groups.items()]
        return found


def measure(config: Config, key: str, stopping: Callable[[], bool]) -> bool:
    """Measure a job's model; return False if asked to stop. Raises EngineError, JobError, InputError."""
    store = Store(
        config.store.url,
        attempt=int(os.environ["MEGARL_ATTEMPT"]),
        outage_s=config.store.outage_s,
        program=os.environ[PROGRAM],
    )
    try:
        files = ModelFiles(store.engines, lambda row: EngineControl(row.url, key, config.rollout.start_timeout_s))
        with Timeline(Path(config.run.dir) / "timeline", "bench").phase("evaluation"):
            return BenchDriver(config, store, files, stopping).run()
    finally:
        store.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m megarl.run.start bench", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--config", required=True, help="the run's resolved.json")
    config = load_resolved(parser.parse_args(argv).config)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    stop = threading.Event()

    def asked(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, asked)
    try:
        measure(config, os.environ["MEGARL_JOB_KEY"], stop.is_set)
    except (EngineError, JobError, InputError) as error:
        if stop.is_set() and isinstance(error, EngineError):  # an engine that was not up yet, or ended before us
            return 0
        log.error("bench: %s", error)
        return 1
    return 0
