"""Second opinions about updates: the critic's gradient, the schedule, AdamW's formula, the count of steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.algorithms import PPOConfig
from megarl.config.schema import OptimizerConfig
from megarl.learn import plain
from megarl.learn.algorithms.token_returns import critic_loss
from megarl.learn.memory.residents import Residents
from megarl.learn.parallel.cpu import FusedLayoutAdamW
from megarl.learn.training.optimizer import learning_rate
from megarl.train.update.optimizer_witness import OptimizerWitness, scheduled_rate


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_gradient_of_values_is_that_of_the_critics_loss(clip: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, 200, generator=generator, dtype=torch.float64)
    config = PPOConfig(value_clip=clip)
    values.requires_grad_()
    critic_loss(values, old, returns, config).total.backward()  # type: ignore[no-untyped-call]
    found = plain.value_gradient(config, values.detach(), old, returns)
    torch.testing.assert_close(found, values.grad)
    if clip is not None:
        assert not torch.allclose(found, plain.value_gradient(config, values.detach(), values.detach(), returns))


@pytest.mark.parametrize(("warmup", "decay"), [(0, None), (4, None), (0, 8), (3, 9)])
def test_the_schedule_is_that_of_the_job(warmup: int, decay: int | None) -> None:
    config = OptimizerConfig(lr=1e-3, min_lr=1e-4, warmup_steps=warmup, decay_steps=decay)
    for step in range(12):
        assert scheduled_rate(config, step) == pytest.approx(learning_rate(config, step), rel=1e-12)


def optimized(config: OptimizerConfig, *, decay: float, works: bool = True, rate: float = 1e-3) -> dict[str, float]:
    """Metrics of two updates of a matrix and a norm, whose group decays by ``decay``."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(8, 8, generator=generator), torch.ones(8)]
    adam = FusedLayoutAdamW([{"params": [weights[0]], "wd_mult": 1.0}, {"params": [weights[1]], "wd_mult": 0.0}])
    for group, own in zip(adam.param_groups, (config.weight_decay, decay), strict=True):
        group.update(lr=rate, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=own)
    inner = SimpleNamespace(inner=SimpleNamespace(optimizer=adam))
    trained: Any = SimpleNamespace(optimizer=inner, model=SimpleNamespace(residents=Residents()))
    witness = OptimizerWitness(config, 0)
    for i in range(2):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        witness.before(trained)
        if works or not i:
            adam.step()
        witness.after()
    return witness.metrics()


def test_adams_own_updates_have_no_difference() -> None:
    found = optimized(OptimizerConfig(lr=1e-3, weight_decay=0.1), decay=0.0)
    assert found["check/optimizer"] < 1e-3 and found["check/learning_rate"] == 0.0
    assert found["actor/optimizer_steps"] == found["actor/updates"] == 2


def test_a_decayed_norm_a_lost_update_and_another_rate_differ() -> None:
    config = OptimizerConfig(lr=1e-3, weight_decay=0.1)
    assert optimized(config, decay=0.1)["check/optimizer"] == pytest.approx(0.1, rel=0.05)
    assert optimized(config, decay=0.0, works=False)["check/optimizer"] > 0.1
    assert optimized(config, decay=0.0, rate=5e-4)["check/learning_rate"] == pytest.approx(0.5)
