"""Images of a row inside its prompt, as parts of the messages' contents: a store of prompts alone keeps them so."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.core.schema import Task
from megarl.explore.tasksets.files import RowLocation
from megarl.explore.tasksets.images import chat_messages, images_of


def with_inline_images(task: Task) -> Task:
    """Move a row's images into its prompt, each as a part ``{type: image, image: data: URI}``; rows of text stay."""
    if not task.images:
        return task
    images = iter(task.images)
    return replace(task, prompt=tuple(_with_files(message, images) for message in chat_messages(task)), images=())


def without_inline_images(task: Task) -> Task:
    """Take the images out again. Raises DataError for parts that hold no image."""
    if not any(isinstance(message.get("content"), list) for message in task.prompt):
        return task
    images, prompt = images_of(RowLocation(Path(task.task_id), 0), {"prompt": list(task.prompt)})
    return replace(task, prompt=tuple(prompt), images=images)


def data_uri(image: bytes) -> str:
    """A file as text, as rows may have it."""
    return f"data:application/octet-stream;base64,{base64.b64encode(image).decode()}"


def _with_files(message: dict[str, Any], images: Iterator[bytes]) -> dict[str, Any]:
    parts = [
        part if part["type"] != "image" else part | {"image": data_uri(next(images))} for part in message["content"]
    ]
    return message | {"content": parts}
