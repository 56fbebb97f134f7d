"""A step whose sequences are dealt to ranks: what each rank holds, and its estimate and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from megarl.buffer.experience.operators import group_stats
from megarl.config.algorithms import AlgorithmConfig, KLConfig, settings_of
from megarl.config.job import SyncConfig
from megarl.config.schema import Config, TeacherConfig
from megarl.core.errors import WeightsDiffer
from megarl.core.schema import FinishReason, Outcome, Reward
from megarl.learn import algorithms
from megarl.learn.algorithms.terms.reduction import Together, alone
from megarl.learn.batching import Sequences, StepShare
from megarl.train.batch.batch import StepBatch
from megarl.train.inference.inference import Inference
from megarl.train.inference.models import Models
from megarl.train.ranks import TrainState
from megarl.train.update.gap import engine_gap
from megarl.train.update.learner import Learner
from tests.parallel.batches import held_by

LENGTHS = (30, 70_001, 5, 9, 40_003, 1, 64, 30_000, 12)
"""Of sequences; those that are computed at once are others on each rank."""


def whole(name: str) -> StepBatch:
    """Step of one rank. Sequence 2 has no token in the loss; the last one is demonstrated with mix."""
    generator = torch.Generator().manual_seed(5)
    lengths, total = torch.tensor(LENGTHS), sum(LENGTHS)
    mask = torch.rand(total, generator=generator) < 0.8
    ends = lengths.cumsum(0)
    mask[ends - 1] = False
    mask[ends[1] : ends[2]] = False
    old, noise, more, values = (torch.randn(total, generator=generator) for _ in range(4))
    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths)
    sequences = Sequences(
        torch.zeros(total, dtype=torch.int32),
        lengths,
        mask,
        engine_logp=old + 0.01 * noise,
        old_logp=old,
        ref_logp=old + 0.1 * more,
        values=values,
        lag=torch.where(row % 3 == 0, 3 * (torch.arange(total) % 5), 0).to(torch.int16),
    )
    scores = torch.rand(len(LENGTHS), generator=generator).tolist()
    rows = [
        Outcome("r", f"g{i // 4}", i % 4, 1, length, Reward(score, "ok"), False, group_stats(scores), greedy(score / 3))
        for i, (length, score) in enumerate(zip(LENGTHS, scores, strict=True))
    ]
    if name == "mix":
        rows = rows[:-1]
        sequences.expert = torch.arange(len(LENGTHS)) == len(rows)
    if name == "distill":
        sequences.teacher_logp = old + 0.1 * values
        rows = [replace(row, teacher="one" if i % 3 else None) for i, row in enumerate(rows)]
    turns = noise if algorithms.get(name).advantage is not None else None
    reasons: list[FinishReason] = ["length", *["stop"] * (len(rows) - 1)]
    return StepBatch(rows, rows, sequences, [], reasons, turns, teachers=[row.teacher for row in rows])


def greedy(score: float) -> Outcome:
    return Outcome("r", "g", -1, 1, 1, Reward(score, "ok"), False, None, None)


@dataclass(frozen=True)
class ShareOf(StepShare):
    """A share whose values a test puts together."""

    given: Together = alone

    def together(self, values: torch.Tensor) -> torch.Tensor:
        return self.given(values)


def share_of(own: Sequence[int], together: Together) -> StepShare:
    """The share of a simulated rank that holds sequences ``own``."""
    return ShareOf(torch.tensor(own, dtype=torch.int64), torch.tensor(LENGTHS), None, together)


def held(batch: StepBatch, share: StepShare) -> StepBatch:
    """Part of a step that a rank with ``share`` holds. It knows no lags where its sequences have none."""
    part, turns = held_by(batch.sequences, share), batch.turn_advantages
    if part.lag is not None and not part.lag.any():
        part.lag = None
    if turns is not None:
        turns = turns[torch.isin(batch.sequences.row, share.numbers)]
    return replace(batch, sequences=part, turn_advantages=turns)


def results(name: str, batch: StepBatch) -> tuple[dict[int, bytes], list[str]]:
    """(number of a held sequence -> bits of its advantages and returns, all else that a step computes of ``batch``)."""
    settings: AlgorithmConfig = settings_of(name)(name=name)
    of_tokens = algorithms.get(name).estimate is not None
    kl = KLConfig(0.1, "k3", "reward" if of_tokens and name != "distill" else "loss", target=0.3, horizon=100)
    settings = replace(settings, kl=kl, turn_rewards=0.0 if of_tokens else 0.25)
    for flag in ("whiten_advantages", "bootstrap_truncated"):
        if of_tokens and hasattr(settings, flag):
            settings = replace(settings, **{flag: True})
    if name == "distill":
        settings = replace(settings, gamma=0.9, reward_coef=0.5)
    teachers = {"one": TeacherConfig(weight=0.7)}
    config = Config(algorithm=settings, sync=SyncConfig(sample_tolerance=1.0), teachers=teachers)
    models, nothing = cast("Models", SimpleNamespace(critic=None)), cast("Any", None)
    learner = Learner(
        config, algorithms.get(name), Inference(config, algorithms.get(name), models, nothing), nothing, nothing
    )
    sequences = batch.sequences
    state, metrics = learner.estimate(TrainState(), batch)
    metrics |= engine_gap(batch, sequences.sampled, config)
    told = []
    try:
        engine_gap(batch, sequences.sampled, replace(config, sync=SyncConfig(sample_tolerance=1e-4)))
    except WeightsDiffer as error:
        told = [str(error)]
    numbers = range(len(sequences)) if sequences.share is None else sequences.share.numbers.tolist()
    assert sequences.advantages is not None
    found = [x for x in (sequences.advantages, sequences.returns) if x is not None]
    split = zip(*(x.split(sequences.lengths.tolist()) for x in found), strict=True)
    bits = {n: b"".join(x.numpy().tobytes() for x in rows) for n, rows in zip(numbers, split, strict=True)}
    return bits, [f"{key}={value!r}" for key, value in (metrics | {"kl_coef": state.kl_coef}).items()] + told
