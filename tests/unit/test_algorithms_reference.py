"""Each algorithm from rewards to gradients against an independent float64 reference; any split of a batch is the same
batch.

The reference knows rows of numbers, numpy's statistics and autograd; nothing of megarl's but the settings.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.buffer.experience.operators import group_stats
from megarl.config import compose, config_dir
from megarl.config.algorithms import (
    AlgorithmConfig,
    AnyAlgorithmConfig,
    KLConfig,
    MirrorDescentConfig,
    OPMDConfig,
    settings_of,
)
from megarl.core.errors import ConfigError
from megarl.learn import algorithms
from megarl.learn.algorithms import LossInput
from tests.conftest import examples
from tests.native import backends
from tests.unit.test_algorithms import AGGREGATIONS, FIELDS, OF_THEIR_OWN, gradient, make_batch, one_token, take

GROUPS = ([1.0, 0.0, 0.0, 0.0], [0.7, 0.7, 0.7], [0.3], [2.0, -1.0], [0.5, 0.5])
"""Rewards: an ordinary group, all-equal ones whose mean is not exact in floats, a group of one, a pair."""
MASKED_ROWS = (2, 5)
LENGTHS = (5, 1, 4, 7, 2, 3, 6, 1, 5, 4, 2, 3)
RL = sorted(set(algorithms.ALGORITHMS) - {"sft"} - OF_THEIR_OWN)


@pytest.fixture(params=["cpu double", "torch"], ids=["kernels", "torch"], autouse=True)
def _backend(request):
    """In float64, so that what is compared is the formula."""
    with backends.on(request.param):
        yield


@functools.cache
def composed(name: str) -> AlgorithmConfig:
    """What ``algorithm=name`` sets."""
    return compose([f"algorithm={name}"]).algorithm


def preset(name: str, **changes: Any) -> AlgorithmConfig:
    """What ``algorithm=name`` sets, with all terms on."""
    config = composed(name)
    values = {"kl": KLConfig(0.1, config.kl.estimator, config.kl.place), "entropy_coef": 0.02} | changes
    return dataclasses.replace(config, **values)


PRESETS = sorted(p.stem for p in (config_dir() / "algorithm").glob("*.yaml"))
SAMPLED = [name for name in PRESETS if composed(name).name in RL]
"""Presets of algorithms whose loss is of sampled tokens."""
CASES = [(name, {}) for name in SAMPLED]
CASES += [(name, {"clip_low": 0.5, "clip_high": 1.0}) for name in SAMPLED]  # powers of two: ratios lie on the bounds
CASES += [("grpo", {"importance": "sequence_mean"}), ("grpo", {"dual_clip": 2.0, "clip_high": 1.0})]
CASES += [
    (name, {"correction": correction, "correction_cap": 2.0})
    for name in SAMPLED
    if name != "kimi_mirror_descent"
    for correction in ("truncate", "mask")
]
IDS = [f"{name}-{'-'.join(f'{k}={v}' for k, v in changes.items()) or 'preset'}" for name, changes in CASES]


def batch_of(advantages: list[float], seed: int) -> LossInput:
    """Rows of ``LENGTHS``. Every second old_logp is logp itself or a factor of 2 off, so that ratios tie with
    bounds."""
    g = torch.Generator().manual_seed(seed)
    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    n = len(row)
    noise = lambda: torch.randn(n, generator=g, dtype=torch.float64) * 0.4  # noqa: E731
    # Multiples of log 2 around 0: differences of two are exact, so exp of them is a power of two.
    tied = math.log(2.0) * torch.randint(-1, 2, (n,), generator=g).double()
    ties = torch.arange(n) % 2 == 0
    old = torch.where(ties, torch.zeros(n, dtype=torch.float64), -torch.rand(n, generator=g, dtype=torch.float64) * 3)
    mask = (torch.rand(n, generator=g) < 0.8) & ~torch.isin(row, torch.tensor(MASKED_ROWS))
    return LossInput(
        logp=old + torch.where(ties, tied, noise()),
        entropy=torch.rand(n, generator=g, dtype=torch.float64),
        old_logp=old,
        ref_logp=old + noise(),
        advantages=torch.tensor(advantages, dtype=torch.float64)[row],
        mask=mask,
        row=row,
        num_rows=len(LENGTHS),
        engine_logp=old - torch.where(ties, tied.roll(1), noise() * 3),
    )


def reference_advantages(name: str, c: AlgorithmConfig, tokens: np.ndarray) -> list[float]:
    opmd = c.opmd if isinstance(c, OPMDConfig) else "mean"
    out: list[float] = []
    for group in GROUPS:
        r = np.array(group)
        equal = len(set(group)) == 1
        for i in range(len(r)):
            others = np.delete(r, i)
            if len(r) == 1:
                a = r[i] if opmd == "mean" else 0.0
            elif equal:
                a = 0.0
            elif name == "rloo" or opmd == "pairwise":
                a = r[i] - others.mean()
            elif name in ("grpo", "gspo", "cispo") and c.normalize_by_std:
                a = (r[i] - r.mean()) / (r.std(ddof=1) + 1e-6)
            else:
                a = r[i] - r.mean()
            out.append(float(a))
    if name == "reinforce_pp_baseline":
        every = np.repeat(out, tokens)
        out = [float(a) for a in (np.array(out) - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8)]
    return out


def reference_loss(name: str, c: AlgorithmConfig, b: LossInput) -> torch.Tensor:
    """A mean over rows of plain formulas, one row at a time."""
    rows, tokens = [], 0
    for i in range(b.num_rows):
        keep = (b.row == i) & b.mask
        if not keep.any():
            continue
        x = SimpleNamespace(**{f: getattr(b, f)[keep] for f in FIELDS})
        delta = x.logp - x.old_logp
        exponent = {
            "token": delta,
            "sequence_mean": delta.mean() + 0 * delta,
            "sequence_product": delta.sum() + 0 * delta,
        }
        ratio, a = exponent[c.importance].exp(), x.advantages
        if name == "cispo":
            each = -torch.minimum(ratio, torch.tensor(1 + c.clip_high)).detach() * a * x.logp
        elif name == "opmd":
            each = -a * x.logp / (1 + c.tau)
        elif name == "kimi_mirror_descent":
            each = -a * delta + c.tau / 2 * delta.sum() * delta
        else:
            each = torch.maximum(-a * ratio, -a * ratio.clamp(1 - c.clip_low, 1 + c.clip_high))
            if c.dual_clip is not None:
                each = torch.where(a < 0, torch.minimum(each, -c.dual_clip * a), each)
        r = (x.old_logp - x.engine_logp).exp()
        if c.correction == "truncate":
            each = each * torch.minimum(r, torch.tensor(c.correction_cap, dtype=r.dtype))
        elif c.correction == "mask":
            each = each * torch.where((r >= 1 / c.correction_cap) & (r <= c.correction_cap), r, torch.zeros_like(r))
        d = x.ref_logp - x.logp
        if c.kl.place == "loss":
            each = each + c.kl.coef * (d * d / 2 if c.kl.estimator == "k2" else (d.exp() - d - 1).clamp(max=10))
        each = each - c.entropy_coef * x.entropy
        rows.append(each)
        tokens += len(each)
    if c.aggregation == "token_mean":
        return torch.cat(rows).sum() / tokens
    if c.aggregation == "seq_mean_token_mean":
        return torch.stack([x.mean() for x in rows]).mean()
    norm = c.aggregation_length if c.aggregation == "seq_mean_token_sum_norm" else 1
    return torch.stack([x.sum() for x in rows]).mean() / norm


@pytest.mark.parametrize(("name", "changes"), CASES, ids=IDS)
def test_from_rewards_to_gradients(name: str, changes: dict[str, Any]) -> None:
    c = preset(name, **changes)
    for seed in range(3):
        empty = batch_of([0.0] * len(LENGTHS), seed)
        tokens = torch.zeros(len(LENGTHS), dtype=torch.int64).index_add(0, empty.row, empty.mask.long()).tolist()
        rewards = [(r, group_stats(group)) for group in GROUPS for r in group]
        theirs = reference_advantages(c.name, c, np.array(tokens))
        whole = algorithms.get(c.name).advantage is not None  # those of single tokens: test_algorithms_estimates.py
        mine = algorithms.get(c.name).advantages(rewards, tokens, c) if whole else theirs
        assert mine == pytest.approx(theirs, abs=1e-12)
        loss, by_logp, by_entropy = gradient(c.name, batch_of(mine, seed), c)
        batch = batch_of(theirs, seed)
        logp, entropy = batch.logp.requires_grad_(), batch.entropy.requires_grad_()
        want = reference_loss(c.name, c, batch)
        want.backward()
        assert float(loss) == pytest.approx(float(want.detach()), rel=1e-9, abs=1e-12)
        assert torch.allclose(by_logp, logp.grad, rtol=1e-9, atol=1e-12)
        assert torch.allclose(by_entropy, entropy.grad, rtol=1e-9, atol=1e-12)


def test_the_batch_has_ties_with_every_bound() -> None:
    b = batch_of([0.0] * len(LENGTHS), 0)
    ratio, engine = (b.logp - b.old_logp).exp()[b.mask], (b.old_logp - b.engine_logp).exp()[b.mask]
    for value in (0.5, 1.0, 2.0):
        assert (ratio == value).any() and (engine == value).any()
    assert (engine > 2.0).any() and (engine < 0.5).any()


SPLITS = [preset(name, aggregation=mode, aggregation_length=9) for name in RL for mode in AGGREGATIONS]
SPLITS += [
    preset(name, correction=how, correction_cap=1.2) for name in ("grpo", "opmd") for how in ("truncate", "mask")
]


@settings(max_examples=examples(20, 120), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(SPLITS), st.integers(0, 50), st.data())
def test_any_split_is_the_same_batch(config: AlgorithmConfig, seed: int, data: st.DataObject) -> None:
    """Rows in any order over any number of micro-batches (of any ranks): loss, gradient and metrics are the whole
    batch's."""
    batch = make_batch(seed, rows=6, length=4)
    order = data.draw(st.permutations(range(6)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 5))))
    pieces = [order[a:b] for a, b in zip([0, *cuts], [*cuts, 6], strict=True)]
    for one, many in zip(
        gradient(config.name, batch, config), gradient(config.name, batch, config, pieces), strict=True
    ):
        assert torch.allclose(one, many, rtol=1e-12, atol=1e-14)
    algorithm = algorithms.get(config.name)
    parts = [algorithm.loss(take(batch, rows), config).metrics for rows in pieces]
    for name, (total, count) in algorithm.loss(batch, config).metrics.items():
        assert sum(float(p[name][0]) for p in parts) == pytest.approx(float(total), rel=1e-12, abs=1e-12)
        assert sum(int(p[name][1]) for p in parts) == int(count)


