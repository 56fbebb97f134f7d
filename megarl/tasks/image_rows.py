"""Images of rows in verl's form, and their place in the prompt.

A task keeps each image as the bytes of its file: the store keeps them, and any node can read them there.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.core.pictures import size_of
from megarl.core.schema import Message, Preference, Task
from megarl.tasks.row_files import RowLocation

PLACEHOLDER = "<image>"
MAX_IMAGES = 16
MAX_ROW_BYTES = 32 * 2**20
"""Maximum bytes of a row's image files together. The store and each engine request carry them (requests a third more,
as base64)."""


def images_of(location: RowLocation, row: Mapping[str, Any], field: str = "prompt") -> tuple[tuple[bytes, ...], Any]:
    """Return a row's images, and its prompt with text contents that have an ``<image>`` for each.

    An image is ``{bytes, path}`` as in Hugging Face's ``datasets``, ``{image: …}``, or bare: bytes, a path (relative to
    the file of rows) or a ``data:`` URI. A column ``image`` has one image; without an ``<image>`` in the prompt it goes
    first in the user's first message. A content may be a list of parts, which may contain the images. A text without
    images keeps a literal ``<image>``.

    Args:
        field: Name of the prompt's column, for messages.

    Raises DataError if images cannot be read or are too large, or differ in number from the ``<image>`` marks.
    """
    if row.get("videos"):
        location.refuse("videos", "empty, since videos are not supported", row["videos"])
    single = row.get("image")
    column = row.get("images") if row.get("images") or single is None else [single]
    values: list[Any] = [column] if isinstance(column, dict | bytes) else column or []
    if not isinstance(values, list):
        location.refuse("images", "a list of images, or one", column)
    prompt, inline = _as_texts(location, row.get("prompt"), field)
    if single is not None and len(values) == 1 and not inline:
        prompt = _with_placeholder(prompt)
    if inline and values:
        location.refuse("images", "empty where the prompt's parts hold the images themselves", f"{len(values)} images")
    values = values or inline
    found = tuple(_read(location, f"images[{i}]", value) for i, value in enumerate(values))
    if not found:
        return (), prompt
    if len(found) > MAX_IMAGES or sum(map(len, found)) > MAX_ROW_BYTES:
        seen = f"{len(found)} images of {sum(map(len, found)) / 2**20:.1f} MiB"
        location.refuse("images", f"at most {MAX_IMAGES} images of {MAX_ROW_BYTES // 2**20} MiB together", seen)
    wanted = sum(_content(message).count(PLACEHOLDER) for message in prompt or () if isinstance(message, dict))
    if wanted != len(found):
        location.refuse("images", f"as many as the prompt has {PLACEHOLDER} ({wanted})", len(found))
    return found, prompt


def with_messages(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row with a text prompt converted to a user message."""
    prompt = row["prompt"]
    return {**row, "prompt": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) and prompt else row


def chat_messages(task: Task | Preference) -> list[dict[str, Any]]:
    """Return the prompt for a chat template; with images, each content is a list of ``{type: image}`` and
    ``{type: text}``."""
    if not task.images:
        return [dict(message) for message in task.prompt]
    return with_parts(task.prompt)


def png_of(pixels: np.ndarray) -> bytes:
    """Return the PNG file of a picture, uint8 [height, width, 3]."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(file, "PNG")
    return file.getvalue()


def placed(texts: Sequence[str], images: Sequence[bytes]) -> list[str]:
    """Return texts with one ``<image>`` per image; if none has one, all go before the first text.

    Raises ValueError if the texts have another number of them.
    """
    found = sum(text.count(PLACEHOLDER) for text in texts)
    if images and not found:
        return [PLACEHOLDER * len(images) + texts[0], *texts[1:]]
    if images and found != len(images):
        raise ValueError(f"a message has {found} {PLACEHOLDER} and {len(images)} images; write one for each, or none")
    return list(texts)


def with_parts(messages: Sequence[Message]) -> list[Message]:
    """Return messages with ``<image>`` placeholders as image parts, for a chat template."""
    return [{**message, "content": _parts(message.get("content"))} for message in messages]


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _parts(content: str | None) -> list[dict[str, Any]]:
    """Split a text at placeholders as verl does, without empty parts."""
    parts: list[dict[str, Any]] = []
    for i, text in enumerate((content or "").split(PLACEHOLDER)):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def with_text(message: Any) -> Any:
    """Return an answer's message with content of only ``{type: text, text}`` parts joined into a text."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _as_texts(location: RowLocation, prompt: Any, field: str) -> tuple[Any, list[Any]]:
    """Return (the prompt with texts for lists of parts, the images in the parts). Invalid messages stay, for later
    checks to refuse."""
    if not isinstance(prompt, list):
        return prompt, []
    messages: list[Any] = []
    images: list[Any] = []
    for i, message in enumerate(prompt):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            messages.append(message)
            continue
        texts = []
        for j, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
            elif kind == "image":
                texts.append(PLACEHOLDER)
                images += [part["image"]] if part.get("image") is not None else []
            else:
                location.refuse(f"{field}[{i}].content[{j}]", "{type: text, text} or {type: image}", part)
        messages.append({**message, "content": "".join(texts)})
    return messages, images


