"""The comparison of a bench: metrics of models on the same tasks, as HTML, JSON and a table for the terminal."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from megarl.buffer.experience.held_out import Interval, interval, majority_at, paired, pass_at, sizes
from megarl.config import Config
from megarl.core.durable import write_text
from megarl.explore.bench import ModelAnswers, TaskAnswers
from megarl.run.report.pieces import CSS, HATCH, PIECES
from megarl.run.report.text import duration

OVERALL = "all"
SCORE = "mean score"
Value = Callable[[TaskAnswers], float | None]
"""Function that returns a task's value of a metric; None if the task has none."""


class Measured(NamedTuple):
    """A measured model and its answers."""

    name: str
    path: str
    answers: ModelAnswers


class Difference(NamedTuple):
    """Paired difference ``second`` - ``first``; both are indices of models."""

    first: int
    second: int
    interval: Interval


@dataclass(frozen=True)
class Row:
    """A metric on the tasks of one data source."""

    source: str
    metric: str
    values: tuple[Interval | None, ...]
    """Mean of each model; None if the metric is undefined: the verifier has no votes, or there is no verdict."""
    differences: tuple[Difference, ...]


def metrics_of(samples: int) -> Mapping[str, Value]:
    """Return the metrics of ``samples`` answers per task, by name."""
    found: dict[str, Value] = {
        "accuracy" if samples == 1 else f"avg@{samples}": lambda task: task.right / task.samples,
        SCORE: lambda task: task.mean_score,
    }
    if samples == 1:
        return found
    found |= {f"pass@{k}": partial(_pass, k) for k in sizes(samples)}
    # With two votes a majority is a tie, which equals the accuracy.
    return found | {f"majority@{k}": partial(_majority, k) for k in sizes(samples) if k > 2 or k == samples}


def _pass(k: int, task: TaskAnswers) -> float:
    return float(pass_at(k, np.array([task.right]), task.samples)[0])


def _majority(k: int, task: TaskAnswers) -> float | None:
    return None if task.votes is None else majority_at(k, [vote[1:] for vote in task.votes], task.samples)


def compare(measured: Sequence[Measured]) -> list[Row]:
    """Return every metric over all tasks and, if there are several data sources, for each source.

    Majorities need votes on every task; other metrics ignore tasks without a value.
    """
    sources = sorted({task.source for model in measured for task in model.answers.tasks})
    rows = []
    for source in [OVERALL, *(sources if len(sources) > 1 else ())]:
        tasks = [[t for t in model.answers.tasks if source in (OVERALL, t.source)] for model in measured]
        for metric, value in metrics_of(measured[0].answers.samples).items():
            values = [_values(metric, value, of_model) for of_model in tasks]
            rows.append(Row(source, metric, tuple(map(_interval, values)), tuple(_paired_differences(values))))
    return rows


def _values(metric: str, value: Value, tasks: Sequence[TaskAnswers]) -> dict[str, float]:
    found = {task.task_id: value(task) for task in tasks}
    known = {task_id: number for task_id, number in found.items() if number is not None}
    return known if len(known) == len(found) or not metric.startswith("majority") else {}


def _interval(values: Mapping[str, float]) -> Interval | None:
    return interval(np.array(list(values.values()))) if values else None


def _paired_differences(values: Sequence[Mapping[str, float]]) -> list[Difference]:
    found = []
    for i, j in itertools.combinations(range(len(values)), 2):
        if common := [task_id for task_id in values[i] if task_id in values[j]]:
            first, second = (np.array([values[k][task_id] for task_id in common]) for k in (i, j))
            found.append(Difference(i, j, paired(first, second)))
    return found


def as_json(measured: Sequence[Measured], rows: Sequence[Row]) -> dict[str, Any]:
    """Return the comparison as plain values for JSON."""
    models = [
        {
            "name": model.name,
            "path": model.path,
            "samples": model.answers.samples,
            "temperature": model.answers.temperature,
            "seconds": model.answers.seconds,
            "tasks": len(model.answers.tasks),
            "no_verdict": sum(task.samples - task.judged for task in model.answers.tasks),
            "truncated": sum(task.truncated for task in model.answers.tasks),
            "tokens": sum(task.tokens for task in model.answers.tasks),
        }
        for model in measured
    ]
    return {
        "models": models,
        "metrics": [
            {
                "source": row.source,
                "metric": row.metric,
                "values": [None if value is None else asdict(value) for value in row.values],
                "differences": [{"first": d.first, "second": d.second, **asdict(d.interval)} for d in row.differences],
            }
            for row in rows
        ],
    }


