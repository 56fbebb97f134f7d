"""HF checkpoints in and out of any grid, against hand-written shards."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file, save_file

from megarl.core.errors import CheckpointError
from megarl.weights.checkpoint.formats import hf
from megarl.weights.checkpoint.formats.hf_source import read_config_json
from megarl.weights.reshard.buckets import HEADER
from megarl.weights.reshard.layouts import MegatronGrid, hf_layout, megatron_layout
from megarl.weights.reshard.plan import build_plan
from tests.unit.reshard_oracle import (
    Case,
    Config,
    Network,
    Tensors,
    assert_same,
    cases,
    megatron_grid,
    numbered_hf,
    qwen3_config,
    random_hf,
    run_threads,
    unwritten,
)
from tests.unit.test_checkpoint_convert import FP8, deepseek, quantised

fast = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write_checkpoint(folder: Path, config: Config, tensors: Tensors, files: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    names = list(tensors)
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(files):
        part = {name: tensors[name] for name in names[i::files]}
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def export(config: Config, grid: MegatronGrid, tensors: Tensors, source: Path, target: Path, **options: Any) -> Network:
    plan = build_plan(megatron_layout(config, grid), hf_layout(config))
    network = Network()
    ranks = megatron_grid(config, tensors, grid.tp, grid.pp, grid.dp)
    run_threads(
        network,
        [
            functools.partial(hf.export_hf, plan, r, t, source, target, transport=network.port(r), **options)
            for r, t in enumerate(ranks)
        ],
    )
    return network


@fast
@given(case=cases())
def test_every_rank_loads_its_hand_written_shard(tmp_path: Path, case: Case) -> None:
    tensors = random_hf(case.config)
    path = write_checkpoint(tmp_path / "model", case.config, tensors)
    layout = megatron_layout(case.config, MegatronGrid(case.tp, case.pp, case.dp))
    for rank, expected in enumerate(megatron_grid(case.config, tensors, case.tp, case.pp, case.dp)):
        got = unwritten(dict(layout.local_shapes(rank)))
        hf.load_into(path, layout, rank, got)
        assert_same(got, expected)


def test_sharded_files_and_another_dtype(tmp_path: Path) -> None:
    config = qwen3_config()
    tensors = random_hf(config)
    path = write_checkpoint(tmp_path, config, {name: t.bfloat16() for name, t in tensors.items()}, files=3)
    layout = megatron_layout(config, MegatronGrid(2))
    got = unwritten(dict(layout.local_shapes(1)))
    hf.load_into(path, layout, 1, got)
    expected = megatron_grid(config, tensors, 2, 1, 1)[1]
    assert_same(got, {name: t.bfloat16().float() for name, t in expected.items()})


def test_only_the_slices_of_the_rank_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = qwen3_config()
    path = write_checkpoint(tmp_path, config, random_hf(config))
    read = 0
    preadv = os.preadv

    def counting(fd: int, buffers: Any, offset: int) -> int:
        nonlocal read
        read += (size := preadv(fd, buffers, offset))
        return size

    monkeypatch.setattr(os, "preadv", counting)
    layout = megatron_layout(config, MegatronGrid(2, 2))
    got = unwritten(dict(layout.local_shapes(0)))
    hf.load_into(path, layout, 0, got)
    assert read == 4 * sum(t.numel() for t in got.values())  # tp rank 0 of 70 rows has 64 of them: no padding


@fast
@given(case=cases())
def test_export_returns_every_bit(tmp_path: Path, case: Case) -> None:
    tensors = random_hf(case.config)
    source = write_checkpoint(tmp_path / "source", case.config, {})
    grid = MegatronGrid(case.tp, case.pp, case.dp)
    network = export(case.config, grid, tensors, source, tmp_path / "out", bucket_bytes=256)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), tensors)
    assert network.largest_bytes <= 256 + HEADER


def test_export_in_several_files_in_bf16(tmp_path: Path) -> None:
    config = qwen3_config()
    tensors = random_hf(config)
    source = write_checkpoint(tmp_path / "source", config, tensors, files=2)
    out = tmp_path / "deep" / "out"
    export(config, MegatronGrid(2, 2), tensors, source, out, dtype=torch.bfloat16, file_bytes=2000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and sorted(p.name for p in out.glob("*.safetensors")) == files
    assert index["metadata"]["total_size"] == 2 * sum(t.numel() for t in tensors.values())
    got = {name: load_file(out / file)[name] for name, file in index["weight_map"].items()}
    assert_same(got, tensors, torch.bfloat16)
    assert read_config_json(out) == {**config, "dtype": "bfloat16"}
    assert (out / "tokenizer.json").read_text() == "{}"


def test_the_index_counts_a_tensor_that_keeps_its_own_dtype(tmp_path: Path) -> None:
    config = deepseek()
    tensors = numbered_hf(config, False)
    source, out = write_checkpoint(tmp_path / "source", config, {}), tmp_path / "out"
    plan, port = build_plan(hf_layout(config), hf_layout(config)), Network().port(0)
    hf.export_hf(plan, 0, tensors, source, out, dtype=torch.bfloat16, transport=port, file_bytes=2000)
    stored = [t for file in out.glob("*.safetensors") for t in load_file(file).values()]
    assert {t.dtype for t in stored} == {torch.bfloat16, torch.float32}
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored)


def test_transformers_loads_what_was_exported(tmp_path: Path) -> None:
    from transformers import Qwen3ForCausalLM

    config = qwen3_config(tie_word_embeddings=True)
    tensors = random_hf(config)
    source = write_checkpoint(tmp_path / "source", config, {})
    export(config, MegatronGrid(2, 2), tensors, source, tmp_path / "out")
    model = Qwen3ForCausalLM.from_pretrained(tmp_path / "out")
    assert_same({name: p.detach() for name, p in model.named_parameters()}, tensors)


def test_an_older_export_is_replaced_whole_and_a_failed_one_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = qwen3_config()
    old, new = random_hf(config, seed=1), random_hf(config, seed=2)
    source, out = write_checkpoint(tmp_path / "source", config, {}), tmp_path / "out"
    export(config, MegatronGrid(), old, source, out)
    (out / "generation_config.json").write_text("of the old export")
    for weights in ("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "model.onnx"):
        (source / weights).write_bytes(b"of the model before training")

    def disk_full(*args: Any, **keys: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hf, "save_file", disk_full)
        with pytest.raises(OSError, match="no space left"):
            export(config, MegatronGrid(), new, source, out)
    assert_same(load_file(out / "model.safetensors"), old)
    export(config, MegatronGrid(), new, source, out)
    assert_same(load_file(out / "model.safetensors"), new)
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_an_export_of_fp8_weights_says_that_they_are_none(tmp_path: Path) -> None:
    """Trained from DeepSeek's files: what is exported is neither quantised nor has prediction layers."""
    config = qwen3_config(quantization_config=FP8, num_nextn_predict_layers=1)
    source = write_checkpoint(tmp_path / "source", config, {})
    export(qwen3_config(), MegatronGrid(), random_hf(config), source, tmp_path / "out", dtype=torch.bfloat16)
    assert read_config_json(tmp_path / "out") == {**qwen3_config(), "num_nextn_predict_layers": 0, "dtype": "bfloat16"}


