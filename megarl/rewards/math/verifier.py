"""Mathematics with a final answer. What is accepted: docs/rewards_math.md."""

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
"""CPU time of one verification: a verdict does not depend on the machine's load. ``reward.timeout_s`` limits the wall
time."""
FORMATS = {
    "any": "a final answer in any form: of a box, a tag and #### the last, else the last answer line or sentence",
    "box": "the last box",
    "hashes": "the last #### line",
    "line": "the last Answer: line, else a final answer in any form",
}
"""``answer_format`` -> the answer that it asks for."""
MathScorer = Callable[[str, Any, dict[str, Any] | None], dict[str, Any]]


_struck = False


class OutOfTime(BaseException):
    """Timeout of a verification. No Exception, which SymPy and math-verify would swallow."""


def interrupted() -> bool:
    """Return True if a time limit has struck in this process: SymPy may keep what it had half computed."""
    return _struck


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block after ``seconds`` of CPU time, and again until it ends. RuntimeError off the main
    thread."""
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
    """The dict that a scorer returns."""
    right = status == "ok"
    result = {"score": float(right), "acc": right, "status": status, "pred": pred[:200], "extracted": float(bool(pred))}
    return result | dict(parts or {}) | ({"message": message} if message else {})


def out_of_time(pred: str, compare: Callable[[], Any]) -> dict[str, Any]:
    """The verdict over a response past the time limit: wrong; timeout where the row is at fault.

    Args:
        compare: Compares the ground truth with an answer that costs nothing.
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
    """A list that was written as JSON, as columns of one type must; all else as it is.

    Only a list with a text in it, at any depth: ``[3, 4]`` is an interval. Of texts, numbers and lists of them.
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
    """Raise DataError for what begins as a JSON list of texts and is none, as backslashes that are not doubled make
    it."""
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
    """The accepted answers of a row: a number, a text, the box or ``####`` line of a solution, or a list of these (also
    as JSON)."""
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
    if given is not None and given not in FORMATS:  # parquet fills the key of one row into all, with None
        raise DataError(f"extra_info.answer_format {given!r:.40}: expected one of {', '.join(FORMATS)}")
    return default if given is None else str(given)


def _golds(ground_truth: Any) -> list[str]:
    golds = golds_of(ground_truth)
    if not golds:
        raise DataError(f"ground_truth {ground_truth!r:.80} holds no answer; give a text, a number or a list of texts")
    return golds


def check_row(ground_truth: Any, extra_info: Mapping[str, Any] | None) -> None:
    """Raise DataError for a row that no answer could be right for. Reads texts only: about 0.1 ms, no SymPy."""
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
    """1.0 if the final answer is right (any of several golds), else 0.0, also past the time limit.

    The status is ``error`` without a gold, and ``timeout`` for a gold that takes as long by itself.
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
        return verdict("wrong", pred)  # nested deeper than any answer
    return verdict("ok" if right else "wrong", pred)


@functools.cache
def _warm() -> None:
    """Import SymPy and math-verify and parse something, so that no answer pays for it."""
    from megarl.rewards.math import algebra as math_algebra

    math_algebra.same(r"\frac{x}{2}", "0.5x")


def scorer(rest: str) -> MathScorer:
    """The scorer of ``math`` and ``math/<anything>``. Raises DataError for ``mathematics`` and the like."""
    if rest and rest[0] not in "/_-.":
        raise DataError(
            f"data_source 'math{rest}' has no verifier; call it math/{rest} to have it scored as mathematics, or set "
            "reward.path"
        )
    return _scorer("any")


def named(rest: str) -> MathScorer:
    """The scorer of a known data set's rows, whatever follows its prefix."""
    return _scorer("any")


def lined(rest: str) -> MathScorer:
    """Score as ``named`` does; the last ``Answer:`` line counts before any box, as DAPO's prompt asks."""
    return _scorer("line")


def boxed(rest: str) -> MathScorer:
    """Score as ``named`` does; only a box counts, as with verl for MATH."""
    return _scorer("box")


def gsm8k(rest: str) -> MathScorer:
    """Score as ``named`` does; only ``#### answer`` counts, as with verl for GSM8K."""
    return _scorer("hashes")


def _scorer(answer_format: str) -> MathScorer:
    _warm()
    return functools.partial(score, answer_format=answer_format)
