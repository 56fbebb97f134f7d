"""Known rows that match a model's tensors, and keys of its config.json that no table reads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.core.errors import ArchitectureError
from megarl.weights.architectures import ARCHITECTURES, blocks
from megarl.weights.architectures.megatron_config import check, gpt_kwargs, multipliers, transformer_kwargs
from megarl.weights.architectures.rope import ropes
from megarl.weights.architectures.table import (
    EXPERT,
    Architecture,
    Fused,
    LayerRules,
    ModelSizes,
    NormRules,
    Op,
    Param,
    RouterRules,
    Stage,
)
from megarl.weights.drafts.tiny import LAYERS, Stored

ADDED: tuple[dict[str, Any], ...] = (
    {"is_causal": False},
    {"use_bidirectional_attention": True},
    {"sliding_window": 8},
    {"sliding_window": 8, "use_sliding_window": False},
    {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    {"partial_rotary_factor": 0.5},
    {"attn_logit_softcapping": 5.0},
    {"final_logit_softcapping": 5.0},
    {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8},
    {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8, "use_sliding_window": False},
    {"query_pre_attn_scalar": 7},
    {"attention_multiplier": 0.3},
    {"logits_scaling": 3.0},
)
"""Keys that a class may lack by default."""
SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {
        "rope_type": "longrope", "factor": 4.0, "short_factor": [2.0] * 8, "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 16,
    },
)  # fmt: skip
Function = Callable[[dict[str, Any]], Any]
"""transformers' logits for a configuration, always with the same weights."""


def changed(value: Any) -> list[Any]:
    """Return other values of the same type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, max(1, value // 2)]
    if isinstance(value, float):
        return [value * 3 + 0.1]
    if isinstance(value, list):
        return [] if value == value[::-1] else [value[::-1]]
    if isinstance(value, str):
        return ["relu"] if value in ("silu", "gelu", "gelu_pytorch_tanh", "swish") else []
    return [True, 8] if value is None else []


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's part of a configuration."""
    part: dict[str, Any] = config.get("text_config", config)
    return part