METHOD = (
    "[a, b] is the 95 % confidence interval over tasks: Student’s t with the standard error of the tasks’ means; "
    "Wilson’s where every task has 0 or 1."
)
PAIRED = (
    "Second model minus first, on the tasks that both answered: a difference on the same tasks is known better than "
    "two accuracies. ✓: the interval leaves out 0, so that chance alone is unlikely; without an interval no task "
    "differs from another in it. It knows nothing of other "
    "comparisons on this page: of twenty without a cause, one has a ✓."
)


def write_bench(folder: Path, config: Config, measured: Sequence[Measured]) -> Path:
    """Write ``bench.html`` and ``results.json`` into a folder; return the page's path."""
    rows = compare(measured)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "results.json", json.dumps(as_json(measured, rows), indent=1))
    write_text(folder / "bench.html", page(config, measured, rows))
    return folder / "bench.html"


def page(config: Config, measured: Sequence[Measured], rows: Sequence[Row]) -> str:
    """Return the page as HTML."""
    sections = [_headline(config, measured, rows)]
    for source in dict.fromkeys(row.source for row in rows):
        mine = [row for row in rows if row.source == source]
        title = "All tasks" if source == OVERALL else source
        head = ("", *(model.name for model in measured))
        body = [(row.metric, *_all_shown(row)) for row in mine]
        sections.append(PIECES.section(title, METHOD, PIECES.card(PIECES.table(head, body), scroll=True)))
        if len(measured) > 1:
            sections.append(_differences(title, measured, mine))
    sections += [_answers(measured), _settings(config)]
    return str(PIECES.page(f"{config.run.name}: megarl bench", Markup(CSS), Markup(HATCH), sections))


def table(measured: Sequence[Measured]) -> str:
    """Return lines for the terminal: the metrics of all models, and their paired differences."""
    rows = compare(measured)
    cells = [("", *(model.name for model in measured))]
    for row in rows:
        name = row.metric if row.source == OVERALL else f"{row.source}: {row.metric}"
        cells.append((name, *_all_shown(row)))
    if len(measured) > 1:
        cells.append((f"paired differences to {measured[0].name}", *[""] * len(measured)))
        for row in rows:
            to_first = {d.second: d for d in row.differences if d.first == 0}
            name = row.metric if row.source == OVERALL else f"{row.source}: {row.metric}"
            cells.append((name, "", *(_difference(row, to_first.get(i)) for i in range(1, len(measured)))))
    widths = [max(len(line[i]) for line in cells) for i in range(len(measured) + 1)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(line[1:], widths[1:], strict=True))]
        ).rstrip()
        for line in cells
    )


def _headline(config: Config, measured: Sequence[Measured], rows: Sequence[Row]) -> Markup:
    first = rows[0]
    best = max(range(len(measured)), key=lambda i: _mean(first.values[i]))
    evaluation, answers = config.evaluation, measured[0].answers
    how = "greedy" if evaluation.temperature == 0 else f"temperature {evaluation.temperature:g}"
    shown = _all_shown(first)
    head = f"{first.metric}: {shown[0]}"
    if len(measured) > 1:
        head = f"{measured[best].name}: {first.metric} {shown[best]}, the highest of {len(measured)}"
    tiles = [
        ("models", str(len(measured))),
        ("tasks", str(len(answers.tasks))),
        ("answers to a task", f"{answers.samples}, {how}"),
        ("time for all models", duration(sum(model.answers.seconds for model in measured))),
    ]
    status = "weights read from files; each engine’s were compared with them, element by element"
    found: Markup = PIECES.headline(f"{config.run.name} · bench", head, status, _notes(measured), tiles)
    return found