def _with_placeholder(prompt: Any) -> Any:
    """Return a prompt with ``<image>`` before its first user message's text, unless it already has one."""
    messages = prompt if isinstance(prompt, list) else []
    users = [i for i, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "user"]
    if not users or any(PLACEHOLDER in _content(message) for message in messages if isinstance(message, dict)):
        return prompt
    first = messages[users[0]]
    return [*messages[: users[0]], {**first, "content": PLACEHOLDER + _content(first)}, *messages[users[0] + 1 :]]


def _read(location: RowLocation, field: str, value: Any) -> bytes:
    data = _bytes(location, field, value)
    try:
        size_of(data)
    except ValueError as error:
        location.refuse(field, "an image", f"{len(data)} bytes, {error}")
    return data


def _bytes(location: RowLocation, field: str, value: Any) -> bytes:
    if isinstance(value, dict):
        given = [value[key] for key in ("bytes", "image", "path") if value.get(key) is not None]
        if not given or isinstance(given[0], dict):
            location.refuse(field, "{bytes, path} or {image}, one of them given", value)
        return _bytes(location, field, given[0])
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        location.refuse(field, "{bytes, path}, {image}, bytes, a path or a data: URI", value)
    if value.startswith("data:"):
        try:
            return base64.b64decode(value.partition(",")[2], validate=True)
        except binascii.Error as error:
            location.refuse(field, f"a data: URI in base64 ({error})", value)
    if value.startswith(("http://", "https://")):
        location.refuse(field, "a file here, since nothing is downloaded", value)
    path = location.path.parent / Path(value.removeprefix("file://"))
    try:
        if path.stat().st_size > MAX_ROW_BYTES:
            location.refuse(field, f"at most {MAX_ROW_BYTES // 2**20} MiB", str(path))
        return path.read_bytes()
    except OSError as error:
        location.refuse(field, f"a file that can be read ({error.strerror})", str(path))


def columns_of(tasks: Sequence[Task | Preference]) -> list[list[dict[str, Any]]]:
    """Return the column ``images`` of these tasks in the form of Hugging Face's ``datasets``."""
    return [[{"bytes": image, "path": None} for image in task.images] for task in tasks]


def with_inline_images(task: Task) -> Task:
    """Move a row's images into its prompt as parts ``{type: image, image: data: URI}``; other rows stay unchanged."""
    if not task.images:
        return task
    return replace(
        task, prompt=tuple(messages_with(task, lambda i: {"type": "image", "image": data_uri(i)})), images=()
    )


def without_inline_images(task: Task) -> Task:
    """Undo :func:`with_inline_images`. Raises DataError for parts without an image."""
    if not any(isinstance(message.get("content"), list) for message in task.prompt):
        return task
    images, prompt = images_of(RowLocation(Path(task.task_id), 0), {"prompt": list(task.prompt)})
    return replace(task, prompt=tuple(prompt), images=images)


def messages_with(task: Task, part_of: Callable[[bytes], dict[str, Any]]) -> list[Message]:
    """Return a prompt's messages with each image replaced by ``part_of(image)``."""
    images = iter(task.images)

    def with_files(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return [part_of(next(images)) if part["type"] == "image" else part for part in content]

    return [{**message, "content": with_files(message.get("content"))} for message in chat_messages(task)]


def data_uri(image: bytes, kind: str = "application/octet-stream") -> str:
    """Return a file as a data URI, as allowed in rows. ``kind``: its media type."""
    return f"data:{kind};base64,{base64.b64encode(image).decode()}"