@pytest.mark.parametrize("name", RL)
def test_no_token_at_all(name: str) -> None:
    batch = make_batch(1)
    batch = dataclasses.replace(batch, mask=torch.zeros_like(batch.mask))
    algorithm, config = algorithms.get(name), preset(name)
    logp = batch.logp.clone().requires_grad_()
    loss = algorithm.loss(dataclasses.replace(batch, logp=logp), config)
    loss.total.backward()
    assert float(loss.total.detach()) == 0 and not logp.grad.any()
    assert int(algorithm.count(batch.mask, batch.row, batch.num_rows, config)) == 0


# ---- closed forms ----


def advantages(name: str, *groups: list[float], tokens: list[int] | None = None, **changes: Any) -> list[float]:
    rewards = [(r, group_stats(group)) for group in groups for r in group]
    config = AnyAlgorithmConfig(**changes)
    return algorithms.get(name).advantages(rewards, tokens or [1] * len(rewards), config)


def test_advantages_golden() -> None:
    assert advantages("rloo", [1, 0, 0, 0]) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert advantages("rloo", [0.25]) == [0.25] and advantages("rloo", [0.7] * 8) == [0.0] * 8
    for name in ("opmd", "kimi_mirror_descent"):
        assert advantages(name, [1, 0, 0, 0]) == [0.75, -0.25, -0.25, -0.25]
        assert advantages(name, [0.25], [0.7] * 8) == [0.25] + [0.0] * 8
    pairwise = advantages("opmd", [1, 0, 0, 0], [0.25], [0.7] * 3, opmd="pairwise")
    assert pairwise == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3, 0, 0, 0, 0])
    for name in ("gspo", "cispo"):
        assert advantages(name, [1, 0, 0, 0]) == advantages("grpo", [1, 0, 0, 0])
    # One token each: ±0.5 and zeros, mean 0, unbiased variance 0.5/3.
    assert advantages("reinforce_pp_baseline", [1, 0], [3, 3]) == pytest.approx(
        [3**0.5 / 2**0.5, -(3**0.5) / 2**0.5, 0, 0]
    )
    # Per token: +0.5 thrice and -0.5 once: mean 0.25, unbiased variance 0.25.
    assert advantages("reinforce_pp_baseline", [1, 0], tokens=[3, 1]) == pytest.approx([0.5, -1.5])


