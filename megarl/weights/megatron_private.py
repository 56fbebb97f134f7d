"""Private parts of Megatron-Core that megarl uses; patches for CPUs are in ``learn/parallel/cpu.py``.

Supports versions 0.16.1 and 0.19.2. Imports Megatron inside functions: most of ``weights/`` works without it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import queue
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

MTP_INNER = "transformer_layer.", "mtp_model_layer."
"""Names of the inner layer of a prediction layer: up to 0.16, and later."""
TRACKER = {"_CUDA_RNG_STATE_TRACKER": None, "_CUDA_RNG_STATE_TRACKER_INITIALIZED": False}
"""Globals of tensor_parallel.random -> initial values."""
HYBRID = "_HYBRID_DP_CP_GROUPS"
"""The only dict among the globals of parallel_state, filled in place; all others start as ``None``."""
_SHARED = {"_global_process_group_list"}
"""Attributes that belong to no grid: the list of all groups ever made."""


def silence() -> None:
    """Silence what Megatron logs of its settings, and its warnings of fusions that need TransformerEngine or apex;
    `megarl doctor` lists these fusions. Call it before Megatron is imported."""
    for name in ("megatron.core.rerun_state_machine", "megatron.core.optimizer"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("megatron").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")


@functools.cache
def mtp_inner() -> str:
    """Name of the inner layer of a prediction layer in the installed Megatron-Core; the later name if not installed."""
    try:
        installed = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return MTP_INNER[1]
    return MTP_INNER[[int(part) for part in installed.split(".")[:2]] >= [0, 17]]


def group_names() -> list[str]:
    """Globals of parallel_state that belong to one grid, found by their spelling, so that new ones are included."""
    from megatron.core import parallel_state

    return [name for name in vars(parallel_state) if name.startswith("_") and name.isupper() and name not in _SHARED]


def device_generator() -> torch.Tensor:
    """State of the device's default generator, uint8."""
    from megatron.core.tensor_parallel import random

    state: torch.Tensor = random._get_cuda_rng_state()
    return state


def put_device_generator(state: torch.Tensor) -> None:
    """Restore a state from ``device_generator``."""
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state(state)


def first_element(optimizer: Any, parameter: torch.nn.Parameter) -> int:
    """Index of the first element of a flat parameter on this rank of a distributed optimizer."""
    return int(optimizer._get_model_param_range_map(parameter)["param"].start)


@contextmanager
def without_master_copies(optimizer: Any) -> Iterator[None]:
    """Make a distributed optimizer's step leave the copying of masters into the parameters to its caller."""
    optimizer._copy_main_params_to_model_params = lambda: None
    try:
        yield
    finally:
        del optimizer._copy_main_params_to_model_params


def optimizer_state(optimizer: Any, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Master (``param``) and moments of a parameter's elements on this rank of a distributed optimizer."""
    found: dict[str, torch.Tensor] = optimizer._get_main_param_and_optimizer_states(parameter)
    return found


def keep_float32_bias(router: Any) -> None:
    """Convert a router's expert bias back to float32, if it has one."""
    if hasattr(router, "_maintain_float32_expert_bias"):
        router._maintain_float32_expert_bias()


def own_writer() -> dict[str, Any]:
    """Arguments of ``dist_checkpointing.save`` that select Megatron-Core's writer: later versions use
    nvidia-resiliency-ext's if that is installed."""
    from megatron.core import dist_checkpointing

    known = inspect.signature(dist_checkpointing.save).parameters
    return {"async_strategy": "mcore"} if "async_strategy" in known else {}


def common_writers() -> list[tuple[Any, str]]:
    """(owner, name) of functions that write the common state to a separate file; later versions have none."""
    from megatron.core.dist_checkpointing.strategies import common

    strategy = getattr(common, "TorchCommonSaveStrategy", None)
    return [] if strategy is None else [(strategy, "save_common")]


def submodules_of(spec: Any, module: type) -> Any:
    """Submodules of a spec that builds ``module``, else ``None``. A spec is a ModuleSpec, in 0.19 also a partial."""
    if isinstance(spec, functools.partial):
        return spec.keywords["submodules"] if spec.func is module else None
    return spec.submodules if spec.module is module else None


def parts_in_checkpoint(tensor: Any, sizes: list[int], names: list[str]) -> Any:
    """Give parts of a ShardedTensor's first axis, with these local sizes, a key each in Megatron's checkpoints."""
    from megatron.core.ssm.gated_delta_net import _split_tensor_factory

    return _split_tensor_factory(tensor, sizes, names, 0)


@functools.cache
def keep_query_projection() -> None:
    """Make latent attention without a query latent follow its spec: 0.19 adds a norm before the query projection, which
    no DeepSeek checkpoint has."""
    try:
        from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
    except ImportError:  # 0.16
        return
    normed = QKNormConfigResolver._mla_fused_linear_or_default

    def projection(self: Any, spec: Any, name: str) -> Any:
        return spec if name == "linear_q_proj" else normed(self, spec, name)

    QKNormConfigResolver._mla_fused_linear_or_default = projection


def put_results_queue(results: queue.SimpleQueue[Any]) -> None:
    """Set the queue of the asynchronous checkpoint writer. Otherwise it spawns a manager on every rank, which imports
    torch and stays until the job ends."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = results
