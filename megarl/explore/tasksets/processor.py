"""Lengths of prompts with images, by the model's own processor. Imports torch and transformers; nothing else needs
it."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.core.errors import CheckpointError, DataError
from megarl.core.schema import Task
from megarl.explore.tasksets.files import place_of
from megarl.explore.tasksets.images import FORMATS, chat_messages
from megarl.explore.tasksets.tokenizer import PROCESSOR, ChatTokenizer


class Processor:
    """The processor of an HF checkpoint directory."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Processor:
        """Raises CheckpointError when the directory has none, or it cannot be loaded here."""
        folder = Path(path)
        if not any((folder / name).is_file() for name in PROCESSOR):
            raise CheckpointError(f"{folder}: no {' or '.join(PROCESSOR)}: this model takes text only")
        from transformers import AutoProcessor

        try:
            processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
        except (ImportError, OSError, ValueError, TypeError, KeyError) as error:
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise CheckpointError(f"{folder}: its processor cannot be loaded here: {reason}") from error
        if not hasattr(processor, "image_processor"):
            raise CheckpointError(f"{folder}: its processor takes no images")
        return cls(processor)

    def prompt_ids(self, text: str, images: Sequence[bytes]) -> np.ndarray:
        """int32 [P]; ids of a rendered prompt, each image's placeholder expanded. Decodes the images whole.

        Raises DataError when they are not as many as the text's placeholders, or cannot be decoded.
        """
        from PIL import Image

        try:
            decoded = [Image.open(io.BytesIO(image), formats=FORMATS).convert("RGB") for image in images]
            # A list of one prompt with its own list of images: the form that every processor takes.
            ids = self._processor(text=[text], images=[decoded], add_special_tokens=False)["input_ids"][0]
        except (OSError, ValueError, IndexError) as error:
            raise DataError(
                f"the model's processor refuses the prompt: {str(error).splitlines()[0] if str(error) else error!r}"
            ) from error
        return np.asarray(ids, dtype=np.int32)


def check_image_prompts(
    tasks: Sequence[Task],
    tokenizer: ChatTokenizer,
    processor: Processor,
    limit: int,
    *,
    path: str | os.PathLike[str] | None = None,
) -> None:
    """Refuse prompts that have more than ``limit`` tokens with their images. ``tasks`` are all rows of ``path`` in
    order.

    Raises DataError naming file, row, length and limit, and what ``Processor.prompt_ids`` and the chat template refuse.
    """
    for row, task in enumerate(tasks):
        where = place_of(path, row) if path is not None else f"task {task.task_id}"
        try:
            messages, kwargs = chat_messages(task), task.chat_template_kwargs
            length = len(
                processor.prompt_ids(tokenizer.render(messages, kwargs), task.images)
                if task.images
                else tokenizer.prompt_ids(messages, kwargs)
            )
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        if length > limit:
            raise DataError(
                f"{where}: prompt has {length} tokens with its {len(task.images)} images, rollout.max_prompt_tokens is "
                f"{limit}; raise it, make the images smaller, or drop the row"
            )
