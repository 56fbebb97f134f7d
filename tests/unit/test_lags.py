"""Lag of every token from its trajectory's spans to the loss: the batch, ``algorithm.segments``, metrics, decoupled
PPO."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megarl.buffer.experience import operators as operators_module
from megarl.buffer.experience.operators import group_stats
from megarl.buffer.order.draws import ExpertRow
from megarl.config import Config
from megarl.config.algorithms import AlgorithmConfig, KLConfig
from megarl.config.job import SyncConfig
from megarl.config.schema import RolloutConfig
from megarl.core.errors import ConfigError
from megarl.core.jobs import JOBS
from megarl.core.schema import LARGEST_LAG, End, Outcome, Reward, Trajectory, Turn, WeightsSpan, WeightsVersion
from megarl.learn import algorithms
from megarl.learn.batching import micro_batches
from megarl.learn.batching.micro import MicroBatching
from megarl.learn.training import objectives
from megarl.learn.training.objectives import LossTokens
from megarl.run.checks.pacing import check_pacing
from megarl.train.batch.batch import StepBatch, filter_overlong, make_batch, overlong
from megarl.train.batch.samples import Amount, SampleAccount, account_line
from megarl.train.update.gap import lag_metrics
from tests.trajectories import one_turn
from tests.unit.test_replay import GROUPS, SIZE, ReplayJob, config_of

OLD, MIDDLE, SAME, NEW = (WeightsVersion(1, n) for n in (1, 2, 3, 4))
LAGS = {OLD: 3, MIDDLE: 1, SAME: 0, NEW: 0}
"""An evaluation has published the newest weights twice."""
GRPO = algorithms.get("grpo")


def model_turn(follows: int, *spans: tuple[int, WeightsVersion]) -> Turn:
    """So many tokens of each version."""
    ends = np.cumsum([count for count, _ in spans]).tolist()
    tiles = [WeightsSpan(end - count, end, version) for end, (count, version) in zip(ends, spans, strict=True)]
    length = ends[-1]
    logp = -np.arange(1, length + 1, dtype=np.float32) / 10
    return Turn("model", np.arange(length, dtype=np.int32), follows, logp, tuple(tiles), "stop")


def user_turn(length: int, follows: int = -1) -> Turn:
    return Turn("user", np.full(length, 9, dtype=np.int32), follows)


def trajectory(index: int, *turns: Turn) -> Trajectory:
    return Trajectory("r", "t", "g", index, 2, turns, Reward(float(index), "ok"), group_stats([0.0, 1.0]))


def step(settings: AlgorithmConfig, shown: int = 0) -> StepBatch:
    """A trajectory of two turns that three versions have sampled; one of another that old weights sampled whole."""
    members = [
        trajectory(
            0, user_turn(2), model_turn(0, (2, OLD), (1, MIDDLE)), user_turn(1, 1), model_turn(2, (1, SAME), (2, NEW))
        ),
        trajectory(1, user_turn(1), model_turn(0, (3, OLD))),
    ]
    expert = [ExpertRow(np.arange(2), np.arange(3))] * shown
    return make_batch(members, expert, algorithms.get("mix" if shown else "grpo"), settings, 1, LAGS)


def test_every_token_has_its_lag_where_it_is_predicted() -> None:
    found = step(AlgorithmConfig())
    assert found.sequences.lag is not None and found.sequences.lag.dtype == torch.int16
    #                                    2 prompt, 3 model, 1 user, 3 model; then 1 prompt, 3 model
    assert found.sequences.lag.tolist() == [0, 3, 3, 1, 0, 0, 0, 0, 0] + [3, 3, 3, 0]
    assert found.sequences.mask.tolist() == [False, True, True, True, False, True, True, True, False] + [True] * 3 + [
        False
    ]
    assert found.updates == [[[0], [1]]] and found.trained == Amount(2, 9) and found.excluded == {}
    with_experts = step(AlgorithmConfig(), shown=2)
    assert with_experts.sequences.lag is not None
    assert with_experts.sequences.lag.tolist() == [*found.sequences.lag.tolist(), *[0] * 10]


def test_without_a_lag_there_is_no_array() -> None:
    members = [trajectory(0, user_turn(1), model_turn(0, (3, NEW)))]
    for lags in (None, LAGS):
        assert make_batch(members, [], GRPO, AlgorithmConfig(), 1, lags).sequences.lag is None
    with pytest.raises(KeyError):
        make_batch(members, [], GRPO, AlgorithmConfig(), 1, {OLD: 1})


def test_a_very_old_token_has_the_largest_lag() -> None:
    [sample] = trajectory(0, user_turn(1), model_turn(0, (1, OLD))).samples({OLD: 10**6})
    assert sample.lag is not None and sample.lag.tolist() == [LARGEST_LAG]


def test_current_segments_are_those_of_a_trajectorys_newest_weights() -> None:
    """A trajectory that one version has sampled is trained whole, however old it is. The denominator follows."""
    settings = AlgorithmConfig(segments="current", kl=KLConfig(0.0))
    found = step(settings)
    assert found.sequences.mask.tolist() == [False] * 5 + [True] * 3 + [False] + [True] * 3 + [False]
    assert found.excluded == {"segments": Amount(0, 3)} and found.trained == Amount(2, 6)
    policy = objectives.policy(GRPO, settings, found.sequences)
    batches = micro_batches(found.sequences, MicroBatching(rows=1), 0, found.updates[0])
    assert float(sum(policy.count(LossTokens.of(b, found.sequences)) for b in batches)) == 6
    for aggregation, wanted in (("seq_mean_token_mean", 2), ("seq_mean_token_sum", 2)):
        policy = objectives.policy(GRPO, replace(settings, aggregation=aggregation), found.sequences)
        batches = micro_batches(found.sequences, MicroBatching(rows=1), 0, found.updates[0])
        assert float(sum(policy.count(LossTokens.of(b, found.sequences)) for b in batches)) == wanted


def test_a_sample_of_earlier_segments_alone_is_in_no_update_and_computed_by_nobody() -> None:
    """Two lines of turns without a common turn: old weights sampled the first of them."""
    turns = (user_turn(1), model_turn(0, (3, OLD)), user_turn(2), model_turn(2, (1, MIDDLE), (2, NEW)))
    members = [trajectory(0, *turns), trajectory(1, user_turn(1), model_turn(0, (2, MIDDLE)))]
    found = make_batch(members, [], GRPO, AlgorithmConfig(segments="current"), 1, LAGS)
    assert found.updates == [[[1], [2]]] and found.outside == []
    assert found.excluded == {"segments": Amount(0, 4)} and found.trained == Amount(2, 4)
    everything = make_batch(members, [], GRPO, AlgorithmConfig(), 1, LAGS)
    assert everything.updates == [[[0], [1], [2]]] and everything.trained == Amount(2, 8)


def test_tokens_are_excluded_for_one_reason_each() -> None:
    """Truncated trajectories of several versions: earlier segments first."""
    turn = model_turn(0, (2, OLD), (3, NEW))
    members = [trajectory(0, user_turn(1), replace(turn, finish_reason="length")), trajectory(1, user_turn(1), turn)]
    settings = AlgorithmConfig(segments="current", overlong_filtering=True)
    found = make_batch(members, [], GRPO, settings, 1, LAGS)
    filter_overlong(found, settings)
    assert found.excluded == {"segments": Amount(0, 4), "overlong": Amount(1, 3)}
    assert found.trained == Amount(1, 3)
    account = SampleAccount(Amount(6, 27), {"all_right": Amount(2, 10), "greedy": Amount(2, 7)})
    with pytest.raises(AssertionError, match=r"tokens=27\) sampled, but Amount\(trajectories=1, tokens=3\) trained"):
        account.metrics(found.trained, found.excluded | {"overlong": Amount(1, 4)})
    metrics = SampleAccount(Amount(4, 20), {"all_right": Amount(2, 10)}).metrics(found.trained, found.excluded)
    assert account_line([metrics, metrics]) == (
        "trajectories: 8 sampled = 2 trained + 6 excluded (all_right 4, overlong 2, segments 0); "
        "tokens: 40 sampled = 6 trained + 34 excluded (all_right 20, overlong 6, segments 8)"
    )
    assert {name: value for name, value in metrics.items() if name.startswith("rollout/tokens")} == {
        "rollout/tokens/sampled": 20,
        "rollout/tokens/trained": 3,
        "rollout/tokens/excluded": 17,
        "rollout/tokens/excluded/all_right": 10,
        "rollout/tokens/excluded/segments": 4,
        "rollout/tokens/excluded/overlong": 3,
    }


def test_effective_samples_and_distance_by_lag() -> None:
    found = step(AlgorithmConfig())
    sequences = found.sequences
    assert sequences.engine_logp is not None and sequences.lag is not None
    generator = torch.Generator().manual_seed(1)
    sequences.old_logp = sequences.engine_logp + torch.randn(len(sequences.tokens), generator=generator)
    metrics = lag_metrics(sequences, found.kept(sequences.sampled))
    assert metrics.keys() == {f"training/{name}/lag_{lag}" for name in ("ess", "logp_diff") for lag in (0, 1, 3)}
    for lag in (0, 1, 3):
        kept = [i for i, m in enumerate(sequences.mask.tolist()) if m and int(sequences.lag[i]) == lag]
        logs = [float(sequences.old_logp[i]) - float(sequences.engine_logp[i]) for i in kept]
        weights = [math.exp(log) for log in logs]
        ess = sum(weights) ** 2 / sum(w * w for w in weights) / len(kept)
        assert metrics[f"training/ess/lag_{lag}"] == pytest.approx(ess)
        assert metrics[f"training/logp_diff/lag_{lag}"] == pytest.approx(sum(map(abs, logs)) / len(kept))
    sequences.lag = torch.where(sequences.mask, 8 + torch.arange(len(sequences.tokens)), 0).to(torch.int16)
    together = lag_metrics(sequences, found.kept(sequences.sampled))
    sequences.lag = None
    one = lag_metrics(sequences, found.kept(sequences.sampled))
    assert list(together.values()) == list(one.values()) and set(together) == {
        "training/logp_diff/lag_8", "training/ess/lag_8"
    }  # fmt: skip
    sequences.old_logp = sequences.engine_logp + 1000.0
    assert lag_metrics(sequences, found.kept(sequences.sampled))["training/ess/lag_0"] == pytest.approx(1.0)


def test_truncate_with_a_large_cap_is_decoupled_ppo_of_every_token() -> None:
    """AReaL's objective (2505.24298, equation 5), token by token: min(u·A, clip(u)·A)·(proximal / behaviour), u = new /
    proximal; tokens of three lags, each sampled by a policy of its own."""
    settings = AlgorithmConfig(correction="truncate", correction_cap=1000.0, kl=KLConfig(0.0))
    found = step(settings)
    sequences, generator = found.sequences, torch.Generator().manual_seed(2)
    assert sequences.engine_logp is not None and sequences.lag is not None
    new = (-torch.rand(len(sequences.tokens), generator=generator) - 0.5).requires_grad_()
    proximal = new.detach() + 0.4 * torch.randn(len(new), generator=generator)
    behaviour = proximal + 0.3 * sequences.lag * torch.randn(len(new), generator=generator)
    sequences.old_logp, sequences.engine_logp = proximal, behaviour
    sequences.advantages = torch.where(sequences.row == 0, 1.0, -0.7)
    policy = objectives.policy(GRPO, settings, sequences)
    [batch] = micro_batches(sequences, MicroBatching(rows=2), 0, found.updates[0])
    kept = LossTokens.of(batch, sequences)
    (policy.loss(kept, new[kept.index, None]).totals.sum() / policy.count(kept)).backward()
    assert new.grad is not None
    trained = [i for i, m in enumerate(sequences.mask.tolist()) if m]
    clipped = 0
    for i in trained:
        a, u = float(sequences.advantages[i]), math.exp(float(new.detach()[i]) - float(proximal[i]))
        through = u * a <= min(max(u, 0.8), 1.2) * a
        clipped += not through
        weight = math.exp(float(proximal[i]) - float(behaviour[i]))
        wanted = -weight * a * u / len(trained) if through else 0.0
        assert float(new.grad[i]) == pytest.approx(wanted, rel=1e-4, abs=1e-9)
    assert 0 < clipped < len(trained)
    assert float(new.grad.abs().sum()) == pytest.approx(float(new.grad[trained].abs().sum()))


@pytest.mark.parametrize("staleness", [0, 1])
def test_replayed_groups_have_their_own_lags_and_tokens_add_up(tmp_path: Path, staleness: int) -> None:
    """Responses of three tokens; version n has n steps."""
    config = config_of(staleness, uses=3, max_age=4)
    job = ReplayJob(tmp_path, config)
    seen: Counter[int] = Counter()
    for number in range(6):
        found = job.step(number)
        assert found.lags is not None
        total = sum(e.response_length for e in found.trajectories)
        assert len(found.trajectories) == GROUPS * SIZE and found.account == SampleAccount(
            Amount(GROUPS * SIZE, total), {}
        )
        batch = make_batch(
            found.trajectories, [], GRPO, config.algorithm, 1, found.lags, with_arrays=job.reader.with_arrays
        )
        assert found.account.metrics(batch.trained, batch.excluded)["rollout/tokens/trained"] == total
        wanted = {number - int(e.rollout_id[-6:]) for e in found.trajectories}
        lags = batch.sequences.lag
        assert (set(lags[batch.sequences.mask].tolist()) if lags is not None else {0}) == wanted
        seen.update(wanted)
        stale = 0.0 if lags is None else float((lags[batch.sequences.mask] > 0).double().mean())
        assert found.metrics["rollout/stale_tokens"] == pytest.approx(stale)
    assert max(seen) > 1
    job.store.close()


def test_members_are_excluded_again_where_their_group_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All responses of ``ReplayJob`` have one text; two of each group are kept, and every row is of its own step."""
    config = config_of(0, uses=3, max_age=4)
    monkeypatch.setattr(operators_module.ChatTokenizer, "of", lambda config: SimpleNamespace(decode=str))
    operators = {"mine": {"file": str(tmp_path / "mine.py")}}
    (tmp_path / "mine.py").write_text(
        "def operate(members):\n    return [None, None, *['third'] * (len(members) - 2)]\n"
    )
    job = ReplayJob(tmp_path, replace(config, buffer=replace(config.buffer, operators=operators)))
    for number in range(3):
        found = job.step(number)
        ids = {e.group_id for e in found.trajectories}
        assert len(found.trajectories) == 2 * len(ids) and {group for group, _ in found.used.excluded} == ids
        assert found.account.excluded["third"].trajectories == (SIZE - 2) * len(ids) == len(found.used.excluded)
    assert found.used.replayed
    job.store.close()


