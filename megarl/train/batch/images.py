"""Images of a step's sequences on a trainer rank: files, and patches on ranks whose model needs them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, final

import numpy as np
import torch

from megarl.buffer.order.draws import Demonstration
from megarl.config import Config
from megarl.core.schema import ImagesAt, Task, file_digest
from megarl.learn.batching import Sequences
from megarl.learn.batching.images import Image, Vision, images_of
from megarl.tasks import ChatTokenizer, encode_demonstrations
from megarl.tasks.image_processor import Processor

PATCH_BYTES = 2**28
"""Maximum bytes of cached patches: several models process an image of a step, several times."""


@final
class ImageInputs:
    """Files and patches of a step's images, processed by the model's own processor.

    Patches are computed when a micro-batch needs them, so only on ranks with the vision tower.
    """

    def __init__(self, processor: Processor, vision: Vision) -> None:
        self._processor = processor
        self._vision = vision
        self.kept: OrderedDict[str, torch.Tensor] = OrderedDict()
        """Patches by digest, most recently used last."""
        self._nbytes = 0

    @classmethod
    def of(cls, config: Config, hf_config: Mapping[str, Any]) -> ImageInputs | None:
        """Open the model's processor; None for a text model."""
        if not hf_config.get("vision_config"):
            return None
        model = config.model
        processor = Processor.open(model.path, model.min_image_pixels, model.max_image_pixels)
        merge = int(hf_config["vision_config"]["spatial_merge_size"])
        return cls(processor, Vision(int(hf_config["image_token_id"]), merge))

    def put(
        self, sequences: Sequences, files: Sequence[Sequence[bytes]], name: Callable[[int], str] = "row {}".format
    ) -> None:
        """Set ``sequences.images``.

        Args:
            files: Image files of each sequence; its tokens have placeholders for their vectors.
            name: Returns the name of a sequence, given its index.

        Raises DataError if the placeholders do not fit.
        """
        whole = zip(sequences.lengths.tolist(), files, strict=True)
        self.put_parts(sequences, [[(0, length, own)] for length, own in whole], name)

    def of_step(self, files: Mapping[str, bytes]) -> StepImages:
        """Return the images of a step's samples, given their ``files`` by digest."""
        return StepImages(self, files)

    def patches(self, file: bytes) -> int:
        """Return the number of patches of an image file, from its header."""
        return math.prod(self._processor.grid(file))

    def put_parts(
        self,
        sequences: Sequences,
        spans: Sequence[Sequence[tuple[int, int, Sequence[bytes]]]],
        name: Callable[[int], str],
    ) -> None:
        """Set ``sequences.images``, given each sequence's parts with images as (start, end, files), and its
        ``name``."""
        found: dict[str, tuple[Image, bytes]] = {}
        known: dict[int, Image] = {}  # by the file's address: samples of a group share files
        images = [
            [
                (start, end, [known.get(id(f)) or self._look(f, found, known) for f in files])
                for start, end, files in own
            ]
            for own in spans
        ]
        if not found:
            sequences.images = None
            return
        patches = partial(self._patches_of, found)
        sequences.images = images_of(sequences.tokens, sequences.lengths, images, patches, self._vision, name)

    def expand(self, prompt_ids: np.ndarray, files: Sequence[bytes]) -> np.ndarray:
        """Return int32 [P] with one placeholder per image vector, from ids with one placeholder per image."""
        return self._processor.expand(prompt_ids, files) if files else prompt_ids

    def _look(self, file: bytes, found: dict[str, tuple[Image, bytes]], known: dict[int, Image]) -> Image:
        """Return a file's image, from its header; store it in ``found`` by digest and in ``known`` by address."""
        digest = file_digest(file)
        image, _ = found.setdefault(digest, (Image(digest, self._processor.grid(file)), file))
        known[id(file)] = image
        return image

    def _patches_of(self, found: Mapping[str, tuple[Image, bytes]], digest: str) -> torch.Tensor:
        """Return float32 [p, w] patches of an image in ``found``."""
        if (patches := self.kept.get(digest)) is None:
            image, file = found[digest]
            made, grid = self._processor.pixels(file)
            assert grid == image.grid, f"image {digest}: {grid}, by its head {image.grid}"
            patches = self.kept[digest] = torch.from_numpy(made)
            self._nbytes += patches.nbytes
        self.kept.move_to_end(digest)
        while len(self.kept) > 1 and self._nbytes > PATCH_BYTES:
            self._nbytes -= self.kept.popitem(last=False)[1].nbytes
        return patches


@final
class StepImages:
    """Images of the samples and demonstrations of a step."""

    def __init__(self, inputs: ImageInputs, files: Mapping[str, bytes]) -> None:
        self.inputs = inputs
        self._files = files
        """Files of the samples by digest."""
        self._patches: dict[str, int] = {}

    def put(self, sequences: Sequences, samples: Sequence[Sequence[ImagesAt]], name: Callable[[int], str]) -> None:
        """Set ``sequences.images``, given each sample's images and ``name``. Raises DataError as
        ``ImageInputs.put``."""
        parts = [[(at.start, at.end, [self._files[digest] for digest in at.digests]) for at in own] for own in samples]
        self.inputs.put_parts(sequences, parts, name)

    def patches(self, digests: Iterable[str]) -> int:
        """Return the number of patches of samples' images."""
        return sum(self._of(digest) for digest in digests)

    def patches_of(self, files: Sequence[bytes]) -> int:
        """Return the number of patches of a demonstration's images."""
        return sum(map(self.inputs.patches, files))

    def _of(self, digest: str) -> int:
        if digest not in self._patches:  # samples of a group share images
            self._patches[digest] = self.inputs.patches(self._files[digest])
        return self._patches[digest]


def demonstrations_of(
    tasks: Sequence[Task], tokenizer: ChatTokenizer, images: ImageInputs | None
) -> list[Demonstration]:
    """Encode demonstrations with image placeholders expanded. Raises DataError as ``encode_demonstrations``."""
    pairs = encode_demonstrations(tasks, tokenizer)
    if images is None:
        return pairs
    return [(images.expand(p, task.images), answer) for task, (p, answer) in zip(tasks, pairs, strict=True)]
