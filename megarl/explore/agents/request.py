"""Protocol-independent requests of agents, their contents, and their responses.

In the form of chat templates an image is ``{type: image, image: BASE64}``: JSON, so that conversations have digests.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megarl.core.pictures import media_type, size_of
from megarl.core.schema import Message, Task
from megarl.tasks.image_rows import data_uri, messages_with

T = TypeVar("T")
MAX_N = 128
"""Most responses to one request, as OpenAI's."""


class BadRequest(Exception):
    """A request that cannot be served, with a text for the agent's author."""

    def __init__(self, text: str, code: str = "invalid_request") -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Asked:
    """A request."""

    messages: Sequence[Message]
    """In the form of chat templates: tool calls with their arguments as objects, images as in ``agents.content``."""
    tools: Sequence[Mapping[str, Any]] = ()
    n: int = 1
    max_tokens: int | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    """Options of the chat template, in addition to the task's."""
    thinking: bool | None = None
    """True if the client asks for thoughts, as a part of their own; None if it does not say."""


@dataclass(frozen=True)
class Reply:
    """One sampled response."""

    content: str
    """Its text, the thought included unless that is apart."""
    thought: str | None
    """The thought without its tags, if the client asked for thoughts."""
    calls: tuple[Message, ...]
    """Tool calls in the form of chat templates, each with an ``id``."""
    truncated: bool
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Fields:
    """Fields of a protocol's requests. A request with any other field is refused, so none is dropped unseen.

    Attributes:
        read: Fields that decide what is sampled or returned.
        unused: Fields that change neither, or that the job decides (``temperature``).
        neutral: Refused fields -> values that ask for nothing. null is one for every field.
    """

    read: frozenset[str]
    unused: frozenset[str]
    neutral: Mapping[str, tuple[Any, ...]]

    def check(self, body: Any) -> None:
        """Raise BadRequest for a field that cannot be honoured."""
        for name, value in object_field(body, "body").items():
            if value is None or name in self.read or name in self.unused:
                continue
            values = self.neutral.get(name, ())
            if not any(same_json(value, other) or is_number(value) and value == other for other in values):
                shown = f"`{name}`" if isinstance(value, dict | list | str) else f"`{name}`={json.dumps(value):.40}"
                instead = f"set it to {json.dumps(values[0])}, or " if values else ""
                raise BadRequest(f"{shown} is not supported while training; {instead}leave it out")


def is_number(value: Any) -> bool:
    """Return True for a number of JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool)


class Repeated:
    """Cache of values converted from a list that grows with each request."""

    def __init__(self) -> None:
        self._items: Sequence[Any] = ()
        self._make: Callable[[Any], Any] | None = None
        self._made: list[Any] = []

    def of(self, items: Sequence[Any], make: Callable[[Any], T]) -> list[T]:
        """Return the converted ``items``; the prefix shared with the last call is reused if ``make`` is the same. (An
        agent may use both protocols.)"""
        if make is not self._make:
            self._items, self._make = (), make
        pairs = zip(items, self._items, strict=False)
        same = next((i for i, (item, before) in enumerate(pairs) if not same_json(item, before)), None)
        same = min(len(items), len(self._items)) if same is None else same
        self._made = self._made[:same] + [make(item) for item in items[same:]]
        self._items = items
        return self._made


def same_json(one: Any, other: Any) -> bool:
    """Return True if two values are the same JSON: in Python 1 == True == 1.0."""
    if one is other or type(one) is not type(other) or one != other:
        return one is other
    if isinstance(one, dict):
        return all(same_json(value, other[name]) for name, value in one.items())
    return not isinstance(one, list) or all(map(same_json, one, other))


SentBack = Callable[[Reply], Message]
"""Returns the message with which a protocol's client sends a response back, as parsed by us."""


