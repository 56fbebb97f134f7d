"""Low-rank adapters of a GPTModel's linear layers and embedding, added to Megatron's unchanged modules.

A and B matrices are parameters of one module per stage, ``lora``, with the names of ``reshard.adapters``. A forward
hook on each adapted layer adds the adapters' result to the layer's output.

Shape legend: s tokens (a share of them with sequence parallelism), b rows, i inputs and o outputs of a layer on this
rank, r rank of an adapter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from megarl.config.lora import LoraConfig
from megarl.learn.models.gpt import unwrap
from megarl.learn.models.head import LogProbHead, Switch
from megarl.weights.checkpoint.formats.dist import ADAPTER
from megarl.weights.reshard.adapters import LORA, WEIGHT, LocalAdapter, local_adapters
from megarl.weights.reshard.layout import Layout

EXPERTS = ".mlp.experts."


class Adapter(torch.nn.Module):
    """A and B of one logical tensor on this rank.

    ``a`` [r, i] and ``b`` [o, r]. If A or B is whole on several ranks, its gradient is summed over them. The sum is a
    collective of r numbers per token, or Megatron's sum over shares of the sequence. In experts, whose tokens the
    surrounding layer distributes, it is a collective of the matrix's size.

    An embedding is a linear layer with one-hot inputs, sharded along these: its A is looked up.
    """

    def __init__(self, local: LocalAdapter, layer: Any, dropout: float) -> None:
        super().__init__()
        self.local, self.dropout = local, dropout
        weight = layer.weight
        self._group: Any = getattr(layer, "tp_group", None)
        self._in_experts = bool(getattr(layer, "is_expert", False))
        self._cut_sequence = bool(getattr(layer, "sequence_parallel", False)) and not self._in_experts
        self._columns = isinstance(layer, ColumnParallelLinear)
        self._rows = isinstance(layer, RowParallelLinear | VocabParallelEmbedding)
        rank, inputs = local.factors.rank, weight.shape[1]
        if local.factors.is_embedding:
            inputs, self.dropout = weight.shape[0], 0.0  # as in PEFT
            self._cut_sequence = bool(layer.reduce_scatter_embeddings)
            self._first_token, self._deterministic = int(layer.vocab_start_index), bool(layer.deterministic_mode)
        self.a = torch.nn.Parameter(torch.zeros(rank, inputs, dtype=weight.dtype, device=weight.device))
        self.b = torch.nn.Parameter(torch.zeros(local.rows, rank, dtype=weight.dtype, device=weight.device))
        cut, whole = (self.b, self.a) if self._columns else (self.a, self.b)
        for parameter in (self.a, self.b):
            parameter.tensor_model_parallel = False  # type: ignore[attr-defined]
            parameter.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
        if self._columns or self._rows:
            cut.tensor_model_parallel = True  # type: ignore[attr-defined]
            # An output layer gathers the sequence, and computes from the weight that includes ``product``.
            whole.sequence_parallel = self._cut_sequence and not isinstance(layer, LogProbHead)  # type: ignore[attr-defined]
            if self._in_experts:
                # Each expert counts once in the gradient norm: on the first of the ranks that share it.
                whole.tensor_model_parallel = self._group is None or self._group.rank() == 0  # type: ignore[attr-defined]
        else:
            for parameter in (self.a, self.b):  # whole everywhere, like the layer's weight
                parameter.sequence_parallel = getattr(weight, "sequence_parallel", False)  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., i] -> [..., o]; a partial sum over ranks that share an expert if the layer's output is one. For an
        embedding int64 [b, s] -> [b, s, o], or [s, b, o] if its output is split along the sequence."""
        a, b = self.a, self.b
        if self._in_experts:
            if self._columns:
                a = copy_to_tensor_model_parallel_region(a, group=self._group)
            else:
                b = copy_to_tensor_model_parallel_region(b, group=self._group)
        if self.dropout and self.training:
            x = F.dropout(x, self.dropout)
        z = self._looked_up(x) if self.local.factors.is_embedding else F.linear(x, a)
        z = z * self.local.factors.scale
        if not self._in_experts:
            if self._columns and self._cut_sequence:
                z = gather_from_sequence_parallel_region(z, group=self._group)
            elif self._columns:
                z = copy_to_tensor_model_parallel_region(z, group=self._group)
            elif self._rows and self._cut_sequence:
                z = reduce_scatter_to_sequence_parallel_region(z, group=self._group)
            elif self._rows:
                z = reduce_from_tensor_model_parallel_region(z, group=self._group)
        return F.linear(z, b)

    def _looked_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return A's columns for tokens of this rank; zeros for tokens of other ranks."""
        columns = self.a.t()
        place = tokens - self._first_token
        elsewhere = (place < 0) | (place >= len(columns))
        place = place.masked_fill(elsewhere, 0)
        found = columns[place] if self._deterministic else F.embedding(place, columns)
        found = found.masked_fill(elsewhere[..., None], 0.0)
        return found.transpose(0, 1).contiguous() if self._cut_sequence else found

    def product(self) -> torch.Tensor:
        """Return scale · B·A [o, i], for an output layer that computes log-probs from its weight."""
        a = copy_to_tensor_model_parallel_region(self.a, group=self._group)
        return (self.b @ a) * self.local.factors.scale


