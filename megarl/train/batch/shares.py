"""The share of a step that a rank holds: the union of what its models take."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.learn.batching import StepShare, dealt
from megarl.learn.training.model import Model, WithoutAdapters

Taken = Sequence[tuple[Model | WithoutAdapters, Sequence[Sequence[int]] | None]]
"""Models, and units of sequences that each takes in one go; None for all."""


def share_of(lengths: torch.Tensor, patches: Sequence[int] | None, taken: Taken) -> StepShare | None:
    """Make this rank's share of a step; None where a model has no data-parallel ranks, so that all hold all of it.

    Every rank calls it.

    Args:
        lengths: int64 [N] of all sequences of the step.
        patches: [N], of their images; None for a text model.

    Raises ValueError where a sequence is longer than a micro-batch.
    """
    if min((model.micro_batching.dp for model, _ in taken), default=1) == 1:
        return None
    each, numbers = lengths.tolist(), set[int]()
    for model, units in taken:
        for batch in dealt(each, model.micro_batching, units, patches)[model.dp_rank]:
            numbers.update(batch)
    return StepShare.of(numbers, lengths, patches)
