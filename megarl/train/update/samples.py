"""Samples of a step's trajectories: facts of all of them, and the sequences that a rank holds.

A step is read twice. The facts say how its sequences are dealt; then arrays are made of what the rank's models take.
Shape legend: N sequences of a step: all samples, then demonstrations; n of them held, T their positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from megarl.core.config.algorithms import AlgorithmConfig
from megarl.core.errors import NonRetryableError
from megarl.core.schema import FinishReason, TrainingSample, Trajectory, WeightsVersion, name_of
from megarl.explore.order.draws import ExpertRow
from megarl.learn.batching import Sequences, StepShare, joined, of_demonstrations, of_samples
from megarl.learn.batching.images import Images
from megarl.learn.batching.sequences import NO_IDS
from megarl.train.update.images import StepImages
from megarl.train.update.lags import current

WITHOUT_REPLAY = "set rollout.routing_replay to false"
"""Fix of expert ids that cannot be replayed."""


class SampleFacts(NamedTuple):
    """Facts that the dealing of a step, and its counts, need of a sample."""

    trajectory: int
    """Number of its trajectory in the step."""
    length: int
    """Tokens, those of the prompt among them."""
    trained: int
    """Tokens that it trains (``TrainingSample.response_mask``)."""
    tokens: int
    """Tokens in the loss: those of them that ``algorithm.segments`` leaves."""
    finish_reason: FinishReason
    patches: int
    lags: bool
    """True if some token has a lag."""
    routing: tuple[np.dtype, int, int] | None
    """Type, layers and experts of a token of its expert ids; None where it has none."""


@dataclass(frozen=True)
class StepSamples:
    """Trajectories and demonstrations of a step, of which sequences are made."""

    trajectories: Sequence[Trajectory]
    demonstrations: Sequence[ExpertRow]
    settings: AlgorithmConfig
    lags: Mapping[WeightsVersion, int] | None = None
    """As ``make_batch`` takes them."""
    images: StepImages | None = None
    """None for a text model."""

    @cached_property
    def facts(self) -> list[SampleFacts]:
        """Facts of each sample, from one trajectory's arrays at a time.

        Raises NonRetryableError where samples have expert ids of another number of tokens, or of several layouts.
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
                None if sample.routing is None else _routing_of(trajectory, sample, sample.routing),
            )
            for number, trajectory in enumerate(self.trajectories)
            for samples in [list(trajectory.samples(self.lags))]
            for sample, trained in zip(samples, current(samples, self.settings), strict=True)
        ]
        layouts = {fact.routing[1:]: fact.trajectory for fact in reversed(found) if fact.routing is not None}
        if len(layouts) > 1:
            each = (f"{layout} of {name_of(self.trajectories[number])}" for layout, number in layouts.items())
            raise NonRetryableError(
                f"expert ids of one step are of several layouts (layers, experts of a token): {', '.join(each)}; "
                f"{WITHOUT_REPLAY}"
            )
        return found

    @cached_property
    def lengths(self) -> torch.Tensor:
        """int64 [N]: tokens of each sequence."""
        shown = [len(row.prompt) + len(row.response) for row in self.demonstrations]
        return torch.tensor([*(fact.length for fact in self.facts), *shown], dtype=torch.int64)

    @cached_property
    def patches(self) -> list[int] | None:
        """Patches of the images of each sequence; None for a text model."""
        if self.images is None:
            return None
        shown = (self.images.patches_of(row.images) for row in self.demonstrations)
        return [*(fact.patches for fact in self.facts), *shown]

    def sequences(self, share: StepShare | None = None) -> Sequences:
        """Make the sequences of a share, or all of them.

        What some sequence of the step has (demonstrations, lags, images, expert ids) each rank has, also where its own
        sequences have none.

        Raises DataError, on a rank that holds it, where a sequence has other placeholders than its images need.
        """
        numbers = range(len(self.lengths)) if share is None else share.numbers.tolist()
        first = len(self.facts)
        sampled = [number for number in numbers if number < first]
        samples = list(self._samples(set(sampled)))
        result = of_samples(samples)
        if self.images is not None:
            owners = [self.trajectories[self.facts[number].trajectory] for number in sampled]
            self.images.put(result, [sample.images for sample in samples], lambda i: name_of(owners[i]))
        if self.demonstrations:
            shown = [self.demonstrations[number - first] for number in numbers if number >= first]
            result = joined(result, of_experts(shown, self.images))
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

    def _samples(self, numbers: set[int]) -> Iterator[TrainingSample]:
        """Yield samples by their numbers; of other trajectories none is made."""
        of_trajectory: dict[int, list[int]] = {}
        for number, fact in enumerate(self.facts):
            of_trajectory.setdefault(fact.trajectory, []).append(number)
        for place, members in of_trajectory.items():
            if numbers.isdisjoint(members):
                continue
            samples = current(list(self.trajectories[place].samples(self.lags)), self.settings)
            yield from (sample for number, sample in zip(members, samples, strict=True) if number in numbers)

    def _complete_routing(self, sequences: Sequences) -> None:
        """Have expert ids where every sample of the step has some, and none where one of them has none."""
        shapes = [fact.routing for fact in self.facts]
        if None in shapes:
            sequences.routing = None
        elif sequences.routing is None and shapes[0] is not None:
            dtype, *shape = shapes[0]
            ids = np.full((len(sequences.tokens), *shape), NO_IDS, dtype)
            sequences.routing = torch.from_numpy(ids)


def _routing_of(trajectory: Trajectory, sample: TrainingSample, ids: np.ndarray) -> tuple[np.dtype, int, int]:
    """``SampleFacts.routing`` of a sample with expert ids. Raises NonRetryableError where they are of other tokens."""
    tokens = len(sample.prompt_ids) + len(sample.response_ids)
    if len(ids) != tokens - 1:
        raise NonRetryableError(
            f"a sample of {name_of(trajectory)} has {tokens} tokens, and expert ids of {len(ids)} tokens instead of "
            f"{tokens - 1}; {WITHOUT_REPLAY}"
        )
    return (ids.dtype, *ids.shape[1:])


def of_experts(rows: Sequence[ExpertRow], images: StepImages | None = None) -> Sequences:
    """Demonstrations with their images; their teacher's log-probs, if there are any, in the place of an engine's."""
    pairs = [(row.prompt, row.response) for row in rows]
    logp = [row.teacher_logp for row in rows if row.teacher_logp is not None]
    assert len(logp) in (0, len(rows)), "the teacher's log-probs are those of all rows, as was checked before the start"
    sequences = of_demonstrations(pairs, logp)
    if images is not None:
        images.inputs.put(sequences, [row.images for row in rows], "expert row {} of the step".format)
    return sequences
