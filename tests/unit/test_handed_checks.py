"""Gemma 4 E2B: grids and settings with which layers would not get what earlier ones hand to them are refused."""

from __future__ import annotations

import pytest

from megarl.config import Config
from megarl.config.schema import ModelConfig
from megarl.core.errors import ConfigError
from megarl.planner.model_cost import ModelCost
from megarl.run.checks.grids import check_recompute
from megarl.weights.architectures import architecture
from megarl.weights.architectures.complete import complete
from megarl.weights.architectures.table import source_of
from megarl.weights.reshard.layouts import MegatronGrid, megatron_layout, vllm_layout
from tests.parallel.families import FAMILIES

SMALL = complete({"model_type": "gemma4_text", **FAMILIES["gemma4_small"][1]})


def test_stages_are_one() -> None:
    assert architecture(SMALL).sizes(SMALL).shared_layers == (3, 4, 5)
    with pytest.raises(ConfigError, match=r"parallel\.pp=2 with gemma4_text: .* set parallel\.pp to 1"):
        megatron_layout(SMALL, MegatronGrid(pp=2))
    with pytest.raises(ConfigError, match=r"parallel\.cp=2 with gemma4_text: .* set parallel\.cp to 1"):
        megatron_layout(SMALL, MegatronGrid(cp=2))
    with pytest.raises(ConfigError, match=r"rollout\.pp=2 with gemma4_text: .* set rollout\.pp to 1"):
        vllm_layout(SMALL, 1, pp=2)


def test_layers_are_not_computed_again() -> None:
    check_recompute(Config(model=ModelConfig(recompute="selective")), SMALL)
    with pytest.raises(ConfigError, match=r"model\.recompute=full .* set model\.recompute to selective"):
        check_recompute(Config(model=ModelConfig(recompute="full")), SMALL)


def test_keys_and_values_are_those_of_the_last_layer_of_the_kind() -> None:
    sizes = architecture(SMALL).sizes(SMALL)
    assert [source_of(sizes, layer) for layer in sizes.shared_layers] == [1, 2, 1]  # full, sliding, full


def test_the_planner_counts_all_matrices() -> None:
    shapes = architecture(SMALL).tensors(SMALL).values()
    assert ModelCost.of(SMALL).parameters == sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
