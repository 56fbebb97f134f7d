"""Check that a constant is worked out, not the task itself: ``17^1+23`` for 40, ``2 \\cdot 12\\pi`` for ``24\\pi``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import gcd
from typing import Any

from megarl.rewards.answer.normalize import Quantity
from megarl.rewards.math import algebra as math_algebra

_LITERAL = r"(?:\d+(?:\.\d+)?|\\frac\s*\{\s*-?\d+\s*\}\s*\{\s*\d+\s*\}|\d+\s*/\s*\d+)"
_EXPONENT = r"\^\s*(?:(?P<digit>\d)|\{\s*(?P<exponent>-?\d+)\s*\}|\{\s*\d{1,2}\s*\^\s*(?:\{\s*[2-9]\s*\}|[2-9])\s*\})"
_POWER = re.compile(rf"[+-]?\s*(?:\d+(?:\.\d+)?|\(\s*[+-]?\s*{_LITERAL}\s*\))\s*{_EXPONENT}")
_COUNT = re.compile(
    r"[+-]?\s*(?:\(?\d+\)?!|\\[dt]?binom\s*(?:\{\s*\d+\s*\}|\d)\s*(?:\{\s*\d+\s*\}|"
    r"\d)|\{?\s*\d+\s*\\choose\s*\d+\s*\}?)"
)
_FACTOR = r"\d+(?:\s*\^\s*(?:\d|\{\s*\d+\s*\}))?"
_PRODUCT = rf"{_FACTOR}(?:\s*(?:\\cdot|\\times)\s*{_FACTOR})*"
_QUOTIENT = re.compile(
    rf"[+-]?\s*(?:\\frac\s*\{{\s*(?P<top>{_PRODUCT})\s*\}}\s*\{{\s*(?P<bottom>{_PRODUCT})\s*\}}|"
    rf"(?P<top2>{_PRODUCT})(?:\s*/\s*(?P<bottom2>{_FACTOR}))?)"
)
_BINOMIAL = re.compile(r"\\[dt]?binom(?!\s*(?:\{\s*\w+\s*\}|\d)\s*(?:\{\s*\w+\s*\}|\d))")
"""Binomial of anything but numbers or letters: math-verify evaluates binomials while parsing."""


def closed_number(text: str) -> bool:
    """Return True for a power, factorial, binomial, or a product or quotient of coprime powers with at most one other
    whole number on each side."""
    if match := _POWER.fullmatch(text):
        trivial = ("0", "1", "-0") if re.match(r"[+-]?\s*\d+\s*\^", text) else ("0", "1", "-0", "-1")
        return (match["digit"] or match["exponent"] or "") not in trivial
    if _COUNT.fullmatch(text):
        return True
    match = _QUOTIENT.fullmatch(text)
    if match is None:
        return False
    sides = [match["top"] or match["top2"], match["bottom"] or match["bottom2"] or ""]
    bases: list[int] = []
    powers = 0
    for side in sides:
        literals = 0
        for factor in re.findall(_FACTOR, side):
            base, _, exponent = (part.strip("{} ") for part in factor.partition("^"))
            if len(base) > 60 or (exponent and int(exponent) < 2):
                return False
            if int(base) == 1 and not exponent:
                continue
            powers += bool(exponent)
            literals += not exponent
            bases.append(int(base))
        if literals > 1:
            return False
    return powers > 0 and _coprime(bases)


def _coprime(bases: list[int]) -> bool:
    return all(gcd(first, second) == 1 for k, first in enumerate(bases) for second in bases[:k])


def stands_for(number: Quantity, text: str) -> bool:
    """Return True if an expression may replace a written number: a closed form, or, for a decimal, a worked-out
    irrational."""
    if closed_number(text):
        return True
    if number.places is None or not worked_out(text):
        return False
    import sympy  # type: ignore[import-untyped]

    try:
        value = math_algebra.expression(text)
    except math_algebra.FAULTS:
        return False
    return isinstance(value, sympy.Expr) and not _rational(value)


def worked_out(text: str) -> bool:
    """Return True if a constant has nothing left to add, multiply or evaluate. Also True for expressions with variables
    and text that is no expression."""
    if not math_algebra.tractable(text):
        return True
    if _BINOMIAL.search(text):
        return False
    try:
        return _worked(math_algebra.expression(text, unevaluated=True))
    except math_algebra.FAULTS:
        return True  # it equals no answer anyway


def _worked(value: Any) -> bool:
    import sympy  # type: ignore[import-untyped]

    if not isinstance(value, sympy.Expr):
        return True
    if any(symbol.name not in ("i", r"\imath", "e") for symbol in value.free_symbols):
        return True
    if _rational(value):
        return _closed([value])
    if value.is_Add:
        terms = list(_terms(value))
        rational = [term for term in terms if _rational(term)]
        others = [_value(term).as_coeff_Mul()[1] for term in terms if not _rational(term)]
        return len(rational) <= 1 and len(set(others)) == len(others) and all(map(_worked, terms))
    if value.is_Mul:
        factors = list(_factors(value))
        rational = [factor for factor in factors if _rational(factor)]
        return _closed(rational) and all(_worked(factor) for factor in factors if factor not in rational)
    if value.is_Pow and value.exp == 1:
        return False
    return all(map(_worked, value.args))


def _terms(value: Any) -> Iterator[Any]:
    """Yield the terms of a sum, also of nested sums and sums in -(…) and 2(…)."""
    if value.is_Add:
        for term in value.args:
            yield from _terms(term)
    elif (
        value.is_Mul
        and sum(factor.is_Add for factor in value.args) == 1
        and all(factor.is_Add or _rational(factor) for factor in value.args)
    ):
        yield from _terms(next(factor for factor in value.args if factor.is_Add))
    else:
        yield value


def _factors(value: Any) -> Iterator[Any]:
    """Yield the factors of a product, also of nested products and of denominators (each to the power of -1)."""
    if value.is_Mul:
        for factor in value.args:
            yield from _factors(factor)
    elif value.is_Pow and value.exp == -1 and value.base.is_Mul:
        for factor in _factors(value.base):
            yield factor**-1 if factor.is_Integer else _inverse(factor)
    else:
        yield value


def _inverse(factor: Any) -> Any:
    import sympy

    return sympy.Pow(factor, -1, evaluate=False)


def _value(value: Any) -> Any:
    """Evaluate: decimals become fractions, i and e constants."""
    import sympy

    changes = {decimal: sympy.Rational(str(decimal)) for decimal in value.atoms(sympy.Float)}
    changes |= {symbol: sympy.E if symbol.name == "e" else sympy.I for symbol in value.free_symbols}
    return value.xreplace(changes).doit() if changes else value.doit()


def _rational(value: Any) -> bool:
    return bool(_value(value).is_Rational)


def _closed(factors: list[Any]) -> bool:
    """Return True if rational factors are one number or fraction, and powers coprime to it and each other, and
    factorials."""
    import sympy

    above, below, bases, powers = 0, 0, [], False
    for part in (part for factor in factors for part in _factors(factor)):
        over = part.is_Pow and part.exp == -1
        number = part.base if over else part
        if number.is_Rational or number.is_Float:
            top, bottom = (abs(int(number.p)), int(number.q)) if number.is_Rational else (0, 1)
            above, below = above + ((bottom if over else top) != 1), below + ((top if over else bottom) != 1)
            bases += [top, bottom]
        elif number.is_Pow and number.base.is_Rational and number.exp.is_Integer and abs(number.exp) > 1:
            powers = True
            bases += [abs(int(number.base.p)), int(number.base.q)]
        elif not (isinstance(number, sympy.factorial) and number.args[0].is_Integer):
            return False
    return above <= 1 and below <= 1 and (not powers or _coprime([base for base in bases if base > 1]))
