"""Verification of weights that an engine keeps in 8 bits (``rollout.weight_dtype=fp8``).

vLLM quantises a layer when all its elements have arrived, and frees them: the engine's weights can no longer be
compared with those sent. So two steps are verified. Digests of the arrived elements are kept and compared with those
sent. And megarl computes the 8-bit form of the same elements itself (``eight_bit_layers``): the engine's tensors must
always have its digests. Runs inside vLLM's workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from megarl.core.errors import WeightsDiffer, WeightSyncError, first_of
from megarl.engines.sync.eight_bit_layers import Layer, Tensors, layers_of
from megarl.engines.sync.files import read_files
from megarl.ops import digest_values, slice_digests
from megarl.weights.reshard import layout as boxes
from megarl.weights.reshard.execute import piece_digests, zero_padded
from megarl.weights.reshard.layout import Layout, LayoutRow

_SHOWN = 4


class EightBits:
    """8-bit weights of one worker's model; empty unless vLLM quantises.

    Args:
        model: The worker's model.
        layout: Layout of the engine; ``rest`` is its part not in 8 bits.
        rank: This worker's rank in it.
    """

    def __init__(self, model: nn.Module, layout: Layout, rank: int) -> None:
        self._rank = rank
        self._layers = layers_of(model)
        owners = {f"{layer.path}.{name}": module for module, layer in self._layers.items() for name in layer.parameters}
        rows: dict[nn.Module, list[LayoutRow]] = defaultdict(list)
        for row, _ in layout.rows_of(rank):
            if row.local in owners:
                rows[owners[row.local]].append(row)
        self._parts = {module: _part(layout, of_layer) for module, of_layer in rows.items()}
        ours = {tensor for part in self._parts.values() for tensor in part.tensors}
        self.rest = layout.only(lambda tensor: tensor not in ours) if ours else layout
        self.wait = frozenset(module for module, layer in self._layers.items() if layer.waits)
        """Layers with scales shared by workers, which quantise them in the same order once all weights have arrived."""
        self._arrived: dict[nn.Module, list[tuple[str, boxes.Box, int]]] = {}
        self._made: dict[nn.Module, dict[str, int]] = {}
        self._unwritten: WeightsDiffer | None = None

    def __len__(self) -> int:
        return len(self._layers)

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._layers

    def forget(self) -> None:
        """Begin an update: forget all arrived weights."""
        self._arrived, self._made, self._unwritten = {}, {}, None

    def arrived(self, module: nn.Module) -> None:
        """Record the digests of a module's completely arrived parameters and of their expected 8-bit form."""
        part, layer = self._parts[module], self._layers[module]
        weights = {name: module.get_parameter(name).data for name in layer.parameters}

        def read(local: str) -> torch.Tensor:
            return weights[local.rpartition(".")[2]]

        self._arrived[module] = piece_digests(part, self._rank, read)
        self._made[module] = _digests(layer.made(weights))
        _, check_padding = zero_padded(part, self._rank, read)
        try:
            check_padding()
        except WeightsDiffer as error:  # raised later: other workers wait for this one to agree on scales
            self._unwritten = error

    def pieces(self) -> list[tuple[str, boxes.Box, int]]:
        """Return (logical tensor, its elements, their digest) of all arrived weights. Raises WeightsDiffer if the
        engine's 8-bit form differs from the expected one, or padding was not written; WeightSyncError before a complete
        update."""
        missing = [self._layers[module].path for module in self._parts if module not in self._arrived]
        if missing:
            raise WeightSyncError(
                f"no update has brought {missing[0]}, which the engine keeps in 8 bits: digests come after an update"
            )
        if self._unwritten is not None:
            raise self._unwritten
        _refuse([name for module, made in self._made.items() for name in _differing(self._layers[module], made)])
        return [piece for module in self._parts for piece in self._arrived[module]]

    def check_files(self, path: Path, dtype: torch.dtype) -> int:
        """Compare the engine's 8-bit form with the one computed from a model's files; return the number of elements.

        Args:
            dtype: The model's dtype, to which the files' values are cast.

        Raises:
            WeightsDiffer: they differ.
        """
        count, wrong = 0, list[str]()
        for module, part in self._parts.items():
            layer = self._layers[module]
            device = module.get_parameter(layer.parameters[0]).device
            weights = {
                local: torch.empty(shape, dtype=dtype, device=device)
                for local, shape in part.local_shapes(self._rank).items()
            }
            read_files(part, self._rank, weights.__getitem__, lambda *_: None, path, dtype)
            arrived = {local.rpartition(".")[2]: weight for local, weight in weights.items()}
            wrong += _differing(layer, _digests(layer.made(arrived)))
            count += sum(weight.numel() for weight in weights.values())
        _refuse(wrong)  # raised now that no other worker waits for this one
        return count


def _differing(layer: Layer, made: Mapping[str, int]) -> list[str]:
    held = _digests(layer.held())
    return [f"{layer.path}.{name}" for name in made if made[name] != held[name]]


def _refuse(wrong: Sequence[str]) -> None:
    if wrong:
        raise WeightsDiffer(
            "the engine computes with other numbers in 8 bits than those made from what arrived: "
            f"{first_of(wrong, _SHOWN)} differ"
        )


def _part(layout: Layout, rows: Iterable[LayoutRow]) -> Layout:
    rows = tuple(rows)
    tensors = {tensor: layout.tensors[tensor] for row in rows for tensor in row.parts}
    return Layout(layout.name, tensors, layout.num_ranks, rows, layout.dtypes)


def _digests(tensors: Tensors) -> dict[str, int]:
    values = digest_values(slice_digests([(x, [0] * x.dim(), x.shape) for x in tensors.values()]))
    return dict(zip(tensors, values, strict=True))
