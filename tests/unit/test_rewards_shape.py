"""Rewards for form, repetition, language and length: closed forms, bounds, and what must not change them."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.rewards import FormatConfig, LanguageConfig, RepetitionConfig, RewardConfig
from megarl.core.text import opens_thinking
from megarl.rewards.verdict import (
    format_reward,
    k15_length_rewards,
    language_consistency,
    language_of,
    repetition_penalty,
    shape_parts,
    weighed,
)

PIECES = ["<think>", "</think>", "<answer>", "</answer>", "so", " ", "\n", "7", "<thinking>"]


@pytest.mark.parametrize(
    ("text", "think", "think_answer"),
    [
        ("<think>a</think><answer>7</answer>", 1, 1),
        (" <think>\na\n</think>\n\n<answer>\n7\n</answer>\n", 1, 1),
        ("<think></think><answer>7</answer>", 1, 1),
        ("<think>a</think>7", 1, 0),
        ("<think>a</think> \n", 0, 0),
        ("<think>a</think><answer> </answer>", 1, 0),
        ("<think>a</think> so <answer>7</answer>", 1, 0),
        ("<think>a</think><answer>7</answer>.", 1, 0),
        ("Well <think>a</think><answer>7</answer>", 0, 0),
        ("<think>a</think><think>b</think><answer>7</answer>", 0, 0),
        ("<think>a<answer>6</answer></think><answer>7</answer>", 1, 0),
        ("<answer>7</answer><think>a</think>", 0, 0),
        ("</think>a<think>7", 0, 0),
        ("<think>a", 0, 0),
        ("a</think><answer>7</answer>", 0, 0),
        ("<Think>a</Think><Answer>7</Answer>", 0, 0),
        ("", 0, 0),
    ],
)
def test_format(text: str, think: float, think_answer: float) -> None:
    assert (format_reward(text, "think"), format_reward(text, "think_answer")) == (think, think_answer)


def test_a_thought_that_the_prompt_opened() -> None:
    assert opens_thinking("<|im_start|>assistant\n<think>\n") and not opens_thinking("<think>\n\n</think>\n\n")
    assert format_reward("a</think><answer>7</answer>", "think_answer", in_thinking=True) == 1
    assert format_reward("a</think>7", "think", in_thinking=True) == 1
    assert format_reward("<think>a</think>7", "think", in_thinking=True) == 0  # the conversation now has it twice
    assert format_reward("7", "think", in_thinking=True) == 0


@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
def test_format_is_that_of_one_regular_expression(text: str) -> None:
    """The oracle is a pattern whose texts may hold no tag."""
    no_tag = r"(?:(?!</?(?:think|answer)>).)*"
    pattern = rf"\s*<think>{no_tag}</think>\s*<answer>(?=\s*[^\s<]|\s*<thinking){no_tag}</answer>\s*"
    assert format_reward(text, "think_answer") == float(bool(re.fullmatch(pattern, text, re.DOTALL)))


@pytest.mark.parametrize(
    ("text", "ngram", "expected"),
    [
        ("", 2, 0.0),
        ("one two", 3, 0.0),
        ("a b c d", 2, 0.0),
        ("a a a a", 1, -3 / 4),
        ("a a a a", 2, -2 / 3),
        ("A b a B", 2, -1 / 3),  # (a b) (b a) (a b), in lower case
        ("天天天天", 2, -2 / 3),  # by characters
        ("我说 yes 我说 yes", 3, -1 / 4),  # 我说y 说y我 y我说 我说y
        ("go " * 1000, 4, 1 / 997 - 1),
    ],
)
def test_repetition(text: str, ngram: int, expected: float) -> None:
    assert repetition_penalty(text, ngram) == pytest.approx(expected)


@given(st.lists(st.sampled_from(["a", "B", "cc", "天", "。"]), max_size=30), st.integers(1, 5))
def test_repetition_counts_what_came_before(words: list[str], ngram: int) -> None:
    lower = [word.lower() for word in words]
    grams = Counter(tuple(lower[i : i + ngram]) for i in range(len(words) - ngram + 1))
    again = sum(count - 1 for count in grams.values())
    value = repetition_penalty(" ".join(words), ngram)
    assert -1 < value <= 0
    assert value == pytest.approx(-again / max(1, sum(grams.values())))
    assert repetition_penalty("\n\t".join(words).upper(), ngram) == value


@pytest.mark.parametrize(
    ("text", "en", "zh"),
    [
        ("The answer is 42.", 1, 0),
        ("答案是四十二。", 0, 1),
        ("We know 答案 now", 3 / 4, 1 / 4),  # two characters are a word
        ("don't stop", 1, 0),
        ("ответ is here", 2 / 3, 0),
        ("café naïve", 1, 0),
        ("设 x 为 y, 则 x1 = 3", 0, 1),  # names of variables are no words
        ("所以 $\\text{speed} = v$ 和 \\[ force \\] 与 \\(mass\\)", 0, 1),
        ("所以 $$\n area \n$$ 见 https://example.org/some/page。\n```python\nprint(total)\n```", 0, 1),
        ("用 `print` 写 \\boxed{7} <answer>七</answer>", 0, 1),
        ("It costs $5 and 六元 for $6", 4 / 5, 1 / 5),
        ("代码 ```\nnever closed", 0, 1),
        ("x = 7", 1, 1),  # no words
        ("$a + b$", 1, 1),
        (" \n", 0, 0),
    ],
)
def test_language(text: str, en: float, zh: float) -> None:
    assert language_consistency(text, "en") == pytest.approx(en)
    assert language_consistency(text, "zh") == pytest.approx(zh)


@pytest.mark.parametrize(
    ("question", "language"),
    [
        ("What is 3 + 4?", "en"),
        ("3 + 4 = ?", "en"),
        ("", "en"),
        ("三加四等于多少？", "zh"),
        ("Python 中 list 和 tuple 的区别是什么？", "zh"),
        ("Translate 你好世界 into English", "en"),
        ("Сколько будет три плюс четыре?", "other"),
    ],
)
def test_language_of_a_question(question: str, language: str) -> None:
    assert language_of(question) == language


WORDS = st.lists(
    st.sampled_from(["hello", "world", "好", "天", "да", "x", "7", "$total$", "`name`", "\\frac{1}{2}"]), min_size=1
)


@given(WORDS, st.randoms())
def test_language_shares_sum_to_one_in_any_order(words: list[str], random: object) -> None:
    shares = [language_consistency(" ".join(words), language) for language in ("en", "zh", "other")]
    assert all(0 <= share <= 1 for share in shares)
    assert sum(shares) == pytest.approx(1) or shares == [1, 1, 1]
    random.shuffle(words)  # type: ignore[attr-defined]
    assert [language_consistency("\n".join(words), language) for language in ("en", "zh", "other")] == pytest.approx(
        shares
    )


@pytest.mark.parametrize("piece", ["\\(", "\\[", "$", "$$ ", "$a", "`", "```", "<a", "\\begin{", "www.", "'a", "\\"])
def test_no_text_takes_more_than_linear_time(piece: str) -> None:
    """A quadratic pattern would take hours over these, and run into the suite's time limit."""
    language_consistency(piece * 300_000, "en")


