"""One battery for every algorithm: an independent float64 oracle, finite differences, invariances, golden rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl import _C
from megarl.buffer.experience.operators import group_stats
from megarl.config.algorithms import (
    AlgorithmConfig,
    DistillConfig,
    KLConfig,
    MirrorDescentConfig,
    OPMDConfig,
    PPOConfig,
    ReinforcePPConfig,
    ReMaxConfig,
)
from megarl.core.errors import ConfigError
from megarl.core.schema import GroupStats
from megarl.learn import algorithms
from megarl.learn.algorithms import LossInput, types
from megarl.ops import native
from tests.native import backends

FIELDS = ("logp", "entropy", "old_logp", "ref_logp", "advantages", "engine_logp")
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
        engine_logp=logp + noise() * 2,
    )


@pytest.fixture(params=["cpu double", "torch"], ids=["kernels", "torch"], autouse=True)
def _in_float64(request):
    """The oracles are float64: so are the kernels' test-only build and the plain twins."""
    with backends.on(request.param):
        yield


# ---- oracles: plain Python floats, one token at a time, written from the papers' formulas ----


# ``frozen`` is the batch that constants are taken from (what has no gradient): the batch itself, or before it was
# nudged.
PerToken = Callable[[LossInput, int, AlgorithmConfig, LossInput], float]


def log_ratios(batch: LossInput, t: int) -> list[float]:
    """Of the kept tokens of token t's row."""
    tokens = [u for u in range(len(batch.mask)) if batch.mask[u] and batch.row[u] == batch.row[t]]
    return [float(batch.logp[u]) - float(batch.old_logp[u]) for u in tokens]


def ratio_of(batch: LossInput, t: int, c: AlgorithmConfig) -> float:
    if c.importance == "token":
        return math.exp(float(batch.logp[t]) - float(batch.old_logp[t]))
    every = log_ratios(batch, t)
    return math.exp(sum(every) / (len(every) if c.importance == "sequence_mean" else 1))


def off_policy(batch: LossInput, t: int, c: AlgorithmConfig) -> float:
    r = math.exp(float(batch.old_logp[t]) - float(batch.engine_logp[t]))
    if c.correction == "mask":
        return r if 1 / c.correction_cap <= r <= c.correction_cap else 0.0
    return min(r, c.correction_cap) if c.correction == "truncate" else 1.0


def regularisers(batch: LossInput, t: int, c: AlgorithmConfig) -> float:
    x = float(batch.ref_logp[t]) - float(batch.logp[t])
    penalty = {"k1": -x, "k2": 0.5 * x * x, "k3": min(math.exp(x) - x - 1, 10.0)}[c.kl.estimator]
    return (c.kl.coef * penalty if c.kl.place == "loss" else 0.0) - c.entropy_coef * float(batch.entropy[t])


def grpo_token(batch: LossInput, t: int, c: AlgorithmConfig, frozen: LossInput) -> float:
    a, ratio = float(batch.advantages[t]), ratio_of(batch, t, c)
    clipped = min(max(ratio, 1 - c.clip_low), 1 + c.clip_high)
    objective = min(ratio * a, clipped * a)
    if c.dual_clip is not None and a < 0:
        objective = max(objective, c.dual_clip * a)
    return -off_policy(batch, t, c) * objective + regularisers(batch, t, c)


def cispo_token(batch: LossInput, t: int, c: AlgorithmConfig, frozen: LossInput) -> float:
    weight = min(ratio_of(frozen, t, c), 1 + c.clip_high)
    surrogate = -weight * float(batch.advantages[t]) * float(batch.logp[t])
    return off_policy(batch, t, c) * surrogate + regularisers(batch, t, c)


def opmd_token(batch: LossInput, t: int, c: AlgorithmConfig, frozen: LossInput) -> float:
    surrogate = -float(batch.advantages[t]) * float(batch.logp[t]) / (1 + c.tau)
    return off_policy(batch, t, c) * surrogate + regularisers(batch, t, c)


def kimi_token(batch: LossInput, t: int, c: AlgorithmConfig, frozen: LossInput) -> float:
    """Shares of a row's loss in proportion to each token's log-ratio: every aggregation weighs a row's tokens alike."""
    s, own = sum(log_ratios(batch, t)), float(batch.logp[t]) - float(batch.old_logp[t])
    return -float(batch.advantages[t]) * own + c.tau / 2 * s * own + regularisers(batch, t, c)


def sft_token(batch: LossInput, t: int, c: AlgorithmConfig, frozen: LossInput) -> float:
    return -float(batch.logp[t])


def plain(batch: LossInput) -> Any:
    """The batch with lists in place of tensors, of which an entry is found a hundred times sooner."""
    return SimpleNamespace(**{f: getattr(batch, f).tolist() for f in (*FIELDS, "mask", "row")})


