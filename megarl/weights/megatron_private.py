"""Private parts of Megatron-Core that megarl uses; the patches for a CPU are in ``learn/parallel/cpu.py``.

Versions 0.16.1 and 0.19.2 are met here. Imports it inside the functions: most of ``weights/`` works without.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import queue
from typing import Any

import torch

MTP_INNER = "transformer_layer.", "mtp_model_layer."
"""Names of the layer within a model's prediction layer: up to 0.16, and since."""
TRACKER = {"_CUDA_RNG_STATE_TRACKER": None, "_CUDA_RNG_STATE_TRACKER_INITIALIZED": False}
"""Globals of tensor_parallel.random -> as they start."""
HYBRID = "_HYBRID_DP_CP_GROUPS"
"""The one global of parallel_state that is a dict, filled in place; all others start as None."""
_SHARED = {"_global_process_group_list"}
"""Attributes that belong to no single grid: the list of all groups that were ever made."""


@functools.cache
def mtp_inner() -> str:
    """Name of the layer within a prediction layer, of the Megatron-Core that is installed; without one the later."""
    try:
        installed = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return MTP_INNER[1]
    return MTP_INNER[[int(part) for part in installed.split(".")[:2]] >= [0, 17]]


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


def optimizer_state(optimizer: Any, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Master (``param``) and moments of the elements of a parameter that this rank of a distributed optimizer has."""
    found: dict[str, torch.Tensor] = optimizer._get_main_param_and_optimizer_states(parameter)
    return found


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


@functools.cache
def keep_query_projection() -> None:
    """Have latent attention without a latent of the query project it as its spec says: 0.19 puts a norm before it,
    which no checkpoint of DeepSeek has."""
    try:
        from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
    except ImportError:  # 0.16
        return
    normed = QKNormConfigResolver._mla_fused_linear_or_default

    def projection(self: Any, spec: Any, name: str) -> Any:
        return spec if name == "linear_q_proj" else normed(self, spec, name)

    QKNormConfigResolver._mla_fused_linear_or_default = projection


def put_results_queue(results: queue.SimpleQueue[Any]) -> None:
    """Give the asynchronous writer of checkpoints its queue: it would spawn a manager for one on every rank, which
    imports torch and stays until the job ends."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = results
