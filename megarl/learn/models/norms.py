"""Norms for Megatron's local spec; multipliers of embeddings, residuals and logits.

Shape legend: h query heads (or key heads) of this rank, d width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megarl.weights.architectures.megatron_config import Multipliers
from megarl.weights.architectures.table import NormRules

WithBias = tuple[torch.Tensor, torch.Tensor | None]


class Residual(torch.nn.Module):
    """Adds a layer's output, normed and multiplied, to the residual; replaces Megatron's bias-dropout-add (without
    dropout).

    Args:
        norm: Makes the norm; None for a family without one.
        scaled: Multiply the sum by ``scalar`` [1], which training keeps.
    """

    def __init__(
        self, multiplier: float, norm: Callable[[], torch.nn.Module] | None = None, scaled: bool = False
    ) -> None:
        super().__init__()
        self.multiplier = multiplier
        self.norm = None if norm is None else norm()
        self.scalar = torch.nn.Parameter(torch.ones(1), requires_grad=False) if scaled else None

    def forward(self, training: bool, fused: bool) -> Callable[[WithBias, torch.Tensor, float], torch.Tensor]:
        """Return the function of (output and bias, residual, dropout) that Megatron's layers call."""

        def add(output: WithBias, residual: torch.Tensor, dropout: float) -> torch.Tensor:
            x, bias = output
            # Megatron enables gradients here; if the layer has none, the norm's weight must not begin a graph.
            with torch.set_grad_enabled(x.requires_grad):
                x = x if bias is None else x + bias
                x = x if self.norm is None else self.norm(x)
                total = residual + x * self.multiplier
                return total if self.scalar is None else total * self.scalar

        return add


def install(stage: Any, numbers: Multipliers, *, logits: bool) -> None:
    """Multiply the embeddings of a stage, divide its logits by scaling the output layer's input, and bound them.

    Args:
        stage: A GPTModel.
        logits: The stage returns logits; a score is not divided.
    """
    if stage.pre_process and numbers.embedding != 1.0:
        stage.embedding.register_forward_hook(lambda module, given, out: out * numbers.embedding)
    if stage.pre_process and numbers.embedding_root != 1.0:
        root = torch.tensor(numbers.embedding_root)
        stage.embedding.register_forward_hook(lambda module, given, out: out * root.to(out))
    if stage.post_process and logits and numbers.logits != 1.0:
        stage.decoder.final_layernorm.register_forward_hook(lambda module, given, out: out / numbers.logits)
    if stage.post_process and logits:
        stage.output_layer.softcap = numbers.softcap


class RMSNorm(torch.nn.RMSNorm):
    """The local spec's norm, marked for sequence parallelism: Megatron then reduces the weight's gradient.

    Args:
        own_eps: Epsilon for this norm instead of the model-wide ``eps``.
        zero_centred: Multiply by 1 + weight, in float32 (Gemma).
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        own_eps: float | None = None,
        zero_centred: bool = False,
        **unused: Any,
    ) -> None:
        super().__init__(hidden_size, eps=eps if own_eps is None else own_eps)
        self.zero_centred = zero_centred
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.zero_centred:
            return super().forward(x)
        normed = torch.nn.functional.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps)
        return normed.to(x.dtype)


class WholeWidthNorm(torch.nn.Module):
    """RMSNorm of a token's queries (or keys) over the heads of all tensor-parallel ranks.

    Every rank has the whole weight and uses its heads' part. Megatron sums gradients of weights with ``q_layernorm`` or
    ``k_layernorm`` in their name over the ranks, so each part gets the gradients of all ranks that use it.

    Args:
        hidden_size: Width of a head.
        heads: Heads of the model. With fewer heads than ranks, neighbouring ranks share one.
    """

    def __init__(self, config: Any, hidden_size: int, heads: int, eps: float = 1e-5, **unused: Any) -> None:
        from megatron.core import parallel_state

        super().__init__()
        ranks, rank = config.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
        self.eps, self.copies, self.width = eps, max(ranks // heads, 1), heads * hidden_size
        own = max(heads // ranks, 1) * hidden_size
        self.first, self.last = rank // self.copies * own, (rank // self.copies + 1) * own
        self.weight = torch.nn.Parameter(torch.ones(self.width))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., h, d] -> [..., h, d]."""
        from megatron.core.tensor_parallel import (
            copy_to_tensor_model_parallel_region,
            reduce_from_tensor_model_parallel_region,
        )

        rows = x.flatten(-2).float()
        squares = rows.square().sum(-1, keepdim=True) / self.copies
        # Forward and backward sum over the ranks: every rank's output depends on every rank's squares.
        squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = rows * torch.rsqrt(squares / self.width + self.eps)
        return (self.weight[self.first : self.last] * normed).to(x.dtype).view_as(x)


def norm_of(rules: NormRules) -> Any:
    """Return the spec for norms of hidden states and heads."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    return ModuleSpec(module=RMSNorm, params={"zero_centred": True}) if rules.zero_centred else RMSNorm


def place(layer: Any, config: Any, rules: NormRules) -> None:
    """Put a family's norms into the submodules of a layer of Megatron's local spec.

    ``megarl.learn.models.norms.Residual`` has the norms after attention and MLP.
    """
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    layer.input_layernorm = layer.pre_mlp_layernorm = norm_of(rules) if rules.before else IdentityOp
    attention = layer.self_attention.submodules
    if config.qk_layernorm and not config.multi_latent_attention:
        attention.q_layernorm = attention.k_layernorm = norm_of(rules)
        if rules.after_rope:
            attention.q_layernorm = attention.k_layernorm = IdentityOp
            attention.core_attention = ModuleSpec(module=attention.core_attention, params={"norm": RMSNorm})
        if rules.whole_width:
            attention.q_layernorm = _whole_width(config.num_attention_heads)
            attention.k_layernorm = _whole_width(config.num_query_groups)


def _whole_width(heads: int) -> Any:
    from megatron.core.transformer.spec_utils import ModuleSpec

    return ModuleSpec(module=WholeWidthNorm, params={"heads": heads})


def after(config: Any, rules: NormRules) -> Callable[[], torch.nn.Module] | None:
    """Return a function that makes the norm after attention or MLP, or None for a family without such norms."""
    if not rules.after:
        return None
    eps = config.layernorm_epsilon
    return partial(RMSNorm, config, config.hidden_size, eps=eps, zero_centred=rules.zero_centred)
