"""Convert a reward function's result to a verdict in plain JSON, and compute the weighted sum of its parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Number
from typing import Any

from megarl.config.rewards import RewardConfig
from megarl.core.schema import Reward, plain
from megarl.core.text import without_surrogates
from megarl.rewards.shape import shape_parts

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
