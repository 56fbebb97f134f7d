"""Questions about images with an answer that a program can check. What is accepted: docs/rewards_vision.md.

The image itself is not looked at: each subtype compares the answer's text with the row's ground truth.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from megarl.errors import DataError
from megarl.rewards import k12, k12_read, math_verifier
from megarl.rewards.math_extract import extract
from megarl.rewards.normalize import half_width
from megarl.rewards.numerals import with_digits
from megarl.rewards.units import NUMERALS
from megarl.rewards.vision_boxes import SCALES, Numbers, answer_text, best_assignment, iou, is_box, rescaled, shapes

VisionScorer = Callable[[str, Any, dict[str, Any] | None], dict[str, Any]]

THRESHOLD = 0.5
"""Of ANLS (ST-VQA, 1905.13648) and of IoU, where a row gives none."""
MAX_GOLD = 1000
"""Characters of an accepted text; the distance takes their square."""
MAX_COUNT_TEXT = 300


def verdict(status: str, score: float, pred: str, reason: str = "", **parts: float) -> dict[str, Any]:
    """The dict that a scorer returns."""
    result = {"score": score, "acc": status == "ok", "status": status, "pred": pred[:200], "extracted": float(bool(pred))}
    return result | parts | ({"reason": reason} if reason else {})


def _right(right: bool, pred: str, **parts: float) -> dict[str, Any]:
    return verdict("ok" if right else "wrong", float(right), pred, "", **parts)


def _error(reason: str) -> dict[str, Any]:
    return verdict("error", 0.0, "", reason)


def _setting(info: Mapping[str, Any], name: str, default: Any) -> Any:
    """Of a row; parquet gives every row the keys of all, with None where a row has none."""
    value = info.get(name)
    return default if value is None else value


def _number(info: Mapping[str, Any], name: str, default: float | None = None, most: float = math.inf) -> float | None:
    """A setting above 0 and at most ``most``. Raises ValueError for another."""
    value = _setting(info, name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most or not math.isfinite(value):
        upper = "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"extra_info.{name} {value!r:.40}: expected a number above 0{upper}")
    return float(value)


# ---------------------------------------------------------------- mathematics and choices


def _reasoned(result: dict[str, Any]) -> dict[str, Any]:
    message = result.pop("message", None)
    return result if message is None else result | {"reason": message}


def score_math(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """As ``math``."""
    return _reasoned(math_verifier.score(solution_str, ground_truth, extra_info))


def _choice_info(ground_truth: Any, extra_info: Mapping[str, Any] | None) -> dict[str, Any]:
    """extra_info with its type. Raises ValueError for a type that is no choice."""
    info = dict(extra_info) if isinstance(extra_info, Mapping) else {}
    if info.get("type") is None:
        info["type"] = "multiple_choice" if ground_truth and k12.question_type(ground_truth) == "multiple_choice" else "choice"
    if info["type"] not in ("choice", "multiple_choice"):
        raise ValueError(f"extra_info.type {info['type']!r:.40}: expected choice or multiple_choice for vision/choice")
    return info


def score_choice(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """As ``k12`` with one or more of given options. Error for a ground truth that is none of them."""
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
    return _reasoned(k12.score(solution_str, ground_truth, info))


# ---------------------------------------------------------------- counting

_TENS = "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
_WORDS = rf"(?:{_TENS}|{'|'.join(sorted(NUMERALS, key=len, reverse=True))}|hundred)"
_HAN = "零〇一二两三四五六七八九十百千"
_COUNT = re.compile(
    rf"(?P<digits>(?<![A-Za-z0-9_.,])[+-]?(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?(?![\d,.]*[\dA-Za-z_])(?P<behind>\s*(?:[%/^*×:=e+-]|\\)\s*[\d{{]?|\s*%)?)"
    rf"|\b(?P<words>(?:(?:minus|negative)\s+)?{_WORDS}(?:(?:\s+and\s+|[\s-]+){_WORDS})*)\b"
    rf"|(?P<han>负?(?:[{_HAN}]+)(?:点[{_HAN}]+)?)",
    re.IGNORECASE,
)
_NO_COUNT = re.compile(
    r"\b(?:or|not|least|most|than|between|maybe|possibly|either|cannot|about|around|approximately|roughly|over|under|almost|nearly|some|several)\b"
    r"|n't\b|或|不是|至少|至多|大约|左右|超过|可能|[~≈<>≤≥±]",
    re.IGNORECASE,
)
_SECOND_COUNT = re.compile(
    r"(?<!the )(?<!in )(?<!of )(?<!\d)\d+(?:st|nd|rd|th)\b|\b[xX×]\s?\d|\d\s?[xX×](?![\w-])|\b(?=[VX]|I[IVX])X{0,3}(?:IX|IV|V?I{0,3})\b(?!-)",
)
"""Numbers that _COUNT passes over beside the one that it finds: ``4th``, ``x4``, ``IV``; not "the 2nd image", not "A4"."""
_NOT_COUNTS = re.compile(r"一共|一起|一张|一幅|[图画][片像中里]*[一二三]|第[零一二三四五六七八九十]+|\b(?:the|this|that|each|no|which|every)\s+one\b|\bone\s+of\b", re.IGNORECASE)
_NONE = re.compile(r"(?:there\s+(?:is|are)\s+)?(?:none|nothing|no\s+[a-z ]{1,40})\.?|没有.{0,12}|无", re.IGNORECASE)


def read_count(text: str) -> int | None:
    """The one whole number that an answer states, in digits or words, whatever is counted; None for none, several, or a guess."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}", r" \1 ", half_width(text).strip())
    text = re.sub(r"[$*`\"'{}]|\\[,;!() ]", " ", text).strip().rstrip(".!").strip()
    if not text or len(text) > MAX_COUNT_TEXT:
        return None
    if _NONE.fullmatch(text):
        return 0
    if _NO_COUNT.search(text) or _SECOND_COUNT.search(text):
        return None
    found = list(_COUNT.finditer(_NOT_COUNTS.sub(" ", text)))
    if len(found) != 1:
        return None
    match = found[0]
    if match["digits"]:
        return None if match["behind"] else _whole(match["digits"].replace(",", ""))
    return _whole(with_digits(match.group()).strip())


