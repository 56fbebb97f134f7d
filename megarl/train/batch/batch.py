"""The sequences of a step, with advantages of turns, and the optimizer updates that train on them.

G_k = Σ_{j ≥ k} turn_gamma^(j − k)·r_j over the model's turns of a line, r_j = 0 for a turn without reward. The
algorithm's advantage of G_k is taken among the trajectories of the group with a turn k. MT-GRPO (2505.11821) compares
turns by their number; GiGPO (2505.10978) uses discounted returns and adds both advantages. A turn without counterpart
in the group gets 0. Each token of turn k then has
A = (1 − turn_rewards)·A_trajectory + turn_rewards·A_k.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from megarl.buffer.experience import by_group
from megarl.buffer.experience.operators import group_stats
from megarl.buffer.order.draws import ExpertRow
from megarl.config.algorithms import AlgorithmConfig, teacher_top_k
from megarl.core.errors import NonRetryableError
from megarl.core.schema import FinishReason, Outcome, Trajectory, Turn, WeightsVersion
from megarl.learn.algorithms import Algorithm
from megarl.learn.algorithms.terms.reduction import Tokens, repeated
from megarl.learn.batching import Sequences, StepShare, per_token
from megarl.learn.models.teaching import TeacherDistributions
from megarl.train.batch.images import StepImages
from megarl.train.batch.samples import NONE, Amount, Excluded, StepSamples, WithArrays, without_routing
from megarl.train.ranks import on_all_ranks


def turn_advantages(
    trajectories: Sequence[Trajectory], sequences: Sequences, algorithm: Algorithm, settings: AlgorithmConfig
) -> torch.Tensor:
    """Return float32 [T] for the held samples of whole groups; 0 where no token is trained."""
    of_turns: dict[tuple[int, int], float] = {}
    """(index of a trajectory, index of a turn in it) -> advantage."""
    places = {id(trajectory): i for i, trajectory in enumerate(trajectories)}
    for group in by_group(trajectories):
        returns: dict[int, dict[tuple[int, int], float]] = {}
        for trajectory in group:
            for turn, k, value in _returns(trajectory, settings.turn_gamma):
                returns.setdefault(k, {})[places[id(trajectory)], turn] = value
        for found in returns.values():
            of_turns |= _compared(found, algorithm, settings)
    every = ((place, response) for place, trajectory in enumerate(trajectories) for response in _responses(trajectory))
    held = range(len(sequences)) if sequences.share is None else set(sequences.share.numbers.tolist())
    responses = [
        np.concatenate([np.full(len(turn), of_turns.get((place, i), 0.0), np.float32) for i, turn in response])
        for number, (place, response) in enumerate(every)
        if number in held
    ]
    return per_token(responses, sequences)


def _compared(
    returns: dict[tuple[int, int], float], algorithm: Algorithm, settings: AlgorithmConfig
) -> dict[tuple[int, int], float]:
    assert algorithm.advantage is not None, "settings were checked"
    stats = group_stats(list(returns.values()))
    if stats.size == 1:
        return dict.fromkeys(returns, 0.0)
    return {place: algorithm.advantage(value, stats, settings) for place, value in returns.items()}


def _returns(trajectory: Trajectory, gamma: float) -> Iterator[tuple[int, int, float]]:
    """Yield (index of a trained turn, its number among the model's turns of its line, its return)."""
    for line, new in trajectory.trained_lines():
        value, own = 0.0, [i for i in line if trajectory.turns[i].author == "model"]
        for k in range(len(own) - 1, -1, -1):
            value = (trajectory.turns[own[k]].reward or 0.0) + gamma * value
            if own[k] in new:
                yield own[k], k, value


def _responses(trajectory: Trajectory) -> Iterator[list[tuple[int, Turn]]]:
    """Yield (index, turn) of all turns in each sample's response. Turns that are not trained are masked there."""
    for line, new in trajectory.trained_lines():
        yield [(i, trajectory.turns[i]) for i in line[line.index(new[0]) : line.index(new[-1]) + 1]]


T = TypeVar("T")


@dataclass(frozen=True)
class StepPlan:
    """Sequences of a step as models will process them, before they are made."""

    lengths: torch.Tensor
    """int64 [N]"""
    patches: Sequence[int] | None
    """[N], image patches; None for a text model."""
    updates: list[list[list[int]]]
    outside: list[list[int]]
    overlong: set[int]
    """Fields as in ``StepBatch``; ``overlong``: indices from ``overlong()``."""
    teachers: Sequence[str | None] = ()
    """[N], name of each sequence's teacher; () if the job has none."""


@dataclass
class StepBatch:
    """Equal on every rank, except ``sequences`` and ``turn_advantages``, which cover the rank's own sequences."""

    outcomes: list[Outcome]
    """Trajectories of the step, without their tokens."""
    rows: list[Outcome]
    """Trajectory of each sampled sequence."""
    sequences: Sequences
    """Sequences that this rank holds: its share of the step, or all."""
    updates: list[list[list[int]]]
    """Units of each optimizer update: indices of sequences that share a micro-batch. A step's sequences are the samples
    of the trajectories, in the order of ``rows``, then demonstrations. All samples of a trajectory are in one
    update."""
    finish_reasons: list[FinishReason]
    """Reason why the last turn of each sampled sequence ended."""
    turn_advantages: torch.Tensor | None = None
    """float32 [T] from ``turn_rewards``; None without them."""
    outside: list[list[int]] = field(default_factory=list)
    """Units that no update trains on: filtered truncated responses, and responses in no pair. Earlier segments are not
    included: nothing is computed for them."""
    trained: Amount = NONE
    """Sampled tokens in the loss of an update, and their trajectories."""
    excluded: dict[str, Amount] = field(default_factory=dict)
    """Reason -> samples in no update. Tokens excluded from a trained trajectory count without a trajectory."""
    distributions: TeacherDistributions | None = None
    """The teachers' distributions at the held positions; None without a divergence from them."""
    teacher_top_k: torch.Tensor | None = None
    """float32 [T, 2·k]: what ``likeliest_tokens`` returns; None without teachers at URLs or ``algorithm.top_k``."""
    teachers: Sequence[str | None] = ()
    """[N], name of each sequence's teacher; None for sequences without one."""
    taught: torch.Tensor | None = None
    """bool [T], as ``LossInput.taught``."""

    def kept(self, mask: torch.Tensor) -> Tokens:
        """Return the tokens of ``mask`` (bool [T]), for reductions over the whole step."""
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
    with_arrays: WithArrays = list,
    *,
    replays_routing: bool = False,
) -> StepBatch:
    """Make a step's sequences and divide them among its updates, demonstrations in equal shares.

    Args:
        lags: Lag of each version that sampled tokens; None if all are 0.
        images: Images of the step; None for a text model.
        share_of: Chooses the sequences that this rank will hold; None for all.
        with_arrays: Reads the arrays of the trajectories of these sequences; every rank calls it.
        replays_routing: Use the trajectories' expert ids (``rollout.routing_replay``); False skips them unread.

    Raises on every rank:
        NonRetryableError: an algorithm pairs trajectories with several samples; expert ids do not fit tokens.
        DataError: placeholders of a sequence do not fit its images.
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
    teachers = [row.teacher for row in rows] + [row.teacher for row in demonstrations]
    share = share_of(StepPlan(samples.lengths, samples.patches, updates, outside, filtered, teachers))
    samples.hold(share, with_arrays)
    sequences = on_all_ranks(lambda: samples.sequences(share))
    reasons = [fact.finish_reason for fact in facts]
    own = turn_advantages(trajectories, sequences, algorithm, settings) if settings.turn_rewards else None
    batch = StepBatch(outcomes, rows, sequences, updates, reasons, own, outside, amount(paired), excluded)
    batch.teachers = teachers
    batch.teacher_top_k = samples.likeliest_tokens(sequences) if teacher_top_k(settings) else None
    return batch


def overlong(rows: Sequence[Outcome], settings: AlgorithmConfig) -> list[int]:
    """Return the indices of sequences that ``algorithm.overlong_filtering`` removes from the loss: all samples of
    truncated trajectories."""
    if not settings.overlong_filtering:
        return []
    return [i for i, outcome in enumerate(rows) if outcome.truncated]


def filter_overlong(batch: StepBatch, settings: AlgorithmConfig) -> None:
    """Remove truncated responses from the loss mask, after inference: the mismatch includes their log-probs."""
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
    """Divide units in order into ``updates`` equal parts; into fewer if there are fewer units, unless ``exactly``."""
    updates = updates if exactly else min(updates, len(units))
    cuts = [u * len(units) // updates for u in range(updates + 1)] if updates else []
    return [list(units[start:end]) for start, end in itertools.pairwise(cuts)]


def each_once(updates: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]]:
    """Remove repeated sequences from the units: a response may be in several pairs, and outputs of two ranks would be
    summed."""
    seen: set[int] = set()
    found: list[list[list[int]]] = []
    for units in updates:
        found.append([])
        for unit in units:
            if new := [number for number in unit if number not in seen]:
                found[-1].append(new)
                seen.update(new)
    return found
