"""A model that vLLM's CPU kernels do not compute, or compute as another function, is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import ConfigError
from megarl.run.checks.grids import check_engine
from megarl.weights.architectures.complete import complete

DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 200,
    "max_position_embeddings": 128,
    "rope_theta": 1e4,
}
MOE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT = {
    **DENSE,
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 64,
    "v_head_dim": 12,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


@pytest.mark.parametrize("config", [DENSE, MOE, LATENT, {**LATENT, "q_lora_rank": None}])
def test_what_vllm_computes_passes(config: dict[str, Any]) -> None:
    check_engine("a/model", complete(config))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**DENSE, "head_dim": 24}, ("head_dim=24", "a/model", "32, 64")),
        ({**MOE, "hidden_size": 48}, ("hidden_size=48", "multiple of 32")),
        ({**LATENT, "kv_lora_rank": 256}, ("kv_lora_rank=256", "qk_rope_head_dim=64", "512 with 64")),
        ({**LATENT, "qk_rope_head_dim": 32}, ("qk_rope_head_dim=32",)),
        ({k: v for k, v in LATENT.items() if k != "scoring_func"}, ('add "scoring_func": "sigmoid"',)),
        ({k: v for k, v in LATENT.items() if k != "topk_method"}, ('add "topk_method": "noaux_tc"',)),
    ],
)
def test_what_it_does_not_is_refused_with_the_mend(config: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        check_engine("a/model", complete(config))
    for word in words:
        assert word in str(refused.value)


def test_latent_attention_is_seen_though_config_json_leaves_its_width_out(tmp_path: Path) -> None:
    """The engine's options are made from the file: the width of DeepSeek's latent is transformers' own default."""
    from megarl.config.schema import RolloutConfig
    from megarl.run.supervise.process_specs import cpu_options

    for left_out in ("nothing", "kv_lora_rank"):
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in LATENT.items() if k != left_out}))
        assert "CPU_MLA" in cpu_options(str(tmp_path), RolloutConfig())
