"""The single path through a model: micro-batches, Megatron's schedule, outputs of the head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from megarl.core.processes import heartbeat
from megarl.learn.batching import MicroBatch, Sequences
from megarl.learn.models.gpt import unwrap
from megarl.learn.models.teaching import MoreColumns
from megarl.learn.parallel.process_groups import gather_outputs

if TYPE_CHECKING:
    from megarl.learn.models.routing_replay import Replay

LossFunction = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Any]]
"""(micro-batch, outputs [b, S, k]) -> (this micro-batch's part of the loss, any value to collect)."""


@dataclass(frozen=True)
class Head:
    """Output of a model: log-prob and entropy of the next tokens (k = 2), or a score (k = 1)."""

    vocab_size: int
    """Real vocabulary, without padding."""
    temperature: float = 1.0
    logits_bytes: int | None = None
    """Maximum bytes of logits on one rank; None keeps all logits of a micro-batch."""
    float32: bool = False
    """Compute logits in float32 if the model's precision is lower."""


def run(
    chunks: Sequence[torch.nn.Module],
    sequences: Sequences,
    batches: Sequence[MicroBatch],
    head: Head | None,
    loss_function: LossFunction,
    *,
    forward_only: bool,
    balanced: bool = False,
    replay: Replay | None = None,
    columns: MoreColumns | None = None,
) -> list[Any]:
    """Run ``batches`` through Megatron's schedule; gradients stay in the model's buffers.

    Sequences and micro-batches are on the host; inputs of the model and its loss are moved to the model's device.
    ``chunks``: this rank's part of the model, one module or ``parallel.vpp``. ``head``: None for a model that scores.
    ``balanced``: the routers measure their balance. ``replay``: expert ids of ``batches`` that the routers replay.
    ``columns``: further columns of the outputs [b, S, k + ``width``].
    Under context parallelism every rank gets the outputs of whole sequences, and the gradient of its own share.

    Returns:
        What ``loss_function`` collected for each micro-batch, in order, on last-stage ranks; [] elsewhere.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megarl.learn.models.experts import sequences_of_tokens
    from megarl.learn.models.head import Request, requested, requesting
    from megarl.learn.models.packed import by_token, on_device
    from megarl.learn.models.vision import has_sections, showing

    context = parallel_state.get_context_parallel_group()
    device = next(chunks[0].parameters()).device

    def forward_step(iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        heartbeat.beat()
        batch: MicroBatch = next(iterator)
        shares = batch.shares(context.size())
        mine = shares[context.rank()]
        tokens = batch.take(sequences.tokens).long()[:, mine].to(device)
        positions = _positions(sequences, batch, has_sections(unwrap(model)))[..., mine].to(device)
        cu_seqlens = None if batch.cu_seqlens is None else on_device(batch.cu_seqlens, device)
        if cu_seqlens is not None and has_sections(unwrap(model)):
            by_token(cu_seqlens)
        more = {"packed_seq_params": None if cu_seqlens is None else packed_params_of(cu_seqlens, batch.max_seqlen)}
        if balanced or replay is not None:
            numbers = batch.row if replay is None else replay.codes(batch)
            more["padding_mask"] = sequences_of_tokens(unwrap(model), numbers[:, mine].to(device))
        with ExitStack() as stack:
            shown = sequences.images and unwrap(model).pre_process and sequences.images.of(batch.numbers, batch.index)
            if shown:
                source = shown.source[:, mine].to(device)
                packed = more["packed_seq_params"]
                stack.enter_context(showing(unwrap(model), source, shown.pixels, shown.grids, packed))
            if head is not None:
                wanted = batch.targets(sequences)[:, mine].long()
                settings = head.vocab_size, head.temperature, head.logits_bytes, head.float32
                request = Request.of(wanted, device, *settings)
                if columns is not None:
                    places = requested(wanted)
                    source = batch.index[:, mine].t().reshape(-1)[places].clamp(min=0)
                    request = replace(request, columns=columns.at(source))
                stack.enter_context(requesting(unwrap(model), request))
            output = model(tokens, positions, None, **more)

        def loss(outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            total, collected = loss_function(batch, gather_outputs(outputs, shares, context))
            # The count of 1 is unused: gradients are not divided (see transformer_config).
            return total, torch.zeros((), dtype=torch.int), collected

        return output, loss

    rows, length = batches[0].index.shape
    one = len(chunks) == 1
    with nullcontext() if replay is None else replay.active():
        collected: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches) if one else [iter(batches) for _ in chunks],
            model=chunks[0] if one else list(chunks),
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=forward_only,
        )
    return collected


def _positions(sequences: Sequences, batch: MicroBatch, sectioned: bool) -> torch.Tensor:
    """Return int64 [b, S]; [3, b, S] (time, row, column) for a model with three-axis positions, if there are images."""
    if not sectioned or sequences.images is None:
        return batch.position
    return sequences.images.positions_of(batch.index, batch.position)


def packed_params_of(cu_seqlens: torch.Tensor, longest: int) -> Any:
    """Return Megatron's description of packed sequences, without reading from the device.

    Args:
        cu_seqlens: int32 [sequences + 1]: boundaries of the sequences.
        longest: Number of tokens of the longest sequence.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest
    )
