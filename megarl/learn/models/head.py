"""The LM head of a GPTModel stage, which on request returns log-probs and entropies instead of logits.

Shape legend: s sequence length, b rows of the micro-batch, n requested positions, V columns of the vocabulary on this
rank, H hidden size.
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
from megarl.learn.models.teaching import Columns, HeadInput
from megarl.ops.logprob import IGNORED


@dataclass(frozen=True)
class Request:
    """Input of the head for the log-probs of one micro-batch."""

    targets: torch.Tensor
    """int64 [n]: the tokens that the requested positions predict."""
    places: torch.Tensor
    """int64 [n]: indices of the requested positions, flat in [s, b]; other positions get 0 and no logits."""
    vocab_size: int
    """Real vocabulary, without padding."""
    temperature: float = 1.0
    logits_bytes: int | None = None
    """Maximum bytes of logits on this rank; None keeps all logits. See ``ops.linear_logprob``."""
    float32: bool = False
    """Compute logits in float32, from hidden states and weights of lower precision."""
    columns: Columns | None = None

    @staticmethod
    def of(targets: torch.Tensor, device: torch.device, *settings: Any) -> Request:
        """Make a request for targets [b, s] on the host, so that nothing waits for the device; -100 skips a
        position."""
        places = requested(targets)
        return Request(targets.t().reshape(-1)[places].to(device), places.to(device), *settings)


def requested(targets: torch.Tensor) -> torch.Tensor:
    """Return int64 [n]: the places (``Request.places``) of targets [b, s] that are not -100.

    If all are skipped, the first is requested: then no GEMM or collective is empty.
    """
    places = torch.nonzero(targets.t().reshape(-1) != IGNORED).flatten()
    return places if len(places) else torch.zeros(1, dtype=torch.int64)


class Switch:
    """Switch of a stage's adapters."""

    on = True


class LogProbHead(ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's output layer with the same parameters, checkpoints and collectives; only ``forward`` differs.

    While a ``Request`` is set, ``forward`` returns float32 [s, b, 2] of (log-prob, entropy) over the whole vocabulary,
    equal on all tensor-parallel ranks; [s, b, 2 + j] if the request asks for more columns. GPTModel's transposed copy
    and Float16Module's upcast then process this instead of [s, b, V]. Logits [n, V] in the model's dtype are computed
    for requested positions only. No other tensor has their size, and the backward pass overwrites them with the
    gradient.
    """

    request: Request | None = None
    switch: Switch | None = None
    added: Callable[[], torch.Tensor]
    """With a ``switch``: returns the adapter's addition to the weight [V, H]."""

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[s, b, H] (a share of s with sequence parallelism) -> ([s, b, 2] or logits [s, b, V], None)."""
        request = self.request
        if self.switch is not None and self.switch.on:
            weight = (self.weight if weight is None else weight) + self.added()
        if request is None:
            output, bias = super().forward(input_, weight, runtime_gather_output)
            return output, bias
        columns = self.output_size_per_partition
        # With sequence parallelism, gather the whole sequence briefly: the backward pass needs only the requested rows.
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
        if request.columns is not None:
            settings = request.temperature, request.logits_bytes, request.float32
            rows = torch.cat([rows, request.columns(HeadInput(hidden, weight, self.tp_group, *settings))], dim=-1)
        number = rows.shape[1]
        return rows.new_zeros(shape.numel(), number).index_copy(0, request.places, rows).view(*shape, number), None


def install(stage: torch.nn.Module) -> None:
    """Make the output layer of a GPTModel a ``LogProbHead``; do nothing on a stage without one."""
    layer = getattr(stage, "output_layer", None)
    if layer is None:
        return
    assert type(layer) is ColumnParallelLinear, f"Megatron's output layer is a {type(layer).__name__}"
    assert layer.bias is None and not layer.gather_output, "the head has no bias and its logits stay on their ranks"
    assert not getattr(stage, "mtp_process", False), "multi-token prediction needs logits"
    # Change only the class, so that parameters, names and references to the layer stay as Megatron made them.
    layer.__class__ = LogProbHead


@contextmanager
def requesting(stage: torch.nn.Module, request: Request) -> Iterator[None]:
    """Make forward passes of ``stage`` (a bare GPTModel) return log-probs within the context, if it has the head.

    Only the forward pass needs the request, because autograd saves the backward pass's inputs. So schedules may
    interleave micro-batches freely.
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
