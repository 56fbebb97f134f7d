"""Contents of a run directory, read into plain values for the report. Missing parts stay empty, with a note.

Reads ``resolved.json``, the store, ``timeline/*.jsonl`` and ``metrics.jsonl``; starts nothing, imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy.engine import make_url
from tokenizers import Tokenizer

from megarl.buffer.store import Store
from megarl.config import Config, load_resolved, to_dict
from megarl.core.errors import ConfigError, StoreDamagedError, masked_text
from megarl.core.jobs import ProcessKind, kind_of
from megarl.core.metrics import COMMAND, DROPPED, best_step
from megarl.core.schema import Task, Trajectory
from megarl.core.text import kind_of_text, truncation
from megarl.engines.fleet import EngineRow
from megarl.run.report.svg import TimedPhase, union, without_refused
from megarl.run.run_dir.owner import is_running
from megarl.weights.checkpoint.training.manifest import finished, steps_of

SAMPLES = 10
LOG_BYTES = 2**20
"""Bytes read of a log, from its end."""
ALARM = re.compile(r"^.*?\balarm ([a-z][a-z-]+): (.+)$", re.M)
"""A line of an alarm, as ``Reporter.log`` and the command write it."""
STOPPED_S = 60.0
"""Minimum gap in seconds in all processes' records that counts as a stopped job, not a slow one."""
Series = list[tuple[int, float]]