def test_k15_by_hand() -> None:
    assert k15_length_rewards([10, 20, 30], [True, True, True]) == [0.5, 0.0, -0.5]
    assert k15_length_rewards([10, 15, 30], [False, True, False]) == [0.0, 0.25, -0.5]
    assert k15_length_rewards([12, 12], [True, False]) == [0.0, 0.0]
    assert k15_length_rewards([12], [True]) == [0.0]
    assert k15_length_rewards([], []) == []
    with pytest.raises(ValueError, match="2 lengths and 1 verdicts"):
        k15_length_rewards([1, 2], [True])


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.booleans()), min_size=1, max_size=20),
    st.integers(0, 1000),
    st.integers(1, 9),
)
def test_k15_depends_on_relative_lengths_alone(group: list[tuple[int, bool]], shift: int, factor: int) -> None:
    lengths, right = [length for length, _ in group], [good for _, good in group]
    rewards = k15_length_rewards(lengths, right)
    assert all(-0.5 <= reward <= (0.5 if good else 0.0) for reward, good in zip(rewards, right, strict=True))
    assert k15_length_rewards([factor * length + shift for length in lengths], right) == pytest.approx(rewards)
    assert k15_length_rewards(lengths[::-1], right[::-1]) == rewards[::-1]
    by_length = sorted((length, -reward) for length, reward, good in zip(lengths, rewards, right, strict=True) if good)
    assert [reward for _, reward in by_length] == sorted(
        reward for _, reward in by_length
    )  # no longer answer earns more


def test_only_parts_with_a_weight_are_computed() -> None:
    text, question = "<think>a</think>是的 是的", "对不对？"
    assert shape_parts(text, question, RewardConfig()) == {}
    everything = RewardConfig(
        format=FormatConfig(weight=0.5, form="think"),
        repetition=RepetitionConfig(weight=2.0, ngram=2),
        language=LanguageConfig(weight=0.1),
    )
    assert shape_parts(text, question, everything) == {
        "format": 1.0,
        "repetition": pytest.approx(-1 / 4),
        "language": 1.0,
    }
    english = RewardConfig(language=LanguageConfig(weight=-1.0, language="en"))
    assert shape_parts(text, question, english) == {"language": 0.0}
    closed = RewardConfig(format=FormatConfig(weight=1.0, form="think"))
    assert shape_parts("a</think>b", question, closed, in_thinking=True) == {"format": 1.0}


def test_parts_of_a_reward_function_with_megarls_names_are_kept_beside_megarls() -> None:
    named = {"format": 7.0, "user_format": 8.0, "answer": 42.0, "repetition": 9.0, "other": 1.0}
    config = RewardConfig(format=FormatConfig(weight=0.5))
    found = weighed({"score": 1, **named}, "no form", "", False, config)
    own = {"format": 0.0, "answer": 1.0}
    kept = {"user_user_format": 7.0, "user_format": 8.0, "user_answer": 42.0, "repetition": 9.0, "other": 1.0}
    assert found == {"score": 1.0, "verified": 1.0, "status": "ok", "parts": own | kept}
    assert weighed({"score": 1, **named}, "", "", False, RewardConfig())["parts"] == named
