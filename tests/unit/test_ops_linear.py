"""Linear + log-prob: its three modes against float64, their budgets, and what they allocate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl import ops
from megarl.ops import linear, native
from tests.conftest import examples
from tests.parallel.grid import run_grid

HALF = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Rounding of one number."""


class Case(NamedTuple):
    hidden: torch.Tensor  # [T, H]
    weight: torch.Tensor  # [V, H], the padded vocabulary of all shards
    targets: torch.Tensor
    vocab_size: int
    temperature: float
    grad_logp: torch.Tensor
    grad_entropy: torch.Tensor


def make_case(
    seed: int = 0,
    rows: int = 7,
    width: int = 12,
    vocab_size: int = 37,
    columns: int = 40,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, vocab_size, (rows,), generator=g)
    targets[torch.rand(rows, generator=g) < 0.2] = -100
    hidden = torch.randn(rows, width, generator=g).to(dtype)
    weight = (torch.randn(columns, width, generator=g) * 0.7).to(dtype)
    upstream = torch.randn(rows, generator=g), torch.randn(rows, generator=g)
    return Case(hidden, weight, targets, vocab_size, temperature, *upstream)


class Result(NamedTuple):
    logp: torch.Tensor | None
    entropy: torch.Tensor | None
    loss: torch.Tensor
    hidden: torch.Tensor
    weight: torch.Tensor


def differentiate(case: Case, mode: str, rows_of_a_chunk: int | None, **shard: Any) -> Result:
    """Of ``Σ logp·grad_logp + entropy·grad_entropy`` by mode A or C (the budget picks), B, or in float64."""
    precise = torch.float64 if mode == "truth" else case.hidden.dtype
    hidden, weight = (x.detach().to(precise).requires_grad_() for x in (case.hidden, case.weight))
    budget = None if rows_of_a_chunk is None else rows_of_a_chunk * len(case.weight) * case.weight.dtype.itemsize
    arguments = {"vocab_size": case.vocab_size, "temperature": case.temperature} | shard
    logp = entropy = None
    if mode == "B":
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def loss(logp: torch.Tensor, entropy: torch.Tensor, rows: slice) -> torch.Tensor:
            seen.append((logp.detach(), entropy.detach()))
            return (logp * case.grad_logp[rows] + entropy * case.grad_entropy[rows]).sum()

        total = ops.linear_logprob_loss(hidden, weight, case.targets, loss, logits_bytes=budget, **arguments)
        logp, entropy = (torch.cat(x) if x else None for x in zip(*seen, strict=True)) if seen else (None, None)
    else:
        op: Callable[..., Any] = ops.linear_logprob_reference if mode == "truth" else ops.linear_logprob
        logp, entropy = op(hidden, weight, case.targets, logits_bytes=budget, **arguments)
        total = (logp * case.grad_logp + entropy * case.grad_entropy).sum()
    total.backward()
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == precise
    return Result(*(None if x is None else x.detach() for x in (logp, entropy, total)), hidden.grad, weight.grad)  # type: ignore[arg-type]


def assert_close(case: Case, got: Result, want: Result) -> None:
    """Each logit is a GEMM's, off by the rounding of its dtype times its size; all else follows from that.

    The gradient of a row's logits sums up to at most ``upstream`` in magnitude, and its logits' error multiplies that.
    """
    rounding = 4e-6 + 4 * HALF[case.hidden.dtype]
    logits = (case.hidden.double() @ case.weight.double().t()).abs().amax(-1).clamp(min=1.0) / case.temperature
    assert got.logp is not None and got.entropy is not None and want.logp is not None and want.entropy is not None
    assert ((got.logp - want.logp).abs() <= rounding * logits).all()
    assert ((got.entropy - want.entropy).abs() <= rounding * logits * (1 + want.entropy)).all()
    upstream = (case.grad_logp.abs() + case.grad_entropy.abs() * (1 + want.entropy)) * logits / case.temperature
    of_hidden = upstream[:, None] * case.weight.double().abs().max()
    of_weight = (upstream[:, None] * case.hidden.double().abs()).sum(0)
    assert ((got.hidden.double() - want.hidden).abs() <= rounding * of_hidden).all()
    assert ((got.weight.double() - want.weight).abs() <= rounding * of_weight).all()


