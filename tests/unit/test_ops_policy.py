"""The fused policy loss against plain autograd in float64: every variant, bits, masks, clip bounds, torch's own
checks."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl import ops
from megarl.ops import native, policy
from tests.conftest import examples
from tests.native import backends
from tests.native.backends import BACKENDS, DOUBLE

FIELDS = ("logp", "old_logp", "advantages", "entropy", "ref_logp", "is_weight")


def packed(seed: int, lengths: list[int], sigma: float = 0.3, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments of a batch; logp and the others differ by about ``sigma``."""
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    normal = lambda: torch.randn(n, generator=g, dtype=dtype)  # noqa: E731
    logp = -2 * normal().abs()
    return {
        "logp": logp, "old_logp": logp + sigma * normal(), "advantages": normal(), "entropy": normal().abs(),
        "ref_logp": logp + sigma * normal(), "is_weight": normal().abs().clamp(max=2.0),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0), "mask": torch.rand(n, generator=g) < 0.7,
    }  # fmt: skip


def evaluate(function, arguments: dict[str, Any], **settings: Any):
    """(PolicyLoss, ∂/∂logp, ∂/∂entropy), gradients as zeros where there are none."""
    arguments = dict(arguments)
    leaves = [arguments[name].clone().requires_grad_() for name in ("logp", "entropy")]
    loss = function(**{**arguments, "logp": leaves[0], "entropy": leaves[1]}, **settings)
    grads = torch.autograd.grad(loss.total, leaves, allow_unused=True)
    return loss, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))


def exact(arguments: dict[str, Any], **settings: Any):
    doubled = {k: v.double() if k in FIELDS and v is not None else v for k, v in arguments.items()}
    return evaluate(ops.policy_loss_reference, doubled, **settings)


def assert_close(got, want, tolerance: float = 2e-6) -> None:
    for x, y in zip((got[0].total, *got[0].sums, *got[1:]), (want[0].total, *want[0].sums, *want[1:]), strict=True):
        x, y = x.detach().double(), y.detach().double()
        assert ((x - y).abs() <= tolerance * y.abs().clamp(min=1.0)).all(), (x, y)


def bits(result, part: slice | None = None) -> list[torch.Tensor]:
    loss, *grads = result
    return [g if part is None else g[part] for g in grads] + ([*loss.sums, loss.total.detach()] if part is None else [])


variants = st.fixed_dictionaries(
    {
        "importance": st.sampled_from(policy.IMPORTANCE),
        "objective": st.sampled_from(policy.OBJECTIVES),
        "kl": st.sampled_from(policy.ESTIMATORS),
        "aggregation": st.sampled_from(policy.AGGREGATIONS),
        "clip_low": st.sampled_from([0.2, 10.0, 0.0003, 0.0]),
        "clip_high": st.sampled_from([0.2, 0.28, 10.0, 0.0004]),
        "dual_clip": st.sampled_from([None, 1.1, 3.0]),
        "kl_coef": st.sampled_from([0.0, 0.1]),
        "entropy_coef": st.sampled_from([0.0, 0.05]),
        "scale": st.sampled_from([1.0, 1 / 9, 1 / 4096]),
    }
).map(
    lambda v: (
        v | ({"dual_clip": None} if v["objective"] == "cispo" else {}) | ({"kl_coef": 0.0} if v["kl"] is None else {})
    )
)
lengths_of_rows = st.lists(st.one_of(st.integers(0, 12), st.integers(250, 270)), max_size=5)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=examples(20, 120))
@given(
    seed=st.integers(0, 2**31),
    lengths=lengths_of_rows,
    variant=variants,
    without=st.sets(st.sampled_from(["mask", "is_weight"])),
    weighted=st.booleans(),
)
def test_against_autograd_in_float64(backend, seed, lengths, variant, without, weighted):
    # Sequence products are spread over orders of magnitude by long rows; relative error is that of their exponent.
    arguments = packed(seed, lengths, sigma=0.01 if variant["importance"] == "sequence_product" else 0.3)
    arguments |= dict.fromkeys(without)
    if weighted:
        variant["row_weight"] = torch.linspace(0.1, 1.0, len(lengths), dtype=torch.float64)
    with backends.on(backend):
        got = evaluate(ops.policy_loss, arguments, **variant)
    want = exact(arguments, **variant)
    assert got[0].total.dtype == torch.float32 and all(
        x.dtype == torch.float64 and not x.requires_grad for x in got[0].sums
    )
    assert_close(got, want)
    if arguments["mask"] is not None:
        assert not got[1][~arguments["mask"]].any() and not got[2][~arguments["mask"]].any()


