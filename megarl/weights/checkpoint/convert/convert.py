"""Conversion HF <-> Megatron-Core, and resharding of Megatron checkpoints: tables, plans and slices, no model.

All conversions work alike: open and check the source, lay out the target's files, stream the plan's moves into them,
publish the directory. Memory is a few blocks of ``stream.BLOCK_ELEMENTS`` per worker, independent of model size.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megarl.core.errors import CheckpointError
from megarl.weights.checkpoint.convert.open_checkpoint import (
    Count,
    Digests,
    Head,
    Opened,
    OutFile,
    Region,
    Transfer,
    add,
    each,
    family,
    open_dist_checkpoint,
    open_hf_checkpoint,
)
from megarl.weights.checkpoint.convert.targets import DistTarget, HFTarget, Target, file_size
from megarl.weights.checkpoint.convert.verify import check_written
from megarl.weights.checkpoint.formats.hf_source import small_files
from megarl.weights.checkpoint.formats.output import FORMAT, Finished, OutputDirectory
from megarl.weights.checkpoint.formats.overwrite import check_replaceable, check_target, named_target
from megarl.weights.checkpoint.formats.slices import Source, warn_of_casts
from megarl.weights.reshard.layouts import VOCAB_MULTIPLE, MegatronGrid
from megarl.weights.reshard.plan import build_plan


@dataclass(frozen=True)
class Settings:
    dtype: torch.dtype | None = None
    """Dtype of the target; ``None`` keeps each tensor's dtype."""
    head: Head = "auto"
    mtp: bool = False
    """Keep multi-token prediction layers."""
    workers: int = 2
    file_bytes: int = 2 << 30
    verify: bool = False
    """Read both sides again and compare digests before publishing the target."""
    overwrite: bool = False
    allow_nonfinite: bool = False
    """Convert tensors with NaN or infinite values instead of refusing them."""
    progress: bool = True
    grid: MegatronGrid = field(default_factory=MegatronGrid)
    """Grid for a Megatron target: files are split as these ranks would save them."""
    vocab_multiple: int = VOCAB_MULTIPLE


@dataclass(frozen=True)
class ConversionSummary:
    """Sizes of a finished conversion."""

    target: Path
    tensors: int
    files: int
    bytes: int
    """Bytes of elements in the target."""
    kept_files: int
    """Number of files finished by an earlier run and found unchanged."""
    seconds: float


def convert_hf_to_megatron(source: Path, target: Path, settings: Settings = Settings()) -> ConversionSummary:  # noqa: B008
    """Convert an HF checkpoint (safetensors, also DeepSeek's FP8) to Megatron-Core's dist_checkpointing format.

    Raises CheckpointError if the source does not match its family's table, the target exists or the disk is full.
    """
    target = named_target(target)
    opened = open_hf_checkpoint(source, settings.head, settings.mtp)
    return _to_megatron(opened, target, settings)


def convert_megatron_to_hf(
    source: Path, target: Path, config: Path | None = None, settings: Settings = Settings()
) -> ConversionSummary:  # noqa: B008
    """Convert the model of a dist_checkpointing directory to an HF checkpoint. ``config``: directory of config.json and
    tokenizer (``None``: the checkpoint's). Raises CheckpointError as ``convert_hf_to_megatron`` does."""
    target = named_target(target)
    opened = open_dist_checkpoint(source, config, settings.head, settings.mtp)
    return run(opened, HFTarget(opened, settings.dtype, settings.file_bytes), target, settings)


def reshard_checkpoint(
    source: Path, target: Path, config: Path | None = None, settings: Settings = Settings()
) -> ConversionSummary:  # noqa: B008
    """Write the model of a dist_checkpointing directory again, resharded for ``settings.grid``. Raises CheckpointError
    as ``convert_hf_to_megatron`` does."""
    target = named_target(target)
    opened = open_dist_checkpoint(source, config, settings.head, settings.mtp)
    return _to_megatron(opened, target, settings)


