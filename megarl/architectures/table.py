"""What a row of an architecture table says, and the model sizes that give a row its shapes.

A family file is data: rows of :class:`Param` plus the few facts that differ between families. What an op or a
shard *means* for Megatron-Core and for vLLM is written once, in ``megarl.reshard.layouts``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megarl.errors import ArchitectureError

Shape = tuple[int, ...]
HFConfig = Mapping[str, Any]

HF_LAYER = "model.layers.{}."
VLLM_LAYER = "model.layers.{}."
MEGATRON_LAYER = "decoder.layers.{}."


class Op(Enum):
    """How the logical (HF) tensors of a row lie together in one fused tensor."""

    SAME = "one logical tensor, as it is"
    QKV = "query, key and value heads; Megatron interleaves them per query group, vLLM keeps three blocks"
    GATE_UP = "gate over up, each split on its own"
    TIED = "hf[0]; when config.tie_word_embeddings, a second copy of hf[1] wherever the engine keeps one"


class Shard(Enum):
    """Which axis tensor parallelism splits."""

    COLUMN = "output features, axis 0"
    ROW = "input features, the last axis"
    VOCAB = "vocabulary, axis 0, padded"
    REPLICATED = "whole on every rank"


class Stage(Enum):
    """Which pipeline stage holds the row."""

    FIRST = "first"
    LAYER = "the stage of its layer; the row's names are relative to the layer and it exists once per layer"
    LAST = "last"


@dataclass(frozen=True)
class Logical:
    """A logical tensor: its HF name, and the names of its axes (attributes of :class:`ModelSizes`, space separated)."""

    name: str
    axes: str


@dataclass(frozen=True)
class Param:
    """One row: a parameter of Megatron's GPTModel, the logical tensors in it, and the vLLM parameter with the same ones."""

    megatron: str
    op: Op
    hf: tuple[Logical, ...]
    shard: Shard
    stage: Stage = Stage.LAYER
    vllm: str | None = None
    """vLLM's name where it is not that of the (first) logical tensor."""
    te: str | None = None
    """Megatron's name under the TransformerEngine spec where it differs from the local spec."""

    def __post_init__(self) -> None:
        expected = {Op.SAME: 1, Op.QKV: 3, Op.GATE_UP: 2, Op.TIED: 2}[self.op]
        assert len(self.hf) == expected, f"{self.megatron}: {self.op.name} joins {expected} tensors, got {len(self.hf)}"

    def megatron_name(self, transformer_impl: str, layer: int) -> str:
        """The parameter's name on its own rank; ``layer`` is the index within that rank."""
        name = self.te if transformer_impl == "transformer_engine" and self.te else self.megatron
        return MEGATRON_LAYER.format(layer) + name if self.stage is Stage.LAYER else name

    def vllm_name(self, layer: int) -> str:
        name = self.vllm or self.hf[0].name
        return VLLM_LAYER.format(layer) + name if self.stage is Stage.LAYER else name

    def logical(self, sizes: ModelSizes, layer: int) -> tuple[tuple[str, Shape], ...]:
        """(HF name, shape) of every tensor in the row, for this model and (global) layer."""
        parts = self.hf if self.op is not Op.TIED else (self.hf[1 if sizes.tied else 0],)
        prefix = HF_LAYER.format(layer) if self.stage is Stage.LAYER else ""
        return tuple((prefix + part.name, tuple(getattr(sizes, axis) for axis in part.axes.split())) for part in parts)


