"""The LM head of a GPTModel stage, which returns log-probs on request, and the scalar head of a critic or reward
model.

Shape legend: s sequence length, b rows of the micro-batch, n requested positions, V columns of the vocabulary on this
rank, H hidden size.

Shape legend: s sequence length, b rows of the micro-batch, H hidden size.

Sources: transformers' ``modeling_layers.py`` (``GenericForSequenceClassification``: a linear layer without bias after
the last norm); Megatron-Core 0.16.1 ``models/gpt/gpt_model.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
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
    softcap: float | None = None
    """Logits z become ``softcap`` · tanh(z / ``softcap``)."""
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
            return output if self.softcap is None else self.softcap * torch.tanh(output / self.softcap), bias
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
            softcap=self.softcap,
        )
        rows = torch.stack(outputs, dim=-1)
        if request.columns is not None:
            settings = request.temperature, request.logits_bytes, request.float32, self.softcap
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


class ScoreHead(torch.nn.Module):
    """A linear layer with one row, whole on every tensor-parallel rank, in place of GPTModel's output layer.

    Under sequence parallelism each rank scores its share of the sequence and the scores are gathered, which moves H
    times less data than gathering hidden states. Each rank then has the weight gradient of its share, and the mark
    ``sequence_parallel`` makes Megatron sum the shares (``finalize_model_grads``). Without sequence parallelism every
    rank has the whole gradient.

    Saved under ``output_layer.weight``, like any tensor that is equal on all ranks of a stage.
    """

    def __init__(self, config: Any, tp_group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """[s, b, H] (a share of s with sequence parallelism) -> (float32 [s, b, 1], equal on all tensor-parallel ranks;
        None).

        Computed in float32 for every model dtype: bfloat16 resolves a value of 100 only to within 0.25.
        """
        assert weight is None, "a score head is tied to nothing"
        scores = F.linear(input_.float(), self.weight.float())
        if self.sequence_parallel:
            # Every rank computes the whole loss from the gathered scores, so each takes its share of that one gradient.
            scores = gather_from_sequence_parallel_region(
                scores, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return scores, None


class ScoreModel(GPTModel):  # type: ignore[misc]
    """Megatron's GPTModel with a stricter check of checkpoints."""

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Require the output weight's exact shape. Megatron accepts another shape, for vocabularies with other padding,
        and would silently load the first row of a language model's output weight as the head."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, *args, **kwargs)
        if self.post_process:
            state[f"{prefix}output_layer.weight"].allow_shape_mismatch = False
        return state


def smallest_output(gpt: Mapping[str, Any], pre_process: bool, post_process: bool, tp: int) -> dict[str, Any]:
    """Return GPTModel's arguments for an output weight with (almost) no memory, which ``install`` replaces.

    A model with one stage shares its embedding and allocates none; a separate last stage needs no vocabulary otherwise.
    """
    if pre_process and post_process:
        return {**gpt, "share_embeddings_and_output_weights": True}
    return {
        **gpt,
        "vocab_size": tp if post_process else gpt["vocab_size"],
        "share_embeddings_and_output_weights": False,
    }


def install_value_head(stage: torch.nn.Module) -> None:
    """Replace a GPTModel's output layer by a ``ScoreHead``; do nothing on a stage without one."""
    assert type(stage) is GPTModel, f"not Megatron's model: {type(stage).__name__}"
    model: Any = stage
    if getattr(model, "output_layer", None) is None:
        return
    assert not getattr(model, "mtp_process", False), "multi-token prediction needs logits"
    model.__class__ = ScoreModel
    model.output_layer = ScoreHead(model.config, model.pg_collection.tp)
    if model.share_embeddings_and_output_weights:  # set by ``smallest_output``
        model.share_embeddings_and_output_weights = False
        del model.embedding.word_embeddings.weight.zero_out_wgrad
