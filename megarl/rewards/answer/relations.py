"""Read relation signs in English and Chinese words: ``is greater than``, 大于, ``平行``; also reversed comparisons."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from megarl.rewards.answer.normalize import half_width

_WORDS: tuple[tuple[str, str], ...] = (
    (
        "≥",
        r"(?:greater|larger|bigger|more)\s+than\s+or\s+equal\s+to|"
        r"at\s+least|(?:not|no)\s+(?:less|smaller|fewer)\s+than|大于(?:或者?)?等于|不小于|不少于|不低于",
    ),
    (
        "≤",
        r"(?:less|smaller|fewer)\s+than\s+or\s+equal\s+to|at\s+most|"
        r"(?:not|no)\s+(?:greater|more|larger|bigger)\s+than|小于(?:或者?)?等于|不大于|不多于|不超过|不高于",
    ),
    ("≠", r"not\s+equal(?:\s+to)?|unequal\s+to|不等于|不相等"),
    ("≈", r"approximately\s+equal\s+to|约等于"),
    (">", r"(?:greater|larger|bigger|more)\s+than|大于"),
    ("<", r"(?:less|smaller|fewer)\s+than|小于"),
    ("∥", r"(?<!not )parallel(?:\s+to)?|(?<!不)(?:互相)?平行于?"),
    ("⊥", r"(?<!not )perpendicular(?:\s+to)?|(?<!不)(?:互相)?垂直于?"),
    ("=", r"(?<!not )(?:equal\s+to|equals?)|(?<!不)(?<!约)等于"),
)
_COMMANDS = (
    (">", r"\\gt(?![a-z])"),
    ("<", r"\\lt(?![a-z])"),
    ("≥", r"\\geq?(?:slant)?(?![a-z])|>=|⩾"),
    ("≤", r"\\leq?(?:slant)?(?![a-z])|<=|⩽"),
    ("≠", r"\\neq?(?![a-z])|!="),
    ("≈", r"\\approx(?![a-z])"),
    ("∥", r"\\parallel(?![a-z])|//|‖"),
    ("⊥", r"\\perp(?![a-z])"),
)
_SIGNS = "".join(sign for sign, _ in _WORDS)
_TURNED = {">": "<", "<": ">", "≥": "≤", "≤": "≥"}
_LATEX = {"≥": r"\geq ", "≤": r"\leq ", "≠": r"\neq ", "≈": r"\approx "}
_WORD = re.compile("|".join(pattern for _, pattern in _WORDS))
_SAID = [(re.compile(rf"(?:\b(?:is|are|was)\s+)?(?:{pattern})"), sign) for sign, pattern in _WORDS]
_WRITTEN = [(re.compile(pattern), sign) for sign, pattern in _COMMANDS]
_BETWEEN = re.compile(r"(\S+?)\s*[与和]\s*(\S+?)\s*(?:互相)?(平行|垂直|相等)")
_DRESS = re.compile(r"\$|\\[()\[\],;! ]|\*\*|`|[\"']|\\(?:text|mathrm|mbox)\s*(?=\{)")
_SPACED = re.compile(rf"\s*([{_SIGNS}])\s*")
_FORMULA = re.compile(r"[^一-鿿]*")


@functools.lru_cache(maxsize=64)
def _signed(text: str) -> str:
    """Replace words by signs; apart from spaces nothing else changes. Cached: a comparison reads each text twice."""
    text = _DRESS.sub(" ", half_width(text)).strip().rstrip(".").strip()
    for pattern, sign in _WRITTEN:
        text = pattern.sub(sign, text)
    if match := _BETWEEN.fullmatch(text):
        text = f"{match[1]}{ {'平行': '∥', '垂直': '⊥', '相等': '='}[match[3]] }{match[2]}"
    for pattern, sign in _SAID:
        text = pattern.sub(sign, text)
    return _SPACED.sub(r"\1", text.strip(" {}"))


def in_words(text: str) -> bool:
    return bool(_WORD.search(text))


def formula(text: str) -> str:
    """Return ``x\\leq 5`` for "x is at most 5"; a text with remaining words is unchanged."""
    signed = _signed(text)
    if not in_words(text) or len(signed) < 2 or re.search(r"[一-鿿]|(?<!\\)\b[a-zA-Z]{4,}", signed):
        return text
    return re.sub("[≥≤≠≈]", lambda sign: _LATEX[sign.group()], signed)


def compare(gold: str, pred: str, same: Callable[[str, str], bool]) -> bool | None:
    """Return True if ``pred`` is the sign or comparison ``gold``, perhaps reversed or in words. None if either is no
    comparison of two plain sides, or the sides differ (False for ∥ and ⊥)."""
    if len(gold) > 80 or len(pred) > 160:
        return None
    ours = _signed(gold)
    if ours and len(ours) == 1 and ours in _SIGNS:
        return _signed(pred) == ours
    first, second = (re.split(rf"([{_SIGNS}])", text) for text in (ours, _signed(pred)))
    if len(first) != 3 or not first[0] or not first[2]:
        return None
    if len(second) != 3 or not all(_plain(part) for part in (*first, *second)):
        return None
    if first[1] == second[1] and same(first[0], second[0]) and same(first[2], second[2]):
        return True
    turned = _TURNED.get(first[1], first[1]) == second[1]
    if turned and same(first[0], second[2]) and same(first[2], second[0]):
        return True
    return False if first[1] in "∥⊥" else None


def _plain(part: str) -> bool:
    """Return True for a name, number or formula, False for words."""
    return bool(part) and not re.search(r"[一-鿿]|(?<!\\)\b[a-zA-Z]{4,}|\b(?:not|or)\b", part)
