"""Exact readback of a vLLM model's weights from the forms that vLLM makes for its kernels.

On CPU a linear layer keeps a matrix packed for oneDNN, experts are permuted and padded, and latent attention has
matrices derived from its projection. Runs inside vLLM's workers.
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
    """Return True if the module computes from a packed copy; lm_head also keeps its weight, and uses it if its logits
    have another dtype than the model (``plain_head``)."""
    alone = (isinstance(module, ParallelLMHead) and not plain_head) or (
        isinstance(module, LinearBase) and module.weight.numel() == 0
    )
    return alone and hasattr(module, "cpu_linear")


def packed_experts(module: Any) -> Any | None:
    """Return the CPU kernel that permutes this module's weights; None without one."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    experts: Any = getattr(kernel, "fused_experts", None)
    permutes = isinstance(module, RoutedExperts) and isinstance(experts, CPUUnquantizedExperts)
    return experts if permutes and not experts._use_zentorch else None


def unpack_linear(module: Any) -> torch.Tensor:
    """Return W [out, in] of ``x -> x W^T``, as the image of the identity: exact except for negative zeros and subnormal
    numbers."""
    weight = module.weight  # empty if only the packed copy is left
    columns = _in_features(module)
    blocks = []
    for start in range(0, columns, _UNPACK_COLUMNS):
        rows = min(_UNPACK_COLUMNS, columns - start)
        unit = torch.zeros(rows, columns, dtype=weight.dtype)
        unit[:, start : start + rows].fill_diagonal_(1)
        blocks.append(module.cpu_linear(unit, weight, None).t())
    return torch.cat(blocks, dim=1).contiguous()


def unpack_experts(packed: torch.Tensor, isa: str, shape: Shape, *, gated: bool) -> torch.Tensor:
    """Return the stack [E, rows, columns] of ``shape`` from the CPU kernel's packed form.

    Packing pads the experts' width, which is the columns (``w2``) or, when ``gated``, each half of the rows (``w13``),
    and then permutes each expert in the same way; the permutation is read from a packed expert of index numbers.
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
    """Return kv_b_proj -> the latent attention that derives its matrices from it."""
    return {module.kv_b_proj: module for module in model.modules() if isinstance(module, MLAAttention)}


def latent_weight(attention: Any) -> torch.Tensor:
    """Return kv_b_proj.weight [heads * (nope + v), kv_lora] as used by latent attention.

    Prompts use the projection, sampled tokens two matrices derived from it. If these differ from the projection, their
    values are returned, so that a comparison fails.
    """
    weight: torch.Tensor = attention.kv_b_proj.weight.data
    absorbed = torch.cat([attention.W_UK_T.data, attention.W_UV.data.transpose(1, 2)], dim=1)
    absorbed = absorbed.reshape(-1, absorbed.shape[-1])
    return weight if torch.equal(absorbed, weight) else absorbed


def _in_features(module: Any) -> int:
    if isinstance(module, ParallelLMHead):
        return int(module.embedding_dim)
    return int(getattr(module, "input_size_per_partition", None) or module.input_size)
