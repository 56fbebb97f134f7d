"""Multipliers of embeddings, residuals and logits, and norms of residuals, which Megatron-Core's layers lack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megarl.weights.architectures.megatron_config import Multipliers

WithBias = tuple[torch.Tensor, torch.Tensor | None]


class Residual(torch.nn.Module):
    """Adds a layer's output, normed and multiplied, to the residual; replaces Megatron's bias-dropout-add (without
    dropout).

    Args:
        norm: Makes the norm; None for a family without one.
    """

    def __init__(self, multiplier: float, norm: Callable[[], torch.nn.Module] | None = None) -> None:
        super().__init__()
        self.multiplier = multiplier
        self.norm = None if norm is None else norm()

    def forward(self, training: bool, fused: bool) -> Callable[[WithBias, torch.Tensor, float], torch.Tensor]:
        """Return the function of (output and bias, residual, dropout) that Megatron's layers call."""

        def add(output: WithBias, residual: torch.Tensor, dropout: float) -> torch.Tensor:
            x, bias = output
            # Megatron enables gradients here; if the layer has none, the norm's weight must not begin a graph.
            with torch.set_grad_enabled(x.requires_grad):
                x = x if bias is None else x + bias
                x = x if self.norm is None else self.norm(x)
                return residual + x * self.multiplier

        return add


def install(stage: Any, numbers: Multipliers, *, logits: bool) -> None:
    """Multiply the embeddings of a stage, and divide its logits by scaling the output layer's input.

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
