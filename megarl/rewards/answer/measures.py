"""Convert quantities between units of one dimension: 5 cm is 50 mm, 90 min is 1 h 30 min. Exact, without rounding."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from megarl.rewards.answer import units
from megarl.rewards.answer.normalize import clean, quantity

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