@pytest.mark.parametrize("backend", DOUBLE)
@pytest.mark.parametrize("objective", policy.OBJECTIVES)
@pytest.mark.parametrize("importance", policy.IMPORTANCE)
def test_gradcheck(backend, importance, objective):
    """cispo's clipped ratio is a constant by definition, so finite differences see it only where it is clipped."""
    sigma = 0.3 if objective == "ppo_clip" else 0.0
    arguments = packed(1, [4, 0, 3, 5], sigma, torch.float64)
    if objective == "cispo":
        arguments["old_logp"] = arguments["old_logp"] - 1.0
    for kl, aggregation in itertools.product(("k1", "k2", "k3"), policy.AGGREGATIONS):
        call = functools.partial(
            ops.policy_loss,
            **{k: v for k, v in arguments.items() if k not in ("logp", "entropy")},
            importance=importance,
            objective=objective,
            clip_low=0.2,
            clip_high=0.28,
            dual_clip=3.0 if objective == "ppo_clip" else None,
            kl=kl,
            kl_coef=0.1,
            entropy_coef=0.05,
            aggregation=aggregation,
        )
        leaves = (arguments["logp"].clone().requires_grad_(), arguments["entropy"].clone().requires_grad_())
        with backends.on(backend):
            assert torch.autograd.gradcheck(lambda x, h, call=call: call(x, entropy=h).total, leaves)


BOUNDS = list(
    itertools.product((1.0, 0.8, 1.2, 0.79, 1.21, 3.0, 2.0), (1.5, -1.5, 0.0), ("ppo_clip", "cispo"), (None, 2.0))
)


@pytest.mark.parametrize("backend", DOUBLE)
@pytest.mark.parametrize("importance", ["token", "sequence_mean"])
def test_ties_are_split_as_autograd_splits_them(backend, importance):
    """Ratios exactly on a bound, on 1, on the dual clip; advantages of both signs and 0."""
    for ratio, advantage, objective, dual in BOUNDS:
        if objective == "cispo" and dual:
            continue
        one = torch.ones(1, dtype=torch.float64)
        arguments = {
            "logp": one * math.log(ratio),
            "old_logp": 0 * one,
            "advantages": advantage * one,
            "entropy": one,
            "cu_seqlens": torch.tensor([0, 1]),
        }
        # Bounds that exp(logp) meets to the bit.
        bound = float(torch.exp(arguments["logp"]))
        low, high = (1 - bound, 0.2) if ratio in (0.8,) else (0.2, bound - 1) if ratio in (1.2,) else (0.2, 0.2)
        variant = {
            "importance": importance,
            "objective": objective,
            "clip_low": low,
            "clip_high": high,
            "dual_clip": dual and max(dual, bound if ratio == 2.0 else dual),
        }
        with backends.on(backend):
            got = evaluate(ops.policy_loss, arguments, **variant)
        want = evaluate(ops.policy_loss_reference, arguments, **variant)
        assert_close(got, want, 1e-15)
        if ratio == 1.0:
            assert got[1].tolist() == [-advantage]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("importance", policy.IMPORTANCE)
