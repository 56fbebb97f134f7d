"""Critics and reward models: their tables against transformers, and their checkpoints in and out."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from megarl.architectures import ARCHITECTURES, architecture
from megarl.checkpoint import hf
from megarl.errors import ArchitectureError, CheckpointError
from megarl.reshard.layouts import MegatronGrid, dist_layout, hf_layout, megatron_layout
from megarl.reshard.plan import build_plan
from tests.parallel.families import FAMILIES
from tests.unit.reshard_oracle import (
    Config,
    Network,
    Tensors,
    assert_same,
    qwen3_config,
    random_hf,
    run_threads,
    unwritten,
)
from tests.unit.test_checkpoint_hf import write_checkpoint

SCORED = [name for name, (model_type, _) in FAMILIES.items() if ARCHITECTURES[model_type].has_score_class]
GRIDS = [MegatronGrid(), MegatronGrid(tp=2), MegatronGrid(pp=2), MegatronGrid(tp=2, pp=2, dp=2)]


def classifier_config(**changes: Any) -> Config:
    """A config.json of transformers' Qwen3ForSequenceClassification with one label."""
    values = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return qwen3_config(**(values | {"head_dim": 4, "pad_token_id": 3} | changes))


def classifier(config: Config) -> Tensors:
    """Its tensors, none of them zero."""
    tensors = random_hf(config)
    tensors.pop("lm_head.weight", None)
    return tensors | {"score.weight": torch.randn(1, config["hidden_size"])}


def load(path: Path, config: Config, grid: MegatronGrid, **options: Any) -> list[Tensors]:
    """The local tensors of every rank; what is not loaded is a number that no tensor has."""
    layout = megatron_layout(config, grid, head="score")
    ranks = [unwritten(dict(layout.local_shapes(rank))) for rank in range(grid.world_size)]
    for rank, tensors in enumerate(ranks):
        hf.load_into(path, layout, rank, tensors, **options)
    return ranks


@pytest.mark.parametrize("family", SCORED)
def test_the_tensors_of_transformers(tmp_path: Path, family: str) -> None:
    model_type, settings = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **settings, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    expected = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    assert hf_layout(hf.read_hf_config(tmp_path), head="score").tensors == expected


def test_a_family_without_the_class_is_refused() -> None:
    model_type, settings = FAMILIES["ernie4_5"]
    config = AutoConfig.for_model(model_type, **settings)
    assert type(config) not in AutoModelForSequenceClassification._model_mapping, "transformers has it now: drop the refusal"
    with pytest.raises(ArchitectureError, match=r"ernie4_5 has no class for sequence classification .*; use a checkpoint of another"):
        architecture(config.to_dict(), "score")


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_every_layout_has_the_head_where_megatron_has_it(grid: MegatronGrid, tied: bool) -> None:
    """Whole on every rank of the last stage; and no rank has an output weight, tied or not."""
    config = classifier_config(tie_word_embeddings=tied)
    layout = megatron_layout(config, grid, head="score")
    assert "lm_head.weight" not in layout.tensors and layout.tensors["score.weight"] == (1, 8)
    last = range(grid.world_size - grid.stage_size, grid.world_size)
    for rank in range(grid.world_size):
        layout.check(rank)
        shapes = layout.local_shapes(rank)
        assert shapes.get("output_layer.weight") == ((1, 8) if rank in last else None)
    (copy,) = layout.copies("score.weight")
    assert copy.ranks == tuple(last)
    assert dist_layout(config, head="score").local_shapes(0)["output_layer.weight"] == (1, 8)
    build_plan(layout, hf_layout(config, head="score")).check()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_loaded_and_exported_again(tmp_path: Path, grid: MegatronGrid, tied: bool) -> None:
    config = classifier_config(tie_word_embeddings=tied)
    tensors = classifier(config)
    source = write_checkpoint(tmp_path / "source", config, tensors)
    ranks = load(source, config, grid)
    plan = build_plan(megatron_layout(config, grid, head="score"), hf_layout(config, head="score"))
    network, out = Network(), tmp_path / "out"
    run_threads(network, [functools.partial(hf.export_hf, plan, r, t, source, out, transport=network.port(r)) for r, t in enumerate(ranks)])
    assert_same(load_file(out / "model.safetensors"), tensors)
    model, info = AutoModelForSequenceClassification.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(model).__name__ == "Qwen3ForSequenceClassification" and model.num_labels == 1
    assert model.config.pad_token_id == 3 and torch.equal(model.score.weight, tensors["score.weight"])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("has_copy", [False, True])