def oracle(per_token: PerToken, batch: LossInput, c: AlgorithmConfig, frozen: LossInput | None = None) -> float:
    """The aggregated loss of a whole batch, already divided."""
    batch, frozen = plain(batch), plain(frozen or batch)
    by_row: dict[int, list[float]] = {}
    for t in range(len(batch.mask)):
        if batch.mask[t]:
            by_row.setdefault(int(batch.row[t]), []).append(per_token(batch, t, c, frozen))
    sequences = list(by_row.values())
    return {
        "token_mean": lambda: sum(map(sum, sequences)) / sum(map(len, sequences)),
        "seq_mean_token_mean": lambda: sum(sum(s) / len(s) for s in sequences) / len(sequences),
        "seq_mean_token_sum": lambda: sum(map(sum, sequences)) / len(sequences),
        "seq_mean_token_sum_norm": lambda: sum(map(sum, sequences)) / (len(sequences) * c.aggregation_length),
    }[c.aggregation]()


ORACLES: dict[str, PerToken] = {
    "cispo": cispo_token,
    "distill": grpo_token,
    "grpo": grpo_token,
    "gspo": grpo_token,
    "kimi_mirror_descent": kimi_token,
    "opmd": opmd_token,
    "ppo": grpo_token,
    "reinforce_pp": grpo_token,
    "reinforce_pp_baseline": grpo_token,
    "remax": grpo_token,
    "rloo": grpo_token,
    "sft": sft_token,
}
VARIANTS: dict[str, list[AlgorithmConfig]] = {
    "grpo": [
        AlgorithmConfig(kl=KLConfig(0.0)),
        AlgorithmConfig(clip_low=0.2, clip_high=0.28, kl=KLConfig(0.1, "k3"), entropy_coef=0.05),
        AlgorithmConfig(clip_low=10.0, clip_high=10.0, kl=KLConfig(0.3, "k2")),  # R1's: 1 - clip_low is negative
        AlgorithmConfig(importance="sequence_product", clip_low=10.0, clip_high=10.0, kl=KLConfig(0.001)),
        AlgorithmConfig(correction="truncate", correction_cap=1.2, kl=KLConfig(0.1)),
        AlgorithmConfig(dual_clip=1.1, kl=KLConfig(0.001)),
    ],
    "cispo": [
        AlgorithmConfig(name="cispo", clip_high=0.1, kl=KLConfig(0.0)),
        AlgorithmConfig(
            name="cispo", clip_high=4.0, kl=KLConfig(0.1), entropy_coef=0.05, correction="mask", correction_cap=1.3
        ),
    ],
    "distill": [
        DistillConfig(name="distill", kl=KLConfig(0.0)),
        DistillConfig(name="distill", kl=KLConfig(0.1), entropy_coef=0.05, correction="truncate", correction_cap=1.2),
    ],
    "gspo": [
        AlgorithmConfig(name="gspo", importance="sequence_mean", clip_low=3e-4, clip_high=4e-4, kl=KLConfig(0.0)),
        AlgorithmConfig(
            name="gspo", importance="sequence_mean", kl=KLConfig(0.1), correction="truncate", correction_cap=1.2
        ),
    ],
    "kimi_mirror_descent": [
        MirrorDescentConfig(name="kimi_mirror_descent", kl=KLConfig(0.0)),
        MirrorDescentConfig(name="kimi_mirror_descent", tau=0.3, kl=KLConfig(0.1, "k2"), entropy_coef=0.05),
    ],
    "opmd": [
        OPMDConfig(name="opmd", kl=KLConfig(0.0)),
        OPMDConfig(name="opmd", tau=0.3, kl=KLConfig(0.1), entropy_coef=0.05, correction="mask", correction_cap=1.3),
    ],
    "ppo": [
        PPOConfig(name="ppo", kl=KLConfig(0.3, "k1", "reward"), entropy_coef=0.05),
        PPOConfig(name="ppo", kl=KLConfig(0.1), dual_clip=1.1, correction="truncate", correction_cap=1.2),
    ],
    "reinforce_pp": [ReinforcePPConfig(name="reinforce_pp", kl=KLConfig(0.3, "k3", "reward"), correction="mask")],
    "remax": [ReMaxConfig(name="remax", kl=KLConfig(0.1, "k2"), correction="truncate", correction_cap=1.2)],
    "reinforce_pp_baseline": [AlgorithmConfig(name="reinforce_pp_baseline", kl=KLConfig(0.1, "k2"), correction="mask")],
    "rloo": [AlgorithmConfig(name="rloo", kl=KLConfig(0.1), correction="truncate", correction_cap=1.2)],
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
    tensors = {f: getattr(batch, f)[keep] for f in (*FIELDS, "mask")}
    return LossInput(**tensors, row=row, num_rows=len(rows))


OF_THEIR_OWN = {"dpo", "mix", "online_dpo", "reward_model"}
"""Whose losses are not of one kind of token: test_algorithms_pairs.py."""


def test_every_algorithm_is_in_the_battery():
    assert set(algorithms.ALGORITHMS) - OF_THEIR_OWN == set(ORACLES) == set(VARIANTS)
    for name, algorithm in algorithms.ALGORITHMS.items():
        assert algorithm.name == name and algorithm.source
        assert algorithm.needs <= types.NEEDS and algorithm.roles <= types.ROLES
        assert bool({"ref_logp", "kl"} & algorithm.needs) == ("reference" in algorithm.roles)
        assert ("values" in algorithm.needs) == ("critic" in algorithm.roles)
        by_rewards = algorithm.advantage or algorithm.estimate or algorithm.choose_pairs
        assert (by_rewards is None) == algorithm.offline
        assert ("advantages" in algorithm.needs) == bool(algorithm.advantage or algorithm.estimate)


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
                oracle(
                    ORACLES[name],
                    dataclasses.replace(batch, **{field: getattr(batch, field) + s * nudge}),
                    config,
                    batch,
                )
                for s in (1, -1)
            )
            assert float(grad[t]) == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(("name", "config"), BATTERY)
