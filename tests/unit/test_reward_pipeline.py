"""Raw -> verified: an invalid member, a missing one or a missing verdict costs its whole group, and is counted."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.buffer.experience import (
    add_model_scores,
    by_group,
    part_metrics,
    shuffle_rewards,
    split_by_accuracy,
    verifier_metrics,
    verify,
    with_group_stats,
)
from megarl.buffer.experience.pipeline import check_trajectory
from megarl.config.rewards import LengthConfig, RewardConfig
from megarl.core.schema import GREEDY, Reward, Trajectory, Turn, WeightsSpan, WeightsVersion
from tests.trajectories import VERSION, one_turn

VOCAB = 16


def turns(prompt: Sequence[int] = (1, 2, 3), **changes: Any) -> tuple[Turn, Turn]:
    """A prompt and a response of two tokens; ``changes`` to the response."""
    asked, response = one_turn(prompt, [4, 5], [-0.5, 0.0])
    spans = (WeightsSpan(0, 1, VERSION), WeightsSpan(1, 2, VERSION))
    return asked, replace(response, **{"spans": spans} | changes)


def make(group: str = "g0", index: int = 0, score: float = 1.0, size: int = 2, **changes: Any) -> Trajectory:
    trajectory = Trajectory(
        rollout_id="r",
        task_id=f"task of {group}",
        group_id=group,
        index=index,
        group_size=size,
        turns=turns(),
        reward=Reward(score, "ok" if score >= 1 else "wrong"),
    )
    return replace(trajectory, **changes)


def means(trajectories: Sequence[Trajectory]) -> list[float]:
    """The mean score of each trajectory's group."""
    return [e.group_stats.mean for e in with_group_stats(trajectories) if e.group_stats is not None]


def group(name: str, *scores: float) -> list[Trajectory]:
    return [make(name, i, score, len(scores)) for i, score in enumerate(scores)]


def test_whole_groups_get_their_statistics() -> None:
    verified, report, *_ = verify([*group("a", 1.0, 0.0, 0.0), *group("b", 1.0, 1.0)], RewardConfig(), vocab_size=VOCAB)
    assert [e.group_id for e in verified] == ["a"] * 3 + ["b"] * 2
    assert all(e.group_stats is None for e in verified), "the reward model's scores are still to come"
    scored = with_group_stats(verified)
    a, b = scored[0].group_stats, scored[-1].group_stats
    assert a is not None and b is not None
    assert (a.mean, a.std, a.size) == (pytest.approx(1 / 3), pytest.approx(math.sqrt(1 / 3)), 3)
    assert (b.mean, b.std, b.size) == (1.0, 0.0, 2)
    assert report.groups == report.kept == 2 and report.dropped == {} and report.ends == {"finished": 5}


def test_group_order_does_not_matter() -> None:
    members = [*group("a", 1.0, 0.0), *group("b", 0.0, 1.0)]
    mixed = [members[i] for i in (3, 0, 2, 1)]
    verified = verify(mixed, RewardConfig(), vocab_size=VOCAB).trajectories
    assert Counter((e.group_id, e.index) for e in verified) == Counter((e.group_id, e.index) for e in members)


def versions(first: tuple[int, int], second: tuple[int, int]) -> dict[str, Any]:
    return {"spans": (WeightsSpan(0, 1, WeightsVersion(*first)), WeightsSpan(1, 2, WeightsVersion(*second)))}


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


