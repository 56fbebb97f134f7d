"""Contents of agents' messages: a text, or a list of texts and images.

In the form of chat templates an image is ``{type: image, image: BASE64}``: JSON, so that conversations have digests.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarl.core.pictures import media_type, size_of
from megarl.core.schema import Message, Task
from megarl.explore.agents.request import BadRequest, object_field, text_field
from megarl.tasks.images.inline import data_uri, messages_with

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
