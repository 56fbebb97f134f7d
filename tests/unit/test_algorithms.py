"""One battery for every algorithm: an independent float64 oracle, finite differences, invariances, golden rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl import _C, algorithms, ops
from megarl.algorithms import LossInput, group_stats
from megarl.config.schema import AlgorithmConfig, KLConfig
from megarl.errors import ConfigError
from megarl.ops import native
from tests.native import backends

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def make_batch(seed: int, rows: int = 5, length: int = 7, sigma: float = 0.3, dtype=torch.float64) -> LossInput:
    """Sequences with masked tokens, one of them fully masked."""
    g = torch.Generator().manual_seed(seed)
    row = torch.arange(rows).repeat_interleave(length)
    n = rows * length
    mask = torch.rand(n, generator=g) < 0.7
    if rows > 1:
        mask &= row != int(torch.randint(0, rows, (), generator=g))
    logp = -torch.rand(n, generator=g, dtype=dtype) * 3
    noise = lambda: torch.randn(n, generator=g, dtype=dtype) * sigma  # noqa: E731
    return LossInput(
        logp=logp,
        entropy=torch.rand(n, generator=g, dtype=dtype) * 2,
        old_logp=logp + noise(),
        ref_logp=logp + noise(),
        advantages=torch.randn(rows, generator=g, dtype=dtype)[row],
        mask=mask,
        row=row,
        num_rows=rows,
    )


@pytest.fixture(params=["kernels", "torch"], autouse=True)
def _in_float64(request):
    """The oracles are float64: so are the kernels' test-only build and the plain twins."""
    if request.param == "kernels":
        with backends.on("cpu double"):
            yield
        return
    ops.use("torch")
    yield
    ops.use("megarl")


# ---- oracles: plain Python floats, one token at a time, written from the papers' formulas ----


def grpo_token(batch: LossInput, t: int, c: AlgorithmConfig) -> float:
    lp, old, ref, a = (float(x[t]) for x in (batch.logp, batch.old_logp, batch.ref_logp, batch.advantages))
    ratio = math.exp(lp - old)
    clipped = min(max(ratio, 1 - c.clip_low), 1 + c.clip_high)
    objective = min(ratio * a, clipped * a)
    if c.dual_clip is not None and a < 0:
        objective = max(objective, c.dual_clip * a)
    x = ref - lp
    penalty = {"k2": 0.5 * x * x, "k3": math.exp(x) - x - 1}[c.kl.estimator]
    return -objective + c.kl.coef * penalty - c.entropy_coef * float(batch.entropy[t])


def sft_token(batch: LossInput, t: int, c: AlgorithmConfig) -> float:
    return -float(batch.logp[t])


def oracle(per_token: Callable[[LossInput, int, AlgorithmConfig], float], batch: LossInput, c: AlgorithmConfig) -> float:
    """The aggregated loss of a whole batch, already divided."""
    by_row: dict[int, list[float]] = {}
    for t in range(len(batch.mask)):
        if batch.mask[t]:
            by_row.setdefault(int(batch.row[t]), []).append(per_token(batch, t, c))
    sequences = list(by_row.values())
    return {
        "token_mean": lambda: sum(map(sum, sequences)) / sum(map(len, sequences)),
        "seq_mean_token_mean": lambda: sum(sum(s) / len(s) for s in sequences) / len(sequences),
        "seq_mean_token_sum": lambda: sum(map(sum, sequences)) / len(sequences),
        "seq_mean_token_sum_norm": lambda: sum(map(sum, sequences)) / (len(sequences) * c.aggregation_length),
    }[c.aggregation]()


ORACLES = {"grpo": grpo_token, "sft": sft_token}
VARIANTS: dict[str, list[AlgorithmConfig]] = {
    "grpo": [
        AlgorithmConfig(kl=KLConfig(0.0)),
        AlgorithmConfig(clip_low=0.2, clip_high=0.28, kl=KLConfig(0.1, "k3"), entropy_coef=0.05),
        AlgorithmConfig(clip_low=10.0, clip_high=10.0, kl=KLConfig(0.3, "k2")),  # R1's: 1 - clip_low is negative
        AlgorithmConfig(dual_clip=1.1, kl=KLConfig(0.001)),
    ],
    "sft": [AlgorithmConfig(name="sft")],
}
BATTERY = [
    pytest.param(name, dataclasses.replace(variant, aggregation=mode, aggregation_length=9), id=f"{name}-{i}-{mode}")
    for name, variants in VARIANTS.items()
    for i, variant in enumerate(variants)
    for mode in AGGREGATIONS
]