ASKED, RESPONSE = turns()
RESULT = Turn("tool", np.array([7], dtype=np.int32), follows=1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"turns": turns(logp=floats(0.0))}, "turn 1 (model): it has 1 log-probs for 2 tokens"),
        ({"turns": turns(logp=None)}, "turn 1 (model): it has 0 log-probs for 2 tokens"),
        ({"turns": turns(logp=floats(0.0, np.nan))}, "nan at token 1 is not a log-probability"),
        ({"turns": turns(logp=floats(-np.inf, 0.0))}, "-inf at token 0"),
        ({"turns": turns(logp=floats(-1.0, 0.5))}, "0.5 at token 1"),
        ({"turns": turns(token_ids=np.array([4, VOCAB], dtype=np.int32))}, "has ids 4..16, the vocabulary has 16"),
        ({"turns": turns(finish_reason=None)}, "it has no finish reason"),
        ({"turns": turns([-1])}, "turn 0 (user): it has ids -1..-1"),
        ({"turns": turns([])}, "turn 0 (user): it has no tokens"),
        ({"turns": turns(spans=())}, "spans cover 0 of 2"),
        ({"turns": turns(spans=(WeightsSpan(0, 1, VERSION),))}, "spans cover 1 of 2"),
        ({"turns": turns(spans=(WeightsSpan(1, 2, VERSION),))}, "span 1..2 does not follow on token 0"),
        (
            {"turns": turns(spans=(WeightsSpan(0, 2, VERSION), WeightsSpan(1, 2, VERSION)))},
            "does not follow on token 2",
        ),
        ({"turns": turns(**versions((0, 1), (0, 2)))}, None),
        ({"turns": turns(**versions((0, 9), (1, 1)))}, None),
        (
            {"turns": turns(**versions((0, 2), (0, 1)))},
            "span 1..2 has weights 0.1, older than 0.2 of the span before it",
        ),
        ({"turns": turns(**versions((1, 1), (0, 9)))}, "span 1..2 has weights 0.9, older than 1.1"),
        ({"turns": (ASKED, RESPONSE, RESULT, replace(RESPONSE, follows=2))}, None),
        ({"turns": (ASKED, RESPONSE, replace(RESPONSE, follows=2))}, "turn 2 (model): it follows turn 2"),
        ({"turns": (ASKED, replace(RESPONSE, follows=-1))}, "nothing comes before it"),
        ({"turns": (ASKED, RESPONSE, replace(RESULT, logp=floats(0.0)))}, "turn 2 (tool): it has log-probs"),
        ({"turns": (ASKED,)}, "no turn is the model's"),
        ({"reward": Reward(1e200, "ok")}, "its reward is 1e+200, beyond"),
        ({"reward": Reward(-1e200, "wrong")}, "its reward is -1e+200, beyond"),
        ({"reward": Reward(1e300, "error")}, None),
    ],
)
def test_validity(changes: dict[str, Any], reason: str | None) -> None:
    wrong = make(index=1, **changes)
    found = check_trajectory(wrong, VOCAB)
    assert "reward" in changes or (found is None if reason is None else reason in (found or ""))
    raw = [make(index=0), wrong, *group("b", 0.0)]
    verified, report, *_ = verify(raw, RewardConfig(on_error="zero"), vocab_size=VOCAB)
    assert reason is None or reason in report.messages[0]
    if reason is None:
        assert report.dropped == {} and [e.group_id for e in verified] == ["g0", "g0", "b"]
    else:
        assert report.dropped == {"invalid": 1}
        assert [e.group_id for e in verified] == ["b"]


@given(cuts=st.lists(st.integers(1, 7), unique=True).map(sorted))
def test_any_tiling_is_valid(cuts: list[int]) -> None:
    edges = [0, *cuts, 8]
    spans = tuple(WeightsSpan(a, b, VERSION) for a, b in itertools.pairwise(edges))
    asked, response = one_turn([1], [0] * 8)
    assert check_trajectory(make(turns=(asked, replace(response, spans=spans))), VOCAB) is None
    for i in range(len(spans)):
        missing = replace(response, spans=spans[:i] + spans[i + 1 :])
        assert check_trajectory(make(turns=(asked, missing)), VOCAB) is not None


@pytest.mark.parametrize("members", [[0], [0, 0], [0, 1, 2], [0, 1, 1]])
def test_incomplete_groups_are_dropped(members: list[int]) -> None:
    report = verify([make(index=i) for i in members], RewardConfig(), vocab_size=VOCAB).report
    assert report.dropped == {"incomplete": 1} and report.kept == 0
    assert report.messages == (f"group g0: its size is 2, its members are {members}",)


