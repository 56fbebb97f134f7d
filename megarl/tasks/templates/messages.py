"""Chat messages of rows with all fields, and other arguments of a row for the chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.core.schema import Message
from megarl.tasks.row_files import RowLocation, is_json
from megarl.tasks.templates.forms import SPEAKERS, as_messages
from megarl.tasks.templates.template import RESERVED

ROLES = ("system", "user", "assistant", "developer", "tool")
ASKING = ("user", "tool")
"""Roles of messages that the model responds to."""
AS_TEXT = re.compile(
    r"""\s*\[\s*\{\s*(?=['"](?:role|content|from|value)['"]\s*:)"""
    rf"""(?=.*['"](?:role['"]\s*:\s*['"]|from['"]\s*:\s*['"](?i:{"|".join(SPEAKERS)})['"]))"""
    r"""(?=.*['"](?:content|tool_calls|value)['"]\s*:).*\]\s*""",
    re.DOTALL,
)
"""A list of messages written as text: with roles and contents, or ShareGPT's names for them. Other JSON lists are plain
texts."""
OPTIONS = ("chat_template_kwargs", "tools", "enable_thinking")
"""Columns for the chat template: two of TRL, and verl's for one option."""


def messages_of(location: RowLocation, field: str, value: Any) -> tuple[Message, ...]:
    """Return chat messages. Raises DataError if there are none or one is invalid.

    Null fields and empty tool calls are dropped: parquet gives every message the fields of all. Nulls inside a field
    are dropped too, since parquet has no absent keys.
    """
    if not isinstance(value, list) or not value:
        location.refuse(field, "a non-empty list of {role, content} messages", value)
    return tuple(_message(location, f"{field}[{i}]", message) for i, message in enumerate(value))


def _message(location: RowLocation, field: str, message: Any) -> Message:
    if not isinstance(message, dict) or "role" not in message:
        location.refuse(field, "a message {role, content}", message)
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls") or None
    if role not in ROLES:
        location.refuse(f"{field}.role", f"one of {', '.join(ROLES)}", role)
    if "content" not in message and calls is None:
        location.refuse(field, "a message {role, content}", message)
    may_lack = role == "tool" or calls is not None
    if not (isinstance(content, str) and content) and not (may_lack and content in ("", None)):
        location.refuse(f"{field}.content", "a non-empty string", content)
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        location.refuse(f"{field}.tool_calls", "a list of structs", calls)
    for call in calls or ():
        function = call.get("function") or call
        if not isinstance(function, dict) or not isinstance(function.get("name") or "", str):
            location.refuse(f"{field}.tool_calls", "structs with a function whose name is a string", call)
        _check_arguments(location, f"{field}.tool_calls", function.get("arguments"))
    rest = {
        name: _without_nulls(location, value)
        for name, value in message.items()
        if name not in ("role", "content", "tool_calls")
    }
    others = {
        name: value
        for name, value in (rest | {"tool_calls": _without_nulls(location, calls)}).items()
        if value is not None
    }
    _check_json(location, field, others)
    return {"role": role, **({"content": content} if "content" in message else {}), **others}


def _check_arguments(location: RowLocation, field: str, arguments: Any) -> None:
    """Raise DataError unless a call's arguments are a struct, its JSON text, or missing."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            location.refuse(f"{field}.arguments", f"a struct or its JSON text ({error})", arguments)
    if not isinstance(value, dict | None):
        location.refuse(f"{field}.arguments", "a struct or its JSON text", arguments)
    _check_json(location, f"{field}.arguments", value)


def with_lists(location: RowLocation, row: Mapping[str, Any], fields: Sequence[str]) -> Mapping[str, Any]:
    """Return a row with lists of messages in ``fields``, converted from JSON texts and the forms of ``forms.py``.
    Raises DataError for messages written as other text, such as Python's."""
    found = dict(row)
    for field in fields:
        text = row.get(field)
        if isinstance(text, str) and AS_TEXT.fullmatch(text):
            try:
                found[field] = json.loads(text)
            except (ValueError, RecursionError) as error:
                location.refuse(field, f"a list of messages, their JSON text ({error}), or another text", text)
            _check_json(location, field, found[field])
        found[field] = as_messages(found.get(field))
    return found


def prompt_of(location: RowLocation, field: str, value: Any) -> tuple[Message, ...]:
    """Return chat messages that end with the user's or a tool's; a plain text becomes one user message. Raises
    DataError otherwise."""
    if isinstance(value, str) and value:
        return ({"role": "user", "content": value},)
    found = messages_of(location, field, value)
    if found[-1]["role"] not in ASKING:
        seen = found[-1]["role"]
        location.refuse(
            f"{field}[{len(found) - 1}].role", "user or tool, since the model answers the last message", seen
        )
    return found


def answer_of(location: RowLocation, field: str, value: Any) -> tuple[str, Message | None, tuple[Message, ...]]:
    """Return an answer's text, its message and the messages before it, from a text or messages that end with the
    assistant's.

    Raises DataError otherwise.
    """
    if not isinstance(value, list):
        if not isinstance(value, str) or not value:
            location.refuse(field, "a non-empty string, or messages that end with the assistant's", value)
        return value, None, ()
    *before, answer = messages_of(location, field, value)
    if answer["role"] != "assistant":
        location.refuse(
            f"{field}[{len(before)}].role", "assistant, since the last message is the answer", answer["role"]
        )
    return answer.get("content") or "", answer, tuple(before)


def template_kwargs_of(location: RowLocation, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's arguments for the chat template: ``chat_template_kwargs``, ``tools``, ``enable_thinking``. Structs
    may be JSON texts.

    Raises DataError otherwise.
    """
    found: dict[str, Any] = _parsed(location, "chat_template_kwargs", row.get("chat_template_kwargs"), dict) or {}
    found = {name: value for name, value in found.items() if value is not None}
    if reserved := next((name for name in found if name in RESERVED), None):
        location.refuse(f"chat_template_kwargs.{reserved}", "left out, since megarl sets it", found[reserved])
    if (tools := _parsed(location, "tools", row.get("tools"), list)) is not None:
        found["tools"] = tools
    if (thinking := row.get("enable_thinking")) is not None:
        if not isinstance(thinking, bool):
            location.refuse("enable_thinking", "true, false or null", thinking)
        found["enable_thinking"] = thinking
    if "tools" in found:
        tools = found["tools"]
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            location.refuse("tools", "a list of JSON schemas", tools)
        found = {name: value for name, value in found.items() if name != "tools" or value}
    if "tools" in found:
        found["tools"] = [_with_parameters(location, f"tools[{i}]", tool) for i, tool in enumerate(found["tools"])]
    return found


def _with_parameters(location: RowLocation, field: str, tool: dict[str, Any]) -> dict[str, Any]:
    """Parse a tool's parameters if they are JSON text: parquet has one struct type for all tools."""
    if isinstance(tool.get("function"), dict):
        return {**tool, "function": _with_parameters(location, f"{field}.function", tool["function"])}
    if not isinstance(tool.get("parameters"), str):
        return tool
    return {**tool, "parameters": _parsed(location, f"{field}.parameters", tool["parameters"], dict)}


def _parsed(location: RowLocation, field: str, value: Any, kind: type) -> Any:
    """Return a struct or list, or parse its JSON text, without the null fields that the file's format adds."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            location.refuse(field, f"JSON ({error})", value)
    else:
        value = _without_nulls(location, value)
    if value is not None and not isinstance(value, kind):
        location.refuse(field, f"a {'struct' if kind is dict else 'list'}, its JSON text, or null", value)
    _check_json(location, field, value)
    return value


def _without_nulls(location: RowLocation, value: Any) -> Any:
    """Return the value without null fields added by parquet; unchanged if from JSON."""
    return _cleaned(value) if isinstance(value, dict | list) and not is_json(location.path) else value


def _cleaned(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _cleaned(item) for name, item in value.items() if item is not None}
    return [_cleaned(item) for item in value] if isinstance(value, list) else value


def _check_json(location: RowLocation, field: str, value: Any) -> None:
    if value is None or value == {}:
        return
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        location.refuse(field, f"made of JSON values ({error})", value)
