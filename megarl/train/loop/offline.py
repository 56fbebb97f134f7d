"""Training on demonstrations or preferences from a file, without rollouts; evaluation on the held-out file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from megarl.buffer.order.draws import data_seed, numbers_of_step
from megarl.config.algorithms import reads_distribution
from megarl.core.metrics import OFFLINE_CONSOLE, PrintedSteps, mean_of_sums
from megarl.core.schema import Task
from megarl.learn.algorithms.terms.reduction import repeated
from megarl.learn.batching import Sequences, likeliest_tokens, of_demonstrations, score_positions
from megarl.learn.memory.phases import Phase
from megarl.learn.models.teaching import TeacherDistributions, TeacherHead
from megarl.learn.training import objectives
from megarl.learn.training.objectives import LossTokens, Objective
from megarl.tasks import ChatTokenizer, encode_preferences, read_preferences, read_rows, single_file, tokenizer_digest
from megarl.tasks.teacher_scores import Pair, Scored, read_scores
from megarl.train.batch.batch import StepBatch, updates_of
from megarl.train.batch.images import ImageInputs, demonstrations_of
from megarl.train.inference.distributions import taught
from megarl.train.inference.models import trains_scores
from megarl.train.loop.offline_checks import OfflineChecks
from megarl.train.loop.rank import TrainerRank, starting
from megarl.train.ranks import TrainState
from megarl.weights.checkpoint.formats.hf_source import score_pad


@dataclass(frozen=True)
class Rows:
    """A file's rows as token ids."""

    units: tuple[tuple[tuple[np.ndarray, np.ndarray], ...], ...]
    """(prompt ids, answer ids) of each sequence of each row. A demonstration has one sequence; a preference has two,
    chosen and rejected."""
    margins: tuple[float, ...]
    images: tuple[tuple[bytes, ...], ...] = ()
    """Image files of each row; () for a text model."""
    scores: tuple[Scored, ...] = ()
    """A teacher's scores of each row; () unless the loss reads them."""

    def __len__(self) -> int:
        return len(self.units)


@dataclass(frozen=True)
class Batch:
    sequences: Sequences
    units: list[list[int]]
    """Indices of the sequences of each row."""
    margins: torch.Tensor
    """float32, one for each row."""
    distributions: TeacherDistributions | None = None
    """Teachers' distributions at each position; None unless the loss reads them."""


