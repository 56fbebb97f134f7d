"""Process groups of one trainer rank: torch.distributed and Megatron-Core's parallel state."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from megarl.config.schema import ParallelConfig
from megarl.parallel import cpu
from megarl.parallel.grid import check_parallel

LOOPBACK = "lo"
"""Linux' name of the interface."""


@dataclass(frozen=True)
class Position:
    """Where this rank stands in the grid. Global rank = tp_rank + tp * (cp_rank + cp * (dp_rank + dp * pp_rank)), Megatron's order.

    Within a stage the same ranks, counted as etp_rank + etp * (ep_rank + ep * k), hold the experts.
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

    @property
    def reports(self) -> bool:
        """One rank of each data-parallel replica holds the losses and log-probs that metrics count."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0


def initialize(parallel: ParallelConfig, *, seed: int, timeout_s: float = 600.0) -> Position:
    """Join the job's world (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and set up Megatron-Core's groups.

    Raises:
        ConfigError: no grid has these sizes (see ``check_parallel``).
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
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    if not dist.is_initialized():
        timeout = timedelta(seconds=timeout_s)
        rank = int(os.environ["RANK"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if ipaddress.ip_address(socket.gethostbyname(host)).is_loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # gloo would listen where the host's name points
        dist.init_process_group(
            parallel.backend, store=_store(host, port, world, rank, timeout), world_size=world, rank=rank, timeout=timeout
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return position()


def _store(host: str, port: int, world: int, rank: int, timeout: timedelta) -> TCPStore:
    """The rendezvous; rank 0 listens on ``host`` alone, where torch would listen on every interface of the machine."""
    listening = socket.create_server((host, port)).detach() if rank == 0 else None
    return TCPStore(host, port, world, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listening)


def position() -> Position:
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
