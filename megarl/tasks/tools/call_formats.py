"""Parsers of model families' tool-call formats, and conversion of arguments to the types of a schema.

Each reader gets the text from the first call on. Its patterns are linear in the text: an unclosed part extends to the
end and matches once.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.core.text import without_surrogates

Parameters = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> JSON schema of its parameters."""
CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
"""Words for constants, in lower case: Qwen3-Coder's template writes ``True`` and ``None``."""
MAX_REFS = 8
"""Maximum nested references and alternatives to follow."""


def parameters_of(tools: Iterable[Mapping[str, Any]]) -> Parameters:
    """Return the schemas of the tools' parameters; a tool without a schema is skipped."""
    found = [tool.get("function", tool) for tool in tools]
    return {
        function["name"]: function["parameters"]
        for function in found
        if isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("parameters"), Mapping)
    }


def read_argument(text: str, value: Any, parameters: Mapping[str, Any], name: str) -> Any:
    """Return an argument with its schema's type: ``text``, or the ``value`` parsed from it as JSON.

    Text that fits no type stays ``value``, which the tool refuses. Without a type in the schema return ``value``.
    """
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    types = _types(schema, parameters)
    if isinstance(value, str) and (word := text.strip().lower()) in CONSTANTS:
        constant = CONSTANTS[word]
        value = constant if _types_of(constant) & types else value
    fits = not isinstance(value, str) and _types_of(value) & types
    return text if "string" in types and not fits else value


def _types(schema: Any, root: Mapping[str, Any], levels: int = MAX_REFS) -> set[str]:
    """Return the JSON type names that a schema allows; empty if it names none."""
    if not isinstance(schema, Mapping) or levels == 0:
        return set()
    found = schema.get("type")
    if isinstance(found, str):
        return {found}
    if isinstance(found, list):
        return {one for one in found if isinstance(one, str)}
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    types = set[str]().union(*map(_types_of, values))
    others = [one for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list) for one in schema[key]]
    if isinstance(reference := schema.get("$ref"), str):
        others.append(_referred(reference, root))
    return types.union(*(_types(one, root, levels - 1) for one in others))


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the part of a schema that ``#/…`` refers to; None if it is missing."""
    part: Any = root
    for key in reference.removeprefix("#/").split("/"):
        part = part.get(key) if isinstance(part, Mapping) else None
    return part


