"""The sequences of a step and the optimizer updates that train on them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from megarl.core.config.algorithms import AlgorithmConfig
from megarl.core.errors import NonRetryableError
from megarl.core.schema import FinishReason, Outcome, Trajectory, WeightsVersion
from megarl.explore.experience import by_group
from megarl.explore.order.draws import ExpertRow
from megarl.learn.algorithms import Algorithm
from megarl.learn.algorithms.terms.parts import counts, repeated
from megarl.learn.algorithms.terms.reduction import Together, Tokens, alone
from megarl.learn.batching import Sequences, joined, of_demonstrations, of_samples
from megarl.train.update.accounts import Amount, Excluded
from megarl.train.update.images import PutFiles, PutImages
from megarl.train.update.lags import mask_segments
from megarl.train.update.turn_rewards import turn_advantages

T = TypeVar("T")


@dataclass
class StepBatch:
    """The same on every rank; each model takes its share by its own grid."""

    outcomes: list[Outcome]
    """Trajectories of the step, without their tokens."""
    rows: list[Outcome]
    """Trajectory of each sampled sequence."""
    sequences: Sequences
    """Samples of the trajectories, in the order of ``rows``, then demonstrations."""
    updates: list[list[list[int]]]
    """Units that each optimizer update trains on: numbers of sequences that go through the model together. All samples
    of a trajectory are in one update."""
    finish_reasons: list[FinishReason]
    """Reason why the last turn of each sampled sequence ended."""
    turn_advantages: torch.Tensor | None = None
    """float32 [T] of ``turn_rewards``; None without."""
    excluded: dict[str, Amount] = field(default_factory=dict)
    """Reason -> samples that are in no update. Some of a trajectory's tokens count without a trajectory."""
    own: torch.Tensor | None = None
    """int64 [n], ascending: numbers of the step's sequences that ``sequences`` has; None for all."""
    together: Together = alone
    """Puts values of these sequences together for all of the step."""

    def kept(self, mask: torch.Tensor) -> Tokens:
        """Tokens of ``mask`` (bool [T]), to be reduced over the whole step."""
        return Tokens(mask, self.sequences.lengths, self.together)

    @property
    def outside(self) -> list[list[int]]:
        """Units of the sequences that no update trains on: truncated answers that are filtered, answers that are in no
        pair. Earlier segments are not among them: nothing is computed for those."""
        trained = self._trained
        tokens = counts(self.sequences.mask, self.sequences.lengths).tolist()
        return [[i] for i, number in enumerate(tokens) if i not in trained and number]

    @property
    def trained(self) -> Amount:
        """Sampled tokens in the loss of an update, and their trajectories."""
        trained = self._trained
        tokens = counts(self.sequences.sampled, self.sequences.lengths).tolist()
        found = [i for i, number in enumerate(tokens) if i in trained and number]
        return Amount(len({id(self.rows[i]) for i in found}), sum(tokens[i] for i in found))

    @property
    def _trained(self) -> set[int]:
        return {number for units in self.updates for unit in units for number in unit}


