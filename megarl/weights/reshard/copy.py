"""Copy weights between models in the same processes, over one torch.distributed group.

The models may have different grids over the same ranks, different dtypes, and different tensors listed in ``left_out``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import distributed as dist

from megarl.core.errors import PlanError, WeightSyncError, first_of
from megarl.weights.reshard.buckets import wire_dtype
from megarl.weights.reshard.execute import Digests, Transport, Work, compare, digests_of, exchange, merge
from megarl.weights.reshard.layout import Layout
from megarl.weights.reshard.plan import ReshardPlan, build_plan


@dataclass(frozen=True)
class Received:
    """An arrival in the receiver's memory; ``release`` has nothing to do."""

    work: Work
    message: torch.Tensor

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.message

    def release(self) -> None:
        pass


@dataclass(frozen=True)
class GroupTransport:
    """Point-to-point within ``group`` (``None``: the default group); plan ranks are ranks of that group."""

    group: dist.ProcessGroup | None = None

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def isend(self, message: torch.Tensor, rank: int) -> Work:
        work = dist.isend(message, group=self.group, group_dst=rank)
        assert work is not None, "this process is not in the group"
        return work

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], torch.Tensor]) -> Received:
        memory = spare()
        work = dist.irecv(memory, group=self.group, group_src=rank)
        assert work is not None, "this process is not in the group"
        return Received(work, memory[:nbytes])


HEADS = ("lm_head.weight", "score.weight")
"""Tensors that a critic and an actor do not share."""

_FAILURE = (
    "weights differ from those that they were copied from; do not use this model, start again from the newest "
    "checkpoint"
)


@dataclass(frozen=True)
class CopyReport:
    """Result of a copy, the same on every rank."""

    left_out: tuple[str, ...]
    """Logical tensors in only one of the two models; unchanged in the destination."""
    tensors: int
    """Number of logical tensors copied."""
    digests: int
    """Number of digests compared: one for each tensor of each destination rank."""


def copy_weights(
    source: Layout,
    source_tensors: Mapping[str, torch.Tensor],
    destination: Layout,
    destination_tensors: Mapping[str, torch.Tensor],
    rank: int,
    *,
    bucket_bytes: int,
    left_out: Collection[str] = (),
    group: dist.ProcessGroup | None = None,
    transport: Transport | None = None,
) -> CopyReport:
    """Copy the source model's weights to the destination model and verify them. Every rank calls it.

    Extra memory is at most four buckets. They are on the host because NCCL has one queue for both directions between
    two ranks: a rank that expects a message before sending would wait forever.

    Elements are cast to the destination's dtype on the way. Afterwards, digests of the sent elements are compared with
    digests of the destination tensors. Notify a model with an optimizer afterwards (``weights_changed``).

    Args:
        source, destination: Layouts of both models over the ranks of ``group`` (``None``: the default group).
        source_tensors, destination_tensors: Local name -> tensor on this rank, shaped as in the layouts.
        bucket_bytes: Most bytes of one message.
        left_out: Logical tensors that may be in only one model; then they are not copied, but reported.
        transport: Transport of messages (``None``: point to point within ``group``).

    Raises:
        PlanError: a tensor outside ``left_out`` is missing or misshapen on one side, the layouts' numbers of ranks
            differ, or tensors do not match a layout. Nothing was written then.
        WeightSyncError: on every rank, naming tensors and ranks with different digests.
    """
    plan, missing = _plan(source, destination, frozenset(left_out))
    dtype = _check_destination(destination, rank, destination_tensors)
    sent = exchange(
        plan,
        rank,
        source_tensors,
        destination_tensors.__getitem__,
        transport or GroupTransport(group),
        dtype=dtype,
        bucket_bytes=bucket_bytes,
    )
    found = digests_of(plan.destination, rank, destination_tensors.__getitem__)
    count = _compare(plan, sent, {(rank, name): digest for name, digest in found.items()}, group)
    return CopyReport(missing, len(plan.destination.tensors), count)


@lru_cache(maxsize=4)  # a reference is refreshed repeatedly; layouts are compared by identity
def _plan(source: Layout, destination: Layout, left_out: frozenset[str]) -> tuple[ReshardPlan, tuple[str, ...]]:
    """Return the plan for the common tensors, and the names of all others."""
    if source.num_ranks != destination.num_ranks:
        raise PlanError(
            f"weights go from {source.name} with {source.num_ranks} ranks to {destination.name} with "
            f"{destination.num_ranks}; both models must be on the same ranks: give both grids the same product of sizes"
        )
    missing = tuple(sorted(source.tensors.keys() ^ destination.tensors.keys()))
    unnamed = [name for name in missing if name not in left_out]
    if unnamed:
        where = {name: destination.name if name in source.tensors else source.name for name in unnamed}
        text = first_of([f"{name} has no place in {where[name]}" for name in unnamed], 5)
        raise PlanError(
            f"{text}: weights go from {source.name} to {destination.name}; "
            "both models must come from the same config.json, or name in left_out what only one of them has"
        )
    plan = build_plan(source, destination.only(lambda name: name in source.tensors), colocated=True)
    return plan, missing


def _check_destination(layout: Layout, rank: int, tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Return the model's dtype. Raises PlanError unless tensors match the layout and have this or their fixed dtype."""
    own = {row.local: layout.dtype_of(row.parts[0]) for row, _ in layout.rows_of(rank)}
    shapes = layout.local_shapes(rank)
    dtypes = [tensors[local].dtype for local in shapes if local in tensors and own[local] is None]
    for row, share in layout.rows_of(rank):
        wanted = row.local_shape(share), wire_dtype(layout, row.parts[0], dtypes[0]) if dtypes else None
        tensor = tensors.get(row.local)
        found = "no such tensor" if tensor is None else (tuple(tensor.shape), tensor.dtype)
        if found != wanted:
            raise PlanError(
                f"{row.local} on rank {rank} of {layout.name} must have shape and dtype {wanted}, found {found}; build "
                "model and layout from the same config.json, grid and vocabulary padding"
            )
    return dtypes[0]


def _compare(plan: ReshardPlan, sent: Digests, found: Digests, group: dist.ProcessGroup | None) -> int:
    """Compare digests on rank 0, and send the result to the other ranks. Return the number of digests."""
    is_first = dist.get_rank(group) == 0
    answers: list[tuple[Digests, Digests] | None] | None = [None] * dist.get_world_size(group) if is_first else None
    dist.gather_object((sent, found), answers, group=group, group_dst=0)
    verdict: list[tuple[int, str]] = [(0, "")]
    if is_first:
        parts = [answer for answer in answers or () if answer is not None]
        got: Digests = {key: value for _, theirs in parts for key, value in theirs.items()}
        try:
            compare(plan, merge(mine for mine, _ in parts), got, _FAILURE)
            verdict = [(len(got), "")]
        except WeightSyncError as error:
            verdict = [(0, str(error))]
    dist.broadcast_object_list(verdict, group=group, group_src=0)
    count, failure = verdict[0]
    if failure:
        raise WeightSyncError(failure)
    return count
