"""Experts with biases whose first matrix alternates gate and up rows, for Megatron's local spec (gpt-oss).

Files and vLLM use the same order, so that any contiguous share of the rows has whole pairs.

Shape legend: t tokens, f width of an expert on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer

from megarl.weights.megatron_private import submodules_of

ALPHA, LIMIT = 1.702, 7.0
"""``swiglu_alpha`` and ``swiglu_limit`` of config.json; the architecture table accepts no other values."""


def clamped_swiglu(x: torch.Tensor) -> torch.Tensor:
    """[t, 2f], with gate and up alternating -> [t, f]."""
    gate, up = x[..., ::2].clamp(max=LIMIT), x[..., 1::2].clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))


class PairedLinear(ColumnParallelLinear):  # type: ignore[misc]
    """An expert's first linear layer, with two rows for each output of the activation."""

    def __init__(self, input_size: int, output_size: int, **arguments: Any) -> None:
        super().__init__(input_size, 2 * output_size, **arguments)


class BiasedOnce(RowParallelLinear):  # type: ignore[misc]
    """An expert's second linear layer; only the first of the ranks that share an expert adds the bias."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # Each rank has the bias's whole gradient (``_OnFirst``), so it is not summed over ranks.
        self.bias.sequence_parallel = False
        # With etp = 1 a rank has whole experts, and counts their biases in the gradient norm.
        self.bias.tensor_model_parallel = parallel_state.get_expert_tensor_parallel_world_size() == 1

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[t, f] -> (this rank's share of the output, its share of the bias)."""
        out, bias = super().forward(x)
        out = out if self.explicit_expert_comm else out.clone()  # Megatron adds in place, and this tensor is a view
        return out, _OnFirst.apply(bias, parallel_state.get_expert_tensor_parallel_rank() == 0)


class _OnFirst(torch.autograd.Function):
    """Return the bias on the first rank and zeros on the others; every rank gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, is_first: bool) -> torch.Tensor:
        return bias.clone() if is_first else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


def pair(block: Any) -> None:
    """Put these layers into the experts of a TransformerBlockSubmodules."""
    for layer in block.layer_specs:
        if (moe := submodules_of(layer.submodules.mlp, MoELayer)) is not None:
            moe.experts.submodules.linear_fc1, moe.experts.submodules.linear_fc2 = PairedLinear, BiasedOnce
