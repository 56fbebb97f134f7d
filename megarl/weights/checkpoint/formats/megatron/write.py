"""Write Megatron-Core's dist_checkpointing format piece by piece; ``dist.py`` describes the format."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megarl.weights.checkpoint.formats.megatron.dist import COMMON, CONFIG, METADATA, STORAGES, Chunk, FileSlice
from megarl.weights.reshard import boxes
from megarl.weights.reshard.boxes import Box, Shape

OBJECTS = "__objects.distcp"
_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}


def write_chunk(stream: BinaryIO, box: Box, dtype: torch.dtype, data: Iterable[memoryview]) -> tuple[int, int]:
    """Append a tensor of the box's shape in ``torch.save`` format; ``data``: its bytes. Return (offset, length)."""
    offset = stream.tell()
    shape = boxes.shape_of(box)
    # The archive uses torch's names and records; the checksum of the elements is in the directory at its end.
    with zipfile.ZipFile(FileSlice(stream, offset), "w", zipfile.ZIP_STORED) as archive:
        _record(archive, "data.pkl", _pickled(dtype, shape))
        _record(archive, "byteorder", b"little")
        with archive.open(_info("data/0"), "w", force_zip64=prod(shape) * dtype.itemsize >= 1 << 31) as elements:
            for block in data:
                elements.write(block)
        _record(archive, "version", b"3\n")
    return offset, stream.tell() - offset


def _info(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(f"archive/{name}", (1980, 1, 1, 0, 0, 0))


def _record(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    archive.writestr(_info(name), content)


class _Storage:
    """Represents the elements in the pickle."""


class _Tensor:
    """Represents the tensor: pickled as the call that rebuilds it."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        stride = tuple(prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        return torch._utils._rebuild_tensor_v2, (_Storage(), 0, self.shape, stride, False, OrderedDict())


def _pickled(dtype: torch.dtype, shape: Shape) -> bytes:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if isinstance(obj, _Storage):
                return "storage", getattr(torch, _STORAGE_OF[dtype]), "0", "cpu", prod(shape)
            return None

    out = io.BytesIO()
    Pickler(out, protocol=2).dump(_Tensor(shape))
    return out.getvalue()


def write_metadata(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, Shape]],
    chunks: Sequence[tuple[str, Chunk]],
    aliases: Mapping[str, str],
    objects: Iterable[str],
) -> None:
    """Write Megatron's files other than data: ``common.pt``, empty objects, ``.metadata``, and last ``metadata.json``.

    ``chunks``: (key, chunk). ``aliases``: further key -> key with the chunks to share. ``objects``: keys of
    ShardedObjects that contain ``None`` (Megatron's ``_extra_state`` without FP8).
    """
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    nothing = io.BytesIO()
    torch.save([None], nothing)
    (path / OBJECTS).write_bytes(nothing.getvalue())
    by_key: dict[str, list[Chunk]] = defaultdict(list)
    for key, chunk in chunks:
        by_key[key].append(chunk)
    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for key in [*tensors, *aliases]:
        dtype, shape = tensors[aliases.get(key, key)]
        held = by_key[aliases.get(key, key)]
        described[key] = dcp.TensorStorageMetadata(
            dcp.TensorProperties(dtype=dtype),
            torch.Size(shape),
            [
                dcp.ChunkStorageMetadata(torch.Size(boxes.start_of(c.box)), torch.Size(boxes.shape_of(c.box)))
                for c in held
            ],
        )
        for chunk in held:
            index = dcp.MetadataIndex(key, boxes.start_of(chunk.box))
            storage[index] = _StorageInfo(chunk.file, chunk.offset, chunk.length)
    for key in objects:
        described[key] = dcp.BytesStorageMetadata()
        storage[dcp.MetadataIndex(key)] = _StorageInfo(OBJECTS, 0, len(nothing.getvalue()))
    metadata = dcp.Metadata(described, storage_data=storage, storage_meta=dcp.StorageMeta(), version="1.0.0")
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    torch.save({"checkpoint_version": 3.0, "iteration": 0, "content_metadata": content}, path / COMMON)
    with (path / METADATA).open("wb") as stream:
        pickle.dump(metadata, stream)
    config = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (path / CONFIG).write_text(json.dumps(config))
