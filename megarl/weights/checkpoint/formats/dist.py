"""Read Megatron-Core's dist_checkpointing format (``torch_dist``) slice by slice.

A directory has ``metadata.json`` (the format's name), ``common.pt`` (unused here; not written by Megatron-Core 0.19)
and ``.metadata``. That is a pickle of ``torch.distributed.checkpoint.metadata.Metadata``: key -> global shape, dtype,
chunks, and each chunk's location. In ``*.distcp`` files every chunk is ``torch.save`` output for one tensor: a zip
archive with the elements in ``data/0``.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import threading
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megarl.core.errors import CheckpointError
from megarl.weights.checkpoint.formats.slices import BoxIndex, OpenFiles, into
from megarl.weights.reshard import layout
from megarl.weights.reshard.layout import Box, Shape

METADATA = ".metadata"
CONFIG = "metadata.json"
COMMON = "common.pt"
COMMON_KEY = "common_state/"
"""Key prefix of an object with the common state."""
STORAGES = {
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
"""``torch.save``'s names of dtypes."""
NOT_MODEL = re.compile(
    r"^(optimizer\.|chained_\d+\.|optim|rng_state|rerun_state_machine|opt_param_scheduler|iteration)"
)
"""Keys of training state other than the model's."""


_DAMAGED = (
    *(pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError, TypeError, ValueError),
    *(ArithmeticError, MemoryError, RecursionError, NotImplementedError, AssertionError),
)
"""Errors that a pickle with wrong bytes may raise."""


ADAPTER = "lora."
"""Prefix of an A's or B's key, before its HF name."""


class Chunk(NamedTuple):
    """A box of a key's global tensor: a ``torch.save`` of ``length`` bytes at ``offset`` in ``file``."""

    box: Box
    file: str
    offset: int
    length: int


class Stored(NamedTuple):
    dtype: torch.dtype
    shape: Shape
    chunks: tuple[Chunk, ...]


def find_dist(path: Path) -> Path | None:
    """Find the dist_checkpointing directory: ``path``, or its ``actor`` (megarl) or ``dist_ckpt`` (verl) folder."""
    return next((p for p in (path, path / "actor", path / "dist_ckpt") if (p / METADATA).is_file()), None)


def has_adapters(path: Path) -> bool:
    """True if a dist_checkpointing directory has adapters, not the full model. Errors as in ``DistFiles``."""
    return any(key.startswith(ADAPTER) for key in read_metadata(path))


