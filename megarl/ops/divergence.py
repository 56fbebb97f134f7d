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

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from megarl.ops import checks, logprob
from megarl.ops.linear import Gradients

BUFFERS = 7
"""Float buffers [c, V] that a chunk needs: logits of both models, and terms of the sums."""
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

    def terms(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (terms whose sum is the divergence, its derivatives by ``b``) for log-probs [c, n] of teacher and
        student."""
        if self.kind == "forward_kl":
            p = a.exp()
            return p * (a - b), p.neg_()
        if self.kind == "reverse_kl":
            q = b.exp()
            terms = q * (b - a)
            return terms, q.add_(terms)
        m = torch.logaddexp(a + math.log(self.beta), b + math.log1p(-self.beta))
        of_student = b.exp().mul_(b - m).mul_(1.0 - self.beta)
        return a.exp().mul_(m.neg_().add_(a)).mul_(self.beta).add_(of_student), of_student


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's columns of the vocabulary, and the ranks with the others.

    ``start`` is the id of the first column. ``temperature`` divides the logits, in float32.
    """

    start: int
    columns: int
    temperature: float
    group: torch.distributed.ProcessGroup | None

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return [c, V] logits / temperature in float32 (float64 for float64 inputs)."""
        z = torch.mm(hidden, weight.t())
        return z.to(torch.promote_types(z.dtype, torch.float32)).div_(self.temperature)

    def gathered(self, values: torch.Tensor) -> torch.Tensor:
        """Return [R, ...] of the group's ranks."""
        if self.group is None or self.group.size() == 1:
            return values[None]
        parts = values.new_empty(self.group.size(), *values.shape)
        torch.distributed.all_gather(list(parts.unbind(0)), values.contiguous(), group=self.group)
        return parts

    def sums(self, *values: torch.Tensor) -> torch.Tensor:
        """Return [c, n]: sums over all columns of the vocabulary, of n tensors [c, V]."""
        return self.gathered(torch.stack([x.sum(-1) for x in values], -1)).sum(0)

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

    ``hidden``: [T, G]; ``weight``: [V, G], rows for the ids of the student's shard.
    """

    hidden: torch.Tensor
    weight: torch.Tensor

    def forward(
        self, z: torch.Tensor, rows: slice, shard: VocabularyShard, divergence: Divergence
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Teacher``."""
        y = shard.logits(self.hidden[rows], self.weight)
        norms = [shard.log_norm(y), shard.log_norm(z)]
        found = shard.sums(*divergence.terms(y.sub_(norms[0]), z.sub_(norms[1])))
        return found[:, 0], torch.cat([*norms, found[:, 1:]], -1)

    def gradient(
        self, z: torch.Tensor, rows: slice, stats: torch.Tensor, shard: VocabularyShard, divergence: Divergence
    ) -> torch.Tensor:
        """See ``Teacher``."""
        y = shard.logits(self.hidden[rows], self.weight)
        g = divergence.terms(y.sub_(stats[:, :1]), z.sub_(stats[:, 1:2]))[1]
        return g.sub_(z.exp_().mul_(stats[:, 2:]))


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
        at, is_here = shard.local(self.ids[rows])
        norm = shard.log_norm(z)
        own = torch.where(is_here, z.gather(1, at), 0.0) if z.shape[1] else torch.zeros_like(at, dtype=z.dtype)
        b = shard.gathered(own).sum(0) - norm
        rest = shard.log_norm(self._without(z, at, is_here)) if self._has_tail else norm
        g = self._outcomes(rows, b, rest - norm, divergence)
        return g[0].sum(-1), torch.cat([norm, rest, g[1]], -1)

    def gradient(
        self, z: torch.Tensor, rows: slice, stats: torch.Tensor, shard: VocabularyShard, divergence: Divergence
    ) -> torch.Tensor:
        """See ``Teacher``."""
        at, is_here = shard.local(self.ids[rows])
        norm, rest, g = stats[:, :1], stats[:, 1:2], stats[:, 2:]
        of_ids, total = g[:, : at.shape[1]], g.sum(-1, keepdim=True)
        # A token of the tail has its share of the tail's derivative: g_tail · q_j / q_tail.
        found = self._without(z, at, is_here).sub_(rest).exp_().mul_(g[:, -1:]) if self._has_tail else z * 0.0
        found.sub_(z.sub_(norm).exp_().mul_(total))
        if z.shape[1]:
            found.scatter_add_(1, at, torch.where(is_here, of_ids, 0.0))
        return found

    @property
    def _has_tail(self) -> bool:
        return self.ids.shape[1] < self.vocab_size

    def _outcomes(
        self, rows: slice, b: torch.Tensor, tail: torch.Tensor, divergence: Divergence
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``Divergence.terms`` of the k tokens and the tail."""
        a = self.logp[rows].to(b.dtype)
        if self._has_tail:
            a, b = torch.cat([a, tail_logp(a)], -1), torch.cat([b, tail], -1)
        return divergence.terms(a, b)

    def _without(self, z: torch.Tensor, at: torch.Tensor, is_here: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``z`` with -inf at the k tokens."""
        if not z.shape[1]:
            return z.clone()
        removed = torch.zeros_like(z, dtype=torch.int32).scatter_add_(1, at, is_here.int())
        return z.masked_fill(removed > 0, -torch.inf)


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
) -> torch.Tensor:
    """Divergence of softmax(hidden @ weight.T / temperature) from the teacher's distribution, differentiable.

    Args:
        hidden: [T, H], the same on all ranks of the group.
        weight: [V, H], this rank's rows ``vocab_start .. vocab_start + V`` of the LM head.
        vocab_size: number of ids that both models have; the distributions are those over these ids.
        group, temperature: as in :func:`vocab_parallel_logprob`.
        logits_bytes: maximum bytes of logits at a time, all ``BUFFERS`` of them included, for at least one row.
            ``None`` takes ``CHUNK_BYTES``.

    Returns:
        float32 [T] (float64 for float64 inputs), equal on all ranks of the group.

    The gradient of ``hidden`` is **this rank's part**, as in :func:`linear_logprob`; the teacher gets none.

    Collectives: three all-gathers of at most k + 2 floats a row for each chunk, in the forward pass.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or device.
    """
    checks.tensor("hidden", hidden, dtypes=_DTYPES, shape=(None, None))
    checks.tensor("weight", weight, dtypes=(hidden.dtype,), shape=(None, hidden.shape[1]), like=hidden)
    logprob.check_shard(weight.shape[0], group, vocab_start, vocab_size)
    rows = hidden.shape[0]
    if isinstance(teacher, WholeVocabulary):
        checks.tensor("teacher.hidden", teacher.hidden, dtypes=_DTYPES, shape=(rows, None), like=hidden)
        shape = (weight.shape[0], teacher.hidden.shape[1])
        checks.tensor("teacher.weight", teacher.weight, dtypes=(teacher.hidden.dtype,), shape=shape, like=hidden)
    else:
        checks.tensor("teacher.ids", teacher.ids, dtypes=(torch.int64,), shape=(rows, None), like=hidden)
        checks.tensor("teacher.logp", teacher.logp, dtypes=_DTYPES, shape=tuple(teacher.ids.shape), like=hidden)
    shard = VocabularyShard(vocab_start, _columns(weight, vocab_start, vocab_size), float(temperature), group)
    if isinstance(teacher, WholeVocabulary):
        teacher = WholeVocabulary(teacher.hidden, teacher.weight[: shard.columns])
    found: torch.Tensor = _LinearDivergence.apply(
        hidden, weight[: shard.columns], teacher, divergence, shard, _chunk(hidden, weight.shape[0], logits_bytes)
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
            z = shard.logits(part, weight)
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
    ) -> torch.Tensor:
        values, stats = [], []
        for rows in _slices(hidden.shape[0], chunk):
            value, kept = teacher.forward(shard.logits(hidden[rows], weight), rows, shard, divergence)
            values.append(value)
            stats.append(kept)
        ctx.save_for_backward(hidden, weight)
        ctx.settings, ctx.stats = (teacher, divergence, shard, chunk), stats
        return torch.cat(values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight = ctx.saved_tensors
        teacher, divergence, shard, chunk = ctx.settings
        gradients = Gradients(hidden, weight, ctx.needs_input_grad, chunk)
        for rows, stats in zip(_slices(hidden.shape[0], chunk), ctx.stats, strict=True):
            z = shard.logits(hidden[rows], weight)
            gradient = teacher.gradient(z, rows, stats, shard, divergence)
            gradient.mul_(upstream[rows, None] / shard.temperature)
            gradients.add(rows, gradient.to(hidden.dtype))
        return *gradients.result(), None, None, None, None


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
) -> torch.Tensor:
    """Reference for :func:`linear_divergence` in plain torch, with whole logits of both models.

    With a group the logits are gathered. ``logits_bytes`` has no effect.
    """
    log_q = _whole(hidden @ weight.t(), group, vocab_size, temperature)
    if isinstance(teacher, WholeVocabulary):
        log_p = _whole(teacher.hidden @ teacher.weight.t(), group, vocab_size, temperature)
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


_DTYPES = (*checks.REFERENCE, torch.bfloat16, torch.float16)


def _whole(
    z: torch.Tensor, group: torch.distributed.ProcessGroup | None, vocab_size: int, temperature: float
) -> torch.Tensor:
    """Return [T, vocab_size] log-probs of the logits of all shards; gradients reach this rank's."""
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
