"""Tool calls as model families write them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.core.durable import without_surrogates
from megarl.core.thoughts import split_thought
from megarl.explore.tools.arguments import Parameters, parameters_of, read_argument

MAX_DEPTH = 64
"""Most levels of arguments."""


@dataclass(frozen=True)
class ToolCall:
    """One call. ``arguments`` is None where the model wrote something that is no object of arguments."""

    name: str
    arguments: dict[str, Any] | None
    text: str
    """Text of the call as the model wrote it."""


Found = tuple[list[ToolCall], str]
"""Calls, and the text after and between them."""


@dataclass(frozen=True)
class ToolFormat:
    """Form in which a model family writes calls."""

    marker: re.Pattern[str]
    """Found in chat templates of the family."""
    start: re.Pattern[str]
    """Begin of the first call in an answer."""
    calls: Callable[[str, Parameters], Found]
    """Calls in the text from ``start`` on. JSON has types of its own; values in XML are read by the tools' schemas."""

    def parse(self, text: str, tools: Iterable[Mapping[str, Any]] = ()) -> tuple[str, list[ToolCall]]:
        """Split a response, special tokens included, into the text around its calls and the calls.

        Args:
            text: As of ``thoughts.as_written``; a call inside a thought is text.
            tools: JSON schemas of the tools, as chat templates take them.
        """
        thought, answer, further = split_thought(text)
        found = self.start.search(answer)
        if found is None:
            return text, []
        calls, rest = self.calls(answer[found.start() :], parameters_of(tools))
        if not calls:
            return text, []
        before = (thought + answer[: found.start()]).rstrip()
        return "\n".join(part for part in (before, rest.strip(), further) if part), calls


_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(
    r"(?:<tool_call>\s*)?<function=([^<>\s]+)>(.*?)(?:</function>|\Z)(?:\s*</tool_call>)?", re.DOTALL
)
_ARGUMENT = re.compile(r"<arg_key>((?:(?!</?arg_key>).)*)</arg_key>\s*<arg_value>(.*?)(?:(</arg_value>)|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?(.*?)(?:\n?(</parameter>)|\Z)", re.DOTALL)
"""Patterns of calls, linear in the text: a part that is not closed reaches to the end, and is found once."""


def _hermes(text: str, _: Parameters) -> Found:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``"""
    return [_json_call(body.strip()) for body in _TOOL_CALL.findall(text)], _TOOL_CALL.sub("", text)


def _glm4(text: str, parameters: Parameters) -> Found:
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``; values as Qwen3-Coder's."""
    bodies = [(body.partition("<arg_key>"), body) for body in _TOOL_CALL.findall(text)]
    calls = [_xml_call(head.strip(), key + rest, body, _ARGUMENT, parameters) for (head, key, rest), body in bodies]
    return calls, _TOOL_CALL.sub("", text)


def _qwen3_coder(text: str, parameters: Parameters) -> Found:
    """``<function=NAME><parameter=KEY>VALUE</parameter></function>``; values have the type that the tool's schema gives
    them."""
    found = _FUNCTION.findall(text)
    return [_xml_call(name, body, body, _PARAMETER, parameters) for name, body in found], _FUNCTION.sub("", text)


def _xml_call(name: str, pairs: str, text: str, pattern: re.Pattern[str], parameters: Parameters) -> ToolCall:
    """Read a call whose ``pairs`` are keys and values. Text beside them, or a key that comes twice, makes it
    unreadable."""
    found = pattern.findall(pairs)
    arguments = {key.strip(): _argument(value, parameters.get(name, {}), key.strip()) for key, value, _ in found}
    whole = len(arguments) == len(found) and all(end for *_, end in found) and not pattern.sub("", pairs).strip()
    return ToolCall(name, arguments if whole else None, text)


def _llama3(text: str, _: Parameters) -> Found:
    """``<|python_tag|>{"name": …, "parameters": {…}}``, several separated by semicolons; the tag may be missing."""
    calls, rest = list[ToolCall](), text.lstrip().removeprefix("<|python_tag|>").lstrip()
    while rest.startswith("{"):
        try:
            value, after = _decoded(rest)
        except ValueError:
            return [*calls, ToolCall("", None, rest)], ""
        calls.append(_call_of(value, rest[: len(rest) - len(after)]))
        rest = after.lstrip().removeprefix(";").lstrip()
    return calls, rest


def _mistral(text: str, _: Parameters) -> Found:
    """``[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]NAME[ARGS]{…}`` of later models."""
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


FORMATS = {
    "qwen3_coder": ToolFormat(re.compile(r"<function="), re.compile(r"(<tool_call>\s*)?<function="), _qwen3_coder),
    "glm4": ToolFormat(re.compile(r"<arg_key>"), re.compile(r"<tool_call>"), _glm4),
    "hermes": ToolFormat(re.compile(r"<tool_call>"), re.compile(r"<tool_call>"), _hermes),
    "mistral_v3": ToolFormat(re.compile(r"\[TOOL_CALLS\]"), re.compile(r"\[TOOL_CALLS\]"), _mistral),
    "llama3": ToolFormat(
        re.compile(r"<\|python_tag\|>|\"parameters\": dictionary"),
        re.compile(r"^\s*(<\|python_tag\|>\s*\{|\{\s*\"name\")"),
        _llama3,
    ),
}
"""By the names of ``rollout.tool_format``, the more special first."""


def format_of(template: str) -> str | None:
    """Name of the format that a chat template writes, or None where it writes none of ``FORMATS``."""
    return next((name for name, known in FORMATS.items() if known.marker.search(template)), None)


def written_by(template: str) -> ToolFormat | None:
    """The format that a chat template writes; None as ``format_of``."""
    return FORMATS.get(format_of(template) or "")


def _json_call(body: str) -> ToolCall:
    try:
        return _call_of(_loads(body), body)
    except ValueError:
        return ToolCall("", None, body)


def _call_of(call: Any, text: str) -> ToolCall:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", None, text)
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = _loads(arguments)
        except ValueError:
            arguments = None
    return ToolCall(call["name"], arguments if isinstance(arguments, dict) else None, text)


def _argument(text: str, parameters: Mapping[str, Any], name: str) -> Any:
    """Value of an argument in XML: of the type that the schema has for it, else JSON where it parses, else the text."""
    try:
        value = _loads(text)
    except ValueError:
        value = text
    return read_argument(text, value, parameters, name)


def _loads(text: str) -> Any:
    """Parse what a model wrote. Raises ValueError as ``_decoded``, and for text after the value."""
    value, rest = _decoded(text.strip())
    if rest.strip():
        raise ValueError("text after the value")
    return value


def _decoded(text: str) -> tuple[Any, str]:
    """(value, rest) of the JSON that a text begins with. Raises ValueError for what no strict JSON parser would take
    back from us."""
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
