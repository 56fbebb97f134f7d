"""Options that are named beside others that are refused: "B, not A", "Not A, so B", A不对，选B, "A and C but not B";
and those that a sentence of its own or a JSON object names: "I choose B", "B is the answer", ``{"answer": "B"}``."""

from __future__ import annotations

import json
import re

from megarl.explore.rewards.answer.normalize import half_width
from megarl.explore.rewards.school import read as k12_read

MAX_TEXT = 80
_NAME = r"(?:options?\s*|选项\s*)?\(?(?<![A-Za-z])[A-H](?![A-Za-z])\)?(?:\s*选?项)?"
_NAMES = rf"{_NAME}(?:\s*(?:,|、|\bor\b|\band\b|\bnor\b|和|或|与)\s*{_NAME})*"
_WRONG = (
    r"(?:(?:is|are)\s+(?:wrong|incorrect|false|not\s+(?:right|"
    r"correct|true))|(?:是|都|均|全)?(?:不对|错误?的?|不正确|不符合?(?:题意)?|不成立|不选))"
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
_OTHERS_REFUSED = re.compile(
    rf"\s*[,;]?\s*(?:(?:and|while)\s+)?(?:(?:(?:all\s+)?the\s+)?(?:others?|rest)(?:\s+options?)?|其[余他它](?:选?项|各项)?)\s*{_WRONG}$",
    re.IGNORECASE,
)
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
    text = _OTHERS_REFUSED.sub("", text)
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


_SO = re.compile(r"\W*(?:so|thus|therefore|hence|finally|故|所以|因此|综上|可见)", re.IGNORECASE)


def settled_last(pred: str, text: str) -> set[str] | None:
    """``settled`` of an answer, or else of the last line of its text.

    None where an earlier line settles on other letters and the last draws no conclusion: "A is right" and "B is right"
    are two judgements.
    """
    *before, last = text.split("\n")
    found = settled(pred) or settled(last)
    if found and before and not _SO.match(last) and any((settled(line) or found) != found for line in before[-20:]):
        return None
    return found


_ADJECTIVE = r"(?:(?:final|correct|right|best)\s+)?"
_NOUN = r"(?:answer|option|choice)"
_ONE = rf"(?:(?:the\s+)?{_ADJECTIVE}{_NOUN}\s+)?\(?(?-i:([A-H]))(?![\w'’])\)?"
_REASON = r"(?:,?\s+(?:because|since|as|given\s+that)\s+(?!well\b)(?P<reason>[^?？]+))?"
_CONCLUSION = re.compile(
    r"(?:(?:(?:and\s+)?(?:so|thus|therefore|hence|then)|finally|overall|in\s+conclusion)\s*,?\s+)?"
    r"(?:(?:I|we)\s+(?:think|believe|conclude)\s+(?:that\s+)?)?(?:"
    rf"{_ONE}\s+(?:is|must\s+be)\s+(?:the|my|our)\s+{_ADJECTIVE}{_NOUN}"
    rf"|(?:I|we)(?:['’](?:d|ll)|\s+(?:would|will))?\s+(?:choose|chose|pick|select|go\s+with)\s+{_ONE}"
    rf"|(?:it|that)(?:['’]s|\s+is|\s+must\s+be)\s+{_ONE}"
    rf"){_REASON}",
    re.IGNORECASE,
)
_WITH_REASON = re.compile(rf"{_ONE}{_REASON}", re.IGNORECASE)
_SENTENCES = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_ALONE = re.compile(r"(?<![A-Za-z])(?:A(?![A-Za-z]|\s+[a-z])|[B-H](?![A-Za-z]))")
_FENCED = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)
_BESIDE = {"reason", "reasoning", "explanation", "rationale", "thought", "thoughts", "thinking"}
"""Names that a JSON object may have beside ``answer``."""


def concluded(line: str) -> str:
    """The letter that the last sentence of a line is there to name: "So it's B." '' for none, and where the line names
    other letters too."""
    line = half_width(line).replace("**", "").strip()
    *_, last = _SENTENCES.split(line)
    match = _CONCLUSION.fullmatch(last.rstrip(".! "))
    return _sole(match, line)


def with_reason(pred: str) -> str:
    """``B`` of "B, as 2+3=5"; '' for a reason that names other letters, and for anything else."""
    pred = half_width(pred).strip()
    return _sole(_WITH_REASON.fullmatch(pred), pred)


def _sole(match: re.Match[str] | None, text: str) -> str:
    if match is None:
        return ""
    reason = match.re.groupindex["reason"]
    letter = next(found for number, found in enumerate(match.groups(), 1) if found and number != reason)
    return "" if set(_ALONE.findall(text)) - {letter} else str(letter)


def of_object(text: str) -> str:
    """The answer of a text that is a JSON object with an ``answer``, perhaps fenced; '' for any other text."""
    text = text.strip()
    fenced = _FENCED.fullmatch(text)
    try:
        pairs = json.loads(fenced[1] if fenced else text, object_pairs_hook=list)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        return ""
    answers = [value for name, value in pairs if name == "answer"]
    if len(answers) != 1 or not isinstance(answers[0], str) or not {name for name, _ in pairs} <= {"answer", *_BESIDE}:
        return ""
    return answers[0]