class OfflineSteps:
    """Steps of an offline job (``course.Steps``). They train on the rows of one file and evaluate on another file."""

    version = None
    """No weights are published."""
    evaluation = None
    """An evaluation ends before ``evaluate`` returns."""
    parts = ()
    rows: Rows
    test: Batch

    def __init__(self, rank: TrainerRank) -> None:
        self.rank = rank
        self._printed = PrintedSteps(rank.config.trainer.steps)
        self._checks = OfflineChecks(rank.config, rank.reporter)

    def prepare(self, state: TrainState) -> None:
        """Build the models. A reward model is built from the warm start's language model."""
        rank = self.rank
        if not trains_scores(rank.algorithm):
            rank.build_models(state)
            return
        with rank.timeline.phase("load"):
            rank.leave_warm_start(state)
        rank.memory.begin()

    def connect(self) -> None:
        """Read the rows."""
        rank, taskset = self.rank, self.rank.config.taskset
        with rank.timeline.phase("load"), starting(rank.config):
            tokenizer, pairs = ChatTokenizer.of(rank.config), "pairs" in rank.algorithm.needs
            settings = rank.config.algorithm
            scored = (
                partial(
                    read_scores,
                    top_k=settings.top_k,
                    vocab_size=rank.models.head.vocab_size,
                    tokenizer=tokenizer_digest(Path(rank.config.model.path)),
                )
                if reads_distribution(settings)
                else None
            )
            self.rows, held_out = (
                read(
                    single_file(taskset, split),
                    tokenizer,
                    rank.models.images,
                    pairs=pairs,
                    columns=taskset.columns,
                    split=split,
                    skipped=rank.context.bad_rows.get(split, ()),
                    scored=scored if split == "train" else None,
                )
                for split in ("train", "eval")
            )
            self.test = self.batch_of(held_out, range(len(held_out)))

    def step(self, state: TrainState) -> TrainState:
        """Make one step on rows of the file."""
        rank, number = self.rank, state.step
        config, phase = rank.config.trainer, rank.timeline.phase
        rank.timeline.reset()
        with phase("step", step=number):
            with phase("batch", step=number):
                seed = data_seed(config.seed, state.rollbacks)
                numbers = numbers_of_step(len(self.rows), number, config.tasks_per_step, seed)
                found = self.batch_of(self.rows, numbers)
                batch = StepBatch([], [], found.sequences, updates_of(found.units, config.updates_per_step), [])
                if rank.models.actor.model.head is not None:
                    self._checks.compare_masks(found.sequences, [pair for i in numbers for pair in self.rows.units[i]])
            with phase("inference", step=number):
                rank.inference.fill(batch)
            with phase("update", step=number):
                objective = self._checks.watching(self.objective_of(found), found.sequences, batch.updates)
                state, metrics = rank.learner.update(state, batch, objective, rank.config.algorithm)
            metrics |= self._checks.metrics(state.step + 1, metrics)
            state = rank.end_step(state, metrics, None)
        tokens, printed = len(found.sequences.tokens), self._printed.is_due(state.step)
        rank.reporter.record_step(state.step, metrics, tokens=tokens, console=OFFLINE_CONSOLE, printed=printed)
        return state

    def batch_of(self, rows: Rows, numbers: Sequence[int]) -> Batch:
        """Return rows ``numbers`` as the batch for the kind of model in training."""
        models, batch = self.rank.models, batch_of(rows, numbers)
        if models.images is not None and rows.images:
            models.images.put(batch.sequences, [rows.images[i] for i in numbers for _ in rows.units[i]])
        if models.actor.model.head is None:
            score_once(batch.sequences, score_pad(models.hf_config))
        return batch

    def objective_of(self, batch: Batch) -> Objective:
        """Return the objective of a batch. Held-out rows have no distributions: theirs is without a divergence."""
        algorithm, settings, divergence = self.rank.algorithm, self.rank.config.algorithm, None
        if reads_distribution(settings):
            if batch.distributions is None:
                settings = replace(settings, divergence="sampled")
            else:
                weights = torch.ones(len(batch.sequences), dtype=torch.float64)
                divergence = taught(settings, batch.distributions, weights)
        if self.rank.models.actor.model.head is None:
            return objectives.preference_scores(algorithm, settings, batch.margins)
        return objectives.policy(algorithm, settings, batch.sequences, taught=divergence)

    def evaluate(self, state: TrainState, name: str) -> None:
        """Record the algorithm's loss and other metrics over all held-out rows under ``val/``."""
        rank, test = self.rank, self.test
        actor, reference = rank.models.actor, rank.models.reference
        sequences, step = test.sequences, state.step
        with rank.timeline.phase("validation", step=step):
            if reference is not None and sequences.ref_logp is None:  # computed once: the reference does not change
                rank.memory.enter(Phase.REF_LOGP)
                sequences.ref_logp = reference.outputs(sequences, [reference.micro_batches(sequences, test.units)])
            rank.memory.enter(Phase.OLD_LOGP)
            answers = actor.model.outputs(sequences, [actor.model.micro_batches(sequences, test.units)])
            metrics = measured(self.objective_of(test), sequences, answers)
        known = {key: value for key, value in metrics.items() if math.isfinite(value)}  # JSON has no NaN or inf
        rank.reporter.event("evaluation", {"rollout_id": name, "step": step, "rows": len(test.units), **known})
        rank.reporter.write(step, {f"val/{name}": value for name, value in metrics.items()})
        accuracy = f", the chosen answer preferred in {metrics['accuracy']:.1%}" if "accuracy" in metrics else ""
        rank.reporter.log(f"held-out loss at step {step}: {metrics['loss']:.4f}{accuracy} ({len(test.units)} rows)")


