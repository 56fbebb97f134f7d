"""Advantages of on-policy distillation against plain Python in float64, and the choice of a task's teacher."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.buffer.experience.operators import group_stats
from megarl.config.algorithms import DistillConfig, KLConfig
from megarl.config.derived import teacher_of, teachers_at
from megarl.config.schema import Config, TeacherConfig
from megarl.core.errors import ConfigError, NonRetryableError
from megarl.learn import algorithms
from megarl.learn.algorithms import LossInput, StepInput
from megarl.learn.algorithms.terms.reduction import counts
from megarl.learn.batching import Sequences
from megarl.train.inference.inference import check_ids
from megarl.train.ranks import TrainState
from tests.native import backends
from tests.unit.test_learner import batch, learner_of

DISTILL = algorithms.get("distill")
LENGTHS = (6, 3, 9, 4, 5)
WEIGHTS = (1.0, 0.5, 0.0, 1.0, 2.0)
"""The third sequence has no teacher."""


@pytest.fixture(params=["cpu double", "torch"], ids=["kernels", "torch"], autouse=True)
def _backend(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    with backends.on(request.param):
        yield


def make_step(seed: int) -> StepInput:
    """Sequences with tokens masked out in the middle, one without any token in the loss, all of one group."""
    g = torch.Generator().manual_seed(seed)
    total, starts = sum(LENGTHS), list(itertools.accumulate(LENGTHS, initial=0))
    mask = torch.rand(total, generator=g) < 0.7
    mask[starts[1] : starts[2]] = False
    rewards = torch.randn(len(LENGTHS), generator=g, dtype=torch.float64)
    own = -torch.randn(total, generator=g, dtype=torch.float64).abs()
    taught = -torch.randn(total, generator=g, dtype=torch.float64).abs()
    return StepInput(
        rewards=rewards,
        stats=[group_stats(rewards.tolist())] * len(LENGTHS),
        cu_seqlens=torch.tensor(starts),
        mask=mask,
        tokens=counts(mask, torch.tensor(LENGTHS)),
        old_logp=own,
        teacher_logp=torch.where(torch.repeat_interleave(torch.tensor(WEIGHTS), torch.tensor(LENGTHS)) > 0, taught, 0),
        teacher_weights=torch.tensor(WEIGHTS, dtype=torch.float64),
    )


def by_hand(step: StepInput, c: DistillConfig) -> list[float]:
    """Advantages [T] by the sums that define them, one token at a time."""
    found, rewards = [0.0] * len(step.mask), step.rewards.tolist()
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    for i, (start, end) in enumerate(itertools.pairwise(step.cu_seqlens.tolist())):
        kept = [t for t in range(start, end) if step.mask[t]]
        r = [WEIGHTS[i] * (float(step.teacher_logp[t]) - float(step.old_logp[t])) for t in kept]
        for k, t in enumerate(kept):
            following = sum(c.gamma ** (j - k) * r[j] for j in range(k, len(kept)))
            found[t] = following + c.reward_coef * (rewards[i] - mean) / (deviation + 1e-6)
    return found


CASES = [DistillConfig(gamma=gamma, reward_coef=coef) for gamma in (0.0, 0.9, 1.0) for coef in (0.0, 0.3)]


@pytest.mark.parametrize("config", CASES, ids=lambda c: f"{c.gamma}-{c.reward_coef}")
def test_against_the_definition(config: DistillConfig) -> None:
    for seed in range(3):
        step = make_step(seed)
        got = DISTILL.step_advantages(step, config)
        assert got.advantages.tolist() == pytest.approx(by_hand(step, config), rel=1e-9, abs=1e-9)
        assert got.returns is None


@pytest.mark.parametrize("config", CASES, ids=lambda c: f"{c.gamma}-{c.reward_coef}")
def test_the_gradient_of_the_first_update(config: DistillConfig) -> None:
    """At ratio 1 the gradient of a token's log-prob is −A / (number of tokens)."""
    step = make_step(4)
    logp = step.old_logp.clone().requires_grad_()
    advantages = DISTILL.step_advantages(step, config).advantages
    batch = LossInput(logp, None, step.old_logp, None, advantages, step.mask, step.row, step.num_rows)
    settings = dataclasses.replace(config, name="distill", kl=KLConfig(0.0))
    count = DISTILL.denominators(step.mask, step.row, step.num_rows, settings)
    loss = DISTILL.loss(batch, settings).total / count
    loss.backward()
    number = int(step.mask.sum())
    wanted = [-a / number if keep else 0.0 for a, keep in zip(by_hand(step, config), step.mask.tolist(), strict=True)]
    assert float(loss.detach()) == pytest.approx(sum(wanted), rel=1e-9, abs=1e-12)
    assert logp.grad.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("correction", ["none", "truncate", "mask"])