@dataclass(frozen=True)
class ModelSizes:
    """The extents that a decoder's tensors are made of, in elements."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocab: int
    tied: bool

    @property
    def q(self) -> int:
        return self.heads * self.head

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head


@dataclass(frozen=True)
class Architecture:
    """One model family: its rows and what else Megatron-Core must be told to compute the same function as HF."""

    name: str
    """``model_type`` of config.json."""
    params: tuple[Param, ...]
    qk_layernorm: bool = False
    add_qkv_bias: bool = False
    fixed: HFConfig = field(default_factory=dict)
    """Settings that must have this value when config.json has them: the table covers no other."""

    def check(self, hf_config: HFConfig) -> None:
        """Raise ArchitectureError when the configuration asks for something that the table does not cover."""
        for key, value in self.fixed.items():
            if hf_config.get(key, value) != value:
                raise ArchitectureError(
                    f"{self.name} with {key}={hf_config[key]!r} is not supported, only {value!r}; use a checkpoint with "
                    f"{key}={value!r} or add it to megarl/architectures/{self.name}.py"
                )
        _rope_theta(self.name, hf_config)
        self.sizes(hf_config)

    def sizes(self, hf_config: HFConfig) -> ModelSizes:
        def get(key: str) -> int:
            value = hf_config.get(key)
            if not isinstance(value, int) or value < 1:
                raise ArchitectureError(
                    f"config.json of a {self.name} model has {key}={value!r}; it must be a positive integer"
                )
            return value

        heads, kv_heads, hidden = get("num_attention_heads"), get("num_key_value_heads"), get("hidden_size")
        if heads % kv_heads:
            raise ArchitectureError(
                f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads} of {self.name}; correct config.json"
            )
        head = get("head_dim") if hf_config.get("head_dim") is not None else hidden // heads
        return ModelSizes(
            num_layers=get("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head=head,
            ffn=get("intermediate_size"),
            vocab=get("vocab_size"),
            tied=bool(hf_config.get("tie_word_embeddings", False)),
        )

    def rows(self, num_layers: int) -> tuple[tuple[Param, int], ...]:
        """Every (row, global layer) in model order; the layer is 0 for rows outside the layers."""
        first = [(p, 0) for p in self.params if p.stage is Stage.FIRST]
        layers = [(p, i) for i in range(num_layers) for p in self.params if p.stage is Stage.LAYER]
        return (*first, *layers, *((p, 0) for p in self.params if p.stage is Stage.LAST))

    def tensors(self, hf_config: HFConfig) -> dict[str, Shape]:
        """Logical tensors: HF name -> shape, in model order. A tied lm_head is not one of them."""
        sizes = self.sizes(hf_config)
        return dict(item for param, layer in self.rows(sizes.num_layers) for item in param.logical(sizes, layer))

    def transformer_config(self, hf_config: HFConfig) -> dict[str, Any]:
        """Keyword arguments for Megatron's TransformerConfig, as plain values (``activation`` is a name)."""
        sizes = self.sizes(hf_config)
        return {
            "num_layers": sizes.num_layers,
            "hidden_size": sizes.hidden,
            "num_attention_heads": sizes.heads,
            "num_query_groups": sizes.kv_heads,
            "kv_channels": sizes.head,
            "ffn_hidden_size": sizes.ffn,
            "normalization": "RMSNorm",
            "layernorm_epsilon": float(hf_config.get("rms_norm_eps", 1e-6)),
            "gated_linear_unit": True,
            "activation": "silu",
            "add_bias_linear": False,
            "add_qkv_bias": self.add_qkv_bias,
            "qk_layernorm": self.qk_layernorm,
        }

    def gpt(self, hf_config: HFConfig) -> dict[str, Any]:
        """Keyword arguments for GPTModel. ``vocab_size`` is the real one: ``reshard.layouts.padded_vocab_size`` pads it."""
        sizes = self.sizes(hf_config)
        return {
            "vocab_size": sizes.vocab,
            "max_sequence_length": int(hf_config["max_position_embeddings"]),
            "rotary_base": _rope_theta(self.name, hf_config),
            "share_embeddings_and_output_weights": sizes.tied,
        }


def _rope_theta(name: str, hf_config: HFConfig) -> float:
    """The rotary base: ``rope_theta``, or ``rope_parameters.rope_theta`` in files written by transformers 5."""
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ArchitectureError(
            f"{name} with rope_type={kind!r} is not supported, only 'default'; use a checkpoint without rope scaling"
        )
    theta = rope.get("rope_theta", hf_config.get("rope_theta"))
    if theta is None:
        raise ArchitectureError(f"config.json of a {name} model has neither rope_theta nor rope_parameters.rope_theta")
    return float(theta)