def read(
    path: str,
    tokenizer: ChatTokenizer,
    images: ImageInputs | None = None,
    *,
    pairs: bool,
    columns: Mapping[str, str] = {},
    split: str | None = None,
    skipped: Collection[str] = (),
    scored: ReadScores | None = None,
) -> Rows:
    """Read preferences (``pairs``) or demonstrations.

    Args:
        columns: ``taskset.columns``.
        split: Prefix of the row ids.
        skipped: Ids of bad rows, which are left out.
        scored: Reads the teacher's scores of demonstrations, given the file, its rows and their tokens.

    Raises:
        DataError: a row is bad.
    """
    if not pairs:
        tasks = read_rows(Path(path), require_response=True, columns=columns, split=split, skipped=skipped)
        pairs_of_ids = demonstrations_of(tasks, tokenizer, images)
        units, scores = (
            tuple((pair,) for pair in pairs_of_ids),
            scored(Path(path), tasks, pairs_of_ids) if scored else (),
        )
        return Rows(units, (0.0,) * len(tasks), () if images is None else tuple(task.images for task in tasks), scores)
    preferences = read_preferences(Path(path), columns=columns, split=split, skipped=skipped)
    files = () if images is None else tuple(preference.images for preference in preferences)
    ids = encode_preferences(preferences, tokenizer)
    prompts = [p if images is None else images.expand(p, x.images) for (p, *_), x in zip(ids, preferences, strict=True)]
    both = tuple(((p, chosen), (p, other)) for p, (_, chosen, other) in zip(prompts, ids, strict=True))
    return Rows(both, tuple(x.margin for x in preferences), files)


def batch_of(rows: Rows, numbers: Sequence[int]) -> Batch:
    """Make a batch of rows ``numbers``."""
    chosen = [rows.units[i] for i in numbers]
    sequences = of_demonstrations([pair for unit in chosen for pair in unit])
    ends = itertools.accumulate(len(unit) for unit in chosen)
    units = [list(range(end - len(unit), end)) for unit, end in zip(chosen, ends, strict=True)]
    distributions = distributions_of([rows.scores[i] for i in numbers], sequences) if rows.scores else None
    return Batch(sequences, units, torch.tensor([rows.margins[i] for i in numbers]), distributions)


def distributions_of(scored: Sequence[Scored], sequences: Sequences) -> TeacherDistributions:
    """Return the distributions that teachers have given to the responses of ``sequences``."""
    sizes = sorted({each.vocab_size for each in scored})
    numbers = torch.tensor([sizes.index(each.vocab_size) for each in scored], dtype=torch.int16)
    found = likeliest_tokens([(len(each.scores.logp), each.scores) for each in scored], sequences)
    assert found is not None, "the rows were checked"
    ids, logp = found.chunk(2, -1)
    teacher = repeated(numbers, sequences.lengths)
    return TeacherDistributions([TeacherHead(size) for size in sizes], teacher, ids.int(), logp.contiguous())


def score_once(sequences: Sequences, pad: int | None) -> None:
    """Mask each sequence to one position, where a score model with this pad token reads its score."""
    sequences.mask = torch.zeros_like(sequences.mask).index_fill(0, score_positions(sequences, pad), True)


def measured(objective: Objective, sequences: Sequences, answers: torch.Tensor) -> dict[str, float]:
    """Return ``loss`` and the loss's own metrics over whole ``sequences``. ``answers`` [T]: model outputs, on every
    rank."""
    index = sequences.mask.nonzero()[:, 0]
    row = sequences.row[index]
    kept = LossTokens(index, row, torch.arange(len(sequences)), len(sequences), sequences.mask)
    loss = objective.loss(kept, answers[index, None])
    metrics = mean_of_sums([{name: (float(total), float(count)) for name, (total, count) in loss.metrics.items()}])
    metrics["loss"] = float((loss.total / objective.count(kept).clamp(min=1)).sum())
    if ACCURACY in metrics:
        metrics["accuracy"] = metrics.pop(ACCURACY)
    return metrics


ReadScores = Callable[[Path, Sequence[Task], Sequence[Pair]], tuple[Scored, ...]]
ACCURACY = "rewards/accuracies"
