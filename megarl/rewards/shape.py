"""Rewards for how an answer is written, whether it is right or not: form, repetition, language, length. Pure functions.

A word of the language reward is a run of Latin letters, of another alphabet's, or half a word for a Han character
(Chinese words have about two). Everything here is linear in the length of the text, so that no answer can hold a worker
up.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Literal

from megarl.config.rewards import RewardConfig
from megarl.core.errors import ConfigError
from megarl.core.thoughts import as_written

Form = Literal["think", "think_answer"]
Language = Literal["en", "zh", "other"]

_TAGS = {"think": ("<think>", "</think>"), "think_answer": ("<think>", "</think>", "<answer>", "</answer>")}
_TAG = re.compile(r"</?(?:think|answer)>")

_HAN = "㐀-䶿一-鿿豈-﫿\U00020000-\U0003ffff"
_TOKEN = re.compile(rf"[{_HAN}]|[^\s{_HAN}]+")
_NO_WORDS = re.compile(
    r"```.*?(?:```|\Z)"  # code; an open block reaches to the end, as in Markdown
    r"|`[^`\n]*`"
    r"|\$\$[^$]*\$\$"
    r"|\$(?=\S)[^$\n]{0,999}?(?<=\S)\$(?!\d)"  # "$5 and $6" is no formula
    r"|\\\((?:[^\\]|\\[^()])*\\\)"
    r"|\\\[(?:[^\\]|\\[^\[\]])*\\\]"
    r"|(?:https?://|www\.)[!-~]+"  # ASCII only: Chinese goes on without a space
    r"|</?[A-Za-z]\w*>"
    r"|\\(?:begin|end)\{[^{}\n]*\}|\\[A-Za-z]+",
    re.DOTALL,
)
_WORD = re.compile(rf"(?P<zh>[{_HAN}])|(?P<en>[A-Za-zÀ-ɏ]+(?:['’][A-Za-zÀ-ɏ]+)*)|[^\W\d_{_HAN}A-Za-zÀ-ɏ]+")


def shape_parts(text: str, question: str, config: RewardConfig, *, in_thinking: bool = False) -> dict[str, float]:
    """The parts that need nothing but an answer's text and whose weight is not 0, unweighted: format, repetition,
    language.

    Args:
        question: The last message of the prompt, whose language is meant by ``reward.language.language: prompt``.
        in_thinking: As in ``format_reward``.
    """
    parts: dict[str, float] = {}
    if config.format.weight:
        parts["format"] = format_reward(text, config.format.form, in_thinking=in_thinking)
    if config.repetition.weight:
        parts["repetition"] = repetition_penalty(text, config.repetition.ngram)
    if config.language.weight:
        wanted = config.language.language
        parts["language"] = language_consistency(text, language_of(question) if wanted == "prompt" else wanted)
    return parts


def format_reward(text: str, form: Form, *, in_thinking: bool = False) -> float:
    """1.0 for the wanted form, else 0.0 (DeepSeek-R1, 2501.12948 §2.2.2).

    Each tag once, in order, nothing but white space outside, the answer not blank; a thought may be, as it is where a
    model has thinking switched off. The answer of ``think`` is all that is after ``</think>``.

    Args:
        in_thinking: The prompt ended with ``<think>`` (``opens_thinking``): the answer begins inside.
    """
    text = as_written(text, in_thinking)
    tags = _TAGS[form]
    if tuple(tag for tag in _TAG.findall(text) if tag in tags) != tags:
        return 0.0
    pieces = _TAG.split(text) if form == "think_answer" else re.split(r"</?think>", text)
    before, _, *rest = pieces  # think: [answer]; think_answer: [between, answer, after]
    answer, outside = (rest[0], before) if form == "think" else (rest[1], before + rest[0] + rest[2])
    return float(not outside.strip() and bool(answer.strip()))


def repetition_penalty(text: str, ngram: int) -> float:
    """-(share of n-grams that came before), above -1 and at most 0; 0 for texts of fewer than ``ngram`` words.

    Words are what white space parts, in lower case; each Han character is one (Open-R1's
    ``get_repetition_penalty_reward`` with ``max_penalty=-1``, from 2502.03373 appendix C.2; Open-R1 cuts Chinese with
    jieba).
    """
    words = _TOKEN.findall(text.lower())
    total = len(words) - ngram + 1
    if total < 1:
        return 0.0
    different = len(set(zip(*(words[i:] for i in range(ngram)), strict=False)))
    return (different - total) / total


def language_consistency(text: str, language: Language) -> float:
    """The share of words in ``language``, 0.0 to 1.0 (DeepSeek-R1, 2501.12948 §2.3.2), told by script.

    ``en`` is every word of Latin letters, ``zh`` every Han character, ``other`` all the rest. Not counted: code,
    formulas, URLs, tags, LaTeX commands, numbers, punctuation, and single Latin letters, which are mostly names of
    variables. What has no words to count has mixed no languages: 1.0. A blank text has said nothing: 0.0.
    """
    if not text.strip():
        return 0.0
    counts = _words(text)
    total = sum(counts.values())
    return counts[language] / total if total else 1.0


def language_of(question: str) -> Language:
    """The language of most words, counted as in ``language_consistency``; ``en`` before ``zh`` in a tie or without
    words."""
    counts = _words(question)
    return max(counts, key=counts.__getitem__)


def _words(text: str) -> dict[Language, float]:
    counts: dict[Language, float] = {"en": 0.0, "zh": 0.0, "other": 0.0}
    for word in _WORD.finditer(_NO_WORDS.sub(" ", unicodedata.normalize("NFC", text))):
        if word["zh"]:
            counts["zh"] += 0.5
        elif not word["en"]:
            counts["other"] += 1.0
        elif len(word["en"]) > 1:
            counts["en"] += 1.0
    return counts


def k15_length_rewards(lengths: Sequence[int], right: Sequence[bool]) -> list[float]:
    """k1.5's length reward of every answer of a group, each from -0.5 to 0.5 (2501.12599 §2.3.3).

    λ = 0.5 - (length - min) / (max - min); a right answer gets λ, a wrong one min(0, λ); all 0 where all lengths are
    equal.

    Args:
        lengths: Response tokens.
        right: Whether the verifier took each answer.
    """
    if len(lengths) != len(right):
        raise ValueError(
            f"{len(lengths)} lengths and {len(right)} verdicts of one group; give one of each for every answer"
        )
    if not lengths or min(lengths) == max(lengths):
        return [0.0] * len(lengths)
    shortest, span = min(lengths), max(lengths) - min(lengths)
    terms = [0.5 - (length - shortest) / span for length in lengths]
    return [term if good else min(0.0, term) for term, good in zip(terms, right, strict=True)]


def overlong_penalty(length: int, limit: int, buffer: int, penalty: float = 1.0) -> float:
    """Penalty added to the reward of a response of ``length`` tokens: never above 0 (DAPO,
    2503.14476, equation 13).

    0 up to ``limit − buffer``, from there linearly down to ``−penalty`` at ``limit``, and ``−penalty`` beyond.

    Args:
        limit: ``rollout.max_response_tokens``.
        buffer: ``reward.overlong_buffer``, 1 .. limit.
    """
    assert 1 <= buffer <= limit, f"reward.overlong_buffer={buffer} must be within 1 .. {limit}"
    over = min(max(0, length - (limit - buffer)), buffer)
    return -penalty * over / buffer if over else 0.0


def check_weights(reward: RewardConfig) -> None:
    """Raise ConfigError where rewards are given later, and the score has parts of how a response is written."""
    for name in ("format", "repetition", "language"):
        if (weight := getattr(reward, name).weight) != 0:
            raise ConfigError(
                f"reward.{name}.weight={weight:g} with rewards that are given later: these are the whole score; set it "
                "to 0 and have it in the score that is given"
            )
