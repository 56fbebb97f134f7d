"""Images as a model takes them and lengths of prompts that have some, by the model's own processor. Imports torch and
transformers; nothing else needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megarl.core.errors import CheckpointError, DataError
from megarl.core.pictures import decode, size_of
from megarl.core.schema import Task
from megarl.core.without_videos import do_without_videos
from megarl.tasks.images.pixels import pixel_limits
from megarl.tasks.images.rows import chat_messages
from megarl.tasks.templates.tokenizer import PROCESSOR, ChatTokenizer, Place, Row, encode_rows, where

Grid = tuple[int, int, int]
"""Patches of an image in time (1), height and width."""
SHOWN_AFTER_S = 2.0
"""Seconds until a check of images shows a progress bar."""


class Processor:
    """The processor of an HF checkpoint directory. Its methods may be called by several threads where ``has_grid``."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._images = processor.image_processor
        self.has_grid = type(self._images).__name__.startswith("Qwen2VLImageProcessor")
        """True for the image processors of Qwen2-VL and Qwen2.5-VL: the patches of an image follow from its width and
        height."""

    @property
    def placeholder(self) -> int:
        """Placeholder token of an image."""
        return int(self._processor.image_token_id)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], min_pixels: int | None = None, max_pixels: int | None = None
    ) -> Processor:
        """Open the processor; ``min_pixels`` and ``max_pixels`` (``model.min_image_pixels`` and
        ``model.max_image_pixels``) go before its own limits.

        Raises CheckpointError when the directory has none, it cannot be loaded here, or it resizes images by other
        limits than pixels and one is given.
        """
        folder = Path(path)
        if not any((folder / name).is_file() for name in PROCESSOR):
            raise CheckpointError(f"{folder}: no {' or '.join(PROCESSOR)}: this model takes text only")
        do_without_videos()
        from transformers import AutoProcessor

        try:
            processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
        except (ImportError, OSError, ValueError, TypeError, KeyError) as error:
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise CheckpointError(f"{folder}: its processor cannot be loaded here: {reason}") from error
        if not hasattr(processor, "image_processor"):
            raise CheckpointError(f"{folder}: its processor takes no images")
        found = cls(processor)
        if (min_pixels, max_pixels) != (None, None):
            found._limit(folder, min_pixels, max_pixels)
        return found

    def _limit(self, folder: Path, low: int | None, high: int | None) -> None:
        from transformers.image_utils import SizeDict

        if not self.has_grid:
            raise CheckpointError(
                f"{folder}: {type(self._images).__name__} has no limits in pixels; leave model.min_image_pixels and "
                "model.max_image_pixels out"
            )
        self._images.size = SizeDict(**pixel_limits(folder, low, high).size)

    def grid(self, image: bytes) -> Grid:
        """Patches of an image as :meth:`pixels` makes them, from the head of its file: nothing is decoded.

        Raises DataError for what is no image, is too large or too narrow, and where not ``has_grid``.
        """
        if not self.has_grid:
            raise DataError(f"patches of {type(self._images).__name__} do not follow from the size of an image alone")
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        own = self._images
        try:
            width, height = size_of(image)
            rows, columns = smart_resize(
                height,
                width,
                factor=own.patch_size * own.merge_size,
                min_pixels=own.size["shortest_edge"],
                max_pixels=own.size["longest_edge"],
            )
        except ValueError as error:
            raise _refused(error) from error
        return 1, rows // own.patch_size, columns // own.patch_size

    def num_vectors(self, image: bytes) -> int:
        """Return the number of an image's vectors, and so its tokens in a prompt. Raises as :meth:`grid`."""
        time, rows, columns = self.grid(image)
        return time * rows * columns // self._images.merge_size**2

    def expand(self, ids: np.ndarray, images: Sequence[bytes]) -> np.ndarray:
        """int32 [T] with as many placeholders for each image as it has vectors, from ``ids`` with one for each.

        Raises DataError as :meth:`grid`, and for other numbers of placeholders than images.
        """
        places = ids == self.placeholder
        if (found := int(np.count_nonzero(places))) != len(images):
            raise _refused(f"it has {found} {self._processor.image_token} and {len(images)} images")
        counts = np.ones(len(ids), dtype=np.int64)
        counts[places] = [self.num_vectors(image) for image in images]
        return np.repeat(ids, counts)

    def pixels(self, image: bytes) -> tuple[np.ndarray, Grid]:
        """(float32 [patches, channels * temporal patch * patch²], its grid) of an image by the model's image processor.

        Raises DataError for what cannot be decoded or the processor refuses, and where not ``has_grid``.
        """
        if not self.has_grid:
            raise DataError(f"{type(self._images).__name__} makes no patches of images, as Qwen2-VL's do")
        with _refusing():
            made = self._images(images=[decode(image)], return_tensors="pt")
        time, rows, columns = (int(count) for count in made["image_grid_thw"][0])
        return np.asarray(made["pixel_values"], dtype=np.float32), (time, rows, columns)

    def prompt_ids(self, text: str, images: Sequence[bytes]) -> np.ndarray:
        """Return int32 [P]: ids of a rendered prompt with expanded placeholders. Decodes the images whole.

        Raises DataError when they are not as many as the text's placeholders, or cannot be decoded.
        """
        self._check_placeholders(text, len(images))
        with _refusing():
            decoded = [decode(image) for image in images]
            # A list of one prompt with its own list of images: the form that every processor takes.
            ids = self._processor(text=[text], images=[decoded], add_special_tokens=False)["input_ids"][0]
        return np.asarray(ids, dtype=np.int32)

    def num_added(self, text: str, ids: np.ndarray, images: Sequence[bytes]) -> int:
        """Number of tokens by which :meth:`prompt_ids` is longer than ``ids``, those of the text; where ``has_grid``
        nothing is decoded for it. Raises DataError as that does, and for other numbers of placeholders than images."""
        if not self.has_grid:
            return len(self.prompt_ids(text, images)) - len(ids)
        self._check_placeholders(text, len(images))
        return sum(self.num_vectors(image) - 1 for image in images)

    def _check_placeholders(self, text: str, images: int) -> None:
        """Raise DataError if Qwen2-VL's processor would skip an image or expect a missing one."""
        token = getattr(self._processor, "image_token", None)
        if self.has_grid and token is not None and (found := text.count(token)) != images:
            raise _refused(
                f"it has {found} {token} and {images} images; write <image> once for each image, and no token of "
                "images in the text"
            )