@pytest.mark.parametrize("groups", [[[0.7] * 8, [1.1] * 3], [[1e6 / 3] * 5], [[2.0]]])
def test_whitening_of_nothing_is_zero(groups: list[list[float]]) -> None:
    assert advantages("reinforce_pp_baseline", *groups) == [0.0] * sum(map(len, groups))


def test_whitening_leaves_out_rows_without_tokens() -> None:
    whole = advantages("reinforce_pp_baseline", [1, 0], [5, 0], tokens=[2, 3, 0, 0])
    assert whole[:2] == advantages("reinforce_pp_baseline", [1, 0], tokens=[2, 3])
    assert advantages("reinforce_pp_baseline", [1, 0], tokens=[0, 0]) == [0.0, 0.0]


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 9)), min_size=1, max_size=12), st.randoms())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whitening_knows_no_order(rows: list[tuple[float, int]], random: Any) -> None:
    finish = algorithms.get("reinforce_pp_baseline").finish_advantages
    order = list(range(len(rows)))
    random.shuffle(order)
    values, tokens = [a for a, _ in rows], [n for _, n in rows]
    want = finish(values, tokens, AlgorithmConfig())
    got = finish([values[i] for i in order], [tokens[i] for i in order], AlgorithmConfig())
    assert got == [want[i] for i in order]


