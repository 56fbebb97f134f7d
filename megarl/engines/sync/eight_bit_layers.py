"""Layers that vLLM keeps in 8 bits, and megarl's computation of their 8-bit form.

Linear layers have one float32 scale for each output channel (vLLM's ``fp8_per_channel``), experts one for each block of
128 × 128 (``fp8_per_block``); numbers are float8_e4m3fn. Only the memory order for a kernel comes from vLLM. Runs
inside vLLM's workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.fused_moe.oracle.fp8 import convert_to_fp8_moe_kernel_format
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineMoEMethod, Fp8PtpcOnlineLinearMethod

from megarl.engines.client.names import EIGHT_BIT_BLOCK as BLOCK

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest number of float8_e4m3fn."""
SMALLEST_SCALE = 1 / (LARGEST * 512)
"""Smallest scale, for channels of zeros or tiny numbers (vLLM's)."""
SMALLEST_OF_BLOCK = 1e-4
"""Lower bound on the largest number of a block (vLLM's)."""
ELEMENTS = 16 << 20
"""Elements of a linear layer quantised in one piece."""

Tensors = Mapping[str, torch.Tensor]


class Layer(Protocol):
    """A layer in 8 bits."""

    @property
    def path(self) -> str:
        """Name of its module in the model."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that arrive."""

    @property
    def waits(self) -> bool:
        """True if its scales depend on elements of several workers, which must agree on them."""

    def made(self, weights: Tensors) -> Tensors:
        """Make the expected 8-bit form, by name, from the ``weights`` that arrived for its parameters."""

    def held(self) -> Tensors:
        """Return the layer's actual 8-bit form, by the same names."""


def layers_of(model: nn.Module) -> dict[nn.Module, Layer]:
    """Return module -> layer for all layers that ``model`` keeps in 8 bits."""
    found: dict[nn.Module, Layer] = {}
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, Fp8PtpcOnlineLinearMethod):
            found[module] = Linear(path, module)
        elif isinstance(method, Fp8PerBlockOnlineMoEMethod):
            found[module] = Experts(path, module)
    return found


class Linear:
    """A linear layer."""

    parameters = ("weight",)

    def __init__(self, path: str, module: Any) -> None:
        self.path = path
        self._module = module
        self.waits = bool(module.tp_size > 1 and module.input_size != module.input_size_per_partition)

    def made(self, weights: Tensors) -> Tensors:
        weight = weights["weight"]
        largest = largest_of_channels(weight)
        if self.waits:
            group = get_tp_group().device_group
            torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
        numbers, scales = quantised(weight, largest)
        made = nn.Module()
        made.weight, made.weight_scale = (nn.Parameter(x, requires_grad=False) for x in (numbers.t(), scales))
        self._module.quant_method.fp8_linear.process_weights_after_loading(made)
        return _linear(made)

    def held(self) -> Tensors:
        return _linear(self._module)


class Experts:
    """The experts of a layer. The kernel has separate references to the scales, so these are compared too."""

    parameters = ("w13_weight", "w2_weight")
    waits = False

    def __init__(self, path: str, module: Any) -> None:
        self.path = path
        self._module = module

    def made(self, weights: Tensors) -> Tensors:
        (w13, w13_scales), (w2, w2_scales) = (_stack(weights[name]) for name in self.parameters)
        method = self._module.quant_method
        kernel = convert_to_fp8_moe_kernel_format(
            fp8_backend=method.fp8_backend, layer=self._module, w13=w13, w2=w2, w13_scale=w13_scales,
            w2_scale=w2_scales, w13_input_scale=None, w2_input_scale=None,
        )  # fmt: skip
        return _experts(*kernel, *kernel[2:])

    def held(self) -> Tensors:
        module = self._module
        kernel = module.quant_method.moe_quant_config
        return _experts(
            module.w13_weight.data, module.w2_weight.data, module.w13_weight_scale_inv.data,
            module.w2_weight_scale_inv.data, kernel.w1_scale.data, kernel.w2_scale.data,
        )  # fmt: skip


def _linear(module: Any) -> Tensors:
    return {"weight": module.weight.data, "weight_scale": module.weight_scale.data}


def _experts(*tensors: torch.Tensor) -> Tensors:
    names = ("w13_weight", "w2_weight", "w13_weight_scale_inv", "w2_weight_scale_inv", "w1_scale", "w2_scale")
    return dict(zip(names, tensors, strict=True))


def _stack(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8-bit form of each expert [rows, columns] of ``weights`` [E, rows, columns], one at a time."""
    experts, rows, columns = weights.shape
    numbers = torch.empty_like(weights, dtype=FP8)
    scales = torch.empty(experts, rows // BLOCK, columns // BLOCK, dtype=torch.float32, device=weights.device)
    for expert, weight in enumerate(weights):
        numbers[expert], scales[expert] = quantised_blocks(weight)
    return numbers, scales


def largest_of_channels(weight: torch.Tensor) -> torch.Tensor:
    """max |weight| [out, 1], float32, of each output channel of ``weight`` [out, in]."""
    low, high = weight.aminmax(dim=1, keepdim=True)
    return torch.maximum(-low, high).float()


def quantised(weight: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 8-bit form of ``weight`` [out, in]: numbers [out, in] in float8_e4m3fn, the nearest to weight / scale,
    and scales [out, 1] in float32, usually ``largest`` / 448."""
    scales = (largest / torch.tensor(LARGEST, device=weight.device)).clamp_min(SMALLEST_SCALE)
    numbers = torch.empty_like(weight, dtype=FP8)
    rows = max(1, ELEMENTS // weight.shape[1])
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        numbers[part] = (weight[part].float() / scales[part]).clamp(-LARGEST, LARGEST).to(FP8)
    return numbers, scales


def quantised_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8-bit form of ``weight`` [rows, columns] by whole blocks of 128 × 128: numbers [rows, columns] in
    float8_e4m3fn, the nearest to weight · (1 / scale) as vLLM takes it, and scales [blocks, blocks] in float32."""
    rows, columns = weight.shape
    blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)).float().clamp_min(SMALLEST_OF_BLOCK) / LARGEST
    return (blocks.float() * (1 / scales)[:, None, :, None]).to(FP8).view(rows, columns), scales