def _types_of(value: Any) -> set[str]:
    """Return the JSON type names of a value."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    return {{float: "number", str: "string", list: "array", dict: "object"}.get(type(value), "")}


MAX_DEPTH = 64
"""Maximum nesting of arguments."""
MAX_PYTHON = 1 << 16
"""Maximum characters of calls in Python syntax: their syntax tree takes a hundred times their memory."""


@dataclass(frozen=True)
class ToolCall:
    """One call. ``arguments`` is None if the model did not write an object of arguments."""

    name: str
    arguments: dict[str, Any] | None
    text: str
    """Text of the call as the model wrote it."""


Found = tuple[list[ToolCall], str]
"""Calls, and the text after and between them."""
Reader = Callable[[str, Parameters], Found]

# ---------------------------------------------------------------- JSON


def json_calls(opening: str, closing: str) -> Reader:
    """Return a reader of ``{"name": …, "arguments": {…}}``, or a list of such objects, between two marks."""
    pattern = _between(opening, closing)

    def read(text: str, _: Parameters) -> Found:
        calls = [call for body in pattern.findall(text) for call in _json_calls(body.strip())]
        return calls, pattern.sub("", text)

    return read


def named_json_calls(opening: str, closing: str, middle: str = "<|message|>") -> Reader:
    """Return a reader of ``functions.NAME`` (``:0`` may follow), ``middle`` and JSON arguments, between two marks."""
    name = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?")
    pattern = re.compile(f"{re.escape(opening)}([^<]*){re.escape(middle)}(.*?)(?:{re.escape(closing)}|\\Z)", re.DOTALL)

    def read(text: str, _: Parameters) -> Found:
        calls = []
        for head, body in pattern.findall(text):
            found = name.fullmatch(head.strip())
            calls.append(_named_call(found[1] if found else "", body.strip(), f"{head}{middle}{body}"))
        return calls, _SECTION.sub("", pattern.sub("", text))

    return read


def deepseek_calls(text: str, _: Parameters) -> Found:
    """Read ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`` with arguments in a JSON fence (DeepSeek-V3, R1), or
    ``NAME<｜tool▁sep｜>`` with JSON arguments (V3.1)."""
    calls = []
    for body in _DEEPSEEK.findall(text):
        head, _sep, rest = body.partition("<｜tool▁sep｜>")
        name, fence, arguments = rest.partition("\n```json\n")
        if fence:
            calls.append(_named_call(name.strip(), arguments.strip().removesuffix("```").strip(), body))
        else:
            calls.append(_named_call(head.strip(), rest.strip(), body))
    return calls, _SECTION.sub("", _DEEPSEEK.sub("", text))


def llama3_calls(text: str, _: Parameters) -> Found:
    """Read ``<|python_tag|>{"name": …, "parameters": {…}}``, several separated by semicolons; the tag may be
    missing."""
    calls, rest = list[ToolCall](), text.lstrip().removeprefix("<|python_tag|>").lstrip()
    while rest.startswith("{"):
        try:
            value, after = _decoded(rest)
        except ValueError:
            return [*calls, ToolCall("", None, rest)], ""
        calls.append(_call_of(value, rest[: len(rest) - len(after)]))
        rest = after.lstrip().removeprefix(";").lstrip()
    return calls, rest


def mistral_calls(text: str, _: Parameters) -> Found:
    """Read ``[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]NAME[ARGS]{…}`` of later models."""
    calls, left = list[ToolCall](), list[str]()
    for body in map(str.strip, text.split("[TOOL_CALLS]")[1:]):
        name, args, arguments = body.partition("[ARGS]")
        try:
            value, rest = _decoded(arguments.lstrip() if args else body)
        except ValueError:
            calls.append(ToolCall(name if args else "", None, body))
            continue
        left.append(rest)
        if args:
            calls.append(ToolCall(name, value if isinstance(value, dict) else None, body))
        else:
            listed = value if isinstance(value, list) else [value]
            calls += [_call_of(call, json.dumps(call, ensure_ascii=False)) for call in listed]
    return calls, "\n".join(filter(None, left))


# ---------------------------------------------------------------- XML


def glm4_calls(text: str, parameters: Parameters) -> Found:
    """Read ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``."""
    bodies = [(body.partition("<arg_key>"), body) for body in _TOOL_CALL.findall(text)]
    calls = [_xml_call(head.strip(), key + rest, body, _ARGUMENT, parameters) for (head, key, rest), body in bodies]
    return calls, _TOOL_CALL.sub("", text)


def function_calls(text: str, parameters: Parameters) -> Found:
    """Read ``<function=NAME><parameter=KEY>VALUE</parameter></function>``, in ``<tool_call>`` or ``<seed:tool_call>``.

    Values are converted to the type in the tool's schema.
    """
    found = _FUNCTION.findall(text)
    return [_xml_call(name, body, body, _PARAMETER, parameters) for name, body in found], _FUNCTION.sub("", text)


def invoke_calls(text: str, parameters: Parameters) -> Found:
    """Read ``<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>``, in ``<minimax:tool_call>``."""
    found = _INVOKE.findall(text)
    calls = [_xml_call(name, body, body, _INVOKED, parameters) for name, body in found]
    return calls, _INVOKES.sub("", _INVOKE.sub("", text))


def _xml_call(name: str, pairs: str, text: str, pattern: re.Pattern[str], parameters: Parameters) -> ToolCall:
    """Read a call with keys and values in ``pairs``. Other text there, or a repeated key, makes it unreadable."""
    found = pattern.findall(pairs)
    arguments = {key.strip(): _argument(value, parameters.get(name, {}), key.strip()) for key, value, _ in found}
    whole = len(arguments) == len(found) and all(end for *_, end in found) and not pattern.sub("", pairs).strip()
    return ToolCall(name, arguments if whole else None, text)


def _argument(text: str, parameters: Mapping[str, Any], name: str) -> Any:
    """Return an XML argument's value: of the type in the schema, else parsed as JSON, else the text."""
    try:
        value = _loads(text)
    except ValueError:
        value = text
    return read_argument(text, value, parameters, name)


# ---------------------------------------------------------------- Python


def python_calls(text: str, _: Parameters) -> Found:
    """Read ``<function_calls>NAME(KEY=VALUE, …)``, one per line; values are Python or JSON literals."""
    calls = [call for body in _FUNCTION_CALLS.findall(text) for call in _python_calls(body.strip())]
    return calls, _FUNCTION_CALLS.sub("", text)


def _python_calls(text: str) -> list[ToolCall]:
    """Parse the calls of a text, without evaluating it."""
    try:
        if len(text) > MAX_PYTHON:
            raise ValueError("more text than is parsed")
        statements = ast.parse(text).body
        found = [statement.value for statement in statements if isinstance(statement, ast.Expr)]
        if len(found) < len(statements):
            raise ValueError("statements that are no calls")
        lines = _LINES.split(text.encode())
        return [_python_call(expression, _written(expression, lines)) for expression in found]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [ToolCall("", None, text)]


