"""The LM head of a GPTModel stage, which gives log-probs and entropies instead of logits where it is asked to.

Shape legend: s sequence length, b rows of the micro-batch, n of its positions that are asked for, V columns of the
vocabulary on this rank, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from megarl.ops.logprob import IGNORED


@dataclass(frozen=True)
class Request:
    """Input of the head for the log-probs of one micro-batch."""

    targets: torch.Tensor
    """int64 [n]: the tokens that those positions predict that are asked for."""
    places: torch.Tensor
    """int64 [n]: where these positions stand in the micro-batch, flat as [s, b]; the others get 0 and no logits."""
    vocab_size: int
    """Real vocabulary, without padding."""
    temperature: float = 1.0
    logits_bytes: int | None = None
    """Most bytes of logits on this rank; None keeps them all. See ``ops.linear_logprob``."""
    float32: bool = False
    """Logits in float32 from hidden states and weights of less precision, which it holds exactly."""

    @staticmethod
    def of(targets: torch.Tensor, device: torch.device, *settings: Any) -> Request:
        """Request for targets [b, s] that lie on the host, so that nothing waits for the device; -100 leaves a position
        out.

        Where all are left out the first stays: no GEMM or collective is then empty.
        """
        flat = targets.t().reshape(-1)
        places = torch.nonzero(flat != IGNORED).flatten()
        if not len(places):
            places = torch.zeros(1, dtype=torch.int64)
        return Request(flat[places].to(device), places.to(device), *settings)


class Switch:
    """Adapters of a stage are on, or the stage computes what it does without them."""

    on = True


class LogProbHead(ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's own output layer, with its parameters, checkpoints and collectives; only ``forward`` can do more.

    While a ``Request`` is set it returns float32 [s, b, 2] of (log-prob, entropy) over the whole vocabulary, equal on
    all tensor-parallel ranks. GPTModel's transposed copy and Float16Module's upcast then meet this instead of [s, b,
    V]. Logits are made of the positions that are asked for alone, [n, V] in the model's dtype; no other tensor has
    their size, and the backward writes the gradient over them.
    """

    request: Request | None = None
    switch: Switch | None = None
    added: Callable[[], torch.Tensor]
    """With a ``switch``: what an adapter adds to the weight [V, H]."""

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[s, b, H] (a share of s where the sequence is cut) -> ([s, b, 2] or logits [s, b, V], None)."""
        request = self.request
        if self.switch is not None and self.switch.on:
            weight = (self.weight if weight is None else weight) + self.added()
        if request is None:
            output, bias = super().forward(input_, weight, runtime_gather_output)
            return output, bias
        columns = self.output_size_per_partition
        # The whole sequence, where it is cut, for a moment: the backward needs the chosen rows alone.
        gathers = self.sequence_parallel
        region = gather_from_sequence_parallel_region if gathers else copy_to_tensor_model_parallel_region
        hidden = region(input_, group=self.tp_group)
        shape = hidden.shape[:2]
        hidden = hidden.flatten(0, 1).index_select(0, request.places)
        weight = self.weight if weight is None else weight
        if request.float32:
            hidden, weight = hidden.float(), weight.float()
        outputs = ops.linear_logprob(
            hidden,
            weight,
            request.targets,
            group=self.tp_group,
            vocab_start=self.tp_group.rank() * columns,
            vocab_size=request.vocab_size,
            temperature=request.temperature,
            logits_bytes=request.logits_bytes,
        )
        rows = torch.stack(outputs, dim=-1)
        return rows.new_zeros(shape.numel(), 2).index_copy(0, request.places, rows).view(*shape, 2), None


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
