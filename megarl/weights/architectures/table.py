"""Rows of an architecture table, and the model sizes that determine their shapes.

A family file is data: rows of :class:`Param` plus the few facts that differ between families.
``megarl.weights.reshard`` defines the meaning of ops and shards for Megatron-Core and vLLM.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, NamedTuple

from megarl.core.errors import ArchitectureError

Shape = tuple[int, ...]
MOST_BLOCKS = 1 << 16
"""Maximum of layers · (1 + experts). Kimi K2 has 23,485."""
_LARGEST = sys.float_info.max
HFConfig = Mapping[str, Any]

Head = Literal["lm", "score"]
"""Output after the last norm: vocabulary logits, or one number per token (critic, reward model)."""

HF_LAYER = "model.layers.{}."
VLLM_DRAFT = "model."
"""Prefix of vLLM's draft models."""
HF_PREDICTION = "mtp."
"""Prefix of prediction layers that the files do not number after the model's layers."""
VLLM_LAYER = "model.layers.{}."
EXPERT = "{expert}"
BLOCK = "{block}"
"""Placeholder in names for the number of a vision block."""


class Op(Enum):
    """Arrangement of a row's logical (HF) tensors in one fused tensor."""

    SAME = "one logical tensor, as it is"
    QKV = "query, key and value heads; Megatron interleaves them per query group, vLLM keeps three blocks"
    QK = "as QKV in Megatron, of layers without value heads: keys before their norm are the values"
    GATED_QKV = "as QKV, with each query head's gate behind it; Megatron has a group's gates behind its queries"
    CONCAT = "each part is cut on its own and the shares lie one after the other (gate over up)"
    GROUPED = "the parts of a gated delta net's first key head, then those of its next one"
    SECTIONS = "as CONCAT, for any number of parts; Megatron's checkpoints have each part under a key of its own"
    TIED = "hf[0]; when config.tie_word_embeddings, a second copy of hf[1] wherever the engine keeps one"


class Shard(Enum):
    """Axis that tensor parallelism splits."""

    COLUMN = "output features, axis 0"
    ROW = "input features, the last axis"
    VOCAB = "vocabulary, axis 0, padded"
    REPLICATED = "whole on every rank"
    FIRST = "whole on every rank of Megatron; in vLLM on the first one, and zeros on the others: a bias of partial sums"


class Stage(Enum):
    """Layers, and thereby pipeline stages, with the row. Names of those in the middle are relative to the layer."""

    FIRST = "beside the first layer"
    VISION = "the vision tower, which is beside the first layer too"
    DEEPSTACK = "the tower's mergers whose vectors the first layers add, one for each; beside the first layer too"
    LAYER = "every layer"
    ATTENTION = "layers with attention among tokens, in families where others have none"
    WINDOWED = "layers with a window, in families where others have heads of another number and width"
    GLOBAL = "those other layers, without a window"
    DELTA = "layers with linear attention, a gated delta net"
    CONVOLUTION = "layers with a short gated convolution in place of attention"
    DENSE = "layers with one MLP"
    MOE = "layers with experts"
    MTP = "layers of multi-token prediction, behind the last one; they are layers with experts besides"
    LAST = "beside the last layer"


@dataclass(frozen=True, eq=False)
class Logical:
    """A logical tensor: its HF name (with ``{expert}`` or ``{block}`` if there are several) and the names of its axes.

    One object is one tensor: rows of Megatron and of vLLM refer to the same object.
    """

    name: str
    axes: str
    """Attributes of :class:`ModelSizes`, space separated."""
    shard: Shard = Shard.REPLICATED
    dtype: str | None = None
    """Fixed dtype, if it does not follow the model's."""

    def shape(self, sizes: ModelSizes) -> Shape:
        return tuple(getattr(sizes, axis) for axis in self.axes.split())


PARTS = {Op.SAME: 1, Op.QKV: 3, Op.QK: 2, Op.GATED_QKV: 3, Op.CONCAT: 2, Op.TIED: 2}
"""Number of logical tensors in a row, if the op has one."""


@dataclass(frozen=True)
class Param:
    """One row: a parameter of Megatron's GPTModel and its logical tensors."""

    megatron: str
    """Name under the local spec; ``{expert}`` is the rank-local number of an expert."""
    op: Op
    hf: tuple[Logical, ...]
    stage: Stage = Stage.LAYER
    te: str | None = None
    """Name under the TransformerEngine spec, if different."""
    keys: tuple[str, ...] = ()
    """Ends of the keys that Megatron's checkpoints have for the parts of ``Op.SECTIONS``."""
    shares: bool | None = None
    """True: only layers that take keys and values of an earlier layer have the row; False: only the other layers."""

    def __post_init__(self) -> None:
        wanted = PARTS.get(self.op, len(self.keys))
        assert len(self.hf) == wanted, f"{self.megatron}: {self.op.name} joins {wanted} tensors"

    @property
    def per_expert(self) -> bool:
        return EXPERT in self.hf[0].name

    @property
    def per_block(self) -> bool:
        return BLOCK in self.hf[0].name

    @property
    def is_first(self) -> bool:
        """True if the row is on the first layer's stage."""
        return self.stage is Stage.FIRST or self.in_tower

    @property
    def in_tower(self) -> bool:
        """True if the row belongs to the vision tower."""
        return self.stage in (Stage.VISION, Stage.DEEPSTACK)


