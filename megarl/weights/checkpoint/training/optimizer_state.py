"""State of a distributed optimizer in a checkpoint: whole parameters, each on the ranks that write or read it.

Megatron-Core's ``fully_reshardable`` form has every parameter's float32 master and moments in the parameter's shape, so
that any grid loads them. Its own code gathers all of them on every data-parallel rank to save, and asks for all of them
on every rank to load: 12 bytes for each parameter that a rank computes with. Here keys and values are the same, and a
parameter's writer is the rank that has most of it: only parameters that lie over two ranks' shares move. A rank loads
the parameters of its own share.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megarl.weights.megatron_private import optimizer_state

STATE = ("param", "exp_avg", "exp_avg_sq")
"""Tensors of each parameter, by Megatron-Core's names."""


class ParameterPiece(NamedTuple):
    """Elements of a flat parameter that one data-parallel rank has."""

    rank: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.end - self.start


def pieces_of(start: int, end: int, share: int) -> list[ParameterPiece]:
    """Pieces of a parameter at ``start`` to ``end`` of a bucket whose ranks have ``share`` elements each, in order."""
    found = []
    for rank in range(start // share, -(-end // share)):
        low, high = max(start, rank * share), min(end, (rank + 1) * share)
        found.append(ParameterPiece(rank, low - start, high - start))
    return found


def writer_of(pieces: Sequence[ParameterPiece]) -> int:
    """Rank that has most of a parameter; the first of equal ones."""
    return max(pieces, key=lambda piece: piece.size).rank


def spread(optimizer: Any) -> None:
    """Have a distributed optimizer, or each of a chain, make its ``fully_reshardable`` state here."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner.sharded_param_state_fully_reshardable = functools.partial(sharded_optimizer_state, inner)


def sharded_optimizer_state(
    optimizer: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
) -> dict[int, dict[str, Any]]:
    """Number of a parameter -> its sharded tensors: to save those that this rank writes, to load those of its share.

    Every rank of the optimizer's data-parallel group calls it.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    rank, ranks = optimizer.data_parallel_group.rank(), optimizer.data_parallel_group.size()
    model_state, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    sharded = {item.data: item for item in nested_values(model_state)}
    found = {}
    for number, (parameter, pieces) in enumerate(_parameters(optimizer)):
        if is_loading:
            mine = any(piece.rank == rank for piece in pieces)
            whole = {name: torch.empty(parameter.shape) for name in STATE} if mine else None
        else:
            whole = _whole(optimizer, parameter, pieces)
        if whole is not None:
            found[number] = _as_sharded(sharded[parameter], whole, (rank - writer_of(pieces)) % ranks)
    return found


def _parameters(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, list[ParameterPiece]]]:
    """Parameters with their pieces, in the order in which Megatron-Core numbers them when it loads."""
    ranks = optimizer.data_parallel_group.size()
    for buffer in optimizer.buffers:
        for parameter, (start, end, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            share = bucket.grad_data.numel() // ranks
            yield parameter, pieces_of(start - bucket.offset, end - bucket.offset, share)


def _whole(
    optimizer: Any, parameter: torch.nn.Parameter, pieces: Sequence[ParameterPiece]
) -> dict[str, torch.Tensor] | None:
    """float32 state in the parameter's shape on the rank that writes it, None on others; a piece that is whole is no
    copy."""
    group = optimizer.data_parallel_group
    rank, writer = group.rank(), writer_of(pieces)
    if all(piece.rank != rank for piece in pieces):
        return None
    own = optimizer_state(optimizer, parameter)
    found = {}
    for name in STATE:
        flat = own[name].detach().float()
        if rank != writer:
            dist.send(flat.contiguous(), group=group, group_dst=writer)
            continue
        if len(pieces) > 1:
            flat = _gathered(flat, pieces, group)
        found[name] = flat.view(parameter.shape)
    return found or None


def _gathered(own: torch.Tensor, pieces: Sequence[ParameterPiece], group: dist.ProcessGroup) -> torch.Tensor:
    """Flat parameter of this rank's piece and those that the other ranks send."""
    whole = torch.empty(sum(piece.size for piece in pieces), dtype=torch.float32, device=own.device)
    for piece in pieces:
        part = whole[piece.start : piece.end]
        if piece.rank == group.rank():
            part.copy_(own)
        else:
            dist.recv(part, group=group, group_src=piece.rank)
    return whole


def copied(loaded: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the mappings of a state again, with the same tensors: an optimizer empties those that it takes."""
    return {key: copied(value) if isinstance(value, Mapping) else value for key, value in loaded.items()}


def differing(optimizer: Any, loaded: Mapping[Any, Any]) -> list[tuple[torch.nn.Parameter, str]]:
    """Return what an optimizer, or any of a chain, does not have as it was loaded: parameters, and ``STATE`` of each.

    Args:
        loaded: State of the optimizer as dist_checkpointing has read it, before the optimizer takes it.
    """
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    states = [loaded] if len(chain) == 1 else [state for _, state in sorted(loaded.items())]
    found = []
    for inner, state in zip(chain, states, strict=True):
        if inner.is_stub_optimizer:
            continue
        rank, given = inner.data_parallel_group.rank(), state["param_state"]
        for number, (parameter, pieces) in enumerate(_parameters(inner)):
            for piece in pieces:
                if piece.rank != rank:
                    continue
                own = optimizer_state(inner, parameter)
                for name in STATE:
                    part = given[number][name].reshape(-1)[piece.start : piece.end].to(own[name])
                    if not torch.equal(part, own[name].reshape(-1)):
                        found.append((parameter, name))
    return found


def _as_sharded(model: Any, whole: Mapping[str, torch.Tensor], replica: int) -> dict[str, Any]:
    """Sharded tensors of a parameter's state: as the parameter's own, ``replica`` 0 on the rank that writes."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    found = {}
    for name, tensor in whole.items():
        other: dict[str, Any] = {} if isinstance(model, ShardedTensorFactory) else {"dtype": tensor.dtype}
        key, place = f"optimizer.state.{name}.{model.key}", (*model.replica_id[:-1], replica)
        found[name] = replace(model, key=key, data=tensor, replica_id=place, **other)
        found[name].validate_metadata_integrity()
    return found