def _to_megatron(opened: Opened, target: Path, settings: Settings) -> ConversionSummary:
    return run(
        opened,
        DistTarget(opened, settings.dtype, settings.file_bytes, settings.grid, settings.vocab_multiple),
        target,
        settings,
    )


def run(
    opened: Opened,
    target: Target,
    where: Path,
    settings: Settings,
    *,
    source: Source | None = None,
    others: Sequence[Path] = (),
    paths: Sequence[Path] = (),
    recipe: str = "",
    compare: bool = True,
) -> ConversionSummary:
    """Write a target from an opened checkpoint, then close the checkpoint.

    Args:
        source: Tensors to write instead of the checkpoint's, under the same names.
        others: Further directories that the target may not replace.
        paths: Further files that ``source`` reads.
        recipe: Settings of ``source``. Files of a killed conversion with other settings are written again.
        compare: First compare the checkpoint with its manifest, if it has one.
    """
    began = time.monotonic()
    nonfinite: dict[str, str] | None = {} if settings.allow_nonfinite else None
    transfer = Transfer(
        build_plan(opened.layout, target.layout), source or opened.source, target.dtypes, settings.workers, nonfinite
    )
    sources = (opened.path, opened.config_path, *others)
    try:
        check_target(where, sources, overwrite=settings.overwrite)
        _check_casts(opened, target)
        if compare:
            check_written(opened, workers=settings.workers, progress=settings.progress)
        with OutputDirectory(
            where,
            _fingerprint(opened, target, paths, recipe),
            functools.partial(check_replaceable, where, sources, overwrite=settings.overwrite),
        ) as output:
            work = _Work(transfer, target, output, settings)
            kept = work.check_finished()
            left = [file for file in target.files if file.name not in output.finished]
            output.check_space(sum(file_size(target, file) for file in left))
            work.write(left)
            records = [output.finished[file.name] for file in target.files]
            output.copying(small_files(opened.config_path))
            target.finish(output.path, records)
            if settings.verify:
                work.verify()
            for text in (nonfinite or {}).values():
                logging.warning("%s", text)
            output.commit(manifest_of(opened, target, records, output.beside()))
    finally:
        opened.close()
    size = sum(file_size(target, file) for file in target.files)
    return ConversionSummary(where, len(target.layout.tensors), len(target.files), size, kept, time.monotonic() - began)


def _check_casts(opened: Opened, target: Target) -> None:
    """Log float64 tensors that are cast. Raise CheckpointError if some stay float64, which loaders do not expect."""
    dtypes = {part: target.dtypes[row.local] for row in target.layout.rows for part in row.parts}
    double = {name: dtypes[name] for name in target.layout.tensors if opened.dtype_of(name) is torch.float64}
    for name, dtype in double.items():
        if dtype is torch.float64:
            raise CheckpointError(
                f"{name} in {opened.path} is float64, and no model is; give --dtype float32 or another to cast it"
            )
    warn_of_casts(opened.path, double)


