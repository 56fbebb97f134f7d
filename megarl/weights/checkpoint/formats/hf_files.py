"""Safetensors files of an HF checkpoint: list tensors, read slices, write piece by piece."""

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
from megarl.weights.checkpoint.formats.slices import OpenFiles
from megarl.weights.reshard import boxes
from megarl.weights.reshard.boxes import Box, Shape

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
        assert boxes.contains(boxes.whole(entry.shape), box), f"{box} of {name} {entry.shape}"
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
