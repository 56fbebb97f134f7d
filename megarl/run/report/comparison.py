"""Metrics of models on the same tasks, with confidence intervals, and paired differences between models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from megarl.buffer.experience.held_out import Interval, interval, majority_at, paired, pass_at, sizes
from megarl.explore.bench import ModelAnswers, TaskAnswers

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
            rows.append(Row(source, metric, tuple(map(_interval, values)), tuple(_differences(values))))
    return rows


def _values(metric: str, value: Value, tasks: Sequence[TaskAnswers]) -> dict[str, float]:
    found = {task.task_id: value(task) for task in tasks}
    known = {task_id: number for task_id, number in found.items() if number is not None}
    return known if len(known) == len(found) or not metric.startswith("majority") else {}


def _interval(values: Mapping[str, float]) -> Interval | None:
    return interval(np.array(list(values.values()))) if values else None


def _differences(values: Sequence[Mapping[str, float]]) -> list[Difference]:
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
