"""Safetensors files of an HF checkpoint: their tensors, slices of them, and logical tensors inside larger ones.

Source: ``inference/fp8_cast_bf16.py`` of the DeepSeek-V3 repository (scale in float32, product rounded once).

A family's table lists them (``Architecture.joined``); all other code uses only logical tensors.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from megarl.core.errors import CheckpointError
from megarl.weights.architectures import Architecture, HFConfig
from megarl.weights.architectures.table import hf_name
from megarl.weights.checkpoint.formats.slices import OpenFiles, Source, into
from megarl.weights.reshard import layout
from megarl.weights.reshard.layout import Box, Shape

T = TypeVar("T")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_LIMIT = 100_000_000
"""Largest header that the safetensors library accepts."""


class TensorInfo(NamedTuple):
    """A tensor's entry in a safetensors header."""

    file: Path
    dtype: torch.dtype
    shape: Shape
    start: int
    """Byte offset of the elements in the file."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize


class HFFiles:
    """All tensors of a checkpoint directory (one file, or shards with an index), or of the files ``names``.

    Raises CheckpointError for a missing, truncated or invalid file, and an index that does not match the files. A
    single file next to an index of other files is an error too.
    """

    def __init__(self, path: Path, names: list[str] | None = None) -> None:
        self.path = path
        self.entries: dict[str, TensorInfo] = {}
        self._files = OpenFiles()
        names, weight_map = _file_names(path) if names is None else (names, {})
        for name in names:
            for tensor, entry in read_header(path / name).items():
                if tensor in self.entries:
                    raise CheckpointError(
                        f"{tensor} is in {self.entries[tensor].file} and in {path / name}; a checkpoint has each "
                        "tensor once"
                    )
                self.entries[tensor] = entry
        for tensor, name in weight_map.items():
            found = self.entries.get(tensor)
            if found is None or found.file != path / name:
                place = "" if found is None else f"; it is in {found.file.name}"
                raise CheckpointError(
                    f"{path / INDEX} lists {tensor} in {name}, which lacks it{place}; copy the checkpoint again"
                )
        self._look()

    def _look(self) -> None:
        self.shapes = {name: entry.shape for name, entry in self.entries.items()}
        self.dtypes = {name: entry.dtype for name, entry in self.entries.items()}

    def rename(self, name_of: Callable[[str], str]) -> None:
        """Rename each tensor to ``name_of(name in the files)``. Raises CheckpointError if two tensors get one name."""
        stored: dict[str, str] = {}
        for name in self.entries:
            if (other := stored.setdefault(name_of(name), name)) != name:
                raise CheckpointError(
                    f"{other} in {self.entries[other].file} and {name} in {self.entries[name].file} are one tensor of "
                    "the model; a checkpoint has each tensor once"
                )
        self.entries = {new: self.entries[name] for new, name in stored.items()}
        self._look()

    def read(self, name: str, box: Box, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read a box of a tensor, into ``out`` if given."""
        entry = self.entries[name]
        assert layout.contains(layout.whole(entry.shape), box), f"{box} of {name} {entry.shape}"
        return self._files.read_box(entry.file, entry.start, entry.dtype, entry.shape, box, out)

    def file_of(self, name: str) -> Path:
        """Path of the file with a tensor."""
        return self.entries[name].file

    def paths(self) -> list[Path]:
        """Paths of all files."""
        return sorted({entry.file for entry in self.entries.values()})

    def close(self) -> None:
        """Close all files."""
        self._files.close()


def _file_names(path: Path) -> tuple[list[str], Mapping[str, str]]:
    index = path / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            names = sorted(set(weight_map.values()))
            if (other := next((name for name in names if not _is_file_name(name)), None)) is not None:
                raise ValueError(f"{other!r} is no name of a file")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{index} is no index of safetensors files ({error!r}); copy the checkpoint again"
            ) from error
        if (path / SINGLE).is_file() and names != [SINGLE]:
            raise CheckpointError(
                f"{path} has {SINGLE} and {INDEX} with other files: transformers reads the former, vLLM the latter; "
                "remove the one that is not meant"
            )
        for name in names:
            if not (path / name).is_file():
                raise CheckpointError(f"{path / name} is listed in {INDEX} but missing; copy the checkpoint again")
        return names, weight_map
    if (path / SINGLE).is_file():
        return [SINGLE], {}
    raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}; set model.path to an HF checkpoint in safetensors")


