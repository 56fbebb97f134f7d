"""Divergence of a student's distribution from a teacher's at each token, directly from hidden states.

Shape legend: T rows (tokens), H and G hidden sizes of student and teacher, V columns of this shard, R ranks of the
group, c rows of a chunk, k the teacher's likeliest tokens.

p is the teacher's distribution, q the student's, both of softmax(logits / temperature) over the first ``vocab_size``
ids; other ids get no mass. With m = β·p + (1−β)·q and a = log p, b = log q:

- forward_kl  Σ p·(a − b)
- reverse_kl  Σ q·(b − a)
- jsd         β·Σ p·(a − log m) + (1−β)·Σ q·(b − log m)  (GKD, arXiv 2306.13649)

With k tokens of the teacher the sums run over these k and one more outcome, "tail", which has the rest of the mass.

Logits exist for one chunk of rows at a time, in forward and backward pass. Each chunk's gradient is
``∂D/∂z_j = g_j − q_j·Σ g`` with g = ∂D/∂b; log-normalizers and Σ g are kept from the forward pass, so the backward pass
has no collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from megarl.ops import logprob, native
from megarl.ops.linear import Gradients, cap_slope, capped_

BUFFERS = 6
"""Float buffers [c, V] that a chunk needs: logits, log-probs, and probabilities of both models and their mixture."""
CHUNK_BYTES = 2**28
"""Bytes of a chunk's buffers without ``logits_bytes``."""
LEAST_TAIL = 1e-6
"""Smallest mass of a teacher's tail: 1 − Σ p of rounded log-probs has no digits below it."""


