"""A step's batch as input of actor and loss, for files that users compare with the store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megarl.core.kept_batches import KeptBatch, KeptValues
from megarl.learn.batching import MicroBatch
from megarl.learn.training.model import Model
from megarl.learn.training.objectives import LossTokens
from megarl.train.batch.batch import StepBatch

Arrays = dict[str, np.ndarray]
"""Fields of ``KeptBatch`` by name, for some micro-batches."""


def kept_batch(batch: StepBatch, actor: Model) -> KeptBatch | None:
    """Return the training input of a step's updates, from the micro-batches of each data-parallel rank; None on ranks
    other than 0. Every rank calls it."""
    own = [taken(batch, actor.micro_batches(batch.sequences, units), i) for i, units in enumerate(batch.updates)]
    every = _of_each_rank(own, actor.dp_rank)
    return None if every is None else put_together(batch, every)


def taken(batch: StepBatch, micro_batches: Iterable[MicroBatch], update: int) -> Arrays:
    """Collect the input of model and loss from an update's micro-batches, without padding."""
    sequences = batch.sequences
    of_step = sequences.held(torch.arange(len(sequences.step_lengths)))
    found: list[tuple[torch.Tensor, ...]] = []
    for micro in micro_batches:
        real = micro.row >= 0
        found.append((
            micro.take(sequences.tokens)[real].to(torch.int32),
            micro.targets(sequences)[real].to(torch.int32),
            LossTokens.of(micro, sequences).place[real],
            torch.bincount(micro.row[real], minlength=len(micro.numbers)).to(torch.int32),
            torch.full_like(micro.numbers, update, dtype=torch.int32),
            of_step[micro.numbers].to(torch.int32),
        ))  # fmt: skip
    names = ("tokens", "targets", "mask", "lengths", "updates", "numbers")
    return {name: torch.cat(parts).numpy() for name, parts in zip(names, zip(*found, strict=True), strict=True)}


VALUES = ("advantages", "old_logp", "ref_logp", "engine_logp", "values", "routing")
"""Fields of ``Sequences`` that the updates read."""


def kept_values(batch: StepBatch, actor: Model) -> KeptValues | None:
    """Return what a step's updates have read beside tokens, in the order of ``kept_batch``; None on ranks other than 0.
    Every rank calls it, after the updates."""
    own = [_values(batch, actor.micro_batches(batch.sequences, units)) for units in batch.updates]
    every = _of_each_rank(own, actor.dp_rank)
    if every is None:
        return None
    parts = [of_rank[update] for update in range(len(batch.updates)) for of_rank in every]
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    responses = {(row.group_id, row.index): i for i, row in enumerate(batch.outcomes)}
    of_rows = [responses[row.group_id, row.index] for row in batch.rows]
    more = len(batch.sequences.step_lengths) - len(of_rows)
    numbers = arrays.pop("numbers")
    outcomes = batch.outcomes
    return KeptValues(
        **arrays,
        row=np.array(of_rows + [-1] * more, np.int32)[numbers],
        response_groups=np.array([one.group_id for one in outcomes], np.str_),
        response_indices=np.array([one.index for one in outcomes], np.int32),
        rewards=np.array([one.reward.score for one in outcomes], np.float64),
        greedy=np.array([one.greedy.reward.score for one in outcomes if one.greedy is not None], np.float64),
        truncated=np.array([why == "length" for why in batch.finish_reasons] + [False] * more, bool)[numbers],
    )


def _values(batch: StepBatch, micro_batches: Iterable[MicroBatch]) -> Arrays:
    sequences = batch.sequences
    of_step = sequences.held(torch.arange(len(sequences.step_lengths)))
    found: dict[str, list[np.ndarray]] = {name: [] for name in (*VALUES, "numbers")}
    for micro in micro_batches:
        real = micro.index >= 0
        for name in VALUES:
            given = getattr(sequences, name)
            found[name].append(np.zeros(0, np.float32) if given is None else given[micro.index[real]].numpy())
        found["numbers"].append(of_step[micro.numbers].numpy())
    return {name: np.concatenate(parts) for name, parts in found.items()}


def put_together(batch: StepBatch, every: Sequence[Sequence[Arrays]]) -> KeptBatch:
    """Join the arrays of all data-parallel ranks, update by update."""
    parts = [of_rank[update] for update in range(len(batch.updates)) for of_rank in every]
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    group_ids = list(dict.fromkeys(row.group_id for row in batch.rows))
    place = {group_id: n for n, group_id in enumerate(group_ids)}
    more = len(batch.sequences.step_lengths) - len(batch.rows)
    groups = np.array([place[row.group_id] for row in batch.rows] + [-1] * more, np.int32)
    indices = np.array([row.index for row in batch.rows] + [0] * more, np.int32)
    numbers = arrays["numbers"]
    return KeptBatch(**arrays, groups=groups[numbers], indices=indices[numbers], group_ids=np.array(group_ids, np.str_))


def _of_each_rank(own: list[Arrays], dp_rank: int) -> list[list[Arrays]] | None:
    """Gather each data-parallel rank's arrays on rank 0, one rank after the other; None elsewhere."""
    places: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(places, dp_rank)
    senders = [places.index(number) for number in range(max(places) + 1)]
    if dist.get_rank():
        if dist.get_rank() in senders:
            dist.send_object_list([own], 0)
        return None
    assert senders[0] == 0, "rank 0 is the first of data-parallel rank 0"
    return [own, *_received(senders[1:])]


def _received(senders: Iterable[int]) -> Iterator[list[Arrays]]:
    for rank in senders:
        box: list[list[Arrays]] = [[]]
        dist.recv_object_list(box, rank)
        yield box[0]
