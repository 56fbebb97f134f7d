"""Advantages of single tokens (ppo, remax, reinforce_pp), the critic's loss and the KL controller against plain Python
in float64."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.buffer.experience.operators import group_stats
from megarl.config.algorithms import AlgorithmConfig, KLConfig, MixConfig, PPOConfig, settings_of
from megarl.core.errors import ConfigError
from megarl.core.schema import GroupStats
from megarl.learn import algorithms
from megarl.learn.algorithms import StepInput, token_returns
from megarl.learn.algorithms.terms import token_rewards
from megarl.learn.algorithms.terms.reduction import Tokens, counts
from megarl.learn.algorithms.terms.token_rewards import whitened
from tests.native import backends

NAMES = ("ppo", "reinforce_pp", "remax")
REWARD_KL = KLConfig(0.3, "k1", "reward")


@pytest.fixture(params=["cpu double", "torch"], ids=["kernels", "torch"], autouse=True)
def _backend(request):
    with backends.on(request.param):
        yield


def make_step(seed: int, lengths: tuple[int, ...] = (6, 3, 9, 4, 5), cut: bool = True) -> StepInput:
    """Prompts of one position or more, tokens masked out in the middle, one sequence without any token in the loss."""
    g = torch.Generator().manual_seed(seed)
    n, total = len(lengths), sum(lengths)
    mask = torch.rand(total, generator=g) < 0.7
    starts = list(itertools.accumulate(lengths, initial=0))
    mask[starts[:-1]] = False  # the first position predicts a token of the prompt
    mask[starts[1] : starts[2]] = False
    mask[starts[0] + 1 : starts[0] + 5] = torch.tensor([True, False, False, True])
    noise = lambda size=total: torch.randn(size, generator=g, dtype=torch.float64)  # noqa: E731
    bootstrap = torch.where(torch.arange(n) % 2 == 0, noise(n), 0.0) if cut else torch.zeros(n, dtype=torch.float64)
    return StepInput(
        rewards=noise(n),
        stats=[GroupStats(0.0, 1.0, 1)] * n,
        cu_seqlens=torch.tensor(starts),
        mask=mask,
        tokens=counts(mask, torch.tensor(lengths)),
        old_logp=-noise().abs(),
        ref_logp=-noise().abs(),
        values=noise(),
        bootstrap=bootstrap,
        greedy=noise(n),
    )


def every(x: torch.Tensor) -> Tokens:
    """All of [T] tokens, which are one sequence's."""
    return Tokens(torch.ones(len(x), dtype=torch.bool), torch.tensor([len(x)]))


def penalty(step: StepInput, t: int, estimator: str) -> float:
    d = float(step.ref_logp[t]) - float(step.old_logp[t])
    return {"k1": -d, "k2": d * d / 2, "k3": min(math.exp(d) - d - 1, 10.0)}[estimator]


def by_hand(name: str, step: StepInput, c: AlgorithmConfig) -> tuple[list[float], list[float]]:
    """(advantages, returns) [T], by the sums that define them, one response at a time."""
    advantages, returns = [0.0] * len(step.mask), [0.0] * len(step.mask)
    for i, (start, end) in enumerate(itertools.pairwise(step.cu_seqlens.tolist())):
        kept = [t for t in range(start, end) if step.mask[t]]
        r = [-c.kl.coef * penalty(step, t, c.kl.estimator) if c.kl.place == "reward" else 0.0 for t in kept]
        if kept:
            r[-1] += float(step.rewards[i])
        for k, t in enumerate(kept):
            if name == "ppo":
                v = [float(step.values[u]) for u in kept] + [float(step.bootstrap[i])]
                delta = [r[j] + c.gamma * v[j + 1] - v[j] for j in range(len(kept))]
                advantages[t] = sum((c.gamma * c.lam) ** (j - k) * delta[j] for j in range(k, len(kept)))
                returns[t] = advantages[t] + v[k]
            else:
                following = sum(c.gamma ** (j - k) * r[j] for j in range(k, len(kept)))
                advantages[t] = following - (float(step.greedy[i]) if name == "remax" else 0.0)
    if c.whiten_advantages or name == "reinforce_pp":
        every = [a for a, keep in zip(advantages, step.mask.tolist(), strict=True) if keep]
        mean, variance = statistics.fmean(every), statistics.variance(every)
        advantages = [
            (a - mean) / math.sqrt(variance + 1e-8) if keep else 0.0
            for a, keep in zip(advantages, step.mask.tolist(), strict=True)
        ]
    return advantages, returns


