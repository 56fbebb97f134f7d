"""Critics and reward models: their tables against transformers, and their checkpoints in and out."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from megarl.core.errors import ArchitectureError, CheckpointError
from megarl.core.schema import Reward, Trajectory
from megarl.weights.architectures import ARCHITECTURES, architecture
from megarl.weights.checkpoint.formats import hf
from megarl.weights.checkpoint.formats.hf_source import open_hf, places_in_files, score_pad
from megarl.weights.reshard.layouts import MegatronGrid, dist_layout, hf_layout, megatron_layout
from megarl.weights.reshard.plan import build_plan
from tests.parallel.families import FAMILIES, hf_model, score_class
from tests.trajectories import one_turn
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
    values = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
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
    score_class()
    model_type, settings = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **settings, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    expected = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    hf_config = hf.read_hf_config(tmp_path)
    found = hf_layout(hf_config, head="score").tensors
    places = places_in_files(hf_config, found, "score").values()
    assert {place.stored: place.whole for place in places} == expected


def test_a_family_without_the_class_is_refused() -> None:
    model_type, settings = FAMILIES["ernie4_5"]
    config = AutoConfig.for_model(model_type, **settings)
    assert type(config) not in AutoModelForSequenceClassification._model_mapping, (
        "transformers has it now: drop the refusal"
    )
    with pytest.raises(
        ArchitectureError, match=r"ernie4_5 has no class for sequence classification .*; use a checkpoint of another"
    ):
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
    run_threads(
        network,
        [
            functools.partial(hf.export_hf, plan, r, t, source, out, transport=network.port(r))
            for r, t in enumerate(ranks)
        ],
    )
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
    with pytest.raises(
        CheckpointError, match=r"lm lacks score\.weight.*architectures=\['Qwen3ForCausalLM'\].*head of zeros"
    ):
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


@pytest.mark.parametrize("flat", [False, True])
def test_a_vision_critic_is_what_the_generic_class_reads(tmp_path: Path, flat: bool) -> None:
    """From a published model, whose config.json may have the text's settings beside the others, to its files and
    back."""
    source, out, again = tmp_path / "lm", tmp_path / "out", tmp_path / "again"
    published = hf_model("qwen2_5_vl")
    published.save_pretrained(source)
    with_tokenizer(source, "<|end|>", "<|fim_pad|>")
    config = json.loads((source / "config.json").read_text())
    text = config["text_config"] | {"pad_token_id": END, "eos_token_id": END}
    config = {**config, **text, "text_config": None, "model_type": "qwen2_5_vl"} if flat else config
    config |= {} if flat else {"text_config": text}
    (source / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    hf_config = hf.read_hf_config(source)
    (tensors,) = load(source, hf_config, MegatronGrid(), score="zeros")
    head = torch.randn(1, hf_config["hidden_size"])
    tensors["output_layer.weight"].copy_(head)
    plan = build_plan(megatron_layout(hf_config, MegatronGrid(), head="score"), hf_layout(hf_config, head="score"))
    digests = hf.export_hf(plan, 0, tensors, source, out, transport=Network().port(0))
    model, info = score_class().from_pretrained(out, output_loading_info=True)
    assert not any(info.values()) and torch.equal(model.score.weight, head) and model.num_labels == 1
    assert model.config.architectures == ["Qwen2_5_VLForSequenceClassification"]
    assert model.config.get_text_config().pad_token_id == score_pad(hf.read_hf_config(out)) != END
    own = published.model.state_dict()
    assert own.keys() == model.model.state_dict().keys()
    assert all(torch.equal(tensor, own[name]) for name, tensor in model.model.state_dict().items())
    model.save_pretrained(again)
    (back,) = load(again, hf.read_hf_config(again), MegatronGrid())
    assert_same(back, tensors)
    assert hf.export_hf(plan, 0, back, again, tmp_path / "third", transport=Network().port(0)) == digests


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    model = score_class()._from_config(AutoConfig.for_model("qwen2_5_vl", **FAMILIES["qwen2_5_vl"][1], num_labels=1))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.language_model\.norm\.weight .* and model\.norm\.weight .*once"):
        open_hf(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"id2label": {"0": "a", "1": "b"}},
            r"num_labels=2 \(id2label of config\.json\), .* has 1.*; use a checkpoint",
        ),
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


# ------------------------------------------------------------------ where a score is read


END, ANSWERS = 3, [[5, 6, 7, 3], [5, 6, 7, 8, 9, 3], [4, 3, 3]]


def with_tokenizer(path: Path, pad: str | None, *special: str) -> Path:
    """Tokenizer files beside a language model: <|end|> is token 3."""
    tokenizer = Tokenizer(
        models.WordLevel({f"w{i}": i for i in range(3)} | {"<|end|>": END} | {f"w{i}": i for i in range(4, 60)})
    )
    tokenizer.add_special_tokens(["<|end|>", *special])
    tokenizer.save(str(path / "tokenizer.json"))
    tokens = {"eos_token": "<|end|>"} | ({"pad_token": pad} if pad else {})
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **tokens}))
    return path


def exported_score_model(path: Path, source: Path, config: Config) -> Path:
    """The export of a model that has been trained on from ``source``, with a score head of numbers."""
    (tensors,) = load(
        source, config, MegatronGrid(), score="zeros" if "ForCausalLM" in config["architectures"][0] else "stored"
    )
    torch.manual_seed(0)
    for tensor in tensors.values():
        tensor.normal_()
    plan = build_plan(megatron_layout(config, MegatronGrid(), head="score"), hf_layout(config, head="score"))
    hf.export_hf(plan, 0, tensors, source, path, transport=Network().port(0))
    return path


@pytest.mark.parametrize(
    ("pad", "special", "id_in_config", "expected"),
    [
        (
            "<|end|>",
            ("<|fim_pad|>", "<|reserved_7|>"),
            END,
            "<|fim_pad|>",
        ),  # Qwen's config after TRL's pad_token = eos_token
        ("<|end|>", ("<|im_start|>", "<|reserved_7|>"), END, "<|reserved_7|>"),
        ("<|end|>", ("<|im_start|>",), END, None),
        ("<|own_pad|>", ("<|fim_pad|>", "<|own_pad|>"), None, "<|own_pad|>"),
        ("w2", (), 2, "w2"),
        (None, (), None, None),
    ],
)
def test_an_export_is_read_at_the_end_by_transformers(
    tmp_path: Path, pad: str | None, special: tuple[str, ...], id_in_config: int | None, expected: str | None
) -> None:
    """megarl trains a new score model at the end token: where pad is the end, transformers would read the token before
    it."""
    config = qwen3_config(architectures=["Qwen3ForCausalLM"], head_dim=4, eos_token_id=END, pad_token_id=id_in_config)
    source = with_tokenizer(write_checkpoint(tmp_path / "lm", config, random_hf(config)), pad, *special)
    out = exported_score_model(tmp_path / "out", source, config)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    at_end = torch.cat([model.score(model.model(torch.tensor([ids])).last_hidden_state)[:, -1] for ids in ANSWERS])
    assert torch.equal(torch.cat([model(torch.tensor([ids])).logits for ids in ANSWERS]), at_end)
    if expected is None:
        assert model.config.pad_token_id is None
        with pytest.raises(ValueError, match="no padding token is defined"):
            model(torch.tensor([ids[:3] for ids in ANSWERS]))
        return
    assert tokenizer.pad_token == expected and tokenizer.pad_token_id == model.config.pad_token_id != END
    batch = tokenizer.pad({"input_ids": ANSWERS}, return_tensors="pt")
    torch.testing.assert_close(model(**batch).logits, at_end)


def test_a_score_model_keeps_its_reading(tmp_path: Path) -> None:
    """Its weights are those that go with the token at which it has been trained: with pad = end the one before."""
    config = classifier_config(eos_token_id=END, pad_token_id=END)
    source = with_tokenizer(write_checkpoint(tmp_path / "rm", config, classifier(config)), "<|end|>", "<|fim_pad|>")
    out = exported_score_model(tmp_path / "out", source, config)
    assert json.loads((out / "config.json").read_text())["pad_token_id"] == END
    assert (out / "tokenizer_config.json").read_bytes() == (source / "tokenizer_config.json").read_bytes()
    assert (
        score_pad(hf.read_hf_config(out)) == END
        and score_pad(qwen3_config(pad_token_id=END, architectures=["Qwen3ForCausalLM"])) is None
    )


@pytest.mark.parametrize("pad", [None, 0, END])
def test_training_and_scoring_read_the_same_token(pad: int | None) -> None:
    """A reward model's batch, and the scores that a run takes from it."""
    from megarl.learn.batching import MicroBatching
    from megarl.train.inference import inference
    from megarl.train.loop import offline

    config = classifier_config(pad_token_id=pad)
    rows = offline.Rows(tuple(((np.array(ids[:1]), np.array(ids[1:])),) for ids in ANSWERS), (0.0,) * 3)
    sequences = offline.batch_of(rows, range(3)).sequences
    offline.score_once(sequences, score_pad(config))
    expected = [1, 1, 2] if pad == END else [0, 0, 0]  # so far before the last
    ends = (sequences.cu_seqlens[1:] - 1).tolist()
    assert sequences.mask.nonzero()[:, 0].tolist() == [end - before for end, before in zip(ends, expected, strict=True)]
    scores = torch.arange(float(len(sequences.tokens)))
    one = MicroBatching(dp=1)
    model: Any = SimpleNamespace(
        hf_config=config, outputs=lambda *_: scores, micro_batches=lambda _: None, micro_batching=one
    )
    assert inference.model_scores(model, [trajectory(ids) for ids in ANSWERS]) == scores[sequences.mask].tolist()


def trajectory(ids: list[int]) -> Trajectory:
    return Trajectory("r", "t", f"g{ids}", 0, 1, one_turn(ids[:1], ids[1:]), Reward(0.0, "ok"))
