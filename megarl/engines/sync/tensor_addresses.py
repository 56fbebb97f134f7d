"""Addresses of a vLLM model's tensors: a sync must not move them, because CUDA graphs read fixed addresses. Runs inside
vLLM's workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megarl.core.errors import WeightSyncError, first_of

LATENT = frozenset(("W_UV", "W_UK_T"))
"""Matrices that latent attention derives from ``kv_b_proj`` at the end of every update."""
ADAPTERS = ("lora_a_stacked", "lora_b_stacked")
"""Buffers of vLLM's LoRA layers, one for each tensor that is fused in a layer."""
_SHOWN = 4


class Address(NamedTuple):
    """Place of a tensor in memory."""

    pointer: int
    """``data_ptr()``; 0 if the storage is empty."""
    nbytes: int
    """Bytes of its whole storage."""

    def __str__(self) -> str:
        return f"{self.pointer:#x} ({self.nbytes} bytes)"


def addresses_of(model: nn.Module) -> dict[str, Address]:
    """Return name -> address of every parameter and buffer of ``model`` and of latent attention's matrices, including
    those set aside by a running update."""
    return {
        f"{path}.{name}": Address(tensor.data_ptr(), tensor.untyped_storage().nbytes())
        for path, module in model.named_modules()
        for name, tensor in _tensors(module)
        if not tensor.is_meta
    }


def check_addresses(before: Mapping[str, Address], after: Mapping[str, Address]) -> None:
    """Compare addresses before and after a sync. Raises WeightSyncError naming the tensors that were moved, resized,
    removed or added."""
    moved = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    if not moved:
        return
    texts = [f"{name} from {before.get(name, 'nowhere')} to {after.get(name, 'nowhere')}" for name in moved]
    raise WeightSyncError(
        f"the sync moved tensors of the engine's model: {first_of(texts, _SHOWN)}; captured graphs read the old "
        "addresses, so the engine must be started again"
    )


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    aside = get_layerwise_info(module).kernel_tensors
    parameters, buffers = (module._parameters, module._buffers) if aside is None else aside
    latent = {name: value for name, value in vars(module).items() if name in LATENT}
    adapters = {
        f"{name}.{number}": tensor
        for name in ADAPTERS
        if isinstance(stacked := vars(module).get(name), tuple)
        for number, tensor in enumerate(stacked)
    }
    for name, tensor in (*latent.items(), *adapters.items(), *parameters.items(), *buffers.items()):
        if isinstance(tensor, torch.Tensor):
            yield name, tensor
