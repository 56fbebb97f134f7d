"""Options that are named beside others that are refused: "B, not A", "Not A, so B", A不对，选B, "A and C but not B"."""

from __future__ import annotations

import re

from megarl.explore.rewards.answer.normalize import half_width
from megarl.explore.rewards.school import read as k12_read

MAX_TEXT = 80
_NAME = r"(?:options?\s*|选项\s*)?\(?(?<![A-Za-z])[A-H](?![A-Za-z])\)?"
_NAMES = rf"{_NAME}(?:\s*(?:,|、|\bor\b|\band\b|\bnor\b|和|或|与)\s*{_NAME})*"
_WRONG = (
    r"(?:(?:is|are)\s+(?:wrong|incorrect|false|not\s+(?:right|"
    r"correct|true))|(?:是|都)?(?:不对|错误?的?|不正确|不符合?(?:题意)?|不成立|不选))"
)
_REFUSED = re.compile(
    r"[,;(]?\s*(?:\b(?:but|and)\s+)?(?:\b(?:it\s+is\s+|it's\s+)?(?:not|"
    rf"rather\s+than|instead\s+of)\b|而?非|而?不是|而?不选|排除)\s*(?P<refused>{_NAMES})\s*\)?"
    rf"|(?P<wrong>{_NAMES})\s*{_WRONG}",
    re.IGNORECASE,
)
_AFFIRMED = re.compile(
    rf"({_NAME})\s*(?:is\s+(?:the\s+)?(?:correct|right)(?:\s+(?:answer|option|choice))?|是?(?:正确|对)的?(?:答案"
    r"|选项)?|符合题意)$",
    re.IGNORECASE,
)
_JUDGED = re.compile(
    r"(?:\b(?:is|are|also)\s+(?:\w+\s+){0,2}(?:correct|right|wrong|incorrect|false|true)\b|正确|错误|不对|"
    r"\b(?:it\s+is|it's|options?|choose)\s+\(?[A-H](?![A-Za-z])|选项?\s*[A-H])",
    re.IGNORECASE,
)
"""Found behind ``A.`` where that is no option's text: "A. Option B is correct"."""
_LEAD = re.compile(
    r"^(?:[\s,;.:]|\b(?:so|but|therefore|thus|hence|it\s+is|it's|"
    r"choose|the\s+answer\s+is)\b|而是|所以|因此|故|应该?|选(?!项)择?|答案|是|为)+",
    re.IGNORECASE,
)


def settled(text: str) -> set[str] | None:
    """The letters that a text names besides those that it refuses; None where it says more, or takes back what it
    names."""
    text = half_width(text).strip().rstrip(".。! ")
    if len(text) > MAX_TEXT:
        return None
    refused = {
        letter
        for match in _REFUSED.finditer(text)
        for letter in re.findall("[A-H]", match["refused"] or match["wrong"] or "")
    }
    rest = _LEAD.sub("", _REFUSED.sub(" ", text)).strip().rstrip(",;. ")
    if re.match(r"(?:and|or|nor)\b|[和与或]", rest):  # "A is wrong and B"
        return None
    affirmed = _AFFIRMED.fullmatch(rest)
    names = k12_read.letters(affirmed[1] if affirmed else rest) if refused or affirmed else None
    if not names or refused & set(names) or (not affirmed and _JUDGED.search(k12_read.after_letter(rest))):
        return None
    return set(names)