@contextmanager
def _refusing() -> Iterator[None]:
    """Raise DataError for any exception of a model's processor in the body."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise _refused(error) from error


def _refused(error: Exception | str) -> DataError:
    reason = str(error).splitlines()[0] if str(error) else repr(error)
    return DataError(f"the model's processor refuses the prompt: {reason}")


def added_lengths(
    tasks: Sequence[Row], tokenizer: ChatTokenizer, processor: Processor | None, *, path: Place | None = None
) -> list[int]:
    """Number of tokens by which each prompt is longer with its images than ``encode_rows`` gives it.

    Raises DataError naming file and row, as ``Processor.num_added`` does, and the chat template.
    """
    return [0 if processor is None else _named(tasks, row, path, tokenizer, processor) for row in range(len(tasks))]


def prompt_lengths(
    tasks: Sequence[Row], tokenizer: ChatTokenizer, processor: Processor | None, *, path: Place | None = None
) -> list[int]:
    """Tokens of each row's prompt with its images; without a processor with one token for each image.

    Raises as ``encode_rows`` and :func:`added_lengths`.
    """
    added = added_lengths(tasks, tokenizer, processor, path=path)
    encoded = encode_rows(tasks, tokenizer, path=path)
    return [len(ids) + more for ids, more in zip(encoded, added, strict=True)]


def check_image_prompts(
    tasks: Sequence[Task],
    tokenizer: ChatTokenizer,
    processor: Processor,
    limit: int | None,
    *,
    path: Place | None = None,
) -> None:
    """Decode every image; refuse prompts that have more than ``limit`` tokens with their images. Shows a progress bar.

    Args:
        tasks: All rows of ``path`` in order, or ones whose places it names.

    Raises:
        DataError: naming file, row, length and limit; and what the model's processor and its chat template refuse.
    """
    lengths = prompt_lengths(tasks, tokenizer, processor, path=path)
    for row, (task, length) in enumerate(zip(tasks, lengths, strict=True)):
        if limit is not None and length > limit:
            images = f" with its {len(task.images)} images" if task.images else ""
            fix = ", make the images smaller (model.max_image_pixels), or" if task.images else " or"
            raise DataError(
                f"{where(tasks, row, path)}: prompt has {length} tokens{images}, rollout.max_prompt_tokens is {limit}; "
                f"raise it{fix} drop the row"
            )
    check_image_files(tasks, path=path)


def check_image_files(tasks: Sequence[Row], *, path: Place | None = None) -> None:
    """Decode every image, with a progress bar. Raises DataError naming file and row of one that is truncated or
    damaged."""
    rows = [row for row, task in enumerate(tasks) if task.images]
    bar = tqdm(
        total=sum(len(tasks[row].images) for row in rows),
        desc="images",
        unit=" images",
        delay=SHOWN_AFTER_S,
        leave=False,
        disable=None,
        file=sys.stderr,
    )
    with bar:
        for row, fault in zip(rows, _faults([tasks[row] for row in rows]), strict=True):
            if fault is not None:
                raise DataError(f"{where(tasks, row, path)}: {fault}") from fault
            bar.update(len(tasks[row].images))


def _faults(tasks: Sequence[Row]) -> Iterator[ValueError | None]:
    """Yield for each task the reason why an image cannot be decoded. Uses threads: Pillow releases Python's lock."""

    def fault_of(task: Row) -> ValueError | None:
        try:
            for image in task.images:
                decode(image)
        except ValueError as error:
            return error
        return None

    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield from pool.map(fault_of, tasks)
    finally:
        pool.shutdown(cancel_futures=True)


def _named(tasks: Sequence[Row], row: int, path: Place | None, tokenizer: ChatTokenizer, processor: Processor) -> int:
    task = tasks[row]
    if not task.images:
        return 0
    try:
        text = tokenizer.render(chat_messages(task), task.chat_template_kwargs)
        return processor.num_added(text, tokenizer.rendered_ids(text), task.images)
    except DataError as error:
        raise DataError(f"{where(tasks, row, path)}: {error}") from error
