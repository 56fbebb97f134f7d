"""Writes slices into a vLLM model's local fused tensors, and reads them back exactly.

On CPU a linear layer keeps a matrix packed for oneDNN, experts are permuted and padded, and latent attention has
matrices derived from its projection. Runs inside vLLM's workers.

vLLM repacks weights for its kernels after loading and frees the originals, so both need its layerwise reload: it
restores a layer's tensors, lets them be written and repacks them; ``SliceWriter`` drives that reload with slices
instead of HF tensors. Runs inside vLLM's workers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm._custom_ops import causal_conv1d_weight_pack, cpu_prepack_moe_weight
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, materialize_layer

from megarl.core.errors import WeightSyncError
from megarl.engines.sync.eight_bits import EightBits

Shape = tuple[int, ...]

_UNPACK_COLUMNS = 256


def may_be_packed(module: nn.Module) -> bool:
    return isinstance(module, LinearBase | ParallelLMHead)


def is_packed_linear(module: Any, *, plain_head: bool = False) -> bool:
    """Return True if the module computes from a packed copy; lm_head also keeps its weight, and uses it if its logits
    have another dtype than the model (``plain_head``)."""
    alone = (isinstance(module, ParallelLMHead) and not plain_head) or (
        isinstance(module, LinearBase) and module.weight.numel() == 0
    )
    return alone and hasattr(module, "cpu_linear")


def packed_experts(module: Any) -> Any | None:
    """Return the CPU kernel that permutes this module's weights; None without one."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    experts: Any = getattr(kernel, "fused_experts", None)
    permutes = isinstance(module, RoutedExperts) and isinstance(experts, CPUUnquantizedExperts)
    return experts if permutes and not experts._use_zentorch else None


def unpack_linear(module: Any) -> torch.Tensor:
    """Return W [out, in] of ``x -> x W^T``, as the image of the identity: exact except for negative zeros and subnormal
    numbers."""
    weight = module.weight  # empty if only the packed copy is left
    columns = _in_features(module)
    blocks = []
    for start in range(0, columns, _UNPACK_COLUMNS):
        rows = min(_UNPACK_COLUMNS, columns - start)
        unit = torch.zeros(rows, columns, dtype=weight.dtype)
        unit[:, start : start + rows].fill_diagonal_(1)
        blocks.append(module.cpu_linear(unit, weight, None).t())
    return torch.cat(blocks, dim=1).contiguous()


