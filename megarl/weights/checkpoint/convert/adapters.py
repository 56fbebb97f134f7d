"""Adapters of checkpoints: merged into an HF checkpoint, removed again, and exported to PEFT's files.

Both are computed in float32 block by block while the files are written, and rounded once. Memory is a few blocks for
each worker and a few A's, independent of the model's size.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from megarl.config.load import load_resolved
from megarl.config.lora import LoraConfig
from megarl.core.errors import CheckpointError, first_of
from megarl.weights.architectures import Head, HFConfig
from megarl.weights.checkpoint.convert.convert import ConversionSummary, Settings, run
from megarl.weights.checkpoint.convert.open_checkpoint import (
    BLOCK_ELEMENTS,
    EMBEDDING_KEY,
    OUTPUT,
    Count,
    Opened,
    config_folder,
    each,
    open_hf_checkpoint,
)
from megarl.weights.checkpoint.convert.targets import HFTarget
from megarl.weights.checkpoint.convert.verify import check_written
from megarl.weights.checkpoint.formats import peft
from megarl.weights.checkpoint.formats.dist import ADAPTER, DistFiles, find_dist, has_adapters
from megarl.weights.checkpoint.formats.dist_write import adapt
from megarl.weights.checkpoint.formats.hf_files import HFFiles
from megarl.weights.checkpoint.formats.hf_source import SCORE, read_hf_config
from megarl.weights.checkpoint.formats.slices import Source, value_fault
from megarl.weights.checkpoint.training.manifest import check_finished, fault_of_files, training_checkpoint
from megarl.weights.reshard import layout
from megarl.weights.reshard import layout as boxes
from megarl.weights.reshard.adapters import Factors, factors_of, file_shapes, trained_whole
from megarl.weights.reshard.layout import Box, Shape
from megarl.weights.reshard.layouts import dist_layout, hf_layout

_KEPT = 8
"""Maximum number of cached A's, and B's of an embedding, for later blocks of their tensors."""


@dataclass(frozen=True)
class WeightDifference:
    """Differences between the elements of two models."""

    elements: int
    different: int
    largest: float
    """Largest difference, relative to the largest element of its tensor."""
    tensor: str
    """Tensor with the largest difference; "" without a difference."""


class WithAdapter:
    """The tensors of an HF checkpoint with ``sign`` times an adapter added in float32: a ``Source``.

    Tensors of ``modules_to_save`` come from the adapter, or with ``sign`` -1 from ``base``.
    """

    def __init__(
        self, source: Source, files: HFFiles, factors: Mapping[str, Factors], saved: Mapping[str, Source], sign: float
    ) -> None:
        """``saved``: HF name of a replaced tensor -> its source."""
        self.path = source.path
        self._source, self._files, self._factors, self._saved, self._sign = source, files, factors, saved, sign
        own = {name: torch.float32 for name in factors}
        self._dtypes = {**source.dtypes, **own, **{name: other.dtypes[name] for name, other in saved.items()}}
        self._kept: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shapes of the checkpoint's tensors."""
        return self._source.shapes

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Dtypes that ``read`` returns: float32 for a sum."""
        return self._dtypes

    def read(self, name: str, box: Box, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read a box of a tensor, into ``out`` if it fits."""
        if (other := self._saved.get(name)) is not None:
            return other.read(name, box, out)
        own = self._factors.get(name)
        if own is None:
            return self._source.read(name, box, out)
        rows, columns = box
        whole = self._source.read(name, box).to(torch.float32)
        if own.is_embedding:
            a = self._files.read(own.a, ((0, own.rank), rows)).to(torch.float32)
            return whole.add_(a.t() @ self._whole(own.b)[slice(*columns)].t(), alpha=self._sign * own.scale)
        b = self._files.read(own.b, (rows, (0, own.rank))).to(torch.float32)
        return whole.add_(b @ self._whole(own.a)[:, slice(*columns)], alpha=self._sign * own.scale)

    def _whole(self, name: str) -> torch.Tensor:
        """Full A or B for all blocks of rows, cached."""
        with self._lock:
            if name not in self._kept:
                while len(self._kept) >= _KEPT:
                    self._kept.pop(next(iter(self._kept)))
                whole = layout.whole(self._files.shapes[name])
                self._kept[name] = self._files.read(name, whole).to(torch.float32)
            return self._kept[name]

    def file_of(self, name: str) -> Path:
        """File with a tensor, in the checkpoint or the adapter."""
        return self._saved.get(name, self._source).file_of(name)


