"""Private parts of Megatron-Core that megarl uses; the patches for a CPU are in ``learn/parallel/cpu.py``.

Versions 0.16.1 and 0.19.2 are met here. Imports it inside the functions: most of ``weights/`` works without.
"""

from __future__ import annotations

import functools
import inspect
import queue
from typing import Any

import torch

TRACKER = {"_CUDA_RNG_STATE_TRACKER": None, "_CUDA_RNG_STATE_TRACKER_INITIALIZED": False}
"""Globals of tensor_parallel.random -> as they start."""
HYBRID = "_HYBRID_DP_CP_GROUPS"
"""The one global of parallel_state that is a dict, filled in place; all others start as None."""
_SHARED = {"_global_process_group_list"}
"""Attributes that belong to no single grid: the list of all groups that were ever made."""


def group_names() -> list[str]:
    """Globals of parallel_state that belong to one grid: by how they are written, so that none of a newer version is
    missed."""
    from megatron.core import parallel_state

    return [name for name in vars(parallel_state) if name.startswith("_") and name.isupper() and name not in _SHARED]


def device_generator() -> torch.Tensor:
    """State of the device's own generator, uint8."""
    from megatron.core.tensor_parallel import random

    state: torch.Tensor = random._get_cuda_rng_state()
    return state


def put_device_generator(state: torch.Tensor) -> None:
    """Restore what ``device_generator`` returned."""
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state(state)


def first_element(optimizer: Any, parameter: torch.nn.Parameter) -> int:
    """First element of a flat parameter that this rank of a distributed optimizer has."""
    return int(optimizer._get_model_param_range_map(parameter)["param"].start)


def keep_padding(optimizer: Any) -> None:
    """Let Megatron-Core gather a distributed optimizer's state with the padding at the ends of buckets. Safe to call
    twice.

    It gathers without, but slices parameters by places that count it: those behind the first bucket would be others.
    """
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        for buffer in [] if each.is_stub_optimizer else each.buffers:
            buffer.numel_unpadded = buffer.numel
            for bucket in buffer.buckets:
                bucket.numel_unpadded = bucket.grad_data.numel()


def keep_float32_bias(router: Any) -> None:
    """Put a router's bias of experts back to float32, where it has one."""
    if hasattr(router, "_maintain_float32_expert_bias"):
        router._maintain_float32_expert_bias()


def own_writer() -> dict[str, Any]:
    """Arguments of ``dist_checkpointing.save`` by which Megatron-Core's own writer makes the request: later versions
    take that of nvidia-resiliency-ext, where it is installed."""
    from megatron.core import dist_checkpointing

    known = inspect.signature(dist_checkpointing.save).parameters
    return {"async_strategy": "mcore"} if "async_strategy" in known else {}


def common_writers() -> list[tuple[Any, str]]:
    """(owner, name) of what writes the common state into a file of its own; later versions keep it among the data."""
    from megatron.core.dist_checkpointing.strategies import common

    strategy = getattr(common, "TorchCommonSaveStrategy", None)
    return [] if strategy is None else [(strategy, "save_common")]


def submodules_of(spec: Any, module: type) -> Any:
    """Submodules of a spec that makes ``module``, else None: a ModuleSpec, in 0.19 a partial of the class."""
    if isinstance(spec, functools.partial):
        return spec.keywords["submodules"] if spec.func is module else None
    return spec.submodules if spec.module is module else None


def put_results_queue(results: queue.SimpleQueue[Any]) -> None:
    """Give the asynchronous writer of checkpoints its queue: it would spawn a manager for one on every rank, which
    imports torch and stays until the job ends."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = results