def divided(name: str, batches: list[LossInput], config: AlgorithmConfig) -> torch.Tensor:
    """What the trainer does: sum over micro-batches, divided once by the global count."""
    algorithm = algorithms.get(name)
    count = sum(algorithm.count(b.mask, b.row, b.num_rows, config) for b in batches)
    return sum(algorithm.loss(b, config).total for b in batches) / count


def gradient(name: str, batch: LossInput, config: AlgorithmConfig, pieces: list[list[int]] | None = None):
    """(loss, d loss / d logp, d loss / d entropy), the batch optionally split into micro-batches of rows."""
    logp, entropy = batch.logp.clone().requires_grad_(), batch.entropy.clone().requires_grad_()
    batch = dataclasses.replace(batch, logp=logp, entropy=entropy)
    loss = divided(name, [batch] if pieces is None else [take(batch, rows) for rows in pieces], config)
    grads = torch.autograd.grad(loss, (logp, entropy), allow_unused=True)
    return loss.detach(), *(torch.zeros_like(logp) if g is None else g for g in grads)


def take(batch: LossInput, rows: list[int]) -> LossInput:
    """The micro-batch of some rows in that order, renumbered from 0."""
    places = [(batch.row == r).nonzero()[:, 0] for r in rows]
    keep, row = torch.cat(places), torch.repeat_interleave(torch.tensor([len(p) for p in places]))
    tensors = {f: getattr(batch, f)[keep] for f in ("logp", "entropy", "old_logp", "ref_logp", "advantages", "mask")}
    return LossInput(**tensors, row=row, num_rows=len(rows))


def test_every_algorithm_is_in_the_battery():
    assert set(algorithms.ALGORITHMS) == set(ORACLES) == set(VARIANTS)
    for name, algorithm in algorithms.ALGORITHMS.items():
        assert algorithm.name == name and algorithm.source
        assert algorithm.needs <= {"old_logp", "ref_logp", "advantages", "group"}
        assert algorithm.roles <= {"actor", "critic", "reference", "reward"}


@pytest.mark.parametrize(("name", "config"), BATTERY)
def test_oracle(name, config):
    for seed in range(3):
        batch = make_batch(seed)
        assert float(divided(name, [batch], config)) == pytest.approx(oracle(ORACLES[name], batch, config), rel=1e-12)


@pytest.mark.parametrize(("name", "config"), BATTERY)
def test_finite_differences(name, config):
    batch = make_batch(11, rows=3, length=4)
    _, by_logp, by_entropy = gradient(name, batch, config)
    step = 1e-6
    for field, grad in (("logp", by_logp), ("entropy", by_entropy)):
        for t in range(len(batch.mask)):
            nudge = torch.zeros_like(batch.logp)
            nudge[t] = step
            up, down = (
                oracle(ORACLES[name], dataclasses.replace(batch, **{field: getattr(batch, field) + s * nudge}), config)
                for s in (1, -1)
            )
            assert float(grad[t]) == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(("name", "config"), BATTERY)
def test_masked_tokens_do_not_matter(name, config):
    batch = make_batch(5)
    clean = gradient(name, batch, config)
    for junk in (torch.nan, torch.inf, -torch.inf, 1e30):
        dirty = {
            f: torch.where(batch.mask, getattr(batch, f), junk)
            for f in ("logp", "entropy", "old_logp", "ref_logp", "advantages")
        }
        got = gradient(name, dataclasses.replace(batch, **dirty), config)
        assert all(torch.equal(a, b) for a, b in zip(clean, got, strict=True))
        metrics = algorithms.get(name).loss(dataclasses.replace(batch, **dirty), config).metrics
        assert all(math.isfinite(float(total)) for total, _ in metrics.values())
    kept = clean[1][~batch.mask]
    assert torch.equal(kept, torch.zeros_like(kept))