SCORE_HEAD = Param("output_layer.weight", Op.SAME, (Logical("score.weight", "labels hidden"),), Stage.LAST)
"""One number per token, whole on every tensor-parallel rank (``learn/models/head.py``)."""


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor of the HF files that concatenates several logical tensors; ``{expert}`` becomes the first axis."""

    name: str
    """HF name within the layer."""
    parts: tuple[str, ...]
    """Names of its logical tensors."""
    transposed: bool = False
    """True if each matrix is stored as [inputs, outputs]."""
    single: bool = False
    """True if there is an extra first axis of size 1."""
    grouped: bool = False
    """True if the rows of each key head of a gated delta net stand together (``Op.GROUPED``)."""


@dataclass(frozen=True)
class Fused:
    """A vLLM parameter with a name other than its logical tensor's. Per-expert tensors are stacked on axis 0."""

    vllm: str
    op: Op
    hf: tuple[Logical, ...]
    shard: Shard | None = None
    """Axis that vLLM's tensor parallelism splits, if Megatron's does not split the tensor."""


class Occurrence(NamedTuple):
    """One occurrence of a row: layer (counted from 0 over the whole model; MTP layers come last), expert, and block of
    the vision tower."""

    layer: int | None = None
    expert: int | None = None
    block: int | None = None
    prefix: str = ""
    """Prefix of its HF names."""

    def named(self, name: str) -> str:
        """Insert this occurrence's expert and block numbers into the name."""
        return name.replace(EXPERT, str(self.expert)).replace(BLOCK, str(self.block))


@dataclass(frozen=True)
class ModelSizes:
    """Extents of a decoder's tensors, in elements; 0 if a family has no such extent."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocab: int
    tied: bool
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Sum over all shared experts."""
    moe_layers: tuple[int, ...] = ()
    mtp_layers: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    qk_nope: int = 0
    qk_rope: int = 0
    v_head: int = 0
    normed_head: int = 0
    """Head width if ``use_qk_norm`` adds norms to queries and keys, else 0."""
    biased: bool = False
    """True if ``attention_bias`` adds biases to the query, key and value projections."""
    vision_depth: int = 0
    """Blocks of the vision tower."""
    vision_hidden: int = 0
    vision_ffn: int = 0
    channels: int = 0
    temporal_patch: int = 0
    """Number of frames in a patch."""
    patch: int = 0
    """Pixels on each side of a patch."""
    vision_places: int = 0
    """Rows of the tower's table of positions."""
    deepstack: int = 0
    """Number of first layers that add vectors of images to their outputs."""
    norms_before: int = 2
    """Number of norms before attention and MLP of a layer."""
    norms_after: int = 0
    """Number of norms after attention and MLP of a layer."""
    merge: int = 0
    """Number of patches, on each side, merged into one vector of the language model."""
    delta_layers: tuple[int, ...] = ()
    """Layers with a gated delta net instead of attention."""
    delta_key_heads: int = 0
    delta_heads: int = 0
    """Value heads of a gated delta net."""
    delta_key: int = 0
    """Width of a key."""
    delta_value: int = 0
    """Width of a value."""
    taps: int = 0
    """Tokens that the convolution of a gated delta net, or of a layer of its own, looks at."""
    convolution_layers: tuple[int, ...] = ()
    """Layers with a short gated convolution instead of attention."""
    global_layers: tuple[int, ...] = ()
    """Layers without a window, in families where they have heads of another number and width."""
    global_kv_heads: int = 0
    """Key heads of ``global_layers``."""
    global_head: int = 0
    """Width of a head of ``global_layers``."""
    keys_are_values: bool = False
    """True if ``global_layers`` have no value projection."""
    shared_layers: tuple[int, ...] = ()
    """Layers that take the keys and values of an earlier layer (``source_of``)."""
    late_ffn: int = 0
    """Width of the MLPs of ``shared_layers``."""
    layer_input: int = 0
    """Width of the input that each layer has from a second embedding; 0 without one."""

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Layers that see earlier tokens of a sequence without attention."""
        return (*self.delta_layers, *self.convolution_layers)

    @property
    def delta_keys(self) -> int:
        """Channels of a gated delta net's keys (or queries)."""
        return self.delta_key_heads * self.delta_key

    @property
    def delta_values(self) -> int:
        """Channels of a gated delta net's values (or gates)."""
        return self.delta_heads * self.delta_value

    @property
    def gated_q(self) -> int:
        """Rows of a query projection that has each head's output gate."""
        return 2 * self.q

    @property
    def vision_qkv(self) -> int:
        """Rows of the tower's fused query, key and value projection."""
        return 3 * self.vision_hidden

    @property
    def merged(self) -> int:
        """Width of the patches merged into one vector."""
        return self.vision_hidden * self.merge**2

    @property
    def q(self) -> int:
        """Rows of the query projection."""
        return self.heads * self.head

    @property
    def kv(self) -> int:
        """Rows of the key (or value) projection."""
        return self.kv_heads * self.head

    @property
    def global_q(self) -> int:
        """Rows of the query projection of ``global_layers``."""
        return self.heads * self.global_head

    @property
    def global_kv(self) -> int:
        """Rows of the key projection of ``global_layers``."""
        return self.global_kv_heads * self.global_head

    @property
    def joint_q(self) -> int:
        """``global_q`` if keys are values, else 0."""
        return self.global_q * self.keys_are_values

    @property
    def joint_kv(self) -> int:
        """``global_kv`` if keys are values, else 0."""
        return self.global_kv * self.keys_are_values

    @property
    def apart_q(self) -> int:
        """``global_q`` if values have a projection of their own, else 0."""
        return self.global_q - self.joint_q

    @property
    def apart_kv(self) -> int:
        """``global_kv`` if values have a projection of their own, else 0."""
        return self.global_kv - self.joint_kv

    @property
    def layer_inputs(self) -> int:
        """Width of the second embedding, which has an input for each layer."""
        return self.num_layers * self.layer_input

    @property
    def gated_hidden(self) -> int:
        """``hidden`` if each layer has an input of its own, else 0."""
        return self.hidden * bool(self.layer_input)

    @property
    def hands_on(self) -> bool:
        """True if layers take tensors besides the hidden states: keys and values, or inputs of their own."""
        return bool(self.shared_layers or self.layer_input)

    @property
    def gate_up(self) -> int:
        """Rows of an expert's fused gate and up projections."""
        return 2 * self.expert_ffn

    @property
    def biased_q(self) -> int:
        """Length of the query projection's bias; 0 without one."""
        return self.q * self.biased

    @property
    def biased_kv(self) -> int:
        """Length of the key (or value) projection's bias; 0 without one."""
        return self.kv * self.biased

    @property
    def latent_q(self) -> int:
        """Rows of MLA's query up-projection."""
        return self.heads * (self.qk_nope + self.qk_rope)

    @property
    def direct_q(self) -> int:
        """Rows of the query projection without a query latent (``q_lora_rank`` null), else 0."""
        return 0 if self.q_lora else self.latent_q

    @property
    def latent_kv(self) -> int:
        """Rows of MLA's key/value down-projection: the latent and the shared rotary key."""
        return self.kv_lora + self.qk_rope

    @property
    def latent_up(self) -> int:
        """Rows of MLA's key/value up-projection."""
        return self.heads * (self.qk_nope + self.v_head)

    @property
    def latent_out(self) -> int:
        return self.heads * self.v_head

    @property
    def two_hidden(self) -> int:
        return 2 * self.hidden

    @property
    def labels(self) -> int:
        """Number of outputs of a score head per token."""
        return 1


