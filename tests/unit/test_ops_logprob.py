"""Vocabulary-parallel log-prob and entropy against float64, over shards, dtypes, strides and instruction sets."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl import _C, ops
from megarl.ops import logprob
from megarl.ops.logprob import IGNORED
from tests.native import backends
from tests.native.backends import BACKENDS

INSTRUCTION_SETS = ("generic", "avx2", "avx512")


@pytest.fixture(autouse=True)
def _same_isa_and_threads():
    isa, threads = _C.isa(), torch.get_num_threads()
    yield
    _C.use_isa(isa)
    torch.set_num_threads(threads)


class Case(NamedTuple):
    logits: torch.Tensor  # float64, [T, padded vocabulary]
    targets: torch.Tensor
    vocab_size: int
    shards: int
    temperature: float
    grad_logp: torch.Tensor
    grad_entropy: torch.Tensor


def make_case(seed, rows, vocab_size, shards, temperature=1.0, scale=4.0, offset=0.0, dtype=torch.float32, peak=0.0):
    g = torch.Generator().manual_seed(seed)
    width = -(-vocab_size // shards)
    logits = torch.randn(rows, width * shards, generator=g) * scale + offset
    if peak:  # one logit above all others, which are too small to change it one by one
        logits = torch.randn(rows, width * shards, generator=g) * 0.01 * temperature
        logits[torch.arange(rows), torch.randint(0, vocab_size, (rows,), generator=g)] = peak * temperature
    logits = logits.to(dtype)
    targets = torch.randint(0, vocab_size, (rows,), generator=g)
    targets[torch.rand(rows, generator=g) < 0.2] = -100
    return Case(
        logits, targets, vocab_size, shards, temperature, torch.randn(rows, generator=g), torch.randn(rows, generator=g)
    )


cases = st.builds(
    make_case,
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 6),
    vocab_size=st.one_of(st.integers(1, 70), st.integers(1000, 2100)),
    shards=st.integers(1, 8),
    temperature=st.sampled_from([1.0, 0.6, 2.5, 0.01, 100.0]),
    scale=st.sampled_from([0.1, 4.0, 30.0]),
    offset=st.sampled_from([0.0, 50.0, -200.0]),
    peak=st.sampled_from([0.0, 0.0, 16.64, 19.43, 88.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)


def by_shards(case: Case):
    """(logp, entropy, gradient [T, padded vocabulary]) as the ranks of a group would compute them."""
    parts = list(case.logits.chunk(case.shards, dim=1))
    width = parts[0].shape[1]
    kw = [(r * width, case.vocab_size, case.temperature) for r in range(case.shards)]
    stats = torch.stack([logprob.local_stats(x, case.targets, *k) for x, k in zip(parts, kw, strict=True)])
    logp, entropy, norm = logprob.combine_stats(stats, case.targets, case.temperature)
    upstream = (case.targets, norm, entropy, case.grad_logp, case.grad_entropy)
    grads = [logprob.gradient(x, *upstream, *k) for x, k in zip(parts, kw, strict=True)]
    return logp, entropy, torch.cat(grads, dim=1)


def truth(case: Case):
    logits = case.logits.double().requires_grad_()
    logp, entropy = ops.vocab_parallel_logprob_reference(
        logits, case.targets, vocab_size=case.vocab_size, temperature=case.temperature
    )
    (logp * case.grad_logp + entropy * case.grad_entropy).sum().backward()
    return logp.detach(), entropy.detach(), logits.grad


def assert_close(case: Case, got, want):
    for x, exact in zip(got[:2], want[:2], strict=True):
        assert ((x - exact).abs() <= 2e-6 * exact.abs().clamp(min=1.0)).all()
    rounding = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[case.logits.dtype]
    error = (got[2].double() - want[2]).abs()
    upstream = (case.grad_logp.abs() + case.grad_entropy.abs() * (1 + want[1].abs())).clamp(min=1.0)[:, None].double()
    # fp16 gradients below 2^-24 are flushed.
    assert (error <= rounding * want[2].abs() + 2e-6 * upstream / case.temperature + (6e-8 if rounding else 0)).all()


@settings(max_examples=60)
@given(cases)
def test_shards_agree_with_float64(case):
    assert_close(case, by_shards(case), truth(case))


@settings(max_examples=20)
@given(cases)
def test_all_instruction_sets_give_the_same_bits(case):
    results = []
    for isa in INSTRUCTION_SETS:
        if _C.use_isa(isa):
            results.append(by_shards(case))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_unknown_instruction_set_is_refused():
    assert not _C.use_isa("mmx")


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), threads=st.sampled_from([1, 2, 3]), pick=st.integers(0, 299))
def test_a_row_has_the_same_bits_whatever_surrounds_it(seed, threads, pick):
    case = make_case(seed, rows=300, vocab_size=1500, shards=1)
    torch.set_num_threads(1)
    alone = by_shards(
        case._replace(
            logits=case.logits[pick : pick + 1].clone(),
            targets=case.targets[pick : pick + 1],
            grad_logp=case.grad_logp[pick : pick + 1],
            grad_entropy=case.grad_entropy[pick : pick + 1],
        )
    )
    torch.set_num_threads(threads)
    together = by_shards(case)
    assert all(torch.equal(a[0], b[pick]) for a, b in zip(alone, together, strict=True))


def test_autograd_writes_the_gradient_over_the_logits_and_refuses_a_second_use():
    case = make_case(3, rows=5, vocab_size=37, shards=1)
    weight = case.logits.clone().requires_grad_()
    logits = weight * 1
    address = logits.data_ptr()
    seen = []
    logits.register_hook(lambda g: seen.append(g.data_ptr()))
    logp, entropy = ops.vocab_parallel_logprob(logits, case.targets, vocab_size=37)
    total = (logp * case.grad_logp + entropy * case.grad_entropy).sum()
    total.backward(retain_graph=True)
    assert seen == [address]
    assert_close(case, (logp.detach(), entropy.detach(), weight.grad), truth(case))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_logits_survive_without_inplace_and_a_leaf_survives_always():
    case = make_case(4, rows=4, vocab_size=40, shards=1)
    leaf = case.logits.clone().requires_grad_()
    ops.vocab_parallel_logprob(leaf, case.targets, vocab_size=40)[0].sum().backward()
    assert torch.equal(leaf, case.logits) and leaf.grad.abs().sum() > 0
    logits = leaf * 1
    ops.vocab_parallel_logprob(logits, case.targets, vocab_size=40, inplace_backward=False)[0].sum().backward()
    assert torch.equal(logits, case.logits)


@pytest.mark.parametrize("view", [lambda p: p.view(6, 8), lambda p: p.flatten(0, 1), lambda p: p.view(6, 8)[:3]])
def test_views_of_a_leaf_keep_its_values(view):
    leaf = torch.nn.Parameter(torch.randn(2, 3, 8))
    before, logits = leaf.detach().clone(), view(leaf)
    ops.vocab_parallel_logprob(logits, torch.zeros(len(logits), dtype=torch.int64), vocab_size=8)[0].sum().backward()
    assert torch.equal(leaf, before) and leaf.grad.data_ptr() != leaf.data_ptr() and leaf.grad.abs().sum() > 0


def test_a_view_of_what_is_no_leaf_is_written_over():
    """As in the LM head: [s, b, V] seen as rows."""
    leaf = torch.randn(2, 3, 8, requires_grad=True)
    logits, seen = leaf * 1, []
    logits.register_hook(lambda g: seen.append(g.data_ptr()))
    ops.vocab_parallel_logprob(logits.view(6, 8), torch.zeros(6, dtype=torch.int64), vocab_size=8)[0].sum().backward()
    assert seen == [logits.data_ptr()]


def test_only_one_output_used():
    case = make_case(5, rows=4, vocab_size=33, shards=1)
    for pick, kept in enumerate(("grad_logp", "grad_entropy")):
        dropped = "grad_entropy" if kept == "grad_logp" else "grad_logp"
        case_one = case._replace(**{dropped: torch.zeros(4)})
        leaf = case.logits.clone().requires_grad_()
        out = ops.vocab_parallel_logprob(leaf * 1, case.targets, vocab_size=33)[pick]
        (out * getattr(case, kept)).sum().backward()
        assert (leaf.grad - truth(case_one)[2]).abs().max() < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_rows_of_a_transposed_view(dtype):
    base = torch.randn(6, 3, 50, dtype=torch.float32).to(dtype)  # [s, b, V]
    rows = base[:, 1]  # row stride 150
    targets = torch.tensor([0, 49, -100, 7, 20, 33])
    got = ops.vocab_parallel_logprob(rows, targets, vocab_size=50)
    want = ops.vocab_parallel_logprob(rows.contiguous(), targets, vocab_size=50)
    assert not rows.is_contiguous() and torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    leaf = base.float().requires_grad_()
    plain = base.float().requires_grad_()
    for x, op in ((leaf, ops.vocab_parallel_logprob), (plain, ops.vocab_parallel_logprob_reference)):
        logp, entropy = op((x * 1)[:, 1], targets, vocab_size=50)
        (logp + 0.3 * entropy).sum().backward()
    assert (leaf.grad - plain.grad).abs().max() < 2e-6
    assert (leaf.grad[:, [0, 2]] == 0).all()


def test_expanded_rows_do_not_share_one_gradient():
    leaf = torch.randn(1, 20, requires_grad=True)
    targets = torch.tensor([1, 2, 3])
    ops.vocab_parallel_logprob((leaf * 1).expand(3, 20), targets, vocab_size=20)[0].sum().backward()
    plain = leaf.detach().clone().requires_grad_()
    ops.vocab_parallel_logprob_reference((plain * 1).expand(3, 20), targets, vocab_size=20)[0].sum().backward()
    assert (leaf.grad - plain.grad).abs().max() < 2e-6


def test_minus_infinity_logits_have_no_probability_and_no_gradient():
    logits = torch.randn(3, 40)
    logits[:, 5:30] = -torch.inf
    case = Case(logits, torch.tensor([0, 35, 3]), 40, 4, 1.0, torch.randn(3), torch.randn(3))
    got = by_shards(case)  # the second and third shard hold -inf only
    keep = torch.ones(40, dtype=torch.bool)
    keep[5:30] = False
    small = Case(logits[:, keep].clone(), torch.tensor([0, 10, 3]), 15, 1, 1.0, case.grad_logp, case.grad_entropy)
    want = truth(small)
    assert_close(small, (got[0], got[1], got[2][:, keep]), want)
    assert (got[2][:, ~keep] == 0).all()


def test_nan_is_not_hidden():
    logits = torch.randn(2, 40)
    logits[0, 7] = torch.nan
    logits[0, 8:] = -torch.inf
    logp, entropy = ops.vocab_parallel_logprob(logits, torch.tensor([1, 1]), vocab_size=40)
    assert logp[0].isnan() and entropy[0].isnan() and logp[1].isfinite() and entropy[1].isfinite()


@pytest.mark.parametrize("backend", ["torch", *BACKENDS])
def test_nan_of_an_ignored_row_reaches_no_gradient(backend):
    logits = torch.randn(3, 40)
    logits[1] = torch.nan
    logits[2, 5] = torch.inf
    logits.requires_grad_()
    with backends.on(backend):
        logp, entropy = ops.vocab_parallel_logprob(logits * 1.0, torch.tensor([1, IGNORED, IGNORED]), vocab_size=40)
        (logp.sum() + entropy.sum()).backward()
    assert logp.isfinite().all() and entropy.isfinite().all()
    assert (
        logits.grad is not None
        and logits.grad[0].any()
        and logits.grad[0].isfinite().all()
        and not logits.grad[1:].any()
    )


@pytest.mark.parametrize("vocab_size", [1024, 151_936])
@pytest.mark.parametrize("peak", [15.5, 16.62, 17.3])
def test_many_small_terms_beside_one_peak_count(vocab_size, peak):
    """Each is too small to change the peak's sum in float32; together they are the answer: without them it is wrong by
    3e-5 or more."""
    logits = torch.full((1, vocab_size), -peak)
    logits[0, 0] = 0.0
    want = ops.vocab_parallel_logprob_reference(logits.double(), torch.tensor([0]), vocab_size=vocab_size)
    for isa in INSTRUCTION_SETS:
        if _C.use_isa(isa):
            got = ops.vocab_parallel_logprob(logits, torch.tensor([0]), vocab_size=vocab_size)
            assert all((a - b).abs().max() <= 4e-6 for a, b in zip(got, want, strict=True))


def test_closed_form():
    """Logits 0 and log 3: probabilities 1/4 and 3/4."""
    logits = torch.tensor([[0.0, 1.0986122886681098]])
    logp, entropy = ops.vocab_parallel_logprob(logits, torch.tensor([1]), vocab_size=2)
    assert logp.item() == pytest.approx(-0.2876820724517809, abs=5e-7)
    assert entropy.item() == pytest.approx(0.5623351446188083, abs=5e-7)


def test_a_million_columns_keep_their_accuracy():
    case = make_case(9, rows=2, vocab_size=1_000_003, shards=1, scale=1.0)
    want = ops.vocab_parallel_logprob_reference(case.logits.double(), case.targets, vocab_size=case.vocab_size)
    got = ops.vocab_parallel_logprob(case.logits, case.targets, vocab_size=case.vocab_size)
    assert (got[0] - want[0]).abs().max() < 2e-6 and (got[1] - want[1]).abs().max() < 4e-6


def test_half_precision_conversions_are_exact_and_rounded_like_torch():
    """Every finite 16-bit pattern is loaded exactly; gradients from subnormal to overflowing are rounded to nearest."""
    for dtype in (torch.float16, torch.bfloat16):
        patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
        finite = patterns[patterns.isfinite()]
        # Loading: with one column the statistics hold the logit itself as the maximum.
        stats = logprob.local_stats(
            finite[:, None].contiguous(), torch.zeros(len(finite), dtype=torch.int64), 0, 1, 1.0
        )
        assert torch.equal(stats[:, 0], finite.float()) and torch.equal(stats[:, 3], finite.float())
        # Storing: the gradient of the same logits in float32, rounded by torch.
        targets = torch.randint(0, 50, (400,))
        g = torch.cat([torch.randn(100) * s for s in (1e-7, 1e-4, 1.0, 1e5)])
        logits = (torch.randn(400, 50) * 3).to(dtype)
        grads = []
        for x in (logits, logits.float()):
            leaf = x.clone().requires_grad_()
            ops.vocab_parallel_logprob(leaf * 1, targets, vocab_size=50)[0].backward(g)
            grads.append(leaf.grad)
        assert torch.equal(grads[0], grads[1].to(dtype))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"logits": torch.randn(3, 8, dtype=torch.float64)},
            TypeError,
            "logits must be float32 or bfloat16 or float16, got float64",
        ),
        ({"logits": torch.randn(24)}, ValueError, "logits must have shape"),
        ({"logits": torch.randn(8, 3).T}, ValueError, "logits must have contiguous columns"),
        ({"targets": torch.zeros(3, dtype=torch.int32)}, TypeError, "targets must be int64, got int32"),
        ({"targets": torch.zeros(4, dtype=torch.int64)}, ValueError, r"targets must have shape \[3\], got \[4\]"),
        ({"targets": torch.tensor([0, 8, 1])}, ValueError, r"targets\[1\] = 8 is outside the vocabulary of 8"),
        ({"targets": torch.tensor([0, 1, -1])}, ValueError, r"targets\[2\] = -1"),
        ({"temperature": 0.0}, ValueError, "temperature must be above 0"),
        ({"temperature": float("inf")}, ValueError, "temperature must be above 0"),
        ({"temperature": float("nan")}, ValueError, "temperature must be above 0"),
        ({"temperature": 1e-46}, ValueError, "temperature must be above 0"),
        ({"temperature": "1"}, TypeError, "temperature must be a number, got str"),
        ({"vocab_size": "8"}, TypeError, "vocab_size must be an int, got str"),
        ({"vocab_size": 9}, ValueError, "vocab_size is 9, but 1 rank.s. with 8 columns each hold 8"),
        ({"vocab_start": 8}, ValueError, "vocab_start must be 0 on rank 0 of 1 with 8 columns each, got 8"),
        ({"logits": torch.empty(3, 0)}, ValueError, "vocab_size is 8, but"),
        ({"group": "tp"}, TypeError, "group must be a torch.distributed.ProcessGroup or None, got str"),
        ({"vocab_size": 0}, ValueError, "vocab_size must be at least 1"),
        ({"logits": torch.empty(3, 8, device="meta")}, ValueError, "targets is on cpu but must be on meta"),
    ],
)
def test_errors_name_the_argument(change, error, text):
    arguments = {"logits": torch.randn(3, 8), "targets": torch.tensor([0, 1, 2]), "vocab_size": 8} | change
    with pytest.raises(error, match=text):
        ops.vocab_parallel_logprob(arguments.pop("logits"), arguments.pop("targets"), **arguments)


@pytest.mark.parametrize("target", [-1, 8, 2**40])
def test_the_kernel_makes_a_row_nan_whose_target_no_token_has(target):
    """Where nobody looks at targets before it does: on a GPU, or under torch.compile."""
    stats = logprob.local_stats(torch.randn(2, 10), torch.tensor([target, 3]), 0, 8, 1.0)
    assert stats[0].isnan().all() and stats[1].isfinite().all()


def test_a_target_in_another_shards_padding_has_no_logit_here():
    stats = logprob.local_stats(torch.ones(1, 10), torch.tensor([3]), 8, 12, 1.0)
    assert stats[0].tolist() == [1.0, 4.0, 0.0, 0.0]


def test_nan_gradients_are_stored_as_nan():
    for dtype in (torch.bfloat16, torch.float16):
        leaf = torch.randn(2, 20).to(dtype).requires_grad_()
        logp, _ = ops.vocab_parallel_logprob(leaf * 1, torch.tensor([1, 2]), vocab_size=20)
        logp.backward(torch.tensor([float("nan"), 1.0]))
        assert leaf.grad[0].isnan().all() and leaf.grad[1].isfinite().all()


def test_elements_beyond_two_to_the_31_are_found():
    """Three rows 2**30 + 8 elements apart; of the 6 GB between them nothing is touched."""
    apart, columns = 2**30 + 8, 40
    store = torch.empty(2 * apart + columns, dtype=torch.bfloat16)
    rows = store.as_strided((3, columns), (apart, 1))
    rows.copy_(torch.randn(3, columns))
    near, targets = rows.clone(), torch.tensor([1, 2, 3])
    shard = (0, columns, 1.0)
    far_stats, near_stats = (logprob.local_stats(x, targets, *shard) for x in (rows, near))
    assert torch.equal(far_stats, near_stats)
    _, entropy, norm = logprob.combine_stats(near_stats[None], targets, 1.0)
    for x in (rows, near):
        logprob.gradient_(x, targets, norm, entropy, torch.ones(3), torch.ones(3), *shard)
    assert torch.equal(rows, near)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: logprob.local_stats(torch.randn(9, 8), torch.zeros(3, dtype=torch.int64), 0, 8, 1.0),
            "targets must have shape",
        ),
        (
            lambda: logprob.local_stats(torch.randn(8, 9).T, torch.zeros(9, dtype=torch.int64), 0, 8, 1.0),
            "contiguous columns",
        ),
        (
            lambda: logprob.combine_stats(torch.randn(1, 9, 4), torch.zeros(3, dtype=torch.int64), 1.0),
            "targets must have shape",
        ),
        (
            lambda: logprob.combine_stats(torch.randn(9, 4), torch.zeros(9, dtype=torch.int64), 1.0),
            "stats must have shape",
        ),
        (
            lambda: logprob.gradient(
                torch.randn(3, 8),
                torch.zeros(3, dtype=torch.int64),
                torch.zeros(1, 2),
                torch.zeros(3),
                None,
                None,
                0,
                8,
                1.0,
            ),
            "norm must have shape",
        ),
        (
            lambda: logprob.gradient_(
                torch.randn(3, 8),
                torch.zeros(3, dtype=torch.int64),
                torch.zeros(3, 2),
                torch.zeros(2),
                None,
                None,
                0,
                8,
                1.0,
            ),
            "entropy must have shape",
        ),
    ],
)
def test_registered_ops_check_what_they_are_given(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_the_twin_checks_too():
    ops.use("torch")
    try:
        with pytest.raises(ValueError, match="outside the vocabulary"):
            ops.vocab_parallel_logprob(torch.randn(3, 8), torch.tensor([0, 9, 1]), vocab_size=8)
    finally:
        ops.use("megarl")


def test_no_rows():
    logp, entropy = ops.vocab_parallel_logprob(torch.empty(0, 8), torch.empty(0, dtype=torch.int64), vocab_size=8)
    assert logp.shape == entropy.shape == (0,)


def test_backend_names_the_path_in_use():
    assert ops.backend()["CPU tensors"] in {f"C++ ({isa})" for isa in INSTRUCTION_SETS}
