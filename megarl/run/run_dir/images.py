"""The model's processor, where a job's rows have images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megarl.config import Config
from megarl.core.schema import Preference, Task
from megarl.run.run_dir.rows import Rows
from megarl.tasks import ChatTokenizer, Place, encode_rows

if TYPE_CHECKING:
    from megarl.tasks.images.processor import Processor


def processor_of(config: Config, splits: Iterable[Rows]) -> Processor | None:
    """Return the processor of ``model.path``, with the limits of ``model``; None where no row has images.

    Raises:
        CheckpointError: there is none, or it cannot be loaded.
    """
    if not any(row.images for rows in splits for row in rows):
        return None
    from megarl.tasks.images.processor import Processor  # imports torch and transformers

    return Processor.open(config.model.path, config.model.min_image_pixels, config.model.max_image_pixels)


def lengths_with_images(
    rows: Sequence[Task | Preference], tokenizer: ChatTokenizer, processor: Processor | None, *, path: Place
) -> list[int]:
    """Tokens of each row's prompt, images included where there is a processor.

    Raises:
        DataError: naming file and row of a prompt that the chat template or the processor refuses.
    """
    if processor is None:
        return [len(ids) for ids in encode_rows(rows, tokenizer, path=path)]
    from megarl.tasks.images.processor import prompt_lengths

    return prompt_lengths(rows, tokenizer, processor, path=path)