def source_of(sizes: ModelSizes, layer: int) -> int:
    """Return the layer whose keys and values one of ``shared_layers`` takes: the last one of its kind with own."""
    is_global = layer in sizes.global_layers
    own = range(sizes.num_layers - len(sizes.shared_layers))
    return max(source for source in own if (source in sizes.global_layers) is is_global)


def sizes_of_layer(sizes: ModelSizes, layer: int) -> ModelSizes:
    """Return the sizes with the number of the layer's key heads, and the widths of its heads and its MLP."""
    if layer in sizes.shared_layers:
        sizes = replace(sizes, ffn=sizes.late_ffn)
    if layer not in sizes.global_layers:
        return sizes
    return replace(sizes, head=sizes.global_head, kv_heads=sizes.global_kv_heads)


@dataclass(frozen=True)
class PredictionRules:
    """Number and names of a family's layers of multi-token prediction. The defaults fit DeepSeek-V3."""

    key: str = "num_nextn_predict_layers"
    """Key of config.json with their number."""
    default: int = 0
    """Their number without this key."""
    beside: bool = False
    """True if the files have one such layer, under ``mtp.``; else its number follows the last layer's."""

    def layers(self, name: str, hf_config: HFConfig) -> int:
        """Return the number of prediction layers of a model of the family ``name``."""
        return count(name, hf_config, self.key, self.default)

    def prefix(self, number: int, layer: int, stage: Stage) -> str:
        """Prefix of HF names of prediction layer ``number``, which is ``layer`` counted over the whole model."""
        if not self.beside:
            return HF_LAYER.format(layer)
        return HF_PREDICTION + ("" if stage is Stage.MTP else f"layers.{number}.")

    def vllm_prefix(self, number: int, layer: int, stage: Stage) -> str:
        """Prefix of names of prediction layer ``number`` in vLLM's draft model; arguments as of ``prefix``."""
        if not self.beside:
            return VLLM_LAYER.format(layer) + ("" if stage is Stage.MTP else "mtp_block.")
        return VLLM_DRAFT + ("" if stage is Stage.MTP else f"layers.{number}.")


@dataclass(frozen=True)
class LayerRules:
    """Keys of config.json that control single layers or heads."""

    partial_rotary: bool = False
    """``partial_rotary_factor`` is the rotary share of a head; in other families only 1 is accepted."""
    rope: str = ""
    """Key with a list: 1 for layers that rotate queries and keys, 0 for others."""
    rope_alpha: bool = False
    """A rope of type ``dynamic`` has its base multiplied by ``alpha`` ** (d / (d - 2)); d is the head width."""
    kinds: str = ""
    """Key with a list: ``sparse`` for layers with experts, ``dense`` for others."""
    windows: bool = False
    """``layer_types`` lists the layers with the window; in other families ``sliding_window`` applies to all layers."""
    every_second: bool = False
    """vLLM has the window in every second layer from the first on and ignores ``layer_types``."""
    window_switch: bool = False
    """``use_sliding_window: false`` disables the window, even if ``sliding_window`` is set."""
    ropes: bool = False
    """``rope_parameters`` has one rope for layers with the window and another for the rest."""
    queries_grow: bool = False
    """Queries are scaled by a position-dependent factor (``llama_4_scaling_beta``)."""
    rope_in_windows: bool = False
    """With ``sliding_window`` set, layers without the window have no rope."""
    norm_epsilon: str = "rms_norm_eps"
    """Key with the norms' epsilon."""
    mrope_interleaved: bool = False
    """Time, row and column take turns among a head's frequencies; in other families each has a section of them."""
    prediction: PredictionRules = PredictionRules()


