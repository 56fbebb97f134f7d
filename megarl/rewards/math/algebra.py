"""Compare expressions with SymPy, and check that a constant is worked out.

Only the caller's time limit needs the main thread; math-verify's own alarms are off.
"""

from __future__ import annotations

import functools
import logging
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from math import gcd
from typing import Any

from megarl.rewards.answer.normalize import Quantity, rounds_to

MAX_LENGTH = 400
MAX_EXPONENT = 20_000
"""Largest exponent (2^{2024} is an answer, 10^{10^{10}} an attack) and number of digits; for factorials a twentieth."""

_NESTED_POWER = re.compile(r"\^\s*(?:\{[^{}]*\^|\{[^{}]*!|\{[^{}]*\{[^{}]*\^|(?:\{[^{}]*\}|\w)\s*\^)")
_SMALL_TOWER = re.compile(r"\^\s*\{\s*(\d{1,2})\s*\^\s*\{?\s*(\d{1,2})\s*\}?\s*\}")
_UNEVALUATED = re.compile(
    r"\\(?:int|iint|oint|sum|prod|lim|det|max|min|gcd|lcm|mathrm\{d\})(?![a-z])|\\frac\s*\{\s*d\s*\}|\\bmod|\\pmod"
)
_CAPITAL = re.compile(r"\\math[a-z]+\s*\{[A-Z]\}|\\[A-Za-z]+|([A-Z])(?:_\{?(\w+)\}?)?")
"""Capital letters that are variables: math-verify lowers them, so that R would equal r."""
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_SUFFIXED = re.compile(r"(?<![\\A-Za-z_])(?<!_\{)[a-hj-z]\d")
"""``x2`` is ambiguous: a product, a power or an index. ``i4`` is 4i."""
_DERIVATIVE = re.compile(r"\\partial|\\d+ot(?![a-z])|\\prime|'|\\frac\s*\{\s*d\s*(?:\^|[a-z\\}]).*\}\s*\{\s*d\s*[a-z]")
"""Derivatives. SymPy evaluates dx/dt as 0 for a symbol x, so differential equations are compared as text."""
_POINTS = 4
FAULTS = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RecursionError, TypeError, ValueError)
"""Errors of SymPy on expressions that it cannot evaluate (SympifyError is a ValueError); such expressions are
unequal."""


def tractable(text: str) -> bool:
    """Return True if algebra on ``text`` stays cheap: no power towers, huge factorials, long digits or deep nesting."""
    if len(text) > MAX_LENGTH or ":" in text or re.search(r"\d{60}", text):
        return False
    depth = deepest = 0
    for sign in text:
        depth += {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}.get(sign, 0)
        deepest = max(deepest, depth)
    if deepest > 10:
        return False
    towers = [int(match[1]) ** int(match[2]) for match in _SMALL_TOWER.finditer(text)]
    text = _SMALL_TOWER.sub("^{2}", text)
    if _NESTED_POWER.search(text) and re.search(r"\d\s*\^|\d\s*\}\s*\^|\d\s*\)\s*\^|!", text):
        return False
    exponents = [int(digits) for digits in re.findall(r"\^\s*\{?\s*[+-]?\s*(\d+)", text)] + towers
    product = 1
    for exponent in exponents if re.search(r"[)}\]|]\s*\^", text) else []:
        product *= max(exponent, 1)
    factorials = [int(digits) for digits in re.findall(r"(\d+)\s*\}?\)?\s*!", text)]
    choices = [int(digits) for digits in re.findall(r"\\binom\s*\{\s*(\d+)", text)]
    if re.search(r"[)}]\s*!|!\s*!|!\s*\)", text) and re.search(r"\d\d", text):
        return False
    if re.search(r"\\binom\s*\{[^}]*\^|\^\s*\{?\s*\d+\s*\}?\s*!|\\(?:Gamma|zeta).*(?:\^|\d{4})", text):
        return False
    return (
        max([product, *exponents, 0]) <= MAX_EXPONENT
        and max([*factorials, *choices, 0]) <= MAX_EXPONENT // 20
        and len(re.findall(r"!", text)) <= 6
    )


def unevaluated(gold: str, pred: str) -> bool:
    """Return True if ``pred`` is the task instead of its result: it has ``\\sum``, ``\\int`` or the like, gold has
    not."""
    return any(word not in gold for word in _UNEVALUATED.findall(pred))


def has_angle(text: str) -> bool:
    """Return True if degrees are the angle of a sin or cos, not a unit."""
    return bool(_TRIGONOMETRY.search(text))


@functools.lru_cache(maxsize=512)
def expression(text: str, unevaluated: bool = False) -> Any:
    """Parse a cleaned answer into math-verify's SymPy object, or None if it finds none. ``unevaluated`` keeps the
    written form."""
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig  # type: ignore[import-untyped]
    from math_verify import LatexExtractionConfig, parse  # type: ignore[import-untyped]

    if "$" in text or text.endswith("\\"):
        return None  # math-verify would miss the formula's end and parse a fraction inside
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # suppress the warning that its alarms are off
    config = LatexExtractionConfig(
        boxed_match_priority=-1,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
        ),
    )
    if has_angle(text):
        text = re.sub(r"(\d+(?:\.\d+)?)\s*degrees\b", r"(\\frac{\1\\pi}{180})", text)
    text = _CAPITAL.sub(lambda match: f"{match[1].lower()}_{{1000{match[2] or ''}}}" if match[1] else match[0], text)
    parsed = parse(f"${text}$", [config], fallback_mode="no_fallback", parsing_timeout=0)
    return None if not parsed else parsed[0] if unevaluated else _with_constants(parsed[0])


