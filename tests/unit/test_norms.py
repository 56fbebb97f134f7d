"""Norms after attention and MLP, and the families whose norms TransformerEngine does not have."""

from __future__ import annotations

import pytest
import torch

from megarl.config.schema import ModelConfig
from megarl.core.errors import ConfigError
from megarl.learn.models.norms import Residual
from megarl.learn.models.specs import check_layers
from megarl.weights.architectures import ARCHITECTURES
from megarl.weights.architectures.complete import complete
from megarl.weights.architectures.table import USUAL_NORMS
from megarl.weights.reshard.layouts import vllm_layout
from tests.parallel.families import FAMILIES
from tests.unit.test_architectures import family_config

UNUSUAL = [name for name, (kind, _) in FAMILIES.items() if ARCHITECTURES[kind].norms != USUAL_NORMS]


@pytest.mark.parametrize("family", ["qwen3", *UNUSUAL])
def test_norms_that_transformer_engine_does_not_have(family: str) -> None:
    settings = complete(family_config(family))
    name = settings["model_type"]
    check_layers(ModelConfig(), settings)
    engine = ModelConfig(transformer_impl="transformer_engine")
    if family == "qwen3":
        return check_layers(engine, settings)
    with pytest.raises(ConfigError, match=rf"transformer_engine with {name}: .* model.transformer_impl to local"):
        check_layers(engine, settings)
    return None


@pytest.mark.parametrize("trained", [True, False])
def test_a_norm_begins_no_graph_where_the_layer_has_none(trained: bool) -> None:
    """Megatron enables gradients around the addition; a forward pass without them would keep every layer's output."""
    layer = Residual(1.0, lambda: torch.nn.RMSNorm(8))
    output, hidden = torch.ones(2, 8, requires_grad=trained), torch.ones(2, 8)
    with torch.enable_grad():
        assert layer(True, False)((output, None), hidden, 0.0).requires_grad == trained


def test_engines_have_no_more_workers_than_heads_under_one_norm() -> None:
    settings = family_config("olmoe")
    vllm_layout(settings, 2)
    with pytest.raises(ConfigError, match=r"rollout.tp=4 is more than num_key_value_heads=2 .* one of \[1, 2\]"):
        vllm_layout(settings, 4)