def variants(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield configurations with one change each; ``config`` is restored at the end."""
    for place in {id(part): part for part in (config, text_of(config), config.get("vision_config", {}))}.values():
        for key, value in list(place.items()):
            for other in changed(value):
                place[key] = other
                yield copy.deepcopy(config)
            place[key] = value
    text = text_of(config)
    for added in ADDED:
        yield {**config, "text_config": {**text, **added}} if "text_config" in config else {**config, **added}
    rope = text["rope_parameters"]
    for scaling in SCALINGS:
        text["rope_parameters"] = {**rope, **scaling}
        yield copy.deepcopy(config)
    text["rope_parameters"] = rope


def difference(base: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that differ, with their values in ``config``."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found |= difference(base.get(key, {}), value)
        elif base.get(key) != value:
            found[key] = value
    return found


def logits_of(model: Any, config: Mapping[str, Any]) -> Function:
    """Return a function from configuration to logits of a fixed text, with the weights of ``model``.

    Args:
        model: A causal language model of transformers, with ``config``.
    """
    import torch

    weights, made = model.state_dict(), type(model)
    tokens = torch.randint(6, text_of(dict(config))["vocab_size"], (1, 40), generator=torch.Generator().manual_seed(1))

    def logits(changed: dict[str, Any]) -> Any:
        other = made._from_config(model.config_class(**copy.deepcopy(changed)), attn_implementation="eager").eval()
        other.load_state_dict(weights)
        with torch.no_grad():
            return other(input_ids=tokens, use_cache=False).logits

    return logits


def arguments(arch: Architecture, config: Mapping[str, Any]) -> Any:
    """Return Megatron's build arguments. Raises ArchitectureError if the table refuses the configuration."""
    check(arch, config)
    parts = (gpt_kwargs, transformer_kwargs, ropes, multipliers)
    return arch.sizes(config), *(part(arch, config) for part in parts)


def passed_over(base: dict[str, Any], logits: Function, read: Function) -> tuple[int, list[dict[str, Any]]]:
    """Change keys one at a time, and compare transformers' results with Megatron's build arguments.

    Args:
        base: Configuration with every key of its class.
        logits: Raises any exception if transformers refuses a configuration or it needs other weights.
        read: Megatron's arguments. Raises ArchitectureError if a configuration is refused.

    Returns:
        Number of changes that alter the logits, and the ones that Megatron's arguments neither reflect nor refuse.
    """
    want, plain = logits(base), read(base)
    seen, found = 0, []
    for config in variants(copy.deepcopy(base)):
        try:
            same = bool((logits(config) - want).abs().max() <= 1e-5)
        except Exception:
            continue
        if same:
            continue
        seen += 1
        try:
            if read(config) == plain:
                found.append(difference(base, config))
        except ArchitectureError:
            pass
    return seen, found


_GROUPS = {name: value for name, value in vars(blocks).items() if name.isupper() and isinstance(value, tuple)}
ROW_GROUPS: Mapping[str, tuple[Param, ...]] = {n: v for n, v in _GROUPS.items() if isinstance(v[0], Param)}
VLLM_GROUPS: Mapping[str, tuple[Fused, ...]] = {n: v for n, v in _GROUPS.items() if isinstance(v[0], Fused)}
"""Name in ``blocks`` -> shared rows."""


Place = tuple[str, int]
"""Name of a tensor and its layer; ``BESIDE`` for tensors outside the layers."""
BESIDE = -1


@dataclass
class Draft:
    """Rows found for a model, and tensors without a row."""

    name: str
    stored: Stored
    groups: dict[str, tuple[Param, ...]] = field(default_factory=dict)
    """Rows of ``blocks``, by their names there."""
    borrowed: dict[str, list[Param]] = field(default_factory=dict)
    """``model_type`` of another family -> matching rows from its table."""
    vllm: dict[str, tuple[Fused, ...]] = field(default_factory=dict)
    unplaced: dict[str, str] = field(default_factory=dict)
    """Name of a tensor without a row -> its shape, with names of sizes that match."""
    refused: str = ""
    """Error message of the draft for the configuration."""
    fixed: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Sizes under unusual keys of config.json."""
    layers: LayerRules = LayerRules()

    def architecture(self) -> Architecture:
        """Return the draft as a table."""
        rows = [row for group in (*self.groups.values(), *self.borrowed.values()) for row in group]
        return Architecture(
            self.name,
            self.name,
            tuple(rows),
            tuple(row for group in self.vllm.values() for row in group),
            fixed=dict(self.fixed),
            layers=self.layers,
            norms=self.norms(),
            router=RouterRules(sigmoid="ROUTER_BIAS" in self.groups),
            keys=dict(self.keys),
        )

    def norms(self) -> NormRules:
        """Derive the norms' places from the rows."""
        return NormRules(
            before="input_layernorm.weight" in self.stored,
            after="NORMS_AFTER" in self.groups,
            whole_width="WHOLE_QK_NORM" in self.groups,
        )


def draft_of(name: str, stored: Stored, config: Mapping[str, Any]) -> Draft:
    """Find rows for every tensor of a model: first shared rows of ``blocks``, then rows of single families.

    Args:
        name: ``model_type``.
        config: Configuration of the tiny model with the tensors ``stored``.
    """
    fitting = {group: (rows, _places(Architecture(name, name, rows), stored, config)) for group, rows in _groups()}
    fitting = {group: found for group, found in fitting.items() if found[1]}
    covers = [_cover(stored, {first: fitting[first]} | fitting) for first in fitting]
    chosen, left = min(
        covers,
        key=lambda cover: (len(cover[1]), sum("[" in group for group in cover[0])),
        default=(dict[str, tuple[Param, ...]](), _all(stored)),
    )
    layers = LayerRules(
        partial_rotary=config.get("partial_rotary_factor") is not None,
        windows=bool(config.get("layer_types") and config.get("sliding_window")),
    )
    draft = Draft(name, stored, chosen, layers=layers)
    for family, row in _own_rows():
        arch = replace(ARCHITECTURES[family], params=(row,))
        places = _places(arch, stored, config)
        if places and places <= left:
            draft.borrowed.setdefault(family, []).append(row)
            axes = {axis for part in row.hf for axis in part.axes.split()}
            draft.keys |= {axis: keys for axis, keys in arch.keys.items() if axis in axes}
            left -= places
    logicals = {id(part) for row in draft.architecture().params for part in row.hf}
    draft.vllm = {
        group: rows
        for group, rows in VLLM_GROUPS.items()
        if all(id(part) in logicals for row in rows for part in row.hf)
    }
    try:
        sizes = draft.architecture().sizes(config)
    except ArchitectureError as error:
        draft.refused, sizes = str(error), None
    draft.unplaced = {place: _described(stored[place].shape, sizes) for place in sorted({place for place, _ in left})}
    return draft


def _all(stored: Stored) -> set[Place]:
    return {(place, layer) for place, one in stored.items() for layer in one.layers or {BESIDE}}


def _cover(
    stored: Stored, fitting: Mapping[str, tuple[tuple[Param, ...], set[Place]]]
) -> tuple[dict[str, tuple[Param, ...]], set[Place]]:
    """Choose, in order, each group with only uncovered tensors. Return these groups, and the tensors without a row."""
    chosen, left = dict[str, tuple[Param, ...]](), _all(stored)
    for group, (rows, places) in fitting.items():
        if places <= left:
            chosen[group] = rows
            left -= places
    return chosen, left


def _groups() -> Iterator[tuple[str, tuple[Param, ...]]]:
    """Yield groups of rows with their names, largest first, then each of their rows alone."""
    yield from sorted(ROW_GROUPS.items(), key=lambda group: (-len(group[1]), group[0]))
    for group, rows in ROW_GROUPS.items():
        yield from ((f"{group}[{i}:{i + 1}]", (row,)) for i, row in enumerate(rows))


def _own_rows() -> Iterator[tuple[str, Param]]:
    shared = {id(row) for rows in ROW_GROUPS.values() for row in rows}
    for family, arch in ARCHITECTURES.items():
        yield from ((family, row) for row in arch.params if id(row) not in shared)


def _places(arch: Architecture, stored: Stored, config: Mapping[str, Any]) -> set[Place]:
    """Tensors of the rows; empty unless all exist with matching shapes, in the layers of their stage."""
    try:
        sizes = arch.sizes(config)
    except ArchitectureError:
        return set()
    found = set[Place]()
    for row in arch.params:
        layers = _layers(row.stage, stored)
        for part in row.hf[:1] if row.op is Op.TIED else row.hf:
            shape = part.shape(sizes)
            one = stored.get(part.name)
            if one is None:
                if 0 not in shape and not (row.op is Op.TIED and sizes.tied):
                    return set()
            elif one.shape != shape or not (layers <= one.layers if layers else not one.layers):
                return set()
            else:
                found |= {(part.name, layer) for layer in layers or {BESIDE}}
    return found


def _layers(stage: Stage, stored: Stored) -> set[int]:
    """Layers with rows of a stage; empty for rows outside the layers."""
    everywhere = set(range(LAYERS))
    sparse = set().union(*(one.layers for place, one in stored.items() if EXPERT in place))
    of_stage = {Stage.LAYER: everywhere, Stage.DENSE: everywhere - sparse if sparse else set(), Stage.MOE: sparse}
    return of_stage.get(stage, set())


def _described(shape: tuple[int, ...], sizes: ModelSizes | None) -> str:
    """Format a shape with the names of sizes that match each extent."""
    if sizes is None:
        return str(list(shape))
    plain = replace(sizes, moe_layers=())
    known = [n for n in dir(plain) if not n.startswith("_") and isinstance(getattr(plain, n), int)]
    fits = [[n for n in known if getattr(plain, n) == extent and n not in ("tied", "num_layers")] for extent in shape]
    return f"{list(shape)}, axes {' x '.join(' or '.join(names) or '?' for names in fits)}"