def test_a_row_has_the_same_bits_whatever_surrounds_it(backend, importance):
    lengths = [700, 3, 0, 1200, 256, 257]
    arguments = packed(2, lengths, sigma=0.02)
    variant = {
        "importance": importance,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": 3.0,
        "kl": "k3",
        "kl_coef": 0.1,
        "entropy_coef": 0.05,
        "aggregation": "seq_mean",
    }
    run = lambda a: evaluate(ops.policy_loss, a, **variant)  # noqa: E731
    before = torch.get_num_threads()
    with backends.on(backend):
        whole = run(arguments)
        torch.set_num_threads(3)
        assert all(torch.equal(a, b) for a, b in zip(bits(whole), bits(run(arguments)), strict=True))
        torch.set_num_threads(before)
        for start, end in itertools.pairwise(arguments["cu_seqlens"].tolist()):
            part = slice(start, end)
            alone = {k: v[part].clone() for k, v in arguments.items() if k != "cu_seqlens"} | {
                "cu_seqlens": torch.tensor([0, end - start])
            }
            assert all(torch.equal(a, b) for a, b in zip(bits(whole, part), bits(run(alone), slice(None)), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("importance", policy.IMPORTANCE)
def test_masked_tokens_may_hold_anything(backend, importance):
    variant = {
        "importance": importance,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 3.0,
        "kl": "k3",
        "kl_coef": 0.1,
        "entropy_coef": 0.05,
        "aggregation": "seq_mean",
    }
    clean = packed(3, [5, 9, 0, 4])
    clean["mask"][5:14] = False  # a whole row
    with backends.on(backend):
        want = bits(evaluate(ops.policy_loss, clean, **variant))
        for junk in (math.nan, math.inf, -math.inf, 1e30):
            dirty = clean | {f: torch.where(clean["mask"], clean[f], junk) for f in FIELDS}
            assert all(
                torch.equal(a, b) for a, b in zip(want, bits(evaluate(ops.policy_loss, dirty, **variant)), strict=True)
            )
        nothing = (
            clean | {"mask": torch.zeros_like(clean["mask"])} | {f: torch.full_like(clean[f], math.nan) for f in FIELDS}
        )
        loss, *grads = evaluate(ops.policy_loss, nothing, **variant)
    assert not any(float(x.detach()) for x in (loss.total, *loss.sums)) and not any(g.any() for g in grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_tokens(backend, lengths):
    with backends.on(backend):
        loss, *grads = evaluate(
            ops.policy_loss, packed(0, lengths), clip_low=0.2, clip_high=0.2, kl="k3", kl_coef=0.1, entropy_coef=0.1
        )
        alone = torch.empty(0, requires_grad=True)
        cu = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        ops.policy_loss(alone, torch.empty(0), torch.empty(0), cu, clip_low=0.2, clip_high=0.2).total.backward()
    assert float(loss.total.detach()) == 0 and all(g.shape == (0,) for g in (*grads, alone.grad))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_of_a_kept_token_is_seen_and_stays_in_its_row(backend):
    arguments = packed(4, [6, 6])
    arguments["mask"] = None
    arguments["logp"][2] = math.nan
    for importance in policy.IMPORTANCE:
        with backends.on(backend):
            loss, by_logp, _ = evaluate(ops.policy_loss, arguments, importance=importance, clip_low=0.2, clip_high=0.2)
        assert math.isnan(float(loss.total.detach())) and by_logp[2].isnan() and by_logp[6:].isfinite().all()


@pytest.mark.parametrize("backend", ["torch", *BACKENDS])
def test_a_ratio_that_overflows_has_no_gradient_where_it_is_clipped_or_worth_nothing(backend):
    """Products over long sequences leave float64's range; plain autograd then gives 0·∞ = NaN."""
    n = 400
    arguments = {
        "logp": torch.full((n,), -0.5),
        "old_logp": torch.full((n,), -3.0),
        "entropy": torch.ones(n),
        "cu_seqlens": torch.tensor([0, n]),
    }
    for advantage, dual, want in ((1.0, None, -1.2), (-1.0, 3.0, 3.0), (0.0, None, 0.0), (0.0, 3.0, 0.0)):
        with backends.on(backend):
            loss, by_logp, _ = evaluate(
                ops.policy_loss, arguments | {"advantages": torch.full((n,), advantage)}, importance="sequence_product",
                clip_low=0.2, clip_high=0.2, dual_clip=dual, aggregation="seq_mean",
            )  # fmt: skip
        assert float(loss.total.detach()) == pytest.approx(want) and not by_logp.any()


OVERFLOWS = {
    "clipped": (1.0, None, {"clip_high": 10.0}, -11.0),
    "dual clip": (-1.0, None, {"clip_high": 10.0, "dual_clip": 3.0}, 3.0),
    "corrected away": (-1.0, 0.0, {"clip_high": 10.0}, 0.0),
    "corrected away, cispo": (-1.0, 0.0, {"clip_high": math.inf, "objective": "cispo"}, 0.0),
    "no advantage": (0.0, None, {"clip_high": math.inf}, 0.0),
    "no advantage, cispo": (0.0, None, {"clip_high": math.inf, "objective": "cispo"}, 0.0),
    "corrected, clipped": (1.0, 0.5, {"clip_high": 10.0}, -5.5),
}


@pytest.mark.parametrize("backend", ["torch", *BACKENDS])
@pytest.mark.parametrize("importance", ["sequence_product", "token"])
@pytest.mark.parametrize("case", OVERFLOWS)
def test_a_factor_of_0_outweighs_a_ratio_that_overflows(backend, importance, case):
    """1,000 tokens whose ratio is exp(0.72), or one whose ratio overflows by itself; a masked token beside them."""
    advantage, weight, variant, want = OVERFLOWS[case]
    n, up = (1001, 0.72) if importance == "sequence_product" else (2, 720.0)
    arguments = {
        "logp": torch.full((n,), -0.5),
        "old_logp": torch.full((n,), -0.5 - up),
        "advantages": torch.full((n,), advantage),
        "entropy": torch.ones(n),
        "cu_seqlens": torch.tensor([0, n]),
        "mask": torch.arange(n) < n - 1,
        "is_weight": None if weight is None else torch.full((n,), weight),
    }
    with backends.on(backend):
        loss, by_logp, _ = evaluate(
            ops.policy_loss, arguments, importance=importance, clip_low=0.2, aggregation="seq_mean", **variant
        )
    assert float(loss.total.detach()) == pytest.approx(want) and not by_logp.any() and not by_logp.isnan().any()
    assert loss.sums.ratio.isinf()


@pytest.mark.parametrize("backend", ["torch", *BACKENDS])
def test_a_ratio_that_overflows_and_counts_is_seen(backend):
    arguments = {"logp": torch.tensor([-0.5]), "old_logp": torch.tensor([-800.0]), "advantages": torch.tensor([-1.0])}
    with backends.on(backend):
        loss, by_logp, _ = evaluate(
            ops.policy_loss,
            arguments | {"entropy": torch.ones(1), "cu_seqlens": torch.tensor([0, 1])},
            clip_low=0.2,
            clip_high=0.2,
        )
    assert loss.total.isinf() and by_logp.isinf()


def test_metrics_only_terms_do_not_touch_loss_or_gradient():
    arguments = packed(5, [7, 8]) | {"mask": None}
    arguments["ref_logp"][0], arguments["entropy"][1] = math.nan, math.nan
    plain = {k: v for k, v in arguments.items() if k not in ("logp", "ref_logp", "entropy")} | {
        "clip_low": 0.2,
        "clip_high": 0.2,
    }
    leaf, entropy = arguments["logp"].clone().requires_grad_(), arguments["entropy"].clone().requires_grad_()
    (bare,) = torch.autograd.grad(ops.policy_loss(leaf, **plain).total, leaf)
    loss = ops.policy_loss(leaf, entropy=entropy, ref_logp=arguments["ref_logp"], kl="k3", **plain)
    by_logp, by_entropy = torch.autograd.grad(loss.total, (leaf, entropy), allow_unused=True)
    assert torch.equal(by_logp, bare) and loss.total.isfinite() and loss.sums.kl.isnan() and loss.sums.entropy.isnan()
    assert by_entropy is None, "the entropy's backward pass would run for nothing"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("d", [1e-5, 1e-7, 1e-8, 1e-10, 1e-12])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_k3_is_exact_near_0(backend, d, sign):
    """Where exp(d) − 1 − d is 0 or noise in float64, and exp(d) − 1 (the gradient) has lost digits: both by their
    series."""
    logp, ref = torch.full((3,), -d if sign > 0 else 0.0), torch.full((3,), 0.0 if sign > 0 else -d)
    exactly = (ref.double() - logp.double())[0].item()
    arguments = {
        "logp": logp,
        "old_logp": logp,
        "advantages": torch.zeros(3),
        "entropy": torch.zeros(3),
        "ref_logp": ref,
        "cu_seqlens": torch.tensor([0, 3]),
    }
    variant = {"clip_low": 0.2, "clip_high": 0.2, "kl": "k3", "kl_coef": 1.0}
    with backends.on(backend):
        got = evaluate(ops.policy_loss, arguments, **variant)
    # Autograd's derivative of expm1(d) − d is exp(d) − 1: the twin's gradient loses digits, the kernels' does not.
    for (loss, by_logp, _), tolerance in ((got, 1e-6), (exact(arguments, **variant), 1e-3)):
        assert float(loss.sums.kl) == pytest.approx(3 * (exactly**2 / 2 + exactly**3 / 6), rel=1e-3, abs=0)
        assert by_logp.tolist() == pytest.approx([-(exactly + exactly**2 / 2)] * 3, rel=tolerance, abs=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_k3_has_a_bound_and_no_gradient_beyond(backend):
    """At 89 nats exp overflows float32, at 710 float64."""
    gaps = [2.5, 2.6, 20.0, 89.0, 710.0, -10.9, -11.1, -710.0]
    ref = torch.zeros(len(gaps))
    arguments = {
        "logp": (ref - torch.tensor(gaps)).clone(), "old_logp": ref, "advantages": ref, "entropy": ref,
        "ref_logp": ref, "cu_seqlens": torch.arange(len(gaps) + 1),
    }  # fmt: skip
    arguments["old_logp"] = arguments["logp"].clone()
    with backends.on(backend):
        loss, by_logp, _ = evaluate(ops.policy_loss, arguments, clip_low=0.2, clip_high=0.2, kl="k3", kl_coef=1.0)
    d = [float(-x) for x in arguments["logp"].double()]
    want = [min(math.expm1(x) - x, 10.0) if x < 100 else 10.0 for x in d]
    assert float(loss.sums.kl) == pytest.approx(sum(want), rel=1e-6)
    slopes = [-math.expm1(x) if at < 10.0 else 0.0 for x, at in zip(d, want, strict=True)]
    assert by_logp.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-12)


def test_golden():
    """ρ = 1.5, A = 1, clipped at 1.2; ρ = 0.5, A = −2, clipped at 0.8; k3 of ref − logp = log 2."""
    logp = torch.tensor([math.log(1.5), math.log(0.5)])
    for backend in BACKENDS:
        with backends.on(backend):
            loss = ops.policy_loss(
                logp, torch.zeros(2), torch.tensor([1.0, -2.0]), torch.tensor([0, 2]), clip_low=0.2, clip_high=0.2,
                ref_logp=logp + math.log(2), kl="k3", kl_coef=1.0, aggregation="seq_mean",
            )  # fmt: skip
        assert loss.sums.pg == pytest.approx((-1.2 + 1.6) / 2) and loss.sums.kl == pytest.approx(
            1 - math.log(2), rel=1e-6
        )
        assert [int(x) for x in (loss.sums.tokens, loss.sums.clipped, loss.sums.dual_clipped)] == [2, 2, 0]
        assert loss.sums.ratio == pytest.approx(2.0) and loss.sums.old_minus_new == pytest.approx(-math.log(0.75))
        assert loss.total == pytest.approx(0.2 + 1 - math.log(2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_that_lie_are_clamped(backend):
    """What is not looked at on a GPU must do no harm there."""
    a = packed(6, [30, 20])
    for lie in ([-5, 7, 2**40], [2**50, -(2**50), 3], [60, 70, 80], [40, 10, 50]):
        cu, grad, sums = torch.tensor(lie), torch.zeros(50), torch.zeros(2, 8, dtype=torch.float64)
        with backends.on(backend):
            how = native.library.Policy(
                importance=1,
                objective=0,
                kl=0,
                aggregation=1,
                clip_low=0.2,
                clip_high=0.2,
                dual_clip=0.0,
                kl_coef=0.0,
                entropy_coef=0.0,
                scale=1.0,
            )
            native.run(
                "policy",
                grad,
                how,
                a["logp"].data_ptr(),
                0,
                a["old_logp"].data_ptr(),
                0,
                a["advantages"].data_ptr(),
                0,
                0,
                cu.data_ptr(),
                2,
                50,
                grad.data_ptr(),
                0,
                sums.data_ptr(),
            )
        assert sums.isfinite().all()


def test_as_torch_sees_it():
    a = packed(7, [5, 0, 9])
    for kl, entropy_coef in ((None, 0.0), ("k3", 0.1)):
        tensors = [
            a["logp"],
            a["entropy"],
            a["old_logp"],
            a["advantages"],
            a["cu_seqlens"],
            a["mask"],
            a["ref_logp"],
            a["is_weight"],
        ]
        torch.library.opcheck(
            policy.policy_rows,
            (*tensors, "token", "ppo_clip", kl, "sum", 0.2, 0.2, None, 0.1 if kl else 0.0, entropy_coef, 1.0),
        )
    variant = {"clip_low": 0.2, "clip_high": 0.28, "kl": "k3", "kl_coef": 0.1, "entropy_coef": 0.05, "dual_clip": 3.0}
    eager = evaluate(ops.policy_loss, a, **variant)
    torch.compiler.reset()
    compiled = evaluate(torch.compile(ops.policy_loss, fullgraph=True, backend="aot_eager"), a, **variant)
    assert all(torch.equal(x, y) for x, y in zip(bits(eager), bits(compiled), strict=True))
    meta = {k: v.to("meta") for k, v in a.items()}
    loss, *grads = evaluate(ops.policy_loss, meta, **variant)
    assert loss.total.is_meta and loss.total.shape == () and all(g.is_meta and g.shape == (14,) for g in grads)
    with pytest.raises(ValueError, match="cu_seqlens must rise"):
        torch.compile(ops.policy_loss, fullgraph=True, backend="aot_eager")(
            **a | {"cu_seqlens": torch.tensor([0, 20])}, **variant
        )


def test_the_twin_is_the_reference_and_takes_strided_tensors():
    a = packed(8, [5, 9])
    strided = {k: v if k == "cu_seqlens" else torch.stack([v, v], 1)[:, 0] for k, v in a.items()}
    variant = {"clip_low": 0.2, "clip_high": 0.28, "kl": "k2", "kl_coef": 0.1, "entropy_coef": 0.05}
    assert all(
        torch.equal(x, y)
        for x, y in zip(
            bits(evaluate(ops.policy_loss, a, **variant)),
            bits(evaluate(ops.policy_loss, strided, **variant)),
            strict=True,
        )
    )
    want = bits(evaluate(ops.policy_loss_reference, a, **variant))
    ops.use("torch")
    try:
        assert all(torch.equal(x, y) for x, y in zip(bits(evaluate(ops.policy_loss, a, **variant)), want, strict=True))
    finally:
        ops.use("megarl")


FAULTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"logp": torch.zeros(2, 2)}, ValueError, r"logp must have shape \[any\], got \[2, 2\]"),
    ({"old_logp": torch.zeros(3)}, ValueError, r"old_logp must have shape \[4\], got \[3\]"),
    ({"entropy": torch.zeros(4).bfloat16()}, TypeError, "entropy must be float32, got bfloat16"),
    ({"is_weight": torch.zeros(5)}, ValueError, "is_weight must have shape"),
    ({"mask": torch.ones(4)}, TypeError, "mask must be bool, got float32"),
    ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, "cu_seqlens must rise from 0 to the number of tokens 4"),
    ({"cu_seqlens": torch.tensor([1, 4])}, ValueError, "cu_seqlens must rise"),
    ({"cu_seqlens": torch.tensor([0, 3, 2, 4])}, ValueError, "cu_seqlens must rise"),
    ({"cu_seqlens": torch.tensor([], dtype=torch.int64)}, ValueError, "cu_seqlens must rise"),
    ({"cu_seqlens": torch.tensor([0.0, 4.0])}, TypeError, "cu_seqlens must be int32 or int64"),
    (
        {"importance": "sequence"},
        ValueError,
        "importance must be one of token, sequence_mean, sequence_product, got 'sequence'",
    ),
    ({"objective": "ppo"}, ValueError, "objective must be one of"),
    ({"kl": "k4", "ref_logp": torch.zeros(4)}, ValueError, "kl must be one of None, k1, k2, k3"),
    ({"aggregation": "mean"}, ValueError, "aggregation must be one of sum, seq_mean"),
    ({"clip_low": -0.1}, ValueError, "clip_low must be at least 0"),
    ({"clip_high": math.nan}, ValueError, "clip_high must be at least 0"),
    ({"dual_clip": 1.0}, ValueError, "dual_clip must be above 1"),
    (
        {"dual_clip": 3.0, "objective": "cispo"},
        ValueError,
        "dual_clip must be above 1 and goes with objective ppo_clip",
    ),
    ({"kl": "k3"}, ValueError, "ref_logp must be given with kl='k3'"),
    ({"entropy_coef": 0.1}, ValueError, "entropy must be given with entropy_coef=0.1"),
    ({"logp": torch.zeros(4).int()}, TypeError, "logp must be float32"),
    ({"old_logp": torch.zeros(4).double()}, TypeError, "old_logp must be float32, got float64"),
    ({"advantages": torch.zeros(0)}, ValueError, r"advantages must have shape \[4\], got \[0\]"),
    ({"mask": torch.ones(3, dtype=torch.bool)}, ValueError, "mask must have shape"),
    ({"dual_clip": math.inf}, ValueError, "dual_clip must be finite"),
    ({"kl_coef": 0.1}, ValueError, "kl must be given with kl_coef=0.1"),
    ({"kl_coef": math.nan}, ValueError, "kl_coef must be finite, got nan"),
    ({"entropy_coef": math.inf, "entropy": torch.zeros(4)}, ValueError, "entropy_coef must be finite"),
    ({"scale": -math.inf}, ValueError, "scale must be finite"),
]
PLAIN_FAULTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ref_logp": torch.zeros(4, device="meta")}, ValueError, "ref_logp is on meta but must be on cpu"),
    ({"logp": torch.zeros(4, dtype=torch.float64)}, TypeError, "logp must be float32, got float64"),
    ({"advantages": [1.0] * 4}, TypeError, "advantages must be a torch.Tensor, got list"),
    ({"clip_low": "x"}, TypeError, "clip_low must be a number, got str"),
    ({"dual_clip": "3"}, TypeError, "dual_clip must be a number, got str"),
    ({"scale": None}, TypeError, "scale must be a number, got NoneType"),
    ({"kl_coef": torch.ones(())}, TypeError, "kl_coef must be a number, got Tensor"),
    ({"importance": 1}, ValueError, "importance must be one of"),
]


