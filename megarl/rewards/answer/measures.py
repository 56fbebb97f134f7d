"""Quantities: numerals in English and Chinese words, and conversion between units of one dimension.

Exact, without rounding.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fractions import Fraction

from megarl.rewards.answer import units
from megarl.rewards.answer.normalize import MAX_DIGITS, clean, quantity
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

_UNIT_NUMERAL = f"(?:{'|'.join(NUMERALS[1:10])})"
_BELOW_100 = f"(?:(?:{'|'.join(TENS)})(?: {_UNIT_NUMERAL})?|{'|'.join(NUMERALS[10:])}|{_UNIT_NUMERAL}|zero)"
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


_TABLE = """
length: nm 1e-9 um 1e-6 mm 1e-3 cm 1e-2 dm 1e-1 m 1 km 1e3 in 0.0254 ft 0.3048 yd 0.9144 mi 1609.344
mass: ug 1e-9 mg 1e-6 g 1e-3 kg 1 t 1e3 jin 0.5 oz 0.028349523125 lb 0.45359237
time: ms 1e-3 s 1 min 60 h 3600 day 86400 week 604800
calendar: month 1 year 12
dollar: cent 0.01 $ 1
yuan: fen 0.01 jiao 0.1 ¥ 1
force: N 1 kN 1e3
energy: J 1 kJ 1e3
power: W 1 kW 1e3 MW 1e6
voltage: mV 1e-3 V 1 kV 1e3
current: mA 1e-3 A 1
resistance: ohm 1 kohm 1e3
frequency: Hz 1 kHz 1e3 MHz 1e6
pressure: Pa 1 kPa 1e3 MPa 1e6
amount: mmol 1e-3 mol 1
"""
_BASE: dict[str, tuple[str, int, Fraction]] = {
    "ml": ("length", 3, Fraction(1, 10**6)),
    "l": ("length", 3, Fraction(1, 1000)),
    "ha": ("length", 2, Fraction(10**4)),
}
"""Symbol -> (dimension, its power, factor to the base unit)."""
for _line in _TABLE.strip().splitlines():
    _dimension, _, _rest = _line.partition(": ")
    _pairs = _rest.split()
    _BASE |= {
        symbol: (_dimension, 1, Fraction(factor)) for symbol, factor in zip(_pairs[::2], _pairs[1::2], strict=True)
    }
_PIECE = re.compile(r"([^\^/]+?)(?:\^(-?\d))?(?=/|$)")
_SEGMENT = re.compile(r"(\d[\d,]*(?:\.\d+)?)\s*([^\d,;]+?)(?:\s*(?:,|\band\b|零|又)\s*)?(?=\d|$)")


_JOINED = re.compile(r"(?<=\d)([mgLlhstNJWVA])(?=\b|\^)")
"""``5m``; outside measures this is a product."""


@dataclass(frozen=True)
class Measure:
    value: Fraction
    """Value in the dimension's base unit."""
    dimension: str
    unit: str
    """Unit as written; several units are joined by +, for example of "1 h 30 min"."""


def _factor(symbol: str) -> tuple[Fraction, str] | None:
    """Return (factor, dimension) of ``cm^2`` or ``km/h``; None for a unit that cannot be converted."""
    factor, dimensions = Fraction(1), []
    for index, part in enumerate(symbol.split("/")):
        match = _PIECE.fullmatch(part)
        if match is None or match[1] not in _BASE:
            return None
        dimension, power, base = _BASE[match[1]]
        times = int(match[2] or 1) * (-1 if index else 1)
        factor *= base**times
        dimensions.append(f"{dimension}{power * times}")
    return factor, " ".join(dimensions)


def ratio(unit: str, other: str) -> Fraction | None:
    """Return the number of ``unit`` in one ``other``; None if the units have different dimensions."""
    first, second = _factor(unit), _factor(other)
    return second[0] / first[0] if first and second and first[1] == second[1] else None


def read(text: str, money: bool = False) -> Measure | None:
    """Read a number with a convertible unit, or several ("1 h 30 min"). ``money``: 分 is a hundredth of 元, not a
    minute."""
    cleaned = _JOINED.sub(r" \1", clean(text))
    cleaned = re.sub(r"(?<=\d) ?(A|t)$", lambda unit: " amp" if unit[1] == "A" else " ton", cleaned)
    if not re.search(r"\d", cleaned) or len(cleaned) > 80:
        return None
    money = money or bool(re.search(r"[元角块¥]", cleaned))
    return _one(cleaned, money) or _several(cleaned, money)


def _one(text: str, money: bool) -> Measure | None:
    if money and (fen := re.fullmatch(r"(\d+(?:\.\d+)?)\s*分钱?", text)):
        return Measure(Fraction(fen[1]) / 100, "yuan1", "fen")
    found = quantity(text)
    if found is None or not found.unit or found.percent or found.written:
        return None
    base = _factor(found.unit)
    return None if base is None else Measure(found.value * base[0], base[1], found.unit)


def _several(text: str, money: bool) -> Measure | None:
    """Read ``1 h 30 min``: ever smaller units of one dimension, each part below one of the unit before it."""
    at = 0
    parts: list[Measure] = []
    for match in _SEGMENT.finditer(text):
        part = _one(f"{match[1]} {match[2]}", money) if match.start() == at else None
        if part is None or (parts and (part.dimension != parts[-1].dimension or part.value >= _unit_value(parts[-1]))):
            return None
        parts.append(part)
        at = match.end()
    if at != len(text) or len(parts) < 2 or any(re.search(r"[\^/]", part.unit) for part in parts):
        return None
    return Measure(
        sum((part.value for part in parts), Fraction(0)), parts[0].dimension, "+".join(part.unit for part in parts)
    )


def _unit_value(measure: Measure) -> Fraction:
    return _BASE[measure.unit][2]


def same(gold: str, pred: str, convert: bool) -> bool | None:
    """Return True if two measures are equal; None if either is no measure, or the units are equal but the values differ
    (other comparisons then decide).

    ``convert``: the question accepts any unit.
    """
    first = read(gold)
    second = None if first is None else read(pred, first.dimension == "yuan1")
    if first is None or second is None:
        return None
    if first.unit == second.unit and "+" not in first.unit:
        return first.value == second.value or None
    return convert and first.dimension == second.dimension and first.value == second.value


_ASKABLE = sorted(
    (
        name
        for name, symbol in units.names().items()
        if symbol in _BASE and len(name) + (name >= "一") > 1 or name == "m"
    ),
    key=len,
    reverse=True,
)
_UNIT = (
    rf"(?:(?:square|cubic|平方|立方)\s*)?(?:{'|'.join(map(re.escape, _ASKABLE))})(?:\^?\{{?[23]\}}?|[²³])?(?![A-Za-z])"
)
_ASKED = re.compile(
    r"\b(?:in|into|to|nearest|many|much)\s+(?:the\s+nearest\s+|"
    rf"whole\s+)?{_UNIT}|(?:多少|几|合|成|以|单位[:：为是]?)\s*个?{_UNIT}|(?:_{{2,}}|[(（]\s*[)）]|\?"
    rf"|？)\s*\\?,?\s*{_UNIT}"
)


def asks_for_unit(question: str) -> bool:
    """Return True if a question names the unit of its answer: ``in cm``, "how many minutes", 多少厘米, ``5 m = ____
    cm``."""
    return bool(_ASKED.search(question[-2000:]))
