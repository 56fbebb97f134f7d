"""Images of a step's sequences: the places of their vectors among the tokens, and the positions of all tokens.

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
"""Patches of an image: (in time, always 1; in each column; in each row)."""


class Image(NamedTuple):
    digest: str
    """Digest of the image's file."""
    grid: Grid


class ImagePlace(NamedTuple):
    """Positions ``start .. start + vectors`` of a step, which an image's vectors fill."""

    image: Image
    start: int
    vectors: int


@dataclass(frozen=True)
class Vision:
    """Facts of a model family that determine places and positions."""

    token: int
    """Id of the placeholder of one vector."""
    merge: int
    """Patches on each side of the square that becomes one vector."""

    def vectors(self, image: Image) -> int:
        """Return the number of vectors of an image among the tokens."""
        time, rows, columns = image.grid
        return time * rows * columns // self.merge**2

    def places(
        self, tokens: torch.Tensor, images: Sequence[Image], start: int = 0, owner: str = "a sequence"
    ) -> tuple[ImagePlace, ...]:
        """Return the places of images, in order; placeholders after the last image are ordinary tokens.

        Args:
            tokens: int [L]; placeholders expanded, one for each vector.
            start: First position of the tokens.
            owner: Name of their sequence.

        Raises DataError if the tokens lack a run of placeholders of the right length for an image.
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
        """Return int32 [3, L]: each token's time, row and column (M-RoPE, arXiv:2409.12191). An image's vectors have
        its grid positions; the next token's position follows the largest of them."""
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
    """Digest of an image -> float32 [p, w]: its patches from the model's processor."""

    @property
    def nbytes(self) -> int:
        """Bytes of the positions."""
        return self.positions.nbytes

    def patches(self, number: int) -> int:
        """Return the number of image patches of sequence ``number``."""
        return sum(math.prod(place.image.grid) for place in self.places[number])

    @classmethod
    def of_text(cls, lengths: torch.Tensor) -> Images:
        """Make the value for text sequences of these lengths: no images."""
        positions = torch.cat([torch.arange(length) for length in (0, *lengths.tolist())]).to(torch.int32)
        none: dict[str, torch.Tensor] = {}
        return cls(positions.expand(3, -1), ((),) * len(lengths), none.__getitem__)

    def followed_by(self, later: Images) -> Images:
        """Return the images of a batch that is extended by the batch of ``later``."""
        start, own = self.positions.shape[1], {place.image.digest for found in self.places for place in found}
        moved = (tuple(place._replace(start=place.start + start) for place in found) for found in later.places)

        def pixels(digest: str) -> torch.Tensor:
            return (self if digest in own else later).pixels(digest)

        return Images(torch.cat([self.positions, later.positions], dim=1), (*self.places, *moved), pixels)

    def of(self, numbers: torch.Tensor, index: torch.Tensor) -> Shown | None:
        """Return the images of a micro-batch; None if it has none.

        Args:
            numbers: int64 [n]: indices of its sequences.
            index: int64 [b, S]: source position in the step; -1 for padding.
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
        """Return int64 [3, b, S] for a micro-batch's ``index`` [b, S]; ``padding`` [b, S]: values where it is -1."""
        return torch.where(index < 0, padding, self.positions[:, index.clamp(min=0)].long())


@dataclass(frozen=True)
class Shown:
    """The images of a micro-batch, as model input."""

    source: torch.Tensor
    """int64 [b, S]: index of the image vector at this position; -1 for a token."""
    pixels: torch.Tensor
    """float32 [p, w] of all distinct images."""
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
        images: (first token, token after the last, images) of each part of a sequence with images.
        name: Returns the name of a sequence, given its number.
    """
    places, positions, start = [], [], 0
    for number, (length, own) in enumerate(zip(lengths.tolist(), images, strict=True)):
        parts = ((start + first, start + end, shown) for first, end, shown in own)
        owner = name(number)
        places.append(tuple(p for at, end, shown in parts for p in vision.places(tokens[at:end], shown, at, owner)))
        positions.append(vision.positions(length, places[-1], start))
        start += length
    return Images(torch.cat(positions, dim=1), tuple(places), pixels)
