"""A key of a config.json that changes what transformers computes changes Megatron's arguments too, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megarl.core.errors import ArchitectureError
from megarl.weights.architectures import ARCHITECTURES
from megarl.weights.architectures.complete import complete
from megarl.weights.architectures.megatron_config import check, gpt_kwargs, multipliers, transformer_kwargs
from megarl.weights.architectures.rope import ropes
from tests.parallel.families import FAMILIES, WITH_CLASS

TOKENS = torch.randint(6, 200, (1, 40), generator=torch.Generator().manual_seed(1))
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
"""Keys that a class may not have by itself."""
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


def changed(value: Any) -> list[Any]:
    """Other values of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, max(1, value // 2)]
    if isinstance(value, float):
        return [value * 3 + 0.1]
    return [True, 8] if value is None else []


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config", config)


def variants(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Configurations with one thing changed each."""
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


def difference(base: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The changed keys, for a failure's message."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found |= difference(base.get(key, {}), value)
        elif base.get(key) != value:
            found[key] = value
    return found


def logits(
    config: dict[str, Any], weights: dict[str, torch.Tensor] | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of a text, and the weights."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    made = CONFIG_MAPPING[config["model_type"]](**copy.deepcopy(config))
    auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(made, attn_implementation="eager").eval()
    if weights is not None:
        model.load_state_dict(weights)
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits, model.state_dict()


def arguments(config: dict[str, Any]) -> Any:
    """What Megatron is built with. Raises ArchitectureError where it is refused."""
    arch = ARCHITECTURES[config["model_type"]]
    whole = complete(config)
    check(arch, whole)
    parts = (gpt_kwargs, transformer_kwargs, ropes, multipliers)
    return arch.sizes(whole), *(part(arch, whole) for part in parts)


FIRST_OF_TYPE = {values[0]: name for name, values in reversed(FAMILIES.items())}.values()
PARAMETERS = [
    pytest.param(name, marks=() if name in FIRST_OF_TYPE else pytest.mark.soak) for name in sorted(WITH_CLASS)
]


@pytest.mark.parametrize("family", PARAMETERS)
def test_no_key_that_changes_the_function_is_passed_over(family: str) -> None:
    from transformers import CONFIG_MAPPING

    torch.set_num_threads(1)
    model_type, values = FAMILIES[family]
    base = CONFIG_MAPPING[model_type](**copy.deepcopy(values)).to_dict()
    want, weights = logits(base, None)
    plain = arguments(base)
    seen, passed_over = 0, []
    for config in variants(base):
        try:
            found, _ = logits(config, weights)
        except Exception:
            continue  # transformers refuses it, or it has other weights
        if torch.allclose(found, want, atol=1e-5, rtol=0):
            continue
        seen += 1
        try:
            if arguments(config) == plain:
                passed_over.append(difference(base, config))
        except ArchitectureError:
            pass
    assert seen > 3 and not passed_over
