"""Each rank's state on its own node after every step, and a copy on the next node (``trainer.keep_state``).

A rank writes its tensors as they are into the file ``rank_<r>.<slot>`` of its node, then their names into
``rank_<r>.<slot>.json``. Two slots take turns, so one is whole while the other is written. In jobs over several nodes
each file is then sent to a rank of the next node. A state counts once rank 0 has written its manifest in the run's
``checkpoints/kept``. It fits the grid that wrote it alone, and lasts as long as the job's command.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.core.errors import CheckpointError, JobError, first_of
from megarl.core.jobs import KEPT_IN, NODE
from megarl.core.processes.memory_files import names_in, open_file
from megarl.weights.checkpoint.training import rank_state
from megarl.weights.checkpoint.training.disk_space import on_rank_0
from megarl.weights.checkpoint.training.manifest import SLOTS, remove, steps_of
from megarl.weights.checkpoint.training.save import (
    CheckpointedModel,
    has_adapters,
    inner_optimizers,
    start_moments,
    unwrapped,
)
from megarl.weights.checkpoint.training.writer import places_of

log = logging.getLogger(__name__)

PIECE = 1 << 28
"""Bytes of one message between ranks."""


def tensors_of(parts: Mapping[str, CheckpointedModel]) -> dict[str, torch.Tensor]:
    """Return name -> tensor of all that this rank has of the parts: parameters, buffers, masters, moments. Of a model
    with adapters these are its trained parameters alone."""
    found: dict[str, torch.Tensor] = {}
    for name, part in parts.items():
        for at, chunk in enumerate(part.chunks):
            model, adapted = unwrapped(chunk), has_adapters(chunk)
            own = {key: p for key, p in model.named_parameters() if p.requires_grad or not adapted}
            own |= {} if adapted else dict(model.named_buffers())
            found |= {f"{name}/{at}/{key}": tensor.detach() for key, tensor in own.items()}
        if part.optimizer is None:
            continue
        start_moments(part.optimizer)
        for at, inner in enumerate(inner_optimizers(part.optimizer)):
            for number, p in enumerate(p for group in inner.param_groups for p in group["params"]):
                states = {key: value for key, value in inner.state[p].items() if isinstance(value, torch.Tensor)}
                for key, value in {"param": p, **states}.items():
                    found[f"{name}/optimizer/{at}/{number}/{key}"] = value.detach()
    return found


def _updates_of(parts: Mapping[str, CheckpointedModel]) -> dict[str, list[int]]:
    """Return part -> the number of updates of each group of its optimizers."""
    return {
        name: [int(group.get("step", 0)) for inner in inner_optimizers(part.optimizer) for group in inner.param_groups]
        for name, part in parts.items()
        if part.optimizer is not None
    }


class KeptState:
    """States of this rank and copies of other ranks' states, in files of the node. Every rank makes the same calls.

    Args:
        place: Address of the node's ``MemoryFiles``, or a folder on its disk.
        node: Number of the node.
    """

    def __init__(self, place: str, node: int) -> None:
        self._place, self._rank = place, dist.get_rank()
        nodes: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(nodes, node)
        self._receivers = receivers(nodes)
        self._group = dist.new_group(backend="gloo") if any(r is not None for r in self._receivers) else None
        self._memory: dict[str, mmap] = {}
        self._sending: threading.Thread | None = None

    def save(self, step: int, parts: Mapping[str, CheckpointedModel]) -> int:
        """Write this rank's state, and begin to send it to the next node; return its bytes.

        Raises:
            OSError: there is no room.
        """
        self.settle()
        tensors = tensors_of(parts)
        places, size = places_of(list(tensors.values()))
        states: dict[str, Any] = {"process": rank_state.of_process(), "parts": {}}
        for name, part in parts.items():
            with part.grid():
                states["parts"][name] = rank_state.of_grid()
        name = _name(self._rank, step)
        header = {"step": step, "size": size, "tensors": _described(tensors), "updates": _updates_of(parts)}
        self._write_header(name, b"")
        memory = self._mapped(name, size)
        for place, tensor in zip(places, tensors.values(), strict=True):
            place.within(memory).copy_(tensor)
        self._write_header(name, json.dumps(header | {"random": states}).encode())
        if self._group is not None:
            self._sending = threading.Thread(target=self._exchange, args=(step,), daemon=True)
            self._sending.start()
        return size

    def settle(self) -> None:
        """Wait until this rank has sent its last state and received the states that it keeps for others."""
        if self._sending is not None:
            self._sending.join()
            self._sending = None

    def load(self, checkpoint: Path, parts: Mapping[str, CheckpointedModel]) -> None:
        """Load some parts of the state that a manifest counts.

        Raises:
            JobError: no node has a rank's state any more; the manifest is removed, so a later start takes an older one.
            CheckpointError: the state is of other models or of another grid.
        """
        header = self._header_of(checkpoint)
        tensors, beginnings = tensors_of(parts), tuple(f"{name}/" for name in parts)
        there = {one[0]: one for one in header["tensors"] if one[0].startswith(beginnings)}
        if wrong := sorted(there.keys() ^ tensors.keys()) or [
            name for name, *rest in _described(tensors) if rest != there[name][1:]
        ]:
            raise CheckpointError(f"{checkpoint} has the state of another grid or model: {first_of(wrong, 4)} differ")
        shaped = [torch.empty(shape, dtype=_DTYPES[kind], device="meta") for _, shape, kind in header["tensors"]]
        places, size = places_of(shaped)
        memory = self._mapped(_name(self._rank, header["step"]), size)
        with torch.no_grad():
            for (name, *_), place in zip(header["tensors"], places, strict=True):
                if name in tensors:
                    tensors[name].copy_(place.within(memory))
        for name, part in parts.items():
            if part.optimizer is None:
                continue
            groups = [group for inner in inner_optimizers(part.optimizer) for group in inner.param_groups]
            for group, step in zip(groups, header["updates"][name], strict=True):
                group["step"] = step

    def put_random_states(self, checkpoint: Path, parts: Mapping[str, CheckpointedModel]) -> None:
        """Restore this rank's generators. Call it after building all models, which draws from them."""
        states = self._header_of(checkpoint)["random"]
        rank_state.put_process(states["process"])
        for name, part in parts.items():
            with part.grid():
                rank_state.put_grid(states["parts"][name])

    def _header_of(self, checkpoint: Path) -> dict[str, Any]:
        [step] = steps_of([checkpoint])
        self.settle()
        self._fetch(checkpoint, step)
        found = self._read_header(_name(self._rank, step))
        assert found is not None, "fetched, or written on this node"
        return found

    def _fetch(self, checkpoint: Path, step: int) -> None:
        """Get this rank's file from another node's copy if its own node lacks it. Every rank calls it."""
        world, names = dist.get_world_size(), set(names_in(self._place))
        there = [rank for rank in range(world) if f"{_name(rank, step)}.json" in names]
        here = [rank for rank in there if (self._read_header(_name(rank, step)) or {}).get("step") == step]
        held: list[list[int]] = [[]] * world
        dist.all_gather_object(held, here)
        lacking = [rank for rank in range(world) if rank not in held[rank]]
        holders = [next((other for other in range(world) if rank in held[other]), None) for rank in lacking]
        if None in holders:
            on_rank_0(lambda: remove(checkpoint))
            raise JobError(
                f"the state of rank {lacking[holders.index(None)]} after step {step} is on no node any more; the job "
                "goes on from an older one"
            )
        for rank, holder in zip(lacking, holders, strict=True):
            if self._rank == holder:
                for work in self._send(rank, rank, step):
                    work.wait()
            elif self._rank == rank:
                self._receive(holder, rank, step)

    def _exchange(self, step: int) -> None:
        """Send this rank's file to its receiver, and receive the files that others send to this rank."""
        to = self._receivers[self._rank]
        pending = [] if to is None else self._send(to, self._rank, step)
        for rank, receiver in enumerate(self._receivers):
            if receiver == self._rank:
                self._receive(rank, rank, step)
        for work in pending:
            work.wait()

    def _send(self, to: int, whose: int, step: int) -> list[dist.Work]:
        name = _name(whose, step)
        header = self._read_header(name)
        assert header is not None, "this node has the file"
        text = bytearray(json.dumps(header).encode())
        data = torch.frombuffer(self._mapped(name, header["size"]), dtype=torch.uint8)
        sizes = torch.tensor([len(text), len(data)])
        messages = [sizes, torch.frombuffer(text, dtype=torch.uint8), *data.split(PIECE)]
        works = [dist.isend(message, to, self._group) for message in messages]
        return [work for work in works if work is not None]

    def _receive(self, source: int | None, whose: int, step: int) -> None:
        sizes = torch.zeros(2, dtype=torch.int64)
        dist.recv(sizes, source, self._group)
        name = _name(whose, step)
        self._write_header(name, b"")
        text = torch.zeros(int(sizes[0]), dtype=torch.uint8)
        dist.recv(text, source, self._group)
        try:
            data = torch.frombuffer(self._mapped(name, int(sizes[1])), dtype=torch.uint8)
        except OSError as error:  # the messages must be received all the same
            log.warning("no room for a copy of the state of rank %d: %s", whose, error)
            data, text = torch.empty(int(sizes[1]), dtype=torch.uint8, device="meta"), text[:0]
        for piece in data.split(PIECE):
            dist.recv(torch.empty(len(piece), dtype=torch.uint8) if piece.is_meta else piece, source, self._group)
        self._write_header(name, bytes(text.numpy()))

    def _mapped(self, name: str, size: int) -> mmap:
        """Return a file's memory, which stays mapped: pages of a new file are slow to write at first."""
        if name not in self._memory or len(self._memory[name]) != size:
            descriptor = open_file(self._place, name)
            try:
                os.ftruncate(descriptor, size)
                os.posix_fallocate(descriptor, 0, size)  # without room a later write would end the process
                self._memory[name] = mmap(descriptor, size)
            finally:
                os.close(descriptor)
        return self._memory[name]

    def _write_header(self, name: str, text: bytes) -> None:
        with open(open_file(self._place, f"{name}.json"), "r+b") as file:
            file.truncate()
            file.write(text)

    def _read_header(self, name: str) -> dict[str, Any] | None:
        """Return a file's header; None without one, or one that was cut short."""
        with open(open_file(self._place, f"{name}.json"), "rb") as file, suppress(ValueError):
            found: dict[str, Any] = json.loads(file.read())
            return found
        return None


def _name(rank: int, step: int) -> str:
    return f"rank_{rank}.{step % SLOTS}"


_DTYPES = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}


def _described(tensors: Mapping[str, torch.Tensor]) -> list[list[Any]]:
    """Return [name, shape, dtype] of each tensor."""
    return [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors.items()]


def receivers(nodes: Sequence[int]) -> list[int | None]:
    """Return, for each rank, the rank of the next node that keeps a copy of its state; None in a job on one node.

    Args:
        nodes: Number of each rank's node.
    """
    order = sorted(set(nodes))
    ranks = {node: [rank for rank, own in enumerate(nodes) if own == node] for node in order}
    found: list[int | None] = []
    for rank, node in enumerate(nodes):
        there = ranks[order[(order.index(node) + 1) % len(order)]]
        found.append(there[ranks[node].index(rank) % len(there)] if len(order) > 1 else None)
    return found


_kept: KeptState | None = None


def of_process() -> KeptState:
    """Return this rank's kept states, in files of its node. Every rank makes the first call."""
    global _kept
    if _kept is None:
        _kept = KeptState(os.environ[KEPT_IN], int(os.environ[NODE]))
    return _kept
