"""Rules of a table that keys of config.json give away by their names and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.weights.architectures.table import COMMON_KEYS, SHARED_EXPERTS, LayerRules, MultiplierKeys

OTHER_KEYS = {
    "ffn": ("moe_intermediate_size",),
    "expert_ffn": ("intermediate_size",),
    "shared_ffn": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "taps": ("conv_L_cache",),
}
"""Field of ``ModelSizes`` -> keys that some families have in place of the usual ones."""
ATTENTION = {"full_attention", "sliding_attention"}
"""Kinds in ``layer_types`` of layers with attention among tokens."""
_MULTIPLIERS = {
    "embedding": "embedding_multiplier",
    "residual": "residual_multiplier",
    "attention": "attention_multiplier",
    "attention_root": "query_pre_attn_scalar",
    "logits": "logits_scaling",
}


def other_keys(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the sizes whose usual keys a configuration lacks, with its own keys for them."""
    usual = {**COMMON_KEYS, "shared_ffn": SHARED_EXPERTS}
    found = dict[str, tuple[str, ...]]()
    for size, others in OTHER_KEYS.items():
        own = next((key for key in others if config.get(key) is not None), None)
        if own and all(config.get(key) is None for key in usual[size]):
            found[size] = (own,)
    return found


def layer_rules(config: Mapping[str, Any]) -> LayerRules:
    """Return the rules of single layers, except those that have no key (``probes``).

    Args:
        config: Configuration of the language model, with every key of its class.
    """
    rope = config.get("rope_parameters") or {}
    nested = {name: value for name, value in rope.items() if isinstance(value, Mapping)}
    ropes = [*nested.values()] or [rope]
    kinds = config.get("layer_types")
    epsilons = [key for key in config if key.endswith("norm_eps")]
    return LayerRules(
        partial_rotary=any(one.get("partial_rotary_factor") is not None for one in (config, *ropes)),
        rope=_list_of(config, (0, 1), "rope"),
        rope_alpha=any("alpha" in one for one in ropes),
        kinds=_list_of(config, ("dense", "sparse")),
        windows="sliding_window" in config and isinstance(kinds, list) and {*kinds} <= ATTENTION,
        window_switch="use_sliding_window" in config,
        ropes=bool(nested),
        queries_grow=any("llama_4_scaling_beta" in one for one in ropes),
        norm_epsilon=LayerRules().norm_epsilon if LayerRules().norm_epsilon in config else (*epsilons, "")[0],
        mrope_interleaved=bool(rope.get("mrope_interleaved")),
    )


def _list_of(config: Mapping[str, Any], values: tuple[int | str, ...], part: str = "") -> str:
    """Key with ``part`` in its name and one of ``values`` for each layer; "" without one."""
    for key, found in config.items():
        whole = isinstance(found, list) and len(found) == config.get("num_hidden_layers")
        if whole and part in key and all(value in values for value in found):
            return key
    return ""


def multiplier_keys(config: Mapping[str, Any]) -> MultiplierKeys:
    """Return the keys with factors of parts of the model, by their names."""
    return MultiplierKeys(**{part: key for part, key in _MULTIPLIERS.items() if config.get(key) is not None})
