"""The single adapter of all requests of an engine (``sync.adapter=separate``), set in each of vLLM's processes:
requests do not name it, and it has no file."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

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
