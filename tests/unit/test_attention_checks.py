"""Attention that TransformerEngine or vLLM would compute in another way is refused before launch."""

from __future__ import annotations

import pytest

from megarl.config.schema import ModelConfig
from megarl.core.errors import ConfigError
from megarl.learn.models.specs import check_layers
from megarl.run.checks.grids import check_growth
from megarl.weights.architectures.complete import complete
from tests.parallel.families import FAMILIES

TE = ModelConfig(transformer_impl="transformer_engine")


def config_of(family: str, **changes: object) -> dict:
    model_type, values = FAMILIES[family]
    return complete({"model_type": model_type, **values, **changes})


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("mistral", "a window of attention of 9 tokens"),
        ("lfm2", "short convolutions in place of attention in some layers"),
        ("solar_open", "YaRN"),
        ("ministral3", "queries that grow with their position"),
    ],
)
def test_what_transformer_engine_does_not_compute(family: str, part: str) -> None:
    message = rf"transformer_engine, but the {family} model has {part}, which .*transformer_impl to local"
    with pytest.raises(ConfigError, match=message):
        check_layers(TE, config_of(family))
    check_layers(ModelConfig(), config_of(family))
    check_layers(TE, config_of("mistral", sliding_window=None))


def test_vllm_is_told_how_queries_grow() -> None:
    check_growth("model", config_of("ministral3"), context=128)
    check_growth("model", config_of("ministral3", llama_4_scaling=None), context=10)
    with pytest.raises(ConfigError, match=r'with 11 tokens .* add "llama_4_scaling": {"original_max_position_embedd'):
        check_growth("model", config_of("ministral3", llama_4_scaling=None), context=11)
