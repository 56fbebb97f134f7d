"""HF -> Megatron checkpoint -> another cut -> HF, for every family: the same bits, the same digests, and nothing by
halves."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from megarl.ops import slice_digest_reference
from megarl.weights.checkpoint.convert import open_checkpoint
from megarl.weights.checkpoint.convert.convert import (
    Settings,
    convert_hf_to_megatron,
    convert_megatron_to_hf,
    reshard_checkpoint,
)
from megarl.weights.checkpoint.formats.output import MANIFEST
from megarl.weights.reshard.layouts import MegatronGrid
from tests.conftest import examples
from tests.parallel.families import FAMILIES as FAMILY_SETTINGS
from tests.parallel.families import score_class
from tests.unit.reshard_cases import FAMILIES, FamilyCase, Grid, family_cases, qwen3_config
from tests.unit.reshard_oracle import Config, Tensors, assert_same, numbered_hf, random_hf

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [4, 3]}
QUIET = Settings(progress=False)


def write_hf(folder: Path, config: Config, tensors: Tensors) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return folder


def read_hf(folder: Path) -> Tensors:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def digests(folder: Path) -> dict[str, str]:
    tensors = json.loads((folder / MANIFEST).read_text())["tensors"]
    return {name: value["digest"] for name, value in tensors.items()}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor of these tests goes in several blocks, cut in the middle of rows too."""
    monkeypatch.setattr(open_checkpoint, "BLOCK_ELEMENTS", 37)


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_by_another_grid(family: str) -> None:
    @settings(max_examples=examples(3, 12))
    @given(
        case=family_cases(family, "grid"),
        multiple=st.sampled_from([1, 8, 64]),
        file_bytes=st.sampled_from([1000, 1 << 20]),
    )
    def run(case: FamilyCase, multiple: int, file_bytes: int) -> None:
        assert isinstance(case.source, Grid) and isinstance(case.target, Grid)
        tensors = numbered_hf(case.config, case.mtp)
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            write_hf(root / "hf", case.config, tensors)
            common: dict[str, Any] = {"progress": False, "mtp": case.mtp, "verify": True, "file_bytes": file_bytes}
            there = Settings(grid=MegatronGrid(**case.source.settings), vocab_multiple=multiple, **common)  # type: ignore[arg-type]
            again = Settings(grid=MegatronGrid(**case.target.settings), **common)  # type: ignore[arg-type]
            convert_hf_to_megatron(root / "hf", root / "a", there)
            reshard_checkpoint(root / "a", root / "b", settings=again)
            convert_megatron_to_hf(root / "b", root / "c", settings=Settings(**common))
            assert_same(read_hf(root / "c"), tensors)
            expected = {
                n: f"{slice_digest_reference(t, start=(0,) * t.dim(), shape=t.shape):016x}" for n, t in tensors.items()
            }
            assert digests(root / "a") == digests(root / "b") == digests(root / "c") == expected

    run()