@dataclass(frozen=True)
class EvaluationResult:
    """Answers to the held-out tasks after ``step`` steps."""

    rollout_id: str
    step: int | None
    accuracy: float | None
    """None if the evaluation did not finish."""
    statuses: Mapping[str, int]
    """Reward status -> number of answers; empty if the store no longer has the answers."""
    mean_length: float | None
    """Mean tokens of a response."""
    loss: float | None = None
    """Loss of an offline job on the held-out rows."""
    standard_error: float | None = None
    """Standard error of the accuracy, clustered by task."""
    samples: int = 1
    """Answers per task."""
    passed: float | None = None
    """pass@samples, if there are several answers per task."""
    passed_error: float | None = None
    score: float | None = None
    """Mean score, if scores are graded."""
    sources: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Source -> (accuracy, number of tasks); empty for a single source."""


@dataclass(frozen=True)
class Answer:
    text: str
    status: str


@dataclass(frozen=True)
class AnswerComparison:
    """Answers to one held-out task before and after training."""

    question: str
    ground_truth: str
    before: Answer | None
    after: Answer | None


@dataclass(frozen=True)
class LoggedAlarm:
    """An alarm of the trainer, from its logs."""

    name: str
    count: int
    text: str
    """Text of the last one."""


@dataclass(frozen=True)
class ReportData:
    """All contents of the report."""

    run_dir: Path
    config: Config
    steps: tuple[tuple[int, dict[str, float]], ...]
    """(steps done, finite metrics)."""
    warm_start: tuple[tuple[int, dict[str, float]], ...]
    held_out: int
    """Number of held-out tasks."""
    before: EvaluationResult | None
    after: EvaluationResult | None
    accuracies: tuple[tuple[int, float], ...]
    """(steps done, accuracy) of each finished evaluation with an accuracy."""
    losses: tuple[tuple[int, float], ...]
    """(steps done, loss) of each finished evaluation of an offline job."""
    learned: int
    """Number of held-out tasks that were not right before training and are right after it."""
    unlearned: int
    samples: tuple[AnswerComparison, ...]
    timelines: Mapping[str, tuple[TimedPhase, ...]]
    dropped: tuple[tuple[str, int], ...]
    """(message about dropped groups without repetitions, number of steps with it)."""
    notes: tuple[str, ...]
    """Messages about parts that could not be read."""
    engines: tuple[EngineRow, ...] = ()
    """Engines that should have a process."""
    running: bool = False
    """True while a job of the run lives."""
    prediction: Mapping[str, Any] | None = None
    """Device and phase -> seconds that the cost model predicts for a step; None until the job has ended."""

    def series(self, name: str) -> Series:
        """Return (step, value) of a metric for the steps that recorded it."""
        return [(step, metrics[name]) for step, metrics in self.steps if name in metrics]

    @property
    def steps_done(self) -> int:
        """Number of finished steps."""
        return self.steps[-1][0] if self.steps else 0

    @property
    def hf_checkpoint(self) -> Path | None:
        """Folder of the exported checkpoint; None if it does not exist."""
        path = self.run_dir / "hf"
        return path if (path / "config.json").is_file() else None

    @property
    def best_checkpoint(self) -> Path | None:
        """Checkpoint that ``trainer.keep_best`` keeps; None if there is none yet."""
        metric, folder = self.config.trainer.keep_best, self.run_dir / "checkpoints"
        paths = finished(folder)
        there = dict(zip(steps_of(paths), paths, strict=True))
        best = None if metric is None else best_step(self.run_dir, metric, there)
        return None if best is None else there[best]

    @property
    def finished(self) -> bool:
        """True if the job has ended successfully."""
        known = self.after is not None and (self.after.accuracy is not None or self.after.loss is not None)
        return known and self.hf_checkpoint is not None and self.steps_done >= self.config.trainer.steps

    @property
    def offline(self) -> bool:
        """True for an offline job, which has losses instead of answers."""
        return bool(self.losses)

    @property
    def wall_s(self) -> float:
        """Seconds from the first recorded phase to the last, without the times when the job was stopped."""
        spans = union((p for phases in self.timelines.values() for p in phases), bridge_s=STOPPED_S)
        return sum(end - start for start, end in spans)


def load(run_dir: Path, outage_s: float = 0.0, *, read_only: bool = False) -> ReportData:
    """Read a run directory; wait up to ``outage_s`` for its store. ``read_only``: do not change its SQLite file.

    Raises:
        ConfigError: ``resolved.json`` is missing, or has settings that this version does not have.
    """
    if not (run_dir / "resolved.json").is_file():
        raise ConfigError(f"{run_dir} has no resolved.json; give the directory of a run, e.g. runs/quickstart")
    config = load_resolved(run_dir / "resolved.json")
    notes: list[str] = []
    timelines = timelines_of(run_dir, notes)
    written = {r["step"]: r for r in _records(run_dir / "metrics.jsonl", notes) if any(k.startswith("sft/") for k in r)}
    steps: list[tuple[int, dict[str, float]]] = []
    tasks: list[Task] = []
    events: list[dict[str, Any]] = []
    engines: list[EngineRow] = []
    dropped: list[dict[str, Any]] = []
    answers: dict[str, list[Trajectory]] = {"eval-before": [], "eval-after": []}
    if (url := store_url(config, run_dir)) is None:
        notes.append(f"The store {masked_text(config.store.url)} does not exist: no steps, no answers.")
    else:
        store = Store(url, outage_s=outage_s, read_only=read_only)
        try:
            store.database.check_schema()
            steps = [(step, _finite(metrics)) for step, metrics in store.journal.steps()]
            tasks = store.tasks.read("eval", images=False)
            events = [event["data"] for event in store.journal.events("evaluation")]
            dropped = [event["data"] for event in store.journal.events(DROPPED)]
            engines = [row for row in store.engines.read() if row.is_present]
            answers = {name: _answers(store, name, notes) for name in answers}
        finally:
            store.close()
    if steps and (text := truncation(steps[-1][1], config.rollout.max_response_tokens)) is not None:
        notes.append(f"Step {steps[-1][0]}: {text}.")
    before, after = (_evaluation(name, events, answers[name]) for name in answers)
    right = [{e.task_id for e in answers[n] if e.index == 0 and e.reward.status == "ok"} for n in answers]
    both = set.intersection(*({e.task_id for e in answers[n]} for n in answers))
    return ReportData(
        run_dir=run_dir,
        config=config,
        steps=tuple(steps),
        warm_start=tuple((step, _finite(written[step])) for step in sorted(written)),
        held_out=len(tasks) or max((int(e["rows"]) for e in events if "rows" in e), default=0),
        before=before,
        after=after,
        accuracies=_of_events(events, "accuracy"),
        losses=_of_events(events, "loss"),
        learned=len((right[1] - right[0]) & both),
        unlearned=len((right[0] - right[1]) & both),
        samples=_samples(tasks, list(answers.values()), located(config, run_dir, config.model.path), notes),
        timelines=timelines,
        dropped=_dropped(dropped),
        notes=tuple(notes),
        engines=tuple(engines),
        running=is_running(run_dir),
        prediction=next(iter(_records(run_dir / "prediction.json", notes)), None),
    )


def timelines_of(run_dir: Path, notes: list[str]) -> dict[str, tuple[TimedPhase, ...]]:
    """Return process -> phases, without starts that were refused and processes that recorded none. ``notes`` gets a
    line for each file with unreadable lines."""
    timelines = {p.stem: _phases(_records(p, notes)) for p in sorted((run_dir / "timeline").glob("*.jsonl"))}
    if COMMAND in timelines:
        timelines[COMMAND] = tuple(without_refused(timelines[COMMAND]))
    return {name: phases for name, phases in timelines.items() if phases}


# ------------------------------------------------------------------- settings


def changed_settings(config: Config) -> list[tuple[str, Any, Any]]:
    """Return (setting, default, value) of each setting that differs from its default."""
    found = list(_changed("", to_dict(Config()), to_dict(config)))
    return [
        (name, _interpolated(default, config), masked_text(value) if name == "store.url" else value)
        for name, default, value in found
        if _interpolated(default, config) != value
    ]


def _changed(where: str, default: Any, value: Any) -> Iterable[tuple[str, Any, Any]]:
    if isinstance(value, Mapping) and value:
        for key in value:
            inner = default.get(key) if isinstance(default, Mapping) else None
            yield from _changed(f"{where}.{key}" if where else key, inner, value[key])
    elif value != default:
        yield where, default, value


def _interpolated(default: Any, config: Config) -> Any:
    if not isinstance(default, str):
        return default
    return default.replace("${run.dir}", config.run.dir).replace("${run.name}", config.run.name)


# --------------------------------------------------------------------- pieces


def alarms_of(run_dir: Path) -> tuple[LoggedAlarm, ...]:
    """Return the alarms in the ends of the logs of all attempts, the most recent first."""
    found: dict[str, LoggedAlarm] = {}
    for path in sorted(logs_of(run_dir), key=lambda path: path.stat().st_mtime):
        if kind_of(path.stem) is not ProcessKind.TRAINER and path.stem != COMMAND:
            continue
        for name, text in ALARM.findall(end_of(path)):
            before = found.pop(name, None)
            found[name] = LoggedAlarm(name, 1 if before is None else before.count + 1, text)
    return tuple(reversed(found.values()))


def logs_of(run_dir: Path) -> list[Path]:
    """Return the logs of all attempts, the last attempt's first, by name."""
    attempts = sorted((run_dir / "logs").glob("attempt_*"), key=lambda path: (len(path.name), path.name), reverse=True)
    return [path for attempt in attempts for path in sorted(attempt.glob("*.log"))]


