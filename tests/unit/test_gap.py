"""The check of the log-probs that engines gave to a step's own samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megarl.config import Config
from megarl.config.job import SyncConfig
from megarl.config.schema import ModelConfig
from megarl.core.errors import WeightsDiffer
from megarl.core.schema import Outcome, Reward
from megarl.learn.batching import Sequences
from megarl.train.batch.batch import StepBatch
from megarl.train.update.gap import check_samples, engine_gap

LENGTHS = [40, 60]


def step(difference: float, at: slice = slice(None), lag: torch.Tensor | None = None) -> StepBatch:
    """Two responses of groups a and b; log-probs ``at`` differ by so much from those of the engine."""
    generator = torch.Generator().manual_seed(1)
    total = sum(LENGTHS)
    engine = -2 * torch.rand(total, generator=generator)
    old = engine.clone()
    old[at] += difference
    mask = torch.ones(total, dtype=torch.bool)
    mask[[39, 99]] = False
    sequences = Sequences(
        torch.zeros(total, dtype=torch.int32), torch.tensor(LENGTHS), mask, engine_logp=engine, old_logp=old, lag=lag
    )
    rows = [
        Outcome("r", group, 3, 1, length - 1, Reward(1.0, "ok"), False, None, None)
        for group, length in zip("ab", LENGTHS, strict=True)
    ]
    return StepBatch(rows, rows, sequences, [], ["stop", "stop"])


def check(batch: StepBatch, dtype: str = "float32", tolerance: float | None = None) -> None:
    model = ModelConfig(path="/m", dtype=dtype)  # type: ignore[arg-type]
    config = replace(Config(), model=model, sync=SyncConfig(sample_tolerance=tolerance))
    check_samples(batch, batch.sequences.sampled, config)


def test_a_rounding_is_no_difference() -> None:
    check(step(1e-4))
    check(step(0.05), "bfloat16")
    check(step(0.5, slice(70, 71)), "bfloat16")  # one token, as with another expert


def test_a_difference_is_named() -> None:
    batch = step(0.002)
    assert batch.sequences.old_logp is not None
    batch.sequences.old_logp[50] += 3
    words = (
        r"98 tokens .* 3\.26e-02 from .*sync\.sample_tolerance=0\.001 \(99% within 3\.00e\+00; furthest at token 11 of "
        r"trajectory 3 of group b: engine -.*enforce_eager"
    )
    with pytest.raises(WeightsDiffer, match=words):
        check(batch)
    check(batch, tolerance=0.04)
    with pytest.raises(WeightsDiffer, match=r"sample_tolerance=0\.1 "):
        check(step(0.11), "bfloat16")


def test_what_is_no_number_is_a_difference() -> None:
    batch = step(0.0)
    assert batch.sequences.engine_logp is not None
    batch.sequences.engine_logp[2] = float("nan")
    with pytest.raises(WeightsDiffer, match="furthest at token 3 of trajectory 3 of group a"):
        check(batch)
    check(step(float("nan"), slice(2, 3)))  # of the trainer: an update that is skipped


def test_sequences_with_tokens_of_older_weights_are_left_out() -> None:
    lag = torch.zeros(sum(LENGTHS), dtype=torch.int16)
    lag[:40] = 1
    check(step(5.0, slice(0, 40), lag))
    with pytest.raises(WeightsDiffer):
        check(step(5.0, slice(0, 41), lag))
    lag[1:40] = 0  # one token of the first sequence is left
    check(step(5.0, slice(0, 40), lag))
    check(step(5.0, lag=torch.ones_like(lag)))


def test_the_metrics_have_mean_quantile_and_largest() -> None:
    batch = step(0.25, slice(0, 10))
    config = replace(Config(), sync=SyncConfig(sample_tolerance=1.0))
    found = engine_gap(batch, batch.sequences.sampled, config)
    assert found["training/rollout_logp_diff_mean"] == pytest.approx(2.5 / 98)
    assert found["training/rollout_logp_diff_p99"] == pytest.approx(0.25) == found["training/rollout_logp_diff_max"]
    assert found["training/logp_diff/lag_0"] == found["training/rollout_logp_diff_mean"]
