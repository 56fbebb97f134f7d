"""The tables against transformers' own models, and the messages for what a table does not cover."""

from __future__ import annotations

import ast
import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from megarl.core.errors import ArchitectureError
from megarl.weights.architectures import ARCHITECTURES, architecture
from megarl.weights.architectures.complete import complete
from megarl.weights.architectures.megatron_config import gpt_kwargs, transformer_kwargs
from megarl.weights.architectures.rope import Rope, ropes
from megarl.weights.architectures.table import Op, Stage
from megarl.weights.checkpoint.formats.hf_source import read_config_json, read_hf_config
from tests.parallel.families import FAMILIES, WITH_CLASS
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


def test_every_family_is_on_the_page() -> None:
    page = Path("docs/models.md").read_text()
    assert [table for name, table in ARCHITECTURES.items() if f"\n| {name} | {table.models} | " not in page] == []


def test_what_megatron_is_told() -> None:
    settings = qwen3_config()
    found = architecture(settings)
    assert transformer_kwargs(found, settings) == {
        "mla": False,
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
    assert gpt_kwargs(found, settings) == {
        "vocab_size": 70,
        "max_sequence_length": 64,
        "rotary_base": 10000.0,
        "share_embeddings_and_output_weights": False,
    }


def family_config(family: str, **changes: Any) -> dict[str, Any]:
    """config.json of one of the tiny models of the grid tests, as transformers writes it."""
    from transformers import AutoConfig

    model_type, settings = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **settings).to_dict()
    return {key: value for key, value in (config | changes).items() if value is not ABSENT}


ABSENT = object()


def told(family: str, **changes: Any) -> dict[str, Any]:
    settings = complete(family_config(family, **changes))
    found = architecture(settings)
    return transformer_kwargs(found, settings) | gpt_kwargs(found, settings)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("mixtral", {"num_moe_experts": 4, "moe_ffn_hidden_size": 96, "moe_layer_freq": 1, "layernorm_epsilon": 1e-5}),
        ("mixtral", {"moe_router_score_function": "softmax", "moe_router_pre_softmax": False, "moe_router_topk": 2}),
        ("qwen3_moe", {"moe_router_pre_softmax": False, "moe_ffn_hidden_size": 40, "ffn_hidden_size": 96}),
        ("qwen3_moe_mixed", {"moe_router_pre_softmax": True, "moe_layer_freq": [1, 1, 0, 1]}),
        ("deepseek_v3", {"moe_layer_freq": [0, 1, 1, 1], "moe_shared_expert_intermediate_size": 80, "mla": True}),
        ("deepseek_v3", {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}),
        (
            "deepseek_v3",
            {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5},
        ),
        ("deepseek_v3", {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0, "kv_channels": 12}),
        ("qwen2", {"add_qkv_bias": True, "qk_layernorm": False, "share_embeddings_and_output_weights": True}),
        ("glm4_moe", {"rotary_percent": 0.5, "qk_layernorm": True, "moe_layer_freq": [0, 1, 1, 1]}),
        ("glm4", {"add_qkv_bias": True}),
        ("glm4_unbiased", {"add_qkv_bias": False}),
        ("smollm3", {"no_rope_freq": [0, 1, 0, 1]}),
        ("qwen2_moe", {"moe_shared_expert_gate": True, "moe_shared_expert_intermediate_size": 56}),
        ("deepseek_v2", {"moe_router_topk_scaling_factor": 1.5, "moe_router_pre_softmax": True}),
        ("llama3", {"rotary_base": 5e5, "add_qkv_bias": False}),
    ],
)
def test_what_megatron_is_told_of_a_family(family: str, expected: dict[str, Any]) -> None:
    found = told(family)
    assert {key: found[key] for key in expected} == expected


def test_groups_that_limit_nothing_are_left_out() -> None:
    """Megatron would rank them by another number of experts than transformers."""
    found = told("deepseek_v3", n_group=1, topk_group=1)
    assert found["moe_router_num_groups"] is None and found["moe_router_group_topk"] is None


def test_rope_of_the_published_deepseek() -> None:
    scaling = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    found = told("deepseek_v3", rope_parameters=ABSENT, rope_theta=10000, rope_scaling=scaling)
    expected = {key: float(value) for key, value in scaling.items() if key not in ("type", "factor")}
    expected |= {"rope_type": "yarn", "rotary_scaling_factor": 40.0, "rotary_base": 10000.0}
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("mscale", "all_dim", "expected"),
    # transformers: cos and sin are scaled by the ratio where both are given, else by the factor's own; the softmax by
    # all_dim
    [(None, None, (1.0, 0.0)), (0.7, None, (1.0, 0.0)), (0.7, 0.0, (1.0, 0.0)), (0.7, 0.9, (0.7, 0.9))],
)
def test_yarn_scales(mscale: float | None, all_dim: float | None, expected: tuple[float, float]) -> None:
    rope = {**FAMILIES["deepseek_v3_yarn"][1]["rope_parameters"], "mscale": mscale, "mscale_all_dim": all_dim}
    found = told("deepseek_v3_yarn", rope_parameters=rope)
    assert (found["mscale"], found["mscale_all_dim"]) == expected