def with_fault(change):
    zeros = torch.zeros(4)
    return {
        "logp": zeros,
        "old_logp": zeros,
        "advantages": zeros,
        "cu_seqlens": torch.tensor([0, 1, 4]),
        "clip_low": 0.2,
        "clip_high": 0.2,
    } | change


@pytest.mark.parametrize(("change", "error", "text"), FAULTS + PLAIN_FAULTS)
def test_errors_name_the_argument(change, error, text):
    with pytest.raises(error, match=text):
        ops.policy_loss(**with_fault(change))


@pytest.mark.parametrize(("change", "error", "text"), FAULTS)
def test_the_registered_op_and_the_twin_check_too(change, error, text):
    arguments = with_fault(change)
    unset = {
        "entropy": None,
        "mask": None,
        "ref_logp": None,
        "is_weight": None,
        "importance": "token",
        "objective": "ppo_clip",
        "kl": None,
        "aggregation": "sum",
        "dual_clip": None,
        "kl_coef": 0.0,
        "entropy_coef": 0.0,
        "scale": 1.0,
    }
    with pytest.raises(error, match=text):
        torch.ops.megarl.policy(**unset | arguments)
    with pytest.raises(error, match=text):
        ops.policy_loss_reference(**arguments)
    ops.use("torch")
    try:
        with pytest.raises(error, match=text):
            ops.policy_loss(**arguments)
    finally:
        ops.use("megarl")


@pytest.mark.parametrize("function", [ops.policy_loss, policy.policy_loss_reference])
@pytest.mark.parametrize("weight", [torch.ones(2), torch.ones(3, dtype=torch.float64)])
def test_weights_of_rows_must_fit(function, weight):
    arguments = packed(0, [2, 1])
    with pytest.raises(ValueError, match=r"row_weight must be float64 \[2\], one for each row, got"):
        function(**arguments, clip_low=0.2, clip_high=0.2, row_weight=weight)