def value(name: str, ratio: float, advantage: float, **changes: Any) -> float:
    config = settings_of(name)(name=name, kl=KLConfig(0.0), **changes)
    return float(algorithms.get(name).loss(one_token(math.log(ratio), 0.0, 0.0, advantage), config).total)


def test_losses_golden() -> None:
    assert value("cispo", 1.5, 1.0, clip_high=0.2) == pytest.approx(-1.2 * math.log(1.5))
    assert value("cispo", 0.1, -2.0) == pytest.approx(0.2 * math.log(0.1))  # no lower bound
    assert value("opmd", 1.5, 2.0, tau=3.0) == pytest.approx(-0.5 * math.log(1.5))
    s = math.log(3.0)
    assert value("kimi_mirror_descent", 3.0, 1.0, tau=0.5) == pytest.approx(-s + 0.25 * s * s)
    assert value("gspo", 1.5, 1.0, clip_high=4e-4, importance="sequence_mean") == pytest.approx(-1.0004)
    assert value("grpo", 15.0, 1.0, clip_low=10.0, clip_high=10.0) == pytest.approx(-11.0)
    assert value("grpo", 1e-3, -1.0, clip_low=10.0, clip_high=10.0) == pytest.approx(1e-3)


def test_kimi_gradient_is_the_papers() -> None:
    """−(A − tau·s) for every token of the response, not 2·tau times that."""
    batch = make_batch(2, rows=3, length=4)
    config = preset("kimi_mirror_descent", tau=0.7, kl=KLConfig(0.0), entropy_coef=0.0)
    _, by_logp, _ = gradient("kimi_mirror_descent", batch, config)
    s = torch.zeros(3, dtype=torch.float64).index_add(
        0, batch.row, torch.where(batch.mask, batch.logp - batch.old_logp, 0.0)
    )
    rows = len(batch.row[batch.mask].unique())
    want = torch.where(batch.mask, -(batch.advantages - 0.7 * s[batch.row]) / rows, 0.0)
    assert torch.allclose(by_logp, want, rtol=1e-12)


def test_opmd_pairwise_is_the_gradient_of_trinitys_loss() -> None:
    """Of Σ_{i<j} (a_i − a_j)², a_i = r_i − tau·(logp_i − sg(logp_i)): up to one positive factor for the whole batch."""
    rewards, tau = [1.0, 0.0, 0.0, 0.5, 2.0, 0.5], 0.7
    batch, config = (
        make_batch(3, rows=6, length=4),
        OPMDConfig(name="opmd", opmd="pairwise", tau=tau, kl=KLConfig(0.0)),
    )
    stats = [group_stats(rewards[:3])] * 3 + [group_stats(rewards[3:])] * 3
    mine = algorithms.get("opmd").advantages(list(zip(rewards, stats, strict=True)), [1] * 6, config)
    batch = dataclasses.replace(batch, advantages=torch.tensor(mine, dtype=torch.float64)[batch.row])
    _, by_logp, _ = gradient("opmd", batch, config)
    logp = batch.logp.clone().requires_grad_()
    s = torch.stack([logp[(batch.row == i) & batch.mask].sum() for i in range(6)])
    a = torch.tensor(rewards, dtype=torch.float64) - tau * (s - s.detach())
    want = sum((a[i] - a[j]) ** 2 for group in (range(3), range(3, 6)) for i in group for j in group if i < j)
    want.backward()
    kept = batch.mask & (logp.grad != 0)
    factors = by_logp[kept] / logp.grad[kept]
    assert (
        len(factors) > 5 and factors.min() > 0 and torch.allclose(factors, factors[:1].expand_as(factors), rtol=1e-12)
    )
    assert not by_logp[~kept].any()