@dataclass(frozen=True)
class RouterRules:
    """Rules for choosing and weighing experts in a router."""

    sigmoid: bool = False
    """Choose experts by sigmoid scores, a bias and groups (DeepSeek-V3); else by a softmax."""
    norms_topk: bool = False
    """Always divide the chosen experts' probabilities by their sum; else ``norm_topk_prob`` decides."""
    unscaled: bool = False
    """Do not multiply sigmoid scores of the chosen experts by ``routed_scaling_factor``."""
    scales_topk: bool = False
    """Multiply softmax probabilities of the chosen experts by ``routed_scaling_factor``. For sigmoid: ``unscaled``."""


@dataclass(frozen=True)
class NormRules:
    """Places and forms of a layer's norms, if they differ from Llama and Qwen3."""

    before: bool = True
    """Norm the input of attention and MLP."""
    after: bool = False
    """Norm the outputs of attention and MLP before the residual addition."""
    whole_width: bool = False
    """Norm queries (and keys) of a token over all heads together, instead of per head."""
    after_rope: bool = False
    """Norm each head of queries and keys after rope, instead of before."""
    zero_centred: bool = False
    """Norms multiply by 1 + weight."""
    of_values: bool = False
    """Norm each value head, without a weight."""
    scaled: bool = False
    """Multiply each layer's output by a number that its file has and training keeps."""


USUAL_NORMS = NormRules()


@dataclass(frozen=True)
class MultiplierKeys:
    """Keys of config.json with factors of model parts; empty if the family has no such factor."""

    embedding: str = ""
    """Factor of the embeddings."""
    embedding_root: str = ""
    """The embeddings are multiplied by the square root of this key's value, rounded to their dtype."""
    residual: str = ""
    """Factor of the outputs of attention and MLP, before the residual addition."""
    attention: str = ""
    """Factor of attention scores, instead of 1 / sqrt(d)."""
    attention_root: str = ""
    """Attention scores are divided by the square root of this key's value, instead of sqrt(d)."""
    logits: str = ""
    """Divisor of the logits."""
    softcap: str = ""
    """Logits z become c · tanh(z / c), c the key's value; null keeps them."""


@dataclass(frozen=True)
class BaseNames:
    """Name prefixes of transformers' base model that differ from those of a table."""

    pairs: tuple[tuple[str, str], ...] = ()
    """(prefix in the base model, prefix in the table). Files of a score model use the former."""
    in_files: bool = False
    """True if files of a language model use the base model's names, too."""


