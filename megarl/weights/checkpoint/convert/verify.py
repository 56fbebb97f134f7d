"""Digests of a checkpoint's logical tensors, and their comparison with its manifest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from megarl.core.errors import CheckpointError, first_of
from megarl.weights.checkpoint.convert.open_checkpoint import Opened, open_hf_checkpoint
from megarl.weights.checkpoint.convert.stream import Digests, OutFile, Transfer, add
from megarl.weights.checkpoint.convert.targets import HFTarget, file_size
from megarl.weights.checkpoint.convert.threads import Count, each
from megarl.weights.checkpoint.formats.output import MANIFEST
from megarl.weights.checkpoint.formats.target_manifest import TargetManifest, read_target_manifest
from megarl.weights.checkpoint.formats.values import text_of
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