@pytest.mark.parametrize(
    ("how", "weights", "masked"),
    [("truncate", [0.25, 0.5, 1.0, 2.0, 2.0], None), ("mask", [0.0, 0.5, 1.0, 2.0, 0.0], 2)],
)
def test_correction_golden(how: str, weights: list[float], masked: int | None) -> None:
    """r = 1/4, 1/2, 1, 2, 4 with C = 2, advantage 1, on policy: the gradient is −weight over all five tokens."""
    ratio = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    zero = torch.zeros(5, dtype=torch.float64)
    batch = LossInput(zero, zero, zero, zero, zero + 1, zero == 0, torch.tensor([0, 0, 1, 1, 1]), 2, -ratio.log())
    for name in ("grpo", "rloo", "opmd"):
        config = AnyAlgorithmConfig(name=name, correction=how, kl=KLConfig(0.0), tau=0.0)
        _, by_logp, _ = gradient(name, batch, config)
        assert by_logp.tolist() == pytest.approx([-w / 5 for w in weights])
        metrics = algorithms.get(name).loss(batch, config).metrics
        got = {
            k.removeprefix("rollout_corr/"): float(total)
            for k, (total, n) in metrics.items()
            if "rollout_corr" in k and n == 5
        }
        want = {"rollout_is_mean": 7.75, "rollout_is_ratio_fraction_high": 1, "rollout_is_ratio_fraction_low": 1}
        want |= {"weight_mean": sum(weights)} | ({} if masked is None else {"rollout_rs_masked_fraction": masked})
        assert got == pytest.approx(want)


def test_correction_of_equal_policies_changes_nothing() -> None:
    batch = make_batch(3)
    batch = dataclasses.replace(batch, engine_logp=batch.old_logp.clone())
    for how in ("truncate", "mask"):
        for a, b in zip(
            gradient("grpo", batch, preset("grpo")),
            gradient("grpo", batch, preset("grpo", correction=how)),
            strict=True,
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (AlgorithmConfig(name="gspo"), ["algorithm.importance=token", "algorithm=gspo"]),
        (AlgorithmConfig(name="cispo", dual_clip=3.0), ["algorithm.dual_clip=3.0"]),
        (MirrorDescentConfig(name="kimi_mirror_descent", correction="mask"), ["algorithm.correction=mask", "none"]),
    ],
)
def test_settings_that_an_algorithm_cannot_use(config: AlgorithmConfig, words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        algorithms.get(config.name).loss(make_batch(4), config)
    assert all(word in str(raised.value) for word in words)


def test_missing_inputs() -> None:
    batch = make_batch(5)
    with pytest.raises(ConfigError, match="algorithm.correction=mask needs old_logp and engine_logp"):
        algorithms.get("grpo").loss(dataclasses.replace(batch, engine_logp=None), AlgorithmConfig(correction="mask"))
    for name in RL:
        with pytest.raises(ConfigError, match="needs old_logp and advantages"):
            algorithms.get(name).loss(dataclasses.replace(batch, old_logp=None), preset(name))


def test_the_docs_list_every_preset() -> None:
    rows = [line.split("`")[1] for line in DOCS.read_text().split("\n## ")[0].splitlines() if line.startswith("- **`")]
    assert sorted(rows) == PRESETS


# ---- a user's own ----

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_an_algorithm_of_ones_own(tmp_path: Path) -> None:
    """The one that the documentation shows."""
    file = tmp_path / "mine.py"
    file.write_text(DOCS.read_text().split("```python\n")[1].split("```")[0])
    mine = algorithms.get(str(file))
    config = AnyAlgorithmConfig(name=str(file), options={"margin": 0.25})
    assert mine.advantages([(1.0, group_stats([1.0]))], [3], config) == [0.75]
    batch = make_batch(6)
    loss, by_logp, _ = gradient(str(file), batch, config)
    kept = batch.mask
    assert float(loss) == pytest.approx(float(-(batch.advantages * batch.logp)[kept].mean()))
    assert torch.allclose(by_logp, torch.where(kept, -batch.advantages, 0.0) / kept.sum())