@dataclass(frozen=True)
class Architecture:
    """Table of one model family."""

    name: str
    """``model_type`` in config.json."""
    models: str
    """Published models of the family."""
    params: tuple[Param, ...]
    vllm: tuple[Fused, ...] = ()
    joined: tuple[JoinedTensor, ...] = ()
    """Tensors of the HF files that contain several logical tensors."""
    fixed: HFConfig = field(default_factory=dict)
    """Settings that must have this value if config.json has them."""
    megatron: Mapping[str, Any] = field(default_factory=dict)
    """Extra arguments of Megatron's TransformerConfig, which do not follow from sizes and rows."""
    vllm_text: str = ""
    """vLLM's prefix for names of the language model, if it is part of a larger model."""
    vllm_ends_everywhere: bool = False
    """True if vLLM has embedding, last norm and output weight on every pipeline stage."""
    has_score_class: bool = True
    """True if transformers has a ``...ForSequenceClassification`` of this family, or can build one with
    ``GenericForSequenceClassification``."""
    base_names: BaseNames = BaseNames()
    config_class: str = ""
    """``model_type`` of transformers' configuration class, if not ``name``."""
    layers: LayerRules = LayerRules()
    multipliers: MultiplierKeys = MultiplierKeys()
    norms: NormRules = USUAL_NORMS
    router: RouterRules = RouterRules()
    head: Head = "lm"
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Fields of :class:`ModelSizes` with config.json keys other than the usual ones (``COMMON_KEYS``)."""

    def with_score(self) -> Architecture:
        """Return the table with a score head instead of the output weight, ignoring whether the latter is tied.

        Raises ArchitectureError if transformers lacks this class for the family: no program could read its files.
        """
        if not self.has_score_class:
            raise ArchitectureError(
                f"{self.name} has no class for sequence classification in transformers, so it can be no critic or "
                "reward model; use a checkpoint of another family"
            )
        return replace(self, head="score", params=(*(p for p in self.params if p.op is not Op.TIED), SCORE_HEAD))

    def name_in_files(self, name: str) -> str:
        """Convert a name of this table to the name in the model's files."""
        return name_in_modules(self, name) if self.head == "score" or self.base_names.in_files else name

    def name_in_table(self, stored: str) -> str:
        """Convert a name from an HF checkpoint, with any head, to the name in this table."""
        for base, own in self.base_names.pairs:
            if stored.startswith(base):
                return own + stored.removeprefix(base)
        return stored

    def check_fixed(self, hf_config: HFConfig) -> None:
        """Raise ArchitectureError if a setting has a value that the table does not support."""
        for key, value in self.fixed.items():
            if hf_config.get(key, value) != value:
                raise ArchitectureError(
                    f"{self.name} with {key}={hf_config[key]!r} is not supported, only {value!r}; use a checkpoint "
                    f"with {key}={value!r} or add it to megarl/weights/architectures/{self.name}.py"
                )

    def sizes(self, hf_config: HFConfig) -> ModelSizes:
        def get(field_name: str) -> int:
            keys = self.keys.get(field_name) or COMMON_KEYS[field_name]
            key = next((key for key in keys if hf_config.get(key) is not None), keys[0])
            return integer(self.name, key, hf_config.get(key))

        check_counts(self.name, hf_config)
        known = {p.stage for p in self.params} | {
            axis for p in self.params for part in p.hf for axis in part.axes.split()
        }
        heads, hidden = get("heads"), get("hidden")
        kv_heads = get("kv_heads") if hf_config.get("num_key_value_heads") is not None else heads
        if heads % kv_heads:
            raise ArchitectureError(
                f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads} of {self.name}; correct "
                "config.json"
            )
        if hf_config.get("head_dim") is None and hidden < heads and "kv_lora" not in known:
            raise ArchitectureError(
                f"hidden_size={hidden} of {self.name} is less than num_attention_heads={heads}; correct config.json"
            )
        head = get("head") if hf_config.get("head_dim") is not None else hidden // heads
        more: dict[str, Any] = {}
        if "kv_lora" in known:
            more |= {name: get(name) for name in ("kv_lora", "qk_nope", "qk_rope", "v_head")}
            more["q_lora"] = 0 if needed(self.name, hf_config, "q_lora_rank") is None else get("q_lora")
        if Stage.MOE in known:
            more |= {name: get(name) for name in ("experts", "topk", "expert_ffn")}
            if self.layers.kinds:
                kinds = by_layer(self.name, hf_config, self.layers.kinds, get("num_layers"), ("dense", "sparse"))
                more["moe_layers"] = tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
            elif Stage.DENSE in known:
                more["moe_layers"] = _moe_layers(self.name, hf_config, get("num_layers"))
            else:
                more["moe_layers"] = tuple(range(get("num_layers")))
        if Stage.DELTA in known:
            more |= {name: get(name) for name in DELTA_SIZES}
            kinds = by_layer(
                self.name, hf_config, "layer_types", get("num_layers"), ("full_attention", "linear_attention")
            )
            more["delta_layers"] = tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
        if Stage.CONVOLUTION in known:
            kinds = by_layer(self.name, hf_config, "layer_types", get("num_layers"), ("full_attention", "conv"))
            more["convolution_layers"] = tuple(layer for layer, kind in enumerate(kinds) if kind == "conv")
            more["taps"] = get("taps")
        if Stage.GLOBAL in known:
            more |= _global_sizes(self, hf_config, get("num_layers"), kv_heads, head)
            more["layer_input"] = _layer_input(self.name, hf_config)
            more |= _shared_sizes(self.name, hf_config, get("num_layers"), get("ffn"), more["global_layers"])
        if "normed_head" in known:
            more["normed_head"] = head if flag(self.name, hf_config, "use_qk_norm") else 0
        if "biased_q" in known:
            more["biased"] = flag(self.name, hf_config, "attention_bias")
        if "shared_ffn" in self.keys:
            more["shared_ffn"] = get("shared_ffn")
        elif "shared_ffn" in known:
            key = next((key for key in SHARED_EXPERTS if key in hf_config), SHARED_EXPERTS[0])
            needed(self.name, hf_config, key)
            more["shared_ffn"] = get("expert_ffn") * count(self.name, hf_config, key)
        if Stage.VISION in known:
            more |= _vision_sizes(self.name, hf_config)
        if "vision_places" in known:
            more["vision_places"] = _vision_places(self.name, hf_config)
        if Stage.DEEPSTACK in known:
            more["deepstack"] = _deepstack(self.name, hf_config, get("num_layers"))
        if Stage.MTP in known:
            more["mtp_layers"] = self.layers.prediction.layers(self.name, hf_config)
        return ModelSizes(
            num_layers=get("num_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head=head,
            ffn=_adjusted_ffn(self.name, hf_config, get("ffn")),
            vocab=get("vocab"),
            norms_before=2 * self.norms.before,
            norms_after=2 * self.norms.after,
            tied=flag(self.name, hf_config, "tie_word_embeddings") and self.head == "lm",
            **more,
        )

    def occurrences(self, param: Param, sizes: ModelSizes) -> Iterator[Occurrence]:
        """Yield every occurrence of a row, by layer and expert."""
        if param.per_block:
            blocks = sizes.deepstack if param.stage is Stage.DEEPSTACK else sizes.vision_depth
            yield from (Occurrence(block=block) for block in range(blocks))
            return
        if param.is_first or param.stage is Stage.LAST:
            yield Occurrence()
            return
        behind = range(sizes.num_layers, sizes.num_layers + sizes.mtp_layers)
        moe, recurrent = set(sizes.moe_layers), set(sizes.recurrent_layers)
        layers = {
            Stage.LAYER: [*range(sizes.num_layers), *behind],
            Stage.ATTENTION: [*(layer for layer in range(sizes.num_layers) if layer not in recurrent), *behind],
            Stage.WINDOWED: [layer for layer in range(sizes.num_layers) if layer not in sizes.global_layers],
            Stage.GLOBAL: [*sizes.global_layers],
            Stage.DELTA: [*sizes.delta_layers],
            Stage.CONVOLUTION: [*sizes.convolution_layers],
            Stage.DENSE: [layer for layer in range(sizes.num_layers) if layer not in moe],
            Stage.MOE: [*sizes.moe_layers, *behind],
            Stage.MTP: list(behind),
        }[param.stage]
        if param.shares is not None:
            layers = [layer for layer in layers if (layer in sizes.shared_layers) is param.shares]
        for layer in layers:
            number = layer - sizes.num_layers
            prefix = HF_LAYER.format(layer) if number < 0 else self.layers.prediction.prefix(number, layer, param.stage)
            experts: Iterable[int | None] = range(sizes.experts) if param.per_expert else (None,)
            yield from (Occurrence(layer, expert, prefix=prefix) for expert in experts)

    def tensors(self, hf_config: HFConfig, *, mtp: bool = False) -> dict[str, Shape]:
        """Logical tensors: HF name -> shape, in layer order, without a tied lm_head."""
        sizes = self.sizes(hf_config)
        found: list[tuple[tuple[int, int], str, Shape]] = []
        for number, param in enumerate(self.params):
            parts = [(p, s) for p in parts_of(param, sizes) if 0 not in (s := p.shape(sizes))]
            outside = -1 if param.is_first else sizes.num_layers + sizes.mtp_layers
            for occurrence in self.occurrences(param, sizes):
                if occurrence.layer is not None and occurrence.layer >= sizes.num_layers and not mtp:
                    continue
                order = (outside if occurrence.layer is None else occurrence.layer, number)
                found += [(order, hf_name(part, occurrence), shape) for part, shape in parts]
        found.sort(key=lambda item: item[0])
        return {name: shape for _, name, shape in found}


def parts_of(param: Param, sizes: ModelSizes) -> tuple[Logical, ...]:
    """Logical tensors in Megatron's tensor, for a model of these sizes."""
    return (param.hf[1 if sizes.tied else 0],) if param.op is Op.TIED else param.hf


def needed(name: str, hf_config: HFConfig, key: str) -> Any:
    """Return the value of a key. Raises ArchitectureError if the configuration was not completed and lacks the key."""
    if key not in hf_config:
        raise ArchitectureError(f"the configuration of a {name} model lacks {key}; add it to config.json")
    return hf_config[key]


def integer(name: str, key: str, value: Any, least: int = 1) -> int:
    """Return the value of a config.json key. Raises ArchitectureError unless it is an integer of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ArchitectureError(f"config.json of a {name} model has {key}={value!r}; it must be {wanted}")
    return value


def count(name: str, hf_config: HFConfig, key: str, default: int = 0) -> int:
    """Return a key's integer >= 0, ``default`` if null or missing. Raises ArchitectureError for any other value."""
    value = hf_config.get(key)
    return default if value is None else integer(name, key, value, 0)


def positive(name: str, key: str, value: Any) -> float:
    """Return the value of a config.json key. Raises ArchitectureError unless it is a positive, finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= _LARGEST:
        raise ArchitectureError(f"config.json of a {name} model has {key}={value!r}; it must be a positive number")
    return float(value)


def flag(name: str, hf_config: HFConfig, key: str) -> bool:
    """Return the value of a config.json key. Raises ArchitectureError if it is missing or not a boolean."""
    value = needed(name, hf_config, key)
    if not isinstance(value, bool):
        raise ArchitectureError(f"config.json of a {name} model has {key}={value!r}; it must be true or false")
    return value


def by_layer(name: str, hf_config: HFConfig, key: str, num_layers: int, either: tuple[Any, Any]) -> Sequence[Any]:
    """Return a key's list, with one of two values for each layer. Raises ArchitectureError for any other value."""
    found = needed(name, hf_config, key)
    if not isinstance(found, list | tuple) or len(found) != num_layers or any(value not in either for value in found):
        raise ArchitectureError(
            f"config.json of a {name} model has {key}={found!r}; it must be a list of {either[0]} or {either[1]} for "
            f"each of {num_layers} layers"
        )
    return found


def layer_kinds(arch: Architecture, hf_config: HFConfig, num_layers: int) -> Sequence[str]:
    """Return ``sliding_attention`` for each layer with a window, ``full_attention`` for every other layer."""
    window, either = hf_config.get("sliding_window"), ("full_attention", "sliding_attention")
    if arch.layers.window_switch and hf_config.get("use_sliding_window") is False:
        window = None
    if not arch.layers.windows:
        return [either[window is not None]] * num_layers
    if window is None and hf_config.get("layer_types") is None:
        return either[:1] * num_layers
    return [str(kind) for kind in by_layer(arch.name, hf_config, "layer_types", num_layers, either)]


def prediction_tensors(arch: Architecture, hf_config: HFConfig) -> dict[str, Shape]:
    """Return HF name -> shape of the logical tensors of prediction layers; empty without such layers."""
    own = arch.tensors(hf_config)
    return {name: shape for name, shape in arch.tensors(hf_config, mtp=True).items() if name not in own}


def _global_sizes(arch: Architecture, hf_config: HFConfig, num_layers: int, kv_heads: int, head: int) -> dict[str, Any]:
    """Sizes of attention in layers without a window, from ``per_layer_config`` (layer number -> other values), which
    transformers derives from ``global_head_dim`` and ``num_global_key_value_heads``.

    Raises ArchitectureError for other keys there, other layers, or layers that differ.
    """
    name, key = arch.name, "per_layer_config"
    given = needed(name, hf_config, key)
    layers = [layer for layer, kind in enumerate(layer_kinds(arch, hf_config, num_layers)) if kind == "full_attention"]
    if not isinstance(given, Mapping) or not all(isinstance(own, Mapping) for own in given.values()):
        raise ArchitectureError(f"config.json of a {name} model has {key}={given!r}; it must have values by layer")
    usual: dict[str, Any] = {"head_dim": head, "num_key_value_heads": kv_heads}
    found = {int(layer): {**usual, **own} for layer, own in given.items()}
    each = found.get(layers[0], usual) if layers else usual
    for layer in range(num_layers):
        if found.get(layer, usual) != (each if layer in layers else usual) or each.keys() != usual.keys():
            raise ArchitectureError(
                f"config.json of a {name} model has {key}={given!r}: all full_attention layers must have the same "
                f"{' and '.join(usual)}, and nothing else may differ; use the checkpoint's own config.json"
            )
    width = integer(name, "global_head_dim", each["head_dim"], 2)
    groups = integer(name, "num_global_key_value_heads", each["num_key_value_heads"])
    heads = hf_config.get("num_attention_heads")
    if isinstance(heads, int) and heads % groups:
        raise ArchitectureError(
            f"num_global_key_value_heads={groups} does not divide num_attention_heads={heads} of {name}; correct "
            "config.json"
        )
    found_sizes = {"global_layers": tuple(layers), "global_head": width, "global_kv_heads": groups}
    return {**found_sizes, "keys_are_values": flag(name, hf_config, "attention_k_eq_v")}


def _layer_input(name: str, hf_config: HFConfig) -> int:
    """Width of each layer's input from a second embedding. Raises ArchitectureError if its vocabulary is another."""
    key = "vocab_size_per_layer_input"
    width = count(name, hf_config, "hidden_size_per_layer_input")
    rows, vocab = hf_config.get(key), hf_config.get("vocab_size")
    if width and rows != vocab:
        raise ArchitectureError(
            f"{name} with {key}={rows!r} is not supported, only vocab_size={vocab}: each token has a row in both "
            "embeddings; use the checkpoint's own config.json"
        )
    return width


def _shared_sizes(
    name: str, hf_config: HFConfig, num_layers: int, ffn: int, global_layers: tuple[int, ...]
) -> dict[str, Any]:
    """Layers that take keys and values of earlier layers, and the width of their MLPs.

    Raises ArchitectureError if such a layer has no earlier one of its kind with keys of its own.
    """
    key = "num_kv_shared_layers"
    first = num_layers - count(name, hf_config, key)
    lacking = {layer in global_layers for layer in range(max(first, 0), num_layers)}
    lacking -= {layer in global_layers for layer in range(first)}
    if first < 1 or lacking:
        raise ArchitectureError(
            f"config.json of a {name} model has {key}={num_layers - first} of {num_layers} layers; an earlier layer of "
            "each kind must have keys of its own; use the checkpoint's own config.json"
        )
    return {
        "shared_layers": tuple(range(first, num_layers)),
        "late_ffn": ffn * (2 if flag(name, hf_config, "use_double_wide_mlp") else 1),
    }


def rotates(arch: Architecture, hf_config: HFConfig, num_layers: int) -> Sequence[bool]:
    """Return True for each layer that rotates queries and keys, False for the others."""
    if arch.layers.rope:
        return [bool(turns) for turns in by_layer(arch.name, hf_config, arch.layers.rope, num_layers, (0, 1))]
    if arch.layers.rope_in_windows and hf_config.get("sliding_window") is not None:
        return [kind == "sliding_attention" for kind in layer_kinds(arch, hf_config, num_layers)]
    return [True] * num_layers


def check_counts(name: str, hf_config: HFConfig) -> None:
    """Raise ArchitectureError for absurd numbers of layers, experts or vision blocks.

    Lists of that length are made before shapes are compared, here and in transformers.
    """
    vision = hf_config.get("vision_config")
    text = hf_config.get("text_config")
    for part in (hf_config, text if isinstance(text, Mapping) else {}):
        layers = _largest(part, (*COMMON_KEYS["num_layers"], *PREDICTION_KEYS))
        experts = _largest(part, COMMON_KEYS["experts"])
        if layers * (experts + 1) > MOST_BLOCKS:
            raise ArchitectureError(
                f"config.json of a {name} model has {layers} layers with {experts} experts each, which no model has; "
                "copy the checkpoint again"
            )
    depth = _largest(vision if isinstance(vision, Mapping) else {}, ("depth",))
    if depth > MOST_BLOCKS:
        raise ArchitectureError(
            f"config.json of a {name} model has vision_config.depth={depth}, which no model has; copy the checkpoint "
            "again"
        )


def _largest(values: Mapping[str, Any], keys: Iterable[str]) -> int:
    return max((value for key in keys if isinstance(value := values.get(key), int)), default=0)


def name_in_modules(table: Architecture, name: str) -> str:
    """Convert a tensor or module name of a table to the name in transformers' class."""
    for base, own in table.base_names.pairs:
        if name.startswith(own):
            return base + name.removeprefix(own)
    return name


def hf_name(part: Logical | JoinedTensor, occurrence: Occurrence) -> str:
    """Return the full HF name of one occurrence of a logical tensor."""
    return occurrence.prefix + occurrence.named(part.name)


COMMON_KEYS = {
    "num_layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head": ("head_dim",),
    "ffn": ("intermediate_size",),
    "vocab": ("vocab_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "topk": ("num_experts_per_tok", "moe_k"),
    "expert_ffn": ("moe_intermediate_size",),
    "q_lora": ("q_lora_rank",),
    "kv_lora": ("kv_lora_rank",),
    "qk_nope": ("qk_nope_head_dim",),
    "qk_rope": ("qk_rope_head_dim",),
    "v_head": ("v_head_dim",),
    "delta_key_heads": ("linear_num_key_heads",),
    "delta_heads": ("linear_num_value_heads",),
    "delta_key": ("linear_key_head_dim",),
    "delta_value": ("linear_value_head_dim",),
    "taps": ("linear_conv_kernel_dim",),
}
"""Field of :class:`ModelSizes` -> keys of config.json; the first key present is used."""
DELTA_SIZES = "delta_key_heads", "delta_heads", "delta_key", "delta_value", "taps"
"""Fields of :class:`ModelSizes` for a gated delta net."""
PREDICTION_KEYS = "num_nextn_predict_layers", "mtp_num_hidden_layers"
"""Keys with the number of prediction layers."""
SHARED_EXPERTS = "n_shared_experts", "moe_num_shared_experts", "num_shared_experts"
"""Keys with the number of shared experts."""


VISION_KEYS = {
    "vision_depth": "depth",
    "vision_hidden": "hidden_size",
    "vision_ffn": "intermediate_size",
    "channels": "in_channels",
    "temporal_patch": "temporal_patch_size",
    "patch": "patch_size",
    "merge": "spatial_merge_size",
}
"""Field of :class:`ModelSizes` -> key of ``vision_config`` in config.json."""


def _vision_sizes(name: str, hf_config: HFConfig) -> dict[str, int]:
    """Sizes of the vision tower. Raises ArchitectureError if one is missing or not a positive integer."""
    vision = hf_config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ArchitectureError(
            f"config.json of a {name} model has vision_config={vision!r}; it must have the sizes of the vision tower"
        )
    return {field: integer(name, f"vision_config.{key}", vision.get(key)) for field, key in VISION_KEYS.items()}


def _vision_places(name: str, hf_config: HFConfig) -> int:
    """Rows of a tower's square table of positions."""
    key = "vision_config.num_position_embeddings"
    places = integer(name, key, needed(name, hf_config, "vision_config").get("num_position_embeddings"))
    if math.isqrt(places) ** 2 != places:
        raise ArchitectureError(f"config.json of a {name} model has {key}={places}; it must be a square number")
    return places


def _deepstack(name: str, hf_config: HFConfig, num_layers: int) -> int:
    """Number of blocks of a tower whose vectors the first layers add (DeepStack, arXiv:2406.04334)."""
    vision = needed(name, hf_config, "vision_config")
    blocks, depth = vision.get("deepstack_visual_indexes"), integer(name, "vision_config.depth", vision.get("depth"))
    ascending = isinstance(blocks, list | tuple) and all(isinstance(block, int) for block in blocks)
    if not ascending or list(blocks) != sorted({*blocks} & {*range(depth)}) or not 0 < len(blocks) <= num_layers:
        raise ArchitectureError(
            f"config.json of a {name} model has vision_config.deepstack_visual_indexes={blocks!r}; it must be an "
            f"ascending list of 1 to {num_layers} of the tower's {depth} blocks, one for each layer that adds vectors"
        )
    return len(blocks)


def _adjusted_ffn(name: str, hf_config: HFConfig, width: int) -> int:
    """Width of the MLPs: two thirds of ``width``, scaled and rounded up, with ``block_auto_adjust_ff_dim`` (LFM2)."""
    if not hf_config.get("block_auto_adjust_ff_dim"):
        return width
    multiple = integer(name, "block_multiple_of", needed(name, hf_config, "block_multiple_of"))
    factor = hf_config.get("block_ffn_dim_multiplier")
    width = int(2 * width / 3)
    if factor is None:
        return width
    return -(-int(positive(name, "block_ffn_dim_multiplier", factor) * width) // multiple) * multiple


def _moe_layers(name: str, hf_config: HFConfig, num_layers: int) -> tuple[int, ...]:
    """MoE layers: from ``first_k_dense_replace`` on (DeepSeek), every ``decoder_sparse_step``-th without
    ``mlp_only_layers`` (Qwen), or every ``moe_layer_interval``-th of a range (ERNIE)."""
    if "moe_layer_interval" in hf_config:
        step = integer(name, "moe_layer_interval", hf_config["moe_layer_interval"])
        first, last = (needed(name, hf_config, f"moe_layer_{end}_index") for end in ("start", "end"))
        first, last = integer(name, "moe_layer_start_index", first, 0), integer(name, "moe_layer_end_index", last, -1)
        last = num_layers - 1 if last == -1 else last
        return tuple(i for i in range(first, min(last + 1, num_layers)) if (i + 1) % step == 0)
    key = "decoder_sparse_step" if hf_config.get("decoder_sparse_step") is not None else "moe_layer_freq"
    step = integer(name, key, 1 if hf_config.get(key) is None else hf_config[key])
    dense = hf_config.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(isinstance(layer, int) for layer in dense):
        raise ArchitectureError(
            f"config.json of a {name} model has mlp_only_layers={dense!r}; it must be a list of numbers of layers"
        )
    first = count(name, hf_config, "first_k_dense_replace")
    offset = 1 if "decoder_sparse_step" in hf_config else 0
    return tuple(i for i in range(first, num_layers) if i not in dense and (i + offset) % step == 0)
