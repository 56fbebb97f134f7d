"""Numerals in English and Chinese words: a dozen, three quarters, one and a half, 二又二分之一, 百分之二十五."""

from __future__ import annotations

import functools
import re
from fractions import Fraction

from megarl.rewards.answer import units
from megarl.rewards.answer.normalize import MAX_DIGITS, clean
from megarl.rewards.answer.units import NUMERALS

TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_VALUES = {name: value for value, name in enumerate(NUMERALS)} | {name: 10 * (k + 2) for k, name in enumerate(TENS)}
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PARTS = {
    2: "half halves",
    3: "third thirds",
    4: "quarter quarters fourth fourths",
    5: "fifth fifths",
    6: "sixth sixths",
    7: "seventh sevenths",
    8: "eighth eighths",
    9: "ninth ninths",
    10: "tenth tenths",
    100: "hundredth hundredths",
}
_DENOMINATORS = {name: value for value, names in _PARTS.items() for name in names.split()}
_COUNTS = {
    "half a dozen": 6,
    "half dozen": 6,
    "a half dozen": 6,
    "a dozen": 12,
    "dozen": 12,
    "one dozen": 12,
    "a single one": 1,
    "a single": 1,
    "only one": 1,
    "just one": 1,
    "a pair of": 2,
    "a pair": 2,
    "one pair": 2,
    "a couple of": 2,
    "a couple": 2,
    "a trio of": 3,
    "a trio": 3,
}
"""Counts that a noun may follow: ``a dozen eggs``."""
_ALONE = {
    "single": Fraction(1),
    "half": Fraction(1, 2),
    "a half": Fraction(1, 2),
    "hundred": Fraction(100),
    "一半": Fraction(1, 2),
    "单个": Fraction(1),
}

_UNIT = f"(?:{'|'.join(NUMERALS[1:10])})"
_BELOW_100 = f"(?:(?:{'|'.join(TENS)})(?: {_UNIT})?|{'|'.join(NUMERALS[10:])}|{_UNIT}|zero)"
_BELOW_1000 = rf"(?:(?:{_BELOW_100}|an?) hundred(?: (?:and )?{_BELOW_100})?|{_BELOW_100})"
_INTEGER = (
    rf"(?:(?:(?:{_BELOW_1000}|an?) (?:{'|'.join(_SCALES)}) (?:and )?)*(?:{_BELOW_1000}|an?) (?:{'|'.join(_SCALES)})(?: "
    rf"(?:and )?{_BELOW_1000})?|{_BELOW_1000})"
)
_DENOMINATOR = f"(?:{'|'.join(_DENOMINATORS)})"
_ENGLISH = (
    rf"(?P<sign>(?:minus|negative) )?(?:"
    rf"(?P<counted>{'|'.join(sorted(_COUNTS, key=len, reverse=True))})"
    rf"|(?P<top>{_INTEGER}|an?) (?P<bottom>{_DENOMINATOR})"
    rf"|(?P<whole>{_INTEGER}|\d+)(?P<decimal> point(?: (?:{'|'.join(NUMERALS[:10])}))+)?(?: and "
    rf"(?P<more>{_INTEGER}|an?) (?P<of>{_DENOMINATOR}))?(?P<dozen> dozen)?"
    rf")(?![\w-])"
)

