"""Images among the turns of a trajectory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from megarl.config import Config
from megarl.core.schema import Turn, file_digest
from megarl.tasks.image_rows import MAX_ROW_BYTES
from megarl.tasks.templates.tokenizer import PROCESSOR

OF_TEXT = ("single_turn", "reflect", "best_of_n", "tools")
"""Workflows without images besides the task's."""


class Expander(Protocol):
    """Part of ``tasksets.processor.Processor``."""

    @property
    def placeholder(self) -> int: ...

    def grid(self, image: bytes) -> tuple[int, int, int]: ...

    def expand(self, ids: np.ndarray, images: Sequence[bytes]) -> np.ndarray: ...


@dataclass(frozen=True)
class ImageRules:
    """The model's processor, and limits of the images on a line of turns."""

    processor: Expander
    images: int
    """Most images of a line (``rollout.max_images``)."""
    patches: float = math.inf
    """Most patches of all its images together (``trainer.max_patches_per_micro_batch``)."""
    nbytes: int = MAX_ROW_BYTES
    """Most bytes of all its image files together, since each engine call includes them."""

    @classmethod
    def of(cls, config: Config) -> ImageRules | None:
        """Return a job's rules; None if its workflow writes no images or its model takes none. Otherwise imports torch
        and transformers."""
        model, writes = config.model, config.rollout.workflow not in OF_TEXT
        if not writes or not any((Path(model.path) / name).is_file() for name in PROCESSOR):
            return None
        from megarl.tasks.image_processor import Processor

        processor = Processor.open(model.path, model.min_image_pixels, model.max_image_pixels)
        patches = config.trainer.max_patches_per_micro_batch or math.inf
        return cls(processor, config.rollout.max_images, patches) if processor.has_grid else None


class RecordedImages:
    """Images of one trajectory.

    An engine gets a turn's tokens as rendered, with one placeholder for each image, and expands them.

    Args:
        rules: None if only tasks have images; engines then return the number of their tokens.
    """

    def __init__(self, rules: ImageRules | None) -> None:
        self._rules = rules
        self._files: dict[str, bytes] = {}
        self._rendered: dict[int, np.ndarray] = {}
        """Index of a turn with images -> its tokens as they were rendered."""

    def expanded(self, ids: np.ndarray, images: Sequence[bytes]) -> np.ndarray:
        """Return int32 [T] with a placeholder for each vector of each image. Raises DataError if images and
        placeholders do not match, or the model's processor refuses an image."""
        return ids if self._rules is None else self._rules.processor.expand(ids, images)

    def put(self, turn: int, ids: np.ndarray, images: Sequence[bytes]) -> tuple[str, ...]:
        """Record the images of a turn and its rendered tokens; return the images' digests."""
        if not images:
            return ()
        digests = tuple(file_digest(image) for image in images)
        self._files |= zip(digests, images, strict=True)
        self._rendered[turn] = ids
        return digests

    def on_line(self, line: Sequence[int], turns: Sequence[Turn]) -> tuple[bytes, ...]:
        """Files of the images of a line of turns, in order."""
        return tuple(self._files[digest] for i in line for digest in turns[i].images)

    def context(self, line: Sequence[int], turns: Sequence[Turn]) -> np.ndarray:
        """Return int32 [T]: a line of turns as sent to an engine with its images."""
        return np.concatenate([self._rendered.get(i, turns[i].token_ids) for i in line])

    def unexpanded(self, line: Sequence[int], turns: Sequence[Turn]) -> int | None:
        """Return the turn whose images' number of tokens is not yet known, always a task's prompt; None without one."""
        return next((i for i in line if i in self._rendered and turns[i].token_ids is self._rendered[i]), None)

    def has_room(self, images: Sequence[bytes], line: Sequence[int], turns: Sequence[Turn]) -> bool:
        """Return True if images may follow a line of turns: within the limits, and the model has written no
        placeholder, which an engine would take for an image. Raises ValueError if the model takes no images."""
        if not images:
            return True
        if self._rules is None:
            raise ValueError("images of a message need a model that takes images, with a processor of Qwen2-VL's form")
        placeholder = self._rules.processor.placeholder
        if any(turns[i].author == "model" and placeholder in turns[i].token_ids for i in line):
            return False
        files = [*self.on_line(line, turns), *images]
        patches = (math.prod(self._rules.processor.grid(file)) for file in files)
        rules = self._rules
        return len(files) <= rules.images and sum(map(len, files)) <= rules.nbytes and sum(patches) <= rules.patches

    def beside(self, of_task: Iterable[bytes], turns: Sequence[Turn]) -> dict[str, bytes]:
        """Return digest -> file of the turns' images that are not the task's."""
        shown = {digest for turn in turns for digest in turn.images}
        own = {file_digest(file) for file in of_task} if shown else set()
        return {digest: self._files[digest] for digest in sorted(shown - own)}