def end_of(path: Path, most: int = LOG_BYTES) -> str:
    """Return the last ``most`` bytes of a log as text, from a line's start; "" if it is gone."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - most, 0))
            text = file.read(most).decode(errors="replace")
    except OSError:
        return ""
    return text.partition("\n")[2] if size > most else text


def _records(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the records of a jsonl file; unreadable lines, e.g. of a killed process, are skipped and noted."""
    if not path.is_file():
        return []
    found, lost = [], 0
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            lost += 1
            continue
        found.append(record)
    if lost:
        notes.append(f"{lost} unreadable line{'s' if lost > 1 else ''} in {path.name} skipped.")
    return found


def _phases(records: Iterable[Mapping[str, Any]]) -> tuple[TimedPhase, ...]:
    return tuple(TimedPhase(r["phase"], r["start"], r["start"] + r["seconds"], r.get("step")) for r in records)


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v) and k != "step"}


def located(config: Config, run_dir: Path, path: str) -> Path:
    """Return the current path of a run's file, also if the run's directory was moved."""
    inside = Path(path)
    if inside.is_relative_to(config.run.dir):
        moved = run_dir / inside.relative_to(config.run.dir)
        if moved.exists():
            return moved
    return inside


def store_url(config: Config, run_dir: Path) -> str | None:
    """Return the URL of a run's store, also if the run's directory was moved; None if the file is missing."""
    url = make_url(config.store.url)
    if url.get_backend_name() != "sqlite" or not url.database:
        return config.store.url
    path = located(config, run_dir, url.database)
    return f"sqlite:///{path}" if path.is_file() else None  # Store would create an empty one


