"""Tool calls as model families write them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megarl.core.durable import without_surrogates

MAX_DEPTH = 64
"""Most levels of arguments."""


@dataclass(frozen=True)
class ToolCall:
    """One call. ``arguments`` is None where the model wrote something that is no object of arguments."""

    name: str
    arguments: dict[str, Any] | None
    text: str
    """Text of the call as the model wrote it."""


@dataclass(frozen=True)
class ToolFormat:
    """Form in which a model family writes calls."""

    marker: re.Pattern[str]
    """Found in chat templates of the family."""
    start: re.Pattern[str]
    """Begin of the first call in a response; the text before it is the response's content."""
    calls: Callable[[str], Iterator[ToolCall]]
    """Calls in the text from ``start`` on."""

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """Split a response, special tokens included, into its content and its calls."""
        found = self.start.search(text)
        if found is None:
            return text, []
        calls = list(self.calls(text[found.start() :]))
        return (text[: found.start()].rstrip(), calls) if calls else (text, [])


def _hermes(text: str) -> Iterator[ToolCall]:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``"""
    for body in re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL):
        yield _json_call(body.strip())


def _glm4(text: str) -> Iterator[ToolCall]:
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``; values as Qwen3-Coder's."""
    for body in re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL):
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.DOTALL)
        yield ToolCall(body.partition("<arg_key>")[0].strip(), {key: _value(value) for key, value in pairs}, body)


def _qwen3_coder(text: str) -> Iterator[ToolCall]:
    """``<function=NAME><parameter=KEY>VALUE</parameter></function>``; values are texts, or JSON where they parse."""
    for name, body in re.findall(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", text, re.DOTALL):
        pairs = re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", body, re.DOTALL)
        yield ToolCall(name, {key: _value(value) for key, value in pairs}, body)


def _llama3(text: str) -> Iterator[ToolCall]:
    """``<|python_tag|>{"name": …, "parameters": {…}}``, several separated by semicolons; the tag may be missing."""
    rest = text.removeprefix("<|python_tag|>").lstrip()
    while rest.startswith("{"):
        try:
            _, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            yield ToolCall("", None, rest)
            return
        yield _json_call(rest[:end])
        rest = rest[end:].lstrip().removeprefix(";").lstrip()


def _mistral(text: str) -> Iterator[ToolCall]:
    """``[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]NAME[ARGS]{…}`` of later models."""
    for body in text.split("[TOOL_CALLS]")[1:]:
        name, args, arguments = body.strip().partition("[ARGS]")
        if args:
            yield ToolCall(name, _object(arguments), body)
            continue
        try:
            listed, _ = json.JSONDecoder().raw_decode(body.strip())
        except (ValueError, RecursionError):
            yield ToolCall("", None, body)
            continue
        for call in listed if isinstance(listed, list) else [listed]:
            try:
                yield _json_call(json.dumps(call))
            except RecursionError:
                yield ToolCall("", None, body)


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
    call = _object(body)
    if call is None or not isinstance(call.get("name"), str):
        return ToolCall("", None, body)
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        arguments = _object(arguments)
    return ToolCall(call["name"], arguments if isinstance(arguments, dict) else None, body)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = _loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _value(text: str) -> Any:
    try:
        return _loads(text)
    except ValueError:
        return text


def _loads(text: str) -> Any:
    """Parse what a model wrote. Raises ValueError for what no strict JSON parser would take back from us."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not _is_plain(value, MAX_DEPTH):
        raise ValueError(f"a number that is not finite, a lone surrogate, or more than {MAX_DEPTH} levels")
    return value


def _is_plain(value: Any, levels: int) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return value == without_surrogates(value)
    if isinstance(value, dict):
        return levels > 0 and all(_is_plain(part, levels - 1) for pair in value.items() for part in pair)
    return not isinstance(value, list) or (levels > 0 and all(_is_plain(part, levels - 1) for part in value))
