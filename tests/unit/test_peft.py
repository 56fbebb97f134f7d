"""PEFT's files: read as PEFT reads them, written so that PEFT computes the same, refused where megarl would not."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.config.lora import ALL_LINEAR, LoraConfig
from megarl.core.errors import CheckpointError, ConfigError
from megarl.weights.checkpoint.convert import open_checkpoint
from megarl.weights.checkpoint.convert.adapters import merge_adapter, unmerge_adapter
from megarl.weights.checkpoint.convert.convert import Settings
from megarl.weights.checkpoint.formats import peft
from megarl.weights.checkpoint.formats.hf import read_hf_config
from megarl.weights.reshard.adapters import factors_of, file_shapes, linear_modules, saved_whole
from megarl.weights.reshard.layouts import hf_layout
from tests.parallel.families import save as save_family
from tests.parallel.models import VOCAB, save_tiny_qwen3
from tests.parallel.peft_twin import save_adapter

warnings.filterwarnings("ignore", module="peft")

QUIET = Settings(progress=False)
TOKENS = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(5))
LORA = LoraConfig(
    rank=4,
    alpha=6.0,
    targets=["q_proj", "model.layers.1.mlp.down_proj", "gate_proj", "o_proj", "embed_tokens"],
    modules_to_save=["lm_head", "model.norm"],
    rank_pattern={r"layers\.[12]\.self_attn\.q_proj": 2},
    alpha_pattern={"o_proj": 2.5},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("qwen3") / "hf", layers=3)


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return save_adapter(model, LORA)


def loaded(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(TOKENS).logits
    return found


def with_adapter(model: Path, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(loaded(model), adapter).eval()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def files(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("qwen3", LORA),
        ("qwen3", replace(LORA, rslora=True, targets=[ALL_LINEAR, "lm_head", "embed_tokens"], modules_to_save=[])),
        ("qwen3_moe", LoraConfig(rank=3, alpha=5.0)),
    ],
    ids=["patterns, saved modules", "all linear, both ends", "experts"],
)
def test_peft_computes_what_the_merged_model_does(tmp_path: Path, family: str, lora: LoraConfig) -> None:
    base = tmp_path / "hf"
    if family == "qwen3":
        save_tiny_qwen3(base, layers=3)
    else:
        save_family(family, base)
    folder, hf_config = save_adapter(base, lora), read_hf_config(base)
    assert factors_of(hf_config, peft.lora_of(folder, hf_config)) == factors_of(hf_config, lora)
    merge_adapter(base, folder, tmp_path / "merged", replace(QUIET, verify=True))
    beside, merged, plain = with_adapter(base, folder), logits(loaded(tmp_path / "merged")), logits(loaded(base))
    assert error(merged, plain) > 0.05, "the adapter changes nothing"
    assert error(merged, logits(beside)) < 1e-5
    assert error(merged, logits(beside.merge_and_unload())) < 2e-6


def test_merged_weights_equal_pefts(
    model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_checkpoint, "BLOCK_ELEMENTS", 1000)  # several blocks for each tensor, cut within rows
    merge_adapter(model, adapter, tmp_path / "merged", QUIET)
    wanted = with_adapter(model, adapter).merge_and_unload().state_dict()
    for name, value in files(tmp_path / "merged").items():
        assert error(value, wanted[name]) < 1e-6, name


def test_a_sum_is_rounded_once(model: Path, adapter: Path, tmp_path: Path) -> None:
    """Of a bfloat16 model to a float32 one it is not rounded at all."""
    shutil.copytree(model, tmp_path / "base")
    base = {name: tensor.bfloat16() for name, tensor in files(model).items()}
    save_file(base, tmp_path / "base" / "model.safetensors")
    merge_adapter(tmp_path / "base", adapter, tmp_path / "merged", replace(QUIET, dtype=torch.float32))
    merged, own = files(tmp_path / "merged"), load_file(adapter / peft.TENSORS)
    for name, factors in factors_of(read_hf_config(model), LORA).items():
        update = factors.scale * (own[peft.PREFIX + factors.b] @ own[peft.PREFIX + factors.a])
        update = update.t() if factors.is_embedding else update
        assert error(merged[name], base[name].float() + update) < 1e-6, name


def test_layers_of_experts_are_those_of_the_model(tmp_path: Path) -> None:
    """``layers_to_transform`` counts layers, not the experts in them."""
    base = save_family("qwen3_moe", tmp_path / "hf")
    folder = save_adapter(base, LoraConfig(rank=2, targets=["gate_proj"]))
    settings = json.loads((folder / peft.CONFIG).read_text())
    (folder / peft.CONFIG).write_text(json.dumps(settings | {"layers_to_transform": [1]}))
    hf_config = read_hf_config(base)
    found = factors_of(hf_config, peft.lora_of(folder, hf_config)).values()
    layer = [name for name in linear_modules(hf_config) if name.startswith("model.layers.1.mlp.experts.")]
    assert [own.module for own in found] == [name for name in layer if name.endswith("gate_proj")]
    assert len(found) > 2


def test_saved_modules_are_written_whole(model: Path) -> None:
    """An ending would stand for other modules in PEFT than in a model that was adapted by whole names."""
    hf_config = read_hf_config(model)
    written = peft.config_of(LORA, factors_of(hf_config, LORA), "base", ["k_norm"], hf_config=hf_config)
    assert written["modules_to_save"] == [f"model.layers.{layer}.self_attn.k_norm" for layer in range(3)]


def test_config_is_pefts(model: Path, adapter: Path) -> None:
    from peft import LoraConfig as PeftConfig

    written = json.loads((adapter / peft.CONFIG).read_text())
    read = PeftConfig.from_pretrained(adapter).to_dict()
    for key in written.keys() - {"target_modules"}:
        assert read[key] == written[key] and isinstance(read[key], type(written[key])), key
    assert read["target_modules"] == set(written["target_modules"])
    assert written["target_modules"] == [
        *("embed_tokens", "q_proj", "o_proj", "gate_proj", "model.layers.1.mlp.down_proj")
    ]
    assert written["modules_to_save"] == ["lm_head", "model.norm"]
    assert type(written["lora_alpha"]) is int and written["alpha_pattern"] == {"o_proj": 2.5}


CONFIGS: dict[str, dict[str, Any]] = {
    "endings": {"target_modules": ["q_proj", "mlp.up_proj"]},
    "one name": {"target_modules": ["model.layers.2.self_attn.v_proj"]},
    "all linear": {"target_modules": "all-linear"},
    "expression": {"target_modules": r".*layers\.[02]\.(self_attn\.k|mlp\.up)_proj"},
    "excluded": {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]},
    "excluded by expression": {"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*\.1\..*"},
    "layers": {"target_modules": ["down_proj"], "layers_to_transform": [0, 2]},
    "one layer": {"target_modules": ["down_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    "patterns": {
        "target_modules": ["q_proj", "k_proj", "gate_proj"],
        "rank_pattern": {"k_proj": 3, r"layers\.1\..*": 2, "no_such": 9},
        "alpha_pattern": {"mlp.gate_proj": 1, "^model.layers.2.self_attn.q_proj": 7},
        "use_rslora": True,
    },
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "embedding": {"target_modules": ["lm_head", "embed_tokens", "q_proj"], "rank_pattern": {"embed_tokens": 3}},
    "embedding by expression": {"target_modules": r".*(embed_tokens|q_proj)"},
    "saved": {"target_modules": "all-linear", "modules_to_save": ["norm", "layers.1.mlp", "lm_head"]},
    "saved and named": {"target_modules": ["lm_head", "q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_and_scales_are_those_that_peft_finds(model: Path, tmp_path: Path, name: str) -> None:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    adapted = get_peft_model(loaded(model), PeftConfig(r=5, lora_alpha=11, task_type="CAUSAL_LM", **CONFIGS[name]))
    adapted.save_pretrained(tmp_path)
    if CONFIGS[name]["target_modules"] == "all-linear":  # PEFT writes the names that it found
        settings = json.loads((tmp_path / peft.CONFIG).read_text())
        (tmp_path / peft.CONFIG).write_text(json.dumps(settings | {"target_modules": "all-linear"}))
    hf_config = read_hf_config(model)
    lora = peft.lora_of(tmp_path, hf_config)
    factors = factors_of(hf_config, lora)
    tensors = hf_layout(hf_config).tensors
    shapes = file_shapes(factors.values()) | {saved: tensors[saved] for saved in saved_whole(tensors, lora)}
    peft.open_adapter(tmp_path, shapes).close()
    for own in factors.values():
        layer = adapted.base_model.model.get_submodule(own.module)
        assert layer.scaling["default"] == own.scale, own.module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unmerged_is_the_base_but_for_rounding(tmp_path: Path, model: Path, adapter: Path, dtype: torch.dtype) -> None:
    settings = replace(QUIET, dtype=dtype)
    shutil.copytree(model, tmp_path / "base")
    save_file({name: t.to(dtype) for name, t in files(model).items()}, tmp_path / "base" / "model.safetensors")
    merge_adapter(tmp_path / "base", adapter, tmp_path / "merged", settings)
    with pytest.raises(CheckpointError, match="--base"):
        unmerge_adapter(tmp_path / "merged", adapter, tmp_path / "back", settings)
    _, found = unmerge_adapter(tmp_path / "merged", adapter, tmp_path / "back", settings, tmp_path / "base")
    base, back = files(tmp_path / "base"), files(tmp_path / "back")
    assert found is not None
    assert found.different == sum(int((base[name] != back[name]).sum()) for name in base)
    assert found.elements == sum(value.numel() for value in base.values())
    assert 0 < found.largest <= 2 * torch.finfo(dtype).eps
    untouched = [name for name in base if name not in factors_of(read_hf_config(model), LORA)]
    assert all(torch.equal(base[name], back[name]) for name in untouched)


def edited(adapter: Path, target: Path, **values: Any) -> Path:
    shutil.copytree(adapter, target)
    settings = json.loads((target / peft.CONFIG).read_text())
    (target / peft.CONFIG).write_text(json.dumps(settings | values))
    return target


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"use_dora": True}, ["use_dora=True", "merge_and_unload"]),
        ({"bias": "lora_only"}, ["bias='lora_only'", "bias='none'"]),
        ({"lora_bias": True}, ["lora_bias=True"]),
        ({"target_parameters": ["mlp.experts.down_proj"]}, ["target_parameters", "tensor for each expert"]),
        ({"trainable_token_indices": [1]}, ["trainable_token_indices=[1]"]),
        ({"layer_replication": [[0, 2]]}, ["layer_replication"]),
        ({"alora_invocation_tokens": [3]}, ["alora_invocation_tokens"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights='pissa'", "path_initial_model"]),
        ({"something_new": {"a": 1}}, ["something_new={'a': 1}", "does not know"]),
        ({"peft_type": "IA3"}, ["peft_type='IA3'"]),
        ({"r": 0}, ["r=0", "positive integer"]),
        ({"lora_alpha": "8"}, ["lora_alpha='8'", "positive number"]),
        ({"rank_pattern": {"q_proj": -1}}, ["rank_pattern", "positive integers"]),
        ({"alpha_pattern": {"(": 1}}, ["alpha_pattern", "regular expressions"]),
        ({"target_modules": ["embed_position"]}, ["target_modules=['embed_position']", "no linear layer of qwen3"]),
        ({"target_modules": []}, ["target_modules=[]"]),
    ],
    ids=str,
)
def test_other_adapters_are_refused(
    tmp_path: Path, model: Path, adapter: Path, values: dict[str, Any], words: list[str]
) -> None:
    folder = edited(adapter, tmp_path / "adapter", **values)
    with pytest.raises(CheckpointError) as raised:
        peft.lora_of(folder, read_hf_config(model))
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("layer", ["lm_head", "model.embed_tokens"])
def test_a_copy_of_a_layer_is_compared(tmp_path: Path, model: Path, layer: str) -> None:
    """PEFT writes the model's own weight beside an adapter of ``lm_head`` or ``embed_tokens``."""
    shutil.copytree(model, tmp_path / "hf")
    folder = save_adapter(tmp_path / "hf", LoraConfig(rank=4, targets=[layer]))
    tensors = load_file(folder / peft.TENSORS)
    own = load_file(model / "model.safetensors")[f"{layer}.weight"]
    copy = f"{peft.PREFIX}{layer}.base_layer.weight"
    save_file(tensors | {copy: own}, folder / peft.TENSORS)
    merge_adapter(model, folder, tmp_path / "merged", QUIET)
    save_file(tensors | {copy: own + 0.01}, folder / peft.TENSORS)
    with pytest.raises(CheckpointError, match=rf"{layer}.base_layer.weight in .* is not {layer}.weight of"):
        merge_adapter(model, folder, tmp_path / "again", QUIET)