def _notes(measured: Sequence[Measured]) -> list[str]:
    notes = []
    if len({tuple(task.task_id for task in model.answers.tasks) for model in measured}) > 1:
        notes.append(
            "Not all models have the same tasks (too long a prompt in one’s tokens): differences are of those common."
        )
    for model in measured:
        if missing := sum(task.samples - task.judged for task in model.answers.tasks):
            notes.append(f"{model.name}: {missing} answers without a verdict count as wrong, and have no score.")
    if (
        any(task.votes is None for model in measured for task in model.answers.tasks)
        and measured[0].answers.samples > 1
    ):
        notes.append("n/a: the verifier of some tasks extracts no answer that could be voted on.")
    return notes


def _differences(title: str, measured: Sequence[Measured], rows: Sequence[Row]) -> Markup:
    pairs = list(dict.fromkeys((d.first, d.second) for row in rows for d in row.differences))
    head = ("", *(f"{measured[second].name} − {measured[first].name}" for first, second in pairs))
    body = []
    for row in rows:
        found = {(d.first, d.second): d for d in row.differences}
        body.append((row.metric, *(_difference(row, found.get(pair)) for pair in pairs)))
    drawn: Markup = PIECES.section(
        f"{title}: paired differences", PAIRED, PIECES.card(PIECES.table(head, body), scroll=True)
    )
    return drawn


def _answers(measured: Sequence[Measured]) -> Markup:
    head = ("", "tasks", "answers", "truncated", "no verdict", "mean tokens", "seconds", "files")
    body: list[tuple[Any, ...]] = []
    for model in measured:
        tasks = model.answers.tasks
        answers = sum(task.samples for task in tasks)
        body.append(
            (
                model.name,
                len(tasks),
                answers,
                f"{sum(task.truncated for task in tasks) / answers:.1%}",
                sum(task.samples - task.judged for task in tasks),
                f"{sum(task.tokens for task in tasks) / answers:.1f}",
                f"{model.answers.seconds:.0f}",
                model.path,
            )
        )
    drawn: Markup = PIECES.section(
        "Answers", "", PIECES.card(PIECES.table(head, body, numeric=range(1, 7)), scroll=True)
    )
    return drawn


def _settings(config: Config) -> Markup:
    evaluation, rollout = config.evaluation, config.rollout
    named = {
        "taskset.eval": config.taskset.eval,
        "evaluation.samples": evaluation.samples,
        "evaluation.temperature": evaluation.temperature,
        "evaluation.top_p": evaluation.top_p,
        "evaluation.top_k": evaluation.top_k,
        "rollout.max_response_tokens": rollout.max_response_tokens,
        "rollout.workflow": rollout.workflow,
        "model.dtype": config.model.dtype,
        "trainer.seed": config.trainer.seed,
    }
    body = [(name, PIECES.code(str(value))) for name, value in named.items()]
    drawn: Markup = PIECES.section(
        "Settings",
        "Of all models; the rest is in settings.json.",
        PIECES.card(PIECES.table(("", ""), body, numeric=())),
    )
    return drawn


def _mean(value: Interval | None) -> float:
    return -1.0 if value is None else value.mean


def _all_shown(row: Row) -> list[str]:
    """Return ``45.2% [40.1, 50.3]`` for each model; a score has no percent sign."""
    return ["n/a" if value is None else _with_limits(row, value, "{:.1%}", "{:.3f}") for value in row.values]


def _difference(row: Row, found: Difference | None) -> str:
    """Return ``+4.2 [+1.0, +7.4] ✓`` in percentage points, or in units of the score."""
    if found is None:
        return "n/a"
    return _with_limits(row, found.interval, "{:+.1f}", "{:+.3f}") + (" ✓" if found.interval.excludes_zero else "")


def _with_limits(row: Row, value: Interval, share: str, score: str) -> str:
    if row.metric == SCORE:
        form, mean, unit = score, value.mean, 1.0
    else:
        form, mean, unit = share, value.mean * (1.0 if "%" in share else 100.0), 100.0
    text = form.format(mean)
    if value.low is None or value.high is None:
        return text
    limit = form.replace(".1%", ".1f")
    return f"{text} [{limit.format(unit * value.low)}, {limit.format(unit * value.high)}]"
