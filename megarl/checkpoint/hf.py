"""HF checkpoints: read the slices that a rank needs, write an ordinary one from any grid.

Both directions go by the same layouts as weight sync; there is no conversion code per model here or anywhere else.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megarl.errors import CheckpointError
from megarl.reshard import boxes
from megarl.reshard.execute import Transport, exchange
from megarl.reshard.layout import Layout
from megarl.reshard.plan import ReshardPlan
from megarl.reshard.transport import GroupTransport

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
_DERIVED = ("rotary_emb.inv_freq",)
"""Endings of tensors that some files have although the model computes them."""


def read_hf_config(path: Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint directory. Raises CheckpointError when there is none or it is not JSON."""
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path} has no config.json; set model.path to the directory of an HF checkpoint")
    try:
        config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); copy the checkpoint again") from error
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{file} must hold a JSON object, found {type(config).__name__}; copy the checkpoint again"
        )
    return config


def load_into(path: Path, layout: Layout, rank: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill a rank's local tensors from an HF checkpoint, reading only the slices it holds; casts to their dtypes, zeroes padding.

    ``tensors``: local name -> tensor, shaped as the layout says. Raises CheckpointError naming the tensors that are missing,
    have another shape, or are in the file but not in the model's table.
    """
    with _open_weights(path) as files:
        _check_names(path, layout, files)
        with torch.no_grad():
            for pad in layout.padding(rank):
                tensors[pad.local][boxes.index_of(boxes.start_of(pad.box), boxes.shape_of(pad.box))].zero_()
            for piece in layout.pieces(rank):
                stored = files[piece.tensor].get_slice(piece.tensor)
                if tuple(stored.get_shape()) != layout.tensors[piece.tensor]:
                    raise CheckpointError(
                        f"{piece.tensor} in {path} has shape {tuple(stored.get_shape())}, config.json asks for "
                        f"{layout.tensors[piece.tensor]}; the two are of different models"
                    )
                values = stored[tuple(slice(lo, hi) for lo, hi in piece.box)]
                tensors[piece.local][boxes.index_of(piece.at, boxes.shape_of(piece.box))].copy_(values)


@contextmanager
def _open_weights(path: Path) -> Iterator[dict[str, Any]]:
    """Tensor name -> open safetensors file that has it (single or sharded by an index)."""
    index = path / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif (path / SINGLE).is_file():
        names = [SINGLE]
    else:
        raise CheckpointError(
            f"{path} has neither {SINGLE} nor {INDEX}; set model.path to an HF checkpoint in safetensors"
        )
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for name in names:
            if not (path / name).is_file():
                raise CheckpointError(f"{path / name} is listed in {INDEX} but missing; copy the checkpoint again")
            try:
                file = stack.enter_context(safe_open(path / name, framework="pt"))
            except SafetensorError as error:
                raise CheckpointError(f"{path / name} cannot be read ({error}); copy the checkpoint again") from error
            found.update(dict.fromkeys(file.keys(), file))
        yield found


def _check_names(path: Path, layout: Layout, found: Mapping[str, Any]) -> None:
    missing = [name for name in layout.tensors if name not in found]
    if missing:
        raise CheckpointError(
            f"{path} lacks {_some(missing)}; the files are incomplete or config.json is another model's"
        )
    # A tied checkpoint may still carry its copy of the embedding as lm_head.
    unknown = [
        n for n in sorted(found) if n not in layout.tensors and n != "lm_head.weight" and not n.endswith(_DERIVED)
    ]
    if unknown:
        raise CheckpointError(
            f"{path} has tensors that the model's table does not know: {_some(unknown)}; config.json is another model's, or add "
            "them to megarl/architectures/"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def export_hf(
    plan: ReshardPlan,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    transport: Transport | None = None,
    bucket_bytes: int = 64 << 20,
    file_bytes: int = 4 << 30,
) -> None:
    """Write ``target`` as an ordinary HF checkpoint; every rank of the grid calls it, rank 0 writes.

    ``plan``: from the grid's layout to ``hf_layout``. ``tensors``: the rank's local tensors. ``dtype``: of the files (None: that
    of the tensors). config.json, tokenizer and other small files come from ``source``. Rank 0 holds one file of at most
    ``file_bytes`` (or one tensor) at a time. ``target`` appears whole or not at all; an older one is replaced. Other ranks
    return once they have sent: put a barrier behind if they are to read the result.
    """
    assert plan.destination.num_ranks == 1, "an HF checkpoint is written by one rank"
    transport = transport or GroupTransport()
    dtype = dtype or next(iter(tensors.values())).dtype
    temporary = target.with_name(f".{target.name}.partial")
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    shapes = plan.destination.tensors
    groups = _files(
        {name: boxes.volume(boxes.whole(shape)) * dtype.itemsize for name, shape in shapes.items()}, file_bytes
    )
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        part = replace(plan.only(names), colocated=True)
        whole = {name: torch.empty(shapes[name], dtype=dtype) for name in names} if rank == 0 else {}
        exchange(part, rank, tensors, whole.__getitem__, transport, dtype=dtype, bucket_bytes=bucket_bytes)
        if rank == 0:
            save_file(whole, temporary / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    if rank == 0:
        if len(groups) > 1:
            total = sum(boxes.volume(boxes.whole(shape)) for shape in shapes.values()) * dtype.itemsize
            _write_json(temporary / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        _copy_small_files(source, temporary, dtype)
        _replace(temporary, target)


def _files(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Tensor names in order, cut into files of at most ``limit`` bytes (a larger tensor is a file of its own)."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def _copy_small_files(source: Path, target: Path, dtype: torch.dtype) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_WEIGHTS):
            shutil.copyfile(file, target / file.name)
    config = read_hf_config(source)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    _write_json(target / "config.json", {**config, key: str(dtype).removeprefix("torch.")})


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


def _replace(temporary: Path, target: Path) -> None:
    """Rename into place; an older directory is moved aside first and removed last (rename cannot replace a full one)."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.replace(target, old)
    os.replace(temporary, target)
    shutil.rmtree(old, ignore_errors=True)
