"""Wrong inputs: the message names file, tensor, expected and found, and nothing has been written."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megarl.cli import main
from megarl.core.errors import CheckpointError
from megarl.weights.checkpoint.convert.convert import (
    Settings,
    convert_hf_to_megatron,
    convert_megatron_to_hf,
    reshard_checkpoint,
)
from megarl.weights.checkpoint.convert.verify import inspect_checkpoint, render
from megarl.weights.reshard.layouts import MegatronGrid
from tests.unit.reshard_cases import Config, qwen3_config
from tests.unit.reshard_oracle import Tensors, random_hf
from tests.unit.test_checkpoint_convert import FP8, QUIET, deepseek, digests, quantised, write_hf


def without(name: str) -> Callable[[Config, Tensors], None]:
    return lambda config, tensors: tensors.__delitem__(name)


def setting(**changes: Any) -> Callable[[Config, Tensors], None]:
    return lambda config, tensors: config.update(changes)


def tensor(name: str, value: torch.Tensor) -> Callable[[Config, Tensors], None]:
    return lambda config, tensors: tensors.update({name: value})


WRONG: dict[str, tuple[Callable[[Config, Tensors], None], str]] = {
    "missing": (
        without("model.layers.2.mlp.up_proj.weight"),
        r"hf lacks model\.layers\.2\.mlp\.up_proj\.weight; the files",
    ),
    "shape": (
        tensor("model.norm.weight", torch.zeros(9)),
        r"model\.norm\.weight in .*hf/model\.safetensors has shape \(9,\), config\.json asks for \(8,\)",
    ),
    "unknown": (
        tensor("model.layers.0.self_attn.q_proj.bias", torch.zeros(8)),
        r"does not know: model\.layers\.0\.self_attn\.q_proj\.bias",
    ),
    "family": (setting(model_type="mamba"), r"hf/config\.json: model_type='mamba' has no table; supported: .*qwen3"),
    "tied": (
        setting(tie_word_embeddings=True),
        r"hf: config\.json says tie_word_embeddings=true, so lm_head\.weight must be equal",
    ),
    "untied": (
        without("lm_head.weight"),
        r"lacks lm_head\.weight, but config\.json says tie_word_embeddings=false; set it to true",
    ),
    "layers": (setting(num_hidden_layers=3), r"does not know: model\.layers\.3\."),
    "fp8 without config": (
        tensor("model.layers.0.mlp.up_proj.weight", torch.zeros(24, 8).to(torch.float8_e4m3fn)),
        r"config\.json: quantization_config \{\} is not supported, only quant_method 'fp8'",
    ),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_a_wrong_hf_checkpoint(tmp_path: Path, case: str) -> None:
    config = qwen3_config()
    tensors = random_hf(config)
    change, message = WRONG[case]
    change(config, tensors)
    write_hf(tmp_path / "hf", config, tensors)
    with pytest.raises(CheckpointError, match=message):
        convert_hf_to_megatron(tmp_path / "hf", tmp_path / "out", QUIET)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("name", ["mtp.fc.weight", "model.mtp_linear_proj.0.weight"])
def test_prediction_layers_that_transformers_does_not_load(tmp_path: Path, name: str) -> None:
    config, outs = qwen3_config(), (tmp_path / "out", tmp_path / "with")
    tensors = random_hf(config)
    for out, stored in zip(outs, (tensors, {**tensors, name: torch.ones(8, 8)}), strict=True):
        write_hf(tmp_path / f"{out.name}-hf", config, stored)
        convert_hf_to_megatron(tmp_path / f"{out.name}-hf", out, QUIET)
    assert digests(outs[0]) == digests(outs[1])


@pytest.mark.parametrize("keep", [-1, -100, 20, 5])
def test_a_truncated_shard(tmp_path: Path, keep: int) -> None:
    config = qwen3_config()
    write_hf(tmp_path / "hf", config, random_hf(config))
    file = tmp_path / "hf/model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    size = len(whole[:keep])
    wanted = (
        rf"model\.safetensors has {size} bytes, expected {len(whole)} \(up to the end of \S+\)"
        if keep < 0
        else "cannot be read"
    )
    with pytest.raises(CheckpointError, match=wanted):
        convert_hf_to_megatron(tmp_path / "hf", tmp_path / "out", QUIET)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_an_index_that_lies(tmp_path: Path) -> None:
    config = qwen3_config()
    tensors = random_hf(config)
    write_hf(tmp_path / "hf", config, {})
    (tmp_path / "hf/model.safetensors").unlink()
    save_file(dict(list(tensors.items())[1:]), tmp_path / "hf/a.safetensors")
    index = tmp_path / "hf/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "a.safetensors")}))
    with pytest.raises(CheckpointError, match=r"lists model\.embed_tokens\.weight in a\.safetensors, which lacks it"):
        convert_hf_to_megatron(tmp_path / "hf", tmp_path / "out", QUIET)
    save_file(tensors, tmp_path / "hf/b.safetensors")
    index.write_text(json.dumps({"weight_map": {n: "ab"[i % 2] + ".safetensors" for i, n in enumerate(tensors)}}))
    with pytest.raises(
        CheckpointError, match=r"is in .*a\.safetensors and in .*b\.safetensors; a checkpoint has each tensor once"
    ):
        convert_hf_to_megatron(tmp_path / "hf", tmp_path / "out", QUIET)
    index.write_text("{")
    with pytest.raises(CheckpointError, match="is no index of safetensors files"):
        convert_hf_to_megatron(tmp_path / "hf", tmp_path / "out", QUIET)


SCALE = "model.layers.0.mlp.up_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(SCALE), rf"up_proj\.weight in .* is torch\.float8_e4m3fn but {SCALE} is missing"),
        (
            tensor(SCALE, torch.ones(2, 2)),
            r"_scale_inv in .* has shape \(2, 2\), expected \(6, 3\) for .*up_proj\.weight, \(24, 8\)",
        ),
        (tensor("model.x.weight_scale_inv", torch.ones(2, 2)), r"scales model\.x\.weight, which is missing"),
        (
            setting(quantization_config={**FP8, "fmt": "e5m2"}),
            r"'e5m2'.*is not supported, only quant_method 'fp8', fmt 'e4m3'",
        ),
        (setting(quantization_config={"quant_method": "gptq"}), "'gptq'.*is not supported"),
    ],
)
def test_wrong_fp8(tmp_path: Path, change: Callable[[Config, Tensors], None], message: str) -> None:
    config: Config = {**deepseek(num_nextn_predict_layers=0), "quantization_config": FP8}
    stored, _ = quantised(random_hf(config), 4, 3)
    change(config, stored)
    write_hf(tmp_path / "hf", config, stored)
    with pytest.raises(CheckpointError, match=message):
        convert_hf_to_megatron(tmp_path / "hf", tmp_path / "out", QUIET)


# ------------------------------------------------------------------ Megatron's side


@pytest.fixture
def meg(tmp_path: Path) -> Path:
    config = qwen3_config()
    write_hf(tmp_path / "hf", config, random_hf(config))
    convert_hf_to_megatron(tmp_path / "hf", tmp_path / "meg", Settings(progress=False, grid=MegatronGrid(pp=2)))
    return tmp_path / "meg"


def config_of(meg: Path, **changes: Any) -> None:
    file = meg / "huggingface/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-700])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: config_of(m, num_hidden_layers=5),
            r"linear_qkv.* in .*meg has shape \(4, .*\), config\.json asks "
            r"for \(5, ",
        ),
        (
            lambda m: config_of(m, model_type="qwen2"),
            r"meg lacks decoder\.layers\.self_attention\.linear_qkv\.bias; it "
            r"was saved from",
        ),
        (
            lambda m: config_of(m, model_type="llama"),
            r"does not know: "
            r"decoder\.layers\.self_attention\.k_layernorm\.weight",
        ),
        (
            lambda m: config_of(m, vocab_size=999),
            r"embedding\.word_embeddings\.weight in .* has 128 rows, config\.json "
            r"asks for 999",
        ),
        (
            lambda m: config_of(m, tie_word_embeddings=True),
            r"tie_word_embeddings=true, so output_layer\.weight must be "
            r"equal to embedding",
        ),
        (lambda m: config_of(m, model_type="mamba"), r"config\.json: model_type='mamba' has no table"),
        (
            lambda m: shorten(m / "__1_0.distcp"),
            r"__1_0\.distcp has \d+ bytes, expected \d+ or more \(up to the end of "
            r"\S+\)",
        ),
        (lambda m: (m / "__0_0.distcp").unlink(), r"__0_0\.distcp is missing; .*\.metadata has \S+ in it"),
        (
            lambda m: (m / "__0_0.distcp").write_bytes(bytes(99999)),
            r"__0_0\.distcp has 99999 bytes, "
            r"megarl_manifest\.json has \d+ bytes",
        ),
        (
            lambda m: ((m / "megarl_manifest.json").unlink(), (m / "__0_0.distcp").write_bytes(bytes(99999))),
            r"in "
            r".*__0_0\.distcp is no saved tensor",
        ),
        (lambda m: (m / ".metadata").unlink(), r"meg has no \.metadata; give the directory"),
        (lambda m: (m / ".metadata").write_bytes(b"\x80\x04"), r"\.metadata cannot be read"),
        (lambda m: (m / ".metadata").write_bytes(pickle.dumps([1, 2])), r"\.metadata cannot be read"),
        # text that is no UTF-8
        (lambda m: (m / ".metadata").write_bytes(b"\x80\x04\x8c\x01\xff."), r"\.metadata cannot be read"),
        (lambda m: (m / "metadata.json").write_text("{"), r"meg/metadata\.json cannot be read"),
        (lambda m: (m / "metadata.json").write_text("[]"), r"meg/metadata\.json cannot be read"),
        (
            lambda m: (m / "huggingface/config.json").unlink(),
            r"has no huggingface/config\.json; give the HF model .* "
            r"with --config",
        ),
    ],
)
def test_a_wrong_megatron_checkpoint(meg: Path, change: Callable[[Path], Any], message: str) -> None:
    change(meg)
    with pytest.raises(CheckpointError, match=message):
        convert_megatron_to_hf(meg, meg.parent / "out", settings=QUIET)
    assert not (meg.parent / "out").exists()


def test_a_grid_that_does_not_divide_the_model(meg: Path) -> None:
    with pytest.raises(ValueError, match=r"parallel\.tp=3 .* num_attention_heads=4"):
        reshard_checkpoint(meg, meg.parent / "out", settings=Settings(progress=False, grid=MegatronGrid(tp=3)))


# ------------------------------------------------------------------ inspect and the command


def test_inspect_tells_both_formats_apart_and_gives_the_same_digests(meg: Path) -> None:
    expected = digests(meg)
    for path in (meg, meg.parent / "hf"):
        found = inspect_checkpoint(path, digests=True, progress=False)
        assert found.is_whole and found.digests == expected and found.family == "qwen3"
    recorded = inspect_checkpoint(meg)
    assert recorded.digests == expected and "manifest" in recorded.digests_from
    text = render(recorded)
    assert "megatron checkpoint, 11 tensors" in text and text.endswith("none is unknown\n")
    half = inspect_checkpoint(meg, digests=True, dtype=torch.bfloat16, progress=False)
    assert half.digests.keys() == expected.keys() and not set(half.digests.values()) & set(expected.values())


def test_inspect_says_what_is_wrong(tmp_path: Path) -> None:
    config = qwen3_config()
    tensors = random_hf(config)
    del tensors["model.norm.weight"]
    tensors |= {"extra": torch.zeros(1), "model.embed_tokens.weight": torch.zeros(3, 8)}
    write_hf(tmp_path / "hf", config, tensors)
    found = inspect_checkpoint(tmp_path / "hf", digests=True)
    assert found.missing == ["model.norm.weight"] and found.unknown == ["extra"] and not found.is_whole
    assert found.misshapen == ["model.embed_tokens.weight has shape (3, 8), config.json asks for (70, 8)"]
    (tmp_path / "hf/config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    found = inspect_checkpoint(tmp_path / "hf")
    assert "model_type='mamba' has no table" in str(found.problem) and "extra" in found.tensors
    assert "not held against a table" in render(found)


def test_inspect_names_a_damaged_manifest(meg: Path) -> None:
    for text in ("", "[]", '{"tensors": {"a": 1}}'):
        (meg / "megarl_manifest.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"meg/megarl_manifest\.json cannot be read"):
            inspect_checkpoint(meg)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["inspect", "--digests", "--workers", "0"], "--workers 0 must be a positive number"),
        (["reshard", "--vocab-multiple", "0"], "--vocab-multiple 0 must be a positive number"),
        (["reshard", "--file-gib", "nan"], "--file-gib nan must be a positive number"),
        (["reshard", "--tp", "0"], "parallel.tp=0 is not a positive number"),
        (["reshard", "--tp", "2", "--etp", "0"], "parallel.etp=0 is not a positive number"),
    ],
)
def test_the_command_names_a_number_that_cannot_be(
    meg: Path, options: list[str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    tool, *rest = options
    out = [str(meg.parent / "out")] if tool == "reshard" else []
    assert main(["convert", tool, str(meg), *out, *rest]) == 2
    assert message in caplog.text
    assert not (meg.parent / "out").exists()


def test_the_command_and_its_exit_codes(
    tmp_path: Path, meg: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    out = tmp_path / "out"
    assert main(["convert", "reshard", str(meg), str(out), "--tp", "2", "--dtype", "bfloat16", "--verify"]) == 0
    assert "digests of both sides equal" in caplog.text
    assert main(["convert", "megatron-to-hf", str(out), str(tmp_path / "back"), "--config", str(tmp_path / "hf")]) == 0
    assert main(["convert", "hf-to-megatron", str(tmp_path / "back"), str(out)]) == 2
    assert "out exists; give another directory" in caplog.text
    assert main(["convert", "hf-to-megatron", str(tmp_path / "back"), str(out), "--overwrite", "--workers", "0"]) == 2
    capsys.readouterr()
    assert main(["convert", "inspect", str(tmp_path / "back"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"]["lm_head.weight"]["dtype"] == "bfloat16"
    (tmp_path / "back/config.json").unlink()
    assert main(["convert", "inspect", str(tmp_path / "back")]) == 1
