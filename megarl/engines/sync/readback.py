"""Reads back what a vLLM model really computes with, bit by bit, where vLLM keeps only a form made for its kernels.

On CPU a linear layer keeps a matrix packed for oneDNN, experts lie permuted and padded, and latent attention has
matrices of its own beside the projection that they come from. Runs inside vLLM's workers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

Shape = tuple[int, ...]

_UNPACK_COLUMNS = 256


def may_be_packed(module: nn.Module) -> bool:
    return isinstance(module, LinearBase | ParallelLMHead)


def is_packed_linear(module: Any, *, plain_head: bool = False) -> bool:
    """Return True if it computes from a packed copy; lm_head keeps its weight beside that, and computes from the weight
    where its logits have another type than the model (``plain_head``)."""
    alone = (isinstance(module, ParallelLMHead) and not plain_head) or (
        isinstance(module, LinearBase) and module.weight.numel() == 0
    )
    return alone and hasattr(module, "cpu_linear")


def packed_experts(module: Any) -> Any | None:
    """The CPU kernel that permutes this module's weights; None where the module has no such kernel."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    experts: Any = getattr(kernel, "fused_experts", None)
    permutes = isinstance(module, RoutedExperts) and isinstance(experts, CPUUnquantizedExperts)
    return experts if permutes and not experts._use_zentorch else None


def unpack_linear(module: Any) -> torch.Tensor:
    """W [out, in] of ``x -> x W^T``: the image of the identity, which is exact but for negative zeros and subnormal
    numbers."""
    weight = module.weight  # empty where only the packed copy is left
    columns = _in_features(module)
    blocks = []
    for start in range(0, columns, _UNPACK_COLUMNS):
        rows = min(_UNPACK_COLUMNS, columns - start)
        unit = torch.zeros(rows, columns, dtype=weight.dtype)
        unit[:, start : start + rows].fill_diagonal_(1)
        blocks.append(module.cpu_linear(unit, weight, None).t())
    return torch.cat(blocks, dim=1).contiguous()


def unpack_experts(packed: torch.Tensor, isa: str, shape: Shape, *, gated: bool) -> torch.Tensor:
    """The stack [E, rows, columns] of ``shape`` that the CPU kernel's form was packed from.

    Packing pads the experts' width, which is the columns (``w2``) or, when ``gated``, each half of the rows (``w13``),
    and then permutes each expert in the same way: where a number goes is read off a packed expert of numbers.
    """
    padded = packed[0].numel()
    source = torch.zeros(padded, dtype=torch.int64)
    number = torch.arange(padded)
    base = 1 << 8  # whole numbers below it are exact in every float type
    scale = 1
    while scale < padded:
        digit = (number // scale % base).to(packed.dtype).view(1, *packed.shape[1:])
        source += cpu_prepack_moe_weight(digit, isa).view(-1).long() * scale
        scale *= base
    experts, rows, columns = shape
    plain = torch.empty_like(packed).view(experts, padded)
    plain[:, source] = packed.reshape(experts, padded)
    if not gated:
        return plain.view(packed.shape)[:, :, :columns].contiguous()
    halves = plain.view(experts, 2, -1, columns)[:, :, : rows // 2]
    return halves.reshape(shape)


def latent_projections(model: nn.Module) -> dict[nn.Module, Any]:
    """kv_b_proj -> the latent attention that makes its own matrices from it."""
    return {module.kv_b_proj: module for module in model.modules() if isinstance(module, MLAAttention)}


def latent_weight(attention: Any) -> torch.Tensor:
    """kv_b_proj.weight [heads * (nope + v), kv_lora] as latent attention computes with it.

    Prompts go through the projection itself, sampled tokens through two matrices made from it: where those differ from
    the projection, theirs is returned, so that whoever compares it sees it.
    """
    weight: torch.Tensor = attention.kv_b_proj.weight.data
    absorbed = torch.cat([attention.W_UK_T.data, attention.W_UV.data.transpose(1, 2)], dim=1)
    absorbed = absorbed.reshape(-1, absorbed.shape[-1])
    return weight if torch.equal(absorbed, weight) else absorbed


def _in_features(module: Any) -> int:
    if isinstance(module, ParallelLMHead):
        return int(module.embedding_dim)
    return int(getattr(module, "input_size_per_partition", None) or module.input_size)