def test_rope_theta_as_transformers_5_writes_it() -> None:
    settings = qwen3_config(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    del settings["rope_theta"]
    assert gpt_kwargs(architecture(settings), settings)["rotary_base"] == 5e5


@pytest.mark.parametrize(("family", "theta"), [("llama2", 1e4), ("mixtral", 1e6)])
def test_rope_theta_that_nobody_wrote(family: str, theta: float) -> None:
    """Llama 2 has none in its config.json: transformers' own default counts."""
    from transformers import AutoConfig

    assert told(family, rope_parameters=ABSENT)["rotary_base"] == theta
    assert AutoConfig.for_model(FAMILIES[family][0]).rope_parameters["rope_theta"] == theta


def class_says(settings: dict[str, Any]) -> dict[str, Any]:
    """Every key explicit, with the values of transformers' class; those of a language model beside the others."""
    from transformers import AutoConfig

    found = AutoConfig.for_model(**copy.deepcopy(settings)).to_dict()
    return {**found.pop("text_config", {}), **found}


def told_or_refused(settings: dict[str, Any]) -> Any:
    try:
        found = architecture(settings)
        parts = (transformer_kwargs, gpt_kwargs, ropes)
        return found.sizes(settings), *(part(found, settings) for part in parts)
    except ArchitectureError as error:
        return str(error)


def left_out(settings: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(key, the settings without it), of nested keys too."""
    for key, value in settings.items():
        rest = {k: v for k, v in settings.items() if k != key}
        if key != "model_type":
            yield key, rest
        for inner in value if isinstance(value, dict) else ():
            yield f"{key}.{inner}", {**rest, key: {k: v for k, v in value.items() if k != inner}}


def older(settings: dict[str, Any]) -> dict[str, Any]:
    """config.json as transformers 4 wrote it, of a vision-language model too: all keys of the language model beside the
    others."""
    settings = {**settings.get("text_config", {}), **settings}
    rope = settings["rope_parameters"]
    rope = dict(rope.get("full_attention", rope))  # of the layers that the older key was for
    rest = {k: v for k, v in settings.items() if k not in ("rope_parameters", "text_config")}
    if "full_attention" in rope:
        rest["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    rest["rope_theta"] = rope.pop("rope_theta")
    if "mrope_section" in rope:
        rope = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    return {**rest, "rope_scaling": rope if rope.get("rope_type") != "default" else None}


@pytest.mark.parametrize("spelling", ["transformers 5", "transformers 4"])
@pytest.mark.parametrize("family", WITH_CLASS)
def test_keys_left_out_mean_what_transformers_takes(tmp_path: Path, family: str, spelling: str) -> None:
    """Every key of every family's config.json once, and all that a published file may leave out."""
    settings = json.loads(json.dumps(family_config(family)))
    settings = older(settings) if spelling == "transformers 4" else settings
    wrong = []
    for key, shorter in [("nothing", settings), *left_out(settings)]:
        (tmp_path / "config.json").write_text(json.dumps(shorter))
        try:
            expected: Any = told_or_refused(class_says(shorter))
        except (StrictDataclassError, KeyError, ValueError):  # as a rope without its factor
            with pytest.raises(ArchitectureError):
                read_hf_config(tmp_path)
            continue
        if told_or_refused(read_hf_config(tmp_path)) != expected:
            wrong.append(key)
    assert not wrong


@pytest.mark.parametrize("family", [name for name in WITH_CLASS if "text_config" not in FAMILIES[name][1]])
def test_a_full_configuration_is_read_as_it_is(tmp_path: Path, family: str) -> None:
    settings = json.loads(json.dumps(family_config(family)))
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert read_config_json(tmp_path) == settings
    assert read_hf_config(tmp_path) == settings
    assert told_or_refused(read_hf_config(tmp_path)) == told_or_refused(settings)


def test_a_configuration_that_transformers_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Our own message where the table does not cover it; else it is taken as it is, and a warning tells so."""
    settings = family_config("qwen3")
    (tmp_path / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": "4"}))
    with pytest.raises(ArchitectureError, match=r"num_hidden_layers='4'; it must be a positive integer"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**settings, "initializer_range": "small"}))
    assert read_hf_config(tmp_path)["initializer_range"] == "small"
    assert "transformers' Qwen3Config refuses it" in caplog.text and "initializer_range" in caplog.text


def test_linear_rope_scaling() -> None:
    settings = complete(family_config("llama2", rope_parameters=ABSENT, rope_scaling={"type": "linear", "factor": 4}))
    assert ropes(architecture(settings), settings) == (Rope("linear", 1e4, 4.0),) * 4


def test_windows_and_ropes_of_each_layer() -> None:
    assert told("mistral")["window_size"] == (8, 0)  # Megatron counts the tokens before
    assert told("qwen2_windows")["window_attn_skip_freq"] == [0, 0, 1, 1]
    assert "window_size" not in told("qwen2", sliding_window=8, use_sliding_window=False)
    settings = complete(family_config("smollm3"))
    assert [rope is None for rope in ropes(architecture(settings), settings)] == [False, True, False, True]


def test_head_dim_is_optional() -> None:
    settings = qwen3_config(head_dim=None, hidden_size=16)
    assert architecture(settings).sizes(settings).head == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type='gpt2' has no table; supported: deepseek_v2, deepseek_v3, "),
        ({"model_type": None}, r"model_type=None has no table"),
        (
            {"model_type": "mistral3"},
            r"take out the language model \(mistral or ministral3\) with the code in docs/exp",
        ),
        ({"attention_bias": True}, r"qwen3 with attention_bias=True is not supported, only False"),
        ({"hidden_act": "gelu"}, r"qwen3 with hidden_act='gelu' is not supported, only 'silu'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4}}, r"rope_type='longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_type='linear' without a factor"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5 is not supported, only 1\.0"),
        ({"max_position_embeddings": None}, r"max_position_embeddings=None; it must be a positive integer"),
        ({"num_hidden_layers": "4"}, r"num_hidden_layers='4'; it must be a positive integer"),
        ({"num_attention_heads": 5}, r"num_key_value_heads=2 does not divide num_attention_heads=5"),
    ],
)
def test_what_no_table_covers_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        architecture(qwen3_config(**changes))


LLAMA3 = FAMILIES["llama3"][1]["rope_parameters"]
YARN = FAMILIES["deepseek_v3_yarn"][1]["rope_parameters"]
GEMMA4_ROPES = FAMILIES["gemma4_text"][1]["rope_parameters"]
PROPORTIONAL = GEMMA4_ROPES["full_attention"]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "llama3",
            {"rope_parameters": {**LLAMA3, "low_freq_factor": 0}},
            r"low_freq_factor=0; it must be a positive number",
        ),
        (
            "solar_open",
            {"rope_parameters": {**FAMILIES["solar_open"][1]["rope_parameters"], "partial_rotary_factor": 0.5}},
            r"yarn and partial_rotary_factor=0\.5 is not supported",
        ),
        (
            "llama2",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            r"rope_type='dynamic' is not supported",
        ),
        ("granitemoe", {"attention_sinks": True}, r"granitemoe with attention_sinks=True is not supported, only False"),
        ("granitemoeshared", {"shared_intermediate_size": 0}, r"shared_intermediate_size=0; it must be a positive"),
        ("mistral", {"sliding_window": 0}, r"sliding_window=0; it must be a positive integer"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 4}, "vLLM has windows in the first layer and every second"),
        (
            "exaone4",
            {"layer_types": ["full_attention"] * 4},
            r"sliding_window=7 and no sliding_attention in layer_types is not supported: .* sliding_window to null",
        ),
        ("exaone_moe", {"swiglu_limits": [7.0] * 4}, r"exaone_moe with swiglu_limits=\[7\.0, .* only None"),
        ("mixtral", {"num_experts_per_tok": 1}, r"num_experts_per_tok=1 and normalised .* the router gets no gradient"),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": ["dense"]},
            r"mlp_layer_types=\['dense'\]; it must be a list of dense or",
        ),
        ("gemma4_small", {"vocab_size_per_layer_input": 64}, r"vocab_size_per_layer_input=64 .* only vocab_size=200"),
        ("gemma4_small", {"num_kv_shared_layers": 5}, r"num_kv_shared_layers=5 of 6 layers; an earlier layer of each"),
        ("gemma4_small", {"num_kv_shared_layers": 6}, r"num_kv_shared_layers=6 of 6 layers; an earlier layer of each"),
        ("gemma4_text", {"enable_moe_block": True}, r"enable_moe_block=True is not supported, only False"),
        ("gemma4_text", {"num_experts": 4}, r"num_experts=4 is not supported, only None"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, r"use_bidirectional_attention='all' is not supported"),
        (
            "gemma4_text",
            {"per_layer_config": {layer: {"num_key_value_heads": 3} for layer in (2, 3)}},
            r"num_global_key_value_heads=3 does not divide num_attention_heads=4",
        ),
        ("gemma4_text", {"per_layer_config": {1: {"head_dim": 8}}}, r"all full_attention layers must have the same"),
        (
            "gemma4_text",
            {"rope_parameters": {**GEMMA4_ROPES, "full_attention": {**PROPORTIONAL, "factor": 2.0}}},
            r"rope_type='proportional' and factor=2\.0 is not supported, only 1\.0: vLLM ignores",
        ),
        (
            "gemma4_text",
            {"rope_parameters": {**GEMMA4_ROPES, "full_attention": {**PROPORTIONAL, "rope_type": "default"}}},
            r"rope_type='default' and partial_rotary_factor=0\.25 is not supported",
        ),
        ("deepseek_v3", {"rope_interleave": False}, r"rope_interleave=False is not supported"),
        ("deepseek_v3", {"norm_topk_prob": False}, r"norm_topk_prob=False and num_experts_per_tok=4"),
        ("deepseek_v3", {"num_experts_per_tok": 6}, r"num_experts_per_tok=6 and topk_group=2 .*=3; use a checkpoint"),
        (
            "deepseek_v3",
            {"rope_parameters": {**LLAMA3}},
            r"rope_type='llama3' is not supported, only 'default' and 'yarn'",
        ),
        ("deepseek_v3_yarn", {"rope_parameters": {**YARN, "truncate": False}}, r"yarn and truncate=False"),
        ("deepseek_v3_yarn", {"rope_parameters": {**YARN, "attention_factor": 1.2}}, r"yarn and attention_factor=1\.2"),
        ("deepseek_v3_yarn", {"rope_parameters": {**YARN, "mscale": None}}, r"yarn and mscale=None"),
    ],
)
def test_what_megatron_cannot_express_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        architecture(complete(family_config(family, **changes)))


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_table_names_every_parameter_once(name: str) -> None:
    """In one kind of layer and model; rows of layers with and without experts, windows or keys may have one name."""
    found = ARCHITECTURES[name]
    assert found.name == name
    either = (Stage.MOE, Stage.WINDOWED), (Stage.MOE, Stage.GLOBAL), (Stage.DENSE, Stage.GLOBAL)
    kinds = [set(Stage) - set(others) for others in either]
    some = product(kinds, (True, False), ("joint_q", "apart_q"))
    for params in (
        [x for x in found.params if x.stage in kind and x.shares in (None, shares) and absent not in x.hf[0].axes]
        for kind, shares, absent in some
    ):
        for names in ([param.megatron for param in params], [param.te or param.megatron for param in params]):
            assert len(set(names)) == len(names)
        logical = [part for param in params if param.op is not Op.TIED for part in param.hf]
        assert len(set(logical)) == len(logical)
    fused = [part for joint in found.vllm for part in dict.fromkeys(joint.hf)]
    assert len(set(fused)) == len(fused)
    assert set(fused) <= {part for param in found.params for part in param.hf}


def family_files() -> dict[Path, int]:
    """File with tables of families -> number of families in it."""
    folder = Path(__file__).parents[2] / "megarl" / "weights" / "architectures"
    table = ast.parse((folder / "__init__.py").read_text())
    rows = {node.id for node in ast.walk(table) if isinstance(node, ast.Name) and node.id.isupper()}
    imports = (node for node in table.body if isinstance(node, ast.ImportFrom) and node.module)
    found = {
        (node.module or "").rpartition(".")[2]: len(rows & {alias.name for alias in node.names}) for node in imports
    }
    return {folder / f"{name}.py": number for name, number in found.items() if number}


def test_a_file_of_families_is_data() -> None:
    files = family_files()
    assert sum(files.values()) == len(ARCHITECTURES)
    for path, number in files.items():
        text = path.read_text()
        assert "def " not in text and len(text.splitlines()) < 80 * number


def test_a_family_is_named_in_its_file_and_its_row_only() -> None:
    """Everything else follows from the table: a new family needs no line in any other file of the package."""
    package = Path(__file__).parents[2] / "megarl"
    choices = {
        package / "learn" / "models" / "from_scratch.py",
        package / "config" / "schema.py",
        package / "tasks" / "tools" / "formats.py",
    }  # which models can be made again, and names of tool formats
    own = {*family_files(), package / "weights" / "architectures" / "__init__.py"}
    for path in set(package.rglob("*.py")) - choices - own:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Constant) and node.value in ARCHITECTURES), (
                f"{path}:{node.lineno} names {node.value}"
            )


def test_a_config_is_completed_without_transformers_modelling() -> None:
    """It takes seconds to import, and each command reads a config.json."""
    source = """
import sys
from transformers.utils import auto_docstring
from megarl.weights.architectures.complete import complete
assert complete({"model_type": "qwen3"})["hidden_act"] == "silu"
found = {"transformers.modeling_utils", "transformers.models.auto.modeling_auto", "torch._dynamo"} & sys.modules.keys()
assert not found, found
from transformers import Qwen2Config
assert "Qwen2Model" in Qwen2Config.__doc__, "docstrings are written again"
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
