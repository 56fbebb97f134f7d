"""The loop of one trainer rank of an offline job: demonstrations or preferences from a file, no rollouts.

Reads top to bottom: batch, inference, update, commit; evaluation on the held-out file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from megarl import algorithms
from megarl.batching import Sequences, of_demonstrations
from megarl.checkpoint.score_pad import score_pad
from megarl.config import Config
from megarl.loop.guard import RollBack, roll_back
from megarl.loop.rollouts import data_seed, numbers_of_step
from megarl.loop.scoring import ScoringSession
from megarl.loop.session import Session
from megarl.loop.step import StepBatch, infer, update, updates_of
from megarl.loop.warm_start import warm_start
from megarl.metrics import OFFLINE_CONSOLE, mean_of_sums
from megarl.tasksets import (
    ChatTokenizer,
    encode_demonstrations,
    encode_preferences,
    read_preferences,
    read_rows,
)
from megarl.training import objectives
from megarl.training.objectives import Kept, Objective


@dataclass(frozen=True)
class Rows:
    """A file's rows as token ids."""

    units: tuple[tuple[tuple[np.ndarray, np.ndarray], ...], ...]
    """(prompt ids, answer ids) of each sequence of each row: one of a demonstration, the chosen and the rejected of a preference."""
    margins: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.units)


@dataclass(frozen=True)
class Batch:
    sequences: Sequences
    units: list[list[int]]
    """Numbers of the sequences of each row."""
    margins: torch.Tensor
    """float32, of each row."""


def train(config: Config) -> None:
    """Warm start when there is none yet, then ``trainer.steps`` steps; resumes from the newest checkpoint."""
    with (ScoringSession if scores(config) else Session)(config) as s:
        s.head = replace(s.head, temperature=1.0)  # nothing is sampled
        if not warm_start(s):
            return
        s.begin_reinforcement_learning()
        with s.timeline.phase("load"), s.starting():
            rows, held_out = read(s, config.taskset.train), read(s, config.taskset.eval)
            test = batch_of(s, held_out, range(len(held_out)))
        while s.state.step < config.trainer.steps:
            if s.stop_requested():
                s.commit()
                return
            evaluate_when_due(s, test)
            try:
                step(s, rows)
            except RollBack as bad:
                roll_back(s, bad)
        evaluate(s, test, "eval-after")
        s.commit()
        s.export_hf(s.run_dir / "hf")
        s.finish()


def scores(config: Config) -> bool:
    """Whether what is trained is a reward model."""
    return "actor" not in algorithms.get(config.algorithm.name).roles


def read(s: Session, path: str) -> Rows:
    tokenizer = ChatTokenizer.of(s.config)
    if "pairs" not in s.algorithm.needs:
        tasks = read_rows(Path(path), require_response=True)
        return Rows(tuple((pair,) for pair in encode_demonstrations(tasks, tokenizer)), (0.0,) * len(tasks))
    preferences = read_preferences(Path(path))
    ids = encode_preferences(preferences, tokenizer)
    return Rows(tuple(((p, chosen), (p, other)) for p, chosen, other in ids), tuple(x.margin for x in preferences))


def batch_of(s: Session, rows: Rows, numbers: Sequence[int]) -> Batch:
    """Rows ``numbers`` of a file. A reward model is asked for one score of each sequence, where it is read."""
    chosen = [rows.units[i] for i in numbers]
    sequences = of_demonstrations([pair for unit in chosen for pair in unit])
    if s.actor.head is None:
        sequences.mask = torch.zeros_like(sequences.mask).index_fill(0, sequences.scored(score_pad(s.hf_config)), True)
    ends = itertools.accumulate(len(unit) for unit in chosen)
    units = [list(range(end - len(unit), end)) for unit, end in zip(chosen, ends, strict=True)]
    return Batch(sequences, units, torch.tensor([rows.margins[i] for i in numbers]))


def objective_of(s: Session, batch: Batch) -> Objective:
    if s.actor.head is None:
        return objectives.preference_scores(s.algorithm, s.config.algorithm, batch.margins)
    return objectives.policy(s.algorithm, s.config.algorithm, batch.sequences)


def step(s: Session, rows: Rows) -> None:
    config, number = s.config, s.state.step
    s.timeline.reset()
    with s.timeline.phase("step", step=number):
        with s.timeline.phase("batch", step=number):
            chosen = numbers_of_step(len(rows), number, config.trainer.tasks_per_step, data_seed(s))
            found = batch_of(s, rows, chosen)
            batch = StepBatch([], found.sequences, updates_of(found.units, config.trainer.updates_per_step))
        with s.timeline.phase("inference", step=number):
            infer(s, batch)
        with s.timeline.phase("update", step=number):
            metrics = update(s, batch, objective_of(s, found), config.algorithm)
        s.end_step(metrics)
    s.record_step(metrics, tokens=len(found.sequences.tokens), console=OFFLINE_CONSOLE)


def evaluate_when_due(s: Session, test: Batch) -> None:
    """Before the first step and every ``trainer.eval_interval`` steps, again by a job that resumes there."""
    number, interval = s.state.step, s.config.trainer.eval_interval
    if number == 0 or (interval and number % interval == 0):
        evaluate(s, test, f"eval-{number}" if number else "eval-before")


def evaluate(s: Session, test: Batch, name: str) -> None:
    """The algorithm's loss, and what else it measures, on all held-out rows; records them under ``val/``."""
    with s.timeline.phase("validation", step=s.state.step):
        sequences = test.sequences
        reference = s.roles.reference
        if reference is not None and sequences.ref_logp is None:  # it stays as it is
            sequences.ref_logp = reference.answers(sequences, [reference.micro_batches(sequences, test.units)])
        answers = s.actor.answers(sequences, [s.actor.micro_batches(sequences, test.units)])
        metrics = measured(objective_of(s, test), sequences, answers)
    if s.position.rank == 0:
        known = {key: value for key, value in metrics.items() if math.isfinite(value)}  # JSON knows no others
        s.store.record_event("trainer", "evaluation", {"rollout_id": name, "step": s.state.step, "rows": len(test.units), **known})
        s.write(s.state.step, {f"val/{name}": value for name, value in metrics.items()})
        accuracy = f", the chosen answer preferred in {metrics['accuracy']:.1%}" if "accuracy" in metrics else ""
        s.say(f"held-out loss at step {s.state.step}: {metrics['loss']:.4f}{accuracy} ({len(test.units)} rows)")


def measured(objective: Objective, sequences: Sequences, answers: torch.Tensor) -> dict[str, float]:
    """``loss`` and the loss's own metrics over whole ``sequences``, from answers [T] to them that every rank has."""
    index = sequences.mask.nonzero()[:, 0]
    row = sequences.row[index]
    kept = Kept(index, row, torch.arange(len(sequences)), len(sequences), sequences.mask)
    loss = objective.loss(kept, answers[index, None])
    metrics = mean_of_sums([{name: (float(total), float(count)) for name, (total, count) in loss.metrics.items()}])
    metrics["loss"] = float((loss.total / objective.count(kept).clamp(min=1)).sum())
    if ACCURACY in metrics:
        metrics["accuracy"] = metrics.pop(ACCURACY)
    return metrics


ACCURACY = "rewards/accuracies"
