"""Writes slices into a vLLM model's local fused tensors, and reads back what the model really computes with.

vLLM repacks linear weights for oneDNN after loading and frees the originals, so neither can be done in place. Its own
layerwise reload restores a layer's tensors, lets them be written and repacks them; ``SliceWriter`` drives that reload
with slices instead of HF tensors. Runs inside vLLM's workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from megarl.errors import WeightSyncError

_UNPACK_COLUMNS = 256


@dataclass(frozen=True)
class _Faint:
    """Elements that a matrix product need not give back: negative zeros and subnormal numbers."""

    index: torch.Tensor
    values: torch.Tensor


class SliceWriter:
    """One model of one worker.

    Args:
        model: The worker's model.
        model_config: vLLM's.
        shapes: Local tensor name -> shape, as the layout says; an update writes every element, padding included.
    """

    def __init__(self, model: nn.Module, model_config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._model = model
        self._model_config = model_config
        self._shapes = dict(shapes)
        self._owner = {f"{path}.{name}": (module, name) for path, module, name in _parameters(model)}
        self._left: dict[nn.Module, int] = {}
        self._open: set[nn.Module] = set()
        self._faint: dict[str, _Faint] = {}
        unknown = sorted(set(self._shapes) ^ set(self._owner))
        if unknown:
            raise WeightSyncError(
                f"the layout and vLLM's model differ in these local tensors: {', '.join(unknown)}; the architecture's "
                "table does not fit this vLLM version"
            )

    def start(self) -> None:
        """Begins an update, also after one that ended midway: every layer waits for new weights."""
        self._left = {}
        for name, (module, _) in self._owner.items():
            self._left[module] = self._left.get(module, 0) + math.prod(self._shapes[name])
        self._open = set()
        self._faint = {}
        initialize_layerwise_reload(self._model)

    def tensor(self, name: str) -> torch.Tensor:
        """The local tensor to write slices into; the first call for a layer allocates it."""
        module, parameter = self._owner[name]
        if module not in self._open:
            materialize_layer(module, get_layerwise_info(module))
            self._open.add(module)
        tensor = getattr(module, parameter).data
        if tuple(tensor.shape) != self._shapes[name]:
            raise WeightSyncError(
                f"{name} has shape {tuple(tensor.shape)} in vLLM's model, {self._shapes[name]} in the layout; the "
                "architecture's table does not fit this vLLM version"
            )
        return tensor

    def wrote(self, name: str, numel: int) -> None:
        """Counts; a layer that has all its elements is packed at once, so that only one is unpacked at a time."""
        module, _ = self._owner[name]
        self._left[module] -= numel
        if self._left[module] == 0:
            self._remember_faint(module)
            _layerwise_process(module, get_layerwise_info(module))

    def finish(self) -> None:
        """Ends the update.

        Raises:
            WeightSyncError: a tensor did not get all its elements.
        """
        short = [name for name, (module, _) in self._owner.items() if self._left[module] != 0]
        if short:
            raise WeightSyncError(f"these local tensors did not get all their elements: {', '.join(short)}")
        finalize_layerwise_reload(self._model, self._model_config)

    def computed_with(self, name: str) -> torch.Tensor:
        """The local tensor as the model computes with it, unpacked where it is packed."""
        module, parameter = self._owner[name]
        if parameter != "weight" or not _is_packed(module):
            return getattr(module, parameter).data
        weight = _unpack(module)
        faint = self._faint.get(name)
        if faint is not None:
            flat = weight.view(-1)
            seen = flat[faint.index]
            flat[faint.index] = torch.where(seen == 0, faint.values, seen)
        return weight

    def _remember_faint(self, module: nn.Module) -> None:
        """Both sides compare bits; a product loses the sign of zero, and some kernels take subnormals for zero."""
        if not _is_packable(module):
            return
        name = next(name for name, owner in self._owner.items() if owner == (module, "weight"))
        weight = _weight(module).data.reshape(-1)
        tiny = weight.abs() < torch.finfo(weight.dtype).tiny
        index = (tiny & (weight.signbit() | (weight != 0))).nonzero().view(-1)
        if index.numel():
            self._faint[name] = _Faint(index, weight[index])


def _parameters(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    return [
        (path, module, name)
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    ]


def _is_packable(module: nn.Module) -> bool:
    return isinstance(module, LinearBase | ParallelLMHead)


def _is_packed(module: nn.Module) -> bool:
    """lm_head keeps its weight beside the packed copy, and computes from the copy."""
    return _is_packable(module) and hasattr(module, "cpu_linear")


def _unpack(module: Any) -> torch.Tensor:
    """W [out, in] of ``x -> x W^T``: the image of the identity, which is exact, in bounded blocks of columns."""
    weight = _weight(module)
    columns = _in_features(module)
    blocks = []
    for start in range(0, columns, _UNPACK_COLUMNS):
        rows = min(_UNPACK_COLUMNS, columns - start)
        unit = torch.zeros(rows, columns, dtype=weight.dtype)
        unit[:, start : start + rows].fill_diagonal_(1)
        blocks.append(module.cpu_linear(unit, weight, None).t())
    return torch.cat(blocks, dim=1).contiguous()


def _weight(module: Any) -> torch.Tensor:
    """Empty where only the packed copy is left."""
    weight: torch.Tensor = module.weight
    return weight


def _in_features(module: Any) -> int:
    if isinstance(module, ParallelLMHead):
        return int(module.embedding_dim)
    return int(getattr(module, "input_size_per_partition", None) or module.input_size)
