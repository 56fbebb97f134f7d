"""The sequences of a step and the optimizer updates that train on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from megarl.buffer.experience import by_group
from megarl.buffer.order.draws import ExpertRow
from megarl.config.algorithms import AlgorithmConfig
from megarl.core.errors import NonRetryableError
from megarl.core.schema import FinishReason, Outcome, Trajectory, WeightsVersion
from megarl.learn.algorithms import Algorithm
from megarl.learn.algorithms.terms.reduction import Tokens
from megarl.learn.algorithms.terms.token_parts import repeated
from megarl.learn.batching import Sequences, StepShare
from megarl.train.batch.accounts import NONE, Amount, Excluded
from megarl.train.batch.images import StepImages
from megarl.train.batch.samples import StepSamples, without_routing
from megarl.train.batch.turn_rewards import turn_advantages
from megarl.train.rank.ranks import on_all_ranks

T = TypeVar("T")


@dataclass(frozen=True)
class StepPlan:
    """Sequences of a step as models will take them, before they are made."""

    lengths: torch.Tensor
    """int64 [N]"""
    patches: Sequence[int] | None
    """[N], of their images; None for a text model."""
    updates: list[list[list[int]]]
    outside: list[list[int]]
    overlong: set[int]
    """As ``StepBatch`` has them."""
    teachers: Sequence[str | None] = ()
    """[N], name of each sequence's teacher; () where the job has none."""


@dataclass
class StepBatch:
    """The same on every rank, but for ``sequences`` and ``turn_advantages``: those are of what the rank holds."""

    outcomes: list[Outcome]
    """Trajectories of the step, without their tokens."""
    rows: list[Outcome]
    """Trajectory of each sampled sequence of the step."""
    sequences: Sequences
    """Held by this rank, of those below: its share, or all."""
    updates: list[list[list[int]]]
    """Units that each optimizer update trains on: numbers of sequences that go through the model together. Sequences of
    a step are the samples of the trajectories, in the order of ``rows``, then demonstrations. All samples of a
    trajectory are in one update."""
    finish_reasons: list[FinishReason]
    """Reason why the last turn of each sampled sequence ended."""
    turn_advantages: torch.Tensor | None = None
    """float32 [T] of ``turn_rewards``; None without."""
    outside: list[list[int]] = field(default_factory=list)
    """Units of the sequences that no update trains on: truncated answers that are filtered, answers that are in no
    pair. Earlier segments are not among them: nothing is computed for those."""
    trained: Amount = NONE
    """Sampled tokens in the loss of an update, and their trajectories."""
    excluded: dict[str, Amount] = field(default_factory=dict)
    """Reason -> samples that are in no update. Some of a trajectory's tokens count without a trajectory."""

    @property
    def teachers(self) -> list[str | None]:
        """[N], name of each sequence's teacher; None where it has none."""
        return [row.teacher for row in self.rows] + [None] * (len(self.sequences.step_lengths) - len(self.rows))

    def kept(self, mask: torch.Tensor) -> Tokens:
        """Tokens of ``mask`` (bool [T]), to be reduced over the whole step."""
        return Tokens(mask, self.sequences.lengths, self.sequences.together)


def make_batch(
    trajectories: Sequence[Trajectory],
    demonstrations: Sequence[ExpertRow],
    algorithm: Algorithm,
    settings: AlgorithmConfig,
    updates_per_step: int,
    lags: Mapping[WeightsVersion, int] | None = None,
    images: StepImages | None = None,
    share_of: Callable[[StepPlan], StepShare | None] = lambda plan: None,
    *,
    replays_routing: bool = False,
) -> StepBatch:
    """Sequences of a step, dealt to its updates; demonstrations in equal shares.

    Args:
        lags: Lag of each version that has sampled some token; None where all are 0.
        images: Those of the step; None for a text model.
        share_of: Chooses the sequences that this rank will hold; None is all.
        replays_routing: Use the expert ids of the trajectories (``rollout.routing_replay``); False leaves them out,
            unread.

    Raises on every rank:
        NonRetryableError: an algorithm pairs trajectories of several samples; or expert ids fit no tokens.
        DataError: a sequence has other placeholders than its images need.
    """
    outcomes = [Outcome.of(trajectory) for trajectory in trajectories]
    if not replays_routing:
        trajectories = [without_routing(trajectory) for trajectory in trajectories]
    samples = StepSamples(trajectories, demonstrations, settings, lags, images)
    facts = samples.facts
    rows, tokens = [outcomes[fact.trajectory] for fact in facts], [fact.tokens for fact in facts]

    def amount(numbers: Iterable[int]) -> Amount:
        some = list(numbers)
        return Amount(len({facts[i].trajectory for i in some}), sum(tokens[i] for i in some))

    filtered = set(overlong(rows, settings))
    left_out = filtered | {i for i, number in enumerate(tokens) if not number}
    units = [unit for unit in _units(outcomes, rows, algorithm, settings) if not left_out.intersection(unit)]
    paired = {i for unit in units for i in unit}
    excluded = Excluded()
    excluded.add("segments", Amount(0, sum(fact.trained - fact.tokens for fact in facts)))
    excluded.add("overlong", amount(filtered))
    excluded.add("unpaired", amount(set(range(len(rows))) - paired - left_out))
    if len(rows) == len(outcomes):
        updates = updates_of(units, updates_per_step)
    else:
        of_trajectories = [list(part) for _, part in itertools.groupby(units, lambda unit: facts[unit[0]].trajectory)]
        updates = [list(itertools.chain(*part)) for part in updates_of(of_trajectories, updates_per_step)]
    if demonstrations:
        updates = updates or [[]]
        shown = updates_of([[i] for i in range(len(rows), len(samples.lengths))], len(updates), exactly=True)
        updates = [usual + expert for usual, expert in zip(updates, shown, strict=True)]
    outside = [[i] for i, number in enumerate(tokens) if i not in paired and number]
    teachers = [row.teacher for row in rows] + [None] * len(demonstrations)
    share = share_of(StepPlan(samples.lengths, samples.patches, updates, outside, filtered, teachers))
    sequences = on_all_ranks(lambda: samples.sequences(share))
    reasons = [fact.finish_reason for fact in facts]
    own = turn_advantages(trajectories, sequences, algorithm, settings) if settings.turn_rewards else None
    return StepBatch(outcomes, rows, sequences, updates, reasons, own, outside, amount(paired), excluded)


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
        kept = torch.ones(len(sequences.step_lengths), dtype=torch.bool)
        kept[numbers] = False
        sequences.mask = sequences.mask & repeated(sequences.held(kept), sequences.lengths)


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
