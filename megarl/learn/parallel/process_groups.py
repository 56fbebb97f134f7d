"""Process groups of one trainer rank, and the collective of context parallelism."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from megarl.config.schema import ParallelConfig
from megarl.core.processes import gloo_device
from megarl.learn.parallel import cpu
from megarl.learn.parallel.grid import check_parallel
from megarl.weights.megatron_private import HYBRID, TRACKER, device_generator, group_names, put_device_generator


class _Gather(torch.autograd.Function):
    """Gather; every rank computes the same loss from the result, so the gradient of its share is a slice, not a sum."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, columns: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.columns = columns[group.rank()]
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine.contiguous(), group=group)
        whole = mine.new_empty(mine.shape[0], columns.numel(), *mine.shape[2:])
        whole[:, columns.flatten()] = torch.cat(parts, dim=1)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0][:, ctx.columns], None, None


def gather_outputs(mine: torch.Tensor, columns: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, S / cp, k] of every rank -> [b, S, k] in the order of the sequence, the same on all ranks of ``group``.

    ``columns``: int64 [cp, S / cp], the positions in S of each rank's share. The backward pass selects a rank's own
    share of the gradient, which is equal on all ranks.
    """
    if group.size() == 1:
        return mine
    result: torch.Tensor = _Gather.apply(mine, columns, group)  # type: ignore[no-untyped-call]
    return result


BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
"""``parallel.backend`` -> torch's backend. Messages about a step stay on the host and use gloo, also with nccl."""
LOOPBACK = "lo"
"""Name of Linux' loopback interface."""
USUAL_S = 600.0


@dataclass(frozen=True)
class Position:
    """Place of this rank in the grid. Global rank = tp_rank + tp * (cp_rank + cp * (dp_rank + dp * pp_rank)),
    Megatron's order.

    Within a stage the same ranks hold the experts, counted as etp_rank + etp * (ep_rank + ep * k).
    """

    rank: int
    tp_rank: int
    cp_rank: int
    dp_rank: int
    pp_rank: int
    etp_rank: int
    ep_rank: int
    is_first_stage: bool
    is_last_stage: bool


def collective_timeout_s(stall_s: float) -> float:
    """Return the timeout of collectives in seconds: torch's default, and longer than ``cluster.stall_s``, after which
    the supervisor reports the stalled rank."""
    return max(USUAL_S, 2 * stall_s)


def initialize(parallel: ParallelConfig, *, seed: int, timeout_s: float = USUAL_S) -> Position:
    """Join the job's world (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and set up Megatron-Core's groups.

    Raises:
        ConfigError: the sizes make no grid (see ``check_parallel``).
        ValueError: the world's size is not tp * cp * dp * pp.
    """
    check_parallel(parallel)
    cpu.install()
    from megatron.core import parallel_state, tensor_parallel

    world = int(os.environ["WORLD_SIZE"])
    if world != parallel.world_size:
        raise ValueError(
            f"WORLD_SIZE={world} is not parallel.tp*cp*dp*pp={parallel.tp}*{parallel.cp}*{parallel.dp}*{parallel.pp}="
            f"{parallel.world_size}"
        )
    if parallel.backend == "nccl":
        torch.manual_seed(seed)  # else Megatron's seeding of a GPU does it
        torch.backends.cudnn.allow_tf32 = (
            False  # a float32 tower was off by 3e-4 on an H200, probably by its convolution
        )
        torch.cuda.set_device(
            int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        )  # an index into the devices that the supervisor made visible
    if not dist.is_initialized():
        gloo_device.share()
        timeout = timedelta(seconds=timeout_s)
        rank = int(os.environ["RANK"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if ipaddress.ip_address(socket.gethostbyname(host)).is_loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # else gloo listens where the host's name points
        dist.init_process_group(
            BACKENDS[parallel.backend],
            store=_store(host, port, world, rank, timeout),
            world_size=world,
            rank=rank,
            timeout=timeout,
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
        distributed_timeout_minutes=ceil(timeout_s / 60),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return position()


def _store(host: str, port: int, world: int, rank: int, timeout: timedelta) -> TCPStore:
    """Open the rendezvous; rank 0 listens on ``host`` only, while torch would listen on every interface."""
    listening = socket.create_server((host, port)).detach() if rank == 0 else None
    return TCPStore(host, port, world, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listening)


def position() -> Position:
    """Return the place of this rank in the active grid."""
    from megatron.core import parallel_state

    return Position(
        rank=dist.get_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        is_first_stage=parallel_state.is_pipeline_first_stage(),
        is_last_stage=parallel_state.is_pipeline_last_stage(),
    )


class Grid:
    """One model's process groups, so that models with different grids alternate in one world.

    Megatron-Core keeps the groups of one grid in module globals. ``active()`` sets them to this grid's, and restores
    them afterwards. It also swaps random generators, so that a model draws the same numbers whichever other models
    exist. The constructor creates the groups: every rank makes its grids in the same order.

    Megatron also accepts a ``ProcessGroupCollection`` in every object, but in 0.16.1 not everywhere. Schedules ask
    ``parallel_state`` for stages and virtual ranks, experts and checkpoints for replica numbers, the optimizer for gloo
    groups. A missed place would silently compute on another model's groups, so all are swapped together.
    """

    def __init__(self, parallel: ParallelConfig, *, seed: int, timeout_s: float = USUAL_S) -> None:
        """Create the groups of ``parallel`` in the existing world, or join it (see ``initialize`` for errors); keep the
        active grid."""
        cpu.install()
        before = _State.taken()
        _State.blank().put()
        try:
            self.parallel = parallel
            self.position = initialize(parallel, seed=seed, timeout_s=timeout_s)
            self._state = _State.taken()
        finally:
            before.put()

    @classmethod
    def initialized(cls, parallel: ParallelConfig) -> Grid:
        """Return the grid that ``initialize`` has activated for good, as an object to reactivate."""
        grid = cls.__new__(cls)
        grid.parallel, grid.position, grid._state = parallel, position(), _State.taken()
        return grid

    @contextmanager
    def active(self) -> Iterator[Position]:
        """Activate this grid for Megatron. May be nested in another grid's context, but not in its own: random numbers
        would repeat."""
        before = _State.taken()
        self._state.put()
        try:
            yield self.position
        finally:
            self._state = _State.taken()  # keep the advanced generators, and buffers made on demand
            before.put()


@dataclass(frozen=True)
class _State:
    """Module state of Megatron-Core for one grid."""

    groups: dict[str, Any]
    """Globals of ``parallel_state``."""
    tracker: dict[str, Any]
    """Globals of ``tensor_parallel.random``: the generators for tensor-parallel values."""
    generator: torch.Tensor
    """State of the device's default generator, which a grid's seed also sets."""

    @classmethod
    def taken(cls) -> _State:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random

        groups = {name: getattr(parallel_state, name) for name in group_names()}
        return cls(groups, {name: getattr(random, name) for name in TRACKER}, device_generator())

    @classmethod
    def blank(cls) -> _State:
        """Return the state before the first grid. It includes the current generator: the next seed resets it."""
        groups: dict[str, Any] = dict.fromkeys(group_names())
        return cls(groups | {HYBRID: {}}, dict(TRACKER), device_generator())

    def put(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random

        for module, values in ((parallel_state, self.groups), (random, self.tracker)):
            for name, value in values.items():
                setattr(module, name, value)
        put_device_generator(self.generator)
