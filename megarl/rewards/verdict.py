"""Convert a reward function's result to a verdict, with rewards for form, repetition, language and length.

Pure functions.

The language reward counts a run of letters of one alphabet as one word and a Han character as half a word (Chinese
words have about two). Everything is linear in the length of the text, so no answer can block a worker.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any, Literal

from megarl.config.rewards import RewardConfig
from megarl.core.errors import ConfigError
from megarl.core.schema import Reward, plain
from megarl.core.text import as_written, without_surrogates

Form = Literal["think", "think_answer"]
Language = Literal["en", "zh", "other"]

_TAGS = {"think": ("<think>", "</think>"), "think_answer": ("<think>", "</think>", "<answer>", "</answer>")}
_TAG = re.compile(r"</?(?:think|answer)>")

_HAN = "㐀-䶿一-鿿豈-﫿\U00020000-\U0003ffff"
_TOKEN = re.compile(rf"[{_HAN}]|[^\s{_HAN}]+")
_NO_WORDS = re.compile(
    r"```.*?(?:```|\Z)"  # code; an unclosed block reaches to the end, as in Markdown
    r"|`[^`\n]*`"
    r"|\$\$[^$]*\$\$"
    r"|\$(?=\S)[^$\n]{0,999}?(?<=\S)\$(?!\d)"  # "$5 and $6" is not a formula
    r"|\\\((?:[^\\]|\\[^()])*\\\)"
    r"|\\\[(?:[^\\]|\\[^\[\]])*\\\]"
    r"|(?:https?://|www\.)[!-~]+"  # ASCII only: Chinese text continues without a space
    r"|</?[A-Za-z]\w*>"
    r"|\\(?:begin|end)\{[^{}\n]*\}|\\[A-Za-z]+",
    re.DOTALL,
)
_WORD = re.compile(rf"(?P<zh>[{_HAN}])|(?P<en>[A-Za-zÀ-ɏ]+(?:['’][A-Za-zÀ-ɏ]+)*)|[^\W\d_{_HAN}A-Za-zÀ-ɏ]+")


def shape_parts(text: str, question: str, config: RewardConfig, *, in_thinking: bool = False) -> dict[str, float]:
    """Return the unweighted parts with non-zero weight that need only the answer's text: format, repetition, language.

    Args:
        question: Last message of the prompt; sets the language for ``reward.language.language: prompt``.
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
    """Return 1.0 for the wanted form, else 0.0 (DeepSeek-R1, 2501.12948 §2.2.2).

    Each tag occurs once and in order, only white space stands outside, and the answer is not blank. The thought may be
    blank, as with thinking switched off. With ``think``, all text after ``</think>`` is the answer.

    Args:
        in_thinking: The prompt ended with ``<think>`` (``opens_thinking``), so the response begins inside the thought.
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
    """Return -(share of repeated n-grams), above -1 and at most 0; 0 for texts of fewer than ``ngram`` words.

    Words are lower-cased and split at white space; each Han character is a word. As Open-R1's
    ``get_repetition_penalty_reward`` with ``max_penalty=-1`` (2502.03373 appendix C.2), which splits Chinese with
    jieba.
    """
    words = _TOKEN.findall(text.lower())
    total = len(words) - ngram + 1
    if total < 1:
        return 0.0
    different = len(set(zip(*(words[i:] for i in range(ngram)), strict=False)))
    return (different - total) / total


def language_consistency(text: str, language: Language) -> float:
    """Return the share of words in ``language``, 0.0 to 1.0 (DeepSeek-R1, 2501.12948 §2.3.2), judged by script.

    ``en`` is every word of Latin letters, ``zh`` every Han character, ``other`` the rest. Not counted: code, formulas,
    URLs, tags, LaTeX commands, numbers, punctuation, and single Latin letters, which are mostly variables. A text
    without counted words scores 1.0, a blank text 0.0.
    """
    if not text.strip():
        return 0.0
    counts = _words(text)
    total = sum(counts.values())
    return counts[language] / total if total else 1.0


def language_of(question: str) -> Language:
    """Return the language of most words, counted as in ``language_consistency``; ties and texts without words give
    ``en``, then ``zh``."""
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
    """Return k1.5's length reward of every answer of a group, each from -0.5 to 0.5 (2501.12599 §2.3.3).

    λ = 0.5 - (length - min) / (max - min); a right answer gets λ, a wrong one min(0, λ); all 0 if all lengths are
    equal.

    Args:
        lengths: Response tokens.
        right: True for each answer that the verifier accepted.
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
    """Return the penalty for a response of ``length`` tokens, at most 0 (DAPO, 2503.14476, equation 13).

    0 up to ``limit − buffer``, then linearly down to ``−penalty`` at ``limit`` and beyond.

    Args:
        limit: ``rollout.max_response_tokens``.
        buffer: ``reward.overlong_buffer``, 1 .. limit.
    """
    assert 1 <= buffer <= limit, f"reward.overlong_buffer={buffer} must be within 1 .. {limit}"
    over = min(max(0, length - (limit - buffer)), buffer)
    return -penalty * over / buffer if over else 0.0