def merge_adapter(
    source: Path,
    adapter: Path,
    target: Path,
    settings: Settings = Settings(),  # noqa: B008
) -> ConversionSummary:
    """Merge a PEFT adapter into an HF checkpoint. If the adapter has a score head, the target is a
    sequence-classification checkpoint, even if the source has no score head.

    Raises CheckpointError: incomplete checkpoint or adapter, another model's adapter, existing target, full disk.
    """
    return _convert(source, adapter, target, settings, 1.0, None)


def unmerge_adapter(
    source: Path,
    adapter: Path,
    target: Path,
    settings: Settings = Settings(),  # noqa: B008
    base: Path | None = None,
) -> tuple[ConversionSummary, WeightDifference | None]:
    """Write an HF checkpoint after removing a PEFT adapter that was merged into it.

    W' is W + s·B·A after rounding, so W' − s·B·A equals W up to rounding.

    Args:
        base: The model before the merge: source of the tensors that the adapter replaced (``modules_to_save``), and
            compared with the result.

    Raises CheckpointError as ``merge_adapter`` does, and if the adapter replaced tensors and ``base`` is ``None``.
    """
    summary = _convert(source, adapter, target, settings, -1.0, base)
    if base is None:
        return summary, None
    return summary, compare(summary.target, base, settings)


def _convert(
    source: Path, adapter: Path, target: Path, settings: Settings, sign: float, base: Path | None
) -> ConversionSummary:
    opened = open_hf_checkpoint(source, settings.head, settings.mtp)
    adds_score = sign > 0 and not opened.is_value and settings.head == "auto" and peft.saves_score(adapter)
    if adds_score:
        check_written(opened, workers=settings.workers, progress=settings.progress)  # its manifest has no score head
        opened.close()
        opened = open_hf_checkpoint(source, "value", settings.mtp, check=False)
    files: HFFiles | None = None
    other: Opened | None = None
    try:
        lora = peft.lora_of(adapter, opened.hf_config, opened.table)
        factors = factors_of(opened.hf_config, lora, opened.table)
        own = file_shapes(factors.values())
        tensors = opened.layout.tensors
        replaced = trained_whole(tensors, lora, opened.table)
        files = peft.open_adapter(
            adapter,
            own | {name: tensors[name] for name in replaced},
            opened.source if sign > 0 else None,
            opened.hf_config,
        )
        before: Source = files
        if sign < 0 and replaced:
            if base is None:
                raise CheckpointError(
                    f"{adapter} replaced {first_of(replaced, 3)}, which cannot be had from {source}; give the model "
                    "before the merge with --base"
                )
            other = open_hf_checkpoint(base, settings.head, settings.mtp)
            before = other.source
            if missing := [name for name in replaced if name not in other.source.shapes]:
                raise CheckpointError(
                    f"{base} has no {first_of(missing, 3)}, which {adapter} brought; the model before the merge is "
                    f"{base} itself"
                )
        merged = WithAdapter(opened.source, files, factors, dict.fromkeys(replaced, before), sign)
        if adds_score:
            opened.source.dtypes[SCORE] = files.dtypes[SCORE]
        others = [adapter] if base is None else [adapter, base]
        made = HFTarget(opened, settings.dtype, settings.file_bytes)
        paths = [*files.paths(), *(other.source.paths() if other is not None else [])]
        return run(
            opened, made, target, settings, source=merged, others=others, paths=paths, recipe=f"{sign} {factors}",
            compare=not adds_score,
        )  # fmt: skip
    finally:
        for read in (opened, files, other):
            if read is not None:
                read.close()


