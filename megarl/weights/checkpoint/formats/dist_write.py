"""Write Megatron-Core's dist_checkpointing format piece by piece; alternative names of its tensors.

In Megatron-Core 0.16.1 names depend on spec and settings. A norm is separate or part of the next linear
(``models/gpt/gpt_layer_specs.py``). Layers and experts are stacked or numbered. Gate and up are one tensor or split as
``_w`` and ``_v`` (``non_homogeneous_layers`` and ``singleton_local_shards`` in ``transformer/transformer_block.py``,
``moe/experts.py``, ``mlp.py``).
"""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megarl.weights.checkpoint.formats.dist import COMMON, CONFIG, METADATA, STORAGES, Chunk, FileSlice, Stored
from megarl.weights.reshard import layout
from megarl.weights.reshard.layout import Box, Layout, Shape

_SAME = (
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
    ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
)
_NORMS = re.compile(r"^(decoder\.layers|mtp\.layers\.\d+\.transformer_layer)(\.\d+)?\.(?P<name>.*)$")


def other_name(key: str, keys: Iterable[str] | None = None) -> str | None:
    """Return a norm's key under the other spec; ``None`` for other tensors, or if a model with ``keys`` has no such
    key."""
    match = _NORMS.match(key)
    for pair in _SAME if match else ():
        assert match is not None
        if match["name"] in pair:
            prefix = key[: match.start("name")]
            other = prefix + pair[1 - pair.index(match["name"])]
            linear = other.replace(".layer_norm_weight", ".weight")
            # The local spec uses this name also in MoE layers, which have no such linear.
            fits = keys is None or linear == other or linear in keys or "mlp.linear_fc1" in linear
            return other if fits else None
    return None


def adapt(stored: Mapping[str, Stored], wanted: Mapping[str, Shape]) -> dict[str, Stored]:
    """Map stored tensors to the keys and shapes of ``wanted``, for each that exists under any of its names."""
    found: dict[str, Stored] = {}
    for key in wanted:
        other = other_name(key)
        if key in stored:
            found[key] = stored[key]
        elif other is not None and other in stored:
            found[key] = stored[other]
    if len(found) == len(wanted):
        return found
    parts: dict[str, dict[tuple[Shape, bool], Stored]] = {}
    for key, value in stored.items():
        for name, lead, is_second in _joined(key):
            for candidate in (name, other_name(name)):
                if candidate is not None and candidate in wanted and candidate not in found:
                    parts.setdefault(candidate, {})[lead, is_second] = value  # the same under both its names
    for key, pieces in parts.items():
        if all(len(lead) + len(value.shape) == len(wanted[key]) for (lead, _), value in pieces.items()):
            found[key] = _join(wanted[key], pieces)
    return found


def is_known(key: str, wanted: Mapping[str, Shape]) -> bool:
    """True if a stored key is one of the names of a wanted tensor."""
    names = [key, *(name for name, _, _ in _joined(key))]
    return any(name in wanted or other_name(name) in wanted for name in names)


def _joined(key: str) -> Iterator[tuple[str, Shape, bool]]:
    """Yield (key of the tensor that this one may be part of, leading indices in it, is the second half of its rows)."""
    is_second = key.endswith("_v")
    name = key.removesuffix("_v").removesuffix("_w") if key.endswith(("weight_w", "weight_v")) else key
    expert = re.search(r"experts\.experts\.(\d+)\.", name)
    lead: Shape = ()
    if expert is not None:
        name = name.replace(expert[0], "experts.experts.", 1)
        lead = (int(expert[1]),)
    if name != key:
        yield name, lead, is_second
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    if layer is not None:
        yield name.replace(layer[0], "decoder.layers.", 1), (int(layer[1]), *lead), is_second


def _join(shape: Shape, pieces: Mapping[tuple[Shape, bool], Stored]) -> Stored:
    chunks: list[Chunk] = []
    for (lead, is_second), value in pieces.items():
        rows = value.shape[0] if is_second else 0
        for chunk in value.chunks:
            (lo, hi), *rest = chunk.box
            box = (*((i, i + 1) for i in lead), (lo + rows, hi + rows), *rest)
            chunks.append(chunk._replace(box=box))
    return Stored(next(iter(pieces.values())).dtype, shape, tuple(chunks))


_WITHOUT_STATE = ("embedding.", "output_layer.", ".router.", ".conv1d.", ".A_log", ".dt_bias")


def extra_states(layout: Layout) -> Iterator[str]:
    """Yield keys of the ``_extra_state`` objects that models of either spec require; without FP8 they are ``None``."""
    seen: set[str] = set()
    for row in layout.rows:
        lead = ".".join(map(str, row.lead or (0,)))
        stack = ".".join(map(str, row.stack or (1,)))
        for key in (row.local, other_name(row.local)):
            if key is None or any(text in key for text in _WITHOUT_STATE):
                continue
            module = key.partition(".weight.")[0] if ".weight." in key else key.rpartition(".")[0]
            modules = [module]
            if module.endswith("self_attention.linear_proj"):
                modules.append(module.removesuffix("linear_proj") + "core_attention")
            for name in modules:
                state = f"{name}._extra_state/shard_{lead}_{stack}"
                if state not in seen:
                    seen.add(state)
                    yield state


OBJECTS = "__objects.distcp"
_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}


def write_chunk(stream: BinaryIO, box: Box, dtype: torch.dtype, data: Iterable[memoryview]) -> tuple[int, int]:
    """Append a tensor of the box's shape in ``torch.save`` format; ``data``: its bytes. Return (offset, length)."""
    offset = stream.tell()
    shape = layout.shape_of(box)
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
                dcp.ChunkStorageMetadata(torch.Size(layout.start_of(c.box)), torch.Size(layout.shape_of(c.box)))
                for c in held
            ],
        )
        for chunk in held:
            index = dcp.MetadataIndex(key, layout.start_of(chunk.box))
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