def _is_file_name(name: Any) -> bool:
    """True for a plain file name without folders."""
    return isinstance(name, str) and name not in ("", "..") and Path(name).name == name and "\0" not in name


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Tensor name -> location. Raises CheckpointError unless each byte of the file belongs to exactly one tensor."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(size - 8, _HEADER_LIMIT):
            raise CheckpointError(
                f"{file} cannot be read: its header would have {length} bytes, the file has {size}; it is cut short or "
                "no safetensors, copy the checkpoint again"
            )
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            entries = {name: _tensor_info(file, 8 + length, value) for name, value in header.items()}
            end, last = _end(entries, 8 + length)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{file} cannot be read: its header is damaged ({error!r}); copy the checkpoint again"
            ) from error
    if end != size:
        raise CheckpointError(
            f"{file} has {size} bytes, expected {end} (up to the end of {last}); it was not copied whole, copy it again"
        )
    return entries


def _end(entries: Mapping[str, TensorInfo], begin: int) -> tuple[int, str]:
    """Return (end byte of the last tensor, its name). Raises ValueError if tensors overlap or leave gaps."""
    end, last = begin, "nothing"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != end:
            fault = "overlaps" if entry.start < end else "leaves bytes out after"
            raise ValueError(f"{name} {fault} {last}")
        end, last = end + entry.nbytes, name
    return end, last


