"""Verifier for questions about images with a checkable answer. Accepted forms: docs/rewards_vision.md.

The image is not read: each subtype compares the answer's text with the row's ground truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from megarl.core.errors import DataError
from megarl.rewards.answer import trace
from megarl.rewards.answer.grammar import boxes_in_a_row, extract, unmarked
from megarl.rewards.math import verifier as math_verifier
from megarl.rewards.school import read as k12_read
from megarl.rewards.school import verifier as k12
from megarl.rewards.vision.bounding_boxes import (
    SCALES,
    Numbers,
    answer_text,
    best_assignment,
    iou,
    is_box,
    rescaled,
    shapes,
)
from megarl.rewards.vision.readings import THRESHOLD, read_count, shown, similarity

VisionScorer = Callable[[str, Any, dict[str, Any] | None], dict[str, Any]]

MAX_GOLD = 1000
"""Maximum characters of an accepted text; the distance takes quadratic time."""


def verdict(status: str, score: float, pred: str, reason: str = "", **parts: float) -> dict[str, Any]:
    """Return a scorer's result dict."""
    result = {
        "score": score,
        "acc": status == "ok",
        "status": status,
        "pred": pred[:200],
        "extracted": float(bool(pred)),
    }
    return result | parts | ({"reason": reason} if reason else {})


def _right(right: bool, pred: str, **parts: float) -> dict[str, Any]:
    return verdict("ok" if right else "wrong", float(right), pred, "", **parts)


def _error(reason: str) -> dict[str, Any]:
    return verdict("error", 0.0, "", reason)


def _setting(info: Mapping[str, Any], name: str, default: Any) -> Any:
    """Read a setting of a row; None counts as missing, since parquet gives every row all keys."""
    value = info.get(name)
    return default if value is None else value


def _number(info: Mapping[str, Any], name: str, default: float | None = None, most: float = math.inf) -> float | None:
    """Return a setting above 0 and at most ``most``. Raises ValueError for other values."""
    value = _setting(info, name, default)
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value <= most
        or not math.isfinite(value)
    ):
        upper = "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"extra_info.{name} {value!r:.40}: expected a number above 0{upper}")
    return float(value)


# ---------------------------------------------------------------- mathematics and choices


def _reasoned(result: dict[str, Any]) -> dict[str, Any]:
    message = result.pop("message", None)
    return result if message is None else result | {"reason": message}