def test_missing_verdicts_drop_the_group_or_count_as_zero() -> None:
    failed = make(index=1, reward=Reward(math.nan, "timeout"), metadata={"reward_message": "no verdict within 1 s"})
    raw = [make(index=0), failed, *group("b", 0.0)]
    verified, report, dropped, _ = verify(raw, RewardConfig(on_error="drop"), vocab_size=VOCAB)
    assert [e.group_id for e in verified] == ["b"] and dropped == {"g0": "reward_timeout"}
    assert report.dropped == {"reward_timeout": 1} and report.ends == {"finished": 2, "reward_timeout": 1}
    assert report.messages == ("group g0[1]: no verdict within 1 s",)
    verified, report, *_ = verify(raw, RewardConfig(on_error="zero"), vocab_size=VOCAB)
    assert [e.reward.score for e in verified] == [1.0, 0.0, 0.0] and report.dropped == {}
    assert verified[1].reward.status == "timeout" and means(verified) == [0.5, 0.5, 0.0]


def test_a_score_that_is_no_number_drops_its_group_alone() -> None:
    raw = [*group("a", math.inf, 0.0), *group("b", 1.0, 0.0)]
    verified, report, *_ = verify(raw, RewardConfig(), vocab_size=VOCAB)
    assert [e.group_id for e in verified] == ["b", "b"] and report.dropped == {"invalid": 1}
    assert report.messages == ("group a[0]: its reward is inf",)


def test_shuffling_permutes_rewards_over_the_rollout_before_the_statistics() -> None:
    raw = [e for i in range(8) for e in group(f"g{i}", *([1.0] * 4 if i < 4 else [0.0] * 4))]
    verified = verify(raw, RewardConfig(), vocab_size=VOCAB).trajectories
    shuffled = shuffle_rewards(verified, seed=5)
    assert [(e.group_id, e.index) for e in shuffled] == [(e.group_id, e.index) for e in verified]
    scores = [e.reward.score for e in shuffled]
    assert sorted(scores) == sorted(e.reward.score for e in verified) and scores != [e.reward.score for e in verified]
    for name in {e.group_id for e in shuffled}:
        members = [e for e in shuffled if e.group_id == name]
        assert set(means(members)) == {sum(e.reward.score for e in members) / 4}
    assert [e.reward for e in shuffle_rewards(verified, seed=5)] == [e.reward for e in shuffled]
    assert [e.reward for e in shuffle_rewards(verified, seed=6)] != [e.reward for e in shuffled]


def test_a_reward_models_scores_are_added_before_the_statistics() -> None:
    found = with_group_stats(add_model_scores([*group("a", 1.0, 0.0), *group("b", 1.0)], [0.5, -0.5, 2.0], 0.5))
    assert [e.reward.score for e in found] == [1.25, -0.25, 2.0] and [e.reward.parts["model"] for e in found] == [
        0.5,
        -0.5,
        2.0,
    ]
    assert [e.group_stats.mean for e in found if e.group_stats] == [0.5, 0.5, 2.0]
    assert [e.reward.status for e in found] == ["ok", "wrong", "ok"], "the verdict stays what it is"


def with_greedy(members: list[Trajectory], **changes: Any) -> list[Trajectory]:
    baseline = make(members[0].group_id, GREEDY, size=len(members), **changes)
    return [replace(e, greedy=baseline) for e in members]


def test_a_greedy_answer_changes_nothing_of_its_group() -> None:
    plain, compared = group("a", 1.0, 0.0), with_greedy(group("a", 1.0, 0.0), reward=Reward(0.25, "wrong"))
    verified, report, *_ = verify(compared, RewardConfig(), vocab_size=VOCAB)
    alone = verify(plain, RewardConfig(), vocab_size=VOCAB).trajectories
    assert [e.group_stats for e in with_group_stats(verified)] == [e.group_stats for e in with_group_stats(alone)]
    assert report.ends == {"finished": 2} and len(verified) == 2
    assert [e.greedy.reward.score for e in verified if e.greedy] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        (
            {"reward": Reward(math.nan, "error"), "metadata": {"reward_message": "Zero"}},
            "reward_error",
            "a[greedy]: Zero",
        ),
        ({"reward": Reward(math.nan, "timeout")}, "reward_timeout", "a[greedy]: no verdict"),
        ({"reward": Reward(math.nan, "ok")}, "invalid", "a[greedy]: its reward is nan"),
        ({"turns": turns([VOCAB])}, "invalid", "a[greedy]: turn 0 (user): it has ids"),
    ],
)
def test_a_greedy_answer_without_use_costs_its_group(changes: dict[str, Any], reason: str, message: str) -> None:
    raw = [*with_greedy(group("a", 1.0, 0.0), **changes), *with_greedy(group("b", 1.0, 0.0))]
    verified, report, *_ = verify(raw, RewardConfig(), vocab_size=VOCAB)
    assert [e.group_id for e in verified] == ["b", "b"] and report.dropped == {reason: 1}
    assert message in report.messages[0]


