"""Imported settings give verl's loss and gradient on one batch.

The numbers were computed in float64 by the functions of ``verl/trainer/ppo/core_algos.py`` at b178a3cd56f5.
"""

from __future__ import annotations

import pytest
import torch

from megarl.config.algorithms import AlgorithmConfig
from megarl.config.load import from_dict
from megarl.config.schema import Config
from megarl.config.verl.imported import nested
from megarl.learn import algorithms
from megarl.learn.algorithms import LossInput
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