def _answers(store: Store, rollout_id: str, notes: list[str]) -> list[Trajectory]:
    """Return the answers of an evaluation; [] and a note if one is damaged, which a resume does not check."""
    try:
        return store.groups.trajectories(rollout_id)
    except StoreDamagedError as error:
        notes.append(f"The answers of {rollout_id} are left out: {error}.")
        return []


def _evaluation(
    name: str, events: Iterable[Mapping[str, Any]], answers: Sequence[Trajectory]
) -> EvaluationResult | None:
    event = next((e for e in reversed(list(events)) if e["rollout_id"] == name), None)
    if event is None and not answers:
        return None
    return EvaluationResult(
        rollout_id=name,
        step=event["step"] if event else None,
        accuracy=event.get("accuracy") if event else None,
        statuses=Counter(e.reward.status for e in answers),
        mean_length=sum(e.response_length for e in answers) / len(answers) if answers else None,
        loss=event.get("loss") if event else None,
        standard_error=event.get("standard_error") if event else None,
        samples=event.get("samples", 1) if event else 1,
        passed=event.get("pass") if event else None,
        passed_error=event.get("pass_standard_error") if event else None,
        score=event.get("score") if event and event.get("graded") else None,
        sources={name: (share, tasks) for name, (share, tasks) in (event or {}).get("sources", {}).items()},
    )


def _dropped(events: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, int], ...]:
    """Return (first message of its kind, number of steps), the most frequent first."""
    first: dict[str, str] = {}
    steps: dict[str, set[int]] = {}
    for event in events:
        for message in event["messages"]:
            kind = kind_of_text(message.partition(": ")[2])
            first.setdefault(kind, f"step {event['step']}, {message}")
            steps.setdefault(kind, set()).add(event["step"])
    return tuple(sorted(((text, len(steps[kind])) for kind, text in first.items()), key=lambda found: -found[1]))


def _of_events(events: Iterable[Mapping[str, Any]], name: str) -> tuple[tuple[int, float], ...]:
    """Return (steps done, value) of evaluations; a step's last one counts."""
    return tuple(sorted({e["step"]: e[name] for e in events if name in e}.items()))


def _samples(
    tasks: Sequence[Task], answers: Sequence[Sequence[Trajectory]], model: Path, notes: list[str]
) -> tuple[AnswerComparison, ...]:
    """Return the answers to ``SAMPLES`` evenly spaced tasks, so that the choice does not depend on the outcome."""
    sides = [{e.task_id: e for e in side if e.index == 0} for side in answers]
    answered = [t for t in tasks if all(t.task_id in side for side in sides if side) and any(sides)]
    if not answered:
        return ()
    tokenizer = None
    if (model / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    else:
        notes.append(f"{model / 'tokenizer.json'} does not exist: answers are shown as token ids.")

    def answer(trajectory: Trajectory | None) -> Answer | None:
        if trajectory is None:
            return None
        responses = [turn for turn in trajectory.turns if turn.author == "model"]
        ids = responses[-1].token_ids.tolist() if responses else []  # [] if its workflow failed
        text = tokenizer.decode(ids, skip_special_tokens=True) if tokenizer else " ".join(map(str, ids))
        return Answer(text, trajectory.reward.status)

    count = min(SAMPLES, len(answered))
    chosen = [answered[i * len(answered) // count] for i in range(count)]
    return tuple(
        AnswerComparison(
            question=t.question,
            ground_truth=str(t.ground_truth),
            before=answer(sides[0].get(t.task_id)),
            after=answer(sides[1].get(t.task_id)),
        )
        for t in chosen
    )
