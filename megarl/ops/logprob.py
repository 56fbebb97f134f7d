"""Log-prob and entropy of given tokens, with the vocabulary split over a tensor-parallel group.

Shape legend: T rows (tokens), V columns of this shard, R ranks of the group.

Forward: every shard reads its logits x once and computes four floats a row, ``{m, Σe, Σe·d, x_target}`` with m = max x,
d = (x−m) / temperature and e = exp(d). After one all-gather they are combined in rank order:
``logp = (x_target−m)/temperature − log Σe`` and ``H = log Σe − Σe·d / Σe``. The terms of each formula have the same
sign, so large logits cause no cancellation. Backward, without a collective:
``∂/∂x_j = (p_j·(−g_logp − g_H·(log p_j + H)) + g_logp·1[j = target]) / temperature``.

Results of a row are bitwise independent of other rows and of the number of threads.
"""

from __future__ import annotations

from typing import Any

import torch

from megarl.ops import native

IGNORED = -100
"""Target of a masked row: log-prob 0, entropy 0, no gradient."""


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
        targets: int64 [T] token ids of the whole vocabulary; -100 masks a row.
        group: the ranks with the other columns, V on each rank, in column order; ``None`` if V covers the vocabulary.
        vocab_size: size of the real vocabulary; columns with token ids from it on are padding and get no probability.
        temperature: divides the logits, in float32.
        inplace_backward: write the gradient over the logits buffer, so that no second [T, V] exists. **The logits are
            consumed**: using them again after backward is an autograd error. Leaves and their views are never
            overwritten.

    Returns:
        (logp, entropy), float32 [T], natural logarithm, equal on all ranks of the group.

    The upstream gradient must be the same on all ranks of the group; each rank gets the gradient of its own columns
    (the convention of Megatron's ``vocab_parallel_cross_entropy``).

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or device, or a target outside the vocabulary.
    """
    _check_logits(logits)
    check_shard(logits.shape[1], group, vocab_start, vocab_size)
    check_targets(logits, targets, vocab_size, temperature)
    if native.twin():
        return vocab_parallel_logprob_reference(
            logits, targets, group=group, vocab_start=vocab_start, vocab_size=vocab_size, temperature=temperature
        )
    # Overlapping rows (an expanded tensor) cannot be written in place, and a compiler's plan must not change.
    inplace = (
        inplace_backward
        and not torch.compiler.is_compiling()
        and not _is_leafs(logits)
        and logits.stride(0) >= logits.shape[1]
    )
    ranks = "" if group is None or group.size() == 1 else group.group_name
    shard = (vocab_start, vocab_size, temperature)
    logp, entropy = _LogProb.apply(logits, targets.contiguous(), shard, ranks, inplace)
    return logp, entropy


@native.op(
    "logprob_local(Tensor logits, Tensor targets, SymInt vocab_start, SymInt vocab_size, float temperature) -> Tensor",
    fake=lambda logits, *_: logits.new_empty(logits.shape[0], 4, dtype=native.real()),
)
def local_stats(
    logits: torch.Tensor, targets: torch.Tensor, vocab_start: int, vocab_size: int, temperature: float
) -> torch.Tensor:
    """Statistics of one shard: float32 [T, 4] of ``{m, Σe, Σe·d, x_target}`` (0 if the target is in another shard)."""
    _check_logits(logits)
    _check_rows(logits, native.real(), targets=targets)
    stats = logits.new_empty(logits.shape[0], 4, dtype=native.real())
    block = _block(logits, vocab_start, vocab_size, temperature)
    native.run("logprob_local", logits, block, targets.data_ptr(), stats.data_ptr())
    return stats


@native.op(
    "logprob_gather(Tensor stats, str ranks) -> Tensor",
    fake=lambda stats, ranks: stats.new_empty(_group(ranks).size(), *stats.shape),
)
def gather_stats(stats: torch.Tensor, ranks: str) -> torch.Tensor:
    """Gather [T, 4] of this rank to [R, T, 4] in rank order; ``ranks`` is the group's name."""
    gathered = stats.new_empty(_group(ranks).size(), *stats.shape)
    torch.distributed.all_gather(list(gathered.unbind(0)), stats, group=_group(ranks))
    return gathered


@native.op(
    "logprob_combine(Tensor stats, Tensor targets, float temperature) -> (Tensor, Tensor, Tensor)",
    fake=lambda stats, *_: tuple(stats.new_empty(stats.shape[1], *more) for more in ((), (), (2,))),
)
def combine_stats(
    stats: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Combine the shards' statistics [R, T, 4] in shard order.

    Returns:
        (logp [T], entropy [T], norm [T, 2] = {max x, log Σe}), float32.
    """
    native.tensor("stats", stats, dtypes=(native.real(),), shape=(None, None, 4))
    stats = stats.contiguous()
    shards, rows, _ = stats.shape
    _check_rows(stats[0] if shards else stats.new_empty(0, 4), native.real(), targets=targets)
    logp, entropy, norm = stats.new_empty(rows), stats.new_empty(rows), stats.new_empty(rows, 2)
    native.run(
        "logprob_combine", stats, stats.data_ptr(), shards, rows, targets.data_ptr(), temperature,
        logp.data_ptr(), entropy.data_ptr(), norm.data_ptr(),
    )  # fmt: skip
    return logp, entropy, norm


_GRADIENT = (
    "Tensor targets, Tensor norm, Tensor entropy, Tensor? grad_logp, Tensor? grad_entropy, "
    "SymInt vocab_start, SymInt vocab_size, float temperature"
)


@native.op(f"logprob_gradient_(Tensor(a!) logits, {_GRADIENT}) -> ()", fake=lambda *_: None)
def gradient_(logits: torch.Tensor, *arguments: Any) -> None:
    """Write one shard's gradient [T, V] over ``logits``."""
    _gradient(logits, *arguments, out=logits)


@native.op(
    f"logprob_gradient(Tensor logits, {_GRADIENT}) -> Tensor",
    fake=lambda logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
)
def gradient(logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Return one shard's gradient [T, V] in a new tensor."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _gradient(logits, *arguments, out=out)
    return out


def _gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    norm: torch.Tensor,
    entropy: torch.Tensor,
    grad_logp: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    vocab_start: int,
    vocab_size: int,
    temperature: float,
    *,
    out: torch.Tensor,
) -> None:
    _check_logits(logits)
    # Kept in variables: the kernel gets only their addresses.
    grad_logp = None if grad_logp is None else grad_logp.to(norm.dtype).contiguous()
    grad_entropy = None if grad_entropy is None else grad_entropy.to(norm.dtype).contiguous()
    given = {"norm": norm, "entropy": entropy, "grad_logp": grad_logp, "grad_entropy": grad_entropy}
    _check_rows(logits, norm.dtype, targets=targets, **given)
    native.run(
        "logprob_backward", logits, _block(logits, vocab_start, vocab_size, temperature), targets.data_ptr(),
        norm.data_ptr(), entropy.data_ptr(), native.address(grad_logp), native.address(grad_entropy),
        out.data_ptr(), out.stride(0),
    )  # fmt: skip


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, shard: tuple[int, int, float], ranks: str, inplace: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stats = local_stats(logits, targets, *shard)
        stats = gather_stats(stats, ranks) if ranks else stats[None]
        logp, entropy, norm = combine_stats(stats, targets, shard[-1])
        ctx.save_for_backward(logits, targets, norm, entropy)
        ctx.shard, ctx.inplace = shard, inplace
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        logits, targets, norm, entropy = ctx.saved_tensors
        arguments = (targets, norm, entropy, grad_logp, grad_entropy, *ctx.shard)
        if not ctx.inplace:
            return gradient(logits, *arguments), None, None, None, None
        out = logits.detach()
        gradient_(out, *arguments)
        # A later use of the logits (a second backward, for instance) raises autograd's error, not wrong numbers.
        torch.autograd.graph.increment_version(logits)
        return out, None, None, None, None


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
    """Reference for :func:`vocab_parallel_logprob` in plain torch, in float64 for float64 logits, else float32.

    With a group the full logits are gathered: every rank must have V columns, with ``vocab_start`` = rank * V.
    ``inplace_backward`` has no effect.
    """
    z = logits if logits.dtype == torch.float64 else logits.float()
    if group is not None and group.size() > 1:
        shards = [torch.empty_like(z) for _ in range(group.size())]
        torch.distributed.all_gather(shards, z.detach().contiguous(), group=group)
        shards[group.rank()] = z
        z, vocab_start = torch.cat(shards, dim=-1), 0
    columns = torch.arange(vocab_start, vocab_start + z.shape[-1], device=z.device)
    kept = targets != IGNORED
    scaled = (z / temperature).masked_fill(~kept[:, None], 0.0)  # keeps NaN of ignored rows out of the gradient
    log_p = torch.log_softmax(scaled.masked_fill(columns >= vocab_size, -torch.inf), dim=-1)
    index = torch.where(kept, targets - vocab_start, 0)
    logp = torch.where(kept, log_p.gather(-1, index[:, None])[:, 0], 0.0)
    finite = torch.where(log_p == -torch.inf, 0.0, log_p)  # p log p is 0 there
    entropy = torch.where(kept, -(log_p.exp() * finite).sum(-1), 0.0)
    return logp, entropy


def _check_logits(logits: torch.Tensor) -> None:
    native.tensor("logits", logits, dtypes=logits_dtypes(), shape=(None, None))
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(f"logits must have contiguous columns, got strides {logits.stride()}; call .contiguous()")


def _check_rows(
    logits: torch.Tensor, dtype: torch.dtype, *, targets: torch.Tensor, **others: torch.Tensor | None
) -> None:
    """Check the kernels' other inputs against logits: number of rows, contiguity, dtype."""
    rows = logits.shape[0]
    native.tensor("targets", targets, dtypes=(torch.int64,), shape=(rows,), like=logits)
    for name, x in others.items():
        if x is not None:
            native.tensor(name, x, dtypes=(dtype,), shape=(rows, 2) if name == "norm" else (rows,), like=logits)
    for name, x in {"targets": targets, **others}.items():
        if x is not None and not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {x.stride()}; call .contiguous()")


def _is_leafs(logits: torch.Tensor) -> bool:
    """True if the memory belongs to a leaf (a parameter or the user's data), whose values must be kept."""
    base = logits._base if logits._is_view() else logits
    return base is None or base.is_leaf


def check_shard(columns: int, group: torch.distributed.ProcessGroup | None, vocab_start: int, vocab_size: int) -> None:
    """Raise TypeError or ValueError unless the ranks' columns cover the vocabulary: a target on no rank would silently
    count as logit 0."""
    for name, value in (("vocab_start", vocab_start), ("vocab_size", vocab_size)):
        if not isinstance(value, int | torch.SymInt):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup or None, got {type(group).__name__}")
    if not 1 <= vocab_size < 2**62:
        raise ValueError(f"vocab_size must be at least 1 and below 2**62, got {vocab_size}")
    _check_shards(columns, group, vocab_start, vocab_size)
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    if vocab_start != rank * columns:
        raise ValueError(
            f"vocab_start must be {rank * columns} on rank {rank} of {ranks} with {columns} columns each, got "
            f"{vocab_start}"
        )
    if vocab_size > ranks * columns:
        raise ValueError(
            f"vocab_size is {vocab_size}, but {ranks} rank(s) with {columns} columns each hold {ranks * columns}; "
            "give the group of ranks that hold the others"
        )


_checked: set[str] = set()
"""Names of groups whose ranks have compared their shards."""


def _check_shards(
    columns: int, group: torch.distributed.ProcessGroup | None, vocab_start: int, vocab_size: int
) -> None:
    """Raise ValueError on every rank of a group unless all have the same number of columns, in order.

    If one rank raised alone, the others would wait for it. Ranks compare shards at the group's first use, which is the
    same call on all ranks.
    """
    if group is None or group.size() == 1 or torch.compiler.is_compiling() or group.group_name in _checked:
        return
    shards: list[tuple[int, int, int]] = [(0, 0, 0)] * group.size()
    torch.distributed.all_gather_object(shards, (columns, vocab_start, vocab_size), group=group)
    if shards != [(shards[0][0], rank * shards[0][0], shards[0][2]) for rank in range(group.size())]:
        columns_of = "rank {} has {} columns from {} on".format
        found = ", ".join(columns_of(rank, width, start) for rank, (width, start, _) in enumerate(shards))
        raise ValueError(
            f"the ranks of a group must hold equally many columns, in order, of one vocabulary (vocab_size "
            f"{', '.join(str(size) for size in sorted({size for *_, size in shards}))}): {found}"
        )
    _checked.add(group.group_name)


def check_targets(like: torch.Tensor, targets: torch.Tensor, vocab_size: int, temperature: float) -> None:
    """Check the targets for rows of ``like`` [T, any]. Raises TypeError or ValueError naming the argument."""
    native.tensor("targets", targets, dtypes=(torch.int64,), shape=(like.shape[0],), like=like)
    if not isinstance(temperature, int | float | torch.SymFloat):
        raise TypeError(f"temperature must be a number, got {type(temperature).__name__}")
    if not 1e-30 <= temperature <= 1e30:  # so that its inverse is a normal float32
        raise ValueError(f"temperature must be above 0, from 1e-30 to 1e30, got {temperature}")
    if targets.device.type != "cpu" or torch.compiler.is_compiling():
        return  # the kernel writes NaN for such targets; a check here would make the CPU wait for the device
    outside = ((targets < 0) & (targets != IGNORED)) | (targets >= vocab_size)
    if outside.any():
        row = int(outside.nonzero()[0])
        raise ValueError(
            f"targets[{row}] = {int(targets[row])} is outside the vocabulary of {vocab_size}; "
            f"give a token id below it, or {IGNORED} to leave the row out"
        )


def logits_dtypes() -> tuple[torch.dtype, ...]:
    """Dtypes of logits that the implementation in use (kernels or twins) supports."""
    return (*native.REFERENCE, torch.bfloat16, torch.float16) if native.twin() else tuple(_dtypes())


def _dtypes() -> dict[torch.dtype, int]:
    """Dtypes of logits that the kernels support, with the kernels' codes."""
    kernels = native.library
    return {native.real(): kernels.REAL_DTYPE, torch.bfloat16: kernels.BFLOAT16, torch.float16: kernels.FLOAT16}


def _block(logits: torch.Tensor, vocab_start: int, vocab_size: int, temperature: float) -> Any:
    rows, columns = logits.shape
    return native.library.Logits(
        data=logits.data_ptr(),
        dtype=_dtypes()[logits.dtype],
        rows=rows,
        cols=columns,
        row_stride=logits.stride(0),
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        temperature=temperature,
    )


def _group(ranks: str) -> torch.distributed.ProcessGroup:
    from torch.distributed import distributed_c10d

    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(ranks)