def test_tokens_of_dropped_groups_are_excluded_by_their_reason(tmp_path: Path) -> None:
    """Dynamic sampling: of the tasks of ``ReplayJob`` every fourth is all wrong, every fourth all right."""
    config = config_of(share=0.0, algorithm={"dynamic_sampling": True})
    job = ReplayJob(tmp_path, config)
    reasons: Counter[str] = Counter()
    for number in range(4):
        found = job.step(number)
        assert found.lags is None
        batch = make_batch(found.trajectories, [], GRPO, config.algorithm, 1, with_arrays=job.reader.with_arrays)
        found.account.metrics(batch.trained, batch.excluded)
        asked = [g for g in found.used.consumed] + list(found.used.dropped)
        read = {e.group_id: e.response_length for e in job.store.groups.read(asked)}
        assert found.account.sampled.tokens == SIZE * sum(read.values())
        reasons.update(found.account.excluded.keys())
    assert {"all_right", "all_wrong"} <= reasons.keys() <= {"all_right", "all_wrong", "surplus"}
    job.store.close()


def test_segments_need_weights_that_change_within_a_trajectory() -> None:
    config = Config(algorithm=AlgorithmConfig(segments="current"))
    with pytest.raises(ConfigError, match=r"algorithm\.segments=current with sync\.max_staleness=0: .* set sync\.max"):
        check_pacing(config, JOBS["both"])
    check_pacing(replace(config, sync=SyncConfig(max_staleness=1)), JOBS["both"])


def test_repetition_is_an_end_of_its_own_that_is_trained_on() -> None:
    repeating, truncated = (
        trajectory(i, *one_turn([1], [2, 3, 2, 3], finish_reason=reason))
        for i, reason in enumerate(("repetition", "length"))
    )
    assert (repeating.end, truncated.end) == (End.REPETITION, End.TRUNCATED)
    assert End.REPETITION.by_policy and not repeating.truncated
    settings = AlgorithmConfig(overlong_filtering=True)
    assert overlong([Outcome.of(repeating), Outcome.of(truncated)], settings) == [1]


def test_repetition_is_looked_for_between_segments() -> None:
    config = Config(rollout=RolloutConfig(max_repeats=8))
    with pytest.raises(
        ConfigError, match=r"rollout\.max_repeats=8 without rollout\.segment_tokens: .* set rollout\.seg"
    ):
        check_pacing(config, JOBS["both"])
    check_pacing(replace(config, rollout=RolloutConfig(max_repeats=8, segment_tokens=64)), JOBS["both"])
