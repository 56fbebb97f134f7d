"""The tables against transformers' own models, and the messages for what a table does not cover."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.architectures import ARCHITECTURES, architecture
from megarl.architectures.table import Stage
from megarl.errors import ArchitectureError
from tests.unit.reshard_oracle import qwen3_config


@pytest.mark.parametrize("tied", [False, True])
def test_qwen3_has_exactly_the_tensors_of_transformers(tied: bool) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings = qwen3_config(tie_word_embeddings=tied)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**{k: v for k, v in settings.items() if k != "model_type"}))
    expected = {
        name: tuple(p.shape) for name, p in model.named_parameters()
    }  # a tied lm_head is no parameter of its own
    assert architecture(settings).tensors(settings) == expected


def test_what_megatron_is_told() -> None:
    settings = qwen3_config()
    found = architecture(settings)
    assert found.transformer_config(settings) == {
        "num_layers": 4,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 2,
        "ffn_hidden_size": 24,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "gated_linear_unit": True,
        "activation": "silu",
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": True,
    }
    assert found.gpt(settings) == {
        "vocab_size": 70,
        "max_sequence_length": 64,
        "rotary_base": 10000.0,
        "share_embeddings_and_output_weights": False,
    }


def test_rope_theta_as_transformers_5_writes_it() -> None:
    settings = qwen3_config(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    del settings["rope_theta"]
    assert architecture(settings).gpt(settings)["rotary_base"] == 5e5


def test_head_dim_is_optional() -> None:
    settings = qwen3_config(head_dim=None, hidden_size=16)
    assert architecture(settings).sizes(settings).head == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type='gpt2' has no table; supported: qwen3"),
        ({"model_type": None}, r"model_type=None has no table"),
        ({"attention_bias": True}, r"qwen3 with attention_bias=True is not supported, only False"),
        ({"hidden_act": "gelu"}, r"qwen3 with hidden_act='gelu' is not supported, only 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, r"rope_type='yarn' is not supported"),
        ({"rope_theta": None}, r"neither rope_theta nor rope_parameters\.rope_theta"),
        ({"num_hidden_layers": "4"}, r"num_hidden_layers='4'; it must be a positive integer"),
        ({"num_attention_heads": 5}, r"num_key_value_heads=2 does not divide num_attention_heads=5"),
    ],
)
def test_what_no_table_covers_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        architecture(qwen3_config(**changes))


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_table_names_every_parameter_once(name: str) -> None:
    found = ARCHITECTURES[name]
    assert found.name == name
    for impl in ("local", "transformer_engine"):
        names = [param.megatron_name(impl, 0) for param in found.params]
        assert len(set(names)) == len(names)
    names = [param.vllm_name(0) for param in found.params]
    assert len(set(names)) == len(names)
    assert all(param.te is None or param.te.endswith("layer_norm_weight") for param in found.params)
    rows = found.rows(3)
    assert len(rows) == sum(3 if param.stage is Stage.LAYER else 1 for param in found.params)


def test_a_family_file_is_data() -> None:
    folder = Path(__file__).parents[2] / "megarl" / "architectures"
    for name in ARCHITECTURES:
        text = (folder / f"{name}.py").read_text()
        assert "def " not in text and len(text.splitlines()) < 80
