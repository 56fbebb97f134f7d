"""Operators between raw and verified: whole groups, in the order of the settings, each exclusion with its reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.buffer.experience import by_group, verify, with_group_stats
from megarl.buffer.experience import operators as module
from megarl.buffer.experience.operators import OPERATORS, Member, Operators, operators_of
from megarl.config.algorithms import AlgorithmConfig
from megarl.config.job import BufferConfig
from megarl.config.rewards import LengthConfig, RewardConfig
from megarl.config.schema import Config
from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import End, Reward, Trajectory
from megarl.learn import algorithms
from megarl.run.checks.settings import check_operators
from megarl.run.run_dir.changes import changes
from tests.trajectories import one_turn

GRPO = algorithms.get("grpo")
WORDS = ["", "yes", "no", "12", "the answer is twelve", "die Antwort", "答案是十二", *["again " * 40]]


class Tokenizer:
    """A token is a text of ``WORDS``."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(WORDS[i] for i in token_ids)


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.ChatTokenizer, "of", lambda config: Tokenizer())


def member(index: int, *tokens: int, score: float = 1.0, size: int = 4, **changes: Any) -> Trajectory:
    reward = Reward(score, "ok" if score >= 1 else "wrong", changes.pop("parts", {}))
    found = Trajectory("r", "task", "g", index, size, one_turn([1], tokens), reward)
    return replace(found, **changes)


def applied(group: Sequence[Trajectory], operators: Mapping[str, Any]) -> dict[int, str]:
    return Operators(Config(buffer=BufferConfig(operators=dict(operators)))).apply(group).excluded


GROUP = [member(0, 1), member(1, 2), member(2, 1), member(3, 7)]


@pytest.mark.parametrize(
    ("operators", "group", "excluded"),
    [
        ({}, GROUP, {}),
        ({"duplicates": {}}, GROUP, {2: "duplicate"}),
        ({"degenerate": {}}, [*GROUP[:3], member(3, 0)], {3: "empty"}),
        ({"degenerate": {}}, GROUP, {3: "repetitive"}),
        ({"degenerate": {"max_repetition": 0.99}}, GROUP, {}),
        ({"degenerate": {"language": "en"}}, [member(0, 4), member(1, 6), member(2, 3)], {1: "language"}),
        ({"length": {"min_tokens": 2, "max_tokens": 3}}, [member(0, 1), member(1, 1, 2), member(2, *[1] * 4)],
         {0: "too_short", 2: "too_long"}),
        ({"quality": {"min_score": 0.5}}, [member(0, 1), member(1, 2, score=0.4)], {1: "low_quality"}),
        ({"quality": {"part": "judge", "min_score": 0.5}},
         [member(0, 1, parts={"judge": 0.2}), member(1, 2, parts={"judge": 0.9}), member(2, 3)], {0: "low_quality"}),
        ({"variance": {}}, GROUP, dict.fromkeys(range(4), "low_variance")),
        ({"variance": {"min_std": 0.4}}, [member(0, 1), member(1, 2, score=0.4)], {}),
        ({"variance": {"min_std": 0.5}}, [member(0, 1), member(1, 2, score=0.4)],
         {0: "low_variance", 1: "low_variance"}),
        ({"diversity": {"min_distinct": 0.6}}, [member(i, 1, 2) for i in range(2)], {0: "uniform", 1: "uniform"}),
        ({"diversity": {"min_distinct": 0.5}}, [member(i, 1, 2) for i in range(2)], {}),
        ({"diversity": {}}, [member(0, 0), member(1, 0)], {}),
        ({"duplicates": {}, "degenerate": {}}, [member(0, 7), member(1, 7)], {0: "repetitive", 1: "duplicate"}),
        ({"degenerate": {}, "duplicates": {}}, [member(0, 7), member(1, 7)], {0: "repetitive", 1: "repetitive"}),
    ],
)  # fmt: skip
def test_each_operator_excludes_what_it_says_in_the_order_of_the_settings(
    operators: dict[str, Any], group: list[Trajectory], excluded: dict[int, str]
) -> None:
    assert applied(group, operators) == excluded


