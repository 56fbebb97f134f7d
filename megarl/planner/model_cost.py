"""Accelerators that a plan can use, and the arithmetic of a model from the sizes in its config.json.

Fitted to published rows (``tests/unit/cases/planner_rows.json``) within ranges of an earlier fit to 35 of them. Two
constants can trade off against each other, so a range is part of a constant.

An operation is a multiplication or an addition: a product of [rows, k] and [k, n] has 2·rows·k·n.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from megarl.weights.architectures import ModelSizes, architecture
from megarl.weights.architectures.megatron_config import transformer_kwargs
from megarl.weights.architectures.table import sizes_of_layer


@dataclass(frozen=True)
class Device:
    """One accelerator and its links. Rates are the data sheet's, in one direction."""

    name: str
    bf16: float
    """Dense bfloat16 operations per second."""
    memory_bytes: float
    """Bytes of device memory that the driver reports."""
    memory_rate: float
    """Bytes per second of device memory."""
    link_rate: float
    """Bytes per second between two devices of one link domain (NVLink, or PCIe without it)."""
    link_domain: int
    """Devices that these links connect."""
    network_rate: float
    """Bytes per second of one device to another link domain."""
    host_rate: float
    """Bytes per second between device and pinned host memory."""
    fp8: float | None = None
    """Dense 8-bit operations per second; None if the device has none."""
    backend: Literal["nccl", "gloo"] = "nccl"
    """Backend of collectives and, within a node, of weights."""

    def rate_of(self, group: int) -> float:
        """Return the bytes per second of one rank in a group of ranks on neighbouring devices."""
        return self.link_rate if group <= self.link_domain else self.network_rate


DEVICES: dict[str, Device] = {
    "h100": Device("h100", 989e12, 85.0e9, 3.35e12, 450e9, 8, 50e9, 54e9, fp8=1979e12),
    "h100-500w": Device("h100-500w", 989e12 * 0.8, 102.0e9, 2.4e12, 450e9, 8, 50e9, 54e9, fp8=1979e12 * 0.8),
    "h200": Device("h200", 989e12, 150.0e9, 4.8e12, 450e9, 8, 50e9, 54e9, fp8=1979e12),
    "b200": Device("b200", 2250e12, 192.0e9, 8.0e12, 900e9, 8, 50e9, 54e9, fp8=4500e12),
    "gb200": Device("gb200", 2450e12, 198.0e9, 8.0e12, 900e9, 72, 50e9, 180e9, fp8=4900e12),
    "a100": Device("a100", 312e12, 85.0e9, 2.04e12, 300e9, 8, 25e9, 25e9),
    "l40s": Device("l40s", 362e12, 48.3e9, 0.864e12, 25e9, 8, 12.5e9, 25e9, fp8=733e12),
    "cpu": Device("cpu", 0.09e12, 12.0e9, 0.019e12, 5e9, 64, 1.25e9, 5e9, backend="gloo"),
}
"""Name for ``megarl plan --gpu`` -> device.

Sources: NVIDIA's data sheets of H100 SXM, H200, B200, GB200 NVL72, A100 SXM 80 GB and L40S; one port of 400 Gb/s for
each device (A100: 200). ``h100-500w``: the cards of torchtitan's published rows, 96 GB with HBM2e. ``cpu``: one core of
the machine that runs the tests, in float32.
"""


class Constant(NamedTuple):
    """A constant, and the range of values that fit about as well."""

    value: float
    low: float
    high: float
    meaning: str


PRODUCT_SHARE = Constant(0.71, 0.68, 0.76, "share of the peak rate that a large product reaches")
ATTENTION_SHARE = Constant(
    0.35, 0.30, 0.55, "share of the peak rate that fused attention reaches, forward and backward"
)
EXPERT_LAYER_S = Constant(2.9e-3, 2.6e-3, 3.1e-3, "seconds of a MoE layer, micro-batch and pass beyond its arithmetic")
DECODE_MEMORY_SHARE = Constant(0.56, 0.52, 0.71, "share of the memory's rate that decoding reaches")
DECODE_LAYER_S = Constant(0.18e-3, 0.15e-3, 0.21e-3, "seconds of a layer of a decoded token beyond its bytes")
MEMORY_SHARE = Constant(0.8, 0.7, 0.9, "share of the memory's rate that elementwise work reaches")
PACKED = Constant(0.95, 0.9, 1.0, "share of a packed micro-batch that is tokens")
FP8_GAIN = Constant(1.5, 1.2, 1.6, "factor by which 8-bit products are faster than bfloat16 ones, casts included")
REDUCE_LATENCY_S = Constant(15e-6, 10e-6, 30e-6, "seconds of a small all-reduce within a link domain")
FAR_LATENCY_S = Constant(35e-6, 30e-6, 100e-6, "seconds of a small all-reduce over the network")


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
    layer_inputs: int = 0
    """Width of a second embedding, with an input for each layer."""

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> ModelCost:
        """Return the costs of the model that a config.json describes. Raises ArchitectureError for unknown families."""
        found = architecture(hf_config)
        sizes, settings = found.sizes(hf_config), transformer_kwargs(found, hf_config)
        window = settings.get("window_size", (0, 0))[0] + 1
        windowed = settings.get("window_attn_skip_freq", [0] * sizes.num_layers)
        layers = range(sizes.num_layers)
        is_global, shares = ({*found} for found in (sizes.global_layers, sizes.shared_layers))
        kinds = [(n in sizes.moe_layers, bool(windowed[n]), n in is_global, n in shares) for n in layers]
        costs = {}
        for number in layers:
            if (kind := kinds[number]) not in costs:
                projections = 0 if kind[3] else 1 if kind[2] and sizes.keys_are_values else 2
                layer = _layer(sizes_of_layer(sizes, number), kind[0], projections)
                costs[kind] = replace(layer, window=window * kind[1])
        return cls(tuple(costs[kind] for kind in kinds), sizes.hidden, sizes.vocab, sizes.tied, sizes.layer_inputs)

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
        """Elements of embeddings and output layer."""
        return (self.hidden * (1 if self.tied else 2) + self.layer_inputs) * self.vocab

    @property
    def experts(self) -> int:
        """Routed experts of a layer; 0 without."""
        return max(layer.experts for layer in self.layers)


def _layer(sizes: ModelSizes, experts: bool, projections: int) -> LayerCost:
    """``projections``: 2 to keys and values, 1 if keys are values, 0 if both are another layer's."""
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
        joint = sizes.q + projections * sizes.kv
        attention = [Product(h, joint, "column"), Product(sizes.q, h, "row")]
        widths, kv, kv_ways = 2 * sizes.head, 2 * sizes.kv, sizes.kv_heads
        inner = 2 * (sizes.q + 2 * sizes.kv)
    if not experts:
        mlp = [Product(h, 2 * sizes.ffn, "column"), Product(sizes.ffn, h, "row")]
        elements = (8 * h, inner + 3 * sizes.ffn)
        if width := sizes.layer_input:  # from the hidden state: the gate, and the input; back from their product
            mlp += [Product(h, width, "none"), Product(h, width, "none"), Product(width, h, "none")]
            elements = (12 * h + 6 * width, elements[1])
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
