"""Compare two short school answers: words, chemical formulas, orders, relations, dates, measures, mathematics."""

from __future__ import annotations

import re

from megarl.rewards.answer import chemistry, measures, relations, selections, trace
from megarl.rewards.answer.normalize import half_width
from megarl.rewards.answer.numerals import with_digits
from megarl.rewards.math.compare import equal
from megarl.rewards.school import read as k12_read

MAX_PREDICTION = 2000
_VERSE = re.compile(r"\W*[一-鿿]{4,}(?:[,.;:?!]+[一-鿿]{4,})+\W*")
_SENTENCE = re.compile(r"\W*(?:[A-Za-z'-]+[,;:—]?\s+){4,}[A-Za-z'-]+[.?!]\W*")

_CELSIUS = re.compile(r"℃|°\s*C|\bCelsius\b|摄氏度|\\circ\s*\}?\s*(?:\\(?:text|mathrm)\s*\{\s*)?C")
_DEGREES = re.compile(r"([-+]?\d+(?:\.\d+)?)\s*(?:C|°)")
_RATIO = re.compile(r"\d+\s*:\s*\d+")
_RATIO_IN_WORDS = re.compile(r"(\d+)\s*(?:比|to)\s*(\d+)")


_DOTS = r"(?:…{1,2}|⋯{1,2}|\.{3,6}|·{3,6}|\\[lc]?dots\s*(?:\\[lc]?dots)?)"
_DIVISION = re.compile(
    r"(?:(?P<dividend>\d+)\s*(?:÷|/|\\div)\s*(?P<divisor>\d+)\s*=\s*)?(?:商(?:是|为)?|(?:the\s+)?quotient(?:\s+(?:is|of))?:?\s*)?"
    r"\s*(?P<quotient>\d+)\s*[,，、;]?\s*(?:and\s+|with\s+)?(?:an?\s+|the\s+)?"
    rf"(?:{_DOTS}|余数?(?:是|为)?|remainder(?:\s+(?:is|of))?:?|rem\.?|r\.?)\s*(?P<remainder>\d+)",
    re.IGNORECASE,
)

_REST = re.compile(r"\d.*?(?:[…⋯余Rr]|\.\.|··|dots).*\d")


def _division(text: str) -> tuple[int, int] | None:
    """Return (quotient, remainder) of ``7……2``, 7余2, "7 remainder 2" or "7 R 2"; None for other text."""
    if len(text) >= 80 or not _REST.search(text):
        return None
    match = _DIVISION.fullmatch(re.sub(r"\$|\\text\s*\{([^{}]*)\}", r"\1", text).strip().rstrip(".。"))
    if match is None:
        return None
    quotient, remainder = int(match["quotient"]), int(match["remainder"])
    if match["dividend"] and int(match["dividend"]) != quotient * int(match["divisor"]) + remainder:
        return None
    return quotient, remainder


def states_division(gold: str, line: str) -> bool:
    """Return True if a whole line is the division with remainder ``gold``: 商是7，余数是2."""
    return bool(division := _division(gold)) and _division(line) == division


def _as_asked(gold: str, pred: str) -> str:
    """Rewrite a prediction in the ground truth's notation: ``25 C`` as 25 °C, ``3比4`` as 3:4."""
    if _CELSIUS.search(gold) and (degrees := _DEGREES.fullmatch(half_width(pred).strip())):
        return f"{degrees[1]} ℃"
    if _RATIO.fullmatch(half_width(gold).strip()) and (ratio := _RATIO_IN_WORDS.fullmatch(half_width(pred).strip())):
        return f"{ratio[1]}:{ratio[2]}"
    return pred


def same_short(gold: str, pred: str, convert: bool = True) -> bool:
    """Return True for the same words, number, date or formula. ``convert``: accept another unit of the same
    dimension."""
    if not gold.strip() or not pred.strip() or len(pred) > MAX_PREDICTION:
        return False
    if gold.strip() == pred.strip():
        return trace.compared("same text", gold, pred, True)
    if division := _division(gold):
        same = _division(pred) == division or k12_read.plain(gold) == k12_read.plain(pred)
        return trace.compared("division with remainder", gold, pred, same)
    pred = _as_asked(gold, pred)
    if chemistry.may_be(gold) and (formula := chemistry.chemical(gold)):
        return trace.compared("chemical formula", gold, pred, chemistry.same(formula, chemistry.read(pred)))
    if (said := k12_read.plain(gold)) == k12_read.plain(pred):
        return trace.compared("words", gold, pred, bool(said) and not re.fullmatch(r"[A-Za-z]", gold.strip()))
    if recited(gold):
        same = "/" in pred and said == k12_read.plain(re.sub(r"\s*/+\s*", ",", pred))
        return trace.compared("lines of a text", gold, pred, same)
    for rule, compare in (("order", selections.compare), ("relation", relations.compare)):
        verdict = compare(gold, pred, same_short)
        if verdict is not None:
            return trace.compared(rule, gold, pred, verdict)
    dates = k12_read.date(gold), k12_read.date(pred)
    if dates[0] and dates[1]:
        return trace.compared("date", gold, pred, k12_read.same_date(dates[0], dates[1]))
    clocks = k12_read.clock(gold), k12_read.clock(pred)
    if clocks[0] and clocks[1]:
        return trace.compared("time of day", gold, pred, clocks[0] == clocks[1])
    gold, pred = with_digits(relations.formula(gold)), with_digits(relations.formula(pred))
    measured = measures.same(gold, pred, convert)
    return equal(gold, pred) if measured is None else trace.compared("measure", gold, pred, measured)


def recited(text: str) -> bool:
    """Return True for lines of a text or a whole sentence, where word order counts: not a list, not mathematics."""
    text = half_width(text.replace("、", "\0"))
    return bool(_VERSE.fullmatch(text) or _SENTENCE.fullmatch(text))
