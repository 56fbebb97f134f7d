"""State of one rank: the optimizer's full parameters, and every random generator.

Megatron-Core's ``fully_reshardable`` form stores every parameter's float32 master and moments in the parameter's shape,
so any grid can load them. Its code gathers all of them on every data-parallel rank to save, and loads all of them on
every rank: 12 bytes for each parameter of a rank's model. Here keys and values are the same, but each parameter is
written by the rank with most of it. Only parameters split over two ranks move. A rank loads only its share.
"""

from __future__ import annotations

import base64
import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megarl.weights.megatron_private import device_generator, optimizer_state, put_device_generator

STATE = ("param", "exp_avg", "exp_avg_sq")
"""Tensors of each parameter, by Megatron-Core's names."""


class ParameterPiece(NamedTuple):
    """Elements of a flat parameter on one data-parallel rank."""

    rank: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.end - self.start


def pieces_of(start: int, end: int, share: int) -> list[ParameterPiece]:
    """Pieces, in order, of a parameter at ``start`` to ``end`` of a bucket with ``share`` elements per rank."""
    found = []
    for rank in range(start // share, -(-end // share)):
        low, high = max(start, rank * share), min(end, (rank + 1) * share)
        found.append(ParameterPiece(rank, low - start, high - start))
    return found


def writer_of(pieces: Sequence[ParameterPiece]) -> int:
    """Rank with most of a parameter, the first on a tie."""
    return max(pieces, key=lambda piece: piece.size).rank


def spread(optimizer: Any) -> None:
    """Replace the ``fully_reshardable`` state of a distributed optimizer, or of each in a chain, by this module's."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner.sharded_param_state_fully_reshardable = functools.partial(sharded_optimizer_state, inner)


def sharded_optimizer_state(
    optimizer: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
) -> dict[int, dict[str, Any]]:
    """Parameter number -> sharded tensors: for saving, the ones this rank writes; for loading, the ones in its share.

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
    """Yield parameters with their pieces, in Megatron-Core's loading order."""
    ranks = optimizer.data_parallel_group.size()
    for buffer in optimizer.buffers:
        for parameter, (start, end, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            share = bucket.grad_data.numel() // ranks
            yield parameter, pieces_of(start - bucket.offset, end - bucket.offset, share)


def _whole(
    optimizer: Any, parameter: torch.nn.Parameter, pieces: Sequence[ParameterPiece]
) -> dict[str, torch.Tensor] | None:
    """float32 state in the parameter's shape on the writing rank, else ``None``; an unsplit parameter is not copied."""
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
    """Assemble a flat parameter from this rank's piece and the pieces that other ranks send."""
    whole = torch.empty(sum(piece.size for piece in pieces), dtype=torch.float32, device=own.device)
    for piece in pieces:
        part = whole[piece.start : piece.end]
        if piece.rank == group.rank():
            part.copy_(own)
        else:
            dist.recv(part, group=group, group_src=piece.rank)
    return whole


def copied(loaded: Mapping[Any, Any]) -> dict[Any, Any]:
    """Copy the mappings of a state but not its tensors: an optimizer empties the mappings it loads."""
    return {key: copied(value) if isinstance(value, Mapping) else value for key, value in loaded.items()}


def differing(optimizer: Any, loaded: Mapping[Any, Any]) -> list[tuple[torch.nn.Parameter, str]]:
    """Return parameters, with ``STATE`` names, that differ in an optimizer (or any of a chain) from the loaded state.

    Args:
        loaded: Optimizer state read by dist_checkpointing, before the optimizer takes it.
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
    """Sharded tensors of a parameter's state, sharded as the parameter; ``replica`` is 0 on the writing rank."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    found = {}
    for name, tensor in whole.items():
        other: dict[str, Any] = {} if isinstance(model, ShardedTensorFactory) else {"dtype": tensor.dtype}
        key, place = f"optimizer.state.{name}.{model.key}", (*model.replica_id[:-1], replica)
        found[name] = replace(model, key=key, data=tensor, replica_id=place, **other)
        found[name].validate_metadata_integrity()
    return found


def of_process() -> dict[str, Any]:
    """States of Python's and numpy's generators, one per process."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def put_process(states: Mapping[str, Any]) -> None:
    """Restore the states from ``of_process``."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def of_grid() -> dict[str, Any]:
    """States of the current grid's generators (torch, GPU, tensor-parallel tracker), with this rank's place."""
    from megatron.core.tensor_parallel import random as megatron

    found = {
        "place": _place(),
        "torch": _text(torch.get_rng_state()),
        "tracker": {name: _text(state) for name, state in megatron.get_cuda_rng_tracker().get_states().items()},
    }
    return found | ({"cuda": _text(device_generator())} if torch.cuda.is_available() else {})


def put_grid(states: Mapping[str, Any]) -> bool:
    """Restore the states from ``of_grid``. Return False, without changes, if they come from another grid or place: they
    would repeat another rank's numbers."""
    from megatron.core.tensor_parallel import random as megatron

    if states["place"] != _place() or ("cuda" in states) != torch.cuda.is_available():
        return False
    torch.set_rng_state(_tensor(states["torch"]))
    if "cuda" in states:
        put_device_generator(_tensor(states["cuda"]))
    megatron.get_cuda_rng_tracker().set_states({name: _tensor(text) for name, text in states["tracker"].items()})
    return True


def _place() -> dict[str, list[int]]:
    """Dimension -> [this rank's index, size]."""
    from megatron.core import parallel_state as p

    return {
        "tp": [p.get_tensor_model_parallel_rank(), p.get_tensor_model_parallel_world_size()],
        "pp": [p.get_pipeline_model_parallel_rank(), p.get_pipeline_model_parallel_world_size()],
        "cp": [p.get_context_parallel_rank(), p.get_context_parallel_world_size()],
        "dp": [p.get_data_parallel_rank(), p.get_data_parallel_world_size()],
        "ep": [p.get_expert_model_parallel_rank(), p.get_expert_model_parallel_world_size()],
    }


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
