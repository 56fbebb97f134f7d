"""Layers and weights that an engine keeps in 8 bits (``rollout.weights_dtype``), and their verification.

Linear layers have one float32 scale for each output channel (vLLM's ``fp8_per_channel``), experts one for each block of
128 × 128 (``fp8_per_block``); numbers are float8_e4m3fn. Only the memory order for a kernel comes from vLLM. Runs
inside vLLM's workers.

vLLM quantises a layer when all its elements have arrived, and frees them: the engine's weights can no longer be
compared with those sent. So two steps are verified. Digests of the arrived elements are kept and compared with those
sent. And megarl computes the 8-bit form of the same elements itself (``eight_bit_layers``): the engine's tensors must
always have its digests. Runs inside vLLM's workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.fused_moe.oracle.fp8 import convert_to_fp8_moe_kernel_format
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineMoEMethod, Fp8PtpcOnlineLinearMethod

from megarl.core.errors import WeightsDiffer, WeightSyncError, first_of
from megarl.engines.client.names import EIGHT_BIT_BLOCK as BLOCK
from megarl.engines.sync.files import read_files
from megarl.ops import digest_values, slice_digests
from megarl.weights.reshard import layout as boxes
from megarl.weights.reshard.execute import piece_digests, zero_padded
from megarl.weights.reshard.layout import Layout, LayoutRow

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest number of float8_e4m3fn."""
SMALLEST_SCALE = 1 / (LARGEST * 512)
"""Smallest scale, for channels of zeros or tiny numbers (vLLM's)."""
SMALLEST_OF_BLOCK = 1e-4
"""Lower bound on the largest number of a block (vLLM's)."""
ELEMENTS = 16 << 20
"""Elements of a linear layer quantised in one piece."""

Tensors = Mapping[str, torch.Tensor]


class Layer(Protocol):
    """A layer in 8 bits."""

    @property
    def path(self) -> str:
        """Name of its module in the model."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that arrive."""

    @property
    def waits(self) -> bool:
        """True if its scales depend on elements of several workers, which must agree on them."""

    def made(self, weights: Tensors) -> Tensors:
        """Make the expected 8-bit form, by name, from the ``weights`` that arrived for its parameters."""

    def held(self) -> Tensors:
        """Return the layer's actual 8-bit form, by the same names."""


def layers_of(model: nn.Module) -> dict[nn.Module, Layer]:
    """Return module -> layer for all layers that ``model`` keeps in 8 bits."""
    found: dict[nn.Module, Layer] = {}
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, Fp8PtpcOnlineLinearMethod):
            found[module] = Linear(path, module)
        elif isinstance(method, Fp8PerBlockOnlineMoEMethod):
            found[module] = Experts(path, module)
    return found


class Linear:
    """A linear layer."""

    parameters = ("weight",)

    def __init__(self, path: str, module: Any) -> None:
        self.path = path
        self._module = module
        self.waits = bool(module.tp_size > 1 and module.input_size != module.input_size_per_partition)

    def made(self, weights: Tensors) -> Tensors:
        weight = weights["weight"]
        largest = largest_of_channels(weight)
        if self.waits:
            group = get_tp_group().device_group
            torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
        numbers, scales = quantised(weight, largest)
        made = nn.Module()
        made.weight, made.weight_scale = (nn.Parameter(x, requires_grad=False) for x in (numbers.t(), scales))
        self._module.quant_method.fp8_linear.process_weights_after_loading(made)
        return _linear(made)

    def held(self) -> Tensors:
        return _linear(self._module)


class Experts:
    """The experts of a layer. The kernel has separate references to the scales, so these are compared too."""

    parameters = ("w13_weight", "w2_weight")
    waits = False

    def __init__(self, path: str, module: Any) -> None:
        self.path = path
        self._module = module

    def made(self, weights: Tensors) -> Tensors:
        (w13, w13_scales), (w2, w2_scales) = (_stack(weights[name]) for name in self.parameters)
        method = self._module.quant_method
        kernel = convert_to_fp8_moe_kernel_format(
            fp8_backend=method.fp8_backend, layer=self._module, w13=w13, w2=w2, w13_scale=w13_scales,
            w2_scale=w2_scales, w13_input_scale=None, w2_input_scale=None,
        )  # fmt: skip
        return _experts(*kernel, *kernel[2:])

    def held(self) -> Tensors:
        module = self._module
        kernel = module.quant_method.moe_quant_config
        return _experts(
            module.w13_weight.data, module.w2_weight.data, module.w13_weight_scale_inv.data,
            module.w2_weight_scale_inv.data, kernel.w1_scale.data, kernel.w2_scale.data,
        )  # fmt: skip


def _linear(module: Any) -> Tensors:
    return {"weight": module.weight.data, "weight_scale": module.weight_scale.data}


def _experts(*tensors: torch.Tensor) -> Tensors:
    names = ("w13_weight", "w2_weight", "w13_weight_scale_inv", "w2_weight_scale_inv", "w1_scale", "w2_scale")
    return dict(zip(names, tensors, strict=True))


def _stack(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8-bit form of each expert [rows, columns] of ``weights`` [E, rows, columns], one at a time."""
    experts, rows, columns = weights.shape
    numbers = torch.empty_like(weights, dtype=FP8)
    scales = torch.empty(experts, rows // BLOCK, columns // BLOCK, dtype=torch.float32, device=weights.device)
    for expert, weight in enumerate(weights):
        numbers[expert], scales[expert] = quantised_blocks(weight)
    return numbers, scales


def largest_of_channels(weight: torch.Tensor) -> torch.Tensor:
    """max |weight| [out, 1], float32, of each output channel of ``weight`` [out, in]."""
    low, high = weight.aminmax(dim=1, keepdim=True)
    return torch.maximum(-low, high).float()


def quantised(weight: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 8-bit form of ``weight`` [out, in]: numbers [out, in] in float8_e4m3fn, the nearest to weight / scale,
    and scales [out, 1] in float32, usually ``largest`` / 448."""
    scales = (largest / torch.tensor(LARGEST, device=weight.device)).clamp_min(SMALLEST_SCALE)
    numbers = torch.empty_like(weight, dtype=FP8)
    rows = max(1, ELEMENTS // weight.shape[1])
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        numbers[part] = (weight[part].float() / scales[part]).clamp(-LARGEST, LARGEST).to(FP8)
    return numbers, scales


def quantised_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8-bit form of ``weight`` [rows, columns] by whole blocks of 128 × 128: numbers [rows, columns] in
    float8_e4m3fn, the nearest to weight · (1 / scale) as vLLM takes it, and scales [blocks, blocks] in float32."""
    rows, columns = weight.shape
    blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)).float().clamp_min(SMALLEST_OF_BLOCK) / LARGEST
    return (blocks.float() * (1 / scales)[:, None, :, None]).to(FP8).view(rows, columns), scales


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
