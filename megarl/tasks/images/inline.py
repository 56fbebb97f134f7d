"""Move a row's images into its prompt as parts of message contents, for stores that keep only prompts."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.core.schema import Message, Task
from megarl.tasks.images.rows import chat_messages, images_of
from megarl.tasks.row_files import RowLocation


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
