"""The policy loss of packed tokens: surrogate, KL and entropy terms, metrics and gradients in one pass.

Shape legend: T packed tokens, N rows (sequences); row i is tokens ``cu_seqlens[i] .. cu_seqlens[i + 1]``, n_i of them
kept by the mask. Sources: PPO 1707.06347, dual clip 1912.09729, clip-higher 2503.14476,
GSPO 2507.18071, CISPO 2506.13585, KL estimators Schulman 2020.

    total = Σ_t w_t·(v_t·surrogate_t + kl_coef·kl_t − entropy_coef·H_t),  w_t = scale, or scale / n_i for "seq_mean"

    ρ_t: token exp(logp_t − old_t); sequence_mean exp(mean_row(logp − old)); sequence_product exp(Σ_row(logp − old))
    ppo_clip: max(−A·ρ, −A·clip(ρ, 1 − clip_low, 1 + clip_high)); with dual_clip c, where A < 0: min(that, −c·A)
    cispo: −sg(min(ρ, 1 + clip_high))·A·logp
    v_t: ``is_weight``, a constant;  d = ref − logp: k1 = −d, k2 = d²/2,
    k3 = min(expm1(d) − d, 10), without gradient beyond that bound, as in verl

A masked token never affects the loss, even with NaN, and its gradient is exactly 0. A factor of 0 (an advantage, an
``is_weight``, the slope of a clipped surrogate) times a ratio that overflowed is 0. All arithmetic is float64. Sums and
gradients of a row are bitwise independent of other rows and of the number of threads.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from megarl.ops import native

IMPORTANCE = ("token", "sequence_mean", "sequence_product")
OBJECTIVES = ("ppo_clip", "cispo")
ESTIMATORS = (None, "k1", "k2", "k3")
K3_MOST = 10.0
"""Upper bound of a token's k3, reached at d = 2.61 and d = −11. Without it the loss overflows at d = 88."""
AGGREGATIONS = ("sum", "seq_mean")


class PolicySums(NamedTuple):
    """Sums over kept tokens, float64 scalars without gradient. Only the first three are weighted by w."""

    pg: torch.Tensor
    """Surrogate, with its ``is_weight``."""
    kl: torch.Tensor
    """0 without an estimator."""
    entropy: torch.Tensor
    """0 without ``entropy``."""
    tokens: torch.Tensor
    """Number of kept tokens."""
    clipped: torch.Tensor
    """Number of tokens with a surrogate set by a clip bound."""
    dual_clipped: torch.Tensor
    """Number of tokens with a surrogate set by ``dual_clip``."""
    old_minus_new: torch.Tensor
    """Σ(old_logp − logp): k1 of KL(old ‖ new)."""
    ratio: torch.Tensor
    """Σρ."""


class PolicyLoss(NamedTuple):
    total: torch.Tensor
    """Scalar of ``logp``'s dtype, differentiable in ``logp`` and ``entropy``."""
    sums: PolicySums


def policy_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    ref_logp: torch.Tensor | None = None,
    is_weight: torch.Tensor | None = None,
    importance: Literal["token", "sequence_mean", "sequence_product"] = "token",
    objective: Literal["ppo_clip", "cispo"] = "ppo_clip",
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    kl: Literal["k1", "k2", "k3"] | None = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    aggregation: Literal["sum", "seq_mean"] = "sum",
    scale: float = 1.0,
    row_weight: torch.Tensor | None = None,
) -> PolicyLoss:
    """Compute the loss defined at the head of this file. Gradients equal autograd's, also at clip bounds.

    Args:
        logp, old_logp, advantages: float32 [T]; only ``logp`` and ``entropy`` get gradients.
        cu_seqlens: int32 or int64 [N + 1], rising from 0 to T (on a GPU unchecked, clamped into [0, T]).
        mask: bool [T], True for tokens in the loss; ``None`` for all.
        entropy: float32 [T]; required if ``entropy_coef`` is not 0; otherwise only for the metric.
        ref_logp: float32 [T]; required with ``kl``. With ``kl_coef`` 0 only the metric uses it.
        is_weight: float32 [T], multiplies the surrogate and gets no gradient (truncated importance sampling).
        kl_coef, entropy_coef: finite; ``kl_coef`` must be 0 without ``kl``.
        clip_low, clip_high: at least 0, may be infinite; ``clip_low`` above 1 removes the lower bound. cispo has no
            lower bound.
        dual_clip: above 1 and finite, ppo_clip only.
        scale: finite, multiplies every weight: 1 / aggregation length, 1 / global denominator.
        row_weight: float64 [N], finite, multiplies the weights of a row's tokens; ``None`` for ones.

    Raises:
        TypeError, ValueError: an argument is invalid; the text names it.
    """
    if native.twin():
        return policy_loss_reference(
            logp, old_logp, advantages, cu_seqlens, mask=mask, entropy=entropy, ref_logp=ref_logp, is_weight=is_weight,
            importance=importance, objective=objective, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip,
            kl=kl, kl_coef=kl_coef, entropy_coef=entropy_coef, aggregation=aggregation, scale=scale,
            row_weight=row_weight,
        )  # fmt: skip
    settings = (
        importance, objective, kl, aggregation, clip_low, clip_high, dual_clip, kl_coef, entropy_coef, scale,
    )  # fmt: skip
    offsets = _check(logp, entropy, old_logp, advantages, cu_seqlens, mask, ref_logp, is_weight, *settings)
    _check_row_weight(row_weight, offsets)
    given = (old_logp, advantages, offsets, mask, None if kl is None else ref_logp, is_weight)
    total, sums = _Policy.apply(logp, entropy, given, settings, row_weight)
    return PolicyLoss(total, PolicySums(*sums.unbind(0)))


