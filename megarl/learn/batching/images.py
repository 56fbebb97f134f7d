"""Images of a step's sequences: where their vectors stand among the tokens, and the positions of all tokens.

Shape legend: T positions of a step; L of one sequence; b rows and S positions of a micro-batch; p patches of an image,
w numbers of a patch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megarl.core.errors import DataError

Grid = tuple[int, int, int]
"""Patches of an image: in time (1), in each column, in each row."""


class Image(NamedTuple):
    digest: str
    """Digest of the image's file."""
    grid: Grid


class ImagePlace(NamedTuple):
    """Positions ``start .. start + vectors`` of a step, which have the vectors of an image."""

    image: Image
    start: int
    vectors: int


@dataclass(frozen=True)
class Vision:
    """Facts of a family that places and positions depend on."""

    token: int
    """Id of the placeholder of one vector."""
    merge: int
    """Patches on each side of what becomes one vector."""

    def vectors(self, image: Image) -> int:
        """Vectors of an image among the tokens."""
        time, rows, columns = image.grid
        return time * rows * columns // self.merge**2

    def places(
        self, tokens: torch.Tensor, images: Sequence[Image], start: int = 0, owner: str = "a sequence"
    ) -> tuple[ImagePlace, ...]:
        """Places of images, which are in order; placeholders after the last are ordinary tokens.

        Args:
            tokens: int [L]; placeholders expanded, one for each vector.
            start: First position of the tokens.
            owner: Name of their sequence.

        Raises DataError where the tokens have no such run of placeholders for an image.
        """
        if not images:
            return ()
        found, used = [], 0
        marked = torch.nonzero(tokens == self.token)[:, 0].tolist()
        for number, image in enumerate(images):
            length = self.vectors(image)
            rest = marked[used:]
            there = next((n for n, at in enumerate(rest) if at != rest[0] + n), len(rest))
            if there < length or (there > length and number == len(images) - 1):
                raise DataError(
                    f"image {number + 1} of {len(images)} ({image.digest[:12]}) of {owner} has {length} vectors, but "
                    f"the tokens have {there} placeholders for it: engine and trainer resize images differently; "
                    "install the same transformers (and torchvision, or none) for both"
                )
            found.append(ImagePlace(image, start + rest[0], length))
            used += length
        return tuple(found)

    def positions(self, length: int, places: Sequence[ImagePlace], start: int = 0) -> torch.Tensor:
        """int32 [3, L]: each token's time, row and column (M-RoPE, arXiv:2409.12191); the vectors of an image have
        those of its grid, tokens after it begin behind the largest of them."""
        parts, at, begin = [], 0, 0
        for image, first, vectors in places:
            text = first - start - at
            parts.append(torch.arange(begin, begin + text).expand(3, -1))
            begin += text
            time, rows, columns = image.grid[0], image.grid[1] // self.merge, image.grid[2] // self.merge
            axes = torch.meshgrid(*(torch.arange(n) for n in (time, rows, columns)), indexing="ij")
            parts.append(torch.stack(axes).flatten(1) + begin)
            begin += max(rows, columns)
            at += text + vectors
        parts.append(torch.arange(begin, begin + length - at).expand(3, -1))
        return torch.cat(parts, dim=1).to(torch.int32)


@dataclass(frozen=True)
class Images:
    """Images of all sequences of a step."""

    positions: torch.Tensor
    """int32 [3, T]: time, row and column of each token."""
    places: tuple[tuple[ImagePlace, ...], ...]
    """Places of each sequence's images."""
    pixels: Callable[[str], torch.Tensor]
    """Digest of an image -> float32 [p, w]: its patches, as the model's processor makes them."""

    @property
    def nbytes(self) -> int:
        """Bytes of the positions."""
        return self.positions.nbytes

    def patches(self, number: int) -> int:
        """Patches of the images of sequence ``number``."""
        return sum(math.prod(place.image.grid) for place in self.places[number])

    @classmethod
    def of_text(cls, lengths: torch.Tensor) -> Images:
        """Those of sequences of text of these lengths: none."""
        positions = torch.cat([torch.arange(length) for length in (0, *lengths.tolist())]).to(torch.int32)
        none: dict[str, torch.Tensor] = {}
        return cls(positions.expand(3, -1), ((),) * len(lengths), none.__getitem__)

    def followed_by(self, later: Images) -> Images:
        """The images of a batch that goes on with that of ``later``."""
        start, own = self.positions.shape[1], {place.image.digest for found in self.places for place in found}
        moved = (tuple(place._replace(start=place.start + start) for place in found) for found in later.places)

        def pixels(digest: str) -> torch.Tensor:
            return (self if digest in own else later).pixels(digest)

        return Images(torch.cat([self.positions, later.positions], dim=1), (*self.places, *moved), pixels)

    def of(self, numbers: torch.Tensor, index: torch.Tensor) -> Shown | None:
        """The images of a micro-batch; None where it has none.

        Args:
            numbers: int64 [n]: its sequences.
            index: int64 [b, S]: position of the step that stands here; -1 is padding.
        """
        places = [place for number in numbers.tolist() for place in self.places[number]]
        if not places:
            return None
        images = list(dict.fromkeys(place.image for place in places))  # a group's samples share theirs
        counts = {place.image: place.vectors for place in places}
        first = dict(zip(images, itertools.accumulate((counts[i] for i in images), initial=0), strict=False))
        source = torch.full_like(index, -1)
        for image, start, vectors in places:
            here = (index >= start) & (index < start + vectors)
            source[here] = index[here] - start + first[image]
        pixels = torch.cat([self.pixels(image.digest) for image in images])
        return Shown(source, pixels, torch.tensor([image.grid for image in images]))

    def positions_of(self, index: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """int64 [3, b, S] of a micro-batch's ``index`` [b, S]; ``padding`` [b, S]: positions where that is -1."""
        return torch.where(index < 0, padding, self.positions[:, index.clamp(min=0)].long())


@dataclass(frozen=True)
class Shown:
    """The images of a micro-batch, as a model takes them."""

    source: torch.Tensor
    """int64 [b, S]: which of the images' vectors stands here; -1 where a token does."""
    pixels: torch.Tensor
    """float32 [p, w] of all images, each once."""
    grids: torch.Tensor
    """int64 [n, 3]"""


def images_of(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    images: Sequence[Sequence[tuple[int, int, Sequence[Image]]]],
    pixels: Callable[[str], torch.Tensor],
    vision: Vision,
    name: Callable[[int], str] = "sequence {}".format,
) -> Images:
    """Find the images of a step's sequences in their tokens [T]. Raises DataError as ``Vision.places``.

    Args:
        images: (first token, token after the last, images) of each part of a sequence that has some.
        name: Gives the name of a sequence, by its number.
    """
    places, positions, start = [], [], 0
    for number, (length, own) in enumerate(zip(lengths.tolist(), images, strict=True)):
        parts = ((start + first, start + end, shown) for first, end, shown in own)
        owner = name(number)
        places.append(tuple(p for at, end, shown in parts for p in vision.places(tokens[at:end], shown, at, owner)))
        positions.append(vision.positions(length, places[-1], start))
        start += length
    return Images(torch.cat(positions, dim=1), tuple(places), pixels)
