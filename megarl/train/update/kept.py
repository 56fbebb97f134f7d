"""A step's batch as the actor and its loss take it, for files that people compare with the store."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from megarl.core.kept_batches import KeptBatch
from megarl.learn.batching import MicroBatch, MicroBatching, Sequences, micro_batches
from megarl.learn.training.objectives import LossTokens
from megarl.train.update.batch import StepBatch


@dataclass
class _Parts:
    """Arrays of micro-batches, to be joined."""

    tokens: list[torch.Tensor] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    mask: list[torch.Tensor] = field(default_factory=list)
    lengths: list[torch.Tensor] = field(default_factory=list)
    updates: list[torch.Tensor] = field(default_factory=list)
    numbers: list[torch.Tensor] = field(default_factory=list)

    def add(self, micro: MicroBatch, sequences: Sequences, update: int) -> None:
        """Add what the model and the loss take of a micro-batch, without its padding."""
        real = micro.row >= 0
        self.tokens.append(micro.take(sequences.tokens)[real])
        self.targets.append(micro.targets(sequences)[real])
        self.mask.append(LossTokens.of(micro, sequences).place[real])
        self.lengths.append(torch.bincount(micro.row[real], minlength=len(micro.numbers)))
        self.updates.append(torch.full_like(micro.numbers, update))
        self.numbers.append(micro.numbers)


def kept_batch(batch: StepBatch, micro_batching: MicroBatching) -> KeptBatch | None:
    """Return what the updates of a step train on, read from the micro-batches of all data-parallel ranks; None on
    other ranks than the first. Every rank calls it."""
    parts, sequences = _Parts(), batch.sequences.text_of_step()
    if sequences is None:
        return None
    for update, units in enumerate(batch.updates):
        for rank in range(micro_batching.dp):
            for micro in micro_batches(sequences, micro_batching, rank, units):
                parts.add(micro, sequences, update)
    arrays = {name: _joined(found) for name, found in vars(parts).items()}
    group_ids = list(dict.fromkeys(row.group_id for row in batch.rows))
    place, more = {group_id: n for n, group_id in enumerate(group_ids)}, len(sequences) - len(batch.rows)
    groups = np.array([place[row.group_id] for row in batch.rows] + [-1] * more, np.int32)
    indices = np.array([row.index for row in batch.rows] + [0] * more, np.int32)
    numbers = arrays["numbers"]
    return KeptBatch(**arrays, groups=groups[numbers], indices=indices[numbers], group_ids=np.array(group_ids, np.str_))


def _joined(found: list[torch.Tensor]) -> np.ndarray:
    joined = torch.cat(found)
    return joined.numpy() if joined.dtype == torch.bool else joined.to(torch.int32).numpy()
