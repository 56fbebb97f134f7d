"""Verifier for mathematics with a final answer. Accepted forms: docs/rewards_math.md."""

from __future__ import annotations

import functools
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from megarl.core.errors import DataError
from megarl.rewards.answer import trace
from megarl.rewards.answer.grammar import extract, last_box
from megarl.rewards.answer.normalize import clean
from megarl.rewards.math.compare import MAX_ANSWER, equal, other_percent

TIME_LIMIT_S = 3.0
"""CPU seconds per verification, so that a verdict does not depend on load. ``reward.timeout_s`` limits wall time."""
FORMATS = {
    "any": "a final answer in any form: of a box, a tag and #### the last, else the last answer line or sentence",
    "box": "the last box",
    "hashes": "the last #### line",
    "line": "the last Answer: line, else a final answer in any form",
}
"""``answer_format`` -> description of the answer that it reads."""
MathScorer = Callable[[str, Any, dict[str, Any] | None], dict[str, Any]]


_struck = False


class OutOfTime(BaseException):
    """Timeout of a verification. Not an Exception, which SymPy and math-verify would swallow."""


def interrupted() -> bool:
    """Return True if a time limit has interrupted SymPy in this process: its caches may hold partial results."""
    return _struck


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block after ``seconds`` of CPU time, repeatedly until it ends. Raises RuntimeError outside
    the main thread."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "the math verifier limits its time with signals: call it in a process's main thread, as reward workers do"
        )

    def stop(number: int, frame: FrameType | None) -> None:
        global _struck
        _struck = True
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def verdict(status: str, pred: str, message: str = "", parts: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return a scorer's result dict."""
    right = status == "ok"
    result = {"score": float(right), "acc": right, "status": status, "pred": pred[:200], "extracted": float(bool(pred))}
    return result | dict(parts or {}) | ({"message": message} if message else {})


def out_of_time(pred: str, compare: Callable[[], Any]) -> dict[str, Any]:
    """Return the verdict on a response that ran out of time: ``wrong``, or ``timeout`` if the row itself is too slow.

    Args:
        compare: Compares the ground truth with a trivial answer.
    """
    try:
        with time_limit(TIME_LIMIT_S):
            compare()
    except OutOfTime:
        return verdict("timeout", pred, f"the ground truth has no verdict within {TIME_LIMIT_S:g} s of CPU time")
    except RecursionError:
        pass
    return verdict("wrong", pred)


def listed(ground_truth: Any) -> Any:
    """Decode a list that was written as JSON, as columns of one type require; return anything else unchanged.

    Only lists of texts, numbers and lists, with at least one text at any depth: ``[3, 4]`` is an interval.
    """
    if not isinstance(ground_truth, str) or not ground_truth.lstrip().startswith("[") or '"' not in ground_truth:
        return ground_truth
    try:
        read = json.loads(ground_truth)
    except (ValueError, RecursionError):
        return ground_truth
    leaves = [leaf for item in read for leaf in (item if isinstance(item, list) else [item])]
    plain = all(isinstance(leaf, (str, int, float)) and not isinstance(leaf, bool) for leaf in leaves)
    return read if plain and any(isinstance(leaf, str) for leaf in leaves) else ground_truth


def check_listed(ground_truth: Any) -> None:
    """Raise DataError for a text that begins like a JSON list of texts but is none, e.g. with undoubled backslashes."""
    if not isinstance(ground_truth, str) or not ground_truth.lstrip().startswith('["'):
        return
    read = listed(ground_truth)
    if isinstance(read, str) or any(
        sign in str(leaf)
        for item in read
        for leaf in (item if isinstance(item, list) else [item])
        for sign in "\f\b\t\r"
    ):
        raise DataError(
            f"ground_truth {ground_truth!r:.80} is no JSON list of texts and numbers; write each backslash twice"
        )


def golds_of(ground_truth: Any) -> list[str]:
    """Return a row's accepted answers: a number, a text, a solution's box or ``####`` line, or a list of these (also
    JSON)."""
    ground_truth = listed(ground_truth)
    values = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    return [gold for value in values if (gold := _gold(value))]


def _gold(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return ""
    text = str(value).strip()
    if "####" in text:
        return text.rsplit("####", 1)[1].strip()
    box = last_box(text)
    return text if box is None else box.strip()


def _format(info: Mapping[str, Any], default: str) -> str:
    given = info.get("answer_format")
    if given is not None and given not in FORMATS:  # parquet fills a key of one row into all rows, with None
        raise DataError(f"extra_info.answer_format {given!r:.40}: expected one of {', '.join(FORMATS)}")
    return default if given is None else str(given)


def _golds(ground_truth: Any) -> list[str]:
    golds = golds_of(ground_truth)
    if not golds:
        raise DataError(f"ground_truth {ground_truth!r:.80} holds no answer; give a text, a number or a list of texts")
    return golds


def check_row(ground_truth: Any, extra_info: Mapping[str, Any] | None) -> None:
    """Raise DataError for a row that no answer can satisfy. Reads texts only: about 0.1 ms, no SymPy."""
    _format(extra_info if isinstance(extra_info, Mapping) else {}, "any")
    check_listed(ground_truth)
    for gold in _golds(ground_truth):
        if len(gold) <= MAX_ANSWER and not clean(gold):
            raise DataError(
                f"ground_truth {ground_truth!r:.80} holds an answer of nothing but punctuation; give a text or a number"
            )


def score(
    solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, answer_format: str = "any"
) -> dict[str, Any]:
    """Return score 1.0 if the final answer equals any gold, else 0.0, also past the time limit.

    The status is ``error`` without a gold, and ``timeout`` if the gold alone takes too long.
    """
    info = extra_info if isinstance(extra_info, Mapping) else {}
    try:
        answer_format, golds = _format(info, answer_format), _golds(ground_truth)
        trace.asked(FORMATS[answer_format])
    except DataError as error:
        return verdict("error", "", str(error))
    pred = ""
    try:
        with time_limit(TIME_LIMIT_S):
            pred = extract(solution_str, answer_format)
            question = info.get("question") or info.get("problem")
            question = question if isinstance(question, str) else ""
            right = any(equal(gold, pred, question) and not other_percent(gold, pred, question) for gold in golds)
    except OutOfTime:
        return out_of_time(pred, lambda: [equal(gold, "0", "") for gold in golds])
    except RecursionError:
        return verdict("wrong", pred)  # nested deeper than any real answer
    return verdict("ok" if right else "wrong", pred)


@functools.cache
def _warm() -> None:
    """Import SymPy and math-verify and parse one expression, so that the first answer does not pay for the imports."""
    from megarl.rewards.math import algebra as math_algebra

    math_algebra.same(r"\frac{x}{2}", "0.5x")


def scorer(rest: str) -> MathScorer:
    """Return the scorer of ``math`` and ``math/<anything>``. Raises DataError for other names such as
    ``mathematics``."""
    if rest and rest[0] not in "/_-.":
        raise DataError(
            f"data_source 'math{rest}' has no verifier; call it math/{rest} to have it scored as mathematics, or set "
            "reward.path"
        )
    return _scorer("any")


def named(rest: str) -> MathScorer:
    """Return the scorer of a known data set's rows; ``rest`` of the name is ignored."""
    return _scorer("any")


def lined(rest: str) -> MathScorer:
    """Return the scorer that prefers the last ``Answer:`` line to a box, as DAPO's prompt asks; else like ``named``."""
    return _scorer("line")


def boxed(rest: str) -> MathScorer:
    """Return the scorer that reads boxes only, as verl's scorer for MATH does."""
    return _scorer("box")


def gsm8k(rest: str) -> MathScorer:
    """Return the scorer that reads ``#### answer`` only, as verl's scorer for GSM8K does."""
    return _scorer("hashes")


def _scorer(answer_format: str) -> MathScorer:
    _warm()
    return functools.partial(score, answer_format=answer_format)