def make_batch(
    trajectories: list[Trajectory],
    demonstrations: Sequence[ExpertRow],
    algorithm: Algorithm,
    settings: AlgorithmConfig,
    updates_per_step: int,
    lags: Mapping[WeightsVersion, int] | None = None,
    put_images: PutImages | None = None,
    put_files: PutFiles | None = None,
) -> StepBatch:
    """Sequences of a step, dealt to its updates; demonstrations in equal shares.

    Args:
        lags: Lag of each version that has sampled some token; None where all are 0.
        put_images: Sets the images of the sampled sequences; None where there are none.
        put_files: Sets those of demonstrations; None where there are none.

    Raises NonRetryableError where an algorithm pairs trajectories of several samples.
    """
    outcomes = [Outcome.of(trajectory) for trajectory in trajectories]
    samples = [(n, sample) for n, trajectory in enumerate(trajectories) for sample in trajectory.samples(lags)]
    numbers = [n for n, _ in samples]
    sequences, rows = of_samples([sample for _, sample in samples]), [outcomes[n] for n in numbers]
    if put_images is not None:
        put_images(sequences, [sample.images for _, sample in samples])
    if len(rows) > len(outcomes):
        sequences.trajectory = torch.tensor(numbers)
    sampled = int(torch.count_nonzero(sequences.mask))
    mask_segments(sequences, settings)
    filtered, tokens = set(overlong(rows, settings)), counts(sequences.mask, sequences.lengths).tolist()
    left_out = filtered | {i for i, number in enumerate(tokens) if not number}
    units = [unit for unit in _units(outcomes, rows, algorithm, settings) if not left_out.intersection(unit)]
    excluded, paired = Excluded(), {i for unit in units for i in unit} | left_out
    excluded.add("segments", Amount(0, sampled - sum(tokens)))
    for reason, rest in (("overlong", filtered), ("unpaired", set(range(len(rows))) - paired)):
        excluded.add(reason, Amount(len({numbers[i] for i in rest}), sum(tokens[i] for i in rest)))
    if sequences.trajectory is None:
        updates = updates_of(units, updates_per_step)
    else:
        of_trajectories = [list(part) for _, part in itertools.groupby(units, lambda unit: numbers[unit[0]])]
        updates = [list(itertools.chain(*part)) for part in updates_of(of_trajectories, updates_per_step)]
    if demonstrations:
        first, updates = len(sequences), updates or [[]]
        sequences = joined(sequences, of_experts(demonstrations, put_files))
        dealt = updates_of([[i] for i in range(first, len(sequences))], len(updates), exactly=True)
        updates = [usual + expert for usual, expert in zip(updates, dealt, strict=True)]
    reasons = [sample.finish_reason for _, sample in samples]
    own = turn_advantages(trajectories, sequences, algorithm, settings) if settings.turn_rewards else None
    return StepBatch(outcomes, rows, sequences, updates, reasons, own, excluded)


def of_experts(rows: Sequence[ExpertRow], put_files: PutFiles | None = None) -> Sequences:
    """Demonstrations with their images; their teacher's log-probs, if there are any, in the place of an engine's."""
    pairs = [(row.prompt, row.response) for row in rows]
    logp = [row.teacher_logp for row in rows if row.teacher_logp is not None]
    assert len(logp) in (0, len(rows)), "the teacher's log-probs are those of all rows, as was checked before the start"
    sequences = of_demonstrations(pairs, logp)
    if put_files is not None:
        put_files(sequences, [row.images for row in rows])
    return sequences


def overlong(rows: Sequence[Outcome], settings: AlgorithmConfig) -> list[int]:
    """Numbers of the sequences that ``algorithm.overlong_filtering`` leaves out of the loss: every sample of a
    truncated trajectory."""
    if not settings.overlong_filtering:
        return []
    return [i for i, outcome in enumerate(rows) if outcome.truncated]


def filter_overlong(batch: StepBatch, settings: AlgorithmConfig) -> None:
    """Take truncated answers out of the loss mask, after inference: their log-probs are compared with the engine's."""
    if numbers := overlong(batch.rows, settings):
        sequences = batch.sequences
        kept = torch.ones(len(sequences), dtype=torch.bool)
        kept[numbers] = False
        sequences.mask = sequences.mask & repeated(kept, sequences.lengths)


def _units(
    outcomes: list[Outcome], rows: list[Outcome], algorithm: Algorithm, settings: AlgorithmConfig
) -> list[list[int]]:
    choose = algorithm.choose_pairs
    if choose is None:
        return [[i] for i in range(len(rows))]
    if len(rows) != len(outcomes):
        raise NonRetryableError(
            f"algorithm.name={algorithm.name} pairs whole trajectories, but {len(outcomes)} of them give {len(rows)} "
            "samples; take an algorithm without pairs, or a workflow that rewrites no context"
        )
    units, start = [], 0
    for group in by_group(outcomes):
        pairs = choose([e.reward.score for e in group], settings)
        units += [[start + chosen, start + rejected] for chosen, rejected in pairs]
        start += len(group)
    return units


def updates_of(units: Sequence[T], updates: int, *, exactly: bool = False) -> list[list[T]]:
    """Units in order in ``updates`` equal parts; fewer parts when there are fewer units, unless ``exactly`` so many are
    asked for."""
    updates = updates if exactly else min(updates, len(units))
    cuts = [u * len(units) // updates for u in range(updates + 1)] if updates else []
    return [list(units[start:end]) for start, end in itertools.pairwise(cuts)]


def each_once(updates: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]]:
    """Units of ``updates`` without the sequences that a unit before has: an answer may be in several pairs, and outputs
    of two ranks would be added up."""
    seen: set[int] = set()
    found: list[list[list[int]]] = []
    for units in updates:
        found.append([])
        for unit in units:
            if new := [number for number in unit if number not in seen]:
                found[-1].append(new)
                seen.update(new)
    return found