def check_weights(reward: RewardConfig) -> None:
    """Raise ConfigError if rewards are given later but the score has parts for a response's form."""
    for name in ("format", "repetition", "language"):
        if (weight := getattr(reward, name).weight) != 0:
            raise ConfigError(
                f"reward.{name}.weight={weight:g} with rewards that are given later: these are the whole score; set it "
                "to 0 and have it in the score that is given"
            )


LATE = "late"
"""Status of a response rewarded later (``megarl data reward``), and family of data sources with only such rewards."""
FAILURES = ("error", "timeout")
NO_VERDICT = (*FAILURES, LATE)
STATUSES = ("ok", "wrong", *NO_VERDICT)
MAX_PARTS = 256
MAX_NAME = 200
"""Maximum characters of a part's name, which becomes the name of a metric."""
MAX_REASON = 2000
ANSWER = "answer"
"""Part with the verifier's score if there are other parts."""
USER_PART = "user_"
"""Prefix added to a reward function's part if megarl has a part with the same name."""


def to_verdict(result: Any) -> dict[str, Any]:
    """Convert a number, or a dict with ``score``, to ``{score, status, parts}``; for an error also ``reason``, if
    given.

    Numeric entries of a dict and of its ``parts`` are kept as parts. Without a ``status`` in the dict, the status is ok
    if its ``acc`` (a bool or a number) is at least 1, else wrong; without ``acc``, the score decides in the same way.
    Scalars of numpy and torch are numbers. Raises TypeError or ValueError for a result of another type or a non-finite
    one, more than MAX_PARTS parts, or a part whose name is too long or invalid text.
    """
    if not isinstance(result, Mapping):
        score = _number(result, "the result")
        return {"score": score, "status": "ok" if score >= 1.0 else "wrong", "parts": {}}
    if "score" not in result:
        raise ValueError(f"compute_score returned a dict without 'score'; its keys are {sorted(map(str, result))}")
    score = _number(result["score"], "'score'")
    more = result.get("parts")
    entries = {**result, **more} if isinstance(more, Mapping) else dict(result)
    parts = {
        str(name): float(value)
        for name, value in ((name, plain(value)) for name, value in entries.items())
        if name != "score" and _is_number(value) and math.isfinite(value)
    }
    _check_names(parts)
    status = result.get("status")
    if status is None:
        status = "ok" if _right(result.get("acc"), score) else "wrong"
    if status not in STATUSES:
        raise ValueError(f"compute_score returned status {status!r}; expected one of {', '.join(STATUSES)}")
    verdict: dict[str, Any] = {"score": score, "status": status, "parts": parts}
    reason = result.get("reason") or result.get("message")
    return (
        {**verdict, "reason": without_surrogates(str(reason)[:MAX_REASON])}
        if status in NO_VERDICT and reason
        else verdict
    )


