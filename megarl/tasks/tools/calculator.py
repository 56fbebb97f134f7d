"""Calculator for models: arithmetic is parsed, not executed."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

LONGEST = 1000
"""Maximum characters of an expression."""
MOST_BITS = 4096
"""Maximum bits of an integer; larger ones cost time and memory and do not help a model."""
LARGEST_FACTORIAL = 500
MOST_DIGITS = 100
"""Maximum digits for ``round``."""
DIGITS = 12
"""Significant digits of a result that is not an integer."""

OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs, "min": min, "max": max, "floor": math.floor, "ceil": math.ceil, "gcd": math.gcd,
    "sqrt": math.sqrt, "exp": math.exp, "log": math.log, "ln": math.log, "log2": math.log2, "log10": math.log10,
    "sin": math.sin, "cos": math.cos, "tan": math.tan, "asin": math.asin, "acos": math.acos, "atan": math.atan,
}  # fmt: skip
CONSTANTS = {"pi": math.pi, "e": math.e}


def calculator(expression: str) -> str:
    """Compute an arithmetic expression such as (12 + 3) * 2^10 / sqrt(2).

    There are + - * / // % ^ and parentheses, the constants pi and e, and abs, round, min, max, floor, ceil, gcd, sqrt,
    exp, ln, log, log2, log10, sin, cos, tan, asin, acos, atan and factorial.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"an expression of {len(expression)} characters; at most {LONGEST} are read")
    try:
        tree = ast.parse(expression.replace("^", "**").strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{expression!r:.80} is no arithmetic expression") from error
    value = _value(tree.body)
    return str(value) if isinstance(value, int) else f"{value:.{DIGITS}g}"


def _value(node: ast.expr) -> int | float:
    """Return the value of a part of an expression. Raises ValueError, ArithmeticError or TypeError."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _number(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _number(_power(_value(node.left), _value(node.right)))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return _number(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return _number(OPERATORS[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _number(_function(node.func.id)(*map(_value, node.args)))
    raise ValueError(f"{ast.unparse(node)!r:.80} is not understood")


def _function(name: str) -> Callable[..., Any]:
    known: dict[str, Callable[..., Any]] = {**FUNCTIONS, "round": _rounded, "factorial": _factorial}
    if name not in known:
        raise ValueError(f"there is no function {name!r:.40}; there are {', '.join(known)}")
    return known[name]


def _rounded(number: int | float, digits: int = 0) -> int | float:
    if abs(digits) > MOST_DIGITS:
        raise ValueError(f"round takes up to {MOST_DIGITS} digits")
    return round(number, digits) if digits else round(number)


def _power(base: int | float, exponent: int | float) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > 2 * MOST_BITS:
        raise OverflowError("the result is too large")
    return base**exponent


def _factorial(number: int | float) -> int:
    if not 0 <= number <= LARGEST_FACTORIAL:
        raise ValueError(f"factorial takes 0 to {LARGEST_FACTORIAL}")
    return math.factorial(number)  # type: ignore[arg-type]  # TypeError for a float


def _number(value: Any) -> int | float:
    """Return a result that is a real, finite number of bounded size. Raises ValueError or OverflowError otherwise."""
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise OverflowError("the result is too large")
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("the result is no real number")
    return value
