"""Log-prob and entropy of given tokens over a vocabulary that is split over a tensor-parallel group.

Shape legend: T rows (tokens), V columns of this shard, R ranks of the group.

Forward, with z = logit / temperature: every shard reads its logits once and leaves four floats a row,
``{m, Σe, Σe·(z−m), z_target}`` with m = max z and e = exp(z−m); one all-gather of these; combined in rank order as
``logp = z_target − m − log Σe`` and ``H = log Σe − Σe·(z−m) / Σe``. Accumulating (z−m) instead of z avoids the
cancellation of E[z] − log-sum-exp. Backward, without a collective:
``∂/∂z_j = p_j·(−g_logp − g_H·(log p_j + H)) + g_logp·1[j = target]``.

A row's result is the same bits whatever rows surround it, whatever the number of threads.
"""

from __future__ import annotations

from typing import Any

import torch

from megarl import _C
from megarl.ops import checks

IGNORED = -100
"""The target of a row that takes no part: log-prob 0, entropy 0, no gradient."""

_DTYPES = {torch.float32: _C.FLOAT32, torch.bfloat16: _C.BFLOAT16, torch.float16: _C.FLOAT16}


def vocab_parallel_logprob(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    group: torch.distributed.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int,
    temperature: float = 1.0,
    inplace_backward: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of ``targets`` and entropy of softmax(logits / temperature), differentiable in both.

    Args:
        logits: [T, V] float32, bfloat16 or float16, this rank's columns ``vocab_start .. vocab_start + V`` of the
            vocabulary. Columns must be contiguous; rows may be strided.
        targets: int64 [T] token ids of the whole vocabulary; -100 leaves a row out.
        group: the ranks that hold the other columns, in the order of their columns; None when V is all of them.
        vocab_size: the real vocabulary; columns whose token id is not below it are padding and get no probability.
        temperature: divides the logits, in float32.
        inplace_backward: write the gradient over the logits buffer, so that no second [T, V] exists. **The logits are
            consumed**: using them again after backward is an autograd error. A leaf's values are never overwritten.

    Returns:
        (logp, entropy), float32 [T], natural logarithm, equal on all ranks of the group.

    The upstream gradient must be the same on all ranks of the group; each rank gets the gradient of its own columns
    (the convention of Megatron's ``vocab_parallel_cross_entropy``).

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or device, or a target outside the vocabulary.
    """
    _check(logits, targets, vocab_start, vocab_size, temperature)
    # Rows that overlap (an expanded tensor) cannot hold one gradient each.
    inplace = inplace_backward and not logits.is_leaf and logits.stride(0) >= logits.shape[1]
    logp, entropy = _LogProb.apply(logits, targets.contiguous(), group, vocab_start, vocab_size, temperature, inplace)
    return logp, entropy


def local_stats(
    logits: torch.Tensor, targets: torch.Tensor, *, vocab_start: int, vocab_size: int, temperature: float = 1.0
) -> torch.Tensor:
    """One shard's pass: float32 [T, 4] of ``{m, Σe, Σe·(z−m), z_target}`` (0 where the target is in another shard)."""
    stats = torch.empty(logits.shape[0], 4)
    kernel_logits = _kernel_logits(logits, vocab_start, vocab_size, temperature)
    _C.logprob_local(kernel_logits, targets.data_ptr(), stats.data_ptr(), torch.get_num_threads())
    return stats


def combine(stats: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Combine the shards' statistics [R, T, 4] in shard order.

    Returns:
        (logp [T], entropy [T], norm [T, 2] = {max z, log Σe}), float32.
    """
    shards, rows, _ = stats.shape
    logp, entropy, norm = torch.empty(rows), torch.empty(rows), torch.empty(rows, 2)
    _C.logprob_combine(
        stats.data_ptr(), shards, rows, targets.data_ptr(), logp.data_ptr(), entropy.data_ptr(), norm.data_ptr()
    )
    return logp, entropy, norm


def local_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    norm: torch.Tensor,
    entropy: torch.Tensor,
    grad_logp: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    *,
    vocab_start: int,
    vocab_size: int,
    temperature: float = 1.0,
    out: torch.Tensor,
) -> None:
    """One shard's gradient [T, V] into ``out``, which may be ``logits`` itself."""
    # Kept in variables: the kernel reads them through their pointers.
    grad_logp = None if grad_logp is None else grad_logp.float().contiguous()
    grad_entropy = None if grad_entropy is None else grad_entropy.float().contiguous()
    _C.logprob_backward(
        _kernel_logits(logits, vocab_start, vocab_size, temperature),
        targets.data_ptr(),
        norm.data_ptr(),
        entropy.data_ptr(),
        0 if grad_logp is None else grad_logp.data_ptr(),
        0 if grad_entropy is None else grad_entropy.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        torch.get_num_threads(),
    )


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        group: torch.distributed.ProcessGroup | None,
        vocab_start: int,
        vocab_size: int,
        temperature: float,
        inplace: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shard: dict[str, Any] = {"vocab_start": vocab_start, "vocab_size": vocab_size, "temperature": temperature}
        stats = local_stats(logits, targets, **shard)
        logp, entropy, norm = combine(_gather(stats, group), targets)
        ctx.save_for_backward(logits, targets, norm, entropy)
        ctx.shard, ctx.inplace = shard, inplace
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        logits, targets, norm, entropy = ctx.saved_tensors
        out = logits.detach() if ctx.inplace else torch.empty_like(logits)
        local_gradient(logits, targets, norm, entropy, grad_logp, grad_entropy, **ctx.shard, out=out)
        if ctx.inplace:
            # Whoever still needs the logits (a second backward, say) gets autograd's error instead of wrong numbers.
            torch.autograd.graph.increment_version(logits)
        return out, None, None, None, None, None, None


def vocab_parallel_logprob_reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    group: torch.distributed.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int,
    temperature: float = 1.0,
    inplace_backward: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`vocab_parallel_logprob` computes, in plain torch, in float64 for float64 logits, else float32.

    With a group the full logits are gathered; every rank must hold equally many columns. ``vocab_start`` must then be
    rank * V. ``inplace_backward`` is accepted and has no effect.
    """
    z = logits if logits.dtype == torch.float64 else logits.float()
    if group is not None and group.size() > 1:
        shards = [torch.empty_like(z) for _ in range(group.size())]
        torch.distributed.all_gather(shards, z.detach().contiguous(), group=group)
        shards[group.rank()] = z
        z, vocab_start = torch.cat(shards, dim=-1), 0
    columns = torch.arange(vocab_start, vocab_start + z.shape[-1], device=z.device)
    log_p = torch.log_softmax((z / temperature).masked_fill(columns >= vocab_size, -torch.inf), dim=-1)
    kept = targets != IGNORED
    index = torch.where(kept, targets - vocab_start, 0)
    logp = torch.where(kept, log_p.gather(-1, index[:, None])[:, 0], 0.0)
    finite = torch.where(log_p == -torch.inf, 0.0, log_p)  # p log p is 0 there
    entropy = torch.where(kept, -(log_p.exp() * finite).sum(-1), 0.0)
    return logp, entropy


def _check(
    logits: torch.Tensor, targets: torch.Tensor, vocab_start: int, vocab_size: int, temperature: float
) -> None:
    checks.tensor("logits", logits, dtypes=tuple(_DTYPES), shape=(None, None))
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(f"logits must have contiguous columns, got strides {logits.stride()}; call .contiguous()")
    checks.tensor("targets", targets, dtypes=(torch.int64,), shape=(logits.shape[0],), like=logits)
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if vocab_size < 1 or vocab_start < 0:
        raise ValueError(f"vocab_size must be at least 1 and vocab_start at least 0, got {vocab_size} and {vocab_start}")
    outside = ((targets < 0) & (targets != IGNORED)) | (targets >= vocab_size)
    if outside.any():
        row = int(outside.nonzero()[0])
        raise ValueError(
            f"targets[{row}] = {int(targets[row])} is outside the vocabulary of {vocab_size}; "
            f"give a token id below it, or {IGNORED} to leave the row out"
        )


def _kernel_logits(logits: torch.Tensor, vocab_start: int, vocab_size: int, temperature: float) -> _C.Logits:
    rows, columns = logits.shape
    return _C.Logits(
        data=logits.data_ptr(),
        dtype=_DTYPES[logits.dtype],
        rows=rows,
        cols=columns,
        row_stride=logits.stride(0),
        vocab_start=vocab_start,
        valid_cols=max(0, min(columns, vocab_size - vocab_start)),
        temperature=temperature,
    )


def _gather(stats: torch.Tensor, group: torch.distributed.ProcessGroup | None) -> torch.Tensor:
    """[T, 4] of this rank -> [R, T, 4] in rank order."""
    if group is None or group.size() == 1:
        return stats[None]
    gathered = stats.new_empty((group.size(), *stats.shape))
    torch.distributed.all_gather(list(gathered.unbind(0)), stats, group=group)
    return gathered
