"""Rotary embedding of each layer, read from a config.json as transformers does.

Source: transformers 5.19 ``modeling_rope_utils.py``. Plain values; ``learn/models/packed.py`` computes frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from megarl.core.errors import ArchitectureError
from megarl.weights.architectures.table import Architecture, HFConfig, integer, layer_kinds, positive, rotates

KINDS = ("default", "linear", "llama3", "yarn")


class Rope(NamedTuple):
    """Parameters of a layer's rotary embedding. Defaults stand for numbers that a kind does not have."""

    kind: str
    """One of ``KINDS``, or ``proportional``."""
    base: float
    factor: float = 1.0
    """Divisor of positions: for slow frequencies only (llama3, yarn) or for all (linear)."""
    original: int = 0
    """Maximum length in tokens before scaling."""
    fast: float = 0.0
    """Frequencies with at least this many rotations in ``original`` tokens stay unchanged."""
    slow: float = 0.0
    """Frequencies with at most this many rotations are divided by ``factor``."""
    truncate: bool = True
    """Round YaRN's bounds between frequencies to whole numbers."""
    attention_factor: float = 1.0
    """Factor of rotated queries and keys."""
    share: float = 1.0
    """Share of a head's frequencies that are not 0, the fastest ones (proportional)."""
    width: int = 0
    """Width of a head, if not the model's."""
    query_beta: float = 0.0
    """Queries at position p are multiplied by 1 + ``query_beta`` * ln(1 + p // ``original``) (Llama 4)."""


def ropes(arch: Architecture, hf_config: HFConfig) -> tuple[Rope | None, ...]:
    """Rotary embedding of each layer, ``None`` for layers without one. Returns () with latent attention: Megatron's
    configuration has that rope.

    Raises ArchitectureError for a kind that the trainer does not support.
    """
    sizes = arch.sizes(hf_config)
    if sizes.kv_lora:
        return ()
    kinds = layer_kinds(arch, hf_config, sizes.num_layers)
    made = {kind: _rope(arch, settings_of(arch, hf_config, kind), sizes.head) for kind in kinds}
    made = {
        kind: rope._replace(width=sizes.global_head) if kind == "full_attention" and sizes.global_layers else rope
        for kind, rope in made.items()
    }
    turning = rotates(arch, hf_config, sizes.num_layers)
    if arch.layers.rope_in_windows and not any(turning):
        raise ArchitectureError(
            f"{arch.name} with sliding_window={hf_config['sliding_window']!r} and no sliding_attention in layer_types "
            "is not supported: transformers rotates no layer then, vLLM all; set sliding_window to null for the latter"
        )
    return tuple(made[kind] if turns else None for kind, turns in zip(kinds, turning, strict=True))


def _rope(arch: Architecture, given: Mapping[str, Any], head: int) -> Rope:
    name, kind = arch.name, given["rope_type"]
    if arch.layers.rope_alpha and kind == "dynamic" and given.get("alpha"):
        positive(name, "factor of the rope scaling", given.get("factor"))  # required, but unused, by transformers
        return Rope("default", given["rope_theta"] * positive(name, "alpha", given["alpha"]) ** (head / (head - 2)))
    if arch.norms.after_rope and kind == "yarn":
        raise ArchitectureError(
            f"{name} with rope_type='yarn' is not supported: its norms after the rope take YaRN's scale away; use a "
            "checkpoint without it"
        )
    share = given["partial_rotary_factor"]
    if kind == "proportional" and arch.layers.ropes:
        if (factor := given.get("factor", 1.0)) != 1.0:
            raise ArchitectureError(
                f"{name} with rope_type='proportional' and factor={factor!r} is not supported, only 1.0: vLLM ignores "
                "the factor; use a checkpoint without it"
            )
        return Rope(kind, given["rope_theta"], share=share)
    if kind not in KINDS:
        raise ArchitectureError(
            f"{name} with rope_type={kind!r} is not supported, only {', '.join(KINDS)}; use a checkpoint with one of "
            "these, or remove the scaling from config.json where no sequence is longer than the model was trained on"
        )
    if arch.layers.queries_grow and kind != "yarn":
        raise ArchitectureError(f"{name} with rope_type={kind!r} is not supported, only 'yarn'; use such a checkpoint")
    if arch.layers.ropes and share != 1.0:
        raise ArchitectureError(
            f"{name} with rope_type={kind!r} and partial_rotary_factor={share!r} is not supported, only with "
            "'proportional'; use the checkpoint's own config.json"
        )
    if kind in ("default", "linear"):
        return Rope(kind, given["rope_theta"], given.get("factor", 1.0) if kind == "linear" else 1.0)
    key = "original_max_position_embeddings"
    scaled = Rope(kind, given["rope_theta"], given["factor"], integer(name, key, given[key]))
    if kind == "llama3":
        low, high = (positive(name, key, given.get(key)) for key in ("low_freq_factor", "high_freq_factor"))
        return scaled._replace(fast=high, slow=low)
    rope = scaled._replace(
        fast=positive(name, "beta_fast", given.get("beta_fast") or 32),
        slow=positive(name, "beta_slow", given.get("beta_slow") or 1),
        truncate=bool(given.get("truncate", True)),
        attention_factor=_attention_factor(name, given),
        query_beta=_query_beta(name, given) if arch.layers.queries_grow else 0.0,
    )
    if given["partial_rotary_factor"] != 1.0 and rope.attention_factor != 1.0:
        raise ArchitectureError(
            f"{name} with yarn and partial_rotary_factor={given['partial_rotary_factor']!r} is not supported: YaRN "
            "scales what rotates and not the rest; use a checkpoint that rotates whole heads"
        )
    return rope