def with_question(extra_info: Mapping[str, Any] | None, question: str) -> dict[str, Any]:
    """Return ``extra_info`` with the prompt's last message as ``question`` unless it has one: verifiers use it to
    detect answers that only repeat the question."""
    info = dict(extra_info or {})
    return info if info.get("question") else info | {"question": question}


def weighed(result: Any, text: str, question: str, in_thinking: bool, config: RewardConfig) -> dict[str, Any]:
    """Return ``to_verdict`` of a verifier's result for ``text``, with the settings' shape rewards; see
    ``shape_parts``."""
    return weigh(to_verdict(result), shape_parts(text, question, config, in_thinking=in_thinking), config)


def weigh(verdict: dict[str, Any], shape: Mapping[str, float], config: RewardConfig) -> dict[str, Any]:
    """Return the verdict with score ``reward.weight`` · score + Σ weight · part; its parts are unweighted.

    ``shape``: part -> value, for parts with a ``weight`` in the settings. A result without a verdict is unchanged.
    ``verified`` is the verifier's score if ``score`` differs from it.
    """
    if verdict["status"] in NO_VERDICT or (not shape and config.weight == 1.0):
        return verdict
    score = config.weight * verdict["score"] + sum(
        getattr(config, name).weight * value for name, value in shape.items()
    )
    parts = with_parts(verdict["parts"], {**shape, ANSWER: verdict["score"]})
    return {**verdict, "score": score, "verified": verdict["score"], "parts": parts}


def with_parts(parts: Mapping[str, float], added: Mapping[str, float]) -> dict[str, float]:
    """Return ``parts`` and megarl's ``added`` parts. A part with an added part's name is renamed to ``user_<name>``."""
    found = {name: value for name, value in parts.items() if name not in added}
    for name in parts.keys() & added.keys():
        kept = USER_PART + name
        while kept in found or kept in added:
            kept = USER_PART + kept
        found[kept] = parts[name]
    return found | dict(added)


def weighed_reward(reward: Reward, text: str, question: str, in_thinking: bool, config: RewardConfig) -> Reward:
    """Weigh a reward that a workflow gave to a trajectory with the last response ``text``, as ``weighed`` does."""
    verdict = {"score": reward.score, "status": reward.status, "parts": reward.parts}
    found = weigh(verdict, shape_parts(text, question, config, in_thinking=in_thinking), config)
    return Reward(found["score"], found["status"], found["parts"])


def _check_names(parts: Mapping[str, float]) -> None:
    """Raise ValueError for too many parts, or a name that is too long or cannot be stored as UTF-8."""
    if len(parts) > MAX_PARTS:
        raise ValueError(
            f"compute_score returned {len(parts)} parts; at most {MAX_PARTS} numbers are allowed beside 'score'"
        )
    for name in parts:
        if len(name) > MAX_NAME or name != without_surrogates(name):
            raise ValueError(
                f"compute_score returned a part named {name!a:.60}; a name is valid Unicode text of at most {MAX_NAME} "
                "characters"
            )


def _right(acc: Any, score: float) -> bool:
    """Return True if ``acc`` is 1 or, without ``acc``, the score is at least 1. A graded ``acc`` below 1 is not
    right."""
    return (score if acc is None else _number(acc, "'acc'")) >= 1.0


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) and not isinstance(value, complex)


def _number(value: Any, what: str) -> float:
    value = plain(value)
    if not _is_number(value):
        raise TypeError(
            f"compute_score must return a number or a dict with a number 'score'; "
            f"{what} is {type(value).__name__} {value!r:.60}"
        )
    if not math.isfinite(value):
        raise ValueError(f"compute_score returned {value}; a score must be finite")
    return float(value)