@pytest.mark.parametrize(("name", "config"), BATTERY)
def test_micro_batches_and_row_order_do_not_matter(name, config):
    batch = make_batch(6, rows=6)
    whole = gradient(name, batch, config)
    for pieces in ([[0, 1], [2, 3, 4], [5]], [[5], [4], [3], [2], [1], [0]], [[3, 0, 5], [1, 4, 2]]):
        for a, b in zip(whole, gradient(name, batch, config, pieces), strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)
    algorithm = algorithms.get(name)
    full = algorithm.loss(batch, config).metrics
    parts = [algorithm.loss(take(batch, rows), config).metrics for rows in ([0, 1], [2, 3, 4], [5])]
    for key, (total, count) in full.items():
        assert sum(float(p[key][0]) for p in parts) == pytest.approx(float(total), rel=1e-12)
        assert sum(int(p[key][1]) for p in parts) == int(count)


@pytest.mark.parametrize(("name", "config"), BATTERY)
def test_fully_masked_micro_batch_adds_nothing(name, config):
    batch = make_batch(7)
    empty = dataclasses.replace(make_batch(8), mask=torch.zeros_like(batch.mask))
    assert algorithms.get(name).count(empty.mask, empty.row, empty.num_rows, config) == 0
    assert divided(name, [batch, empty], config) == divided(name, [batch], config)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_no_signal_no_gradient(mode):
    """Advantages 0, policy equal to the reference, no entropy term: every gradient is exactly 0."""
    batch = make_batch(9)
    batch = dataclasses.replace(batch, advantages=torch.zeros_like(batch.logp), ref_logp=batch.logp.clone())
    loss, by_logp, by_entropy = gradient("grpo", batch, AlgorithmConfig(aggregation=mode, kl=KLConfig(0.5)))
    assert loss == 0 and not by_logp.any() and not by_entropy.any()


def test_gradient_at_ratio_one_is_the_policy_gradient():
    batch = make_batch(10)
    batch = dataclasses.replace(batch, old_logp=batch.logp.clone())
    _, by_logp, _ = gradient("grpo", batch, AlgorithmConfig(kl=KLConfig(0.0)))
    want = torch.where(batch.mask, -batch.advantages, 0.0) / batch.mask.sum()
    assert torch.allclose(by_logp, want, rtol=1e-12)


@pytest.mark.parametrize("name", list(ORACLES))
def test_float32_is_close_to_float64(name, monkeypatch):
    config = VARIANTS[name][-1]
    batch = make_batch(12, rows=8, length=50)
    single = {f: getattr(batch, f).float() for f in ("logp", "entropy", "old_logp", "ref_logp", "advantages")}
    exact = gradient(name, batch, config)
    monkeypatch.setattr(native, "library", _C)
    for a, b in zip(exact, gradient(name, dataclasses.replace(batch, **single), config), strict=True):
        assert b.dtype == torch.float32 and (a - b).abs().max() <= 1e-6


# ---- golden rows ----


def test_grpo_advantages_golden():
    """algorithms.md: rewards [1,0,0,0] give 1.499997 (population std would give 1.73205)."""
    a = lambda rewards, **kw: [algorithms.get("grpo").advantage(r, group_stats(rewards), AlgorithmConfig(**kw)) for r in rewards]  # noqa: E731
    assert a([1, 0, 0, 0]) == pytest.approx([1.499997, -0.499999, -0.499999, -0.499999], abs=1e-6)
    assert a([0.7] * 8) == [0.0] * 8
    assert a([1e6 / 3] * 5, normalize_by_std=False) == [0.0] * 5
    assert a([0.25]) == [0.25]
    assert a([1, 0, 0, 1], normalize_by_std=False) == [0.5, -0.5, -0.5, 0.5]


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16), st.randoms())
def test_group_stats(rewards, random):
    stats = group_stats(rewards)
    shuffled = list(rewards)
    random.shuffle(shuffled)
    assert group_stats(shuffled) == stats and stats.size == len(rewards)
    want = torch.tensor(rewards, dtype=torch.float64)
    assert stats.mean == pytest.approx(float(want.mean()), abs=1e-9)
    assert stats.std == pytest.approx(float(want.std()), abs=1e-9)
    assert (stats.std == 0.0) == (len(set(rewards)) == 1) or stats.std < 1e-150  # squares of tiny numbers vanish


def test_group_stats_refuses_what_has_no_statistics():
    with pytest.raises(ValueError, match="at least one"):
        group_stats([])
    with pytest.raises(ValueError, match="finite"):
        group_stats([1.0, math.nan])


