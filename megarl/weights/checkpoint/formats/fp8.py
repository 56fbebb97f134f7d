"""DeepSeek's block-wise FP8 weights, read dequantised: ``weight * weight_scale_inv`` per block.

Source: ``inference/fp8_cast_bf16.py`` of the DeepSeek-V3 repository (scale in float32, product rounded once).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.core.errors import CheckpointError
from megarl.weights.checkpoint.formats.hf_files import HFFiles
from megarl.weights.checkpoint.formats.slices import into
from megarl.weights.reshard import boxes
from megarl.weights.reshard.boxes import Box

SCALE = "_scale_inv"


def _is_block(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)


class Dequantised:
    """Source of float32 slices from a checkpoint with FP8 weights.

    Raises CheckpointError for a quantisation other than e4m3 in 2-D blocks, and for weights without matching scales.
    """

    def __init__(self, files: HFFiles, quantization: Mapping[str, Any]) -> None:
        self._files = files
        self.path: Path = files.path
        block = quantization.get("weight_block_size")
        known = quantization.get("quant_method") == "fp8" and quantization.get("fmt", "e4m3") == "e4m3"
        if not known or block is None or not _is_block(block):
            raise CheckpointError(
                f"{files.path / 'config.json'}: quantization_config {dict(quantization)} is not supported, only "
                "quant_method 'fp8', fmt "
                "'e4m3' with a weight_block_size of two numbers; use the checkpoint before quantisation"
            )
        self._block = int(block[0]), int(block[1])
        self._scales = {name.removesuffix(SCALE): name for name in files.entries if name.endswith(SCALE)}
        for name, scale in self._scales.items():
            self._check(name, scale)
        for name, entry in files.entries.items():
            if entry.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and name not in self._scales:
                raise CheckpointError(
                    f"{name} in {entry.file} is {entry.dtype} but {name}{SCALE} is missing; copy the checkpoint again"
                )
        self.shapes = {n: s for n, s in files.shapes.items() if not n.endswith(SCALE)}
        # Dequantised weights: the training dtype, although ``read`` returns float32.
        self.dtypes = {
            n: torch.bfloat16 if n in self._scales else d for n, d in files.dtypes.items() if n in self.shapes
        }

    def _check(self, name: str, scale: str) -> None:
        entries = self._files.entries
        if name not in entries:
            raise CheckpointError(
                f"{scale} in {entries[scale].file} scales {name}, which is missing; copy the checkpoint again"
            )
        shape = entries[name].shape
        expected = tuple(-(-n // b) for n, b in zip(shape, self._block, strict=True)) if len(shape) == 2 else ()
        if entries[name].dtype != torch.float8_e4m3fn or entries[scale].shape != expected:
            raise CheckpointError(
                f"{scale} in {entries[scale].file} has shape {entries[scale].shape}, expected {expected} for {name}, "
                f"{shape} of "
                f"{entries[name].dtype} (expected float8_e4m3fn) in blocks of {self._block}; copy the checkpoint again"
            )

    def read(self, name: str, box: Box, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read a box of a tensor, dequantised, into ``out`` if given."""
        scale = self._scales.get(name)
        values = self._files.read(name, box, out if scale is None else None)
        if scale is None:
            return values
        blocks = tuple((lo // b, -(-hi // b)) for (lo, hi), b in zip(box, self._block, strict=True))
        factors = self._files.read(scale, blocks).float()
        product = into(out, torch.float32, boxes.shape_of(box)).copy_(values)
        for axis in range(2):
            b, (lo, hi) = self._block[axis], box[axis]
            factors = factors.repeat_interleave(b, axis).narrow(axis, lo - blocks[axis][0] * b, hi - lo)
        return product.mul_(factors)

    def file_of(self, name: str) -> Path:
        return self._files.file_of(name)

    def paths(self) -> list[Path]:
        return self._files.paths()

    def close(self) -> None:
        """Close the files."""
        self._files.close()