class LayerAdapters:
    """Adapters of one layer, called as its forward hook."""

    def __init__(self, adapters: Sequence[Adapter], outputs: int, switch: Switch) -> None:
        self._adapters, self._switch = adapters, switch
        rows = [torch.arange(begin, end) for adapter in adapters for begin, end in adapter.local.places]
        self._places = torch.cat(rows)
        self._in_order = len(self._places) == outputs and bool((self._places == torch.arange(outputs)).all())

    def __call__(self, layer: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        if not self._switch.on:
            return None
        out, *bias = output if isinstance(output, tuple) else (output,)
        parts = [adapter(arguments[0]) for adapter in self._adapters]
        added = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if self._in_order:
            out = out + added
        else:
            self._places = self._places.to(out.device)
            out = out.index_add(-1, self._places, added)
        return (out, *bias) if isinstance(output, tuple) else out


class Adapters(torch.nn.Module):
    """All adapters of a stage, as ``stage.lora``: a tree of modules with the layers' names."""

    def __init__(self) -> None:
        super().__init__()
        self.switch = Switch()
        self.by_layer: dict[str, list[Adapter]] = {}

    def put(self, path: str, adapter: Adapter) -> None:
        """Register an adapter under a layer's path."""
        node: torch.nn.Module = self
        parts = [*path.split("."), adapter.local.factors.leaf]
        for part in parts[:-1]:
            if part not in node._modules:
                node.add_module(part, torch.nn.Module())
            node = node.get_submodule(part)
        node.add_module(parts[-1], adapter)
        self.by_layer.setdefault(path, []).append(adapter)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return a checkpoint's tensors by HF name, which is the same on every grid."""
        found = {}
        for path, adapters in self.by_layer.items():
            for adapter in adapters:
                for which in ("a", "b"):
                    name = f"{prefix}{path}.{adapter.local.factors.leaf}.{which}"
                    found[name] = _sharded(adapter, which, experts=EXPERTS in f".{path}.")
        return found


def _sharded(adapter: Adapter, which: str, *, experts: bool) -> Any:
    """Make the ShardedTensor of an A or B."""
    from megatron.core.dist_checkpointing import ShardedTensor

    own, tensor = adapter.local.factors, getattr(adapter, which)
    group = adapter._group if adapter._columns or adapter._rows else parallel_state.get_tensor_model_parallel_group()
    cut = (which == "b" and adapter._columns) or (which == "a" and adapter._rows)
    if experts:
        replica = parallel_state.get_expert_data_parallel_rank()
    else:
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    shares = group.size() if cut else 1
    axis = 1 if adapter._rows else 0
    offsets = [(axis, group.rank(), group.size())] if shares > 1 else []
    return ShardedTensor.from_rank_offsets(
        f"{ADAPTER}{own.a if which == 'a' else own.b}",
        tensor,
        *offsets,
        replica_id=(0, 0 if cut else group.rank(), replica),
        allow_shape_mismatch=own.is_embedding or own.leaf == "lm_head",
    )


def install(chunks: Sequence[torch.nn.Module], layout: Layout, rank: int, factors: Any, lora: LoraConfig) -> None:
    """Add new adapters to this rank's model chunks.

    Args:
        layout: The model's layout.
        factors: Result of ``factors_of``.
    """
    every = local_adapters(layout, factors, rank)
    for number, chunk in enumerate(chunks):
        stage: Any = unwrap(chunk)
        prefix = f"chunk{number}." if len(chunks) > 1 else ""
        adapters = Adapters()
        for local, own in every.items():
            if not local.startswith(prefix):
                continue
            path = local.removeprefix(prefix).removesuffix(WEIGHT)
            layer = stage.get_submodule(path)
            made = [Adapter(each, layer, lora.dropout) for each in own]
            for adapter in made:
                adapters.put(path, adapter)
                _begin(adapter, lora, layout, rank)
            if isinstance(layer, LogProbHead):
                layer.added, layer.switch = made[0].product, adapters.switch
            else:
                outputs = layer.weight.shape[1 if own[0].factors.is_embedding else 0]
                layer.register_forward_hook(LayerAdapters(made, outputs, adapters.switch))
        stage.add_module(LORA, adapters)


def freeze(chunks: Sequence[torch.nn.Module], trained: Collection[str]) -> frozenset[str]:
    """Freeze every parameter except adapters and the local names in ``trained``. Return the names that are parameters:
    a router's bias is a buffer, which nothing trains."""
    found = set()
    for number, chunk in enumerate(chunks):
        prefix = f"chunk{number}." if len(chunks) > 1 else ""
        stage: Any = unwrap(chunk)
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_(name.startswith(f"{LORA}.") or prefix + name in trained)
            found |= {prefix + name}.intersection(trained)
        if getattr(stage, "pre_process", False):
            # Megatron's recomputation gives inner parameters gradients only if its input has a gradient.
            stage.embedding.register_forward_hook(_with_gradient)
    return frozenset(found)


def _with_gradient(layer: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() and not output.requires_grad:
        return output.detach().requires_grad_()
    return output


@torch.no_grad()
def _begin(adapter: Adapter, lora: LoraConfig, layout: Layout, rank: int) -> None:
    """Initialise A equally on every grid: draw the whole tensor by its name and keep this rank's part. For an embedding
    draw B instead, and leave A zero."""
    own = adapter.local.factors
    drawn = own.b if own.is_embedding else own.a
    seed = int.from_bytes(hashlib.sha256(f"{lora.seed} {drawn}".encode()).digest()[:8], "big") >> 1
    generator = torch.Generator().manual_seed(seed)
    if own.is_embedding:
        adapter.b.copy_(torch.empty(adapter.b.shape).normal_(generator=generator))
        return
    inputs = own.shape[1]
    whole = torch.empty(own.rank, inputs)
    if lora.init == "kaiming":
        bound = 1.0 / math.sqrt(inputs)  # kaiming_uniform_ with a = sqrt(5)
        whole.uniform_(-bound, bound, generator=generator)
    else:
        whole.normal_(std=1.0 / own.rank, generator=generator)
    if adapter.local.by_input:
        [row] = [row for row in layout.rows_with[own.module + WEIGHT] if row.owners.share_of.get(rank) is not None]
        spans = row.splits[row.owners.share_of[rank]].spans
        whole = torch.cat([whole[:, low:high] for _, low, high, _ in spans], dim=1)
    adapter.a.copy_(whole)


@contextmanager
def without(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Turn adapters off within the context."""
    stages: list[Any] = [unwrap(chunk) for chunk in chunks]
    switches: list[Switch] = [stage.lora.switch for stage in stages]
    for switch in switches:
        switch.on = False
    try:
        yield
    finally:
        for switch in switches:
            switch.on = True
