"""One way through the model for everything: micro-batches, Megatron's schedule, vocabulary-parallel log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.batching import MicroBatch
from megarl.models.gpt import unwrap

LossFunction = Callable[[MicroBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Any]]
"""(micro-batch, logp [B, S], entropy [B, S]) -> (this micro-batch's part of the loss, anything to collect)."""


@dataclass(frozen=True)
class Head:
    """What the log-prob of a token needs to know of the vocabulary."""

    vocab_size: int
    """Real vocabulary, without padding."""
    temperature: float = 1.0
    logits_bytes: int | None = None
    """Most bytes of logits on one rank; None keeps a micro-batch's whole."""


def run(
    stage: torch.nn.Module,
    batches: Sequence[MicroBatch],
    head: Head,
    loss_function: LossFunction,
    *,
    forward_only: bool,
) -> list[Any]:
    """Run ``batches`` through Megatron's schedule; gradients are left in the model's buffers.

    Returns:
        What ``loss_function`` collected for each micro-batch, in order, on last-stage ranks; [] elsewhere.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megarl.models.head import Request, asking

    def forward_step(iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch: MicroBatch = next(iterator)
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
        with asking(unwrap(model), Request(batch.targets, head.vocab_size, head.temperature, head.logits_bytes)):
            output = model(batch.tokens, positions, None)

        def loss(answer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            total, collected = loss_function(batch, answer[..., 0], answer[..., 1])
            # The count of 1 is unused: gradients are not divided (see transformer_config).
            return total, torch.zeros((), dtype=torch.int), collected

        return output, loss

    rows, length = batches[0].tokens.shape
    collected: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=stage,
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=rows,
        forward_only=forward_only,
    )
    return collected
