"""Imported settings give verl's loss and gradient on one batch: of given advantages, and from scores to the loss.

The numbers were computed in float64 by the functions of ``verl/trainer/ppo/core_algos.py`` at b178a3cd56f5. For whole
steps (``cases/verl_steps.json``) these are its advantage estimator, ``kl_penalty`` in reward or loss,
``compute_policy_loss_vanilla`` and ``compute_value_loss``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megarl.config.algorithms import AlgorithmConfig
from megarl.config.load import from_dict
from megarl.config.schema import Config
from megarl.config.verl.imported import nested
from megarl.core.schema import GroupStats
from megarl.learn import algorithms
from megarl.learn.algorithms import LossInput, StepInput
from megarl.learn.algorithms.token_returns import critic_loss
from tests.unit.test_import_verl import COMMANDS, imported, path_of

OLD = [-1.2, -0.7, -2.0, -0.3, -0.9, -1.6, -0.4]
CHANGE = [0.5, -0.6, 0.1, -0.02, 1.4, -0.3, 0.25]
REFERENCE = [0.2, 0.1, -0.4, 0.05, -0.3, 0.6, 0.0]
LENGTHS = (4, 3)
ADVANTAGES = (0.8, -1.1)
GOLDEN = {
    "examples/grpo_trainer/run_qwen2-7b.sh": (
        0.3610025247946818,
        [3.7025968e-05, -0.062866151655, -0.126249037874, -0.112033063832, 0.000116759497, -0.00020851473,
         0.20180702251],
    ),
    "examples/ppo_trainer/run_gemma.sh": (
        0.36072613948219606,
        [0.0, -0.062721329839, -0.12630524778, -0.112022705521, 0.0, 0.0, 0.201775422622],
    ),
    "examples/cispo_trainer/run_cispo_qwen2_5_0_5b_gsm8k.sh": (
        0.29845419619170155,
        [-0.137105831174, -0.062866151655, -0.126249037874, -0.112033063832, 0.188688188068, 0.116205777091,
         0.18860302846],
    ),
    "examples/gspo_trainer/test_gspo_qwen30b_a3b_ep.sh": (
        0.4645667084622935,
        [-0.099501247671] * 4 + [0.287523899715] * 3,
    ),
}  # fmt: skip
"""Path of a published command -> (verl's loss, its gradient by the log-probs of the 4 + 3 tokens)."""


def algorithm_of(path: str) -> AlgorithmConfig:
    settings = imported(next(command for command in COMMANDS if path_of(command) == path)).settings
    own = {name: value for name, value in settings.items() if name.startswith("algorithm.")}
    config: Config = from_dict(Config, nested({"model.path": "m", "taskset.train": "t", "taskset.eval": "e"} | own))
    return config.algorithm


@pytest.mark.parametrize("path", GOLDEN)
def test_the_loss_is_verls(path: str) -> None:
    config = algorithm_of(path)
    old = torch.tensor(OLD, dtype=torch.float32)
    logp = (old + torch.tensor(CHANGE, dtype=torch.float32)).requires_grad_()
    row = torch.repeat_interleave(torch.arange(2), torch.tensor(LENGTHS))
    batch = LossInput(
        logp=logp,
        entropy=torch.zeros_like(old),
        old_logp=old,
        ref_logp=old + torch.tensor(REFERENCE, dtype=torch.float32),
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float32)[row],
        mask=torch.ones(len(old), dtype=torch.bool),
        row=row,
        num_rows=2,
    )
    total = algorithms.get(config.name).loss(batch, config).total
    loss = total / (len(old) if config.aggregation == "token_mean" else len(LENGTHS))
    loss.backward()
    expected, gradient = GOLDEN[path]
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, torch.tensor(gradient, dtype=torch.float32), rtol=1e-5, atol=1e-6)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


STEPS = json.loads((Path(__file__).parent / "cases" / "verl_steps.json").read_text())
"""Path of a published command -> what verl computes for the responses below."""
SCORES = (1.0, 0.0, 0.5, 0.0, 1.0, 0.0)
GROUPS = (3, 3)
STEP_LENGTHS = torch.tensor((4, 3, 5, 2, 4, 3))
TOKEN = torch.arange(21)
STEP_OLD = -0.2 - (TOKEN * 7 % 11).float() / 6
STEP_LOGP = STEP_OLD + ((TOKEN * 5 % 13) - 6).float() / 9
STEP_REFERENCE = STEP_OLD + ((TOKEN * 3 % 7) - 3).float() / 8
VALUES = ((TOKEN * 4 % 9) - 3).float() / 7
PREDICTED = VALUES + ((TOKEN * 2 % 5) - 2).float() / 3


def step_of_responses() -> StepInput:
    groups = torch.tensor(SCORES, dtype=torch.float64).split(GROUPS)
    stats = [GroupStats(float(group.mean()), float(group.std()), len(group)) for group in groups for _ in group]
    return StepInput(
        rewards=torch.tensor(SCORES, dtype=torch.float64),
        stats=stats,
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), STEP_LENGTHS.cumsum(0)]),
        mask=torch.ones(len(TOKEN), dtype=torch.bool),
        tokens=STEP_LENGTHS,
        old_logp=STEP_OLD,
        ref_logp=STEP_REFERENCE,
        values=VALUES,
    )


@pytest.mark.parametrize("path", STEPS)
def test_a_step_of_a_whole_configuration_is_verls(path: str) -> None:
    """Advantages, loss, critic's loss and their gradients, from the scores of two groups."""
    assert imported(next(command for command in COMMANDS if path_of(command) == path)).is_whole
    config, wanted = algorithm_of(path), STEPS[path]
    step = step_of_responses()
    found = algorithms.get(config.name).step_advantages(step, config)
    advantages = torch.tensor(wanted["advantages"], dtype=torch.float32)
    torch.testing.assert_close(found.advantages, advantages, rtol=1e-5, atol=1e-5)
    logp = STEP_LOGP.clone().requires_grad_()
    batch = LossInput(
        logp=logp,
        entropy=torch.zeros_like(logp),
        old_logp=STEP_OLD,
        ref_logp=STEP_REFERENCE,
        advantages=found.advantages,
        mask=step.mask,
        row=step.row,
        num_rows=step.num_rows,
    )
    assert config.aggregation == "token_mean"
    loss = algorithms.get(config.name).loss(batch, config).total / len(TOKEN)
    loss.backward()
    gradient = torch.tensor(wanted["gradient"], dtype=torch.float32)
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, gradient, rtol=1e-5, atol=1e-6)
    assert loss.item() == pytest.approx(wanted["loss"], rel=1e-5)
    if "critic_loss" in wanted:
        predicted = PREDICTED.clone().requires_grad_()
        assert found.returns is not None
        critic = critic_loss(predicted, VALUES, found.returns, config).total / len(TOKEN)
        critic.backward()
        assert critic.item() == pytest.approx(wanted["critic_loss"], rel=1e-5)
        of_critic = torch.tensor(wanted["critic_gradient"], dtype=torch.float32)
        torch.testing.assert_close(predicted.grad, of_critic, rtol=1e-5, atol=1e-6)