def test_an_embedding_that_computes_logits_too_is_refused(model: Path, adapter: Path) -> None:
    """PEFT adapts inputs alone; merged, the adapter would change logits too."""
    tied = {**read_hf_config(model), "tie_word_embeddings": True}
    with pytest.raises(CheckpointError, match="with the embedding.*tie_word_embeddings.*without embed_tokens"):
        peft.lora_of(adapter, tied)


A = f"{peft.PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
FAULTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda tensors: tensors.pop(A), "lacks model.layers.0.self_attn.q_proj.lora_A.weight"),
    "unknown": (lambda tensors: tensors.update({f"{A}x": torch.zeros(1)}), "which no target of model.lora takes"),
    "shape": (lambda tensors: tensors.update({A: torch.zeros(9, 64)}), "has shape (9, 64), this model's has (4, 64)"),
    "dtype": (lambda tensors: tensors.update({A: torch.zeros(4, 64, dtype=torch.int8)}), "no weight's dtype"),
    "NaN": (lambda tensors: tensors[A].fill_(float("nan")), "has a NaN"),
}


@pytest.mark.parametrize("fault", [*FAULTS, "cut", "no file", "damaged settings"])
def test_damaged_files_are_refused(tmp_path: Path, model: Path, adapter: Path, fault: str) -> None:
    folder = edited(adapter, tmp_path / "adapter")
    path, words = folder / peft.TENSORS, FAULTS[fault][1] if fault in FAULTS else "adapter"
    if fault in FAULTS:
        tensors = load_file(path)
        FAULTS[fault][0](tensors)
        save_file(tensors, path)
    elif fault == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif fault == "no file":
        path.unlink()
    else:
        (folder / peft.CONFIG).write_text("{")
    with pytest.raises(CheckpointError) as raised:
        merge_adapter(model, folder, tmp_path / "merged", QUIET)
    assert words in str(raised.value)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (replace(LORA, rank_pattern={"no_such": 2}), ["rank_pattern has 'no_such'", "q_proj"]),
        (replace(LORA, alpha_pattern={"(": 2.0}), ["alpha_pattern has '('", "no regular expression"]),
        (replace(LORA, targets=["q_pro"]), ["targets has 'q_pro'"]),
    ],
)
def test_settings_that_name_nothing(model: Path, lora: LoraConfig, words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        factors_of(read_hf_config(model), lora)
    assert all(word in str(raised.value) for word in words), raised.value
