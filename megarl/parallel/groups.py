"""Process groups of one trainer rank: torch.distributed and Megatron-Core's parallel state."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.config.schema import ParallelConfig
from megarl.parallel import cpu


@dataclass(frozen=True)
class Position:
    """Where this rank stands in the grid. Global rank = tp_rank + tp * (dp_rank + dp * pp_rank), Megatron's order."""

    rank: int
    tp_rank: int
    dp_rank: int
    pp_rank: int
    is_first_stage: bool
    is_last_stage: bool

    @property
    def reports(self) -> bool:
        """One rank of each data-parallel replica holds the losses and log-probs that metrics count."""
        return self.is_last_stage and self.tp_rank == 0


def initialize(parallel: ParallelConfig, *, seed: int, timeout_s: float = 600.0) -> Position:
    """Join the job's world (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and set up Megatron-Core's groups.

    Raises:
        ValueError: the world's size is not tp * pp * dp.
    """
    cpu.install()
    from megatron.core import parallel_state, tensor_parallel

    world = int(os.environ["WORLD_SIZE"])
    if world != parallel.world_size:
        raise ValueError(
            f"WORLD_SIZE={world} is not parallel.tp*pp*dp={parallel.tp}*{parallel.pp}*{parallel.dp}={parallel.world_size}"
        )
    if parallel.backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    if not dist.is_initialized():
        dist.init_process_group(parallel.backend, timeout=timedelta(seconds=timeout_s))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp, pipeline_model_parallel_size=parallel.pp
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return position()


def position() -> Position:
    from megatron.core import parallel_state

    return Position(
        rank=dist.get_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        is_first_stage=parallel_state.is_pipeline_first_stage(),
        is_last_stage=parallel_state.is_pipeline_last_stage(),
    )


def device(parallel: ParallelConfig) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if parallel.backend == "nccl" else torch.device("cpu")
