"""Log-prob and entropy directly from hidden states: the LM head's GEMM and ``ops.logprob`` over one buffer of logits.

Shape legend: T rows (tokens), H hidden size, V columns of this shard, R ranks of the group, c rows of a chunk.

Three modes differ in how they treat the logits:

- **A** keeps them: one GEMM into [T, V]; the backward writes the gradient over them.
- **B** (:func:`linear_logprob_loss`) gets the loss's gradient chunk by chunk in the forward pass, so nothing is
  recomputed: three GEMMs a chunk and one buffer of [c, V]. The loss must be a sum over rows.
- **C** recomputes a chunk's logits in the backward: four GEMMs a chunk and one buffer of [c, V], any loss.

A byte budget for the logits selects A or C, and c. The kernels' results for a row are bitwise independent of other
rows. cuBLAS and oneDNN may change a row's bits with the GEMM's number of rows, so budgets agree only to round-off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megarl.ops import logprob, native

SLOPE_ELEMENTS = 2**22
"""Elements of the derivatives of bounded logits at a time."""
ChunkLoss = Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor]
"""(logp [c], entropy [c], slice of their rows) -> scalar: this chunk's share of the loss."""


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    group: torch.distributed.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int,
    temperature: float = 1.0,
    logits_bytes: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of ``targets`` and entropy of softmax(hidden @ weight.T / temperature), differentiable.

    Args:
        hidden: [T, H] float32, bfloat16 or float16, the same on all ranks of the group.
        weight: [V, H] of the same dtype: this rank's rows ``vocab_start .. vocab_start + V`` of the LM head; every rank
            of the group has the same number of rows.
        targets, group, vocab_start, vocab_size, temperature: as in :func:`vocab_parallel_logprob`.
        logits_bytes: maximum bytes of logits at a time; ``None`` keeps all (A). If T·V elements exceed it, chunks of
            rows share one buffer, and the backward recomputes them (C).
        softcap: logits z become softcap · tanh(z / softcap), before the temperature; always by C.

    Returns:
        (logp, entropy), float32 [T], equal on all ranks of the group.

    The upstream gradient must be the same on all ranks. The gradient of ``hidden`` is **this rank's part**; the caller
    must sum it over the group (Megatron's ``copy_to_tensor_model_parallel_region`` and
    ``gather_from_sequence_parallel_region`` do so). The gradient of ``weight`` is complete. In half precision each
    chunk's part of it is rounded once, the parts are summed in float32, and the sum is rounded once.

    Memory in addition to arguments and gradients: A T·V elements; C ``logits_bytes`` plus 10 floats a row. Weights in
    half precision add V·H floats for the sum of the chunks' gradients, and ``logits_bytes`` at most for one part.

    Collectives: one all-gather of 4 floats a row.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or device, a target outside the vocabulary, or a
            budget too small for one row of logits.
    """
    chunk = _check(hidden, weight, targets, group, vocab_start, vocab_size, temperature, logits_bytes)
    if native.twin():
        return linear_logprob_reference(
            hidden,
            weight,
            targets,
            group=group,
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            temperature=temperature,
            softcap=softcap,
        )
    if chunk >= hidden.shape[0] and softcap is None:
        with torch.autocast(hidden.device.type, enabled=False):  # a budget must not change the GEMM's precision
            logits = F.linear(hidden, weight)
        return logprob.vocab_parallel_logprob(
            logits, targets,
            group=group, vocab_start=vocab_start, vocab_size=vocab_size, temperature=temperature,
        )  # fmt: skip
    shard = (vocab_start, vocab_size, temperature)
    logp, entropy = _Recompute.apply(hidden, weight, targets.contiguous(), shard, _name(group), chunk, softcap)
    return logp, entropy


def linear_logprob_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    loss: ChunkLoss,
    *,
    group: torch.distributed.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int,
    temperature: float = 1.0,
    logits_bytes: int | None = None,
) -> torch.Tensor:
    """Sum of ``loss`` over chunks of rows, with its gradient computed chunk by chunk in the forward pass (B).

    Args:
        loss: called once for each chunk, in row order, as ``loss(logp, entropy, rows)`` with float32 [c] tensors and
            the slice of rows. Returns the chunk's share of the loss, a scalar that is the same on all ranks of the
            group. Gradients reach only ``logp`` and ``entropy``, no other tensors.
        The other arguments are those in :func:`linear_logprob`.

    Returns:
        Scalar, differentiable in ``hidden`` and ``weight`` **once**: the backward scales the stored gradients in place.

    Memory in addition to arguments and gradients: ``logits_bytes`` (``None``: T·V elements) plus O(c), and for weights
    in half precision the same as :func:`linear_logprob`. Under ``torch.no_grad`` only the buffer.

    Collectives: one all-gather of 4 floats a row for each chunk.

    Raises:
        TypeError, ValueError: as in :func:`linear_logprob`, or ``loss`` returned no scalar.
    """
    shard = (vocab_start, vocab_size, temperature)
    chunk = _check(hidden, weight, targets, group, *shard, logits_bytes)
    if native.twin():
        logp, entropy = linear_logprob_reference(
            hidden,
            weight,
            targets,
            group=group,
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            temperature=temperature,
        )
        shares = [_scalar(loss(logp[rows], entropy[rows], rows)) for rows in _chunks(hidden.shape[0], chunk)]
        return torch.stack(shares).sum() if shares else logp.sum()
    learning = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    total: torch.Tensor = _InForward.apply(
        hidden, weight, targets.contiguous(), loss, shard, _name(group), chunk, learning
    )
    return total


class _Recompute(torch.autograd.Function):
    """Autograd function of mode C."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        shard: tuple[int, int, float],
        ranks: str,
        chunk: int,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = hidden.new_empty(chunk, weight.shape[0])
        stats = hidden.new_empty(hidden.shape[0], 4, dtype=native.real())
        for rows in _chunks(hidden.shape[0], chunk):
            logits = capped_(_logits(hidden[rows], weight, buffer), softcap)
            stats[rows] = logprob.local_stats(logits, targets[rows], *shard)
        stats = logprob.gather_stats(stats, ranks) if ranks else stats[None]
        logp, entropy, norm = logprob.combine_stats(stats, targets, shard[-1])
        ctx.save_for_backward(hidden, weight, targets, norm, entropy)
        ctx.shard, ctx.chunk, ctx.softcap = shard, chunk, softcap
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, targets, norm, entropy = ctx.saved_tensors
        gradients = Gradients(hidden, weight, ctx.needs_input_grad, ctx.chunk)
        buffer = hidden.new_empty(ctx.chunk, weight.shape[0])
        for rows in _chunks(hidden.shape[0], ctx.chunk):
            logits = capped_(_logits(hidden[rows], weight, buffer), ctx.softcap)
            few = max(1, SLOPE_ELEMENTS // max(1, logits.shape[1])) if ctx.softcap else max(1, len(logits))
            for part in _chunks(len(logits), few):
                z, at = logits[part], slice(rows.start + part.start, rows.start + part.stop)
                slope = cap_slope(z, ctx.softcap) if ctx.softcap else None
                upstream = (None if g is None else g[at] for g in (grad_logp, grad_entropy))
                logprob.gradient_(z, targets[at], norm[at], entropy[at], *upstream, *ctx.shard)
                if slope is not None:
                    z.mul_(slope)
            gradients.add(rows, logits)
        return *gradients.result(), None, None, None, None, None


class _InForward(torch.autograd.Function):
    """Autograd function of mode B."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        loss: ChunkLoss,
        shard: tuple[int, int, float],
        ranks: str,
        chunk: int,
        learning: bool,
    ) -> torch.Tensor:
        buffer = hidden.new_empty(chunk, weight.shape[0])
        gradients = Gradients(hidden, weight, ctx.needs_input_grad, chunk) if learning else None
        total = hidden.new_zeros((), dtype=native.real())
        for rows in _chunks(hidden.shape[0], chunk):
            logits = _logits(hidden[rows], weight, buffer)
            stats = logprob.local_stats(logits, targets[rows], *shard)
            stats = logprob.gather_stats(stats, ranks) if ranks else stats[None]
            logp, entropy, norm = logprob.combine_stats(stats, targets[rows], shard[-1])
            with torch.set_grad_enabled(learning):
                ends = logp.detach().requires_grad_(learning), entropy.detach().requires_grad_(learning)
                share = _scalar(loss(*ends, rows))
            total += share.detach()
            if gradients is not None and share.requires_grad:
                upstream = torch.autograd.grad(share, ends, allow_unused=True)
                logprob.gradient_(logits, targets[rows], norm, entropy, *upstream, *shard)
                gradients.add(rows, logits)
        ctx.save_for_backward(*(gradients.result() if gradients is not None else (None, None)))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor) -> tuple[Any, ...]:
        # In place: a second backward raises autograd's error, because the saved tensors have changed.
        # A loss scale of 65536 is infinite in half precision, so products are made in float32.
        gradients = ctx.saved_tensors
        for g in gradients:
            for part in () if g is None else g.split(1024):
                part.copy_(part.to(grad_total.dtype) * grad_total)
        return *gradients, None, None, None, None, None, None


class Gradients:
    """Sums of the gradients of hidden and weight over chunks."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, needed: tuple[bool, ...], chunk: int) -> None:
        self.inputs = hidden, weight
        self.hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if needed[0] else None
        wide = weight.dtype if chunk >= len(hidden) else torch.promote_types(weight.dtype, torch.float32)
        self.weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        # A chunk's product with the hidden states takes no more memory than its logits.
        self.columns = max(1, chunk * weight.shape[0] // max(1, weight.shape[1]))

    def add(self, rows: slice, dlogits: torch.Tensor) -> None:
        """Add the gradient [c, V] of the logits of ``rows``."""
        hidden, weight = self.inputs
        if self.hidden is not None:
            torch.mm(dlogits, weight, out=self.hidden[rows])
        if self.weight is None:
            return
        if self.weight.dtype == dlogits.dtype:
            self.weight.addmm_(dlogits.t(), hidden[rows])
            return
        for at in _chunks(weight.shape[0], self.columns):
            self.weight[at] += dlogits[:, at].t() @ hidden[rows]

    def result(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        weight = None if self.weight is None else self.weight.to(self.inputs[1].dtype)
        return self.hidden, weight


def linear_logprob_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    group: torch.distributed.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int,
    temperature: float = 1.0,
    logits_bytes: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference for :func:`linear_logprob` in plain torch; ``logits_bytes`` has no effect."""
    logits = F.linear(hidden, weight)
    return logprob.vocab_parallel_logprob_reference(
        logits if softcap is None else softcap * torch.tanh(logits / softcap), targets,
        group=group, vocab_start=vocab_start, vocab_size=vocab_size, temperature=temperature,
    )  # fmt: skip


def rows_in_budget(columns: int, dtype: torch.dtype, logits_bytes: int | None) -> int | None:
    """Number of rows of ``columns`` logits that fit into ``logits_bytes``; ``None`` for no limit.

    Raises:
        ValueError: not even one row fits.
    """
    row = columns * dtype.itemsize
    if logits_bytes is None or row == 0:
        return None
    if not isinstance(logits_bytes, int):
        raise TypeError(f"logits_bytes must be an int or None, got {type(logits_bytes).__name__}")
    if logits_bytes < row:
        raise ValueError(
            f"logits_bytes={logits_bytes} does not hold one row of {columns} logits ({row} bytes); "
            f"give at least {row}, or None to keep all logits"
        )
    return logits_bytes // row


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    group: torch.distributed.ProcessGroup | None,
    vocab_start: int,
    vocab_size: int,
    temperature: float,
    logits_bytes: int | None,
) -> int:
    """Check the arguments. Return the rows of a chunk: all rows if they fit into the budget."""
    native.tensor("hidden", hidden, dtypes=logprob.logits_dtypes(), shape=(None, None))
    native.tensor("weight", weight, dtypes=(hidden.dtype,), shape=(None, hidden.shape[1]), like=hidden)
    logprob.check_shard(weight.shape[0], group, vocab_start, vocab_size)
    logprob.check_targets(hidden, targets, vocab_size, temperature)
    fit = rows_in_budget(weight.shape[0], hidden.dtype, logits_bytes)
    return max(1, hidden.shape[0] if fit is None else min(fit, hidden.shape[0]))


def _scalar(share: Any) -> torch.Tensor:
    if not isinstance(share, torch.Tensor) or share.dim():
        what = f"shape {list(share.shape)}" if isinstance(share, torch.Tensor) else type(share).__name__
        raise ValueError(
            f"loss must return a scalar tensor for a chunk, got {what}; return its sum over the chunk's rows"
        )
    return share


def capped_(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Bound logits in place: z becomes ``softcap`` · tanh(z / ``softcap``); ``None`` keeps them."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def cap_slope(capped: torch.Tensor, softcap: float) -> torch.Tensor:
    """Return the derivative of ``capped_`` at each of its results."""
    return 1.0 - (capped / softcap).square_()


def _logits(hidden: torch.Tensor, weight: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Compute a chunk's logits [c, V] in ``buffer``."""
    return torch.mm(hidden, weight.t(), out=buffer[: hidden.shape[0]])


def _chunks(size: int, chunk: int) -> list[slice]:
    return [slice(at, min(at + chunk, size)) for at in range(0, size, chunk)]


def _name(group: torch.distributed.ProcessGroup | None) -> str:
    return "" if group is None or group.size() == 1 else group.group_name
