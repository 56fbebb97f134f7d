"""Entry point of vLLM's ``vllm.general_plugins``: weight receiver, and the single adapter of all requests."""

from __future__ import annotations

import os
from functools import wraps
from inspect import signature
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from megarl.core.imports import do_without_videos
from megarl.core.processes import gloo_device, heartbeat
from megarl.core.processes.machine import end_after_parent
from megarl.core.processes.secrets import hide_secrets
from megarl.engines.client.names import ADAPTERS, CPU_ROUTING

ADAPTER = LoRARequest("policy-adapter", 1, "/in/memory")
"""Its name, number and path; vLLM requires the path but never reads it."""


def install() -> None:
    """Give every request the adapter if the engine has LoRA layers; a second call changes nothing.

    Until a trainer joins, the adapter is zero and has no effect.
    """
    from vllm.v1.engine.input_processor import InputProcessor  # in servers only; workers do without

    process: Any = InputProcessor.process_inputs
    if getattr(process, "adapted", False):
        return

    @wraps(process)
    def process_inputs(self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
        if self.lora_config is not None:
            kwargs["lora_request"] = ADAPTER  # vLLM's callers pass it by name
        return process(self, *args, **kwargs)

    process_inputs.adapted = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_inputs  # type: ignore[method-assign]
    WorkerLoRAManager._load_adapter = lambda self, request: of_zeros(request)  # type: ignore[method-assign]
    PunicaWrapperCPU.add_lora_linear = _add_lora_linear  # type: ignore[method-assign]


def of_zeros(request: LoRARequest) -> LoRAModel:
    """Return an adapter that changes nothing. vLLM requires a layer, so it has one that matches no module."""
    layer = LoRALayerWeights.create_dummy_lora_weights("nothing", 1, 1, 1, torch.float32, "cpu")
    return LoRAModel(request.lora_int_id, 1, {layer.module_name: layer})


def _add_lora_linear(
    self: PunicaWrapperCPU,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """Add scale · x Aᵀ Bᵀ to ``y`` in place, in float32. vLLM's version copies B for each token: gigabytes for prompts
    of a small model."""
    if self.no_lora:
        return
    rows, into, at = x.reshape(-1, x.shape[-1]).float(), y.view(-1, y.shape[-1]), 0
    for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        inner = rows @ a[0, 0].float().t()
        into[:, at : at + size] += (scale * (inner @ b[0, 0].float().t())).to(y.dtype)
        at += size


BACKEND = "megarl"


def register() -> None:
    """Register the weight-transfer backend ``megarl``; vLLM may call it more than once in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # register_engine raises on a second call and has no query.
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "megarl.engines.sync.receiver", "Receiver")
    hide_secrets()
    do_without_videos()
    if heartbeat.listen() is not None:  # set by a supervisor
        end_after_parent()
    gloo_device.share()
    _fork_on_cpu()
    wait_for_calls()
    if os.environ.get(CPU_ROUTING):
        from megarl.engines.cpu.routing import install

        install()
    if os.environ.get(ADAPTERS):
        install()


SPIN_S = 0.001
"""Seconds for which a worker on CPU polls for its next call before it sleeps until woken."""
LOOK_MS = 20
"""Milliseconds between a sleeping worker's checks for a call."""


def wait_for_calls() -> None:
    """Patch the waits for calls of workers in engines with several workers.

    vLLM's workers busy-wait for a second after each call, which on CPU takes cores from other processes of the job. A
    sleeping worker then checks only every 5 s if its wake-up is lost, which happens while the socket's queue of one
    counts as full.
    """
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = LOOK_MS
    start: Any = shm_broadcast.SpinCondition.__init__
    if current_platform.is_cpu() and signature(start).parameters["busy_loop_s"].default != SPIN_S:
        start.__defaults__ = (SPIN_S,)


def _fork_on_cpu() -> None:
    """Let workers be forked on CPU: vLLM starts its engine core and workers in fresh interpreters, to set their OpenMP
    environment. ``engine_process`` has set it for all of them already; forking, as vLLM does elsewhere, saves each the
    8 s and the memory of importing vLLM."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or os.environ.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind":
        return
    platform: Any = type(current_platform)
    configure = platform.check_and_update_config
    if getattr(configure, "forks", False):
        return

    def check_and_update_config(vllm_config: Any) -> None:
        configure(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    check_and_update_config.forks = True  # type: ignore[attr-defined]
    platform.check_and_update_config = staticmethod(check_and_update_config)