@settings(max_examples=examples(20, 120))
@given(
    case=st.builds(
        make_case,
        seed=st.integers(0, 2**31),
        rows=st.integers(1, 9),
        width=st.integers(1, 20),
        vocab_size=st.integers(1, 40),
        temperature=st.sampled_from([1.0, 0.6, 2.5]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    ),
    mode=st.sampled_from(["A", "B", "C"]),
    chunk=st.integers(1, 10),
)
def test_every_mode_agrees_with_float64(case: Case, mode: str, chunk: int) -> None:
    got = differentiate(case, mode, None if mode == "A" else chunk)
    assert_close(case, got, differentiate(case, "truth", None))
    padding = got.weight[case.vocab_size :]
    assert not padding.any()
    assert not got.hidden[case.targets == -100].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modes_agree_with_each_other(dtype: torch.dtype) -> None:
    case = make_case(3, rows=50, width=64, vocab_size=300, columns=304, dtype=dtype)
    kept = differentiate(case, "A", None)
    rounding = 4e-6 + 4 * HALF[dtype]
    """Of each against float64, as above: two are at most twice as far apart."""
    for mode, chunk in (("C", 50), ("C", 49), ("C", 8), ("C", 1), ("B", 50), ("B", 8)):
        other = differentiate(case, mode, chunk)
        for mine, a in zip(other, kept, strict=True):
            assert mine is not None and a is not None
            assert (mine - a).abs().max() <= 2 * rounding * a.abs().max(), (mode, chunk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [None, 3])
def test_bounded_logits(dtype: torch.dtype, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the derivatives of the bound exist for two rows at a time."""
    case = make_case(4, temperature=0.6, dtype=dtype)
    wanted = differentiate(case, "truth", None, softcap=2.0)
    free = differentiate(case, "truth", None)
    assert wanted.logp is not None and free.logp is not None and (wanted.logp - free.logp).abs().max() > 0.5
    assert_close(case, differentiate(case, "C", chunk, softcap=2.0), wanted)
    monkeypatch.setattr(linear, "SLOPE_ELEMENTS", 80)
    assert_close(case, differentiate(case, "C", chunk, softcap=2.0), wanted)


def test_gradients_by_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin in float64, through both ways of taking the loss."""
    monkeypatch.setattr(native, "runs_twins", True)
    case = make_case(5, rows=4, width=3, vocab_size=6, columns=7)
    hidden, weight = (x.double().requires_grad_() for x in (case.hidden, case.weight))

    def by_loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ops.linear_logprob_loss(
            hidden,
            weight,
            case.targets,
            lambda logp, entropy, _: (logp.exp() + entropy).sum(),
            vocab_size=6,
            logits_bytes=112,
        )

    assert torch.autograd.gradcheck(by_loss, (hidden, weight))
    for softcap in (None, 0.7):
        bounded = functools.partial(ops.linear_logprob, targets=case.targets, vocab_size=6, softcap=softcap)
        assert torch.autograd.gradcheck(bounded, (hidden, weight))


def _on_rank(rank: int, case: Case, world: int) -> list[Result]:
    torch.distributed.init_process_group("gloo")
    width = len(case.weight) // world
    mine = case._replace(weight=case.weight[rank * width : (rank + 1) * width])
    shard = {"group": torch.distributed.group.WORLD, "vocab_start": rank * width}
    return [differentiate(mine, mode, chunk, **shard) for mode, chunk in (("A", None), ("C", 4), ("B", 4))]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_vocabulary(world: int) -> None:
    """Log-probs are equal on all ranks; gradients of hidden add up, those of weight stand one below the other."""
    case = make_case(8, rows=11, temperature=0.8)
    want = differentiate(case, "truth", None)
    ranks = run_grid(world, _on_rank, case, world)
    for mode in range(3):
        parts = [rank[mode] for rank in ranks]
        for part in parts:
            assert torch.equal(part.logp, parts[0].logp) and torch.equal(part.loss, parts[0].loss)
        hidden, weight = sum(part.hidden for part in parts), torch.cat([part.weight for part in parts])
        assert_close(case, parts[0]._replace(hidden=hidden, weight=weight), want)


@pytest.mark.parametrize("mode", ["A", "B", "C"])
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_what_needs_a_gradient_gets_one(mode: str, frozen: str) -> None:
    case = make_case(9)
    full = differentiate(case, mode, None if mode == "A" else 2)
    hidden, weight = case.hidden.clone(), case.weight.clone()
    learns = weight if frozen == "hidden" else hidden
    learns.requires_grad_()
    budget = None if mode == "A" else 2 * 40 * 4
    if mode == "B":
        total = ops.linear_logprob_loss(
            hidden,
            weight,
            case.targets,
            lambda logp, entropy, rows: (logp * case.grad_logp[rows] + entropy * case.grad_entropy[rows]).sum(),
            vocab_size=37,
            logits_bytes=budget,
        )
    else:
        logp, entropy = ops.linear_logprob(hidden, weight, case.targets, vocab_size=37, logits_bytes=budget)
        total = (logp * case.grad_logp + entropy * case.grad_entropy).sum()
    total.backward()
    assert (weight if frozen == "weight" else hidden).grad is None
    assert torch.equal(learns.grad, full.weight if frozen == "hidden" else full.hidden)  # type: ignore[arg-type]


def test_the_loss_in_chunks_is_scaled_and_used_once() -> None:
    case = make_case(10)
    weight = case.weight.clone().requires_grad_()
    calls = []

    def loss(logp: torch.Tensor, entropy: torch.Tensor, rows: slice) -> torch.Tensor:
        calls.append((rows.start, rows.stop, logp.requires_grad))
        return -logp.sum()

    arguments = {"vocab_size": 37, "logits_bytes": 3 * 40 * 4 + 5}
    total = ops.linear_logprob_loss(case.hidden, weight, case.targets, loss, **arguments)
    assert calls == [(0, 3, True), (3, 6, True), (6, 7, True)]
    (total * 0.5).backward(retain_graph=True)
    half = weight.grad.clone()  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
    whole = differentiate(case._replace(grad_logp=-torch.ones(7), grad_entropy=torch.zeros(7)), "A", None).weight
    assert (half - whole / 2).abs().max() < 2e-6
    with torch.no_grad():
        calls.clear()
        again = ops.linear_logprob_loss(case.hidden, weight, case.targets, loss, **arguments)
    assert [learning for *_, learning in calls] == [False] * 3 and torch.equal(again, total)


def test_a_loss_without_gradient_leaves_zeros() -> None:
    weight = torch.randn(8, 4, requires_grad=True)
    total = ops.linear_logprob_loss(
        torch.randn(3, 4), weight, torch.tensor([1, 2, 3]), lambda logp, *_: torch.ones(()), vocab_size=8
    )
    assert float(total.detach()) == 1.0
    total.backward()
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("twin", [False, True])
def test_no_rows(twin: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "runs_twins", twin)
    case = make_case(11, rows=0)
    weight = case.weight.clone().requires_grad_()
    logp, entropy = ops.linear_logprob(case.hidden, weight, case.targets, vocab_size=37, logits_bytes=160)
    assert logp.shape == entropy.shape == (0,)
    total = ops.linear_logprob_loss(case.hidden, weight, case.targets, lambda logp, *_: logp.sum(), vocab_size=37)
    (logp.sum() + total).backward()
    assert weight.grad is not None and not weight.grad.any()


def test_the_twin_gives_the_same_and_its_loss_sees_the_same_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(12, rows=9)
    kernels = [differentiate(case, "C", 4), differentiate(case, "B", 4)]
    monkeypatch.setattr(native, "runs_twins", True)
    twins = [differentiate(case, "C", 4), differentiate(case, "B", 4)]
    for mine, twin in zip(kernels, twins, strict=True):
        assert_close(case, twin, differentiate(case, "truth", None))
        for a, b in zip(mine, twin, strict=True):
            assert a is not None and b is not None and (a - b).abs().max() <= 4e-6 * b.abs().max().clamp(min=1.0)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"hidden": torch.randn(3, 4, dtype=torch.float64)},
            TypeError,
            "hidden must be float32 or bfloat16 or float16, got float64",
        ),
        ({"hidden": torch.randn(3, 2, 4)}, ValueError, "hidden must have shape"),
        ({"weight": torch.randn(8, 4).bfloat16()}, TypeError, "weight must be float32, got bfloat16"),
        ({"weight": torch.randn(8, 5)}, ValueError, r"weight must have shape \[any, 4\], got \[8, 5\]"),
        ({"targets": torch.zeros(4, dtype=torch.int64)}, ValueError, r"targets must have shape \[3\], got \[4\]"),
        ({"targets": torch.tensor([0, 8, 1])}, ValueError, r"targets\[1\] = 8 is outside the vocabulary of 8"),
        ({"temperature": 0.0}, ValueError, "temperature must be above 0"),
        (
            {"logits_bytes": 31},
            ValueError,
            r"logits_bytes=31 does not hold one row of 8 logits \(32 bytes\); give at least 32, or None",
        ),
    ],
)
@pytest.mark.parametrize("mode", ["A or C", "B"])
def test_errors_name_the_argument(mode: str, change: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments = {
        "hidden": torch.randn(3, 4),
        "weight": torch.randn(8, 4),
        "targets": torch.tensor([0, 1, 2]),
        "vocab_size": 8,
    }
    arguments |= change
    with pytest.raises(error, match=text):
        if mode == "B":
            ops.linear_logprob_loss(**arguments, loss=lambda logp, *_: logp.sum())
        else:
            ops.linear_logprob(**arguments)


def test_a_loss_that_is_no_scalar_is_named() -> None:
    with pytest.raises(ValueError, match=r"loss must return a scalar tensor for a chunk, got shape \[3\]"):
        ops.linear_logprob_loss(
            torch.randn(3, 4), torch.randn(8, 4), torch.tensor([0, 1, 2]), lambda logp, *_: logp, vocab_size=8
        )


def allocations(function: Callable[[], Any]) -> list[int]:
    """Bytes of every block that torch's CPU allocator hands out within ``function`` (positive), or gets back
    (negative)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    results = profile.profiler.kineto_results  # type: ignore[union-attr]
    return [
        event.nbytes() for event in sorted(results.events(), key=lambda e: e.start_ns()) if event.name() == "[memory]"
    ]


def peak(sizes: list[int]) -> int:
    running = highest = 0
    for size in sizes:
        running += size
        highest = max(highest, running)
    return highest


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def large(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """T·V is what dominates: 1024 rows of 4000 columns, H = 16. With several threads a product has scratch memory."""
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)
    case = make_case(0, rows=1024, width=16, vocab_size=4000, columns=4000, dtype=request.param)
    return case.hidden.requires_grad_(), case.weight.requires_grad_(), case.targets


@pytest.mark.parametrize("mode", ["A", "B", "C"])
def test_memory(large: tuple[torch.Tensor, torch.Tensor, torch.Tensor], mode: str) -> None:
    hidden, weight, targets = large
    rows, columns, itemsize = len(hidden), len(weight), weight.dtype.itemsize
    chunk = rows if mode == "A" else 64
    logits = chunk * columns * itemsize

    def work() -> None:
        if mode == "B":
            ops.linear_logprob_loss(
                hidden,
                weight,
                targets,
                lambda logp, entropy, _: (logp + entropy).sum(),
                vocab_size=columns,
                logits_bytes=logits,
            ).backward()
        else:
            logp, entropy = ops.linear_logprob(hidden, weight, targets, vocab_size=columns, logits_bytes=logits)
            (logp + entropy).sum().backward()

    product = allocations(lambda: hidden[:chunk] @ weight.T)
    if sum(size >= 64 * columns * itemsize for size in product) > 1:
        pytest.skip("this torch makes a product through scratch memory of its own")
    sizes = allocations(work)
    buffers = [size for size in sizes if size >= logits]
    assert len(buffers) == {"A": 1, "B": 1, "C": 2}[mode]  # C: forward and backward, never at a time
    gradients = hidden.numel() * itemsize + weight.numel() * itemsize
    in_float32 = 0 if itemsize == 4 or mode == "A" else weight.numel() * 4 + logits
    per_row = 20 * rows * 4
    scratch = 2**20  # oneDNN's, and small numbers
    assert peak(sizes) <= logits + gradients + in_float32 + per_row + scratch
    assert (
        peak(sizes) < 1.3 * rows * columns * itemsize if mode == "A" else peak(sizes) < 0.4 * rows * columns * itemsize
    )


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["A", "B", "C"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(mode: str, dtype: torch.dtype) -> None:
    """The numbers of float64, and no second [T, V]."""
    case = make_case(0, rows=1024, width=64, vocab_size=31_999, columns=32_000, dtype=dtype)
    case = Case(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in case))
    torch.backends.cuda.matmul.allow_tf32 = False
    chunk = None if mode == "A" else 100
    assert_close(case, differentiate(case, mode, chunk), differentiate(case, "truth", None))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    differentiate(case, mode, chunk)
    logits = (chunk or 1024) * 32_000 * dtype.itemsize
    weights = 4 * case.weight.numel() * 4  # a copy, its gradient, their sum in float32, a chunk's product
    assert torch.cuda.max_memory_allocated() - before <= logits + weights + 2**23


def test_a_loss_scale_beyond_half_precision_does_not_make_mode_b_infinite():
    """65536, the usual first scale, is infinite in float16; its product with a gradient is not."""
    hidden, weight = (torch.randn(n, 16).mul(1e-3).half().requires_grad_() for n in (5, 40))
    targets = torch.tensor([0, 1, 2, 3, 39])
    total = ops.linear_logprob_loss(
        hidden, weight, targets, lambda logp, entropy, _: logp.sum() * 1e-2, vocab_size=40, logits_bytes=160
    )
    (total * 65536).backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all() and weight.grad.abs().max() > 0.1


def test_a_budget_does_not_change_the_precision_under_autocast():
    hidden, weight = torch.randn(6, 64), torch.randn(50, 64)
    targets = torch.arange(6)
    with torch.autocast("cpu", torch.bfloat16):
        kept, chunked = (
            ops.linear_logprob(hidden, weight, targets, vocab_size=50, logits_bytes=n)[0] for n in (None, 400)
        )
    assert (kept - chunked).abs().max() < 1e-5


def test_a_budget_is_an_int():
    with pytest.raises(TypeError, match="logits_bytes must be an int or None, got float"):
        ops.linear_logprob(torch.randn(2, 4), torch.randn(8, 4), torch.tensor([0, 1]), vocab_size=8, logits_bytes=1e9)