@pytest.mark.parametrize("file_bytes", [1000, 1 << 30])
def test_a_vision_score_model_keeps_the_names_of_its_files(
    tmp_path: Path, file_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of transformers' base model, in one file or in several with an index."""
    monkeypatch.setattr(open_checkpoint, "BLOCK_ELEMENTS", 997)  # its tensors are larger than those of the other tests
    config = AutoConfig.for_model("qwen2_5_vl", **FAMILY_SETTINGS["qwen2_5_vl"][1], num_labels=1)
    score_class()(config).save_pretrained(tmp_path / "hf")
    both = Settings(progress=False, verify=True, file_bytes=file_bytes)
    convert_hf_to_megatron(tmp_path / "hf", tmp_path / "megatron", both)
    convert_megatron_to_hf(tmp_path / "megatron", tmp_path / "again", settings=both)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert any(name.startswith("model.language_model.") for name in tensors)
    found = [load_file(file) for file in (tmp_path / "again").glob("*.safetensors")]
    assert_same({name: tensor for file in found for name, tensor in file.items()}, tensors)
    assert (len(found) > 1) is (file_bytes == 1000)
    _, info = score_class().from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(info.values())


def test_small_files_come_along_and_dtypes_are_kept_or_cast(tmp_path: Path) -> None:
    config = qwen3_config(dtype="bfloat16")
    tensors = {name: t.bfloat16() for name, t in random_hf(config).items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    write_hf(tmp_path / "hf", config, tensors)
    convert_hf_to_megatron(tmp_path / "hf", tmp_path / "meg", QUIET)
    assert (tmp_path / "meg/huggingface/tokenizer.json").read_text() == "{}"
    convert_megatron_to_hf(tmp_path / "meg", tmp_path / "same", settings=QUIET)
    got = read_hf(tmp_path / "same")
    assert all(torch.equal(got[n], t) and got[n].dtype == t.dtype for n, t in tensors.items())
    assert json.loads((tmp_path / "same/config.json").read_text()) == config
    convert_megatron_to_hf(tmp_path / "meg", tmp_path / "half", settings=Settings(progress=False, dtype=torch.float16))
    got = read_hf(tmp_path / "half")
    assert all(torch.equal(got[n], t.half()) and got[n].dtype == torch.float16 for n, t in tensors.items())
    assert json.loads((tmp_path / "half/config.json").read_text()) == {**config, "dtype": "float16"}


def deepseek(**changes: Any) -> Config:
    return qwen3_config(
        **{
            "model_type": "deepseek_v3",
            "hidden_size": 8,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 6,
            "first_k_dense_replace": 1,
            "q_lora_rank": 6,
            "kv_lora_rank": 5,
            "qk_nope_head_dim": 3,
            "qk_rope_head_dim": 2,
            "v_head_dim": 4,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "rope_interleave": True,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 1,
            **changes,
        }
    )


def quantised(tensors: Tensors, rows: int, columns: int) -> tuple[Tensors, Tensors]:
    """(what is in the file, what it stands for): projections in blocks of rows x columns, as DeepSeek publishes
    them."""
    stored, meant = (
        dict(tensors),
        {name: t.bfloat16() if "correction_bias" not in name else t for name, t in tensors.items()},
    )
    stored |= meant
    generator = torch.Generator().manual_seed(5)
    for name, weight in tensors.items():
        if "_proj" not in name or "eh_proj" in name:
            continue
        n, m = weight.shape
        scale = torch.rand(-(-n // rows), -(-m // columns), generator=generator) + 0.1
        stored[name] = weight.to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scale
        meant[name] = torch.empty(n, m, dtype=torch.bfloat16)
        for i in range(n):
            for j in range(m):
                meant[name][i, j] = stored[name][i, j].float() * scale[i // rows, j // columns]
    return stored, meant


def test_fp8_blocks_are_dequantised(tmp_path: Path) -> None:
    config = deepseek(num_nextn_predict_layers=0)
    stored, meant = quantised(random_hf(config), 4, 3)
    write_hf(tmp_path / "hf", {**config, "quantization_config": FP8}, stored)
    convert_hf_to_megatron(
        tmp_path / "hf", tmp_path / "meg", Settings(progress=False, verify=True, grid=MegatronGrid(tp=2))
    )
    convert_megatron_to_hf(tmp_path / "meg", tmp_path / "back", settings=QUIET)
    got = read_hf(tmp_path / "back")
    assert got.keys() == meant.keys()
    assert not [n for n, t in meant.items() if got[n].dtype != t.dtype or not torch.equal(got[n], t)]
    assert got["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert "quantization_config" not in written and written["dtype"] == "bfloat16"


@pytest.mark.parametrize("keep", [True, False])
def test_prediction_layers_are_kept_or_dropped(tmp_path: Path, keep: bool) -> None:
    config = deepseek()
    tensors = numbered_hf(config, mtp=True)
    copies = {
        "model.layers.4.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.4.shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    write_hf(tmp_path / "hf", config, tensors | copies)
    chosen = Settings(progress=False, mtp=keep)
    convert_hf_to_megatron(tmp_path / "hf", tmp_path / "meg", chosen)
    convert_megatron_to_hf(tmp_path / "meg", tmp_path / "back", settings=chosen)
    assert_same(
        read_hf(tmp_path / "back"), {n: t for n, t in tensors.items() if keep or not n.startswith("model.layers.4.")}
    )
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert written["num_nextn_predict_layers"] == int(keep)


@pytest.mark.parametrize("tied", [True, False])
def test_a_value_head_is_found_and_kept(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForSequenceClassification, Qwen3Config

    config = Qwen3Config(**qwen3_config(tie_word_embeddings=tied, head_dim=4, num_labels=1, pad_token_id=0))
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path / "hf")
    before = read_hf(tmp_path / "hf")
    assert "score.weight" in before and "lm_head.weight" not in before
    convert_hf_to_megatron(
        tmp_path / "hf", tmp_path / "meg", Settings(progress=False, verify=True, grid=MegatronGrid(tp=2, pp=2))
    )
    stored = json.loads((tmp_path / "meg" / MANIFEST).read_text())
    assert stored["head"] == "value" and stored["tensors"]["score.weight"]["shape"] == [1, 8]
    convert_megatron_to_hf(tmp_path / "meg", tmp_path / "back", settings=QUIET)
    assert_same(read_hf(tmp_path / "back"), before)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "back")
    tokens = torch.arange(1, 9)[None]
    assert torch.equal(again.eval()(tokens).logits, model.eval()(tokens).logits)


def test_a_critic_trained_from_a_language_model_becomes_a_classifier(tmp_path: Path) -> None:
    """Its config.json is the language model's: what transformers needs to know of the head is written into it."""
    from transformers import AutoModelForSequenceClassification

    config = qwen3_config(architectures=["Qwen3ForCausalLM"], pad_token_id=0, head_dim=4)
    tensors = random_hf(config)
    del tensors["lm_head.weight"]
    tensors["score.weight"] = torch.randn(1, 8)
    write_hf(tmp_path / "hf", config, tensors)
    convert_hf_to_megatron(tmp_path / "hf", tmp_path / "meg", QUIET)
    convert_megatron_to_hf(tmp_path / "meg", tmp_path / "back", settings=QUIET)
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(model.score.weight, tensors["score.weight"])
    assert type(model).__name__ == "Qwen3ForSequenceClassification"


def test_a_tied_model_may_carry_an_equal_copy(tmp_path: Path) -> None:
    config = qwen3_config(tie_word_embeddings=True)
    tensors = random_hf(config)
    write_hf(tmp_path / "hf", config, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    convert_hf_to_megatron(tmp_path / "hf", tmp_path / "meg", QUIET)
    convert_megatron_to_hf(tmp_path / "meg", tmp_path / "back", settings=QUIET)
    assert_same(read_hf(tmp_path / "back"), tensors)
