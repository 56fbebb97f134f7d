"""What a step of the trainer decides between its phases, without a model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl import algorithms
from megarl.batching import Sequences, micro_batches
from megarl.batching.packing import Cut
from megarl.config.schema import AlgorithmConfig, CriticConfig, KLConfig
from megarl.loop.session import State
from megarl.loop.step import StepBatch, _step_input, critic_alone, estimate, gather, infer, kl_coef
from megarl.schema import Experience, Reward


def session(name: str, config: AlgorithmConfig, *, step: int, coef: float | None = None) -> Any:
    """As much of a session as an estimate looks at."""
    return SimpleNamespace(
        config=SimpleNamespace(algorithm=config, critic=CriticConfig(warmup_steps=2)),
        algorithm=algorithms.get(name),
        roles=SimpleNamespace(critic=object() if name == "ppo" else None),
        state=State(step=step, kl_coef=coef),
    )


def batch(reasons: tuple[str, ...] = ("stop", "length")) -> StepBatch:
    lengths = torch.tensor([4, 5])
    mask = torch.tensor([False, True, True, False, False, True, True, True, False])
    values = torch.arange(9.0)
    sequences = Sequences(
        torch.arange(9), lengths, mask, old_logp=torch.full((9,), -1.0), ref_logp=torch.full((9,), -1.5), values=values
    )
    experiences: list[Any] = [SimpleNamespace(reward=SimpleNamespace(score=1.0), group_stats=None, finish_reason=r) for r in reasons]
    return StepBatch(experiences, sequences, [])


@pytest.mark.parametrize(("step", "moves"), [(0, False), (1, False), (2, True)])
def test_the_coefficient_stays_while_the_critic_learns_alone(step: int, moves: bool) -> None:
    config = AlgorithmConfig(name="ppo", kl=KLConfig(0.1, "k1", "reward", target=0.01, horizon=10))
    s = session("ppo", config, step=step)
    assert critic_alone(s) is not moves
    metrics = estimate(s, batch())
    assert metrics["actor/kl_coef"] == 0.1 and metrics["actor/kl_measured"] == pytest.approx(0.5)
    assert (s.state.kl_coef is not None) is moves


def test_without_a_target_the_coefficient_is_the_setting() -> None:
    assert kl_coef(session("grpo", AlgorithmConfig(kl=KLConfig(0.1)), step=5, coef=0.37)) == 0.1
    assert kl_coef(session("grpo", AlgorithmConfig(kl=KLConfig(0.1, target=0.01)), step=5, coef=0.37)) == 0.37


def test_what_stands_behind_a_cut_answer() -> None:
    assert _step_input(session("ppo", AlgorithmConfig(), step=0), batch()).bootstrap is None
    found = _step_input(session("ppo", AlgorithmConfig(bootstrap_cut=True), step=0), batch()).bootstrap
    assert found is not None and found.tolist() == [0.0, 8.0]


@pytest.mark.parametrize("needs", [{"old_logp", "ref_logp"}, {"ref_logp"}])
def test_answers_outside_any_pair_have_log_probs_where_they_are_recorded(needs: set[str]) -> None:
    """Not 0, which is the log-prob of a certain token, in the store, in the mismatch with the engine and in the adaptive KL."""
    scores, recorded = [0.0, 1.0, 0.5, 0.5], []
    experiences: list[Any] = [answer(i, score) for i, score in enumerate(scores)]
    model = SimpleNamespace(
        micro_batches=lambda sequences, units: micro_batches(sequences, Cut(rows=2), 0, units),
        answers=lambda sequences, updates: asked_for(sequences, updates),
    )
    s: Any = SimpleNamespace(
        algorithm=replace(algorithms.get("online_dpo"), needs=frozenset({"pairs", "group"} | needs)),
        config=SimpleNamespace(trainer=SimpleNamespace(updates_per_step=1), algorithm=AlgorithmConfig()),
        position=SimpleNamespace(rank=0),
        store=SimpleNamespace(record_old_logp=lambda given, logp: recorded.extend(logp)),
        actor=model,
        roles=SimpleNamespace(reference=model, critic=None),
    )
    batch = gather(s, experiences, [])
    assert batch.updates == [[[1, 0]]]
    infer(s, batch)
    every = torch.full_like(batch.sequences.mask, True, dtype=torch.float32)
    if "old_logp" in needs:
        assert batch.sequences.old_logp is not None and torch.equal(batch.sequences.old_logp, every)
        assert [len(logp) for logp in recorded] == [len(e.response_ids) for e in experiences]
        assert all((logp == 1).all() for logp in recorded)
    assert batch.sequences.ref_logp is not None
    paired = batch.sequences.row < 2
    assert torch.equal(batch.sequences.ref_logp, every if "old_logp" in needs else torch.where(paired, 1.0, 0.0))


def asked_for(sequences: Sequences, updates: Any) -> torch.Tensor:
    """1 at the positions of the micro-batches, each of which may be asked for once."""
    found = torch.zeros(len(sequences.tokens))
    for batch in (batch for batches in updates for batch in batches):
        found.index_add_(0, batch.index[batch.index >= 0], torch.ones(int((batch.index >= 0).sum())))
    return found


def answer(index: int, score: float) -> Experience:
    length = index + 2
    return Experience(
        rollout_id="r",
        task_id="t",
        group_id="g",
        index=index,
        group_size=4,
        prompt_ids=np.arange(3),
        response_ids=np.arange(length),
        response_mask=np.ones(length, dtype=bool),
        engine_logp=np.zeros(length, dtype=np.float32),
        reward=Reward(score, "ok"),
        segments=(),
        finish_reason="stop",
    )