def test_a_divergence_as_a_loss(correction: str, aggregation: str) -> None:
    """Beside the loss of ``reward_coef`` each kept token has w·v·D, v by the correction; nothing else reaches D."""
    step = make_step(8)
    g = torch.Generator().manual_seed(9)
    settings: dict[str, Any] = {"correction": correction, "aggregation": aggregation, "kl": KLConfig(0.0)}
    sampled = DistillConfig(name="distill", reward_coef=0.3, **settings)
    config = dataclasses.replace(sampled, divergence="jsd", normalize_by_std=True)
    taught = DISTILL.step_advantages(step, config).advantages
    alone = dataclasses.replace(step, teacher_weights=torch.zeros(len(LENGTHS), dtype=torch.float64))
    assert torch.equal(taught, DISTILL.step_advantages(alone, sampled).advantages), "only the rewards' part"

    engine = step.old_logp + 0.8 * torch.randn(len(step.mask), generator=g, dtype=torch.float64)
    each = torch.rand(len(step.mask), generator=g, dtype=torch.float64)
    dirty = torch.where(step.mask & (step.row != 2), each, math.nan).requires_grad_()
    batch = LossInput(
        step.old_logp.clone().requires_grad_(), None, step.old_logp, None, taught, step.mask, step.row, step.num_rows,
        engine_logp=engine, divergence=dirty, teacher_weights=torch.tensor(WEIGHTS, dtype=torch.float64),
    )  # fmt: skip
    found = DISTILL.loss(batch, config)
    plain = DISTILL.loss(dataclasses.replace(batch, divergence=None), sampled)
    (gradient,) = torch.autograd.grad(found.total, dirty)
    wanted, total = [0.0] * len(step.mask), 0.0
    for t in step.mask.nonzero()[:, 0].tolist():
        row = int(step.row[t])
        ratio = math.exp(float(step.old_logp[t] - engine[t]))
        v = {"none": 1.0, "truncate": min(ratio, 2.0), "mask": ratio if 0.5 <= ratio <= 2.0 else 0.0}[correction]
        number = int((step.mask & (step.row == row)).sum())
        wanted[t] = WEIGHTS[row] * v / (1 if aggregation == "token_mean" else number)
        total += wanted[t] * float(each[t])
    assert gradient.nan_to_num(math.inf).tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-12)
    assert float((found.total - plain.total).detach()) == pytest.approx(total, rel=1e-6)
    of_teachers = step.mask & torch.tensor(WEIGHTS)[step.row].bool()
    assert [float(x) for x in found.metrics["teacher/divergence"]] == pytest.approx(
        [float(each[of_teachers].sum()), int(of_teachers.sum())], rel=1e-6
    )
    with pytest.raises(ConfigError, match="algorithm.divergence=jsd needs the divergence from a teacher"):
        DISTILL.loss(dataclasses.replace(batch, divergence=None), config)


@pytest.mark.parametrize("config", CASES, ids=lambda c: f"{c.gamma}-{c.reward_coef}")
def test_tokens_outside_a_part_have_the_rewards_term_alone(config: DistillConfig) -> None:
    step = make_step(10)
    taught = torch.rand(len(step.mask), generator=torch.Generator().manual_seed(1)) < 0.5
    got = DISTILL.step_advantages(dataclasses.replace(step, taught=taught), config).advantages
    nothing = torch.where(taught, step.teacher_logp, step.old_logp)
    inside = by_hand(dataclasses.replace(step, teacher_logp=nothing), config)
    outside = by_hand(dataclasses.replace(step, teacher_logp=step.old_logp), config)
    wanted = [a if kept else b for a, b, kept in zip(inside, outside, taught.tolist(), strict=True)]
    assert got.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_expert_rows_and_tokens_outside_a_part_in_a_divergence() -> None:
    """Expert rows have the divergence alone, without ``correction``; the denominator counts all rows."""
    step, expert = make_step(11), torch.tensor([False, False, False, True, True])
    g = torch.Generator().manual_seed(12)
    config = DistillConfig(name="distill", divergence="jsd", expert_ratio=0.5, correction="truncate", kl=KLConfig(0.1))
    taught = torch.rand(len(step.mask), generator=g) < 0.6
    each = torch.rand(len(step.mask), generator=g, dtype=torch.float64).requires_grad_()
    engine, logp = step.old_logp - 0.3, step.old_logp.clone().requires_grad_()
    batch = LossInput(
        logp, None, step.old_logp, step.old_logp - 1.0, torch.ones_like(engine), step.mask, step.row, step.num_rows,
        engine_logp=engine, divergence=each, expert=expert, taught=taught,
        teacher_weights=torch.tensor(WEIGHTS, dtype=torch.float64),
    )  # fmt: skip
    of_experts = expert[step.row]
    found = DISTILL.loss(batch, config)
    by_token, by_divergence = torch.autograd.grad(found.total, (logp, each))
    v = torch.where(of_experts, 1.0, math.exp(0.3))
    wanted = torch.tensor(WEIGHTS, dtype=torch.float64)[step.row] * v * (step.mask & taught)
    assert by_divergence.tolist() == pytest.approx(wanted.tolist(), rel=1e-6)
    assert not by_token[of_experts].any() and by_token[step.mask & ~of_experts].all()
    count = DISTILL.denominators(step.mask, step.row, step.num_rows, config, expert)
    assert count.tolist() == [int(step.mask.sum())]


