"""Export of adapters from a training checkpoint to PEFT's files, without building a model."""

from __future__ import annotations

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
from megarl.weights.checkpoint.convert.convert import ConversionSummary, Settings
from megarl.weights.checkpoint.convert.open_checkpoint import EMBEDDING_KEY, OUTPUT, config_folder
from megarl.weights.checkpoint.formats import peft
from megarl.weights.checkpoint.formats.hf_source import read_hf_config
from megarl.weights.checkpoint.formats.megatron.dist import ADAPTER, DistFiles, find_dist, has_adapters
from megarl.weights.checkpoint.formats.megatron.keys import adapt
from megarl.weights.checkpoint.formats.values import value_fault
from megarl.weights.checkpoint.training.manifest import check_finished, fault_of_files, training_checkpoint
from megarl.weights.reshard import boxes
from megarl.weights.reshard.adapters import factors_of, file_shapes, trained_whole
from megarl.weights.reshard.layouts import dist_layout, hf_layout

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
