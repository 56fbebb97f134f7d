"""A vision-language model from nothing: transformers, its processor and our tokenizer open it and agree."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from megarl.config.schema import FromScratchConfig, VisionTowerConfig
from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Task
from megarl.learn.models.from_scratch import DEEPSTACK, HYBRID, IMAGE, VISION, VISION_TOKENS, create
from megarl.run.run_dir.prepare import model_recipe, with_prompt_limit
from megarl.tasks import ChatTokenizer, chat_messages, generate, read_rows
from megarl.tasks.image_processor import Processor
from megarl.weights.architectures import architecture
from megarl.weights.checkpoint.formats.hf import read_hf_config
from megarl.weights.checkpoint.formats.hf_source import open_hf
from tests.unit.small_job import config_of

SMALL = FromScratchConfig(
    model_type=VISION, vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32,
    vision=VisionTowerConfig(depth=3, hidden_size=32, intermediate_size=48, full_attention_every=2),
)  # fmt: skip
CORPUS = ["How many red shapes?", "Where is the red shape? A) left B) right", "Which digit?"]
ASK = ({"role": "user", "content": "<image>How many red shapes?"},)
TEXT_MODELS = {
    "qwen3": "da6320a2b8ba62dc",
    "qwen2": "de84e0c0f77f48da",
    "llama": "b3cc6f542e3613e2",
    "mistral": "748b15ace622065c",
}
"""Digests of the tokenizer's files and config.json of text models, as they were before there was a vision tower."""


@torch.no_grad()
@pytest.mark.parametrize("model_type", [DEEPSTACK, HYBRID])
def test_the_other_families_are_made_too(tmp_path: Path, model_type: str) -> None:
    """Heads have a width of their own; the files have the tensors of the table."""
    small = replace(SMALL, model_type=model_type, head_dim=24, num_hidden_layers=3)
    create(tmp_path / "model", small, CORPUS, seed=1)
    path, hf_config = tmp_path / "model", read_hf_config(tmp_path / "model")
    if model_type == DEEPSTACK:
        assert hf_config["rope_parameters"]["mrope_section"] == [4, 4, 4]
        assert hf_config["vision_config"]["deepstack_visual_indexes"] == [0, 1]
    else:
        assert hf_config["rope_parameters"]["mrope_section"] == [2, 2, 2]
        assert hf_config["layer_types"] == ["linear_attention", "linear_attention", "full_attention"]
    assert open_hf(path).shapes == architecture(hf_config).tensors(hf_config)
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    processor, logits = AutoProcessor.from_pretrained(path), []
    for seed in (28, 29):
        image = Image.open(io.BytesIO(picture(seed))).resize((28, 28))
        logits.append(model(**processor(text=[f"{IMAGE}How"], images=[[image]], return_tensors="pt")).logits[0, -1])
    assert float((logits[0] - logits[1]).abs().max()) > 1e-5


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model"
    create(path, SMALL, CORPUS, seed=1)
    return path


