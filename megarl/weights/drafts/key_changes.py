"""Keys of a config.json that change what transformers computes, but not Megatron's arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megarl.core.errors import ArchitectureError
from megarl.weights.architectures import Architecture
from megarl.weights.architectures.megatron_config import check, gpt_kwargs, multipliers, transformer_kwargs
from megarl.weights.architectures.rope import ropes
from megarl.weights.drafts.tiny import text_of

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
