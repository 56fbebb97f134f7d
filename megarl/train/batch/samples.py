"""Samples of a step's trajectories, and the account that names the reason of every excluded sample.

Metrics of a step's trajectories: their scores, lengths and ends.

A step is read twice: first for the facts, which determine how sequences are dealt, then for the arrays of the
trajectories that the rank holds (``hold``).

Shape legend: N sequences of a step: all samples, then demonstrations; n of them held, T their positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from megarl.buffer.experience import Report
from megarl.buffer.order.draws import ExpertRow
from megarl.buffer.store import is_outline
from megarl.config.algorithms import AlgorithmConfig
from megarl.core.errors import NonRetryableError
from megarl.core.metrics import spread
from megarl.core.schema import (
    LARGEST_LAG,
    End,
    FinishReason,
    Outcome,
    TrainingSample,
    Trajectory,
    WeightsVersion,
    name_of,
)
from megarl.learn.batching import Sequences, StepShare, joined, likeliest_tokens, of_demonstrations, of_samples
from megarl.learn.batching.images import Images
from megarl.learn.batching.sequences import NO_IDS
from megarl.train.batch.images import StepImages


@dataclass(frozen=True)
class Amount:
    """Number of trajectories, and of the tokens that engines sampled for them."""

    trajectories: int = 0
    tokens: int = 0

    def __add__(self, other: Amount) -> Amount:
        """Add both numbers."""
        return Amount(self.trajectories + other.trajectories, self.tokens + other.tokens)


NONE = Amount()


class Excluded(dict[str, Amount]):
    """Reason -> excluded amount."""

    def add(self, reason: str, amount: Amount) -> None:
        """Add an amount to a reason; ignore an empty amount."""
        if amount != NONE:
            self[reason] = self.get(reason, NONE) + amount

    def merged(self, other: Mapping[str, Amount]) -> Excluded:
        """Return the sum of both."""
        found = Excluded(self)
        for reason, amount in other.items():
            found.add(reason, amount)
        return found


@dataclass(frozen=True)
class SampleAccount:
    """Amounts sampled for the groups of a step, including replayed ones, and excluded from training."""

    sampled: Amount
    excluded: Mapping[str, Amount]
    """Dropped groups, excluded members, greedy responses; ``metrics`` adds what the batch excludes."""

    def metrics(self, trained: Amount, more: Mapping[str, Amount]) -> dict[str, float]:
        """Return ``rollout/trajectories/*`` and ``rollout/tokens/*``.

        Args:
            trained: Amount in any update of the step.
            more: Amounts that the batch excludes, by reason.

        Raises:
            AssertionError: the numbers do not add up.
        """
        excluded = Excluded(self.excluded).merged(more)
        total = sum_of(excluded.values())
        if self.sampled != trained + total:
            raise AssertionError(f"{self.sampled} sampled, but {trained} trained and {dict(excluded)} excluded")
        amounts = {"sampled": self.sampled, "trained": trained, "excluded": total}
        amounts |= {f"excluded/{reason}": amount for reason, amount in excluded.items()}
        return {
            f"rollout/{unit}/{name}": float(number)
            for name, amount in amounts.items()
            for unit, number in asdict(amount).items()
        }


def sum_of(amounts: Iterable[Amount]) -> Amount:
    """Return the sum of amounts."""
    return sum(amounts, NONE)


def account_line(steps: Iterable[Mapping[str, float | None]]) -> str:
    """Format the account of a run's samples: sampled = trained + excluded, by reason."""
    totals: dict[str, dict[str, float]] = {"trajectories": {}, "tokens": {}}
    for metrics in steps:
        for name, value in metrics.items():
            _, unit, kind = (*name.split("/", 2), "", "")[:3]
            if name.startswith("rollout/") and unit in totals and kind:
                totals[unit][kind] = totals[unit].get(kind, 0.0) + (value or 0.0)
    return "; ".join(_unit_line(unit, found) for unit, found in totals.items() if found)


def _unit_line(unit: str, found: Mapping[str, float]) -> str:
    reasons = {name.partition("/")[2]: number for name, number in sorted(found.items()) if name.startswith("excluded/")}
    by_name = ", ".join(f"{reason} {number:,.0f}" for reason, number in reasons.items())
    equal = "=" if found["sampled"] == found["trained"] + found["excluded"] else "≠"
    total = f"{found['excluded']:,.0f} excluded" + (f" ({by_name})" if by_name else "")
    return f"{unit}: {found['sampled']:,.0f} sampled {equal} {found['trained']:,.0f} trained + {total}"


def trajectory_metrics(trajectories: list[Outcome], verified: Report) -> dict[str, float]:
    """Return metrics of scores, lengths and ends of a step's trajectories."""
    lengths = [float(e.response_length) for e in trajectories]
    scores = [e.reward.score for e in trajectories]
    metrics = spread("critic/score", scores) | spread("critic/rewards", scores)
    metrics |= spread("response_length", lengths)
    metrics |= spread("prompt_length", [float(e.prompt_length) for e in trajectories])
    metrics |= spread("num_turns", [float(e.num_turns) for e in trajectories])
    if any(e.tool_calls is not None for e in trajectories):
        metrics |= spread("tool_call_counts", [float(e.tool_calls or 0) for e in trajectories])
    if groups := {e.group_id: e.group_stats.std for e in trajectories if e.group_stats and e.group_stats.size > 1}:
        metrics["rollout/zero_variance"] = sum(std == 0 for std in groups.values()) / len(groups)
    metrics["response_length/clip_ratio"] = sum(e.truncated for e in trajectories) / len(trajectories)
    metrics["training/accuracy"] = sum(e.reward.status == "ok" for e in trajectories) / len(trajectories)
    errors = sum(count for end, count in verified.ends.items() if End(end).by_reward)
    metrics["reward/error_rate"] = errors / max(1, sum(verified.ends.values()))
    metrics |= {f"ends/{end}": float(verified.ends.get(end, 0)) for end in End}
    metrics["reward/dropped_groups"] = float(verified.groups - verified.kept)
    metrics |= {f"buffer/excluded/{reason}": float(number) for reason, number in verified.excluded.items()}
    return metrics


WithArrays = Callable[[Sequence[Trajectory]], list[Trajectory]]
"""Returns trajectories with their arrays, in the same order (``RolloutReader.with_arrays``)."""
WITHOUT_REPLAY = "set rollout.routing_replay to false"
"""Fix for expert ids that cannot be replayed, for errors."""


class SampleFacts(NamedTuple):
    """Facts about a sample, for dealing and counting."""

    trajectory: int
    """Index of its trajectory in the step."""
    length: int
    """Number of tokens, including the prompt."""
    trained: int
    """Number of tokens to train (``TrainingSample.response_mask``)."""
    tokens: int
    """Number of these tokens in the loss, after ``algorithm.segments``."""
    finish_reason: FinishReason
    patches: int
    lags: bool
    """True if some token has a lag."""
    routing: tuple[np.dtype, int, int, int] | None
    """(dtype, tokens, layers, experts per token) of its expert ids; None without ids."""


@dataclass(frozen=True)
class StepSamples:
    """Trajectories and demonstrations of a step, from which sequences are made."""

    trajectories: Sequence[Trajectory]
    demonstrations: Sequence[ExpertRow]
    settings: AlgorithmConfig
    lags: Mapping[WeightsVersion, int] | None = None
    """Lags as in ``make_batch``."""
    images: StepImages | None = None
    """None for a text model."""
    held: dict[int, Trajectory] = field(default_factory=dict)
    """Index -> trajectory with arrays, of those that the rank holds; set by ``hold``."""

    @cached_property
    def facts(self) -> list[SampleFacts]:
        """Facts of each sample, computed from one trajectory's arrays at a time.

        Raises NonRetryableError if all have expert ids, but some do not fit the number of tokens, or layouts differ.
        """
        found = [
            SampleFacts(
                number,
                len(sample.prompt_ids) + len(sample.response_ids),
                int(np.count_nonzero(sample.response_mask)),
                int(np.count_nonzero(trained.response_mask)),
                sample.finish_reason,
                0 if self.images is None else self.images.patches(d for at in sample.images for d in at.digests),
                sample.lag is not None and bool(sample.lag.any()),
                None if sample.routing is None else (sample.routing.dtype, *sample.routing.shape),
            )
            for number, trajectory in enumerate(self.trajectories)
            for samples in [list(trajectory.samples(self.lags))]
            for sample, trained in zip(samples, current(samples, self.settings), strict=True)
        ]
        self._check_routing(found)
        return found

    @property
    def _routed(self) -> bool:
        """True if every sample of the step has expert ids; otherwise none are used."""
        return bool(self.facts) and all(fact.routing is not None for fact in self.facts)

    @cached_property
    def lengths(self) -> torch.Tensor:
        """int64 [N]: number of tokens of each sequence."""
        shown = [len(row.prompt) + len(row.response) for row in self.demonstrations]
        return torch.tensor([*(fact.length for fact in self.facts), *shown], dtype=torch.int64)

    @cached_property
    def patches(self) -> list[int] | None:
        """Image patches of each sequence; None for a text model."""
        if self.images is None:
            return None
        shown = (self.images.patches_of(row.images) for row in self.demonstrations)
        return [*(fact.patches for fact in self.facts), *shown]

    def hold(self, share: StepShare | None, with_arrays: WithArrays) -> None:
        """Read the arrays of the trajectories of a share, or of all. Every rank calls it."""
        numbers = range(len(self.facts)) if share is None else share.numbers.tolist()
        places = sorted({self.facts[number].trajectory for number in numbers if number < len(self.facts)})
        found = with_arrays([self.trajectories[place] for place in places])
        self.held.update(zip(places, found, strict=True))

    def sequences(self, share: StepShare | None = None) -> Sequences:
        """Make the sequences of a share, or all of them.

        If any sequence of the step has demonstrations, lags, images or expert ids, each rank gets these fields, even if
        its own sequences have none.

        Raises DataError, on a rank that holds the sequence, if placeholders do not fit its images.
        """
        numbers = range(len(self.lengths)) if share is None else share.numbers.tolist()
        first = len(self.facts)
        sampled = [number for number in numbers if number < first]
        samples = list(self._samples(set(sampled)))
        if not self._routed:
            samples = [sample._replace(routing=None) for sample in samples]
        result = of_samples(samples)
        if self.images is not None:
            owners = [self.trajectories[self.facts[number].trajectory] for number in sampled]
            self.images.put(result, [sample.images for sample in samples], lambda i: name_of(owners[i]))
        if self.demonstrations:
            shown = [number - first for number in numbers if number >= first]
            result = joined(result, of_experts([self.demonstrations[i] for i in shown], self.images, shown))
        result.share = share
        if first > len(self.trajectories):
            more = range(len(self.trajectories), len(self.trajectories) + len(self.demonstrations))
            result.trajectory = result.held(torch.tensor([*(fact.trajectory for fact in self.facts), *more]))
        if result.lag is None and any(fact.lags for fact in self.facts):
            result.lag = torch.zeros(len(result.tokens), dtype=torch.int16)
        if result.images is None and any(self.patches or ()):
            result.images = Images.of_text(result.lengths)
        self._complete_routing(result)
        return result

    def likeliest_tokens(self, sequences: Sequences) -> torch.Tensor | None:
        """Return what ``batching.likeliest_tokens`` returns of sequences that ``sequences`` has made."""
        numbers = range(len(self.lengths)) if sequences.share is None else sequences.share.numbers.tolist()
        samples = self._samples({n for n in numbers if n < len(self.facts)})
        return likeliest_tokens([(len(sample.response_ids), sample.teacher) for sample in samples], sequences)

    def _samples(self, numbers: set[int]) -> Iterator[TrainingSample]:
        """Yield samples by their indices; other trajectories are skipped."""
        of_trajectory: dict[int, list[int]] = {}
        for number, fact in enumerate(self.facts):
            of_trajectory.setdefault(fact.trajectory, []).append(number)
        for place, members in of_trajectory.items():
            if numbers.isdisjoint(members):
                continue
            trajectory = self.held.get(place, self.trajectories[place])
            if is_outline(trajectory):
                raise AssertionError(f"the arrays of {name_of(trajectory)} are not read")
            samples = current(list(trajectory.samples(self.lags)), self.settings)
            yield from (sample for number, sample in zip(members, samples, strict=True) if number in numbers)

    def _check_routing(self, facts: Sequence[SampleFacts]) -> None:
        """Check the shapes of expert ids if every sample has ids. Raises NonRetryableError."""
        layouts: dict[tuple[int, int], str] = {}
        ids = [fact.routing for fact in facts if fact.routing is not None]
        if len(ids) < len(facts):
            return
        for fact, (_, tokens, *layout) in zip(facts, ids, strict=True):
            name = name_of(self.trajectories[fact.trajectory])
            if tokens != fact.length - 1:
                raise NonRetryableError(
                    f"a sample of {name} has {fact.length} tokens, and expert ids of {tokens} tokens instead of "
                    f"{fact.length - 1}; {WITHOUT_REPLAY}"
                )
            layouts.setdefault((layout[0], layout[1]), name)
        if len(layouts) > 1:
            raise NonRetryableError(
                "expert ids of one step have several layouts (layers, experts of a token): "
                f"{', '.join(f'{layout} of {name}' for layout, name in layouts.items())}; {WITHOUT_REPLAY}"
            )

    def _complete_routing(self, sequences: Sequences) -> None:
        """Set empty expert ids on a rank with demonstrations only, if every sample of the step has ids."""
        if self._routed and sequences.routing is None and self.facts[0].routing is not None:
            dtype, _, *shape = self.facts[0].routing
            ids = np.full((len(sequences.tokens), *shape), NO_IDS, dtype)
            sequences.routing = torch.from_numpy(ids)


def without_routing(trajectory: Trajectory) -> Trajectory:
    """Remove a trajectory's expert ids."""
    turns = (turn if turn.routing is None else replace(turn, routing=None) for turn in trajectory.turns)
    return replace(trajectory, turns=tuple(turns))


def of_experts(
    rows: Sequence[ExpertRow], images: StepImages | None = None, numbers: Sequence[int] | None = None
) -> Sequences:
    """Make sequences of demonstrations with their images; teacher log-probs, if any, replace the engine's.

    Args:
        numbers: Indices of the rows in the step, for messages; None for all rows.
    """
    pairs = [(row.prompt, row.response) for row in rows]
    logp = [row.teacher_logp for row in rows if row.teacher_logp is not None]
    assert len(logp) in (0, len(rows)), "the teacher's log-probs are those of all rows, as was checked before the start"
    sequences = of_demonstrations(pairs, logp)
    if images is not None:
        images.inputs.put(
            sequences, [row.images for row in rows], lambda i: f"expert row {numbers[i] if numbers else i}"
        )
    return sequences


def current(samples: Sequence[TrainingSample], settings: AlgorithmConfig) -> list[TrainingSample]:
    """Mask response tokens sampled by older weights than a trajectory's newest (``algorithm.segments=current``).

    Weights are compared by training steps, not by versions: an evaluation publishes the same weights as a new version.
    """
    if settings.segments == "all":
        return list(samples)
    own = [s.lag[s.response_mask] for s in samples if s.lag is not None]
    newest = min((int(lag.min(initial=LARGEST_LAG)) for lag in own), default=0)
    return [s if s.lag is None else s._replace(response_mask=s.response_mask & (s.lag == newest)) for s in samples]