def picture(width: int, height: int | None = None) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(width).integers(0, 256, (height or width, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def id_of(tokenizer: ChatTokenizer, text: str) -> int:
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token(i) == text)


def seen_task(image: bytes) -> Task:
    return Task("rows/0", "vision/count", ASK, "", {"ground_truth": "3"}, response="3", images=(image,))


def test_transformers_loads_it_and_its_answer_depends_on_the_image(vision_model: Path) -> None:
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(vision_model).eval()
    config = json.loads((vision_model / "config.json").read_text())
    assert model.dtype == torch.float32 and config["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
    assert [config[f"{name}_token_id"] for name in ("vision_start", "vision_end", "image", "video")] == [5, 6, 7, 8]
    assert config["text_config"]["rope_parameters"]["mrope_section"] == [4, 6, 6]
    assert config["vision_config"]["temporal_patch_size"] == 2 and config["vision_config"]["out_hidden_size"] == 64
    processor = AutoProcessor.from_pretrained(vision_model)
    logits = []
    for size in (28, 28, 29):
        inputs = processor(
            text=[ChatTokenizer.open(vision_model).render(chat_messages(seen_task(picture(size))))],
            images=[[Image.open(io.BytesIO(picture(size)))]], return_tensors="pt",
        )  # fmt: skip
        with torch.no_grad():
            logits.append(model(**inputs).logits[0, -1])
    assert torch.equal(logits[0], logits[1]) and not torch.allclose(logits[0], logits[2], atol=1e-3)
    assert torch.isfinite(logits[0]).all()


@pytest.mark.parametrize(
    ("size", "tokens"), [((28, 28), 4), ((56, 56), 16), ((400, 400), 16), ((14, 14), 1), ((56, 28), 8), ((5, 5), 1)]
)
def test_an_image_has_a_token_for_each_merged_patch_up_to_the_most(
    vision_model: Path, size: tuple[int, int], tokens: int
) -> None:
    tokenizer = ChatTokenizer.open(vision_model)
    ids = Processor.open(vision_model).prompt_ids(
        tokenizer.render(chat_messages(seen_task(picture(*size)))), [picture(*size)]
    )
    assert ids.tolist().count(id_of(tokenizer, "<|image_pad|>")) == tokens


def test_special_tokens_stay_whole_and_the_light_tokenizer_agrees(vision_model: Path) -> None:
    light, reference = ChatTokenizer.open(vision_model), AutoTokenizer.from_pretrained(vision_model)
    conversation = [*chat_messages(seen_task(picture(28))), {"role": "assistant", "content": "3"},
                    {"role": "user", "content": "Which digit?"}]  # fmt: skip
    text = light.render(conversation)
    assert text == (
        "<|user|><|vision_start|><|image_pad|><|vision_end|>How many red shapes?<|assistant|>3<|end|><|user|>"
        "Which digit?<|assistant|>"
    )
    assert text == AutoProcessor.from_pretrained(vision_model).apply_chat_template(
        conversation, add_generation_prompt=True
    )
    assert reference.encode(text, add_special_tokens=False) == light.prompt_ids(conversation).tolist()
    for number, token in enumerate(VISION_TOKENS, 5):
        assert light.prompt_ids([{"role": "user", "content": f"a{token}b"}]).tolist().count(number) == 1
    assert light.decode(light.rendered_ids(text)) == "How many red shapes?3Which digit?"
    assert len(reference) == light.vocab_size == 96 and light.end_id == 4


def test_a_part_of_another_kind_is_refused(vision_model: Path) -> None:
    with pytest.raises(DataError, match="a part of a content is video, not image or text"):
        ChatTokenizer.open(vision_model).prompt_ids([{"role": "user", "content": [{"type": "video"}]}])


def test_the_same_arguments_write_the_same_bytes(vision_model: Path, tmp_path: Path) -> None:
    create(tmp_path / "again", SMALL, CORPUS, seed=1)
    assert {file.name for file in vision_model.iterdir()} == {file.name for file in (tmp_path / "again").iterdir()}
    for file in vision_model.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize(
    ("changes", "tower", "message"),
    [
        ({"head_dim": 16}, {}, r"head_dim=16 is not hidden_size / num_attention_heads = 64 / 2"),
        ({"hidden_size": 12, "head_dim": 6}, {}, r"head_dim=6 must be a multiple of 2 and at least 8"),
        ({}, {"hidden_size": 36}, r"vision.hidden_size=36 must be a multiple of 4 \* num_heads = 8"),
        ({}, {"window_size": 30}, r"vision.window_size=30 must be a multiple of patch_size \* spatial_merge_size = 14"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, int], tower: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        create(tmp_path / "m", replace(SMALL, **changes, vision=replace(SMALL.vision, **tower)), CORPUS, 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model_type", sorted(TEXT_MODELS))
def test_files_of_text_models_are_those_from_before(model_type: str, tmp_path: Path) -> None:
    config = FromScratchConfig(model_type=model_type, num_hidden_layers=1)
    create(tmp_path / "m", config, ["What is 12 + 34 =", "a b"], 3, "xyz")
    assert Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json")).token_to_id(VISION_TOKENS[0]) is None
    names = sorted(file.name for file in (tmp_path / "m").iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                     "tokenizer_config.json"]  # fmt: skip
    digest = hashlib.sha256()
    for name in names:
        if name != "model.safetensors":  # random numbers, whose last bits are a machine's own
            digest.update((tmp_path / "m" / name).read_bytes())
    assert digest.hexdigest()[:16] == TEXT_MODELS[model_type]


def test_the_recipe_of_a_text_model_names_no_tower_and_the_longest_prompt_counts_image_tokens(tmp_path: Path) -> None:
    text = config_of(tmp_path / "text")
    assert not [name for name in model_recipe(text, ([], "")) if "vision" in name]
    data = tmp_path / "seen" / "data"
    paths = {split: data / f"{split}.parquet" for split in ("train", "eval", "warm_start")}
    generate("shapes", paths, {"train": 6, "eval": 4, "warm_start": 6}, seed=1)
    create(tmp_path / "seen" / "model", SMALL, CORPUS, seed=1)
    taskset = replace(text.taskset, generate=None, **{split: str(path) for split, path in paths.items()})
    model = replace(text.model, path=str(tmp_path / "seen" / "model"), from_scratch=SMALL)
    rollout = replace(text.rollout, max_prompt_tokens=None)
    seen = replace(
        text, run=replace(text.run, dir=str(tmp_path / "seen")), taskset=taskset, model=model, rollout=rollout
    )
    assert model_recipe(seen, ([], ""))["model.from_scratch.vision.patch_size"] == 7
    tokenizer, processor = ChatTokenizer.open(model.path), Processor.open(model.path)
    rows = [row for split, path in paths.items() for row in read_rows(path, require_response=split == "warm_start")]
    lengths = [len(processor.prompt_ids(tokenizer.render(chat_messages(row)), row.images)) for row in rows]
    assert with_prompt_limit(seen).rollout.max_prompt_tokens == max(lengths)
