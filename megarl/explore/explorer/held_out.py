"""The explorer's side of an evaluation: accuracy on held-out tasks, recorded once all answers are stored."""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.buffer.experience.held_out import (
    TaskScores,
    accuracy_by_source,
    right_answers,
    sampled_metrics,
    source_metrics,
    standard_error,
)
from megarl.buffer.store import Store
from megarl.rewards.verdict import NO_VERDICT
from megarl.tasks import source_of


def record_evaluations(store: Store, worker: str, rollout_id: str | None = None) -> None:
    """Record the event of every evaluation with all groups ready, and mark the groups consumed.

    Safe to repeat, also after a kill: recorded groups are no longer ready.

    Args:
        rollout_id: Only this evaluation.
    """
    for found, step, samples in store.evaluations.to_count(rollout_id):
        store.journal.record_evaluation(worker, found, evaluated(store, found, step, samples))


def evaluated(store: Store, rollout_id: str, step: int, samples: int) -> dict[str, Any]:
    """Return the data of an evaluation's event: counts, accuracy with its standard error, mean score, and
    ``metrics``."""
    sources = store.rollouts.task_sources(rollout_id)
    tasks = list(sources)
    right, errors = np.zeros(len(tasks), dtype=np.int64), 0
    scores = TaskScores.of([], tasks)
    for part in store.groups.parts(store.groups.ids(rollout_id)):  # never all answers at once
        answers = store.groups.read(part)
        right += right_answers(answers, tasks)
        scores += TaskScores.of(answers, tasks)
        errors += sum(e.reward.status in NO_VERDICT for e in answers)
    answered = len(tasks) * samples
    metrics = {"val/accuracy": int(right.sum()) / answered, "val/error_rate": errors / answered}
    metrics |= source_metrics(right, scores, samples, list(sources.values()))
    if samples > 1:
        metrics |= sampled_metrics(right, samples, list(sources.values()))
    labels = [source_of(task) or data_source for task, data_source in sources.items()]
    by_source = accuracy_by_source(right, samples, labels)
    metrics |= {f"val/accuracy/{label}": accuracy for label, (accuracy, _) in by_source.items()}
    event = {
        "rollout_id": rollout_id,
        "step": step,
        "accuracy": metrics["val/accuracy"],
        "samples": samples,
        "standard_error": standard_error(right / samples),
        "tasks": len(tasks),
        "right": int(right.sum()),
        "errors": errors,
        "score": metrics.get("val/score"),
        "graded": scores.graded,
        "metrics": metrics,
        "sources": by_source,
    }
    if samples > 1:
        event |= {"pass": metrics[f"val/pass@{samples}"], "pass_standard_error": metrics.get(f"val/pass@{samples}_se")}
    return event