def compare(path: Path, other: Path, settings: Settings = Settings()) -> WeightDifference:  # noqa: B008
    """Compare every tensor of an HF checkpoint with another checkpoint's, cast to the first one's dtype.

    Raises CheckpointError if the two models have different tensors.
    """
    mine, theirs = (open_hf_checkpoint(each_path, settings.head, settings.mtp) for each_path in (path, other))
    try:
        if mine.layout.tensors != theirs.layout.tensors:
            raise CheckpointError(f"{other} has other tensors than {path}; give the model before the merge with --base")
        found: list[WeightDifference] = []

        def look(name: str, count: Count) -> None:
            different, largest, size = 0, 0.0, 0.0
            for box in layout.split(layout.whole(mine.layout.tensors[name]), BLOCK_ELEMENTS):
                values = mine.source.read(name, box)
                wanted = theirs.source.read(name, box).to(values.dtype)
                different += int(torch.count_nonzero(values != wanted))
                wide = wanted.to(torch.float32)
                largest = max(largest, float((values.to(torch.float32) - wide).abs().max()))
                size = max(size, float(wide.abs().max()))
                count(values.numel() * values.element_size())
            largest = largest / size if size else largest
            found.append(WeightDifference(prod(mine.layout.tensors[name]), different, largest, name))

        names = [name for name, shape in mine.layout.tensors.items() if prod(shape)]
        total = sum(prod(mine.layout.tensors[name]) * mine.dtype_of(name).itemsize for name in names)
        each("comparing", names, look, total=total, workers=settings.workers, progress=settings.progress)
    finally:
        mine.close()
        theirs.close()
    worst = max(found, key=lambda one: one.largest)
    elements, different = sum(one.elements for one in found), sum(one.different for one in found)
    return WeightDifference(elements, different, worst.largest, worst.tensor if different else "")


ACTOR = "actor"
REFERENCE = "reference"
"""Folder of a run with the model made by its warm start."""


