"""Digests of a checkpoint's logical tensors, their comparison with its source, and ``megarl convert inspect``."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path

import torch

from megarl.core.errors import CheckpointError, first_of
from megarl.weights.checkpoint.convert.open_checkpoint import (
    Count,
    Digests,
    Head,
    Opened,
    OutFile,
    Transfer,
    add,
    each,
    family,
    open_checkpoint,
    open_hf_checkpoint,
)
from megarl.weights.checkpoint.convert.targets import HFTarget, file_size
from megarl.weights.checkpoint.formats.dist import DistFiles, find_dist, missing_elements
from megarl.weights.checkpoint.formats.hf_files import in_files
from megarl.weights.checkpoint.formats.hf_source import open_files
from megarl.weights.checkpoint.formats.output import MANIFEST, TargetManifest, read_target_manifest
from megarl.weights.checkpoint.formats.slices import dtype_fault, text_of
from megarl.weights.checkpoint.training.manifest import fault_of_files, training_checkpoint
from megarl.weights.reshard.plan import build_plan


def compute_digests(
    opened: Opened,
    dtype: torch.dtype | None,
    *,
    workers: int = 2,
    progress: bool = True,
    nonfinite: dict[str, str] | None = None,
) -> Digests:
    """Logical tensor -> digest, cast to ``dtype`` (``None``: stored dtype). ``nonfinite``: as in ``Transfer``."""
    target = HFTarget(opened, dtype, file_bytes=1)
    transfer = Transfer(build_plan(opened.layout, target.layout), opened.source, target.dtypes, workers, nonfinite)
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


def header_faults(opened: Opened, manifest: TargetManifest) -> Iterator[str]:
    """Yield differences of file sizes, shapes and dtypes from the manifest."""
    there = [
        name for name, rows in opened.layout.rows_with.items() if all(row.local in opened.source.dtypes for row in rows)
    ]
    dtypes = {name: text_of(opened.dtype_of(name)) for name in there}
    return manifest.faults_of_headers({name: opened.layout.tensors[name] for name in there}, dtypes)


def training_fault(opened: Opened, *, digests: bool) -> str | None:
    """Describe a training checkpoint's first model file that differs from ``state.json``; ``None`` for a match or any
    other checkpoint. ``digests``: compare SHA-256 too, not only sizes. Raises CheckpointError for a damaged
    ``state.json``."""
    root = training_checkpoint(opened.path) if opened.kind == "megatron" else None
    if root is None:
        return None
    return fault_of_files(root, digests=digests, part=opened.path.resolve().name)


def check_written(opened: Opened, *, workers: int = 2, progress: bool = True, digests: bool = True) -> None:
    """Raise CheckpointError if a checkpoint differs from its manifest; without a manifest, read nothing.

    ``digests``: read every byte, not only headers and file sizes.
    """
    if (fault := training_fault(opened, digests=digests)) is not None:
        raise CheckpointError(f"{fault}; copy the checkpoint again, or use the one before it")
    manifest = read_target_manifest(opened.path)
    if manifest is None:
        return
    faults = list(header_faults(opened, manifest))
    if digests and not faults:
        faults = list(manifest.faults(compute_digests(opened, None, workers=workers, progress=progress, nonfinite={})))
    if faults:
        raise CheckpointError(
            f"{opened.path} is not as it was written: {first_of(faults, 1)}; copy it again, or remove {MANIFEST} "
            "if it was changed on purpose"
        )


def check_digests(path: Path, setting: str, *, workers: int = 2, digests: bool = True) -> None:
    """Compare a role's HF checkpoint with its manifest, if any. Raises CheckpointError naming the setting."""
    if not (path / MANIFEST).is_file():
        return
    try:
        opened = open_hf_checkpoint(path)
        try:
            check_written(opened, workers=workers, progress=False, digests=digests)
        finally:
            opened.close()
    except CheckpointError as error:
        raise CheckpointError(f"{setting}: {error}") from error


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
    """Tensors by stored name (in a Megatron checkpoint: key)."""
    family: str | None = None
    head: str | None = None
    problem: str | None = None
    """Reason why comparison with a table was impossible."""
    missing: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    """Stored tensors that are not part of the model: optimizer state, prediction layers."""
    changed: list[str] = field(default_factory=list)
    """Differences of files and tensors from the manifest."""
    digests: dict[str, str] = field(default_factory=dict)
    """Logical (HF) tensor -> digest, computed or from the manifest."""
    digests_from: str = ""

    @property
    def is_whole(self) -> bool:
        """True if tensors, table and manifest agree."""
        return not (self.problem or self.missing or self.misshapen or self.unknown or self.changed)

    def to_json(self) -> str:
        """Return the inspection as JSON."""
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
    """Inspect a checkpoint. ``digests``: compute digests of the elements, cast to ``dtype``.

    Raises CheckpointError only if the checkpoint is unreadable; missing and unknown tensors are in the result.
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
        if (fault := training_fault(opened, digests=digests)) is not None:
            found.changed.append(fault)
        manifest = read_target_manifest(opened.path)
        if manifest is not None:
            found.changed += header_faults(opened, manifest)
        if digests and not found.missing and not found.misshapen:
            _read_all(found, opened, manifest, dtype, workers, progress)
        elif manifest is not None:
            found.digests = {name: f"{noted.digest:016x}" for name, noted in manifest.tensors.items()}
            found.digests_from = f"as {MANIFEST} has them"
    finally:
        opened.close()
    if found.is_whole:
        found.problem = _refusal(path, config_path, head, mtp)
    return found


def _refusal(path: Path, config_path: Path | None, head: Head, mtp: bool) -> str | None:
    """Reason why a conversion would refuse the checkpoint; ``None`` if it would accept it."""
    try:
        open_checkpoint(path, config_path=config_path, head=head, mtp=mtp).close()
    except CheckpointError as error:
        return str(error)
    return None


def _read_all(
    found: Inspection,
    opened: Opened,
    manifest: TargetManifest | None,
    dtype: torch.dtype | None,
    workers: int,
    progress: bool,
) -> None:
    """Compute the digests; compare digests in the stored dtype with the manifest's."""
    nonfinite: dict[str, str] = {}
    values = compute_digests(opened, dtype, workers=workers, progress=progress, nonfinite=nonfinite)
    found.misshapen += nonfinite.values()
    found.digests = {name: f"{value:016x}" for name, value in values.items()}
    found.digests_from = "computed now"
    if manifest is None:
        return
    if dtype is not None:
        values = compute_digests(opened, None, workers=workers, progress=progress, nonfinite={})
    faults = list(manifest.faults(values))
    found.changed += faults
    if not faults:
        found.digests_from += f"; {MANIFEST} has the same digests"