def test_masked_tokens_do_not_matter(name, config):
    batch = make_batch(5)
    clean = gradient(name, batch, config)
    for junk in (torch.nan, torch.inf, -torch.inf, 1e30):
        dirty = {f: torch.where(batch.mask, getattr(batch, f), junk) for f in FIELDS}
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
    single = {f: getattr(batch, f).float() for f in FIELDS}
    exact = gradient(name, dataclasses.replace(batch, **{f: x.double() for f, x in single.items()}), config)
    monkeypatch.setattr(native, "library", _C)
    for a, b in zip(exact, gradient(name, dataclasses.replace(batch, **single), config), strict=True):
        assert b.dtype == torch.float32 and (a - b).abs().max() <= 1e-6 * max(1.0, float(a.abs().max()))


# ---- golden rows ----


def test_grpo_advantages_golden():
    """algorithms.md: rewards [1,0,0,0] give 1.499997 (population std would give 1.73205)."""

    def a(rewards, **kw):
        return [algorithms.get("grpo").advantage(r, group_stats(rewards), AlgorithmConfig(**kw)) for r in rewards]

    assert a([1, 0, 0, 0]) == pytest.approx([1.499997, -0.499999, -0.499999, -0.499999], abs=1e-6)
    assert a([0.7] * 8) == [0.0] * 8
    assert a([1e6 / 3] * 5, normalize_by_std=False) == [0.0] * 5
    assert a([0.25]) == [0.25]
    assert a([1, 0, 0, 1], normalize_by_std=False) == [0.5, -0.5, -0.5, 0.5]


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
    for large in ([1e200, 0.0], [1.7e308, 1.7e308, 1.0]):
        with pytest.raises(ValueError, match="variance"):
            group_stats(large)
    assert group_stats([1e200, 1e200]) == GroupStats(1e200, 0.0, 2)


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
    out = algorithms.get("grpo").loss(
        one_token(math.log(ratio), 0.0, 0.0, advantage), AlgorithmConfig(kl=KLConfig(0.0), **changes)
    )
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
    far = int(batch.mask.nonzero()[0])
    batch.ref_logp[far] = batch.logp[far] + 5.0
    loss = algorithms.get("grpo").loss(dataclasses.replace(batch, logp=batch.logp.requires_grad_()), config)
    names = {"pg_loss", "pg_clipfrac", "ppo_kl", "kl_loss", "kl_clampfrac", "entropy"}
    assert set(loss.metrics) == {f"actor/{name}" for name in names}
    d = (batch.ref_logp - batch.logp)[batch.mask].detach()
    clamped, tokens = map(int, loss.metrics["actor/kl_clampfrac"])
    assert clamped == int((torch.expm1(d) - d > 10).sum()) > 0 and tokens == int(batch.mask.sum())
    assert all(not total.requires_grad and total.dim() == 0 for total, _ in loss.metrics.values())
    total, count = loss.metrics["actor/ppo_kl"]
    want = (batch.old_logp - batch.logp)[batch.mask]
    assert float(total.detach()) == pytest.approx(float(want.sum().detach())) and int(count) == int(batch.mask.sum())
    pg, kl = (float(loss.metrics[k][0]) for k in ("actor/pg_loss", "actor/kl_loss"))
    assert float(loss.total.detach()) == pytest.approx(pg + 0.1 * kl)


def test_missing_inputs_and_unknown_names_are_config_errors():
    batch = dataclasses.replace(make_batch(14), ref_logp=None, entropy=None)
    grpo = algorithms.get("grpo")
    assert set(grpo.loss(batch, AlgorithmConfig(kl=KLConfig(0.0))).metrics) == {
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/ppo_kl",
    }
    with pytest.raises(ConfigError, match="algorithm.kl.coef is 0.1"):
        grpo.loss(batch, AlgorithmConfig(kl=KLConfig(0.1)))
    with pytest.raises(ConfigError, match="algorithm.entropy_coef is 0.2"):
        grpo.loss(batch, AlgorithmConfig(kl=KLConfig(0.0), entropy_coef=0.2))
    with pytest.raises(ConfigError, match="old_logp"):
        grpo.loss(dataclasses.replace(batch, old_logp=None), AlgorithmConfig())
    with pytest.raises(ConfigError, match="dual_clip must be above 1"):
        grpo.loss(batch, AlgorithmConfig(kl=KLConfig(0.0), dual_clip=0.5))
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        algorithms.get("grpoo")