class DistFiles:
    """The tensors of a checkpoint directory as a source of slices.

    Args:
        path: The directory with ``.metadata``.
        stored: Its tensors; ``None``: read from its metadata.

    Raises CheckpointError for a missing, unreadable or foreign metadata file, and a missing or truncated data file.
    """

    def __init__(self, path: Path, stored: Mapping[str, Stored] | None = None) -> None:
        self.path = path
        self.stored = read_metadata(path) if stored is None else dict(stored)
        self.shapes = {name: s.shape for name, s in self.stored.items()}
        self.dtypes = {name: s.dtype for name, s in self.stored.items()}
        self._files = OpenFiles()
        self._index: dict[str, BoxIndex[Chunk]] = {}
        self._starts: dict[Chunk, int] = {}
        self._lock = threading.Lock()
        self._check_sizes()

    def _check_sizes(self) -> None:
        ends: dict[str, tuple[int, str]] = defaultdict(lambda: (0, ""))
        for name, tensor in self.stored.items():
            for chunk in tensor.chunks:
                ends[chunk.file] = max(ends[chunk.file], (chunk.offset + chunk.length, name))
        for file, (end, name) in ends.items():
            path = self.path / file
            if not path.is_file():
                raise CheckpointError(
                    f"{path} is missing; {self.path / METADATA} has {name} in it, copy the checkpoint again"
                )
            size = path.stat().st_size
            if size < end:
                raise CheckpointError(
                    f"{path} has {size} bytes, expected {end} or more (up to the end of {name}); it was not copied "
                    "whole, copy it again"
                )

    def read(self, name: str, box: Box, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read a box of a tensor, into ``out`` if given."""
        out = into(out, self.dtypes[name], layout.shape_of(box))
        found = 0
        for common, chunk in self._chunks(name).overlapping(box):
            inside = tuple((lo - c, hi - c) for (lo, hi), (c, _) in zip(common, chunk.box, strict=True))
            part = out[tuple(slice(lo - b, hi - b) for (lo, hi), (b, _) in zip(common, box, strict=True))]
            values = self._files.read_box(
                self.path / chunk.file, self._start(name, chunk), out.dtype, layout.shape_of(chunk.box), inside, part
            )
            if values is not part:
                part.copy_(values)
            found += values.numel()
        if found != out.numel():
            raise CheckpointError(
                f"{name} in {self.path}: {found} of the {out.numel()} elements {list(box)} are in its chunks; it was "
                "not saved whole"
            )
        return out

    def file_of(self, name: str) -> Path:
        """Path of the file with a tensor; the directory if its chunks are in several files."""
        files = {chunk.file for chunk in self.stored[name].chunks}
        return self.path / files.pop() if len(files) == 1 else self.path

    def paths(self) -> list[Path]:
        """Paths of the files with tensors."""
        return sorted({self.path / chunk.file for tensor in self.stored.values() for chunk in tensor.chunks})

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def _chunks(self, name: str) -> BoxIndex[Chunk]:
        with self._lock:
            if name not in self._index:
                self._index[name] = BoxIndex((chunk.box, chunk) for chunk in self.stored[name].chunks)
            return self._index[name]

    def _start(self, name: str, chunk: Chunk) -> int:
        """Byte offset of the chunk's elements in the file."""
        start = self._starts.get(chunk)
        if start is None:
            start = self._starts[chunk] = self._locate(name, chunk)
        return start

    def _locate(self, name: str, chunk: Chunk) -> int:
        path = self.path / chunk.file
        where = f"{name} {list(chunk.box)} in {path}"
        try:
            with path.open("rb") as stream, zipfile.ZipFile(FileSlice(stream, chunk.offset, chunk.length)) as archive:
                records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                with archive.open(records["data.pkl"]) as pickled:
                    saved = _TensorUnpickler(pickled).load()
                if not isinstance(saved, _Saved):
                    raise pickle.UnpicklingError(f"{type(saved).__name__} instead of a tensor")
                data = records[f"data/{saved.key}"]
                stream.seek(chunk.offset + data.header_offset + 26)
                names, extra = int.from_bytes(stream.read(2), "little"), int.from_bytes(stream.read(2), "little")
        except (zipfile.BadZipFile, OSError, *_DAMAGED) as error:
            raise CheckpointError(f"{where} is no saved tensor ({error!r}); copy the checkpoint again") from error
        shape, dtype = layout.shape_of(chunk.box), self.dtypes[name]
        # Axes of size 1 differ if numbered layers are read as one stack.
        expected = [n for n in shape if n != 1]
        found = [(n, step) for n, step in zip(saved.shape, saved.stride, strict=True) if n != 1]
        row_major = [(n, prod(expected[axis + 1 :])) for axis, n in enumerate(expected)]
        if saved.dtype != dtype or found != row_major:
            raise CheckpointError(
                f"{where} is {saved.dtype} of shape {saved.shape} and strides {saved.stride}, expected {dtype} of "
                f"{shape}, row-major; it does not fit its metadata"
            )
        begin = chunk.offset + data.header_offset + 30 + names + extra + saved.start * dtype.itemsize
        room = data.file_size - saved.start * dtype.itemsize
        if data.compress_type != zipfile.ZIP_STORED or room < prod(shape) * dtype.itemsize:
            raise CheckpointError(
                f"{where} is compressed or has {room} bytes, expected {prod(shape) * dtype.itemsize}, stored as they "
                "are"
            )
        return begin


class FileSlice(io.RawIOBase):
    """``length`` bytes of a file from ``offset`` on (``None``: to the end, for writing) as a separate file object."""

    def __init__(self, stream: Any, offset: int, length: int | None = None) -> None:
        self._stream, self._offset, self._length = stream, offset, length
        stream.seek(offset)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return self._length is None

    def seek(self, at: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_SET:
            at = self._stream.seek(self._offset + at)
        elif whence == io.SEEK_CUR or self._length is None:
            at = self._stream.seek(at, whence)
        else:
            at = self._stream.seek(self._offset + self._length + at)
        return at - self._offset

    def tell(self) -> int:
        return int(self._stream.tell() - self._offset)

    def read(self, size: int | None = -1) -> bytes:
        left = max((self._length or 0) - self.tell(), 0)
        return bytes(self._stream.read(left if size is None or size < 0 else min(size, left)))

    def write(self, data: Any) -> int:
        return int(self._stream.write(data))

    def flush(self) -> None:
        """Do nothing: the owner flushes the underlying file."""


class _Saved(NamedTuple):
    """A tensor in the pickle of ``torch.save``: elements of record ``data/<key>``, starting at ``start``."""

    dtype: torch.dtype
    key: str
    start: int
    shape: Shape
    stride: Shape


class _TensorUnpickler(pickle.Unpickler):
    """Unpickles one tensor's description and can create nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, start, size, stride, *rest: _Saved(
                storage[0], storage[1], start, tuple(size), tuple(stride)
            )
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda saved, *rest: saved
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"{module}.{name} in a saved tensor")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, str]:
        _, dtype, key, *_ = pid
        return dtype, key


def read_metadata(path: Path) -> dict[str, Stored]:
    """Tensors by key. Raises CheckpointError if this is no checkpoint of this format."""
    config = path / CONFIG
    if config.is_file():
        try:
            backend = json.loads(config.read_text()).get("sharded_backend")
        except (ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{config} cannot be read ({error}); copy the checkpoint again") from error
        if backend != "torch_dist":
            raise CheckpointError(
                f"{config} has sharded_backend={backend!r}, expected 'torch_dist'; save the checkpoint in that format "
                "(Megatron: --ckpt-format torch_dist)"
            )
    try:
        return _described(path)
    except _DAMAGED as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path / METADATA} cannot be read ({error!r}); copy the checkpoint again") from error


def _described(path: Path) -> dict[str, Stored]:
    described, stored = _unpickled(path)
    places: dict[str, dict[Shape, Any]] = defaultdict(dict)
    for index, info in stored.items():
        if index.offset is not None:
            places[index.fqn][tuple(index.offset)] = info
    tensors: dict[str, Stored] = {}
    for key, value in described.items():
        if not hasattr(value, "chunks"):
            continue  # an object, not a tensor
        chunks = []
        for chunk in value.chunks:
            info = places[key].get(tuple(chunk.offsets))
            if info is None or getattr(info, "transform_descriptors", None):
                what = "has no place in a file" if info is None else f"is packed by {info.transform_descriptors}"
                raise CheckpointError(
                    f"{path / METADATA}: {key} at {tuple(chunk.offsets)} {what}; save the checkpoint again"
                )
            box = layout.at(tuple(chunk.offsets), tuple(chunk.sizes))
            chunk = Chunk(box, str(info.relative_path), info.offset, info.length)
            if Path(chunk.file).name != chunk.file or "\0" in chunk.file or min(chunk.offset, chunk.length) < 0:
                raise ValueError(f"{key} lies in {chunk.file!r} from byte {chunk.offset} on")
            chunks.append(chunk)
        found = Stored(value.properties.dtype, tuple(value.size), tuple(chunks))
        if not all(layout.contains(layout.whole(found.shape), chunk.box) for chunk in chunks):
            raise ValueError(f"a chunk of {key} is outside of its shape {found.shape}")
        tensors[key] = found
    return tensors


def keeps_common_state(path: Path) -> bool:
    """True if the common state is stored among the data (Megatron-Core 0.19), not in ``common.pt``. Raises
    CheckpointError as ``read_metadata``."""
    return any(key.startswith(COMMON_KEY) for key in _unpickled(path)[0])


def _unpickled(path: Path) -> tuple[Mapping[str, Any], Mapping[Any, Any]]:
    """Read from the metadata file (key -> description, index of each part -> location)."""
    try:
        with (path / METADATA).open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        return metadata.state_dict_metadata, metadata.storage_data
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} has no {METADATA}; give the directory that Megatron's dist_checkpointing wrote"
        ) from error
    except _DAMAGED as error:
        raise CheckpointError(f"{path / METADATA} cannot be read ({error}); copy the checkpoint again") from error


class _Unused:
    """Replaces classes of a metadata file with unneeded contents."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _Record:
    """Replaces a class of a metadata file; saved state becomes attributes. torch's classes would import
    ``torch.distributed.checkpoint``, which takes a second."""

    offset: Any = None
    """``None`` for an index saved without an offset."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)


class _Properties:
    """Replaces ``TensorProperties``, which are saved as a tuple that begins with the dtype."""

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]


class _MetadataUnpickler(pickle.Unpickler):
    """Creates only replacements for the classes of a metadata file: an untrusted checkpoint cannot run code."""

    _METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
    _UNUSED = ("torch.distributed.checkpoint.planner", "megatron.core.dist_checkpointing.strategies.torch")
    _KNOWN: Mapping[tuple[str, str], Callable[..., Any]] = {
        (_METADATA, "Metadata"): _Record,
        (_METADATA, "MetadataIndex"): _Record,
        (_METADATA, "TensorStorageMetadata"): _Record,
        (_METADATA, "BytesStorageMetadata"): _Record,
        (_METADATA, "ChunkStorageMetadata"): _Record,
        (_METADATA, "TensorProperties"): _Properties,
        (_METADATA, "StorageMeta"): _Unused,
        (_METADATA, "_MEM_FORMAT_ENCODING"): _Unused,
        (_FILES, "_StorageInfo"): _Record,
        ("collections", "OrderedDict"): OrderedDict,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): lambda name: torch.strided,
        **{(module, name): Path for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")},
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._KNOWN:
            return self._KNOWN[module, name]
        if module in self._UNUSED:
            return _Unused
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


def shared_chunk(stored: Mapping[str, Stored]) -> str | None:
    """Describe the first chunk that overlaps another, in its tensor or in a file; ``None`` without overlap."""
    places: dict[tuple[str, int], str] = {}
    for key, tensor in stored.items():
        index = BoxIndex((chunk.box, chunk) for chunk in tensor.chunks)
        for chunk in tensor.chunks:
            if (other := places.setdefault((chunk.file, chunk.offset), key)) != key:
                return f"{key} and {other} are in the same bytes of {chunk.file}"
            if sum(1 for _ in index.overlapping(chunk.box)) > 1:
                return f"chunks of {key} overlap in {list(chunk.box)}"
    return None


def missing_elements(stored: Mapping[str, Stored]) -> Iterable[tuple[str, int]]:
    """Yield (key, missing elements) for every tensor with chunks that do not add up to its shape."""
    for key, tensor in stored.items():
        missing = prod(tensor.shape) - sum(layout.volume(chunk.box) for chunk in tensor.chunks)
        if missing:
            yield key, missing