def _attention_factor(name: str, given: Mapping[str, Any]) -> float:
    """YaRN's factor of cosines and sines (2309.00071, section 3.4)."""

    def grown(by: float) -> float:
        return 0.1 * by * math.log(given["factor"]) + 1.0 if given["factor"] > 1 else 1.0

    if given.get("attention_factor") is not None:
        return positive(name, "attention_factor", given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        mscale, all_dim = (positive(name, key, given[key]) for key in ("mscale", "mscale_all_dim"))
        return grown(mscale) / grown(all_dim)
    return grown(1.0)


def _query_beta(name: str, given: Mapping[str, Any]) -> float:
    key = "llama_4_scaling_beta"
    return 0.0 if given.get(key) == 0 else positive(name, key, given.get(key))


def settings_of(arch: Architecture, hf_config: HFConfig, kind: str = "full_attention") -> dict[str, Any]:
    """``rope_settings`` of a kind of layers; most families have one kind."""
    partial, kind = arch.layers.partial_rotary, kind if arch.layers.ropes else ""
    return rope_settings(arch.name, hf_config, partial=partial, kind=kind)


def rope_settings(name: str, hf_config: HFConfig, *, partial: bool = False, kind: str = "") -> dict[str, Any]:
    """Return the rope settings as transformers reads them: ``rope_parameters``, or the older ``rope_scaling`` and
    ``rope_theta``.

    Args:
        partial: Allow heads with partial rotation.
        kind: Kind of layers, if ``rope_parameters`` has one rope per kind.
    """
    key = "rope_scaling" if hf_config.get("rope_scaling") else "rope_parameters"
    given = hf_config.get(key) or {}
    if kind and isinstance(given, Mapping):
        key, given = f"{key}.{kind}", given.get(kind)
    if not isinstance(given, Mapping):
        raise ArchitectureError(f"config.json of a {name} model has {key}={given!r}; it must be an object")
    theta = given.get("rope_theta", hf_config.get("rope_theta"))
    if theta is None:
        raise ArchitectureError(f"the configuration of a {name} model has no rope_theta; add it to config.json")
    rope = {
        "original_max_position_embeddings": max_positions(name, hf_config),
        **given,
        "rope_type": given.get("rope_type", given.get("type", "default")),
        "rope_theta": positive(name, "rope_theta", theta),
    }
    if hf_config.get("original_max_position_embeddings") is not None and not kind:
        rope["original_max_position_embeddings"] = hf_config["original_max_position_embeddings"]
    if rope["rope_type"] in KINDS[1:]:
        if rope.get("factor") is None:
            raise ArchitectureError(
                f"config.json of a {name} model has rope_type={rope['rope_type']!r} without a factor; add the factor "
                "it was made with"
            )
        rope["factor"] = positive(name, "factor of the rope scaling", rope["factor"])
    factor = given.get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    share = 1.0 if factor is None else positive(name, "partial_rotary_factor", factor)
    if share > 1.0 or (share < 1.0 and not partial):
        raise ArchitectureError(
            f"{name} with partial_rotary_factor={factor!r} is not supported, only {'up to ' * partial}1.0; use a "
            "checkpoint that rotates whole heads"
        )
    return rope | {"partial_rotary_factor": share}


def max_positions(name: str, hf_config: HFConfig) -> int:
    """Maximum length in tokens that the model supports."""
    return integer(name, "max_position_embeddings", hf_config.get("max_position_embeddings"))
