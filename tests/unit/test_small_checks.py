"""Checks of a job's start, pairs, routers, ends, priorities and episodes: each finds its fault, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config.algorithms import PreferenceConfig
from megarl.core.errors import JobError, WeightsDiffer
from megarl.core.schema import Task
from megarl.engines.client.frames import VersionSpan
from megarl.engines.client.probe import FarText, Scores
from megarl.explore.recording.model import check_versions
from megarl.learn import plain
from megarl.learn.algorithms.pairs import dpo_loss
from megarl.learn.algorithms.types import LossInput
from megarl.rewards.wrong_answers import accepted, wrong_answers
from megarl.train.loop.offline_checks import mask_fault
from tests.trajectories import VERSION, one_turn

BOUND = 14.0


def test_a_verifier_that_accepts_lists_of_other_answers_is_found() -> None:
    tasks = [
        Task(f"train/{i}", "sums", ({"role": "user", "content": "q"},), "math", {"ground_truth": str(10 + i)})
        for i in range(6)
    ]
    asked = list(wrong_answers(tasks))
    assert asked and all(str(one.task.ground_truth) not in one.text.split() for one in asked)
    wrong, right = {"status": "wrong", "score": 0.1}, {"status": "ok", "score": 1.0}
    assert accepted([(one, wrong) for one in asked]) is None
    assert accepted([(one, right if i % 2 else wrong) for i, one in enumerate(asked)]) is not None
    assert list(wrong_answers(tasks[:2])) == [], "a single other answer may be equivalent"


@pytest.mark.parametrize("preference", ["sigmoid", "ipo"])
def test_the_gradient_of_pairs_is_that_of_the_loss(preference: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    logp, ref = torch.randn(2, 12, generator=generator, dtype=torch.float64)
    row = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 3, 3])
    logp.requires_grad_()
    config = PreferenceConfig(
        name="dpo", preference=preference, label_smoothing=0.2 if preference == "sigmoid" else 0.0
    )
    given = LossInput(
        logp=logp, entropy=None, old_logp=None, ref_logp=ref, advantages=None, mask=torch.ones(12, dtype=torch.bool),
        row=row, num_rows=4,
    )  # fmt: skip
    dpo_loss(given, config).total.backward()  # type: ignore[no-untyped-call]
    found = plain.preference_gradient(config, logp.detach() - ref, row)
    torch.testing.assert_close(found, logp.grad)


def test_the_gradient_of_routers_is_that_of_balance_and_z() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, 4, generator=generator, dtype=torch.float64).requires_grad_()
    row = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2])
    p, balance = logits.softmax(1), torch.zeros((), dtype=torch.float64)
    for n in range(3):
        own = row == n
        chosen = torch.zeros(int(own.sum()), 4).scatter_(1, p[own].topk(2, 1).indices, 1.0)
        balance = balance + (chosen.mean(0) * 4 / 2 * p[own].mean(0)).sum() / 5
    (0.3 * balance + 0.2 * logits.logsumexp(1).square().sum() / 20).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(plain.router_gradient(logits.detach(), row, 2, (0.3, 0.2), (5, 20)), logits.grad)


def test_a_loss_without_the_answers_end_is_found() -> None:
    prompt, answer = np.array([1, 2]), np.array([3, 4, 9])
    mask = np.array([False, True, True, True, False])
    assert mask_fault(mask, prompt, answer) is None
    assert mask_fault(mask & (np.arange(5) != 3), prompt, answer) is not None
    assert mask_fault(np.roll(mask, 1), prompt, answer) is not None


def test_a_turn_with_other_versions_than_the_engine_named_is_refused() -> None:
    turn = one_turn([1], [5, 6])[1]
    engine: Any = SimpleNamespace(versions=(VersionSpan(str(VERSION), 0, 2),))
    check_versions(turn, engine)
    mixed: Any = SimpleNamespace(versions=(VersionSpan("0.0", 0, 1), VersionSpan(str(VERSION), 1, 2)))
    with pytest.raises(JobError, match="has sampled a response with the weights"):
        check_versions(turn, mixed)


def test_a_repeated_text_names_the_prefix_cache() -> None:
    text = FarText([1, 2, 3], [4, 5], [-1.0, -2.0], 1e-4, repeated=True)
    text.check(Scores([], [4], [-0.3132617]))
    with pytest.raises(WeightsDiffer, match="kept its prefix cache"):
        text.check(Scores([], [4], [-0.4]))
    with pytest.raises(WeightsDiffer, match="after 3 tokens"):
        replace(text, repeated=False).check(Scores([], [4], [-0.4]))