def text_field(value: Any, name: str) -> str:
    """Check a text. Raises BadRequest."""
    if not isinstance(value, str):
        raise BadRequest(f"`{name}` must be a text, got {value!r:.60}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"`{name}` has a lone surrogate, which no tokenizer takes") from error
    return value


def object_field(value: Any, name: str) -> dict[str, Any]:
    """Check an object. Raises BadRequest."""
    if not isinstance(value, dict):
        raise BadRequest(f"`{name}` must be an object, got {value!r:.60}")
    return value


def objects_field(value: Any, name: str) -> list[dict[str, Any]]:
    """Check a list of objects; none where it is missing. Raises BadRequest."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest(f"`{name}` must be a list of objects, got {value!r:.60}")
    return [object_field(item, f"{name}[{i}]") for i, item in enumerate(value)]


def count_field(body: Mapping[str, Any], name: str) -> int | None:
    """Check a positive integer, which may be missing. Raises BadRequest."""
    value = body.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise BadRequest(f"`{name}` must be a positive integer, got {value!r:.40}")
    return value


def uses_tools(choice: Any) -> bool:
    """Return False if a ``tool_choice`` turns tools off. Raises BadRequest for one that cannot be enforced."""
    if choice not in ("auto", "none"):
        raise BadRequest(f"`tool_choice`={choice!r:.60} cannot be enforced while training; set it to auto or none")
    return bool(choice == "auto")


def messages_field(body: Any) -> list[Any]:
    """Check that a body has messages and that the last is not the assistant's. Raises BadRequest."""
    messages = object_field(body, "body").get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest(f"`messages` must be a list with at least one message, got {messages!r:.60}")
    if object_field(messages[-1], f"messages[{len(messages) - 1}]").get("role") == "assistant":
        raise BadRequest(
            "the last message is the assistant's; a response that has ended cannot be continued while training. Add a "
            "message of the user or of a tool"
        )
    return messages


Content = str | list[dict[str, str]]
MOST = 1024
"""Most images of a request, equal to the maximum of ``rollout.max_images``."""


def content_of(content: Any, image_of: Callable[[Mapping[str, Any], str], str | None] | None = None) -> Content:
    """Convert a content into the form of chat templates: without images, texts are joined.

    Args:
        image_of: Returns the base64 image of a part, given with its name, or None for other parts. Without it only
            texts are allowed.

    Raises BadRequest.
    """
    if content is None or isinstance(content, str):
        return text_field(content or "", "content")
    if not isinstance(content, list):
        raise BadRequest(f"the content of a message must be a text, or a list of parts, got {content!r:.60}")
    parts: list[dict[str, str]] = []
    for i, value in enumerate(content):
        part, name = object_field(value, f"content[{i}]"), f"content[{i}]"
        if part.get("type") == "text":
            parts.append({"type": "text", "text": text_field(part.get("text"), f"{name}.text")})
        elif image_of is not None and (image := image_of(part, name)) is not None:
            parts.append({"type": "image", "image": image})
        else:
            kinds = "type text" if image_of is None else "type text, or images"
            raise BadRequest(f"the content of this message must be a text, or parts of {kinds}, got {part!r:.60}")
    return joined(parts)


def joined(parts: list[dict[str, str]]) -> Content:
    """Join the parts of a content if all are texts."""
    return parts if any(part["type"] == "image" for part in parts) else "".join(part["text"] for part in parts)


def images_of(messages: Sequence[Message]) -> tuple[bytes, ...]:
    """Return the image files of ``messages``, in order. Raises BadRequest for an invalid image or more than ``MOST``
    images."""
    lists = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    given = [part["image"] for content in lists for part in content if part["type"] == "image"]
    if len(given) > MOST:
        raise BadRequest(f"messages with {len(given)} images; send at most {MOST}")
    found = []
    for image in given:
        try:
            found.append(base64.b64decode(image, validate=True))
            size_of(found[-1])
        except (binascii.Error, ValueError) as error:
            raise BadRequest(f"an image of a message cannot be read: {error}") from error
    return tuple(found)


def bare(messages: Sequence[Message]) -> list[Message]:
    """Return messages with bare placeholders for images, as chat templates render them."""

    def without(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return [{"type": "image"} if part["type"] == "image" else part for part in content]

    return [{**message, "content": without(message.get("content"))} for message in messages]


def prompt_of(task: Task) -> list[Message]:
    """Return a task's prompt for an agent, with images as ``image_url`` parts with ``data:`` URIs."""
    return messages_with(
        task, lambda image: {"type": "image_url", "image_url": {"url": data_uri(image, media_type(image))}}
    )