@dataclass(frozen=True)
class Divergence:
    """Kind of divergence."""

    kind: Literal["forward_kl", "reverse_kl", "jsd"]
    beta: float = 0.5
    """β of jsd, between 0 and 1, both excluded: at the ends the value is 0 for any two distributions."""

    def __post_init__(self) -> None:
        if self.kind not in ("forward_kl", "reverse_kl", "jsd"):
            raise ValueError(f"kind must be forward_kl, reverse_kl or jsd, got {self.kind!r}")
        if not 0.0 < self.beta < 1.0:
            raise ValueError(
                f"beta must be above 0 and below 1, got {self.beta}; take forward_kl for the limit at 0 and reverse_kl "
                "for the one at 1"
            )

    def sums(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (divergence [c], its Σ g [c]) for log-probs [c, n] of teacher and student, which are overwritten."""
        if self.kind == "forward_kl":
            p = a.exp()
            return _dot(p, a.sub_(b)), -p.sum(-1)
        if self.kind == "reverse_kl":
            q = b.exp()
            found = _dot(q, b.sub_(a))
            return found, found + q.sum(-1)
        p, q, log_m = self._mixture(a, b)
        of_student = _dot(q, b.sub_(log_m)) * (1.0 - self.beta)
        return _dot(p, a.sub_(log_m)) * self.beta + of_student, of_student

    def derivatives(self, a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Return [c, n]: g − q·Σ g, the gradient by the student's logits. Overwrites ``a`` and ``b``.

        ``total``: [c, 1], Σ g of all shards.
        """
        if self.kind == "forward_kl":
            return b.exp_().mul_(-total).sub_(a.exp_())
        if self.kind == "reverse_kl":
            return a.neg_().add_(b).add_(1.0 - total).mul_(b.exp_())
        _, q, log_m = self._mixture(a, b)
        return b.sub_(log_m).mul_(1.0 - self.beta).sub_(total).mul_(q)

    def _mixture(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return p, q and log m. An m that is too small for the dtype counts as the smallest."""
        p, q = a.exp(), b.exp()
        return p, q, torch.lerp(q, p, self.beta).clamp_(min=torch.finfo(q.dtype).tiny).log_()


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return [c]: sums of products of the rows [c, n]."""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0, 0]


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's columns of the vocabulary, and the ranks with the others.

    ``start`` is the id of the first column. ``temperature`` divides the logits, in float32.
    """

    start: int
    columns: int
    temperature: float
    group: torch.distributed.ProcessGroup | None

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, softcap: float | None = None) -> torch.Tensor:
        """Return [c, V] logits, bounded by ``softcap``, / temperature in float32 (float64 for float64 inputs)."""
        z = capped_(torch.mm(hidden, weight.t()), softcap)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        return z if self.temperature == 1.0 else z.div_(self.temperature)

    def gathered(self, values: torch.Tensor) -> torch.Tensor:
        """Return [R, ...] of the group's ranks."""
        if self.group is None or self.group.size() == 1:
            return values[None]
        parts = values.new_empty(self.group.size(), *values.shape)
        torch.distributed.all_gather(list(parts.unbind(0)), values.contiguous(), group=self.group)
        return parts

    def sums(self, *values: torch.Tensor) -> torch.Tensor:
        """Return [c, n]: n sums [c] of this shard, added up over all shards."""
        return self.gathered(torch.stack(values, -1)).sum(0)

    def log_probs(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (log-probs [c, V] of logits, [c, 1]: log Σ exp(z) over all columns of the vocabulary)."""
        own = torch.log_softmax(z, -1)
        if self.group is None or self.group.size() == 1:
            return own, z[:, :1] - own[:, :1]
        shift = z[:, :1] - own[:, :1] if z.shape[1] else z.new_full((z.shape[0], 1), -torch.inf)
        norm = torch.logsumexp(self.gathered(shift), 0)
        return own.add_(shift - norm) if z.shape[1] else own, norm

    def log_norm(self, z: torch.Tensor) -> torch.Tensor:
        """Return [c, 1]: log Σ exp(z) over all columns of the vocabulary."""
        own = torch.logsumexp(z, -1) if z.shape[1] else z.new_full(z.shape[:1], -torch.inf)
        return torch.logsumexp(self.gathered(own), 0)[:, None]

    def local(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (columns of ids, 0 for other shards'; True where the id is in this shard)."""
        is_here = (ids >= self.start) & (ids < self.start + self.columns)
        return torch.where(is_here, ids - self.start, 0), is_here


class Teacher(Protocol):
    """Source of a teacher's distribution for rows of the student's logits."""

    def forward(
        self, z: torch.Tensor, rows: slice, shard: VocabularyShard, divergence: Divergence
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (divergence [c], statistics [c, s] for ``gradient``) for the student's logits ``z`` [c, V]."""
        ...

    def gradient(
        self, z: torch.Tensor, rows: slice, stats: torch.Tensor, shard: VocabularyShard, divergence: Divergence
    ) -> torch.Tensor:
        """Return [c, V]: gradient of each row's divergence by ``z``, which may be overwritten."""
        ...


@dataclass(frozen=True)
class WholeVocabulary:
    """A teacher given by its last hidden states and its output weight.

    ``hidden``: [T, G]; ``weight``: [V, G], rows for the ids of the student's shard; ``softcap``: bound of its logits.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    softcap: float | None = None

    def forward(
        self, z: torch.Tensor, rows: slice, shard: VocabularyShard, divergence: Divergence
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Teacher``."""
        b, norm = shard.log_probs(z)
        a, norm_of_teacher = shard.log_probs(shard.logits(self.hidden[rows], self.weight, self.softcap))
        found = shard.sums(*divergence.sums(a, b))
        return found[:, 0], torch.cat([norm_of_teacher, norm, found[:, 1:]], -1)

    def gradient(
        self, z: torch.Tensor, rows: slice, stats: torch.Tensor, shard: VocabularyShard, divergence: Divergence
    ) -> torch.Tensor:
        """See ``Teacher``."""
        y = shard.logits(self.hidden[rows], self.weight, self.softcap)
        return divergence.derivatives(y.sub_(stats[:, :1]), z.sub_(stats[:, 1:2]), stats[:, 2:])


@dataclass(frozen=True)
class TopK:
    """A teacher given by its likeliest tokens: ``ids`` int64 [T, k], no id twice in a row, and ``logp`` [T, k].

    ``vocab_size``: number of ids that both models have; with k = ``vocab_size`` there is no tail.
    """

    ids: torch.Tensor
    logp: torch.Tensor
    vocab_size: int

    def forward(
        self, z: torch.Tensor, rows: slice, shard: VocabularyShard, divergence: Divergence
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Teacher``."""
        own, at, is_here = self._taken(z, rows, shard)
        taken = shard.gathered(torch.where(is_here, own, 0.0)).sum(0)
        rest = shard.log_norm(z)
        norm = torch.logaddexp(rest, torch.logsumexp(taken, -1, keepdim=True))
        b = torch.cat([taken, rest], -1)[:, : self._outcomes].sub_(norm)
        value, total = divergence.sums(self._teachers(rows, b), b.clone())
        return value, torch.cat([norm, rest, total[:, None], b], -1)

    def gradient(
        self, z: torch.Tensor, rows: slice, stats: torch.Tensor, shard: VocabularyShard, divergence: Divergence
    ) -> torch.Tensor:
        """See ``Teacher``."""
        _, at, is_here = self._taken(z, rows, shard)
        rest, total, b = stats[:, 1:2], stats[:, 2:3], stats[:, 3:].clone()
        found = divergence.derivatives(self._teachers(rows, b), b, total)
        if self._outcomes == at.shape[1]:
            z.zero_()
        else:  # a token of the tail has its share of the tail's derivative
            z.sub_(rest).exp_().mul_(found[:, -1:])
        return z.scatter_add_(1, at, torch.where(is_here, found[:, : at.shape[1]], 0.0)) if z.shape[1] else z

    @property
    def _outcomes(self) -> int:
        """Number of outcomes, the tail included."""
        return min(self.ids.shape[1] + 1, self.vocab_size)

    def _taken(
        self, z: torch.Tensor, rows: slice, shard: VocabularyShard
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (logits of the k tokens in this shard, their columns, True for those in this shard), and write -inf in
        their place."""
        at, is_here = shard.local(self.ids[rows])
        if not z.shape[1]:
            return z.new_zeros(at.shape), at, is_here
        own = z.gather(1, at)
        z.scatter_reduce_(1, at, torch.where(is_here, -torch.inf, torch.inf).to(z.dtype), "amin")
        return own, at, is_here

    def _teachers(self, rows: slice, like: torch.Tensor) -> torch.Tensor:
        """Return the teacher's log-probs of the outcomes."""
        a = self.logp[rows].to(like.dtype, copy=True)
        return a if self._outcomes == a.shape[1] else torch.cat([a, tail_logp(a)], -1)


def tail_logp(logp: torch.Tensor) -> torch.Tensor:
    """Return [T, 1]: log of the mass beside tokens with log-probs [T, k], at least ``LEAST_TAIL``."""
    mass = 1.0 - logp.double().exp().sum(-1, keepdim=True)
    return mass.clamp(min=LEAST_TAIL).log().to(logp.dtype)


def linear_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: WholeVocabulary | TopK,
    divergence: Divergence,
    *,
    group: torch.distributed.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int,
    temperature: float = 1.0,
    logits_bytes: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Divergence of softmax(hidden @ weight.T / temperature) from the teacher's distribution, differentiable.

    Args:
        hidden: [T, H], the same on all ranks of the group.
        weight: [V, H], this rank's rows ``vocab_start .. vocab_start + V`` of the LM head.
        vocab_size: number of ids that both models have; the distributions are those over these ids.
        group, temperature: as in :func:`vocab_parallel_logprob`.
        logits_bytes: maximum bytes of logits at a time, all ``BUFFERS`` of them included, for at least one row.
            ``None`` takes ``CHUNK_BYTES``.
        softcap: bound of the student's logits, as in :func:`linear_logprob`.

    Returns:
        float32 [T] (float64 for float64 inputs), equal on all ranks of the group.

    The gradient of ``hidden`` is **this rank's part**, as in :func:`linear_logprob`; the teacher gets none.

    Collectives: two or three all-gathers of at most k floats a row for each chunk, in the forward pass.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or device.
    """
    native.tensor("hidden", hidden, dtypes=_DTYPES, shape=(None, None))
    native.tensor("weight", weight, dtypes=(hidden.dtype,), shape=(None, hidden.shape[1]), like=hidden)
    logprob.check_shard(weight.shape[0], group, vocab_start, vocab_size)
    rows = hidden.shape[0]
    if isinstance(teacher, WholeVocabulary):
        native.tensor("teacher.hidden", teacher.hidden, dtypes=_DTYPES, shape=(rows, None), like=hidden)
        shape = (weight.shape[0], teacher.hidden.shape[1])
        native.tensor("teacher.weight", teacher.weight, dtypes=(teacher.hidden.dtype,), shape=shape, like=hidden)
    else:
        native.tensor("teacher.ids", teacher.ids, dtypes=(torch.int64,), shape=(rows, None), like=hidden)
        native.tensor("teacher.logp", teacher.logp, dtypes=_DTYPES, shape=tuple(teacher.ids.shape), like=hidden)
    shard = VocabularyShard(vocab_start, _columns(weight, vocab_start, vocab_size), float(temperature), group)
    if isinstance(teacher, WholeVocabulary):
        teacher = replace(teacher, weight=teacher.weight[: shard.columns])
    chunk = _chunk(hidden, weight.shape[0], logits_bytes)
    found: torch.Tensor = _LinearDivergence.apply(
        hidden, weight[: shard.columns], teacher, divergence, shard, chunk, softcap
    )
    return found


def linear_top_k(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    k: int,
    *,
    group: torch.distributed.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int,
    temperature: float = 1.0,
    logits_bytes: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k likeliest ids of softmax(hidden @ weight.T / temperature), int64 [T, k], and their log-probs
    [T, k], likeliest first, without gradient.

    Arguments as in :func:`linear_divergence`. Raises ValueError if ``k`` is above ``vocab_size``.
    """
    if not 1 <= k <= vocab_size:
        raise ValueError(f"k must be from 1 to vocab_size={vocab_size}, got {k}")
    logprob.check_shard(weight.shape[0], group, vocab_start, vocab_size)
    shard = VocabularyShard(vocab_start, _columns(weight, vocab_start, vocab_size), float(temperature), group)
    chunk = _chunk(hidden, weight.shape[0], logits_bytes)
    weight = weight[: shard.columns]
    ids, logps = [], []
    with torch.no_grad():
        for part in hidden.split(chunk):
            z = shard.logits(part, weight, softcap)
            z = z.sub_(shard.log_norm(z))
            own = z.topk(min(k, z.shape[1]), dim=-1)
            more = (0, k - own.values.shape[1])
            values = shard.gathered(torch.nn.functional.pad(own.values, more, value=-torch.inf))
            places = shard.gathered(torch.nn.functional.pad(own.indices + vocab_start, more))
            best = values.transpose(0, 1).flatten(1).topk(k, dim=-1)
            logps.append(best.values)
            ids.append(places.transpose(0, 1).flatten(1).gather(1, best.indices))
    return torch.cat(ids), torch.cat(logps)


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        teacher: Teacher,
        divergence: Divergence,
        shard: VocabularyShard,
        chunk: int,
        softcap: float | None,
    ) -> torch.Tensor:
        values, stats = [], []
        for rows in _slices(hidden.shape[0], chunk):
            value, kept = teacher.forward(shard.logits(hidden[rows], weight, softcap), rows, shard, divergence)
            values.append(value)
            stats.append(kept)
        ctx.save_for_backward(hidden, weight)
        ctx.settings, ctx.stats = (teacher, divergence, shard, chunk, softcap), stats
        return torch.cat(values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight = ctx.saved_tensors
        teacher, divergence, shard, chunk, softcap = ctx.settings
        gradients = Gradients(hidden, weight, ctx.needs_input_grad, chunk)

        def of_logits(rows: slice, stats: torch.Tensor) -> torch.Tensor:
            z = shard.logits(hidden[rows], weight, softcap)
            slope = None if softcap is None else cap_slope(z * shard.temperature, softcap)
            gradient = teacher.gradient(z, rows, stats, shard, divergence)
            gradient = gradient if slope is None else gradient.mul_(slope)
            return gradient.mul_(upstream[rows, None] / shard.temperature).to(hidden.dtype)

        for rows, stats in zip(_slices(hidden.shape[0], chunk), ctx.stats, strict=True):
            gradients.add(rows, of_logits(rows, stats))
        return *gradients.result(), None, None, None, None, None


def linear_divergence_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: WholeVocabulary | TopK,
    divergence: Divergence,
    *,
    group: torch.distributed.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int,
    temperature: float = 1.0,
    logits_bytes: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Reference for :func:`linear_divergence` in plain torch, with whole logits of both models.

    With a group the logits are gathered. ``logits_bytes`` has no effect.
    """
    log_q = _whole(hidden @ weight.t(), softcap, group, vocab_size, temperature)
    if isinstance(teacher, WholeVocabulary):
        log_p = _whole(teacher.hidden @ teacher.weight.t(), teacher.softcap, group, vocab_size, temperature)
    else:
        log_p, of_ids = teacher.logp.to(log_q.dtype), log_q.gather(1, teacher.ids)
        if teacher.ids.shape[1] < vocab_size:
            others = torch.ones_like(log_q).scatter(1, teacher.ids, 0.0)
            tail = (log_q + others.log()).logsumexp(-1, keepdim=True)
            log_p, of_ids = torch.cat([log_p, tail_logp(log_p)], -1), torch.cat([of_ids, tail], -1)
        log_q = of_ids
    kl = torch.nn.functional.kl_div  # kl_div(log b, log a) is the KL of a from b
    of: Callable[..., torch.Tensor] = lambda b, a: kl(b, a, reduction="none", log_target=True).sum(-1)  # noqa: E731
    if divergence.kind == "forward_kl":
        return of(log_q, log_p)
    if divergence.kind == "reverse_kl":
        return of(log_p, log_q)
    beta = divergence.beta
    log_m = (beta * log_p.exp() + (1.0 - beta) * log_q.exp()).log()
    return beta * of(log_m, log_p) + (1.0 - beta) * of(log_m, log_q)


_DTYPES = (*native.REFERENCE, torch.bfloat16, torch.float16)


def _whole(
    z: torch.Tensor,
    softcap: float | None,
    group: torch.distributed.ProcessGroup | None,
    vocab_size: int,
    temperature: float,
) -> torch.Tensor:
    """Return [T, vocab_size] log-probs of the logits of all shards; gradients reach this rank's."""
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    if group is not None and group.size() > 1:
        shards = [torch.empty_like(z) for _ in range(group.size())]
        torch.distributed.all_gather(shards, z.detach().contiguous(), group=group)
        shards[group.rank()] = z
        z = torch.cat(shards, dim=-1)
    return torch.log_softmax(z[:, :vocab_size] / temperature, dim=-1)


def _columns(weight: torch.Tensor, vocab_start: int, vocab_size: int) -> int:
    """Number of this shard's columns within the vocabulary."""
    return min(max(vocab_size - vocab_start, 0), weight.shape[0])


def _chunk(hidden: torch.Tensor, columns: int, logits_bytes: int | None) -> int:
    """Number of rows of a chunk, at least 1; ``columns``: of the whole shard, so that it is equal on all ranks."""
    row = BUFFERS * max(1, columns) * torch.promote_types(hidden.dtype, torch.float32).itemsize
    return min(max((logits_bytes or CHUNK_BYTES) // row, 1), max(1, hidden.shape[0]))


def _slices(size: int, chunk: int) -> list[slice]:
    return [slice(at, min(at + chunk, size)) for at in range(0, size, chunk)]
