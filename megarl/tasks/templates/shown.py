"""Check that a chat template renders every message and tool call of a conversation.

Templates may skip unknown roles, second calls and unknown contents. So the conversation is rendered again with a marker
in place of each content and each call's arguments. Every marker must be in the text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megarl.core.errors import DataError

Messages = Sequence[Mapping[str, Any]]
"""``{role, content, …}``; content is a text, None with tool calls, or a list of parts as in ``chat_messages``."""
MARKER = "0f1e2d3c{:06d}"
MOST = 1024
"""Maximum cached conversation shapes."""


class ShownMessages:
    """Cache of conversation shapes that a template renders completely: roles, fields, kinds of contents, options."""

    def __init__(self) -> None:
        self._whole: set[bytes] = set()
        """Digests of the shapes, because options may be long documents."""

    def check(self, messages: Messages, key: Any, render: Callable[[Messages], str]) -> None:
        """Raise DataError for a message or call missing in the text of ``render``.

        Args:
            key: The template's other inputs.
        """
        shape = hashlib.sha256(ascii((key, [_shape(message) for message in messages])).encode()).digest()
        if shape in self._whole:
            return
        marked = _Marked(messages)
        try:
            text = render(marked.messages)
        except DataError:  # a template that reads contents and accepts only the real ones
            text = render(messages)
            lost = next((what for _, what, given in marked.places if not _is_in(given, text)), None)
        else:
            lost = next((what for marker, what, _ in marked.places if marker not in text), None)
        if lost is not None:
            raise DataError(
                f"the model's chat template leaves out {lost}; write it as the template does (another role, one call a "
                "message), or take a template that writes it"
            )
        if len(self._whole) >= MOST:
            self._whole.clear()
        self._whole.add(shape)


class _Marked:
    """A conversation with markers in place of its texts, and the texts that they replace."""

    def __init__(self, messages: Messages) -> None:
        self.places: list[tuple[str, str, str]] = []
        """(marker, description of the text, the text)"""
        self.messages = [self._message(number, message) for number, message in enumerate(messages)]

    def _mark(self, what: str, text: str) -> str:
        marker = MARKER.format(len(self.places))
        self.places.append((marker, f"{what}: {text[:60]!r}", text))
        return marker

    def _message(self, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
        found, what = dict(message), f"message {number} ({message.get('role')})"
        content = message.get("content")
        if isinstance(content, str) and content.strip():
            found["content"] = self._mark(what, content)
        elif isinstance(content, list):
            found["content"] = [self._part(what, part) for part in content]
        if calls := message.get("tool_calls"):
            found["tool_calls"] = [self._call(f"call {i + 1} of {what}", call) for i, call in enumerate(calls)]
        return found

    def _part(self, what: str, part: Any) -> Any:
        text = part.get("text") if isinstance(part, dict) else None
        return {**part, "text": self._mark(what, text)} if isinstance(text, str) and text.strip() else part

    def _call(self, what: str, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function") or call
        name, arguments = function.get("name"), function.get("arguments")
        marked: dict[str, Any] = {}
        if isinstance(arguments, dict) and arguments:
            marked = {"arguments": {key: self._mark(what, str(key)) for key in arguments}}
        elif isinstance(arguments, str) and arguments:
            marked = {"arguments": json.dumps({"a": self._mark(what, arguments)})}
        elif isinstance(name, str) and name:
            marked = {"name": self._mark(what, name)}
        return {**call, "function": {**function, **marked}} if "function" in call else {**call, **marked}


def _shape(message: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a message that a template may depend on: role, fields and kinds of values."""
    return [message.get("role"), *((name, _kind(value)) for name, value in message.items() if name != "role")]


def _kind(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: value[name] if name == "type" else _kind(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_kind(part) for part in value]
    return type(value).__name__, bool(value.strip() if isinstance(value, str) else value)


def _is_in(given: str, text: str) -> bool:
    """Return True if a text contains the given text, plain or as JSON."""
    return any(form in text for form in (given.strip(), json.dumps(given.strip(), ensure_ascii=False)[1:-1]))


# ---------------------------------------------------------------- arguments that are JSON text


def argument_texts(messages: Messages) -> Iterator[str]:
    """Yield call arguments that are texts (OpenAI's wire format)."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = (call.get("function") or call).get("arguments")
            if isinstance(arguments, str):
                yield arguments


def is_verbatim(arguments: str, text: str) -> bool:
    """Return True if a rendered text has the arguments verbatim, not as a JSON string; False for empty arguments."""
    encoded = (json.dumps(arguments, ensure_ascii=ascii_only) for ascii_only in (False, True))
    return bool(arguments.strip()) and arguments.strip() in text and not any(form in text for form in encoded)


def with_objects(messages: Messages) -> list[dict[str, Any]]:
    """Return messages with call arguments parsed from JSON text to objects; other texts are unchanged."""

    def parsed(call: Mapping[str, Any]) -> dict[str, Any]:
        if "function" in call:
            return {**call, "function": parsed(call["function"])}
        arguments = call.get("arguments")
        if not isinstance(arguments, str):
            return dict(call)
        try:
            return {**call, "arguments": json.loads(arguments) if arguments.strip() else {}}
        except ValueError:
            return dict(call)

    return [
        {**message, "tool_calls": [parsed(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]