def score_math(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Score as ``math`` does."""
    return _reasoned(math_verifier.score(solution_str, ground_truth, extra_info))


def _choice_info(ground_truth: Any, extra_info: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return extra_info with its type filled in. Raises ValueError for a type that is not a choice."""
    info = dict(extra_info) if isinstance(extra_info, Mapping) else {}
    if info.get("type") is None:
        info["type"] = (
            "multiple_choice"
            if ground_truth and k12.question_type(ground_truth, info) == "multiple_choice"
            else "choice"
        )
    if info["type"] not in ("choice", "multiple_choice"):
        raise ValueError(f"extra_info.type {info['type']!r:.40}: expected choice or multiple_choice for vision/choice")
    return info


def score_choice(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Score as ``k12`` does, with one or more given options. The status is ``error`` if no option is the ground
    truth."""
    ground_truth = math_verifier.listed(ground_truth)
    try:
        info = _choice_info(ground_truth, extra_info)
    except ValueError as error:
        return _error(str(error))
    options = k12_read.options_of(info)
    golds = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    if options:
        named = {letter for gold in golds for letter in k12_read.letters(str(gold)) or []}
        texts = {k12_read.plain(text) for text in options.values()}
        if not named <= set(options) and not all(k12_read.plain(str(gold)) in texts for gold in golds):
            return _error(f"ground_truth {ground_truth!r:.80} is not one of the options {', '.join(options)}")
    named_text = shown(unmarked(solution_str).rsplit("\n", 1)[-1]) if options else ""
    return _reasoned(k12.score(f"\\boxed{{{named_text}}}" if named_text else solution_str, ground_truth, info))


# ---------------------------------------------------------------- counting


def _count_gold(ground_truth: Any) -> int:
    """Return the ground truth as a number. Raises ValueError unless it is a whole number from 0."""
    gold = None
    if isinstance(ground_truth, (int, str)) and not isinstance(ground_truth, bool):
        gold = read_count(str(ground_truth))
    elif isinstance(ground_truth, float) and ground_truth.is_integer():
        gold = int(ground_truth)
    if gold is None or gold < 0:
        raise ValueError(f"ground_truth {ground_truth!r:.80} is no count; give a whole number from 0")
    return gold


def score_count(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return score 1.0 for exactly the number. The status is ``error`` if the ground truth is no whole number from
    0."""
    try:
        gold = _count_gold(ground_truth)
    except ValueError as error:
        return _error(str(error))
    trace.asked("one whole number")
    pred = extract(solution_str)
    counts = {read_count(text) for text in boxes_in_a_row(solution_str) or [pred]}
    return _right(trace.compared("count", str(gold), ", ".join(map(str, counts)), counts == {gold}), pred)


# ---------------------------------------------------------------- text and documents


def _anls_row(ground_truth: Any, info: Mapping[str, Any]) -> tuple[list[str], float]:
    """Return (accepted texts, threshold). Raises ValueError if either is invalid."""
    ground_truth = math_verifier.listed(ground_truth)
    values = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    golds = [
        str(value)
        for value in values
        if isinstance(value, (str, int, float)) and not isinstance(value, bool) and str(value).strip()
    ]
    if not golds or len(golds) != len(values) or any(len(gold) > MAX_GOLD for gold in golds):
        raise ValueError(
            f"ground_truth {ground_truth!r:.80}: expected a text or a list of texts, each of 1 to {MAX_GOLD} characters"
        )
    return golds, _number(info, "threshold", THRESHOLD, most=1.0) or THRESHOLD


def score_anls(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the largest ANLS over the accepted texts; the status is ``ok`` if it is 1, and ``error`` without an
    accepted text."""
    info = extra_info if isinstance(extra_info, Mapping) else {}
    try:
        golds, threshold = _anls_row(ground_truth, info)
    except ValueError as error:
        return _error(str(error))
    trace.asked(f"a text with ANLS of at least {threshold:g} to an accepted one")
    pred = extract(solution_str)
    score = max(similarity(gold, pred, solution_str, threshold) for gold in golds)
    trace.compared(f"ANLS {score:.3f}", " | ".join(golds), pred, score == 1.0)
    return verdict("ok" if score == 1.0 else "wrong", score, pred, exact=float(score == 1.0))


# ---------------------------------------------------------------- boxes and points


def _scales(info: Mapping[str, Any]) -> tuple[str, str, float | None, float | None]:
    """Return (answer's coordinate system, ground truth's, width, height). Raises ValueError for an invalid setting."""
    answer = _setting(info, "coordinates", "pixels")
    gold = _setting(info, "gt_coordinates", answer)
    for name, value in (("coordinates", answer), ("gt_coordinates", gold)):
        if value not in SCALES:
            raise ValueError(f"extra_info.{name} {value!r:.40}: expected one of {', '.join(SCALES)}")
    return answer, gold, _number(info, "width"), _number(info, "height")


def _golds(ground_truth: Any, size: int) -> list[Numbers]:
    """Return the ground truth's shapes. Raises ValueError if there are none, or a box has no area."""
    found = shapes(ground_truth, size)
    if not found:
        raise ValueError(
            f"ground_truth {ground_truth!r:.80} holds no {'box [x1, y1, x2, y2]' if size == 4 else 'point [x, y]'}"
        )
    broken = [box for box in found if size == 4 and not is_box(box)]
    if broken:
        raise ValueError(f"ground_truth box {list(broken[0])}: expected x1 < x2 and y1 < y2")
    return found


def _box_row(
    ground_truth: Any, info: Mapping[str, Any]
) -> tuple[list[Numbers], float, tuple[str, str, float | None, float | None], str]:
    """Return (boxes, threshold, scales, kind of score). Raises ValueError if any is invalid."""
    golds = _golds(ground_truth, 4)
    threshold = _number(info, "threshold", THRESHOLD, most=1.0) or THRESHOLD
    scales = _scales(info)
    by = _setting(info, "score", "threshold")
    if by not in ("threshold", "iou"):
        raise ValueError(f"extra_info.score {by!r:.40}: expected threshold or iou")
    rescaled((0.0, 0.0), *scales)
    return golds, threshold, scales, by


def _point_row(
    ground_truth: Any, info: Mapping[str, Any]
) -> tuple[list[Numbers], float | None, tuple[str, str, float | None, float | None]]:
    """Return (boxes or points, radius, scales). Raises ValueError if any is invalid."""
    radius, scales = _number(info, "radius"), _scales(info)
    golds = _golds(ground_truth, 4 if radius is None else 2)
    rescaled((0.0, 0.0), *scales)
    return golds, radius, scales


def score_box(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return score 1.0 if there are as many boxes as in the ground truth and each matches one of them by IoU >=
    ``extra_info.threshold``.

    ``iou``: the mean over the larger number of boxes; it is the score with ``extra_info.score`` "iou".
    """
    info = extra_info if isinstance(extra_info, Mapping) else {}
    try:
        golds, threshold, scales, by = _box_row(ground_truth, info)
    except ValueError as error:
        return _error(str(error))
    trace.asked(f"{len(golds)} box(es) with IoU of at least {threshold:g}")
    pred = answer_text(solution_str)
    found = [rescaled(box, *scales) for box in shapes(pred, 4) or []]
    if not found:
        return _right(False, pred, iou=0.0, boxes=0.0)
    overlaps = [[iou(gold, box) for box in found] for gold in golds]
    # The most matches first; among these assignments the largest total overlap.
    weights = [[value + (len(golds) + 1) * (value >= threshold) for value in row] for row in overlaps]
    matched = [overlaps[row][column] for row, column in best_assignment(weights)]
    mean = sum(matched) / max(len(golds), len(found))
    hits = sum(value >= threshold for value in matched)
    right = trace.compared(f"IoU of boxes, mean {mean:.3f}", str(golds), str(found), hits == len(golds) == len(found))
    return verdict(
        "ok" if right else "wrong", mean if by == "iou" else float(right), pred,
        iou=mean, precision=hits / len(found), recall=hits / len(golds), boxes=float(len(found)),
    )  # fmt: skip


def score_point(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return score 1.0 for one point in (or on the border of) any box of the ground truth. With ``extra_info.radius``:
    for one point within that distance of any of its points, in the ground truth's coordinates."""
    info = extra_info if isinstance(extra_info, Mapping) else {}
    try:
        golds, radius, scales = _point_row(ground_truth, info)
    except ValueError as error:
        return _error(str(error))
    trace.asked("one point" if radius is None else f"one point within {radius:g}")
    pred = answer_text(solution_str)
    found = shapes(pred, 2) or []
    if len(found) != 1:
        return _right(False, pred, points=float(len(found)))
    x, y = rescaled(found[0], *scales)
    if radius is None:
        right = any(gold[0] <= x <= gold[2] and gold[1] <= y <= gold[3] for gold in golds)
    else:
        right = any(math.hypot(x - gold[0], y - gold[1]) <= radius for gold in golds)
    return _right(trace.compared("point", str(golds), f"{x:g}, {y:g}", right), pred, points=1.0)


SUBTYPES: dict[str, VisionScorer] = {
    "math": score_math,
    "choice": score_choice,
    "count": score_count,
    "anls": score_anls,
    "box": score_box,
    "point": score_point,
}


def check_row(subtype: str, ground_truth: Any, extra_info: Mapping[str, Any] | None) -> None:
    """Raise DataError for a row of a subtype (in SUBTYPES) that no answer can satisfy. Reads texts only, no SymPy."""
    info = extra_info if isinstance(extra_info, Mapping) else {}
    try:
        if subtype == "math":
            math_verifier.check_row(ground_truth, info)
        elif subtype == "choice":
            k12.check_row(ground_truth, _choice_info(math_verifier.listed(ground_truth), info))
        else:
            readers: dict[str, Callable[[], Any]] = {
                "count": lambda: _count_gold(ground_truth),
                "anls": lambda: _anls_row(ground_truth, info),
                "box": lambda: _box_row(ground_truth, info),
                "point": lambda: _point_row(ground_truth, info),
            }
            readers[subtype]()
    except ValueError as error:
        raise DataError(str(error)) from error


def scorer(rest: str) -> VisionScorer:
    """Return the scorer of ``vision/<subtype>`` and ``vision/<subtype>/<anything>``. Raises DataError for other
    subtypes."""
    slash, _, name = rest.partition("/")
    subtype = name.partition("/")[0]
    if slash or subtype not in SUBTYPES:
        raise DataError(
            f"data_source 'vision{rest}' has no verifier; it is vision/<subtype> with one of {', '.join(SUBTYPES)}, or "
            "set reward.path"
        )
    if subtype in ("math", "choice"):
        math_verifier.scorer("")  # import SymPy and math-verify now, not at the first answer
    return SUBTYPES[subtype]