def test_a_head_of_zeros_on_a_language_model(tmp_path: Path, tied: bool, has_copy: bool) -> None:
    config = qwen3_config(tie_word_embeddings=tied, head_dim=4, architectures=["Qwen3ForCausalLM"], num_labels=2)
    tensors = random_hf(config)
    if has_copy:  # nobody looks at it: equal to the embedding or not
        tensors["lm_head.weight"] = torch.randn(70, 8)
    source = write_checkpoint(tmp_path / "lm", config, tensors)
    for grid in GRIDS:
        expected = {n: t for n, t in tensors.items() if n != "lm_head.weight"} | {"score.weight": torch.zeros(1, 8)}
        plain = write_checkpoint(tmp_path / "expected", classifier_config(tie_word_embeddings=tied), expected)
        for got, want in zip(load(source, config, grid, score="zeros"), load(plain, config, grid), strict=True):
            assert_same(got, want)
    with pytest.raises(CheckpointError, match=r"lm lacks score\.weight.*architectures=\['Qwen3ForCausalLM'\].*head of zeros"):
        load(source, config, MegatronGrid())


def test_an_exported_critic_of_a_language_model_is_a_classifier(tmp_path: Path) -> None:
    """config.json is the language model's: what transformers must know is written into it, and the rest stays."""
    config = qwen3_config(architectures=["Qwen3ForCausalLM"], head_dim=4, pad_token_id=3, num_labels=2)
    source = write_checkpoint(tmp_path / "lm", config, random_hf(config))
    (tensors,) = load(source, config, MegatronGrid(), score="zeros")
    plan = build_plan(megatron_layout(config, MegatronGrid(), head="score"), hf_layout(config, head="score"))
    hf.export_hf(plan, 0, tensors, source, tmp_path / "out", transport=Network().port(0))
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["architectures"] == ["Qwen3ForSequenceClassification"] and written["pad_token_id"] == 3
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.num_labels == 1 and not model.score.weight.any()
    (again,) = load(tmp_path / "out", written, MegatronGrid())
    assert_same(again, tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, r"num_labels=2 \(id2label of config\.json\), .* has 1.*; use a checkpoint"),
        ({"id2label": None, "num_labels": 5}, r"num_labels=5 \(num_labels of config\.json\)"),
        ({"id2label": None}, r"num_labels=2 \(num_labels"),  # what transformers takes where nothing is said
    ],
)
def test_other_numbers_of_labels_are_refused(tmp_path: Path, changes: Config, message: str) -> None:
    config = classifier_config(**changes)
    path = write_checkpoint(tmp_path, config, classifier(config))
    with pytest.raises(CheckpointError, match=message):
        load(path, config, MegatronGrid())


def test_one_label_may_be_said_by_number(tmp_path: Path) -> None:
    config = classifier_config(id2label=None, num_labels=1)
    load(write_checkpoint(tmp_path, config, classifier(config)), config, MegatronGrid())


def test_a_classifier_is_no_language_model(tmp_path: Path) -> None:
    config = classifier_config(tie_word_embeddings=True)
    path = write_checkpoint(tmp_path, config, classifier(config))
    layout = megatron_layout(config, MegatronGrid())
    with pytest.raises(CheckpointError, match=r"tensors that the model's table does not know: score\.weight"):
        hf.load_into(path, layout, 0, unwritten(dict(layout.local_shapes(0))))
