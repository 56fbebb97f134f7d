"""Model inputs of images, and lengths of prompts with images, by the model's processor.

Imports torch and transformers, which no other module of ``tasks`` needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from megarl.core.durable import read_json
from megarl.core.errors import CheckpointError, DataError
from megarl.core.imports import do_without_videos
from megarl.core.pictures import decode, size_of
from megarl.core.schema import Task
from megarl.tasks.image_rows import chat_messages
from megarl.tasks.templates.tokenizer import PROCESSOR, ChatTokenizer, Place, Row, encode_rows, where

DEFAULT = (56 * 56, 28 * 28 * 1280)
"""Default limits of transformers' ``Qwen2VLImageProcessor``."""


class PixelLimits(NamedTuple):
    """Minimum and maximum pixels of a resized image."""

    low: int
    high: int

    @property
    def size(self) -> dict[str, int]:
        """``size`` setting of Qwen2-VL's image processors, which store pixels under the names of edges."""
        return {"shortest_edge": self.low, "longest_edge": self.high}


def pixel_limits(path: str | os.PathLike[str], low: int | None = None, high: int | None = None) -> PixelLimits:
    """Return ``low`` and ``high``; for None, the value of the processor in the checkpoint directory ``path``.

    Raises CheckpointError if a file is not a JSON object.
    """
    found = _image_processor(Path(path))
    size = found.get("size")
    size = size if isinstance(size, Mapping) else {}
    own = [
        _first(found.get(f"{end}_pixels"), size.get(edge), default)
        for end, edge, default in zip(("min", "max"), ("shortest_edge", "longest_edge"), DEFAULT, strict=True)
    ]
    return PixelLimits(_first(low, own[0]), _first(high, own[1]))


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _image_processor(folder: Path) -> Mapping[str, Any]:
    """Return the image processor's settings, from the file that transformers reads."""
    nested = read_json(folder / "processor_config.json").get("image_processor")
    return nested if isinstance(nested, Mapping) else read_json(folder / "preprocessor_config.json")


Grid = tuple[int, int, int]
"""Patches of an image in time (1), height and width."""
SHOWN_AFTER_S = 2.0
"""Seconds until a check of images shows a progress bar."""


class Processor:
    """Processor of an HF checkpoint directory. Its methods are thread-safe if ``has_grid``."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._images = processor.image_processor
        self.has_grid = type(self._images).__name__.startswith("Qwen2VLImageProcessor")
        """True for the image processors of Qwen2-VL and Qwen2.5-VL: width and height of an image determine its
        patches."""

    @property
    def placeholder(self) -> int:
        """Placeholder token of an image."""
        return int(self._processor.image_token_id)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], min_pixels: int | None = None, max_pixels: int | None = None
    ) -> Processor:
        """Open the processor; ``min_pixels`` and ``max_pixels`` (``model.min_image_pixels``,
        ``model.max_image_pixels``) override its limits.

        Raises CheckpointError if the directory has none, it cannot be loaded here, or a limit is given for a processor
        that does not limit pixels.
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
        """Return the patches of an image as :meth:`pixels` makes them, from the file's header, without decoding.

        Raises DataError if it is no image, too large or too narrow, or not ``has_grid``.
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
        """Return the number of an image's vectors, equal to its tokens in a prompt. Raises as :meth:`grid`."""
        time, rows, columns = self.grid(image)
        return time * rows * columns // self._images.merge_size**2

    def expand(self, ids: np.ndarray, images: Sequence[bytes]) -> np.ndarray:
        """Return int32 [T]: ``ids`` with each image's placeholder repeated once per vector of the image.

        Raises DataError as :meth:`grid`, and if placeholders and images differ in number.
        """
        places = ids == self.placeholder
        if (found := int(np.count_nonzero(places))) != len(images):
            raise _refused(f"it has {found} {self._processor.image_token} and {len(images)} images")
        counts = np.ones(len(ids), dtype=np.int64)
        counts[places] = [self.num_vectors(image) for image in images]
        return np.repeat(ids, counts)

    def pixels(self, image: bytes) -> tuple[np.ndarray, Grid]:
        """Return (float32 [patches, channels * temporal patch * patch²], its grid) of an image by the model's image
        processor.

        Raises DataError if decoding or the processor fails, or not ``has_grid``.
        """
        if not self.has_grid:
            raise DataError(f"{type(self._images).__name__} makes no patches of images, as Qwen2-VL's do")
        with _refusing():
            made = self._images(images=[decode(image)], return_tensors="pt")
        time, rows, columns = (int(count) for count in made["image_grid_thw"][0])
        return np.asarray(made["pixel_values"], dtype=np.float32), (time, rows, columns)

    def prompt_ids(self, text: str, images: Sequence[bytes]) -> np.ndarray:
        """Return int32 [P]: ids of a rendered prompt with expanded placeholders. Decodes the images.

        Raises DataError if the number of images differs from the placeholders, or an image cannot be decoded.
        """
        self._check_placeholders(text, len(images))
        with _refusing():
            decoded = [decode(image) for image in images]
            # one prompt with its list of images: every processor accepts this form
            ids = self._processor(text=[text], images=[decoded], add_special_tokens=False)["input_ids"][0]
        return np.asarray(ids, dtype=np.int32)

    def num_added(self, text: str, ids: np.ndarray, images: Sequence[bytes]) -> int:
        """Return the number of tokens that :meth:`prompt_ids` adds to ``ids``, the ids of the text. With ``has_grid``
        no image is decoded. Raises DataError as :meth:`prompt_ids`."""
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
    """Return the number of tokens that images add to each prompt of ``encode_rows``.

    Raises DataError naming file and row, as ``Processor.num_added`` and the chat template do.
    """
    return [0 if processor is None else _named(tasks, row, path, tokenizer, processor) for row in range(len(tasks))]


def prompt_lengths(
    tasks: Sequence[Row], tokenizer: ChatTokenizer, processor: Processor | None, *, path: Place | None = None
) -> list[int]:
    """Return the tokens of each row's prompt with its images; without a processor each image counts as one token.

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
    """Decode every image and refuse prompts of more than ``limit`` tokens, images included. Shows a progress bar.

    Args:
        tasks: All rows of ``path`` in order, or rows that ``path`` locates.

    Raises:
        DataError: naming file, row, length and limit; also if the processor or the chat template refuses a row.
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
    """Decode every image, with a progress bar. Raises DataError naming file and row of a truncated or damaged image."""
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
    """Yield for each task the reason why an image cannot be decoded, or None. Uses threads: Pillow releases the GIL."""

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