def one_token(logp: float, old: float, ref: float, advantage: float) -> LossInput:
    t = lambda x: torch.tensor([x], dtype=torch.float64)  # noqa: E731
    return LossInput(t(logp), t(0.0), t(old), t(ref), t(advantage), torch.tensor([True]), torch.tensor([0]), 1)


@pytest.mark.parametrize(
    ("ratio", "advantage", "changes", "loss", "clipped"),
    [
        (1.5, 1.0, {}, -1.2, 1),
        (0.5, 1.0, {}, -0.5, 0),
        (1.5, -1.0, {}, 1.5, 0),
        (0.5, -1.0, {}, 0.8, 1),
        (1.25, 1.0, {"clip_high": 0.28}, -1.25, 0),
        (9.0, -2.0, {"dual_clip": 3.0}, 6.0, 0),
        (9.0, 2.0, {"clip_low": 10.0, "clip_high": 10.0, "dual_clip": 3.0}, -18.0, 0),
    ],
)
def test_clip_golden(ratio, advantage, changes, loss, clipped):
    out = algorithms.get("grpo").loss(one_token(math.log(ratio), 0.0, 0.0, advantage), AlgorithmConfig(kl=KLConfig(0.0), **changes))
    assert float(out.total) == pytest.approx(loss, rel=1e-12)
    assert int(out.metrics["actor/pg_clipfrac"][0]) == clipped
    if "dual_clip" in changes:
        assert int(out.metrics["actor/pg_clipfrac_lower"][0]) == (advantage < 0)


def test_kl_golden():
    """logp − ref = −log 2: k2 = ½ log²2, k3 = 2 − log 2 − 1."""

    def kl(logp: float, ref: float, estimator: str) -> float:
        config = AlgorithmConfig(kl=KLConfig(0.1, estimator))
        return float(algorithms.get("grpo").loss(one_token(logp, logp, ref, 0.0), config).metrics["actor/kl_loss"][0])

    assert kl(-math.log(2), 0.0, "k2") == pytest.approx(0.5 * math.log(2) ** 2)
    assert kl(-math.log(2), 0.0, "k3") == pytest.approx(1 - math.log(2))
    assert 0 <= kl(-1.0, -1.0 + 1e-9, "k3") < 1e-17
    with pytest.raises(ConfigError, match="k2 or k3"):
        kl(-math.log(2), 0.0, "k1")


def test_metrics_are_named_as_in_verl_and_are_sums_with_counts():
    batch = make_batch(13)
    config = AlgorithmConfig(kl=KLConfig(0.1), aggregation="seq_mean_token_mean")
    loss = algorithms.get("grpo").loss(dataclasses.replace(batch, logp=batch.logp.requires_grad_()), config)
    assert set(loss.metrics) == {"actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/kl_loss", "actor/entropy"}
    assert all(not total.requires_grad and total.dim() == 0 for total, _ in loss.metrics.values())
    total, count = loss.metrics["actor/ppo_kl"]
    want = (batch.old_logp - batch.logp)[batch.mask]
    assert float(total.detach()) == pytest.approx(float(want.sum().detach())) and int(count) == int(batch.mask.sum())
    pg, kl = (float(loss.metrics[k][0]) for k in ("actor/pg_loss", "actor/kl_loss"))
    assert float(loss.total.detach()) == pytest.approx(pg + 0.1 * kl)


def test_missing_inputs_and_unknown_names_are_config_errors():
    batch = dataclasses.replace(make_batch(14), ref_logp=None, entropy=None)
    grpo = algorithms.get("grpo")
    assert set(grpo.loss(batch, AlgorithmConfig(kl=KLConfig(0.0))).metrics) == {"actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl"}
    with pytest.raises(ConfigError, match="algorithm.kl.coef is 0.1"):
        grpo.loss(batch, AlgorithmConfig(kl=KLConfig(0.1)))
    with pytest.raises(ConfigError, match="algorithm.entropy_coef is 0.2"):
        grpo.loss(batch, AlgorithmConfig(kl=KLConfig(0.0), entropy_coef=0.2))
    with pytest.raises(ConfigError, match="old_logp"):
        grpo.loss(dataclasses.replace(batch, old_logp=None), AlgorithmConfig())
    with pytest.raises(ConfigError, match="dual_clip must be above 1"):
        grpo.loss(batch, AlgorithmConfig(kl=KLConfig(0.0), dual_clip=0.5))
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        algorithms.get("gpro")
