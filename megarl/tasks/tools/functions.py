"""Functions as tools, with their schema for chat templates; the calculator."""

from __future__ import annotations

import ast
import inspect
import json
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megarl.config.schema import RolloutConfig
from megarl.core.errors import ConfigError
from megarl.core.imports import import_file
from megarl.core.schema import Task

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


TASK = "task"
"""Parameter that receives the trajectory's task; hidden from models."""
TYPES: Mapping[Any, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object",
}  # fmt: skip
"""Parameter types -> JSON type names."""


def python(code: str) -> str:
    """Run Python code. Variables, imports and files in /tmp stay until the next call. The result is what it prints,
    and the value of a last line that is an expression."""
    raise AssertionError("a session in the sandbox runs the code")


OWN: Mapping[str, Callable[..., Any]] = {"python": python, "calculator": calculator}
"""megarl's tools by their name in ``rollout.tools``."""


@dataclass(frozen=True, eq=False)
class ToolFunction:
    """One tool: a function and the JSON schema of its parameters."""

    function: Callable[..., Any]
    parameters: Mapping[str, Mapping[str, Any]]
    """Schemas by parameter name, without ``TASK``."""
    required: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Any], where: str) -> ToolFunction:
        """Read a function. Raises ConfigError, beginning with ``where``, if no schema can be made from it."""
        fault = f"{where}: the tool {function.__name__}"
        if not inspect.getdoc(function):
            raise ConfigError(f"{fault} has no docstring; models read it to know what the tool does")
        try:
            hints = typing.get_type_hints(function)
        except Exception as error:
            raise ConfigError(f"{fault} has annotations that cannot be read: {error}") from error
        parameters, required = {}, []
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError(f"{fault} has the parameter {parameter}; models name each argument")
            if name == TASK:
                continue
            schema = _schema(hints.get(name))
            if schema is None:
                raise ConfigError(
                    f"{fault} has the parameter {str(parameter)!r}; annotate it with str, int, float, bool, list, "
                    "dict, list[…] of them, or a Literal of texts"
                )
            parameters[name] = schema
            required += [name] if parameter.default is parameter.empty else []
        return cls(function, parameters, tuple(required))

    @property
    def schema(self) -> dict[str, Any]:
        """Return the description in the form of chat templates' ``tools``."""
        parameters = {"type": "object", "properties": dict(self.parameters), "required": list(self.required)}
        described = {"description": inspect.getdoc(self.function), "parameters": parameters}
        return {"type": "function", "function": {"name": self.function.__name__, **described}}

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raise ValueError, with a text for the model, unless arguments fit the schema."""
        name = self.function.__name__
        if missing := [one for one in self.required if one not in arguments]:
            raise ValueError(f"{name} needs the argument {missing[0]!r}")
        for one, value in arguments.items():
            if one not in self.parameters:
                raise ValueError(f"{name} has no argument {one!r:.60}; it has {', '.join(self.parameters) or 'none'}")
            if not _fits(value, self.parameters[one]):
                raise ValueError(f"the argument {one!r} of {name} must be {_words(self.parameters[one])}")

    def call(self, arguments: Mapping[str, Any], task: Task) -> Any:
        """Call the function, which may be a coroutine function. Raises whatever it raises."""
        more = {TASK: task} if TASK in inspect.signature(self.function).parameters else {}
        return self.function(**arguments, **more)


def tools_of(rollout: RolloutConfig) -> dict[str, ToolFunction]:
    """Return the tools of ``rollout.tools`` by name. Raises ConfigError."""
    if not rollout.tools:
        raise ConfigError(f"rollout.workflow=tools needs rollout.tools: {', '.join(OWN)}, or Python files (.py)")
    found: dict[str, ToolFunction] = {}
    for named in rollout.tools:
        where = f"rollout.tools={named}"
        for function in _functions(named, where):
            if function.__name__ in found:
                raise ConfigError(f"{where}: there are two tools of the name {function.__name__}; rename one")
            found[function.__name__] = ToolFunction.of(function, where)
    return found


def template_tools(rollout: RolloutConfig) -> dict[str, Any]:
    """Return the chat template option that describes the tools; {} without tools, or if prompts describe them."""
    if rollout.workflow != "tools" or rollout.tool_format is not None:
        return {}
    return {"tools": [tool.schema for tool in tools_of(rollout).values()]}


def text_of_result(value: Any) -> str:
    """Return a function's result as text; "" for None."""
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _functions(named: str, where: str) -> list[Callable[..., Any]]:
    if named in OWN:
        return [OWN[named]]
    if not named.endswith(".py"):
        raise ConfigError(f"{where} does not exist; choose one of {', '.join(OWN)}, or give a Python file (.py)")
    module = import_file(named, "rollout.tools", "functions")
    functions = filter(inspect.isfunction, vars(module).values())
    own = [function for function in functions if function.__module__ == module.__name__]
    found: list[Callable[..., Any]] = [function for function in own if not function.__name__.startswith("_")]
    if not found:
        raise ConfigError(f"{where} has no function; define those that are tools there, without an underscore")
    return found


def _schema(hint: Any) -> dict[str, Any] | None:
    """Return the JSON schema of an annotation, or None if it has none. ``X | None`` has the schema of X."""
    if hint in TYPES:
        return {"type": TYPES[hint]}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal and all(isinstance(value, str) for value in inner):
        return {"type": "string", "enum": list(inner)}
    if origin is list and (items := _schema(inner[0])) is not None:
        return {"type": "array", "items": items}
    if origin is dict:
        return {"type": "object"}
    if origin in (typing.Union, types.UnionType):
        others = [one for one in inner if one is not type(None)]
        return _schema(others[0]) if len(others) == 1 else None
    return None


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    kinds: dict[str, Any] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "array": list,
        "object": dict,
    }
    if isinstance(value, bool) and schema["type"] != "boolean":
        return False
    if not isinstance(value, kinds[schema["type"]]) or ("enum" in schema and value not in schema["enum"]):
        return False
    return all(_fits(item, schema["items"]) for item in value) if "items" in schema else True


def _words(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    return f"of type {schema['type']}" + (f" of {schema['items']['type']}" if "items" in schema else "")