def _whole(text: str) -> int | None:
    """``3`` and ``3.0``, not ``3.5``; None also for numbers beyond any count."""
    match = re.fullmatch(r"([+-]?\d{1,15})(?:\.0+)?", text)
    return int(match.group(1)) if match else None


def _count_gold(ground_truth: Any) -> int:
    """Raises ValueError for a ground truth that is no whole number from 0."""
    gold = None
    if isinstance(ground_truth, (int, str)) and not isinstance(ground_truth, bool):
        gold = read_count(str(ground_truth))
    elif isinstance(ground_truth, float) and ground_truth.is_integer():
        gold = int(ground_truth)
    if gold is None or gold < 0:
        raise ValueError(f"ground_truth {ground_truth!r:.80} is no count; give a whole number from 0")
    return gold


def score_count(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """1.0 for exactly the number. Error for a ground truth that is no whole number from 0."""
    try:
        gold = _count_gold(ground_truth)
    except ValueError as error:
        return _error(str(error))
    pred = extract(solution_str)
    count = read_count(pred)
    return _right(count == gold, pred)


# ---------------------------------------------------------------- text and documents


def levenshtein(first: str, second: str) -> int:
    """Insertions, deletions and substitutions of characters that turn one text into the other."""
    row = list(range(len(second) + 1))
    for i, sign in enumerate(first, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(second, 1):
            before, row[j] = row[j], min(before + (sign != other), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def anls(gold: str, pred: str, threshold: float = THRESHOLD) -> float:
    """1 − distance / longer length of the texts in small letters with single spaces, or 0 below the threshold (1907.00490, eq. 1)."""
    gold, pred = (" ".join(text.lower().split()) for text in (gold, pred))
    longer = max(len(gold), len(pred))
    if longer == 0 or 1 - abs(len(gold) - len(pred)) / longer < threshold:  # no distance is less than the lengths' difference
        return 0.0
    similarity = 1 - levenshtein(gold, pred) / longer
    return similarity if similarity >= threshold else 0.0


def _bare(text: str) -> str:
    """An answer without what only marks it as one: quotation marks, ``\\text``, a final stop."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}", r"\1", text.strip())
    return text.strip(" \t\n\"'`*“”‘’「」").rstrip(".。").strip(" \"'`*“”‘’「」")


def _anls_row(ground_truth: Any, info: Mapping[str, Any]) -> tuple[list[str], float]:
    """(accepted texts, threshold). Raises ValueError when either is none."""
    ground_truth = math_verifier.listed(ground_truth)
    values = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    golds = [str(value) for value in values if isinstance(value, (str, int, float)) and not isinstance(value, bool) and str(value).strip()]
    if not golds or len(golds) != len(values) or any(len(gold) > MAX_GOLD for gold in golds):
        raise ValueError(f"ground_truth {ground_truth!r:.80}: expected a text or a list of texts, each of 1 to {MAX_GOLD} characters")
    return golds, _number(info, "threshold", THRESHOLD, most=1.0) or THRESHOLD


def score_anls(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The largest ANLS over the accepted texts; ok when it is not 0. Error without an accepted text."""
    info = extra_info if isinstance(extra_info, Mapping) else {}
    try:
        golds, threshold = _anls_row(ground_truth, info)
    except ValueError as error:
        return _error(str(error))
    pred = extract(solution_str)
    score = max(anls(gold, text, threshold) for gold in golds for text in {pred, _bare(pred)})
    return verdict("ok" if score > 0 else "wrong", score, pred, exact=float(score == 1.0))


# ---------------------------------------------------------------- boxes and points


def _scales(info: Mapping[str, Any]) -> tuple[str, str, float | None, float | None]:
    """(answer's coordinates, ground truth's, width, height). Raises ValueError for a setting that is none."""
    answer = _setting(info, "coordinates", "pixels")
    gold = _setting(info, "gt_coordinates", answer)
    for name, value in (("coordinates", answer), ("gt_coordinates", gold)):
        if value not in SCALES:
            raise ValueError(f"extra_info.{name} {value!r:.40}: expected one of {', '.join(SCALES)}")
    return answer, gold, _number(info, "width"), _number(info, "height")


def _golds(ground_truth: Any, size: int) -> list[Numbers]:
    """Raises ValueError for a ground truth without shapes, or with boxes that have no area."""
    found = shapes(ground_truth, size)
    if not found:
        raise ValueError(f"ground_truth {ground_truth!r:.80} holds no {'box [x1, y1, x2, y2]' if size == 4 else 'point [x, y]'}")
    broken = [box for box in found if size == 4 and not is_box(box)]
    if broken:
        raise ValueError(f"ground_truth box {list(broken[0])}: expected x1 < x2 and y1 < y2")
    return found


def _box_row(ground_truth: Any, info: Mapping[str, Any]) -> tuple[list[Numbers], float, tuple[str, str, float | None, float | None], str]:
    """(boxes, threshold, scales, what the score is). Raises ValueError for one that is none."""
    golds = _golds(ground_truth, 4)
    threshold = _number(info, "threshold", THRESHOLD, most=1.0) or THRESHOLD
    scales = _scales(info)
    by = _setting(info, "score", "threshold")
    if by not in ("threshold", "iou"):
        raise ValueError(f"extra_info.score {by!r:.40}: expected threshold or iou")
    rescaled((0.0, 0.0), *scales)
    return golds, threshold, scales, by


def _point_row(ground_truth: Any, info: Mapping[str, Any]) -> tuple[list[Numbers], float | None, tuple[str, str, float | None, float | None]]:
    """(boxes or points, radius, scales). Raises ValueError for one that is none."""
    radius, scales = _number(info, "radius"), _scales(info)
    golds = _golds(ground_truth, 4 if radius is None else 2)
    rescaled((0.0, 0.0), *scales)
    return golds, radius, scales


def score_box(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """1.0 when the boxes are as many as the ground truth's and each matches one of them by IoU >= ``extra_info.threshold``.

    ``iou``: the mean over the larger number of boxes; it is the score with ``extra_info.score`` "iou".
    """
    info = extra_info if isinstance(extra_info, Mapping) else {}
    try:
        golds, threshold, scales, by = _box_row(ground_truth, info)
    except ValueError as error:
        return _error(str(error))
    pred = answer_text(solution_str)
    found = [rescaled(box, *scales) for box in shapes(pred, 4) or []]
    if not found:
        return _right(False, pred, iou=0.0, boxes=0.0)
    overlaps = [[iou(gold, box) for box in found] for gold in golds]
    # As many matches as there can be, and of those ways the one with the largest overlap.
    weights = [[value + (len(golds) + 1) * (value >= threshold) for value in row] for row in overlaps]
    matched = [overlaps[row][column] for row, column in best_assignment(weights)]
    mean = sum(matched) / max(len(golds), len(found))
    hits = sum(value >= threshold for value in matched)
    right = hits == len(golds) == len(found)
    return verdict(
        "ok" if right else "wrong", mean if by == "iou" else float(right), pred,
        iou=mean, precision=hits / len(found), recall=hits / len(golds), boxes=float(len(found)),
    )  # fmt: skip


def score_point(solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """1.0 for one point inside (or on the border of) any of the ground truth's boxes; with ``extra_info.radius``, in the ground
    truth's coordinates, for one at most so far from any of its points."""
    info = extra_info if isinstance(extra_info, Mapping) else {}
    try:
        golds, radius, scales = _point_row(ground_truth, info)
    except ValueError as error:
        return _error(str(error))
    pred = answer_text(solution_str)
    found = shapes(pred, 2) or []
    if len(found) != 1:
        return _right(False, pred, points=float(len(found)))
    x, y = rescaled(found[0], *scales)
    if radius is None:
        right = any(gold[0] <= x <= gold[2] and gold[1] <= y <= gold[3] for gold in golds)
    else:
        right = any(math.hypot(x - gold[0], y - gold[1]) <= radius for gold in golds)
    return _right(right, pred, points=1.0)


SUBTYPES: dict[str, VisionScorer] = {
    "math": score_math,
    "choice": score_choice,
    "count": score_count,
    "anls": score_anls,
    "box": score_box,
    "point": score_point,
}


def check_row(subtype: str, ground_truth: Any, extra_info: Mapping[str, Any] | None) -> None:
    """Raise DataError for a row of a subtype (of SUBTYPES) that no answer could be right for. Reads texts only, no SymPy."""
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
    """The scorer of ``vision/<subtype>`` and ``vision/<subtype>/<anything>``. Raises DataError for another subtype."""
    slash, _, name = rest.partition("/")
    subtype = name.partition("/")[0]
    if slash or subtype not in SUBTYPES:
        raise DataError(f"data_source 'vision{rest}' has no verifier; it is vision/<subtype> with one of {', '.join(SUBTYPES)}, or set reward.path")
    if subtype in ("math", "choice"):
        math_verifier.scorer("")  # imports SymPy and math-verify before an answer waits for them
    return SUBTYPES[subtype]