def _tensor_info(file: Path, base: int, value: Mapping[str, Any]) -> TensorInfo:
    dtype, shape = DTYPES[value["dtype"]], tuple(value["shape"])
    lo, hi = value["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, lo, hi)):
        raise ValueError(f"shape {shape} and data_offsets {[lo, hi]} must be integers of at least 0")
    if hi - lo != prod(shape) * dtype.itemsize:
        raise ValueError(f"{shape} of {value['dtype']} in {hi - lo} bytes")
    return TensorInfo(file, dtype, shape, base + lo)


def header_bytes(tensors: Iterable[tuple[str, torch.dtype, Shape]]) -> bytes:
    """Return the header of a safetensors file with these tensors in this order, without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        size = prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def groups(sizes: Mapping[T, int], limit: int) -> Iterator[list[T]]:
    """Yield the keys in order, in groups of at most ``limit`` bytes (a larger item alone in its group)."""
    group: list[T] = []
    used = 0
    for key, size in sizes.items():
        if group and used + size > limit:
            yield group
            group, used = [], 0
        group.append(key)
        used += size
    if group:
        yield group


def shards(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """File name -> tensors in it, at most ``limit`` bytes (or one tensor)."""
    found = list(groups(sizes, limit))
    if len(found) == 1:
        return {SINGLE: found[0]}
    return {f"model-{n:05d}-of-{len(found):05d}.safetensors": group for n, group in enumerate(found, start=1)}


SCALE = "_scale_inv"


def _is_block(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)


class Dequantised:
    """Source of float32 slices from a checkpoint with FP8 weights.

    Raises CheckpointError for a quantisation other than e4m3 in 2-D blocks, and for weights without matching scales.
    """

    def __init__(self, files: HFFiles, quantization: Mapping[str, Any]) -> None:
        self._files = files
        self.path: Path = files.path
        block = quantization.get("weight_block_size")
        known = quantization.get("quant_method") == "fp8" and quantization.get("fmt", "e4m3") == "e4m3"
        if not known or block is None or not _is_block(block):
            raise CheckpointError(
                f"{files.path / 'config.json'}: quantization_config {dict(quantization)} is not supported, only "
                "quant_method 'fp8', fmt "
                "'e4m3' with a weight_block_size of two numbers; use the checkpoint before quantisation"
            )
        self._block = int(block[0]), int(block[1])
        self._scales = {name.removesuffix(SCALE): name for name in files.entries if name.endswith(SCALE)}
        for name, scale in self._scales.items():
            self._check(name, scale)
        for name, entry in files.entries.items():
            if entry.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and name not in self._scales:
                raise CheckpointError(
                    f"{name} in {entry.file} is {entry.dtype} but {name}{SCALE} is missing; copy the checkpoint again"
                )
        self.shapes = {n: s for n, s in files.shapes.items() if not n.endswith(SCALE)}
        # Dequantised weights: the training dtype, although ``read`` returns float32.
        self.dtypes = {
            n: torch.bfloat16 if n in self._scales else d for n, d in files.dtypes.items() if n in self.shapes
        }

    def _check(self, name: str, scale: str) -> None:
        entries = self._files.entries
        if name not in entries:
            raise CheckpointError(
                f"{scale} in {entries[scale].file} scales {name}, which is missing; copy the checkpoint again"
            )
        shape = entries[name].shape
        expected = tuple(-(-n // b) for n, b in zip(shape, self._block, strict=True)) if len(shape) == 2 else ()
        if entries[name].dtype != torch.float8_e4m3fn or entries[scale].shape != expected:
            raise CheckpointError(
                f"{scale} in {entries[scale].file} has shape {entries[scale].shape}, expected {expected} for {name}, "
                f"{shape} of "
                f"{entries[name].dtype} (expected float8_e4m3fn) in blocks of {self._block}; copy the checkpoint again"
            )

    def read(self, name: str, box: Box, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read a box of a tensor, dequantised, into ``out`` if given."""
        scale = self._scales.get(name)
        values = self._files.read(name, box, out if scale is None else None)
        if scale is None:
            return values
        blocks = tuple((lo // b, -(-hi // b)) for (lo, hi), b in zip(box, self._block, strict=True))
        factors = self._files.read(scale, blocks).float()
        product = into(out, torch.float32, layout.shape_of(box)).copy_(values)
        for axis in range(2):
            b, (lo, hi) = self._block[axis], box[axis]
            factors = factors.repeat_interleave(b, axis).narrow(axis, lo - blocks[axis][0] * b, hi - lo)
        return product.mul_(factors)

    def file_of(self, name: str) -> Path:
        return self._files.file_of(name)

    def paths(self) -> list[Path]:
        return self._files.paths()

    def close(self) -> None:
        """Close the files."""
        self._files.close()


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
    """First row in the stored tensor (of each group), after indexing and transposing."""
    groups: int = 1
    """Groups of the stored tensor's rows, each with rows of this logical tensor."""

    def view(self, whole: torch.Tensor) -> torch.Tensor:
        """View of the logical tensor in the stored one."""
        return self.view_in_matrix(whole if self.expert is None else whole[self.expert])

    def view_in_matrix(self, matrix: torch.Tensor) -> torch.Tensor:
        """View of the logical tensor in the matrix of its expert; [groups, rows of one, ...] if there are groups."""
        matrix = matrix.transpose(0, 1) if self.transposed else matrix
        if self.groups == 1:
            return matrix[self.first : self.first + self.shape[0]]
        return matrix.unflatten(0, (self.groups, -1))[:, self.first : self.first + self.shape[0] // self.groups]

    def box(self, box: Box) -> Box:
        """Convert elements ``box`` of the logical tensor to the box of the stored tensor, which has no groups."""
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
        parts, groups = [rows[name][0] for name in joined.parts], sizes.delta_key_heads if joined.grouped else 1
        shapes = [part.shape(sizes) for part in parts]
        matrix = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        matrix = matrix[::-1] if joined.transposed else matrix
        whole = (sizes.experts, *matrix) if param.per_expert else (1, *matrix) if joined.single else matrix
        for one in arch.occurrences(param, sizes):
            stored, first = hf_name(joined, one), 0
            index = 0 if joined.single else one.expert
            for part, shape in zip(parts, shapes, strict=True):
                found[hf_name(part, one)] = FilePlace(stored, whole, shape, index, joined.transposed, first, groups)
                first += shape[0] // groups
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
        shape, stored = layout.shape_of(box), place.box(box)
        if place.groups > 1:
            return self._of_groups(place, box, out)
        if not place.transposed:
            out = into(out, self.files.dtypes[place.stored], shape)
            return self.files.read(place.stored, stored, out.view(layout.shape_of(stored))).view(shape)
        values = self.files.read(place.stored, stored)
        values = values if place.expert is None else values[0]
        return into(out, values.dtype, shape).copy_(values.transpose(0, 1))

    def _of_groups(self, place: FilePlace, box: Box, out: torch.Tensor | None) -> torch.Tensor:
        """Read a box of rows that stand in several groups: whole groups are read, and other tensors' rows left out."""
        (low, high), each = box[0], place.shape[0] // place.groups
        first, last, rows = low // each, -(-high // each), place.whole[0] // place.groups
        groups = self.files.read(place.stored, ((first * rows, last * rows), *box[1:])).unflatten(0, (-1, rows))
        found = groups[:, place.first : place.first + each].flatten(0, 1)[low - first * each : high - first * each]
        return into(out, found.dtype, layout.shape_of(box)).copy_(found)

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