CASES = [
    PPOConfig(kl=KLConfig(0.3, estimator, place), gamma=gamma, lam=lam, whiten_advantages=whiten)
    for estimator, place in (("k1", "reward"), ("k2", "reward"), ("k3", "reward"), ("k3", "loss"))
    for gamma, lam in ((1.0, 1.0), (0.9, 0.8), (1.0, 0.0))
    for whiten in (False, True)
]


@pytest.mark.parametrize(
    "config", CASES, ids=lambda c: f"{c.kl.estimator}-{c.kl.place}-{c.gamma}-{c.lam}-{c.whiten_advantages}"
)
@pytest.mark.parametrize("name", NAMES)
def test_against_the_definition(name: str, config: AlgorithmConfig) -> None:
    for seed in range(3):
        step = make_step(seed)
        got = algorithms.get(name).step_advantages(step, config)
        advantages, returns = by_hand(name, step, config)
        assert got.advantages.tolist() == pytest.approx(advantages, rel=1e-10, abs=1e-10)
        assert (got.returns is None) == (name != "ppo")
        if got.returns is not None:
            assert got.returns.tolist() == pytest.approx(returns, rel=1e-10, abs=1e-10)
        if config.kl.place == "reward":
            kept = [penalty(step, t, config.kl.estimator) for t in range(len(step.mask)) if step.mask[t]]
            assert got.metrics["actor/reward_kl_penalty"] == pytest.approx(statistics.fmean(kept))
            assert got.metrics["actor/reward_kl_penalty_coeff"] == 0.3
            measured = token_rewards.totals(step.old_logp, step.ref_logp, step.kept, config.kl.estimator)
            assert measured.mean == pytest.approx(statistics.fmean(kept))
        kept = got.advantages[step.mask]
        assert got.metrics["critic/advantages/mean"] == pytest.approx(float(kept.mean()), abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_masked_out_does_not_matter(name: str) -> None:
    step, config = make_step(4), PPOConfig(kl=KLConfig(0.3, "k1", "reward"), whiten_advantages=True)
    clean = algorithms.get(name).step_advantages(step, config)
    empty = step.tokens == 0
    assert empty.any()
    for junk in (math.nan, math.inf, -math.inf):
        dirty = {f: torch.where(step.mask, getattr(step, f), junk) for f in ("old_logp", "ref_logp", "values")}
        dirty |= {
            "rewards": torch.where(empty, junk, step.rewards),
            "bootstrap": torch.where(empty, junk, step.bootstrap),
        }
        got = algorithms.get(name).step_advantages(dataclasses.replace(step, **dirty), config)
        assert torch.equal(got.advantages, clean.advantages)
        assert (got.returns is None) == (clean.returns is None) or torch.equal(got.returns, clean.returns)
        assert got.metrics == clean.metrics
    assert not clean.advantages[~step.mask].any() and clean.advantages[step.mask].all()


@pytest.mark.parametrize("name", NAMES)
def test_a_step_without_a_token(name: str) -> None:
    step = make_step(5)
    step = dataclasses.replace(step, mask=torch.zeros_like(step.mask), tokens=torch.zeros_like(step.tokens))
    got = algorithms.get(name).step_advantages(step, PPOConfig(kl=REWARD_KL, whiten_advantages=True))
    assert not got.advantages.any() and all(math.isfinite(v) for v in got.metrics.values())


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(NAMES), st.sampled_from(CASES), st.permutations(range(5)), st.integers(0, 20))
def test_the_order_of_responses_does_not_matter(
    name: str, config: AlgorithmConfig, order: list[int], seed: int
) -> None:
    step = make_step(seed)
    bounds = list(itertools.pairwise(step.cu_seqlens.tolist()))
    places = torch.cat([torch.arange(*bounds[i]) for i in order])
    moved = {f: getattr(step, f)[places] for f in ("mask", "old_logp", "ref_logp", "values")}
    moved |= {f: getattr(step, f)[order] for f in ("rewards", "tokens", "bootstrap", "greedy")}
    lengths = [bounds[i][1] - bounds[i][0] for i in order]
    moved["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(lengths)])
    got = algorithms.get(name).step_advantages(dataclasses.replace(step, **moved), config)
    want = algorithms.get(name).step_advantages(step, config)
    assert torch.allclose(got.advantages, want.advantages[places], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_float32_is_close_to_float64(name: str) -> None:
    """As the trainer calls it: float32 in and out, by the installed kernels."""
    config = PPOConfig(kl=KLConfig(0.3, "k3", "reward"), gamma=0.99, lam=0.95, whiten_advantages=True)
    step = make_step(10, lengths=(40, 200, 3, 500))
    fields = {f: getattr(step, f).float() for f in ("old_logp", "ref_logp", "values", "bootstrap")}
    rounded = dataclasses.replace(step, **{f: x.double() for f, x in fields.items()})
    exact = algorithms.get(name).step_advantages(rounded, config)
    with backends.on("cpu"):
        got = algorithms.get(name).step_advantages(dataclasses.replace(step, **fields), config)
    assert got.advantages.dtype == torch.float32
    assert torch.allclose(got.advantages.double(), exact.advantages, rtol=1e-5, atol=2e-6)
    if got.returns is not None:
        assert got.returns.dtype == torch.float32 and torch.allclose(
            got.returns.double(), exact.returns, rtol=1e-6, atol=1e-5
        )


# ---- closed forms ----


def one_response(
    reward: float, values: list[float], bootstrap: float = 0.0, greedy: float = 0.0, **changes: Any
) -> StepInput:
    """One position of prompt, then a token for each value, all in the loss but the last position, which predicts
    none."""
    t = lambda x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    n = len(values)
    zeros = torch.zeros(n + 1, dtype=torch.float64)
    return StepInput(
        t([reward]),
        [group_stats([reward])],
        torch.tensor([0, n + 1]),
        torch.tensor([True] * n + [False]),
        torch.tensor([n]),
        **(
            {
                "old_logp": zeros,
                "ref_logp": zeros,
                "values": t([*values, math.nan]),
                "bootstrap": t([bootstrap]),
                "greedy": t([greedy]),
            }
            | changes
        ),
    )


def test_gae_golden() -> None:
    config = PPOConfig(gamma=1.0, lam=1.0)
    got = algorithms.get("ppo").step_advantages(one_response(1.0, [0.5, 0.25]), config)
    # Finished: A_2 = 1 − 0.25, A_1 = (0.25 − 0.5) + A_2; with λ = γ = 1 every return is the reward.
    assert got.advantages.tolist() == [0.5, 0.75, 0.0] and got.returns.tolist() == [1.0, 1.0, 0.0]
    cut = algorithms.get("ppo").step_advantages(one_response(0.0, [0.5, 0.25], bootstrap=2.0), config)
    assert cut.advantages.tolist() == [1.5, 1.75, 0.0] and cut.returns.tolist() == [2.0, 2.0, 0.0]
    # λ = 0: one step of TD. γ = 0.5: δ_2 = 1 − 0.25, δ_1 = 0.125 − 0.5, A_1 = δ_1 + 0.5·0.5·δ_2.
    td = algorithms.get("ppo").step_advantages(one_response(1.0, [0.5, 0.25]), PPOConfig(lam=0.0))
    assert td.advantages.tolist() == [-0.25, 0.75, 0.0]
    both = algorithms.get("ppo").step_advantages(one_response(1.0, [0.5, 0.25]), PPOConfig(gamma=0.5, lam=0.5))
    assert both.advantages.tolist() == [-0.375 + 0.25 * 0.75, 0.75, 0.0]


def test_whitening_leaves_the_returns_alone() -> None:
    step = make_step(6)
    plain, white = (
        algorithms.get("ppo").step_advantages(step, PPOConfig(whiten_advantages=w, kl=REWARD_KL)) for w in (False, True)
    )
    assert torch.equal(plain.returns, white.returns)
    kept = white.advantages[step.mask]
    assert float(kept.mean()) == pytest.approx(0, abs=1e-12) and float(kept.var()) == pytest.approx(1, rel=1e-6)


def test_remax_and_reinforce_pp_golden() -> None:
    config = PPOConfig()
    assert algorithms.get("remax").step_advantages(
        one_response(1.0, [0, 0], greedy=0.25), config
    ).advantages.tolist() == [0.75, 0.75, 0]
    assert algorithms.get("remax").step_advantages(
        one_response(1.0, [0, 0], greedy=1.0), config
    ).advantages.tolist() == [0, 0, 0]
    # KL 1 on the first token, coefficient 0.5: returns 0.5 and 1.
    t = lambda *x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    step = one_response(1.0, [0, 0], ref_logp=t(-1, 0, math.nan))
    in_reward = PPOConfig(kl=KLConfig(0.5, "k1", "reward"))
    assert algorithms.get("remax").step_advantages(step, in_reward).advantages.tolist() == [0.5, 1.0, 0.0]
    half = math.sqrt(0.5)
    assert algorithms.get("reinforce_pp").step_advantages(step, in_reward).advantages.tolist() == pytest.approx(
        [-half, half, 0]
    )


def test_rewards_are_shown_with_the_kl_that_was_taken_off_them() -> None:
    for name, place in (("reinforce_pp", "reward"), ("reinforce_pp", "loss")):
        step = make_step(3)
        config = settings_of(name)(name=name, kl=KLConfig(0.3, "k1", place))
        shown = algorithms.get(name).step_advantages(step, config).metrics
        if place == "loss":
            assert not any(
                key.startswith("critic/rewards") for key in shown
            )  # what the trainer says without: the scores
            continue
        totals = []
        for i in range(step.num_rows):
            kept = [t for t in range(int(step.cu_seqlens[i]), int(step.cu_seqlens[i + 1])) if step.mask[t]]
            if kept:
                totals.append(float(step.rewards[i]) - 0.3 * sum(penalty(step, t, "k1") for t in kept))
        assert shown["critic/rewards/mean"] == pytest.approx(sum(totals) / len(totals))
        assert shown["critic/rewards/max"] == pytest.approx(max(totals)) and shown[
            "critic/rewards/min"
        ] == pytest.approx(min(totals))


def test_a_coefficient_of_zero_asks_for_no_reference() -> None:
    for name in ("grpo", "ppo", "mix", "kimi_mirror_descent"):
        algorithm = algorithms.get(name)
        assert algorithm.has_reference(AlgorithmConfig(kl=KLConfig(0.1))) and not algorithm.has_reference(
            AlgorithmConfig(kl=KLConfig(0.0))
        )
    assert algorithms.get("dpo").has_reference(AlgorithmConfig(kl=KLConfig(0.0)))
    step = dataclasses.replace(make_step(3), ref_logp=None)
    algorithms.get("ppo").step_advantages(step, PPOConfig(name="ppo", kl=KLConfig(0.0, "k1", "reward")))


def test_demonstrations_have_no_part_in_what_is_shown_of_advantages() -> None:
    step = make_step(3)
    expert = torch.tensor([i == 2 for i in range(step.num_rows)])
    config = MixConfig(name="mix")
    result = algorithms.get("mix").step_advantages(dataclasses.replace(step, expert=expert), config)
    kept = result.advantages[step.mask & ~expert[step.row]]
    assert result.metrics["critic/advantages/mean"] == pytest.approx(float(kept.double().mean()))
    assert bool((result.advantages[expert[step.row]] == 0).all())


def test_equal_returns_have_no_advantage() -> None:
    """0.7 and 0.1 have no exact mean: what rounding leaves must not be divided by almost nothing."""
    for x in (torch.full((8,), 0.7), torch.full((1,), 3.0), torch.zeros(0)):
        assert torch.equal(whitened(x, every(x)), torch.zeros_like(x))
    assert bool(whitened(torch.tensor([math.nan]), every(torch.zeros(1))).isnan().all())  # the update filter sees it
    step = make_step(7)
    step = dataclasses.replace(step, rewards=torch.full_like(step.rewards, 0.7))
    assert not algorithms.get("reinforce_pp").step_advantages(step, PPOConfig()).advantages.any()


def test_advantages_of_whole_responses_are_spread_over_their_tokens() -> None:
    step = make_step(8)
    rewards = [1.0, 0.0, 0.0, 0.0, 5.0]
    stats = [group_stats(rewards[:4])] * 4 + [group_stats([5.0])]
    step = dataclasses.replace(step, rewards=torch.tensor(rewards, dtype=torch.float64), stats=stats)
    got = algorithms.get("grpo").step_advantages(step, AlgorithmConfig())
    each = [1.499997, -0.499999, -0.499999, -0.499999, 5.0]
    want = [each[i] if keep else 0.0 for i, keep in zip(step.row.tolist(), step.mask.tolist(), strict=True)]
    assert got.advantages.tolist() == pytest.approx(want, abs=1e-6) and got.returns is None
    # A demonstrated row has no reward and no advantage; it is not in the whitening of the others.
    marked = dataclasses.replace(step, expert=torch.tensor([False, False, False, False, True]))
    whiten = algorithms.get("reinforce_pp_baseline")
    got = whiten.step_advantages(marked, AlgorithmConfig()).advantages
    tokens = step.tokens.tolist()
    white = whiten.advantages([(r, s) for r, s in zip(rewards[:4], stats, strict=False)], tokens[:4], AlgorithmConfig())
    want = [([*white, 0.0])[i] if keep else 0.0 for i, keep in zip(step.row.tolist(), step.mask.tolist(), strict=True)]
    assert got.tolist() == pytest.approx(want)


def test_missing_inputs_are_named() -> None:
    step = make_step(9)
    for name, field, words in (
        ("ppo", "values", "values of a critic"),
        ("remax", "greedy", "greedy answer"),
        ("reinforce_pp", "ref_logp", "kl.place=reward needs"),
    ):
        with pytest.raises(ConfigError, match=words):
            algorithms.get(name).step_advantages(dataclasses.replace(step, **{field: None}), PPOConfig(kl=REWARD_KL))
    with pytest.raises(ConfigError, match="kl.place=reward: grpo has one advantage"):
        algorithms.get("grpo").step_advantages(step, AlgorithmConfig(kl=REWARD_KL))


# ---- the critic ----


def value_by_hand(v: float, old: float, r: float, c: float | None) -> float:
    return 0.5 * max((v - r) ** 2, 0.0 if c is None else (min(max(v, old - c), old + c) - r) ** 2)


@pytest.mark.parametrize("clip", [None, 0.2, 0.5])
def test_value_loss_and_gradient(clip: float | None) -> None:
    g = torch.Generator().manual_seed(1)
    v, old, r = (torch.randn(40, generator=g, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(40, generator=g) < 0.7
    config = PPOConfig(value_clip=clip)
    v.requires_grad_()
    got = token_returns.critic_loss(v, old, r, config, mask)
    got.total.backward()
    each = [value_by_hand(float(v[t].detach()), float(old[t]), float(r[t]), clip) for t in range(40) if mask[t]]
    assert float(got.total.detach()) == pytest.approx(sum(each))
    for t in range(40):
        at = lambda x, t=t: value_by_hand(x, float(old[t]), float(r[t]), clip)  # noqa: E731
        x = float(v[t].detach())
        assert float(v.grad[t]) == pytest.approx(
            (at(x + 1e-6) - at(x - 1e-6)) / 2e-6 if mask[t] else 0.0, rel=1e-5, abs=1e-8
        )
    assert int(token_returns.critic_count(mask)) == int(mask.sum()) == int(got.metrics["critic/vf_loss"][1])
    plain = [0.5 * float(v[t].detach() - r[t]) ** 2 for t in range(40) if mask[t]]
    clipped = [bounded > free for bounded, free in zip(each, plain, strict=True)]
    assert int(got.metrics["critic/vf_clipfrac"][0]) == sum(clipped)
    assert any(clipped) == (clip is not None)
    assert float(got.metrics["critic/vpred_mean"][0]) == pytest.approx(float(v[mask].sum().detach()))


def test_value_loss_golden() -> None:
    """V = 2, V_old = 0, R = 0, c = 0.5: ½·max(4, 0.25) = 2. V = 2, R = 2: the bound holds it back, ½·(0.5 − 2)² =
    1.125."""
    one = lambda x: torch.tensor([x], dtype=torch.float64)  # noqa: E731
    config = PPOConfig(value_clip=0.5)
    assert float(token_returns.critic_loss(one(2.0), one(0.0), one(0.0), config).total) == 2.0
    assert float(token_returns.critic_loss(one(2.0), one(0.0), one(2.0), config).total) == 1.125
    assert float(token_returns.critic_loss(one(2.0), one(0.0), one(2.0), PPOConfig(value_clip=None)).total) == 0.0


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 50), st.sets(st.integers(1, 19)))
def test_value_loss_of_any_split(seed: int, cuts: set[int]) -> None:
    g = torch.Generator().manual_seed(seed)
    v, old, r = (torch.randn(20, generator=g, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(20, generator=g) < 0.7
    v = torch.where(mask, v, math.nan).requires_grad_()
    config = PPOConfig()

    def gradient(bounds: list[int]) -> torch.Tensor:
        parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        total = sum(token_returns.critic_loss(v[p], old[p], r[p], config, mask[p]).total for p in parts)
        return torch.autograd.grad(total / max(1, sum(int(token_returns.critic_count(mask[p])) for p in parts)), v)[0]

    whole = gradient([0, 20])
    assert torch.allclose(gradient([0, *sorted(cuts), 20]), whole, rtol=1e-12, atol=1e-15)
    assert torch.isfinite(whole).all() and not whole[~mask].any()


def test_explained_variance() -> None:
    r = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert token_returns.explained_variance(r.clone(), r, every(r)) == 1.0
    assert token_returns.explained_variance(torch.full((4,), 9.0), r, every(r)) == pytest.approx(0.0, abs=1e-15)
    assert token_returns.explained_variance(-r, r, every(r)) == pytest.approx(-3.0)
    # Var(R) = 14/3, residuals 0, 0, 0, 3: Var = 9/4.
    assert token_returns.explained_variance(torch.tensor([1.0, 2.0, 3.0, 3.0]), r, every(r)) == pytest.approx(
        1 - 2.25 / (14 / 3)
    )
    assert token_returns.explained_variance(torch.randn(4), torch.full((4,), 0.7), every(r)) == 0.0
    assert (
        token_returns.explained_variance(r, r, Tokens(torch.tensor([True, False, False, False]), torch.tensor([4])))
        == 0.0
    )
    dirty = torch.tensor([1.0, math.nan, 3.0, 6.0])
    assert (
        token_returns.explained_variance(
            dirty, dirty, Tokens(torch.tensor([True, False, True, True]), torch.tensor([4]))
        )
        == 1.0
    )


# ---- KL ----


def test_kl_estimates() -> None:
    logp, ref = torch.tensor([-math.log(2.0), -1.0]), torch.tensor([0.0, -1.0])
    assert token_rewards.estimates(logp, ref, "k1").tolist() == pytest.approx([-math.log(2), 0])
    assert token_rewards.estimates(logp, ref, "k2").tolist() == pytest.approx([math.log(2) ** 2 / 2, 0])
    assert token_rewards.estimates(logp, ref, "k3").tolist() == pytest.approx([1 - math.log(2), 0])
    assert token_rewards.totals(logp, ref, Tokens(torch.tensor([False, False]), torch.tensor([2])), "k1").mean == 0.0


def test_adaptive_coefficient() -> None:
    """verl's: target 0.1, horizon 1000, 100 responses."""
    config = KLConfig(0.2, target=0.1, horizon=1000)
    assert token_rewards.adapted(0.1, 100, config) == 0.2
    assert token_rewards.adapted(0.11, 100, config) == pytest.approx(0.2 * 1.01)
    assert token_rewards.adapted(5.0, 100, config) == pytest.approx(0.2 * 1.02)
    assert token_rewards.adapted(-5.0, 100, config) == pytest.approx(0.2 * 0.98)
    assert token_rewards.adapted(math.nan, 100, config) == 0.2
    assert token_rewards.adapted(5.0, 10**9, KLConfig(0.2)) == 0.2
    with pytest.raises(ConfigError, match=r"algorithm.kl.horizon=1000.*5000 responses.*above 1000"):
        token_rewards.adapted(0.0, 5000, config)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(-10, 10), max_size=200), st.floats(1e-4, 10), st.integers(1, 4999))
def test_the_coefficient_stays_above_zero_and_follows_the_error(kls: list[float], coef: float, responses: int) -> None:
    for each in kls:
        after = token_rewards.adapted(each, responses, KLConfig(coef, target=0.5, horizon=1000))
        assert after > 0 and (after > coef) == (each > 0.5) or math.isclose(after, coef)
        coef = max(after, 1e-200)