@dataclass(frozen=True)
class AdapterCheckpoint:
    """The actor's adapters in a training checkpoint."""

    path: Path
    """Directory in the dist_checkpointing format."""
    lora: LoraConfig
    base: Path
    """HF checkpoint of the base model."""

    @classmethod
    def of(cls, source: Path) -> AdapterCheckpoint | None:
        """Open a checkpoint; ``None`` without adapters. Its run's ``resolved.json`` has rank, alpha and base model.

        Raises CheckpointError for an unfinished checkpoint, one outside its run, or adapters of a critic; ConfigError
        for a damaged ``resolved.json``.
        """
        path = find_dist(source)
        if path is None or not has_adapters(path):
            return None
        check_finished(path)
        if path.resolve().name != ACTOR:
            raise CheckpointError(f"{path} has adapters of another model than the actor, which no command reads")
        run_dir = path.resolve().parents[2]
        resolved = run_dir / "resolved.json"
        if not resolved.is_file():
            raise CheckpointError(
                f"{path} has adapters, whose settings are in resolved.json of their run, and {resolved} is missing; "
                "give RUN/checkpoints/global_step_N in the directory of the run"
            )
        config = load_resolved(resolved)
        base = run_dir / REFERENCE if config.trainer.warm_start.steps else Path(config.model.path)
        return cls(path, config.model.lora, base)

    def write(
        self,
        target: Path,
        settings: Settings = Settings(),  # noqa: B008
        config: Path | None = None,
    ) -> ConversionSummary:
        """Write adapters and tensors trained by ``modules_to_save`` as PEFT's files, with the checkpoint's bits.

        Args:
            settings: dtype, overwrite, allow_nonfinite and verify are used.
            config: Directory of config.json; ``None``: the checkpoint's.

        Raises CheckpointError for files that differ from the checkpoint's manifest, missing or misshapen tensors,
        non-finite values, and an existing target without ``settings.overwrite``.
        """
        began = time.monotonic()
        if target.exists() and not settings.overwrite:
            raise CheckpointError(f"{target} exists; give another directory, or --overwrite to replace an adapter")
        root = training_checkpoint(self.path)
        if root is not None and (fault := fault_of_files(root, part=self.path.name)) is not None:
            raise CheckpointError(f"{fault}; copy the checkpoint again, or use the one before it")
        hf_config = read_hf_config(config or config_folder(self.path))
        files = DistFiles(self.path)
        try:
            head: Head = "score" if files.shapes.get(OUTPUT, (0,))[0] == 1 else "lm"
            tensors = self._read(files, hf_config, head)
        finally:
            files.close()
        if settings.dtype is not None:
            tensors = {name: tensor.to(settings.dtype) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            if not settings.allow_nonfinite and (fault := value_fault(tensor, tensor)) is not None:
                raise CheckpointError(f"{name} in {self.path} {fault}; --allow-nonfinite converts it as it is")
        saved = [*self.lora.modules_to_save, *(["score"] if head == "score" else [])]
        factors = factors_of(hf_config, self.lora, head)
        found = peft.config_of(self.lora, factors, str(self.base), saved, head, hf_config)
        peft.write_files(target, tensors, found, hf_config)
        if settings.verify:
            _compare(target, tensors, hf_config)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        return ConversionSummary(target, len(tensors), 1, nbytes, 0, time.monotonic() - began)

    def _read(self, files: DistFiles, hf_config: dict[str, Any], head: Head) -> dict[str, torch.Tensor]:
        """Read all tensors of PEFT's files: HF name -> full tensor."""
        found: dict[str, torch.Tensor] = {}
        for name, shape in file_shapes(factors_of(hf_config, self.lora, head).values()).items():
            key = f"{ADAPTER}{name}"
            # B of an output layer has the padded vocabulary's rows.
            if key not in files.shapes or any(has < n for has, n in zip(files.shapes[key], shape, strict=True)):
                raise CheckpointError(
                    f"{key} in {self.path} has shape {files.shapes.get(key)}, model.lora of its run asks for {shape}; "
                    "resolved.json is another run's"
                )
            found[name] = files.read(key, boxes.whole(shape))
        if unknown := [key for key in files.shapes if key.startswith(ADAPTER) and key[len(ADAPTER) :] not in found]:
            raise CheckpointError(
                f"{self.path} has {first_of(unknown, 3)}, which model.lora of its run does not target; resolved.json "
                "is another run's"
            )
        saved = set(trained_whole(hf_layout(hf_config, head=head).tensors, self.lora, head))
        rows = max(files.shapes.get(key, (0,))[0] for key in (EMBEDDING_KEY, OUTPUT))
        layout = dist_layout(hf_config, vocab=max(rows, hf_config["vocab_size"]), head=head)
        layout = layout.only(lambda name: name in saved)
        stored = adapt(files.stored, wanted := layout.local_shapes(0))
        if missing := [key for key in wanted if key not in stored]:
            raise CheckpointError(f"{self.path} lacks {first_of(missing, 3)} of model.lora.modules_to_save")
        whole = DistFiles(self.path, stored)
        try:
            for piece in layout.pieces(0):
                if piece.tensor not in saved or not prod(shape := boxes.shape_of(piece.box)):
                    continue
                values = whole.read(piece.local, boxes.at(piece.at, shape)).view(shape)
                if piece.tensor not in found:
                    found[piece.tensor] = torch.empty(layout.tensors[piece.tensor], dtype=values.dtype)
                found[piece.tensor][boxes.index_of(boxes.start_of(piece.box), shape)] = values
        finally:
            whole.close()
        return found


def _compare(target: Path, tensors: Mapping[str, torch.Tensor], hf_config: HFConfig) -> None:
    """Raise CheckpointError if the files differ from the tensors written."""
    files = peft.open_adapter(target, {name: tuple(t.shape) for name, t in tensors.items()}, hf_config=hf_config)
    try:
        wrong = [n for n, t in tensors.items() if not torch.equal(files.read(n, boxes.whole(tuple(t.shape))), t)]
    finally:
        files.close()
    if wrong:
        raise CheckpointError(
            f"{target} was written but differs in {first_of(wrong, 3)}; check the disk and run again with --overwrite"
        )
