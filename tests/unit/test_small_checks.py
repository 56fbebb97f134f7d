"""Checks of a job's start, pairs, routers, ends, priorities and episodes: each finds its fault, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.buffer.order.draws import PRIORITY
from megarl.buffer.order.group_choice import Draw, prioritized
from megarl.config.algorithms import PreferenceConfig
from megarl.core.errors import JobError, WeightsDiffer
from megarl.core.schema import Reward, Task, Trajectory, Turn
from megarl.engines.client.frames import VersionSpan
from megarl.engines.client.probe import FarText, Scores
from megarl.explore.recording.model import check_versions
from megarl.learn import plain
from megarl.learn.algorithms.pairs import dpo_loss
from megarl.learn.algorithms.types import LossInput
from megarl.learn.models.norms import RMSNorm
from megarl.train.loop.offline_checks import mask_fault
from megarl.train.parts.best_kept import best_of
from megarl.train.parts.equal_episodes import broken_episodes
from megarl.train.parts.norms import wrong_norms
from megarl.train.parts.priority_draws import drawn
from megarl.train.parts.sampled_ends import early_ends
from megarl.train.parts.sampling import evidence
from megarl.train.parts.wrong_answers import accepted, wrong_answers
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


@pytest.mark.parametrize("dropped", [False, True])
def test_ends_that_come_earlier_than_their_probabilities_allow_are_found(dropped: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.zeros(160, dtype=torch.int64).geometric_(0.2, generator=generator).sort().values
    kept = lengths[: 100 if dropped else 160]
    sampled = torch.cat([torch.tensor([5] * (int(n) - 1) + [9]) for n in kept])
    ids = torch.tensor([[5, 9]]).expand(len(sampled), 2)
    odds = torch.tensor([[0.8, 0.2]], dtype=torch.float64).expand(len(sampled), 2)
    assert (evidence(early_ends(sampled, ids, odds, torch.tensor([9]))) > BOUND) is dropped


@pytest.mark.parametrize("preference", ["sigmoid", "ipo"])
def test_the_gradient_of_pairs_is_that_of_the_loss(preference: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    logp, ref = torch.randn(2, 12, generator=generator, dtype=torch.float64)
    row = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 3, 3])
    logp.requires_grad_()
    config = PreferenceConfig(name="dpo", preference=preference, label_smoothing=0.2 if preference == "sigmoid" else 0.0)
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


def test_a_norm_with_another_epsilon_is_found() -> None:
    config: Any = {"hidden_size": 64, "rms_norm_eps": 1e-6, "num_attention_heads": 2}
    parallel = SimpleNamespace(sequence_parallel=False)
    right, wrong = RMSNorm(parallel, 64, 1e-6), RMSNorm(parallel, 64, 1e-5)
    heads = RMSNorm(parallel, 32, 1e-6, zero_centred=True)
    assert wrong_norms(torch.nn.ModuleDict({"a": right, "c": heads}), config) == []
    assert wrong_norms(torch.nn.ModuleDict({"a": right, "b": wrong}), config) == ["b"]


def test_the_best_step_is_the_earliest_of_equal_ones(tmp_path: Path) -> None:
    lines = [{"step": step, "val/accuracy": value} for step, value in ((1, 0.5), (2, 0.75), (3, 0.75), (4, 1.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert best_of(tmp_path, "val/accuracy", {1, 2, 3}) == 2
    assert best_of(tmp_path, "val/accuracy", {5}) is None
    assert best_of(tmp_path, "val/loss", {1, 2, 3, 4}) is None


def test_prioritized_tasks_are_those_of_the_steps() -> None:
    ids, shares = [f"train/{i}" for i in range(20)], {"train/3": 1.0, "train/7": 0.5}
    weights = np.array([1.0 - shares.get(task, 0.0) + 0.1 for task in ids])
    numbers = prioritized(weights, Draw(4, 0, 8, 0, 11, ()))
    assert drawn(ids, shares, 0.1, [11, 4, PRIORITY])[:8] == [ids[i] for i in numbers]
    assert drawn(ids, {}, 0.1, [11, 4, PRIORITY]) != drawn(ids, {"train/3": 1.0}, 0.1, [11, 4, PRIORITY])


def episode(index: int, *answers: int, score: float = 0.0) -> Trajectory:
    """The model writes 5 before each answer of the environment, and at the end."""
    prompt, response = one_turn([1], [5])
    turns = [prompt]
    for answer in answers:
        turns += [response, Turn("environment", np.array([answer], np.int32))]
    reward = Reward(score, "ok" if score else "wrong")
    return Trajectory("train-000000", "train/0", "g", index, 4, (*turns, response), reward)


def test_an_episode_that_ends_where_an_equal_one_goes_on_is_found() -> None:
    whole = [episode(0, 7, 8), episode(1, 7, 8)]
    assert broken_episodes(whole) == []
    assert [one.index for one in broken_episodes([*whole, episode(2, 7)])] == [2]
    assert broken_episodes([*whole, episode(2, 7), episode(3, 6)]) == [], "the environment has chance in it"
    assert broken_episodes([*whole, episode(2, 7, score=1.0)]) == []


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