def test_a_group_that_lacks_something_is_incomplete() -> None:
    raw = [*group("a", 1.0, 0.0), *group("b", 1.0, 0.0)]
    verified, report, *_ = verify(
        raw, RewardConfig(), vocab_size=VOCAB, lacks=lambda members: "no b" if members[0].group_id == "a" else None
    )
    assert [e.group_id for e in verified] == ["b", "b"] and report.dropped == {"incomplete": 1}
    assert "no b" in report.messages[0]


def test_a_greedy_answer_without_a_verdict_counts_as_zero_when_told_so() -> None:
    raw = with_greedy(group("a", 1.0, 0.0), reward=Reward(math.nan, "timeout"))
    verified = verify(raw, RewardConfig(on_error="zero"), vocab_size=VOCAB).trajectories
    assert [(e.greedy.reward.score, e.greedy.reward.status) for e in verified if e.greedy] == [(0.0, "timeout")] * 2


def of_length(length: int) -> dict[str, Any]:
    return {"turns": one_turn([1, 2, 3], [4] * length)}


def test_overlong_answers_lose_reward_before_the_statistics() -> None:
    """Limit 10, buffer 4: nothing up to 6 tokens, all of the penalty at 10 and beyond."""
    lengths = [6, 7, 9, 10, 12]
    members = [make("a", i, 1.0, 5, **of_length(n)) for i, n in enumerate(lengths)]
    raw = with_greedy(members, **of_length(8))
    config = RewardConfig(overlong_buffer=4, overlong_penalty=2.0)
    verified = verify(raw, config, vocab_size=VOCAB, max_response_tokens=10).trajectories
    assert [e.reward.score for e in verified] == [1.0, 0.5, -0.5, -1.0, -1.0]
    assert [e.reward.parts["overlong"] for e in verified] == [0.0, -0.5, -1.5, -2.0, -2.0]
    assert {e.reward.status for e in verified} == {"ok"}, "the verdict stays what it is"
    assert set(means(verified)) == {-0.2}
    assert [e.greedy.reward.score for e in verified if e.greedy] == [0.0] * 5
    assert [e.reward.score for e in raw] == [1.0] * 5, "the raw trajectories were changed"
    unshaped = verify(raw, RewardConfig(), vocab_size=VOCAB, max_response_tokens=10).trajectories
    assert all(e.reward.score == 1.0 and e.reward.parts == {} for e in unshaped)


def test_the_length_of_several_turns_is_that_of_the_last() -> None:
    """Each response has the limit for itself: five tokens and five more are not ten."""
    prompt, response = one_turn([1, 2], [4] * 5)
    turns = (prompt, response, replace(prompt, follows=1), replace(response, follows=2))
    config = RewardConfig(overlong_buffer=4, overlong_penalty=2.0)
    [found] = verify([make("a", 0, 1.0, 1, turns=turns)], config, vocab_size=VOCAB, max_response_tokens=10).trajectories
    assert found.response_length == 10 and found.reward.score == 1.0


@given(rights=st.lists(st.lists(st.booleans(), min_size=2, max_size=4), max_size=8), on_error=st.booleans())
def test_dynamic_sampling_keeps_groups_by_their_accuracy_alone(rights: list[list[bool]], on_error: bool) -> None:
    """Scores all differ, as after shaping; what has no verdict is not right."""
    wrong = Reward(0.0, "timeout" if on_error else "wrong")
    groups = [
        [
            make(f"g{g}", i, size=len(right), reward=Reward(0.01 * i, "ok") if ok else wrong)
            for i, ok in enumerate(right)
        ]
        for g, right in enumerate(rights)
    ]
    kept, left_out = split_by_accuracy(groups)
    assert [g[0].group_id for g in kept] == [f"g{i}" for i, right in enumerate(rights) if len(set(right)) == 2]
    all_right = {f"g{i}": "all_right" for i, right in enumerate(rights) if all(right)}
    all_wrong = {f"g{i}": "all_wrong" for i, right in enumerate(rights) if not any(right)}
    assert left_out == all_right | all_wrong
    assert by_group([e for g in kept for e in g]) == kept