def test_relabelled_scores_reach_the_statistics() -> None:
    config = Config(buffer=BufferConfig(operators={"relabel": {"status": {"wrong": -1.0}, "end": {"truncated": -2.0}}}))
    cut = member(2, 3, score=0.0)
    cut = replace(cut, turns=one_turn([1], [3], finish_reason="length"))
    group = [member(0, 1, size=3), member(1, 2, score=0.0, size=3), replace(cut, group_size=3)]
    found = verify(group, RewardConfig(), vocab_size=9, operate=Operators(config).apply)
    assert [e.reward.score for e in found.trajectories] == [1.0, -1.0, -2.0]
    assert [e.reward.status for e in found.trajectories] == ["ok", "wrong", "wrong"]
    stats = with_group_stats(found.trajectories)[0].group_stats
    assert stats is not None and stats.mean == pytest.approx(-2 / 3) and stats.size == 3


def test_an_excluded_member_is_in_no_statistics_and_compared_with_nobody() -> None:
    """k1.5's reward for lengths too: the shortest one is excluded, and its length counts no more."""
    group = [member(0, 1), member(1, 1, 2), member(2, 1, 2, 3, score=0.0), member(3, 1, 2, 3, 4, score=0.0)]
    config = Config(buffer=BufferConfig(operators={"length": {"min_tokens": 2}}))
    rewards = RewardConfig(length=LengthConfig(weight=1.0, warmup_steps=0))
    found = verify(group, rewards, vocab_size=9, operate=Operators(config).apply, min_members=2)
    assert found.excluded == {("g", 0): "too_short"} and found.report.excluded == {"too_short": 1}
    assert found.report.kept == 1 and found.dropped == {}
    alone = [replace(e, index=i, group_size=3) for i, e in enumerate(group[1:])]
    without = verify(alone, rewards, vocab_size=9)
    assert [e.reward for e in found.trajectories] == [e.reward for e in without.trajectories]
    first, second = with_group_stats(found.trajectories), with_group_stats(without.trajectories)
    assert [e.group_stats for e in first] == [e.group_stats for e in second]


def test_a_group_of_which_too_little_is_left_is_dropped_by_its_most_frequent_reason() -> None:
    config = Config(buffer=BufferConfig(operators={"degenerate": {}, "duplicates": {}}))
    group = [member(0, 0), member(1, 1), member(2, 1), member(3, 1)]
    found = verify(group, RewardConfig(), vocab_size=9, operate=Operators(config).apply, min_members=2)
    assert found.dropped == {"g": "duplicate"} and found.trajectories == [] and found.excluded == {}
    assert "members are left; excluded: duplicate 2, empty 1" in found.report.messages[0]


@pytest.mark.parametrize("end", [End.WORKFLOW_ERROR, End.ENVIRONMENT_TIMEOUT, None])
def test_masked_members_leave_the_loss_and_the_statistics(end: End | None) -> None:
    """``reward.on_error=mask``; a trajectory that has failed before its first response too."""
    failed = member(1, 2, score=math.nan)
    failed = replace(failed, reward=Reward(math.nan, "error"), cause=end)
    if end is End.WORKFLOW_ERROR:
        failed = replace(failed, turns=failed.turns[:1])
    group = [member(0, 1), failed, member(2, 3, score=0.0), member(3, 4, score=0.0)]
    found = verify(group, RewardConfig(on_error="mask"), vocab_size=9, min_members=2)
    assert found.excluded == {("g", 1): str(end or "reward_error")}
    assert [e.index for e in found.trajectories] == [0, 2, 3]
    stats = with_group_stats(found.trajectories)[0].group_stats
    assert stats is not None and stats.mean == pytest.approx(1 / 3) and stats.size == 3
    dropped = verify(group, RewardConfig(on_error="mask"), vocab_size=9, min_members=4)
    assert dropped.dropped == {"g": str(end or "reward_error")}


def test_a_file_of_a_user(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def operate(members, *, word):\n    return ['has_word' if word in m.text else None for m in members]\n"
    )
    assert applied(GROUP, {"mine": {"file": str(path), "word": "no"}}) == {1: "has_word"}
    with pytest.raises(ConfigError, match=r"buffer\.operators\.mine: missing a required .*'word'; its settings are wo"):
        operators_of({"mine": {"file": str(path)}})
    path.write_text("def other(): ...\n")
    with pytest.raises(ConfigError, match="has no def operate"):
        operators_of({"mine": {"file": str(path)}})


