"""Losses of pairs (dpo, online_dpo, reward_model) and of two parts (mix): values and gradients against autograd of
plain float64 formulas."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.buffer.experience.operators import is_zero_variance
from megarl.config.algorithms import (
    AlgorithmConfig,
    AnyAlgorithmConfig,
    KLConfig,
    MixConfig,
    OPMDConfig,
    PPOConfig,
    PreferenceConfig,
    settings_of,
)
from megarl.core.errors import ConfigError
from megarl.learn import algorithms
from megarl.learn.algorithms import LossInput, pairs, supervised
from megarl.rewards.verdict import overlong_penalty
from tests.conftest import examples
from tests.native import backends
from tests.unit.test_algorithms import AGGREGATIONS, FIELDS, grpo_token, make_batch, oracle, sft_token

ROWS = 8
DPO = [
    PreferenceConfig(name="dpo", beta=0.1),
    PreferenceConfig(name="dpo", beta=0.7, label_smoothing=0.2),
    PreferenceConfig(name="dpo", beta=0.5, preference="ipo"),
    PreferenceConfig(name="online_dpo", beta=0.3),
]
IDS = ["dpo", "cdpo", "ipo", "online"]
MIX = [
    MixConfig(name="mix", mu=0.1, kl=KLConfig(0.1), entropy_coef=0.05),
    MixConfig(name="mix", mu=0.6, kl=KLConfig(0.0), correction="truncate", correction_cap=1.2),
    MixConfig(name="mix", mu=0.3, kl=KLConfig(0.1), expert_loss="off_policy"),
    MixConfig(name="mix", mu=0.6, correction="truncate", expert_loss="off_policy", expert_shaping=None),
]
MIX_IDS = ["mix", "mix 2", "off policy", "off policy, bare"]


@pytest.fixture(params=["cpu double", "torch"], ids=["kernels", "torch"], autouse=True)
def _in_float64(request):
    with backends.on(request.param):
        yield


def pairs_batch(seed: int, empty: tuple[int, ...] = (5,)) -> LossInput:
    """Four pairs; rows ``empty`` have no token in the loss, nor has the last pair of seed 1 any difference."""
    batch = make_batch(seed, rows=ROWS, length=5)
    mask = torch.rand(ROWS * 5, generator=torch.Generator().manual_seed(seed)) < 0.8
    mask[::5] = True  # no row is empty by chance
    mask &= ~torch.isin(batch.row, torch.tensor(empty))
    ref = batch.logp.clone() if seed == 1 else batch.ref_logp
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(ROWS, generator=g, dtype=torch.float64)
    scores[2:4] = 0.5  # a tie
    margin = torch.rand(ROWS // 2, generator=g, dtype=torch.float64)
    return dataclasses.replace(
        batch, mask=mask, ref_logp=ref, scores=scores, margin=margin, expert=torch.arange(ROWS) % 3 == 0
    )


def take(batch: LossInput, rows: list[int]) -> LossInput:
    """The micro-batch of some rows in that order, renumbered from 0."""
    places = [(batch.row == r).nonzero()[:, 0] for r in rows]
    keep, row = torch.cat(places), torch.repeat_interleave(torch.tensor([len(p) for p in places]))
    tensors = {f: getattr(batch, f)[keep] for f in (*FIELDS, "mask")}
    by_row = {
        "scores": batch.scores[rows],
        "expert": batch.expert[rows],
        "margin": batch.margin[[r // 2 for r in rows[::2]]],
    }
    return LossInput(**tensors, **by_row, row=row, num_rows=len(rows))


def gradient(
    batch: LossInput, config: AlgorithmConfig, pieces: list[list[int]] | None = None
) -> tuple[torch.Tensor, ...]:
    """(loss as the trainer divides it, gradients in logp, entropy and scores)."""
    leaves = [x.clone().requires_grad_() for x in (batch.logp, batch.entropy, batch.scores)]
    batch = dataclasses.replace(batch, logp=leaves[0], entropy=leaves[1], scores=leaves[2])
    parts = [batch] if pieces is None else [take(batch, rows) for rows in pieces]
    algorithm = algorithms.get(config.name)
    counts = sum(algorithm.denominators(p.mask, p.row, p.num_rows, config, p.expert) for p in parts)
    totals = sum(algorithm.loss(p, config).totals for p in parts)
    assert counts.dtype == torch.float64 and counts.shape == totals.shape
    value = (totals / counts.clamp(min=1.0)).sum()
    grads = torch.autograd.grad(value, leaves, allow_unused=True)
    return value.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))


def whole_pairs(batch: LossInput) -> list[int]:
    some = [bool(batch.mask[batch.row == i].any()) for i in range(ROWS)]
    return [p for p in range(ROWS // 2) if some[2 * p] and some[2 * p + 1]]


def dpo_reference(batch: LossInput, logp: torch.Tensor, c: AlgorithmConfig) -> torch.Tensor:
    each = []
    for p in whole_pairs(batch):
        w, l = (((logp - batch.ref_logp)[(batch.row == i) & batch.mask]).sum() for i in (2 * p, 2 * p + 1))  # noqa: E741
        prefers = 1 / (1 + torch.exp(-c.beta * (w - l)))
        if c.preference == "ipo":
            each.append((w - l - 1 / (2 * c.beta)) ** 2)
        else:
            each.append(-(1 - c.label_smoothing) * prefers.log() - c.label_smoothing * (1 - prefers).log())
    return sum(each) / len(each)


@pytest.mark.parametrize("config", DPO, ids=IDS)
@pytest.mark.parametrize("empty", [(), (5,), (2, 3, 6)])
def test_dpo(config: AlgorithmConfig, empty: tuple[int, ...]) -> None:
    for seed in range(3):
        batch = pairs_batch(seed, empty)
        value, by_logp, by_entropy, _ = gradient(batch, config)
        logp = batch.logp.clone().requires_grad_()
        want = dpo_reference(batch, logp, config)
        want.backward()
        assert float(value) == pytest.approx(float(want.detach()), rel=1e-10)
        assert torch.allclose(by_logp, logp.grad, rtol=1e-9, atol=1e-12) and not by_entropy.any()
        counted = whole_pairs(batch)
        metrics = algorithms.get(config.name).loss(batch, config).metrics
        h = {
            i: float((batch.logp - batch.ref_logp)[(batch.row == i) & batch.mask].sum()) * config.beta
            for i in range(ROWS)
        }
        chosen, rejected = [h[2 * p] for p in counted], [h[2 * p + 1] for p in counted]
        wanted = {
            "rewards/chosen": sum(chosen),
            "rewards/rejected": sum(rejected),
            "rewards/margins": sum(chosen) - sum(rejected),
            "rewards/accuracies": sum((a > b) + (a == b) / 2 for a, b in zip(chosen, rejected, strict=True)),
            "logps/chosen": sum(float(batch.logp[(batch.row == 2 * p) & batch.mask].sum()) for p in counted),
        }
        for name, total in wanted.items():
            assert float(metrics[name][0]) == pytest.approx(total, abs=1e-12) and int(metrics[name][1]) == len(
                counted
            ), name


@pytest.mark.parametrize("margin", [False, True])
@pytest.mark.parametrize("empty", [(), (5,), (2, 3, 6)])
def test_reward_model(margin: bool, empty: tuple[int, ...]) -> None:
    config = AlgorithmConfig(name="reward_model")
    for seed in range(3):
        batch = pairs_batch(seed, empty)
        batch = batch if margin else dataclasses.replace(batch, margin=torch.zeros_like(batch.margin))
        value, by_logp, _, by_scores = gradient(batch, config)
        scores, counted = batch.scores.clone().requires_grad_(), whole_pairs(batch)
        each = [torch.log1p(torch.exp(-(scores[2 * p] - scores[2 * p + 1] - batch.margin[p]))) for p in counted]
        want = sum(each) / len(each)
        want.backward()
        assert float(value) == pytest.approx(float(want.detach()), rel=1e-12)
        assert torch.allclose(by_scores, scores.grad, rtol=1e-10, atol=1e-14) and not by_logp.any()
        if not margin:
            without = pairs.reward_model_loss(dataclasses.replace(batch, margin=None), config)
            assert float(without.total) / len(counted) == pytest.approx(float(value))
        right = sum(float(batch.scores[2 * p]) > float(batch.scores[2 * p + 1]) for p in counted)
        accuracy = algorithms.get("reward_model").loss(batch, config).metrics["rewards/accuracies"]
        assert (int(accuracy[0]), int(accuracy[1])) == (right, len(counted))


def off_policy_token(b: LossInput, t: int, c: MixConfig, frozen: LossInput) -> float:
    x = math.exp(float(b.logp[t])) / math.exp(float(b.engine_logp[t]))
    return -x if c.expert_shaping is None else -x / (x + c.expert_shaping)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("config", MIX, ids=MIX_IDS)
def test_mix(config: AlgorithmConfig, mode: str) -> None:
    """(1 − mu)·GRPO of the batch of sampled rows + mu·SFT (or LUFFY's loss) of that of expert rows, each by the oracles
    of test_algorithms.py."""
    expert_token = sft_token if config.expert_loss == "sft" else off_policy_token
    config = dataclasses.replace(config, aggregation=mode, aggregation_length=9)
    for seed in range(2):
        batch = pairs_batch(seed)
        expert = batch.expert[batch.row]
        sampled, shown = (dataclasses.replace(batch, mask=batch.mask & kind) for kind in (~expert, expert))
        value, by_logp, by_entropy, _ = gradient(batch, config)

        def want(change: dict[str, torch.Tensor], config=config, sampled=sampled, shown=shown) -> float:
            a, b = dataclasses.replace(sampled, **change), dataclasses.replace(shown, **change)
            return (1 - config.mu) * oracle(grpo_token, a, config) + config.mu * oracle(expert_token, b, config)

        assert float(value) == pytest.approx(want({}), rel=1e-12)
        for t in range(0, len(batch.mask), 3):
            nudge = torch.zeros_like(batch.logp)
            nudge[t] = 1e-6
            for field, grad in (("logp", by_logp), ("entropy", by_entropy)):
                x = getattr(batch, field)
                slope = (want({field: x + nudge}) - want({field: x - nudge})) / 2e-6
                assert float(grad[t]) == pytest.approx(slope, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(
    "config", [*DPO, AlgorithmConfig(name="reward_model"), *MIX], ids=[*IDS, "reward_model", *MIX_IDS]
)
def test_what_is_masked_out_does_not_matter(config: AlgorithmConfig) -> None:
    batch = pairs_batch(3, empty=(2, 3, 6))
    clean = gradient(batch, config)
    assert any(g.any() for g in clean[1:])
    missing = torch.isin(torch.arange(ROWS), torch.tensor([2, 3, 6, 7]))  # whole pairs
    for junk in (math.nan, math.inf, -math.inf, 1e30):
        dirty: dict[str, Any] = {f: torch.where(batch.mask, getattr(batch, f), junk) for f in FIELDS}
        dirty["scores"] = torch.where(missing, junk, batch.scores)
        dirty["margin"] = torch.where(missing.view(-1, 2).all(1), junk, batch.margin)
        if config.name == "mix":  # of expert rows logp alone counts, and off policy their teacher's
            expert = batch.expert[batch.row]
            counts = ("logp",) if config.expert_loss == "sft" else ("logp", "engine_logp")
            dirty |= {f: torch.where(expert, junk, dirty[f]) for f in FIELDS if f not in counts}
        soiled = dataclasses.replace(batch, **dirty)
        assert all(torch.equal(a, b) for a, b in zip(clean, gradient(soiled, config), strict=True))
        metrics = algorithms.get(config.name).loss(soiled, config).metrics
        assert all(math.isfinite(float(total)) for total, _ in metrics.values())


@pytest.mark.parametrize("config", DPO, ids=IDS)
def test_a_pair_that_is_not_counted_has_no_gradient_whatever_its_one_answer_holds(config: AlgorithmConfig) -> None:
    nothing = torch.zeros(2, dtype=torch.float64)
    batch = dataclasses.replace(
        one_pair(-math.inf, 0.0), entropy=nothing, scores=nothing, mask=torch.tensor([True, False])
    )
    value, *grads = gradient(batch, config)
    assert float(value) == 0 and not any(g.any() for g in grads)


@pytest.mark.parametrize(
    "config", [*DPO, AlgorithmConfig(name="reward_model"), *MIX], ids=[*IDS, "reward_model", *MIX_IDS]
)
def test_no_token_at_all(config: AlgorithmConfig) -> None:
    batch = pairs_batch(1)
    value, *grads = gradient(dataclasses.replace(batch, mask=torch.zeros_like(batch.mask)), config)
    assert float(value) == 0 and not any(g.any() for g in grads)


SPLITS = [*DPO, AlgorithmConfig(name="reward_model")]
SPLITS += [dataclasses.replace(c, aggregation=mode, aggregation_length=9) for c in MIX for mode in AGGREGATIONS]


@settings(max_examples=examples(25, 160), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(SPLITS), st.integers(0, 50), st.data())
def test_any_split_is_the_same_batch(config: AlgorithmConfig, seed: int, data: st.DataObject) -> None:
    """Pairs (of mix: rows) in any order over any number of micro-batches; of mix also ones of a single kind."""
    batch = pairs_batch(seed)
    unit = 1 if config.name == "mix" else 2
    order = data.draw(st.permutations(range(ROWS // unit)))
    cuts = sorted(data.draw(st.sets(st.integers(1, ROWS // unit - 1))))
    pieces = [
        [row for u in order[a:b] for row in range(u * unit, (u + 1) * unit)]
        for a, b in itertools.pairwise([0, *cuts, ROWS // unit])
    ]
    for one, many in zip(gradient(batch, config), gradient(batch, config, pieces), strict=True):
        assert torch.allclose(one, many, rtol=1e-12, atol=1e-14)
    algorithm = algorithms.get(config.name)
    parts = [algorithm.loss(take(batch, rows), config).metrics for rows in pieces]
    for name, (total, count) in algorithm.loss(batch, config).metrics.items():
        assert sum(float(p[name][0]) for p in parts) == pytest.approx(float(total), rel=1e-12, abs=1e-12)
        assert sum(int(p[name][1]) for p in parts) == int(count)


# ---- closed forms ----


def one_pair(chosen: float, rejected: float) -> LossInput:
    """Log-ratios to the reference of two answers of one token."""
    t = lambda *x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    zeros = t(0.0, 0.0)
    return LossInput(t(chosen, rejected), None, None, zeros, None, zeros == 0, torch.tensor([0, 1]), 2)


def value(config: AlgorithmConfig, chosen: float, rejected: float) -> float:
    return float(algorithms.get(config.name).loss(one_pair(chosen, rejected), config).total)


def test_pairs_golden() -> None:
    sigmoid = PreferenceConfig(name="dpo", beta=0.5)
    assert value(sigmoid, 1.0, 1.0) == pytest.approx(math.log(2))
    assert value(sigmoid, 2.0, 0.0) == pytest.approx(math.log(1 + math.exp(-1)))
    assert value(sigmoid, 0.0, 2000.0) == pytest.approx(1000.0)  # no overflow
    smooth = dataclasses.replace(sigmoid, label_smoothing=0.25)
    assert value(smooth, 2.0, 0.0) == pytest.approx(math.log(1 + math.exp(-1)) + 0.25)  # log σ(x) − log σ(−x) = x
    ipo = PreferenceConfig(name="dpo", beta=0.5, preference="ipo")
    assert value(ipo, 1.0, 0.0) == 0.0 and value(ipo, 0.0, 0.0) == 1.0 and value(ipo, 3.0, 0.0) == 4.0
    counted = torch.tensor([True])
    scores = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert float(pairs.bradley_terry(scores, counted).total) == pytest.approx(math.log(1 + math.exp(-1)))
    assert float(pairs.bradley_terry(scores, counted, torch.tensor([1.0])).total) == pytest.approx(math.log(2))


def test_ipo_adds_up_the_tokens() -> None:
    """Three tokens of log-ratio 1 against one of 1: h = 2 (TRL's mean over tokens would be 0)."""
    one = torch.ones(4, dtype=torch.float64)
    batch = LossInput(one, None, None, 0 * one, None, one > 0, torch.tensor([0, 0, 0, 1]), 2)
    assert (
        float(algorithms.get("dpo").loss(batch, PreferenceConfig(name="dpo", beta=0.5, preference="ipo")).total) == 1.0
    )


def test_mix_golden() -> None:
    """Trinity's parts: 3 sampled tokens of advantage 1 on policy, one expert token of logp −2, mu 0.1: 0.9·(−1) +
    0.1·2."""
    t = lambda *x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    logp = t(-1.0, -1.0, -1.0, -2.0)
    batch = LossInput(
        logp,
        None,
        logp.clone(),
        None,
        t(1, 1, 1, 1),
        logp < 0,
        torch.tensor([0, 0, 1, 2]),
        3,
        expert=torch.tensor([False, False, True]),
    )
    config = MixConfig(name="mix", kl=KLConfig(0.0))
    totals, counts = (
        supervised.MIX.loss(batch, config).totals,
        supervised.MIX.denominators(batch.mask, batch.row, 3, config, batch.expert),
    )
    assert counts.tolist() == [3, 1] and float((totals / counts).sum()) == pytest.approx(-0.7)


@pytest.mark.parametrize("shaping", [None, 0.1, 2.0])
def test_off_policy_expert_rows_by_autograd(shaping: float | None) -> None:
    """Probabilities in the place of log-probs, and a teacher that is sure of tokens which the policy hardly knows."""
    g = torch.Generator().manual_seed(3)
    teacher, own = (torch.rand(40, generator=g, dtype=torch.float64) ** power for power in (1, 6))
    logp, by_hand = own.log().requires_grad_(), own.clone().requires_grad_()
    row, expert = torch.arange(40) // 10, torch.tensor([False, True, False, True])
    fixed = (logp.detach(), None, torch.ones(40, dtype=torch.float64), torch.ones(40, dtype=torch.bool), row, 4)
    batch = LossInput(logp, None, *fixed, engine_logp=teacher.log(), expert=expert)
    config = MixConfig(name="mix", mu=1.0, kl=KLConfig(0.0), expert_loss="off_policy", expert_shaping=shaping)
    found = supervised.mix_loss(batch, config)
    (found.totals / torch.tensor([20, 20])).sum().backward()
    shown = expert[row]
    ratio = by_hand[shown] / teacher[shown]
    wanted = -(ratio if shaping is None else ratio / (ratio + shaping)).mean()
    wanted.backward()
    assert float(found.totals[1].detach()) / 20 == pytest.approx(float(wanted.detach()), rel=1e-12)
    assert torch.allclose(logp.grad, by_hand.grad * own, rtol=1e-10, atol=0)
    total, number = found.metrics["actor/expert_ratio/mean"]
    assert (float(total), int(number)) == (pytest.approx(float(ratio.detach().sum()), rel=1e-12), 20)
    assert "actor/sft_loss" not in found.metrics
    with pytest.raises(ConfigError, match="off_policy needs the teacher's log-probs"):
        supervised.mix_loss(dataclasses.replace(batch, engine_logp=None), config)


def test_a_shaped_ratio_overflows_nowhere() -> None:
    """A teacher that gave a token a probability of 0 in any float."""
    logp = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    fixed = (None, logp.detach(), None, logp.detach(), torch.ones(2, dtype=torch.bool), torch.tensor([0, 0]), 1)
    batch = LossInput(logp, *fixed, engine_logp=torch.tensor([-1e9, -0.5]), expert=torch.tensor([True]))
    supervised.mix_loss(
        batch, MixConfig(name="mix", mu=1.0, kl=KLConfig(0.0), expert_loss="off_policy")
    ).totals.sum().backward()
    assert logp.grad[0] == 0 and -1 < float(logp.grad[1]) < 0


@pytest.mark.parametrize(
    ("rewards", "pairs"),
    [
        ([0.0, 1.0, 0.5], [(1, 0)]),
        ([1.0, 0.0, 1.0, 0.0], [(0, 1)]),
        ([0.7, 0.7, 0.7], []),
        ([3.0], []),
        ([-1.0, -2.0], [(0, 1)]),
    ],
)
def test_best_against_worst(rewards: list[float], pairs: list[tuple[int, int]]) -> None:
    choose = algorithms.get("online_dpo").choose_pairs
    assert choose is not None and choose(rewards, AlgorithmConfig()) == pairs


def test_what_is_missing_is_named() -> None:
    batch = pairs_batch(0)
    for name, field, words in (
        ("dpo", "ref_logp", "dpo needs ref_logp"),
        ("online_dpo", "ref_logp", "online_dpo needs ref_logp"),
        ("reward_model", "scores", "reward_model needs the scores"),
        ("mix", "expert", "which rows are expert rows"),
    ):
        with pytest.raises(ConfigError, match=words):
            algorithms.get(name).loss(dataclasses.replace(batch, **{field: None}), settings_of(name)(name=name))
    with pytest.raises(ConfigError, match="label_smoothing=0.1 needs preference=sigmoid"):
        algorithms.get("dpo").loss(batch, PreferenceConfig(name="dpo", preference="ipo", label_smoothing=0.1))
    with pytest.raises(AssertionError, match="even number of rows"):
        algorithms.get("dpo").count(batch.mask[:5], batch.row[:5], 1, DPO[0])


# ---- what is known of settings before a launch, and DAPO's helpers ----


def token() -> LossInput:
    one = torch.zeros(1)
    return LossInput(
        one.clone().requires_grad_(), one, one, one, one, one == 0, torch.zeros(1, dtype=torch.int64), 1, one
    )


@pytest.mark.parametrize("name", sorted(algorithms.ALGORITHMS))
def test_every_algorithm_can_be_tried_out(name: str) -> None:
    with backends.on("cpu"):
        importance = "sequence_mean" if name == "gspo" else "token"
        algorithms.try_out(algorithms.get(name), token(), settings_of(name)(name=name, importance=importance))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (AlgorithmConfig(kl=KLConfig(0.1, "k1")), ["kl.estimator must be k2 or k3", "kl.place=reward"]),
        (
            AlgorithmConfig(kl=KLConfig(0.1, "k1", "reward")),
            ["algorithm.kl.place=reward: grpo", "ppo, remax or reinforce_pp"],
        ),
        (AlgorithmConfig(kl=KLConfig(0.0, target=0.1)), ["algorithm.kl.target=0.1", "algorithm.kl.coef"]),
        (
            PPOConfig(name="ppo", dynamic_sampling=True, group_size=1),
            ["algorithm.dynamic_sampling=true", "group_size to 2"],
        ),
        (
            PreferenceConfig(name="online_dpo", kl=KLConfig(0.1, target=0.1)),
            ["algorithm.kl.target=0.1", "online_dpo has no KL"],
        ),
        (AlgorithmConfig(name="sft", entropy_coef=0.1), ["algorithm.entropy_coef=0.1", "sft has no entropy"]),
        (OPMDConfig(name="opmd", dual_clip=3.0), ["algorithm.dual_clip=3.0", "opmd clips nothing"]),
        (AnyAlgorithmConfig(whiten_advantages=True), ["algorithm.whiten_advantages=true", "reinforce_pp_baseline"]),
        (
            PreferenceConfig(name="dpo", dynamic_sampling=True),
            ["algorithm.dynamic_sampling=true", "dpo learns from a file"],
        ),
        (PreferenceConfig(name="online_dpo", correction="mask"), ["algorithm.correction=mask", "online_dpo has none"]),
        (PreferenceConfig(name="dpo", preference="ipo", label_smoothing=0.1), ["algorithm.label_smoothing=0.1"]),
    ],
)
def test_settings_that_contradict_each_other(config: AlgorithmConfig, words: list[str]) -> None:
    with backends.on("cpu"), pytest.raises(ConfigError) as raised:
        algorithms.try_out(algorithms.get(config.name), token(), config)
    assert all(word in str(raised.value) for word in words), raised.value


def test_zero_variance_groups() -> None:
    assert is_zero_variance(["ok", "ok"]) and is_zero_variance(["wrong", "wrong", "error", "timeout"])
    assert not is_zero_variance(["ok", "wrong"]) and not is_zero_variance(["timeout", "ok"])
    assert is_zero_variance(["ok"]) and is_zero_variance(["wrong"])


def test_overlong_penalty() -> None:
    """DAPO's: L_max 20480, buffer 4096."""
    at = [overlong_penalty(n, 20480, 4096) for n in (0, 16384, 16385, 18432, 20480, 30000)]
    assert at == [0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0]
    assert [overlong_penalty(n, 8, 8, 0.5) for n in (0, 4, 8)] == [0.0, -0.25, -0.5]
    with pytest.raises(AssertionError, match="reward.overlong_buffer=9"):
        overlong_penalty(1, 8, 9)