def unpack_experts(packed: torch.Tensor, isa: str, shape: Shape, *, gated: bool) -> torch.Tensor:
    """Return the stack [E, rows, columns] of ``shape`` from the CPU kernel's packed form.

    Packing pads the experts' width, which is the columns (``w2``) or, when ``gated``, each half of the rows (``w13``),
    and then permutes each expert in the same way; the permutation is read from a packed expert of index numbers.
    """
    padded = packed[0].numel()
    source = packed_order(lambda plain: cpu_prepack_moe_weight(plain, isa), (1, *packed.shape[1:]), packed.dtype)
    experts, rows, columns = shape
    plain = torch.empty_like(packed).view(experts, padded)
    plain[:, source] = packed.reshape(experts, padded)
    if not gated:
        return plain.view(packed.shape)[:, :, :columns].contiguous()
    halves = plain.view(experts, 2, -1, columns)[:, :, : rows // 2]
    return halves.reshape(shape)


def unpack_convolution(packed: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return the weight [c, 1, k] of ``shape`` from the CPU kernel's packed form."""
    plain = torch.empty(shape, dtype=packed.dtype)
    plain.view(-1)[packed_order(causal_conv1d_weight_pack, (shape[0], shape[-1]), packed.dtype)] = packed.view(-1)
    return plain


def packed_order(pack: Callable[[torch.Tensor], torch.Tensor], shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return int64 [n]: the place in a tensor of ``shape`` that each element of its packed form has, read from packed
    index numbers."""
    number = torch.arange(math.prod(shape))
    source = torch.zeros_like(number)
    base = 1 << 8  # whole numbers below it are exact in every float type
    scale = 1
    while scale < len(number):
        digit = (number // scale % base).to(dtype).view(shape)
        source += pack(digit).reshape(-1).long() * scale
        scale *= base
    return source


def latent_projections(model: nn.Module) -> dict[nn.Module, Any]:
    """Return kv_b_proj -> the latent attention that derives its matrices from it."""
    return {module.kv_b_proj: module for module in model.modules() if isinstance(module, MLAAttention)}


def latent_weight(attention: Any) -> torch.Tensor:
    """Return kv_b_proj.weight [heads * (nope + v), kv_lora] as used by latent attention.

    Prompts use the projection, sampled tokens two matrices derived from it. If these differ from the projection, their
    values are returned, so that a comparison fails.
    """
    weight: torch.Tensor = attention.kv_b_proj.weight.data
    absorbed = torch.cat([attention.W_UK_T.data, attention.W_UV.data.transpose(1, 2)], dim=1)
    absorbed = absorbed.reshape(-1, absorbed.shape[-1])
    return weight if torch.equal(absorbed, weight) else absorbed


def _in_features(module: Any) -> int:
    if isinstance(module, ParallelLMHead):
        return int(module.embedding_dim)
    return int(getattr(module, "input_size_per_partition", None) or module.input_size)


BUFFERS = {"e_score_correction_bias", "layer_scalar"}
"""Weights that models keep as buffers: routers' biases, if vLLM runs transformers' modules; factors of layers."""


@dataclass(frozen=True)
class LocalTensor:
    """A local tensor as the layout describes it; ``dtype`` is that of the logical tensors in it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Faint:
    """Elements that a matrix product may not reproduce: negative zeros and subnormal numbers."""

    index: torch.Tensor
    values: torch.Tensor


def plain_path(path: str) -> str:
    """Return a module's name without vLLM's LoRA wrapper."""
    return path.replace(".base_layer", "")


class SliceWriter:
    """One model of one worker.

    Args:
        model: The worker's model.
        model_config: vLLM's.
        tensors: Local tensor name -> its part of the layout; an update writes every element, padding included.
        eight_bits: Tensors that the model keeps in 8 bits.
        beside: Modules of another model in it, which are left alone.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: ModelConfig,
        tensors: Mapping[str, LocalTensor],
        eight_bits: EightBits,
        beside: Collection[nn.Module] = (),
    ) -> None:
        self._model = model
        self.eight_bits = eight_bits
        self._model_config = model_config
        self._tensors = dict(tensors)
        self.owner = {
            f"{plain_path(path)}.{name}": (module, name)
            for path, module, name in _loadable(model)
            if module not in beside
        }
        """Local tensor name -> its module, and the parameter's name there."""
        self._plain_head = model_config.head_dtype != model_config.dtype
        self._latent = latent_projections(model)
        self.left: dict[nn.Module, int] = {}
        """Module -> elements that the running update has still to write."""
        self._reloaded: nn.Module = model
        """Layers of the running update."""
        self._open: set[nn.Module] = set()
        self._faint: dict[str, _Faint] = {}
        unknown = sorted(set(self._tensors) ^ set(self.owner))
        if unknown:
            raise WeightSyncError(
                f"the layout and vLLM's model differ in these local tensors: {', '.join(unknown)}; the architecture's "
                "table does not fit this vLLM version"
            )

    def start(self, names: Collection[str] | None = None) -> None:
        """Begin an update, also after an interrupted one: every layer waits for new weights.

        ``names``: the local tensors of the update, all of a module or none; other layers stay unchanged. None is all.
        """
        assert names is None or not self.eight_bits, "layers in 8 bits are written together"
        given = self._tensors if names is None else {name: self._tensors[name] for name in names}
        self.left = {}
        for name, tensor in given.items():
            module, _ = self.owner[name]
            self.left[module] = self.left.get(module, 0) + math.prod(tensor.shape)
        self._open = set()
        self._faint = {name: faint for name, faint in self._faint.items() if name not in given}
        self.eight_bits.forget()
        if names is None:
            self._reloaded = self._model
        else:  # latent attention derives its matrices from one of these
            attention = [self._latent[module] for module in self.left if module in self._latent]
            self._reloaded = nn.ModuleList([*self.left, *attention])
        repack_experts(self._reloaded)
        _name_loaders(self._reloaded)
        initialize_layerwise_reload(self._reloaded)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the local tensor to write slices into; a layer's first call allocates it."""
        module, parameter = self.owner[name]
        self._allocate(module)
        tensor: torch.Tensor = getattr(module, parameter).data
        shape = self._tensors[name].shape
        if tuple(tensor.shape) != shape:
            raise WeightSyncError(
                f"{name} has shape {tuple(tensor.shape)} in vLLM's model, {shape} in the layout; the architecture's "
                "table does not fit this vLLM version"
            )
        return tensor

    def _allocate(self, module: nn.Module) -> None:
        if module not in self._open:
            materialize_layer(module, get_layerwise_info(module))
            self._open.add(module)

    def wrote(self, name: str, numel: int) -> None:
        """Count written elements and pack complete layers, so that only incomplete layers are unpacked. Layers with
        scales shared by workers wait for ``finish``."""
        module, _ = self.owner[name]
        self.left[module] -= numel
        if self.left[module] == 0 and module not in self.eight_bits.wait:
            self.pack(module)

    def finish(self) -> None:
        """End the update.

        Raises:
            WeightSyncError: a tensor did not get all its elements.
        """
        for module in list(self.left):
            if module in self.eight_bits.wait:  # before any error is raised, because other workers do the same
                self._allocate(module)
                self.pack(module)
        short = [name for name, (module, _) in self.owner.items() if self.left.get(module, 0) != 0]
        if short:
            raise WeightSyncError(f"these local tensors did not get all their elements: {', '.join(short)}")
        finalize_layerwise_reload(self._reloaded, self._model_config)

    def computed_with(self, name: str) -> torch.Tensor:
        """Return the local tensor that the model computes with, in the layout's shape and dtype, unpacked if packed."""
        module, parameter = self.owner[name]
        expected = self._tensors[name]
        experts = packed_experts(module)
        if is_packed_linear(module, plain_head=self._plain_head) and parameter == "weight":
            value = self._with_faint(name, unpack_linear(module))
        elif experts is not None and parameter in ("w13_weight", "w2_weight"):
            packed = getattr(module, parameter).data
            value = unpack_experts(packed, experts.isa, expected.shape, gated=parameter == "w13_weight")
        elif hasattr(module, "_cpu_unpacked_conv_weight") and parameter == "weight":
            value = unpack_convolution(module.get_parameter("weight").data, expected.shape)
        elif module in self._latent and parameter == "weight":
            value = latent_weight(self._latent[module])
        else:
            value = getattr(module, parameter).data
        if value.dtype == expected.dtype:
            return value
        # vLLM may keep a wider dtype; values that the layout's dtype cannot represent stay unchanged, so that a check
        # fails.
        narrow = value.to(expected.dtype)
        return narrow if torch.equal(narrow.to(value.dtype), value) else value

    def _with_faint(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        faint = self._faint.get(name)
        if faint is not None:
            flat = weight.view(-1)
            seen = flat[faint.index]
            flat[faint.index] = torch.where(seen == 0, faint.values, seen)
        return weight

    def pack(self, module: nn.Module) -> None:
        """Let vLLM repack a completely written module for its kernels."""
        if module in self.eight_bits:
            self.eight_bits.arrived(module)
        elif may_be_packed(module) and module.get_parameter("weight").is_cpu:
            # On GPUs weights are not packed, and this check would make the host wait for the device.
            self._remember_faint(module)
        _layerwise_process(module, get_layerwise_info(module))

    def _remember_faint(self, module: nn.Module) -> None:
        """Record negative zeros and subnormal numbers: checks compare bits, and a matrix product may lose these."""
        name = next(name for name, owner in self.owner.items() if owner == (module, "weight"))
        weight = module.get_parameter("weight").data.reshape(-1)
        tiny = weight.abs() < torch.finfo(weight.dtype).tiny
        index = (tiny & (weight.signbit() | (weight != 0))).nonzero().view(-1)
        if index.numel():
            self._faint[name] = _Faint(index, weight[index])


def _loadable(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (module's path, module, parameter) of all loaded weights, without tensors derived from them."""
    always_there: set[int] = set()  # may have two names, if another module has it too
    for path, module in model.named_modules():
        loaded, _ = get_layerwise_info(module).restore_metadata
        for name, parameter in module.named_parameters(recurse=False):
            if name in SKIP_TENSORS and id(parameter) not in always_there:
                always_there.add(id(parameter))
                yield path, module, name
            elif name in loaded:
                yield path, module, name
        for name, buffer in module.named_buffers(recurse=False):
            if name in BUFFERS and id(buffer) not in always_there:
                always_there.add(id(buffer))
                yield path, module, name


def _name_loaders(model: nn.Module) -> None:
    """Give weight loaders that are partial functions a name, which vLLM's reload requires (MiniMax's norms)."""
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, functools.partial):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def repack_experts(model: nn.Module) -> None:
    """Make vLLM's CPU kernels pack the experts of a reload too: with an existing kernel vLLM stores them unpacked, and
    that kernel reads them as if packed."""
    for module in model.modules():
        if packed_experts(module) is not None:
            quant_method: Any = module.quant_method
            quant_method.moe_kernel = None
