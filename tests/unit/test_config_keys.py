"""A key of a config.json that changes what transformers computes changes Megatron's arguments too, or is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from megarl.weights.architectures import ARCHITECTURES
from megarl.weights.architectures.complete import complete
from megarl.weights.drafts.key_changes import arguments, logits_of, passed_over
from tests.parallel.families import FAMILIES, WITH_CLASS

FIRST_OF_TYPE = sorted({values[0]: name for name, values in reversed(FAMILIES.items())}.values())
PARAMETERS = [
    pytest.param(name, marks=() if name in FIRST_OF_TYPE[::3] else pytest.mark.soak) for name in sorted(WITH_CLASS)
]
"""Each family's own keys; one of three families in every run."""


@pytest.mark.parametrize("family", PARAMETERS)
def test_no_key_that_changes_the_function_is_passed_over(family: str) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.set_num_threads(1)
    model_type, values = FAMILIES[family]
    made = CONFIG_MAPPING[model_type](**copy.deepcopy(values))
    base = made.to_dict()
    auto = AutoModelForImageTextToText if "vision_config" in base else AutoModelForCausalLM
    torch.manual_seed(0)
    logits = logits_of(auto.from_config(made, attn_implementation="eager"), base)

    def read(config: dict[str, Any]) -> Any:
        return arguments(ARCHITECTURES[model_type], complete(config))

    seen, found = passed_over(base, logits, read)
    assert seen > 3 and not found
