"""What is in a checkpoint of either format: tensors, what its table misses or does not know, and digests."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path

import torch

from megarl.checkpoint.dist import DistFiles, find_dist, missing_elements
from megarl.checkpoint.hf_source import open_hf
from megarl.checkpoint.opened import Head, Opened, family, open_checkpoint
from megarl.checkpoint.output import MANIFEST
from megarl.checkpoint.pool import Count, each
from megarl.checkpoint.stream import Digests, OutFile, Transfer, add
from megarl.checkpoint.targets import HFTarget, file_size
from megarl.errors import CheckpointError
from megarl.reshard.plan import build_plan


@dataclass
class Found:
    """A stored tensor."""

    dtype: str
    shape: list[int]
    files: list[str]


@dataclass
class Inspection:
    path: str
    kind: str
    """``hf`` or ``megatron``."""
    tensors: dict[str, Found]
    """By stored name; in a Megatron checkpoint its key."""
    family: str | None = None
    head: str | None = None
    problem: str | None = None
    """Why it could not be held against a table."""
    missing: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    """No part of the model: optimizer state, prediction layers."""
    digests: dict[str, str] = field(default_factory=dict)
    """Logical (HF) tensor -> digest: computed, or as the manifest has it."""
    digests_from: str = ""

    @property
    def is_whole(self) -> bool:
        return not (self.problem or self.missing or self.misshapen or self.unknown)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def inspect_checkpoint(
    path: Path,
    config_path: Path | None = None,
    *,
    head: Head = "auto",
    mtp: bool = False,
    digests: bool = False,
    dtype: torch.dtype | None = None,
    workers: int = 2,
    progress: bool = True,
) -> Inspection:
    """Look at a checkpoint. ``digests``: compute them, of the elements cast to ``dtype``.

    Raises CheckpointError for what cannot be read at all; that tensors are missing or unknown is part of the answer.
    """
    found = _stored(path)
    try:
        opened = open_checkpoint(path, config_path=config_path, head=head, mtp=mtp, check=False)
    except CheckpointError as error:
        found.problem = str(error)
        return found
    try:
        found.family = family(opened.hf_config, opened.config_path)
        found.head = "value" if opened.is_value else "lm"
        _compare(found, opened)
        manifest = opened.path / MANIFEST
        if digests and not found.missing and not found.misshapen:
            values = compute_digests(opened, dtype, workers=workers, progress=progress)
            found.digests = {name: f"{value:016x}" for name, value in values.items()}
            found.digests_from = "computed now"
        elif manifest.is_file():
            found.digests = _noted_digests(manifest)
            found.digests_from = f"as {MANIFEST} has them"
    finally:
        opened.close()
    return found


def _noted_digests(manifest: Path) -> dict[str, str]:
    try:
        return {name: value["digest"] for name, value in json.loads(manifest.read_text())["tensors"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{manifest} cannot be read ({error!r}); copy the checkpoint again, or remove this file") from error


def _stored(path: Path) -> Inspection:
    dist = find_dist(path)
    if dist is None:
        files = open_hf(path)
        tensors = {n: Found(_text(d), list(files.shapes[n]), [files.file_of(n).name]) for n, d in files.dtypes.items()}
        files.close()
        return Inspection(str(path), "hf", tensors)
    saved = DistFiles(dist)
    places: dict[tuple[tuple[str, int], ...], str] = {}
    for key, t in saved.stored.items():  # a second name of the same bytes is not listed
        places.setdefault(tuple((chunk.file, chunk.offset) for chunk in t.chunks), key)
    tensors = {}
    for key in places.values():
        t = saved.stored[key]
        tensors[key] = Found(_text(t.dtype), list(t.shape), sorted({chunk.file for chunk in t.chunks}))
    return Inspection(str(dist), "megatron", tensors)


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare(found: Inspection, opened: Opened) -> None:
    source = opened.source
    for local, shape in opened.layout.local_shapes(0).items():
        if local not in source.shapes:
            found.missing.append(local)
        elif source.shapes[local] != shape:
            found.misshapen.append(f"{local} has shape {source.shapes[local]}, config.json asks for {shape}")
    if isinstance(source, DistFiles):
        short = {key: n for key, n in missing_elements(source.stored) if key not in found.missing}
        found.misshapen += [f"{key}: {n} of {prod(source.shapes[key])} elements are in no chunk" for key, n in short.items()]
    for name in opened.other:
        (found.beside if opened.is_expected(name) else found.unknown).append(name)


def compute_digests(opened: Opened, dtype: torch.dtype | None, *, workers: int = 2, progress: bool = True) -> Digests:
    """Logical tensor -> digest of its elements cast to ``dtype`` (None: as they are stored)."""
    target = HFTarget(opened, dtype, file_bytes=1)
    transfer = Transfer(build_plan(opened.layout, target.layout), opened.source, target.dtypes, workers)
    total: Digests = {}
    lock = threading.Lock()

    def read(file: OutFile, count: Count) -> None:
        digests: Digests = {}
        for region in file.regions:
            for block in transfer.blocks(region, digests):
                count(block.numel() * block.element_size())
        with lock:
            add(total, digests)

    size = sum(file_size(target, file) for file in target.files)
    each("reading", target.files, read, total=size, workers=workers, progress=progress)
    return {name: total[name] for name in target.layout.tensors}


def render(found: Inspection) -> str:
    """The inspection as text for a terminal."""
    elements = sum(prod(t.shape) for t in found.tensors.values())
    files = sorted({file for t in found.tensors.values() for file in t.files})
    dtypes = sorted({t.dtype for t in found.tensors.values()})
    lines = [
        f"{found.path}: {found.kind} checkpoint, {len(found.tensors)} tensors, {elements:,} elements, {', '.join(dtypes)}, "
        f"{len(files)} file{'s' if len(files) != 1 else ''}"
    ]
    if found.family:
        lines.append(f"family {found.family}, head {found.head}")
    width = max((len(name) for name in found.tensors), default=0)
    for name, t in found.tensors.items():
        where = t.files[0] if len(t.files) == 1 else f"{len(t.files)} files"
        lines.append(f"  {name:<{width}}  {'x'.join(map(str, t.shape)):>20}  {t.dtype:<14}  {where}")
    if found.digests:
        lines.append(f"digests of the logical tensors, {found.digests_from}:")
        width = max(map(len, found.digests))
        lines += [f"  {name:<{width}}  {value}" for name, value in found.digests.items()]
    for title, names in (
        ("missing", found.missing),
        ("wrong", found.misshapen),
        ("unknown to the table", found.unknown),
        ("beside the model (not converted)", found.beside),
    ):
        if names:
            lines.append(f"{title}: {len(names)}")
            lines += [f"  {name}" for name in names[:20]] + (["  ..."] if len(names) > 20 else [])
    if found.problem:
        lines.append(f"not held against a table: {found.problem}")
    elif found.is_whole:
        lines.append("whole: every tensor of the table is there, in its shape, and none is unknown")
    return "\n".join(lines) + "\n"