def test_reports_add_up() -> None:
    bad = make(index=1, reward=Reward(math.nan, "timeout"), metadata={"reward_message": "slow"})
    first = verify([make(index=0), bad], RewardConfig(), vocab_size=VOCAB).report
    second = verify([*group("b", 0.0, 1.0), make("c", size=3)], RewardConfig(), vocab_size=VOCAB).report
    both = first + second
    assert (both.groups, both.kept, both.dropped) == (3, 1, {"reward_timeout": 1, "incomplete": 1})
    assert both.ends == {"finished": 4, "reward_timeout": 1}
    assert both.messages == first.messages + second.messages


def test_short_answers_among_a_group_are_rewarded_after_the_warm_up() -> None:
    """Lengths 1 to 5, the first four right: λ falls from 0.5 to -0.5 in steps of 1/4; a wrong answer gains nothing by
    it."""

    def answers(*statuses: str) -> list[Trajectory]:
        return [
            make("a", i, size=len(statuses), reward=Reward(float(status == "ok"), status), **of_length(i + 1))
            for i, status in enumerate(statuses)
        ]

    config = RewardConfig(length=LengthConfig(weight=0.4, warmup_steps=3))
    group = answers("wrong", "ok", "ok", "ok", "wrong")
    assert [e.reward.score for e in verify(group, config, vocab_size=VOCAB, step=2).trajectories] == [0, 1, 1, 1, 0]
    found = verify(group, config, vocab_size=VOCAB, step=3).trajectories
    assert [e.reward.parts["length"] for e in found] == [0.0, 0.25, 0.0, -0.25, -0.5]
    assert [e.reward.score for e in found] == pytest.approx([0.0, 1.1, 1.0, 0.9, -0.2])
    assert means(found)[0] == pytest.approx(0.56)
    assert part_metrics(found) == {"reward/parts/length": -0.1}


def test_parts_that_are_added_leave_those_of_a_reward_function() -> None:
    """Of DAPO's penalty, k1.5's reward and a reward model."""
    named = {"overlong": 5.0, "length": 6.0, "model": 7.0}
    group = [make("a", i, reward=Reward(1.0, "ok", named), **of_length(i + 8)) for i in range(2)]
    config = RewardConfig(overlong_buffer=4, length=LengthConfig(weight=0.4))
    found = verify(group, config, vocab_size=VOCAB, max_response_tokens=10).trajectories
    kept = {f"user_{name}": value for name, value in named.items()}
    assert add_model_scores(found, [0.5, 0.5], 1.0)[0].reward.parts == {
        **kept, "overlong": -0.5, "length": 0.5, "model": 0.5
    }  # fmt: skip


def test_what_verifiers_took_is_counted_over_all_answers() -> None:
    def asked(verifier: str, seconds: float, tries: int = 1, kills: int = 0) -> dict[str, Any]:
        return {"reward": {"verifier": verifier, "seconds": seconds, "waited_s": 0.5, "tries": tries, "kills": kills}}

    greedy = make(index=GREEDY, metadata=asked("math", 3.0))
    found = verifier_metrics(
        [
            make(metadata=asked("math", 1.0, tries=2), greedy=greedy),
            make(metadata=asked("code", 4.0, tries=3, kills=3), reward=Reward(math.nan, "timeout")),
            make(metadata={}),
        ]
    )
    assert found["reward/math/answers"] == 2 and found["reward/math/retries"] == 1 and found["reward/math/timeout"] == 0
    assert (found["reward/math/seconds/mean"], found["reward/math/seconds/max"]) == (2.0, 3.0)
    assert (found["reward/code/timeout"], found["reward/code/kills"], found["reward/code/retries"]) == (1, 3, 2)
    assert found["reward/code/waited_s/mean"] == 0.5
