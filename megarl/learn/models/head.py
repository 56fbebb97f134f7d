"""The LM head of a GPTModel stage, which gives log-probs and entropies instead of logits where it is asked to.

Shape legend: s sequence length, b rows of the micro-batch, V columns of the vocabulary on this rank, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megarl import ops


@dataclass(frozen=True)
class Request:
    """Input of the head for the log-probs of one micro-batch."""

    targets: torch.Tensor
    """int64 [b, s]: the token that each position predicts; -100 leaves a position out (log-prob and entropy 0)."""
    vocab_size: int
    """Real vocabulary, without padding."""
    temperature: float = 1.0
    logits_bytes: int | None = None
    """Most bytes of logits on this rank; None keeps them all. See ``ops.linear_logprob``."""
    float32: bool = False
    """Logits in float32 from hidden states and weights of less precision, which it holds exactly."""


class LogProbHead(ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's own output layer, with its parameters, checkpoints and collectives; only ``forward`` can do more.

    While a ``Request`` is set it returns float32 [s, b, 2] of (log-prob, entropy) over the whole vocabulary, equal on
    all tensor-parallel ranks. GPTModel's transposed copy and Float16Module's upcast then meet this instead of [s, b,
    V], and the logits, in the model's dtype, are the only tensor of their size: the backward writes the gradient over
    them.
    """

    request: Request | None = None

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[s, b, H] (a share of s where the sequence is cut) -> ([s, b, 2] or logits [s, b, V], None)."""
        request = self.request
        if request is None:
            output, bias = super().forward(input_, weight, runtime_gather_output)
            return output, bias
        columns = self.output_size_per_partition
        targets = request.targets.t()
        question: dict[str, Any] = {
            "group": self.tp_group,
            "vocab_start": self.tp_group.rank() * columns,
            "vocab_size": request.vocab_size,
            "temperature": request.temperature,
        }
        wider = request.float32 and input_.dtype != torch.float32
        fit = ops.rows_in_budget(columns, torch.float32 if wider else input_.dtype, request.logits_bytes)
        if not wider and (fit is None or targets.numel() <= fit):
            logits, _ = super().forward(input_, weight)
            outputs = ops.vocab_parallel_logprob(logits.view(-1, columns), targets.reshape(-1), **question)
        else:
            # The whole sequence's hidden states stay for the backward; Megatron's linear would gather them twice.
            gathers = self.sequence_parallel
            region = gather_from_sequence_parallel_region if gathers else copy_to_tensor_model_parallel_region
            hidden = region(input_, group=self.tp_group).flatten(0, 1)
            weight = self.weight if weight is None else weight
            if wider:
                hidden, weight = hidden.float(), weight.float()
            question["logits_bytes"] = request.logits_bytes
            outputs = ops.linear_logprob(hidden, weight, targets.reshape(-1), **question)
        return torch.stack(outputs, dim=-1).view(*targets.shape, 2), None


def install(stage: torch.nn.Module) -> None:
    """Make the output layer of a GPTModel a ``LogProbHead``; nothing to do on a stage that has none."""
    layer = getattr(stage, "output_layer", None)
    if layer is None:
        return
    assert type(layer) is ColumnParallelLinear, f"Megatron's output layer is a {type(layer).__name__}"
    assert layer.bias is None and not layer.gather_output, "the head has no bias and its logits stay on their ranks"
    assert not getattr(stage, "mtp_process", False), "multi-token prediction needs logits"
    # Its class alone, so that parameters, their names and whoever holds the layer stay as Megatron made them.
    layer.__class__ = LogProbHead


@contextmanager
def requesting(stage: torch.nn.Module, request: Request) -> Iterator[None]:
    """Within, a forward pass of ``stage`` (a bare GPTModel) gives log-probs; a stage without the head does as ever.

    A forward pass needs the request, its backward does not: autograd has kept what that takes. So schedules may
    interleave micro-batches as they like.
    """
    layer = getattr(stage, "output_layer", None)
    if layer is None:
        yield
        return
    assert isinstance(layer, LogProbHead), "install() it first"
    layer.request = request
    try:
        yield
    finally:
        layer.request = None