def _with_constants(value: Any) -> Any:
    """Replace the letter i by the imaginary unit, and evaluate unevaluated numbers."""
    import sympy  # type: ignore[import-untyped]

    if not isinstance(value, sympy.Expr):
        return value
    letters = {symbol: sympy.I for symbol in value.free_symbols if symbol.name in ("i", r"\imath")}
    letters |= {symbol: sympy.E for symbol in value.free_symbols if symbol.name == "e"}
    return value.subs(letters) if letters else value


def same(gold: str, pred: str) -> bool:
    """Return True if two expressions agree at every tested point, or math-verify proves them equal."""
    if not (tractable(gold) and tractable(pred)) or _DERIVATIVE.search(gold + pred):
        return False
    if _SUFFIXED.search(pred) and not _SUFFIXED.search(gold):
        return False
    try:
        first, second = expression(gold), expression(pred)
        return first is not None and second is not None and _equal(first, second)
    except FAULTS:
        return False


def same_number(number: Quantity, text: str) -> bool:
    """Return True if an expression equals a written number; a decimal may be its rounded value."""
    if not tractable(text):
        return False
    try:
        return _has_value(expression(text), number)
    except FAULTS:
        return False


def _has_value(value: Any, number: Quantity) -> bool:
    import sympy  # type: ignore[import-untyped]

    if not isinstance(value, sympy.Expr) or value.free_symbols:
        return False
    if number.places is None:
        return _equal(sympy.Rational(number.value.numerator, number.value.denominator), value)
    approximate = value.doit().evalf(30)
    if not (approximate.is_Float or approximate.is_Rational):
        return False
    exact = Fraction(str(approximate)) if approximate.is_finite else Fraction(0)
    return bool(approximate.is_finite) and (
        abs(exact - number.value) <= Fraction(1, 10**25) * abs(exact) or rounds_to(number, exact)
    )


def _equal(first: Any, second: Any) -> bool:
    import sympy  # type: ignore[import-untyped]
    from math_verify import verify  # type: ignore[import-untyped]

    if isinstance(first, sympy.Expr) and isinstance(second, sympy.Expr):
        tried = _same_values(first, second)
        if tried is not None:
            return tried
    elif isinstance(first, sympy.Eq) and isinstance(second, sympy.Eq):
        if first.free_symbols != second.free_symbols:
            return False
        left, right = first.lhs - first.rhs, second.lhs - second.rhs
        if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr) and _proportional(left, right):
            return True
        if left.is_polynomial() and right.is_polynomial():
            return False  # other polynomials have other zeros, except for a power or a factor without zeros
    elif isinstance(first, sympy.Expr) or isinstance(second, sympy.Expr):
        return False  # a number is not a set, relation or matrix
    return bool(verify(first, second, timeout_seconds=0))


def _points(*expressions: Any) -> list[dict[Any, Any]]:
    """Return the same few values for every symbol: of both signs, away from special values."""
    import sympy  # type: ignore[import-untyped]

    symbols = sorted(set().union(*(expr.free_symbols for expr in expressions)), key=str)
    draw = random.Random(7)
    signs = [1, 1, -1, -1]
    return [
        {symbol: signs[k] * sympy.Rational(draw.randint(2 * 97, 5 * 97), 97 * (1 + k % 2)) for symbol in symbols}
        for k in range(_POINTS if symbols else 1)
    ]


def _number_at(expr: Any, point: dict[Any, Any]) -> Any:
    """Return the value of ``expr`` at ``point`` as a SymPy number; None if it has none."""
    try:
        value = expr.doit().evalf(30, subs=point, maxn=200)
        return value if value.is_number and abs(value).is_finite and not value.free_symbols else None
    except FAULTS:
        return None


def _same_values(first: Any, second: Any) -> bool | None:
    """Return True if two expressions agree wherever both have a value; None if too few points have one."""
    import sympy  # type: ignore[import-untyped]

    if not first.free_symbols and not second.free_symbols:
        exact = first.doit(), second.doit()
        if all(value.is_Rational for value in exact):
            return bool(exact[0] == exact[1])
    rounded = first.has(sympy.Float) or second.has(sympy.Float)
    difference, seen = first.doit() - second.doit(), 0  # like terms cancel: 2^{2024}-1 and 2^{2024}-x differ
    terms = difference.args if difference.is_Add and not rounded else (first, second)
    for point in _points(first, second):
        value, *sizes = (_number_at(expr, point) for expr in (difference, *terms))
        if value is None or any(size is None for size in sizes):
            continue
        if abs(value) > (1e-12 if rounded else 1e-50) * (max(map(abs, sizes)) + 1e-6):
            return False
        seen += 1
    return True if seen >= (3 if first.free_symbols | second.free_symbols else 1) else None


def _proportional(left: Any, right: Any) -> bool:
    """Return True if two differences (left side minus right) are proportional: the equations are then the same."""
    if left.free_symbols != right.free_symbols:
        return False
    ratios = []
    for point in _points(left, right):
        first, second = _number_at(left, point), _number_at(right, point)
        if first is None or second is None or abs(second) < 1e-12 or abs(first) < 1e-12:
            continue
        ratios.append(first / second)
    return len(ratios) >= 3 and all(abs(ratio - ratios[0]) <= 1e-10 * abs(ratios[0]) for ratio in ratios)


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
        value = expression(text)
    except FAULTS:
        return False
    return isinstance(value, sympy.Expr) and not _rational(value)


def worked_out(text: str) -> bool:
    """Return True if a constant has nothing left to add, multiply or evaluate. Also True for expressions with variables
    and text that is no expression."""
    if not tractable(text):
        return True
    if _BINOMIAL.search(text):
        return False
    try:
        return _worked(expression(text, unevaluated=True))
    except FAULTS:
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
