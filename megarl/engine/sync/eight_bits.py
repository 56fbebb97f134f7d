"""Linear layers whose weights an engine keeps in 8 bits (``rollout.weight_dtype=fp8``), and the proof of them.

vLLM quantises such a layer when all its elements have arrived, and frees them: one float32 scale for each output
channel, numbers in float8_e4m3fn. What the engine computes with can then no longer be compared with what was sent. Two
links are proven in place of that. Digests of the elements as they arrived are kept, and compared with those that were
sent. And megarl makes the 8-bit form of the same elements by itself: weights and scales that the engine holds must have
its digests, whenever they are asked for. Only the order in which a kernel wants them is vLLM's. Runs inside vLLM's
workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod

from megarl.core.errors import WeightsDiffer, WeightSyncError
from megarl.engine.sync.files import read_files
from megarl.ops import digest_values, slice_digests
from megarl.weights.reshard import boxes
from megarl.weights.reshard.execute import piece_digests, zero_padded
from megarl.weights.reshard.layout import Layout, LayoutRow

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest number of float8_e4m3fn."""
SMALLEST_SCALE = 1 / (LARGEST * 512)
"""Scale of a channel of zeros, and of those near it (vLLM's)."""
ELEMENTS = 16 << 20
"""Elements that are quantised at once."""
_SHOWN = 4


class _Form(NamedTuple):
    """Digests of a weight in 8 bits and of its scales, as the layer's kernel takes them."""

    weight: int
    scales: int


def largest_of_channels(weight: torch.Tensor) -> torch.Tensor:
    """max |weight| [out, 1], float32, of each output channel of ``weight`` [out, in]."""
    low, high = weight.aminmax(dim=1, keepdim=True)
    return torch.maximum(-low, high).float()


def quantised(weight: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8-bit form of ``weight`` [out, in]: numbers [out, in] in float8_e4m3fn, the nearest to weight / scale, and
    scales [out, 1] in float32, of which ``largest`` / 448 is the usual."""
    scales = (largest / torch.tensor(LARGEST, device=weight.device)).clamp_min(SMALLEST_SCALE)
    numbers = torch.empty_like(weight, dtype=FP8)
    rows = max(1, ELEMENTS // weight.shape[1])
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        numbers[part] = (weight[part].float() / scales[part]).clamp(-LARGEST, LARGEST).to(FP8)
    return numbers, scales


class EightBits:
    """Weights in 8 bits of one worker's model; it has none unless vLLM was told to quantise.

    Args:
        model: The worker's.
        layout: The engines', of which ``rest`` is what is not in 8 bits.
        rank: This worker's in it.
    """

    def __init__(self, model: nn.Module, layout: Layout, rank: int) -> None:
        self._rank = rank
        self._modules: dict[str, Any] = {
            f"{path}.weight": module
            for path, module in model.named_modules()
            if isinstance(getattr(module, "quant_method", None), Fp8PtpcOnlineLinearMethod)
        }
        rows: dict[str, list[LayoutRow]] = defaultdict(list)
        for row, _ in layout.rows_of(rank):
            if row.local in self._modules:
                rows[row.local].append(row)
        self._parts = {local: _part(layout, of_local) for local, of_local in rows.items()}
        ours = {tensor for part in self._parts.values() for tensor in part.tensors}
        self.rest = layout.only(lambda tensor: tensor not in ours) if ours else layout
        self.wait = frozenset(module for module in self._modules.values() if _shares_channels(module))
        """Layers whose channels lie on several workers: they agree on the scales, so that all quantise these layers in
        one order, once everything has arrived."""
        self._arrived: dict[str, list[tuple[str, boxes.Box, int]]] = {}
        self._made: dict[str, _Form] = {}
        self._unwritten: WeightsDiffer | None = None

    @property
    def names(self) -> Collection[str]:
        """Local tensors that are kept in 8 bits."""
        return self._modules.keys()

    def forget(self) -> None:
        """Begin an update: nothing has arrived."""
        self._arrived, self._made, self._unwritten = {}, {}, None

    def arrived(self, local: str, weight: torch.Tensor) -> None:
        """Remember the digests of local tensor ``local`` [out, in], and of the 8-bit form that it must get."""

        def read(_: str) -> torch.Tensor:
            return weight

        self._arrived[local] = piece_digests(self._parts[local], self._rank, read)
        self._made[local] = self._form_of(local, weight)
        _, check_padding = zero_padded(self._parts[local], self._rank, read)
        try:
            check_padding()
        except WeightsDiffer as error:  # not now: other workers wait for this one to agree on scales
            self._unwritten = error

    def pieces(self) -> list[tuple[str, boxes.Box, int]]:
        """(logical tensor, its elements, their digest) of all that arrived. Raises WeightsDiffer where the engine does
        not hold what was made from it, or padding was not written; WeightSyncError before a whole update."""
        missing = [local for local in self._parts if local not in self._arrived]
        if missing:
            raise WeightSyncError(
                f"no update has brought {missing[0]}, which the engine keeps in 8 bits: digests come after an update"
            )
        if self._unwritten is not None:
            raise self._unwritten
        self._check((local, self._made[local]) for local in self._parts)
        return [piece for local in self._parts for piece in self._arrived[local]]

    def check_files(self, path: Path, dtype: torch.dtype) -> int:
        """Compare what the engine holds with what megarl makes from a model's files; return the number of elements.

        Args:
            dtype: The model's, to which the files' values are cast.

        Raises:
            WeightsDiffer: it holds something else.
        """
        count = 0
        for local, part in self._parts.items():
            module = self._modules[local]
            shape = part.local_shapes(self._rank)[local]
            weight = torch.empty(shape, dtype=dtype, device=module.weight.device)
            read_files(part, self._rank, lambda _, weight=weight: weight, lambda *_: None, path, dtype)  # type: ignore[misc]
            self._check([(local, self._form_of(local, weight))])
            count += weight.numel()
        return count

    def _form_of(self, local: str, weight: torch.Tensor) -> _Form:
        largest = largest_of_channels(weight)
        if self._modules[local] in self.wait:
            group = get_tp_group().device_group
            torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
        numbers, scales = quantised(weight, largest)
        made = nn.Module()
        made.weight, made.weight_scale = (nn.Parameter(x, requires_grad=False) for x in (numbers.t(), scales))
        self._modules[local].quant_method.fp8_linear.process_weights_after_loading(made)
        return _digests(made)

    def _check(self, forms: Iterable[tuple[str, _Form]]) -> None:
        wrong = []
        for local, form in forms:
            held = _digests(self._modules[local])
            named = [name for name, one, other in zip(form._fields, form, held, strict=True) if one != other]
            wrong += [f"{' and '.join(named)} of {local}"] if named else []
        if wrong:
            more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise WeightsDiffer(
                f"the engine computes with other numbers in 8 bits than those made from what arrived: "
                f"{', '.join(wrong[:_SHOWN])}{more} differ"
            )


def _part(layout: Layout, rows: Iterable[LayoutRow]) -> Layout:
    rows = tuple(rows)
    tensors = {tensor: layout.tensors[tensor] for row in rows for tensor in row.parts}
    return Layout(layout.name, tensors, layout.num_ranks, rows, layout.dtypes)


def _shares_channels(module: Any) -> bool:
    """True where tensor parallelism cuts the inputs, so that each worker has a part of every output channel."""
    return bool(module.tp_size > 1 and module.input_size != module.input_size_per_partition)


def _digests(module: Any) -> _Form:
    tensors = (module.weight.data, module.weight_scale.data)
    return _Form(*digest_values(slice_digests([(x, [0] * x.dim(), x.shape) for x in tensors])))