def _python_call(call: ast.expr, text: str) -> ToolCall:
    """Convert a call. Raises ValueError unless it is a call by name."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError("no call by name")
    arguments: dict[str, Any] | None = None
    names = {keyword.arg for keyword in call.keywords}
    if not call.args and None not in names and len(names) == len(call.keywords):
        try:
            arguments = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
        except ValueError:
            arguments = None
    return ToolCall(call.func.id, arguments, text)


def _written(expression: ast.expr, lines: Sequence[bytes]) -> str:
    """Return the text of an expression. ``ast.get_source_segment`` would split the whole text for every call."""
    first, last = expression.lineno - 1, (expression.end_lineno or expression.lineno) - 1
    part = list(lines[first : last + 1])
    part[-1] = part[-1][: expression.end_col_offset]
    part[0] = part[0][expression.col_offset :]
    return b"".join(part).decode()


def _literal(value: ast.expr) -> Any:
    """Return the value of a literal. Raises ValueError for values without a JSON form, as ``_decoded``."""
    if isinstance(value, ast.Name) and value.id in _CONSTANTS:
        return _CONSTANTS[value.id]
    if isinstance(value, ast.List):
        return [_literal(one) for one in value.elts]
    if isinstance(value, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in value.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key that is no text")
        return dict(zip(keys, map(_literal, value.values), strict=True))
    found = ast.literal_eval(value)
    if not isinstance(found, bool | int | float | str | None) or not _is_plain(found, 1):
        raise ValueError("a value that JSON has no form of")
    str(found)  # raises ValueError for a non-decimal number with more digits than Python can print
    return found


# ---------------------------------------------------------------- patterns and parts


def _between(opening: str, closing: str) -> re.Pattern[str]:
    return re.compile(f"{re.escape(opening)}(.*?)(?:{re.escape(closing)}|\\Z)", re.DOTALL)


_TOOL_CALL = _between("<tool_call>", "</tool_call>")
_DEEPSEEK = _between("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_FUNCTION_CALLS = _between("<function_calls>", "</function_calls>")
_SECTION = re.compile(r"<\|tool_calls_section_(?:begin|end)\|>|<｜tool▁calls▁(?:begin|end)｜>")
_FUNCTION = re.compile(
    r"(?:<(?:seed:)?tool_call>\s*)?<function=([^<>\s]+)>(.*?)(?:</function>|\Z)(?:\s*</(?:seed:)?tool_call>)?",
    re.DOTALL,
)
_INVOKE = re.compile(r'<invoke name="?([^<>\s"]+)"?>(.*?)(?:</invoke>|\Z)', re.DOTALL)
_INVOKES = re.compile(r"</?minimax:tool_call>")
_ARGUMENT = re.compile(r"<arg_key>((?:(?!</?arg_key>).)*)</arg_key>\s*<arg_value>(.*?)(?:(</arg_value>)|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?(.*?)(?:\n?(</parameter>)|\Z)", re.DOTALL)
_INVOKED = re.compile(r'<parameter name="?([^<>\s"]+)"?>(.*?)(?:(</parameter>)|\Z)', re.DOTALL)
_LINES = re.compile(rb"(?<=\n)|(?<=\r)(?!\n)")
"""Boundary between two lines, as Python's parser counts them."""
_CONSTANTS = {"true": True, "false": False, "null": None}


def _json_calls(body: str) -> list[ToolCall]:
    """Return the calls of an object, or of a list of objects."""
    try:
        value = _loads(body)
    except ValueError:
        return [ToolCall("", None, body)]
    if isinstance(value, list):
        return [_call_of(call, json.dumps(call, ensure_ascii=False)) for call in value]
    return [_call_of(value, body)]


def _named_call(name: str, body: str, text: str) -> ToolCall:
    """Return a call with the arguments in ``body``: JSON, or JSON text inside a JSON string."""
    try:
        return ToolCall(name, _arguments(_loads(body)), text)
    except ValueError:
        return ToolCall(name, None, text)


def _call_of(call: Any, text: str) -> ToolCall:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", None, text)
    try:
        return ToolCall(call["name"], _arguments(call.get("arguments", call.get("parameters"))), text)
    except ValueError:
        return ToolCall(call["name"], None, text)


def _arguments(value: Any) -> dict[str, Any] | None:
    """Return arguments from an object, or from its JSON text; None for other values. Raises ValueError as
    ``_loads``."""
    value = _loads(value) if isinstance(value, str) else value
    return value if isinstance(value, dict) else None


def _loads(text: str) -> Any:
    """Parse a model's text. Raises ValueError as ``_decoded``, and for text after the value."""
    value, rest = _decoded(text.strip())
    if rest.strip():
        raise ValueError("text after the value")
    return value


def _decoded(text: str) -> tuple[Any, str]:
    """Return (value, rest) of the JSON that a text begins with. Raises ValueError for JSON that a strict parser would
    refuse when written again."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not _is_plain(value, MAX_DEPTH):
        raise ValueError(f"a number that is not finite, a lone surrogate, or more than {MAX_DEPTH} levels")
    return value, text[end:]


def _is_plain(value: Any, levels: int) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return value == without_surrogates(value)
    if isinstance(value, dict):
        return levels > 0 and all(_is_plain(part, levels - 1) for pair in value.items() for part in pair)
    return not isinstance(value, list) or (levels > 0 and all(_is_plain(part, levels - 1) for part in value))