def policy_loss_reference(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    ref_logp: torch.Tensor | None = None,
    is_weight: torch.Tensor | None = None,
    importance: Literal["token", "sequence_mean", "sequence_product"] = "token",
    objective: Literal["ppo_clip", "cispo"] = "ppo_clip",
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    kl: Literal["k1", "k2", "k3"] | None = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    aggregation: Literal["sum", "seq_mean"] = "sum",
    scale: float = 1.0,
    row_weight: torch.Tensor | None = None,
) -> PolicyLoss:
    """Reference for :func:`policy_loss` in plain torch with autograd; float32 or float64."""
    offsets = _check(
        logp,
        entropy,
        old_logp,
        advantages,
        cu_seqlens,
        mask,
        ref_logp,
        is_weight,
        importance,
        objective,
        kl,
        aggregation,
        clip_low,
        clip_high,
        dual_clip,
        kl_coef,
        entropy_coef,
        scale,
        dtypes=native.REFERENCE,
    )
    native.rising("cu_seqlens", offsets, logp.shape[0])
    _check_row_weight(row_weight, offsets)
    keep = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    rows = offsets.numel() - 1
    row = torch.repeat_interleave(offsets.diff(), output_size=logp.numel())

    def kept(x: torch.Tensor) -> torch.Tensor:
        """float64, 0 where masked: applied before any formula, so that NaN of masked tokens reaches no gradient."""
        return torch.where(keep, x.double(), 0.0)

    def by_row(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(rows).index_add(0, row, x)

    new, old, advantage = kept(logp), kept(old_logp), kept(advantages)
    lengths = by_row(keep.double()).clamp(min=1.0)
    log_ratio = new - old
    if importance != "token":
        total_ratio = by_row(log_ratio)
        log_ratio = (total_ratio / lengths if importance == "sequence_mean" else total_ratio)[row]
    ratio: torch.Tensor = _Exp.apply(log_ratio)
    if objective == "cispo":
        clipped, dual_clipped = ratio > 1.0 + clip_high, torch.zeros_like(keep)
        factor = _product(-advantage, ratio.clamp(max=1.0 + clip_high).detach())
        if is_weight is not None:
            factor = factor.masked_fill((is_weight == 0) & factor.isinf(), 0.0)
        surrogate = factor * new
    else:
        unbounded = _product(-advantage, ratio)
        bounded = _product(-advantage, ratio.clamp(1.0 - clip_low, 1.0 + clip_high))
        clipped, surrogate = bounded > unbounded, torch.maximum(unbounded, bounded)
        limit = -(dual_clip or 1.0) * advantage
        dual = (advantage < 0) if dual_clip is not None else torch.zeros_like(keep)
        dual_clipped = dual & (surrogate > limit)
        surrogate = torch.where(dual, torch.minimum(surrogate, limit), surrogate)
    if is_weight is not None:
        surrogate = _product(kept(is_weight).detach(), surrogate)
    weights = keep.double() * scale
    if aggregation == "seq_mean":
        weights = weights / lengths[row]
    if row_weight is not None:
        weights = weights * row_weight[row]
    total = pg = (weights * surrogate).sum()
    kl_sum = entropy_sum = torch.zeros_like(pg)
    if kl is not None and ref_logp is not None:
        kl_sum = (weights * kl_estimates(kept(ref_logp) - new, kl)).sum()
        total = total + kl_coef * kl_sum if kl_coef else total
    if entropy is not None:
        entropy_sum = (weights * kept(entropy)).sum()
        total = total - entropy_coef * entropy_sum if entropy_coef else total
    unweighted = (keep, clipped & keep, dual_clipped & keep, old - new, torch.where(keep, ratio, 0.0))
    sums = (pg, kl_sum, entropy_sum, *(x.double().sum() for x in unweighted))
    return PolicyLoss(total.to(logp.dtype), PolicySums(*(x.detach() for x in sums)))


class _Exp(torch.autograd.Function):
    """exp with gradient 0 for an upstream gradient of 0, even if the result overflowed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (result,) = ctx.saved_tensors
        return _product(grad, result)


def _product(factor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """factor · x, where 0 · infinity is 0."""
    return torch.where((factor == 0) & x.isinf(), 0.0, factor * x)


def kl_estimates(d: torch.Tensor, estimator: str) -> torch.Tensor:
    """Return k1, k2 or k3 of each token from d = ref_logp − logp, with the shape and dtype of d.

    expm1 keeps k3 at least 0 and exact near 0, where exp(d) − d − 1 cancels.
    """
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d.square()
    d = d.clamp(max=K3_MOST)  # keeps the derivative finite; beyond the bound autograd multiplies it by 0
    return (torch.expm1(d) - d).clamp(max=K3_MOST)


def _fake(logp: torch.Tensor, entropy: torch.Tensor | None, *rest: Any) -> tuple[torch.Tensor, ...]:
    offsets, entropy_coef = rest[2], rest[-2]
    grad_entropy = logp.new_empty(logp.shape[0] if entropy is not None and entropy_coef else 0)
    sums = logp.new_empty(offsets.shape[0] - 1, native.library.POLICY_SUMS, dtype=torch.float64)
    return torch.empty_like(logp, memory_format=torch.contiguous_format), grad_entropy, sums


@native.op(
    "policy(Tensor logp, Tensor? entropy, Tensor old_logp, Tensor advantages, Tensor cu_seqlens, Tensor? mask, "
    "Tensor? ref_logp, Tensor? is_weight, str importance, str objective, str? kl, str aggregation, float clip_low, "
    "float clip_high, float? dual_clip, float kl_coef, float entropy_coef, float scale) -> (Tensor, Tensor, Tensor)",
    fake=_fake,
)
def policy_rows(
    logp: torch.Tensor,
    entropy: torch.Tensor | None,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    cu_seqlens: torch.Tensor,
    mask: torch.Tensor | None,
    ref_logp: torch.Tensor | None,
    is_weight: torch.Tensor | None,
    importance: str,
    objective: str,
    kl: str | None,
    aggregation: str,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    kl_coef: float,
    entropy_coef: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(∂total/∂logp [T], ∂total/∂entropy [T] or [0] if it is 0, each row's sums [N, 8] in PolicySums' order)."""
    cu_seqlens = _check(
        logp,
        entropy,
        old_logp,
        advantages,
        cu_seqlens,
        mask,
        ref_logp,
        is_weight,
        importance,
        objective,
        kl,
        aggregation,
        clip_low,
        clip_high,
        dual_clip,
        kl_coef,
        entropy_coef,
        scale,
    )
    native.rising("cu_seqlens", cu_seqlens, logp.shape[0])
    how = native.library.Policy(
        importance=IMPORTANCE.index(importance), objective=OBJECTIVES.index(objective), kl=ESTIMATORS.index(kl),
        aggregation=AGGREGATIONS.index(aggregation), clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip or 0.0,
        kl_coef=kl_coef, entropy_coef=entropy_coef, scale=scale,
    )  # fmt: skip
    # Kept in variables: the kernel gets only their addresses.
    logp, old_logp, advantages = logp.contiguous(), old_logp.contiguous(), advantages.contiguous()
    entropy, ref_logp, is_weight, mask = (
        None if x is None else x.contiguous() for x in (entropy, ref_logp, is_weight, mask)
    )
    tokens, rows = logp.shape[0], cu_seqlens.shape[0] - 1
    grad_logp = torch.zeros_like(logp)  # zeros, also for tokens outside cu_seqlens
    grad_entropy = logp.new_zeros(tokens if entropy is not None and entropy_coef else 0)
    sums = logp.new_empty(rows, native.library.POLICY_SUMS, dtype=torch.float64)
    native.run(
        "policy", logp, how, logp.data_ptr(), native.address(entropy), old_logp.data_ptr(), native.address(ref_logp),
        advantages.data_ptr(), native.address(is_weight), native.address(mask), cu_seqlens.data_ptr(), rows, tokens,
        grad_logp.data_ptr(), grad_entropy.data_ptr() if grad_entropy.numel() else 0, sums.data_ptr(),
    )  # fmt: skip
    return grad_logp, grad_entropy, sums


class _Policy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logp: torch.Tensor,
        entropy: torch.Tensor | None,
        given: tuple[Any, ...],
        settings: tuple[Any, ...],
        row_weight: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grad_logp, grad_entropy, rows = policy_rows(logp, entropy, *given, *settings)
        if row_weight is not None:
            rows[:, :3] *= row_weight[:, None]  # pg, kl, entropy
            each = row_weight.repeat_interleave(given[2].diff(), output_size=logp.shape[0])
            grad_logp = (grad_logp * each).to(grad_logp.dtype)
            grad_entropy = (grad_entropy * each).to(grad_entropy.dtype) if grad_entropy.numel() else grad_entropy
        kl_coef, entropy_coef = settings[-3:-1]
        sums = rows.sum(0)
        total = sums[0]
        # A coefficient of 0 leaves out a sum used by the metric alone, even if it is infinite.
        if kl_coef:
            total = total + kl_coef * sums[1]
        if entropy_coef:
            total = total - entropy_coef * sums[2]
        ctx.save_for_backward(grad_logp, grad_entropy)
        ctx.entropy_counts = entropy is not None and bool(entropy_coef)
        ctx.mark_non_differentiable(sums)
        return total.to(logp.dtype), sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        grad_logp, grad_entropy = ctx.saved_tensors
        by_entropy = grad_total * grad_entropy if ctx.entropy_counts else None
        return grad_total * grad_logp, by_entropy, None, None, None


def _check_row_weight(row_weight: torch.Tensor | None, offsets: torch.Tensor) -> None:
    if row_weight is not None and (row_weight.dtype, row_weight.shape) != (torch.float64, offsets.diff().shape):
        raise ValueError(
            f"row_weight must be float64 [{offsets.numel() - 1}], one for each row, got {row_weight.dtype} "
            f"{list(row_weight.shape)}"
        )


def _check(
    logp: torch.Tensor,
    entropy: torch.Tensor | None,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    cu_seqlens: torch.Tensor,
    mask: torch.Tensor | None,
    ref_logp: torch.Tensor | None,
    is_weight: torch.Tensor | None,
    importance: str,
    objective: str,
    kl: str | None,
    aggregation: str,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    kl_coef: float,
    entropy_coef: float,
    scale: float,
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> torch.Tensor:
    """Return contiguous int64 ``cu_seqlens``. Arguments in the op's order; ``dtypes``: ``None`` for the kernels'
    dtypes."""
    native.tensor("logp", logp, dtypes=dtypes or (native.real(),), shape=(None,))
    shape = tuple(logp.shape)
    for name, x in {"old_logp": old_logp, "advantages": advantages}.items():
        native.tensor(name, x, dtypes=(logp.dtype,), shape=shape, like=logp)
    for name, given in {"entropy": entropy, "ref_logp": ref_logp, "is_weight": is_weight}.items():
        if given is not None:
            native.tensor(name, given, dtypes=(logp.dtype,), shape=shape, like=logp)
    if mask is not None:
        native.tensor("mask", mask, dtypes=(torch.bool,), shape=shape, like=logp)
    choices = {
        "importance": (importance, IMPORTANCE), "objective": (objective, OBJECTIVES), "kl": (kl, ESTIMATORS),
        "aggregation": (aggregation, AGGREGATIONS),
    }  # fmt: skip
    for name, (value, known) in choices.items():
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {value!r}")
    native.number("clip_low", clip_low, low=0, finite=False)
    native.number("clip_high", clip_high, low=0, finite=False)
    for name, coefficient in {"kl_coef": kl_coef, "entropy_coef": entropy_coef, "scale": scale}.items():
        native.number(name, coefficient)
    if dual_clip is not None:
        native.number("dual_clip", dual_clip)
        if not dual_clip > 1 or objective != "ppo_clip":
            raise ValueError(
                f"dual_clip must be above 1 and goes with objective ppo_clip, got {dual_clip} with {objective}"
            )
    if kl is not None and ref_logp is None:
        raise ValueError(f"ref_logp must be given with kl={kl!r}")
    if kl is None and kl_coef:
        raise ValueError(f"kl must be given with kl_coef={kl_coef}")
    if entropy_coef and entropy is None:
        raise ValueError(f"entropy must be given with entropy_coef={entropy_coef}")
    return native.offsets("cu_seqlens", cu_seqlens, like=logp)
