"""A model from nothing: an ordinary checkpoint, whose tokenizer keeps digits apart and loses no text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.config.schema import FromScratchConfig
from megarl.core.errors import CheckpointError, ConfigError, DataError
from megarl.core.schema import Task
from megarl.learn.models.from_scratch import ALPHABET, MODELS, SPECIAL_TOKENS, VISION, create, train_tokenizer
from megarl.tasks import ChatTokenizer, check_prompts
from megarl.weights.architectures import architecture
from megarl.weights.checkpoint.formats.hf_source import read_hf_config

SMALL = FromScratchConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                          num_key_value_heads=1, head_dim=8)  # fmt: skip
QUESTION = "State the final answer to the following arithmetic problem: {} {} {} ="
CORPUS = [QUESTION.format(a, op, b) for a in range(0, 100, 7) for b in range(0, 100, 9) for op in "+-"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model"
    create(path, SMALL, CORPUS, seed=1)
    return path


def test_characters_of_answers_are_known() -> None:
    """Answers in a tag, say: else their letters were ``<|unk|>``, and no verifier could read them."""
    answer = "<answer>12</answer>"
    known = train_tokenizer(CORPUS, 64, answer)
    assert known.decode(known.encode(answer).ids) == answer
    assert "<|unk|>" in train_tokenizer(CORPUS, 64).encode(answer).tokens


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> ChatTokenizer:
    return ChatTokenizer.open(model_path)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_transformers_loads_it(model_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path)
    assert type(model).__name__ == "Qwen3ForCausalLM" and model.dtype == torch.float32
    assert model.config.vocab_size == 128 and model.config.num_hidden_layers == 2 and model.config.eos_token_id == 4
    assert model.generation_config.eos_token_id == 4
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()
    config = json.loads((model_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]


def test_no_token_has_an_embedding_of_zeros(model_path: Path) -> None:
    """A norm's slope there is 1/√eps: one such token in an answer would be most of the gradient."""
    weights = load_file(model_path / "model.safetensors")["model.embed_tokens.weight"]
    norms = weights.norm(dim=1)
    assert norms.min() > 0.5 * norms.mean()


JOINED = "qwen3_5"
"""Its files join tensors of the table; a job trains it in ``tests/loop/test_vision_job.py``."""


@pytest.mark.parametrize("model_type", sorted(set(MODELS) - {VISION, JOINED}))
def test_every_family_is_one_that_has_a_table(model_type: str, tmp_path: Path) -> None:
    create(tmp_path / "m", replace(SMALL, model_type=model_type), CORPUS, seed=1)
    config = read_hf_config(tmp_path / "m")
    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    table = architecture(config)
    assert {table.name_in_files(name): shape for name, shape in table.tensors(config).items()} == stored


def test_the_same_arguments_write_the_same_bytes(model_path: Path, tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    create(tmp_path / "again", SMALL, CORPUS, seed=1)
    create(tmp_path / "other", SMALL, CORPUS, seed=2)
    assert torch.equal(before, torch.random.get_rng_state()), "the caller's random state is not ours to move"
    for file in model_path.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    weights = "model.safetensors"
    assert (tmp_path / "other" / weights).read_bytes() != (model_path / weights).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "other"]


def test_the_light_tokenizer_is_transformers_tokenizer(model_path: Path, tokenizer: ChatTokenizer) -> None:
    reference = AutoTokenizer.from_pretrained(model_path)
    assert len(reference) == tokenizer.vocab_size == 128
    assert reference.eos_token_id == 4 and tokenizer.eos_ids == (4,)
    conversation = [*user("12 + 3 ="), {"role": "assistant", "content": "15"}, *user("1 - 4 =")]
    for messages in (user(CORPUS[3]), conversation):
        ids = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert tokenizer.prompt_ids(messages).tolist() == ids
        assert tokenizer.prompt_ids(messages).dtype == np.int32
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert [p.tolist() for p in tokenizer.encode_prompts([user(t) for t in CORPUS[:3]])] == [
        tokenizer.prompt_ids(user(t)).tolist() for t in CORPUS[:3]
    ]


def test_a_chain_sum_is_short_and_every_digit_a_token(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.prompt_ids(user(QUESTION.format(12, "+", 34)))
    assert len(ids) <= 18
    one, two = tokenizer.response_ids("1")[0], tokenizer.response_ids("2")[0]
    assert tokenizer.response_ids("-1221").tolist() == [tokenizer.response_ids("-")[0], one, two, two, one, 4]
    assert [one, two] == [i for i in ids.tolist() if i in (one, two)]


@settings(max_examples=100)
@given(st.text(alphabet="".join(sorted(set(ALPHABET).union(*CORPUS)))))
def test_text_of_known_characters_round_trips(tokenizer: ChatTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.prompt_ids(user(text))) == text
    assert tokenizer.decode(tokenizer.response_ids(text)) == text


def test_an_unknown_character_is_seen_not_lost(tokenizer: ChatTokenizer) -> None:
    assert SPECIAL_TOKENS.index("<|unk|>") in tokenizer.prompt_ids(user("1 € 2"))


def test_every_id_of_the_vocabulary_decodes(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.decode(range(128))
    assert tokenizer.decode([0, 2, 3, 4, 127]) == ""


@pytest.mark.parametrize("vocab_size", [48, 64, 128, 400])
def test_the_vocabulary_has_exactly_the_wanted_size(vocab_size: int) -> None:
    tokenizer = train_tokenizer(CORPUS, vocab_size)
    assert tokenizer.get_vocab_size() == vocab_size
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab_size))
    again = Tokenizer.from_str(tokenizer.to_str())
    assert again.decode(again.encode(CORPUS[5]).ids) == CORPUS[5]


def test_bad_input_is_refused_and_leaves_nothing(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size=20 is too small: the rows have \d+ characters"):
        create(tmp_path / "m", FromScratchConfig(vocab_size=20), CORPUS, 1)
    with pytest.raises(ConfigError, match="num_key_value_heads 3 does not divide num_attention_heads 4"):
        create(tmp_path / "m", FromScratchConfig(num_key_value_heads=3), CORPUS, 1)
    with pytest.raises(ConfigError, match="model_type='qwen9' is not known; known: qwen3"):
        create(tmp_path / "m", FromScratchConfig(model_type="qwen9"), CORPUS, 1)
    with pytest.raises(ConfigError, match="exists already"):
        create(model_path, SMALL, CORPUS, 1)
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_checkpoint_is_named(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer.json is missing"):
        ChatTokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((model_path / "tokenizer.json").read_bytes())
    with pytest.raises(CheckpointError, match="no chat template"):
        ChatTokenizer.open(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(CheckpointError, match="no end-of-sequence token"):
        ChatTokenizer.open(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    assert ChatTokenizer.open(tmp_path).eos_ids == (4,)


def test_long_prompts_are_named_before_the_job(tokenizer: ChatTokenizer) -> None:
    tasks = [Task(f"t/{i}", "s", tuple(user("1 " * n)), "", {}) for i, n in enumerate([2, 3, 9])]
    check_prompts(tasks, tokenizer, 20, path="a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: row 3: prompt has 20 tokens, rollout.max_prompt_tokens is 8"):
        check_prompts(tasks, tokenizer, 8, path="a.parquet")


def test_a_role_that_the_template_refuses(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(DataError, match="refuses the prompt: role system is not user or assistant"):
        tokenizer.prompt_ids([{"role": "system", "content": "x"}])