def test_a_weight_that_falls_to_zero() -> None:
    teachers = {"a": TeacherConfig("/a", weight=2.0, decay_steps=8), "b": TeacherConfig("/b", weight=0.5)}
    for step, weight in ((0, 2.0), (2, 1.5), (7, 0.25), (8, 0.0), (20, 0.0)):
        found = teachers_at(teachers, step)
        assert (found["a"].weight, found["b"].weight) == (weight, 0.5)
    learner = learner_of(Config(algorithm=DistillConfig(name="distill"), teachers=teachers))
    given = batch()
    given.teachers, given.sequences.teacher_logp = ["a", "b"], torch.full((9,), -3.0)
    learner.estimate(TrainState("rl", step=6), given)
    assert given.sequences.advantages[given.sequences.mask].tolist() == [-1.0, -1.0, -1.0, -1.0, -1.0]
    learner.estimate(TrainState("rl", step=8), given)
    assert given.sequences.advantages[given.sequences.mask].tolist() == [0.0, 0.0, -1.0, -1.0, -1.0]


def test_what_is_masked_out_and_what_no_teacher_scores_do_not_matter() -> None:
    step, config = make_step(5), DistillConfig(gamma=0.9)
    clean = DISTILL.step_advantages(step, config).advantages
    without = step.row == 2
    assert not clean[without].any() and clean[step.mask & ~without].all() and not clean[~step.mask].any()
    dirty = {name: torch.where(step.mask, getattr(step, name), math.nan) for name in ("old_logp", "teacher_logp")}
    assert torch.equal(DISTILL.step_advantages(dataclasses.replace(step, **dirty), config).advantages, clean)


def test_a_teacher_equal_to_the_student_teaches_nothing() -> None:
    step = make_step(6)
    step = dataclasses.replace(step, teacher_logp=step.old_logp)
    assert not DISTILL.step_advantages(step, DistillConfig(gamma=1.0)).advantages.any()


def test_missing_inputs_are_named() -> None:
    step = make_step(7)
    for name in ("old_logp", "teacher_logp", "teacher_weights"):
        with pytest.raises(ConfigError, match="distill needs old_logp, teacher_logp"):
            DISTILL.step_advantages(dataclasses.replace(step, **{name: None}), DistillConfig())
    with pytest.raises(ConfigError, match=r"algorithm.reward_coef=0.3 .*algorithm.group_size is 1"):
        DISTILL.step_advantages(step, DistillConfig(reward_coef=0.3, group_size=1))
    with pytest.raises(ConfigError, match=r"algorithm.kl.place=reward: .* set it to loss"):
        DISTILL.step_advantages(step, DistillConfig(kl=KLConfig(0.1, "k3", "reward")))


def test_a_token_that_the_teacher_does_not_have() -> None:
    config = Config(teachers={"math": TeacherConfig("/m")})
    teacher: Any = SimpleNamespace(head=SimpleNamespace(vocab_size=100))
    sequences = Sequences(torch.tensor([3, 99], dtype=torch.int32), torch.tensor([2]), torch.tensor([True, False]))
    check_ids(sequences, config, "math", teacher)
    sequences.tokens = torch.tensor([3, 100], dtype=torch.int32)
    with pytest.raises(NonRetryableError, match=r"sampled token 100, .* teachers.math.path=/m has vocab_size=100"):
        check_ids(sequences, config, "math", teacher)


def test_the_teacher_of_a_data_source() -> None:
    teachers = {
        "math": TeacherConfig(sources=["gsm8k", "math/"]),
        "hard": TeacherConfig(sources=["math/hard/", "math/hard"]),
        "rest": TeacherConfig(),
    }
    wanted = {
        "gsm8k": "math",
        "gsm8k/main": "rest",  # a name is no prefix
        "math/algebra": "math",
        "math/hard": "hard",  # the exact name comes before a prefix
        "math/hard/aime": "hard",
        "mathematics": "rest",
    }
    assert {source: teacher_of(teachers, source) for source in wanted} == wanted
    assert teacher_of({"math": teachers["math"]}, "code") is None
