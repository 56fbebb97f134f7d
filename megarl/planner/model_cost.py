"""Arithmetic of a model from the sizes in its config.json: products of a token in each kind of layer, parameters, KV
cache.

An operation is a multiplication or an addition: a product of [rows, k] and [k, n] has 2·rows·k·n.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from megarl.weights.architectures import ModelSizes, architecture
from megarl.weights.architectures.megatron_config import transformer_kwargs

BF16 = 2
"""Bytes of an element of weights, activations and KV cache."""


@dataclass(frozen=True)
class Product:
    """A matrix product of every token with a weight [k, n]."""

    k: int
    n: int
    cut: Literal["column", "row", "none", "expert_column", "expert_row"]
    """Axis that tensor parallelism splits: the outputs, the inputs, or none; ``expert_*``: of a routed expert."""
    rows: int = 1
    """Rows of the product for each token: the number of experts that a token chooses, else 1."""

    @property
    def is_expert(self) -> bool:
        """True for a product of routed experts."""
        return self.cut.startswith("expert")


@dataclass(frozen=True, eq=False)
class LayerCost:
    """One kind of layer; layers of one kind share one object."""

    attention: tuple[Product, ...]
    """Products of the attention."""
    mlp: tuple[Product, ...]
    """Products of the MLP, or of router and experts."""
    heads: int
    widths: int
    """Width of a head's query plus width of its value."""
    elements: tuple[int, int]
    """Elements that norms, rope, activations and residual additions read and write for each token: in the hidden width,
    and in widths that tensor parallelism splits."""
    kv: int
    """Elements of the KV cache of one token."""
    kv_ways: int
    """Ranks over which tensor parallelism can split the KV cache; 1 if every rank has all of it."""
    experts: int = 0
    topk: int = 0
    window: int = 0
    """Most tokens that a token attends to; 0 for all."""

    def seen(self, context: float) -> float:
        """Return how many of ``context`` tokens a token attends to."""
        return min(context, self.window) if self.window else context

    @property
    def products(self) -> tuple[Product, ...]:
        """All products of the layer."""
        return self.attention + self.mlp

    @cached_property
    def flops(self) -> int:
        """Operations of all products for one token, attention scores not included."""
        return sum(2 * p.rows * p.k * p.n for p in self.products)

    @cached_property
    def parameters(self) -> tuple[int, int]:
        """Elements of weights: without routed experts, and of these."""
        dense = sum(p.k * p.n for p in self.products if not p.is_expert)
        return dense, sum(p.k * p.n for p in self.products if p.is_expert) * self.experts


@dataclass(frozen=True, eq=False)
class ModelCost:
    """Arithmetic of a language model. Vision towers, norms and biases are not counted."""

    layers: tuple[LayerCost, ...]
    hidden: int
    vocab: int
    tied: bool

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> ModelCost:
        """Return the costs of the model that a config.json describes. Raises ArchitectureError for unknown families."""
        found = architecture(hf_config)
        sizes, settings = found.sizes(hf_config), transformer_kwargs(found, hf_config)
        window = settings.get("window_size", (0, 0))[0] + 1
        windowed = settings.get("window_attn_skip_freq", [0] * sizes.num_layers)
        kinds = [(number in sizes.moe_layers, bool(windowed[number])) for number in range(sizes.num_layers)]
        costs = {kind: replace(_layer(sizes, kind[0]), window=window * kind[1]) for kind in set(kinds)}
        return cls(tuple(costs[kind] for kind in kinds), sizes.hidden, sizes.vocab, sizes.tied)

    @cached_property
    def kinds(self) -> dict[LayerCost, int]:
        """Kind of layer -> number of its layers."""
        return dict(Counter(self.layers))

    def flops(self, context: float) -> float:
        """Return the operations of one token's forward pass with attention to ``context`` tokens."""
        layers = sum(
            number * (layer.flops + 2 * layer.heads * layer.widths * layer.seen(context))
            for layer, number in self.kinds.items()
        )
        return layers + 2 * self.hidden * self.vocab

    @cached_property
    def parameters(self) -> int:
        """Elements of all weights."""
        return sum(number * sum(layer.parameters) for layer, number in self.kinds.items()) + self.vocab_parameters

    @property
    def vocab_parameters(self) -> int:
        """Elements of embedding and output layer."""
        return self.hidden * self.vocab * (1 if self.tied else 2)

    @property
    def experts(self) -> int:
        """Routed experts of a layer; 0 without."""
        return max(layer.experts for layer in self.layers)


def _layer(sizes: ModelSizes, experts: bool) -> LayerCost:
    h = sizes.hidden
    if sizes.kv_lora:
        attention = [
            Product(h, sizes.latent_kv, "none"),
            Product(sizes.kv_lora, sizes.latent_up, "column"),
            Product(sizes.latent_out, h, "row"),
        ]
        if sizes.q_lora:
            attention += [Product(h, sizes.q_lora, "none"), Product(sizes.q_lora, sizes.latent_q, "column")]
        else:
            attention.append(Product(h, sizes.direct_q, "column"))
        widths, kv, kv_ways = sizes.qk_nope + sizes.qk_rope + sizes.v_head, sizes.latent_kv, 1
        inner = 2 * (sizes.latent_q + sizes.latent_up)
    else:
        attention = [Product(h, sizes.q + 2 * sizes.kv, "column"), Product(sizes.q, h, "row")]
        widths, kv, kv_ways = 2 * sizes.head, 2 * sizes.kv, sizes.kv_heads
        inner = 2 * (sizes.q + 2 * sizes.kv)
    if not experts:
        mlp = [Product(h, 2 * sizes.ffn, "column"), Product(sizes.ffn, h, "row")]
        elements = (8 * h, inner + 3 * sizes.ffn)
        return LayerCost(tuple(attention), tuple(mlp), sizes.heads, widths, elements, kv, kv_ways)
    mlp = [
        Product(h, sizes.experts, "none"),
        Product(h, 2 * sizes.expert_ffn, "expert_column", sizes.topk),
        Product(sizes.expert_ffn, h, "expert_row", sizes.topk),
    ]
    if sizes.shared_ffn:
        mlp += [Product(h, 2 * sizes.shared_ffn, "column"), Product(sizes.shared_ffn, h, "row")]
    inner += 3 * sizes.shared_ffn + sizes.topk * (3 * sizes.expert_ffn + 4 * h)
    elements = (8 * h, inner)
    return LayerCost(
        tuple(attention), tuple(mlp), sizes.heads, widths, elements, kv, kv_ways, sizes.experts, sizes.topk
    )