_HAN_DIGITS = {sign: value for value, sign in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_HAN_UNITS = {"十": 10, "百": 100, "千": 1000, "万": 10**4, "亿": 10**8}
_FORMAL = str.maketrans("壹贰叁肆伍陆柒捌玖拾佰仟", "一二三四五六七八九十百千")
_SIGNS = "零〇一二两三四五六七八九十百千万亿"
_NUMERAL = f"[{_SIGNS}]+"
_TOO_LONG = re.compile(rf"[{_SIGNS}]{{41}}")
"""Numerals too long to be plausible; their values could have thousands of digits."""
_HAN = re.compile(
    rf"(?P<sign>负)?(?:(?P<share>百分之|千分之)(?P<shared>{_NUMERAL}|\d+(?:\.\d+)?)"
    rf"|(?:(?P<mixed>{_NUMERAL}|\d+)又)?(?P<low>{_NUMERAL}|\d+)分之(?P<high>{_NUMERAL}|\d+)"
    rf"|(?P<whole>{_NUMERAL})(?:点(?P<decimal>[零〇一二三四五六七八九]+))?(?P<half>个半(?=$|小时|钟头|月))?)"
)
_HAN_COUNTS = (
    (re.compile("^(一[对双]|俩)(?=$|[一-鿿]{1,3}$)"), "两个"),
    (re.compile("^仨(?=$|[一-鿿]{1,3}$)"), "三个"),
    (re.compile("^半打(?=$|[一-鿿]{1,3}$)"), "六个"),
)
_HAN_DOZEN = re.compile(f"({_NUMERAL})打(?=$|[一-鿿]{{1,3}}$)")


@functools.cache
def _english_pattern() -> re.Pattern[str]:
    """Compile the pattern at its first use: compiling takes a tenth of a reward worker's start."""
    return re.compile(_ENGLISH)


def with_digits(text: str) -> str:
    """Replace a numeral in words, with at most a short unit after it, by digits; return other texts unchanged."""
    cleaned = clean(text)
    if (alone := _ALONE.get(cleaned.lower())) is not None:
        return str(alone)
    if len(cleaned) > MAX_DIGITS or _TOO_LONG.search(cleaned.translate(_FORMAL)):
        return text
    if re.search(r"[一-鿿〇]", cleaned):
        return _chinese(cleaned.translate(_FORMAL)) or text
    return _english(cleaned) or text if re.match(r"[A-Za-z]|\d+ (?:and|dozen)\b", cleaned) else text


def _english(text: str) -> str | None:
    match = _english_pattern().match(re.sub(r"(?<=[A-Za-z])-(?=[A-Za-z])", " ", text.lower()))
    value = _english_value(match) if match else None
    if match is None or value is None:
        return None
    return f"{'-' if match['sign'] else ''}{value} {text[match.end() :].lstrip()}".strip()


def _english_value(match: re.Match[str]) -> Fraction | None:
    if match["counted"]:
        return Fraction(_COUNTS[match["counted"]])
    if match["top"]:
        return _share(match["top"], match["bottom"])
    value = Fraction(match["whole"]) if match["whole"].isdigit() else Fraction(_sum(match["whole"]))
    if match["decimal"]:
        digits = "".join(str(_VALUES[name]) for name in match["decimal"].split()[1:])
        value += Fraction(int(digits), 10 ** len(digits))
    if match["more"]:
        more = _share(match["more"], match["of"])
        if more is None:
            return None
        value += more
    return value * 12 if match["dozen"] else value


def _share(top: str, name: str) -> Fraction | None:
    """Return the value of ``two thirds`` or ``a third``; None for the ordinal ``twenty third``."""
    value = _sum(top)
    single = value == 1
    plural = name.endswith("s")
    return Fraction(value, _DENOMINATORS[name]) if single != plural else None


def _sum(names: str) -> int:
    total = group = 0
    for name in names.split():
        if name == "hundred":
            group = (group or 1) * 100
        elif name in _SCALES:
            total, group = total + (group or 1) * _SCALES[name], 0
        elif name in ("a", "an"):
            group = 1
        elif name != "and":
            group += _VALUES[name]
    return total + group


def _chinese(text: str) -> str | None:
    for pattern, numeral in _HAN_COUNTS:
        text = pattern.sub(numeral, text)
    if dozens := _HAN_DOZEN.match(text):
        return f"{12 * _han(dozens[1])}{text[dozens.end() :]}"
    match = _HAN.match(text)
    rest = text[match.end() :] if match else ""
    if match is None or (re.search(rf"[{_SIGNS}]", rest) or len(rest) > 3) and not units.unit_of(rest):
        return None
    sign = "-" if match["sign"] else ""
    if match["share"]:
        number = _number(match["shared"])
        return f"{sign}{number}%{rest}" if match["share"] == "百分之" else f"{sign}{number}/1000{rest}"
    if match["low"]:
        low, high, whole = (int(_number(match[name] or "零")) for name in ("low", "high", "mixed"))
        return f"{sign}{whole * low + high}/{low}{rest}"
    whole = _han(match["whole"])
    if match["half"]:
        return f"{sign}{whole}.5{rest}"
    decimal = "".join(str(_HAN_DIGITS[digit]) for digit in match["decimal"] or "")
    return f"{sign}{whole}{'.' + decimal if decimal else ''}{rest}"


def _number(text: str) -> str:
    return text if text[0].isdigit() else str(_han(text))


def _han(numeral: str) -> int:
    if not set(numeral) & set(_HAN_UNITS):
        return int("".join(str(_HAN_DIGITS[sign]) for sign in numeral))
    total = section = 0
    digit: int | None = None
    last = 10
    for sign in numeral:
        if sign in "万亿":
            total = (total + section + (digit or 0) or 1) * _HAN_UNITS[sign]
            section, digit, last = 0, None, _HAN_UNITS[sign]
        elif sign in _HAN_UNITS:
            section += (digit or 1) * _HAN_UNITS[sign]
            digit, last = None, _HAN_UNITS[sign]
        else:
            digit = _HAN_DIGITS[sign]
            last = last if digit else 10
    return (
        total + section + (digit or 0) * (last // 10 if numeral[-1] in _HAN_DIGITS and numeral[-2] in _HAN_UNITS else 1)
    )