@pytest.mark.parametrize(
    ("ruling", "message"),
    [
        ("return []", "0 rulings for 4 members; return one for each"),
        ("return ['Too bad'] * 4", "returned 'Too bad'; return None, a reason in small letters"),
        ("return [3] * 4", "returned 3; return None"),
        ("return [Reward(float('nan'), 'ok')] * 4", "whose score is a number from"),
        ("1 / 0", "failed on group g: ZeroDivisionError"),
    ],
)
def test_what_an_operator_may_not_do_names_it_and_the_group(tmp_path: Path, ruling: str, message: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(f"from megarl.core.schema import Reward\n\n\ndef operate(members):\n    {ruling}\n")
    with pytest.raises(DataError, match=message) as found:
        applied(GROUP, {"bad": {"file": str(path)}})
    assert "buffer.operators.bad" in str(found.value)


@pytest.mark.parametrize(
    ("operators", "message"),
    [
        ({"dedup": {}}, r"buffer\.operators\.dedup does not exist; choose one of duplicates, degenerate, .* or give"),
        ({"length": 3}, r"buffer\.operators\.length=3 must be its settings"),
        ({"length": {"most": 3}}, r"unknown setting 'buffer\.operators\.length\.most'.*min_tokens"),
        ({"length": {"max_tokens": "512"}}, r"buffer\.operators\.length\.max_tokens='512'"),
        ({"length": {"min_tokens": None}}, r"buffer\.operators\.length\.min_tokens=None must be of type int"),
        ({"length": {"min_tokens": -1}}, r"buffer\.operators\.length\.min_tokens=-1 must be at least 0"),
        ({"degenerate": {"language": "german"}}, r"buffer\.operators\.degenerate\.language='german'"),
        ({"diversity": {"ngram": 0}}, r"buffer\.operators\.diversity\.ngram=0 must be at least 1"),
        ({"relabel": {"end": {"cut": 0.0}}}, r"buffer\.operators\.relabel\.end.*'cut' is not one of finished"),
        ({"relabel": {"status": {"wrng": 0.0}}}, r"buffer\.operators\.relabel\.status.*'wrng' is not one of ok, wro"),
        ({"mine": {"file": "/nowhere.py"}}, r"buffer\.operators\.mine\.file=/nowhere\.py: no such file"),
    ],
)
def test_what_is_not_there_is_refused_before_a_start(operators: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_operators(Config(buffer=BufferConfig(operators=operators)), GRPO)


def test_a_group_without_a_verdict_at_all_is_dropped() -> None:
    failed = [replace(member(i, 1, size=2), reward=Reward(math.nan, "error")) for i in range(2)]
    operate = Operators(Config(buffer=BufferConfig(operators={"duplicates": {}}))).apply
    found = verify(failed, RewardConfig(on_error="mask"), vocab_size=9, operate=operate, min_members=2)
    assert found.dropped == {"g": "reward_error"}


def test_a_greedy_baseline_is_not_relabelled() -> None:
    config = Config(buffer=BufferConfig(operators={"relabel": {"status": {"wrong": -1.0}}}))
    with pytest.raises(ConfigError, match=r"buffer\.operators\.relabel with algorithm\.name=remax"):
        check_operators(config, algorithms.get("remax"))


def test_another_order_is_a_change() -> None:
    first, second = ({"buffer": {"operators": {name: {} for name in names}}} for names in ("ab", "ba"))
    [found] = changes(first, second)
    assert found.setting == "buffer.operators" and found.trains() and list(changes(first, first)) == []


def test_a_group_must_be_able_to_lose_a_member() -> None:
    config = Config(
        algorithm=AlgorithmConfig(group_size=2), buffer=BufferConfig(operators={"duplicates": {}}, min_members=3)
    )
    with pytest.raises(ConfigError, match=r"buffer\.min_members=3 with algorithm\.group_size=2"):
        check_operators(config, GRPO)
    check_operators(replace(config, buffer=BufferConfig(min_members=3)), GRPO)


def test_every_operator_rules_over_every_member_of_random_groups() -> None:
    """None, a reason or a reward for each, whatever the texts are."""
    draw = np.random.default_rng(0)
    for _ in range(50):
        size = int(draw.integers(1, 6))
        group = [member(i, *draw.integers(0, len(WORDS), draw.integers(1, 5)).tolist(), size=size) for i in range(size)]
        for name in OPERATORS:
            found = Operators(Config(buffer=BufferConfig(operators={name: {}}))).apply(group)
            assert sorted([*found.excluded, *(e.index for e in found.kept)]) == list(range(size))
    assert Member(GROUP[0], "yes").reward.score == 1.0 and len(by_group(GROUP)) == 1
