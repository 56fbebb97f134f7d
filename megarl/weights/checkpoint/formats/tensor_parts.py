"""Logical tensors inside larger tensors of the HF files: rows of a fused projection, experts of a stack.

A family's table lists them (``Architecture.joined``); all other code uses only logical tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from megarl.weights.architectures import Architecture, HFConfig
from megarl.weights.architectures.table import hf_name
from megarl.weights.checkpoint.formats.fp8 import Dequantised
from megarl.weights.checkpoint.formats.hf_files import HFFiles
from megarl.weights.checkpoint.formats.slices import Source, into
from megarl.weights.reshard import boxes
from megarl.weights.reshard.boxes import Box, Shape


class FilePlace(NamedTuple):
    """Location of a logical tensor in the files."""

    stored: str
    """Name of the stored tensor."""
    whole: Shape
    """Shape of the stored tensor."""
    shape: Shape
    """Shape of the logical tensor."""
    expert: int | None = None
    """Index along the stored tensor's first axis, if it is a stack."""
    transposed: bool = False
    first: int = 0
    """First row in the stored tensor, after indexing and transposing."""

    def view(self, whole: torch.Tensor) -> torch.Tensor:
        """View of the logical tensor in the stored one."""
        return self.view_in_matrix(whole if self.expert is None else whole[self.expert])

    def view_in_matrix(self, matrix: torch.Tensor) -> torch.Tensor:
        """View of the logical tensor in the matrix of its expert."""
        matrix = matrix.transpose(0, 1) if self.transposed else matrix
        return matrix[self.first : self.first + self.shape[0]]

    def box(self, box: Box) -> Box:
        """Convert elements ``box`` of the logical tensor to the box of the stored tensor."""
        lo, hi = box[0]
        rows = (self.first + lo, self.first + hi)
        matrix = (*box[1:], rows) if self.transposed else (rows, *box[1:])
        return matrix if self.expert is None else ((self.expert, self.expert + 1), *matrix)


def places(arch: Architecture, hf_config: HFConfig, tensors: Mapping[str, Shape]) -> dict[str, FilePlace]:
    """Location of each of these logical tensors in files of this model."""
    parts = places_of_parts(arch, hf_config)
    found = {name: parts.get(name, FilePlace(name, shape, shape)) for name, shape in tensors.items()}
    return {name: place._replace(stored=arch.name_in_files(place.stored)) for name, place in found.items()}


def places_of_parts(arch: Architecture, hf_config: HFConfig) -> dict[str, FilePlace]:
    """Location of each logical tensor that is part of a larger one, with names as in the table."""
    sizes = arch.sizes(hf_config)
    rows = {part.name: (part, param) for param in arch.params for part in param.hf}
    found: dict[str, FilePlace] = {}
    for joined in arch.joined:
        param = rows[joined.parts[0]][1]
        parts = [rows[name][0] for name in joined.parts]
        shapes = [part.shape(sizes) for part in parts]
        matrix = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        matrix = matrix[::-1] if joined.transposed else matrix
        whole = (sizes.experts, *matrix) if param.per_expert else (1, *matrix) if joined.single else matrix
        for one in arch.occurrences(param, sizes):
            stored, first = hf_name(joined, one), 0
            index = 0 if joined.single else one.expert
            for part, shape in zip(parts, shapes, strict=True):
                found[hf_name(part, one)] = FilePlace(stored, whole, shape, index, joined.transposed, first)
                first += shape[0]
    return found


class Divided:
    """A checkpoint with fused and stacked tensors split into logical tensors.

    Args:
        files: Files of the checkpoint. A stored tensor with an unexpected shape is left out of ``shapes``, with its
            parts.
        parts: Location of every logical tensor that is a part.
    """

    def __init__(self, files: HFFiles | Dequantised, parts: Mapping[str, FilePlace]) -> None:
        self.files, self.parts = files, parts
        self.path: Path = files.path
        joined = {place.stored for place in parts.values()}
        here = {name: place for name, place in parts.items() if files.shapes.get(place.stored) == place.whole}
        self.shapes = {name: shape for name, shape in files.shapes.items() if name not in joined}
        self.shapes |= {name: place.shape for name, place in here.items()}
        self.dtypes = {name: dtype for name, dtype in files.dtypes.items() if name not in joined}
        self.dtypes |= {name: files.dtypes[place.stored] for name, place in here.items()}

    def read(self, name: str, box: Box, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read a box of a logical tensor, into ``out`` if given."""
        place = self.parts.get(name)
        if place is None:
            return self.files.read(name, box, out)
        shape, stored = boxes.shape_of(box), place.box(box)
        if not place.transposed:
            out = into(out, self.files.dtypes[place.stored], shape)
            return self.files.read(place.stored, stored, out.view(boxes.shape_of(stored))).view(shape)
        values = self.files.read(place.stored, stored)
        values = values if place.expert is None else values[0]
        return into(out, values.dtype, shape).copy_(values.transpose(0, 1))

    def file_of(self, name: str) -> Path:
        """Path of the file with a logical tensor."""
        return self.files.file_of(self.parts[name].stored if name in self.parts else name)

    def paths(self) -> list[Path]:
        """Paths of all files."""
        return self.files.paths()

    def close(self) -> None:
        """Close the files."""
        self.files.close()


S = TypeVar("S", bound=Source)


def in_files(source: S | Divided, tensors: Mapping[str, Shape]) -> tuple[S | HFFiles | Dequantised, dict[str, Shape]]:
    """Return the underlying files, with the stored tensors and shapes expected for these logical tensors."""
    if not isinstance(source, Divided):
        return source, dict(tensors)
    found = {name: source.parts.get(name, FilePlace(name, shape, shape)) for name, shape in tensors.items()}
    return source.files, {place.stored: place.whole for place in found.values()}