class _Work:
    """Files of one conversion, distributed over threads."""

    def __init__(self, transfer: Transfer, target: Target, output: OutputDirectory, settings: Settings) -> None:
        self.transfer, self.target, self.output, self.settings = transfer, target, output, settings
        self._lock = threading.Lock()

    def check_finished(self) -> int:
        """Keep an earlier run's files that still match their recorded digests; return their number."""
        files = [file for file in self.target.files if file.name in self.output.finished]
        good: list[Finished] = []

        def check(file: OutFile, count: Count) -> None:
            record = self.output.finished[file.name]
            written = self.target.reader(self.output.path, [record])
            try:
                found = self._digests_of(file, written, count)
            except CheckpointError:
                found = {}
            finally:
                written.close()
            if found == record.digests:
                good.append(record)
            else:
                logging.warning("%s changed since it was written; writing it again", self.output.path / record.file)

        self._each("checking", files, check)
        if files:
            self.output.keep(good)
        return len(good)

    def write(self, files: list[OutFile]) -> None:
        def write(file: OutFile, count: Count) -> None:
            digests: Digests = {}
            chunks = self.target.write(self.output.path, file, lambda region: self._blocks(region, digests, count))
            size = (self.output.path / file.name).stat().st_size
            with self._lock:
                self.output.add(Finished(file.name, size, digests, chunks))

        self._each("writing", files, write)

    def verify(self) -> None:
        """Read source and target again. Raise CheckpointError naming tensors with different digests."""
        written = self.target.reader(self.output.path)
        wrong: list[str] = []

        def verify(file: OutFile, count: Count) -> None:
            source: Digests = {}
            for region in file.regions:
                for _ in self._blocks(region, source, count):
                    pass
            target = self._digests_of(file, written, count)
            for name in sorted(source.keys() | target.keys()):
                a, b, noted = (side.get(name, 0) for side in (source, target, self.output.finished[file.name].digests))
                if not a == b == noted:
                    wrong.append(f"{name} in {file.name}: source {a:016x}, target {b:016x}, when written {noted:016x}")

        try:
            self._each("verifying", list(self.target.files), verify, passes=2)
        finally:
            written.close()
        if wrong:
            self.output.keep([])
            more = f"\n... and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise CheckpointError(
                f"{self.output.path} was written but differs from its source; check the disk and run again:\n"
                + "\n".join(wrong[:8])
                + more
            )

    def _blocks(self, region: Region, digests: Digests, count: Count) -> Iterator[torch.Tensor]:
        for block in self.transfer.blocks(region, digests):
            yield block
            count(block.numel() * block.element_size())

    def _digests_of(self, file: OutFile, written: Source, count: Count) -> Digests:
        digests: Digests = {}
        for region in file.regions:
            for elements in self.transfer.digest(region, written, digests):
                count(elements * self.target.dtypes[region.local].itemsize)
        return digests

    def _each(self, what: str, files: list[OutFile], act: Callable[[OutFile, Count], None], passes: int = 1) -> None:
        total = passes * sum(file_size(self.target, file) for file in files)
        each(what, files, act, total=total, workers=self.settings.workers, progress=self.settings.progress)


def _fingerprint(opened: Opened, target: Target, others: Sequence[Path], recipe: str) -> str:
    """Hash everything that determines the result: source files with size and time, target files and dtypes."""
    digest = hashlib.sha256(f"{FORMAT}{recipe}".encode())
    for path in [*opened.source.paths(), *others]:
        stat = path.stat()
        digest.update(repr((str(path.resolve()), stat.st_size, stat.st_mtime_ns)).encode())
    digest.update(
        repr((sorted(target.layout.tensors.items()), sorted((k, str(d)) for k, d in target.dtypes.items()))).encode()
    )
    for file in target.files:
        digest.update(repr(file).encode())
    return digest.hexdigest()


def manifest_of(opened: Opened, target: Target, records: list[Finished], beside: list[str]) -> dict[str, Any]:
    """Return the manifest of a converted checkpoint: its files, and a digest of every tensor. ``beside``: files that
    were copied."""
    digests: Digests = {}
    files: dict[str, list[str]] = defaultdict(list)
    for record in records:
        add(digests, record.digests)
        for name in record.digests:
            files[name].append(record.file)
    dtypes = {part: target.dtypes[row.local] for row in target.layout.rows for part in row.parts}
    return {
        "format": FORMAT,
        "kind": target.kind,
        "family": family(opened.hf_config, opened.config_path),
        "head": "value" if opened.is_value else "lm",
        "mtp": opened.mtp,
        "source": str(opened.path.resolve()),
        "files": {record.file: record.bytes for record in records},
        "beside": beside,
        "tensors": {
            name: {
                "dtype": str(dtypes[name]).removeprefix("torch."),
                "shape": list(shape),
                "digest": f"{digests[name]:016x}",
                "files": files[name],
            }
            for name, shape in target.layout.tensors.items()
        },
    }