def _stored(path: Path) -> Inspection:
    dist = find_dist(path)
    if dist is None:
        files = open_files(path)
        tensors = {
            n: Found(text_of(d), list(files.shapes[n]), [files.file_of(n).name]) for n, d in files.dtypes.items()
        }
        files.close()
        return Inspection(str(path), "hf", tensors)
    saved = DistFiles(dist)
    places: dict[tuple[tuple[str, int], ...], str] = {}
    for key, t in saved.stored.items():  # a second name of the same bytes is not listed
        places.setdefault(tuple((chunk.file, chunk.offset) for chunk in t.chunks), key)
    tensors = {}
    for key in places.values():
        t = saved.stored[key]
        tensors[key] = Found(text_of(t.dtype), list(t.shape), sorted({chunk.file for chunk in t.chunks}))
    return Inspection(str(dist), "megatron", tensors)


def _compare(found: Inspection, opened: Opened) -> None:
    source, wanted = in_files(opened.source, opened.layout.local_shapes(0))
    for local, shape in wanted.items():
        if local not in source.shapes:
            found.missing.append(local)
        elif source.shapes[local] != shape:
            found.misshapen.append(f"{local} has shape {source.shapes[local]}, config.json asks for {shape}")
        elif (fault := dtype_fault(local, opened.path, source.dtypes[local])) is not None:
            found.misshapen.append(fault)
    if isinstance(source, DistFiles):
        short = {key: n for key, n in missing_elements(source.stored) if key not in found.missing}
        found.misshapen += [
            f"{key}: {n} of {prod(source.shapes[key])} elements are in no chunk" for key, n in short.items()
        ]
    for name in opened.other:
        (found.beside if opened.is_expected(name) else found.unknown).append(name)


def render(found: Inspection) -> str:
    """Format the inspection as text for a terminal."""
    elements = sum(prod(t.shape) for t in found.tensors.values())
    files = sorted({file for t in found.tensors.values() for file in t.files})
    dtypes = sorted({t.dtype for t in found.tensors.values()})
    lines = [
        f"{found.path}: {found.kind} checkpoint, {len(found.tensors)} tensors, {elements:,} elements, "
        f"{', '.join(dtypes)}, {len(files)} file{'s' if len(files) != 1 else ''}"
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
        ("not as written", found.changed),
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