def load(path: Path, config: Config) -> None:
    layout = megatron_layout(config, MegatronGrid())
    hf.load_into(path, layout, 0, unwritten(dict(layout.local_shapes(0))))


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    config = qwen3_config()
    tensors = random_hf(config)
    missing = {name: t for name, t in tensors.items() if "layers.2.mlp.up_proj" not in name}
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.2\.mlp\.up_proj\.weight;"):
        load(write_checkpoint(tmp_path / "missing", config, missing), config)
    extra = tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(8)}
    with pytest.raises(CheckpointError, match=r"does not know: model\.layers\.0\.self_attn\.q_proj\.bias;"):
        load(write_checkpoint(tmp_path / "extra", config, extra), config)
    other = tensors | {"model.norm.weight": torch.zeros(9)}
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight in .* has shape \(9,\), config\.json asks for \(8,\)"
    ):
        load(write_checkpoint(tmp_path / "other", config, other), config)


def test_a_tied_checkpoint_may_carry_its_copy(tmp_path: Path) -> None:
    config = qwen3_config(tie_word_embeddings=True)
    tensors = random_hf(config)
    copy = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    load(write_checkpoint(tmp_path / "equal", config, copy), config)
    copy["lm_head.weight"][69, 7] += 1
    with pytest.raises(
        CheckpointError, match=r"tie_word_embeddings=true, so lm_head\.weight must be equal to model\.embed"
    ):
        load(write_checkpoint(tmp_path / "other", config, copy), config)


def test_fp8_weights_and_prediction_layers_of_a_file(tmp_path: Path) -> None:
    """What DeepSeek publishes goes straight into a rank: blocks dequantised, layers that the layout leaves out left
    alone."""
    config = deepseek()
    tensors = numbered_hf(config, mtp=True)
    stored, meant = quantised({n: t / t.max() for n, t in tensors.items()}, 4, 3)
    stored["model.layers.4.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    path = write_checkpoint(tmp_path, {**config, "quantization_config": FP8}, stored)
    layout = hf_layout(config)
    got = unwritten(dict(layout.local_shapes(0)), torch.bfloat16)
    hf.load_into(path, layout, 0, got)
    assert_same(got, {name: meant[name] for name in layout.tensors}, torch.bfloat16)


def test_broken_directories_are_named(tmp_path: Path) -> None:
    config = qwen3_config()
    with pytest.raises(CheckpointError, match=r"has no config\.json; set model\.path"):
        hf.read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        hf.read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object, found list"):
        hf.read_hf_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        load(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path, config)
    path = write_checkpoint(tmp_path / "sharded", config, random_hf(config), files=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is listed in"):
        load(path, config)


def test_a_configuration_is_read_again_where_its_file_has_changed(tmp_path: Path) -> None:
    """What a caller does to a configuration is not in the next one's, nor is an older file."""
    (tmp_path / "config.json").write_text(json.dumps(qwen3_config()))
    first = hf.read_hf_config(tmp_path)
    expected = dict(first)
    first["rope_parameters"]["rope_theta"] = first["hidden_size"] = None
    assert hf.read_hf_config(tmp_path)["rope_parameters"]["rope_theta"] is not None
    assert hf.read_hf_config(tmp_path)["hidden_size"] == expected["hidden_size"]
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"hidden_size": 8}))
    assert hf.read_hf_config(tmp_path)["hidden_size"] == 8
