"""A small, randomly initialised HF checkpoint with a tokenizer of its own, for jobs that start from nothing.

What is written is an ordinary checkpoint directory: plain ``transformers`` and vLLM load it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from megarl.core.config.schema import FromScratchConfig
from megarl.core.durable import replace_directory
from megarl.core.errors import ConfigError

PAD, UNK, USER, ASSISTANT, END = SPECIAL_TOKENS = ("<|pad|>", "<|unk|>", "<|user|>", "<|assistant|>", "<|end|>")
"""Their ids are 0..4. ``<|end|>`` is the end-of-sequence token. A character outside the corpus reads as ``<|unk|>``."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ '<|user|>' + message.content }}{% elif "
    "message.role == 'assistant' %}{{ '<|assistant|>' + message.content + '<|end|>' }}{% else %}{{ "
    "raise_exception('role ' + message.role + ' is not user or assistant') }}{% endif %}{% endfor %}{% if "
    "add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+ ?|\s+"
"""A word with the space before it, one digit, an operator with the spaces around it, or other space. The alternatives
cover every character, so decoding is joining. Digits stay alone: a number's tokens are then its places."""

ALPHABET = "0123456789+-*/=()., "
"""Characters that are known whatever the corpus holds: answers may need a digit that no question has."""


def create(
    path: str | os.PathLike[str], config: FromScratchConfig, corpus: Iterable[str], seed: int, characters: str = ""
) -> None:
    """Write config.json, model.safetensors (float32), tokenizer files and generation_config.json to a new directory.

    ``corpus`` are prompts as the model will see them, without the chat template; ``characters`` are those of answers.
    The same arguments write the same bytes. The directory appears whole or not at all.

    Raises ConfigError when the directory exists, the model type is none of ``MODELS``, heads do not group, or the
    vocabulary is smaller than the corpus' characters.
    """
    path = Path(path)
    if path.exists():
        raise ConfigError(
            f"model.path {path} exists already; remove it or choose another path to make a model from scratch"
        )
    if config.model_type not in MODELS:
        raise ConfigError(
            f"model.from_scratch.model_type={config.model_type!r} is not known; known: {', '.join(MODELS)}"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"model.from_scratch: num_key_value_heads {config.num_key_value_heads} does not divide "
            f"num_attention_heads {config.num_attention_heads}"
        )
    tokenizer = train_tokenizer(corpus, config.vocab_size, characters)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _quiet():
            _model(config, seed).save_pretrained(temporary)
        _save_tokenizer(tokenizer, temporary, config.max_position_embeddings)
        replace_directory(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def train_tokenizer(corpus: Iterable[str], vocab_size: int, characters: str = "") -> Tokenizer:
    """A byte-pair tokenizer over the corpus' characters and ``characters``, with exactly ``vocab_size`` ids; what
    training does not fill is named ``<|unused_i|>``. Raises ConfigError when the characters alone do not fit.
    """
    texts = list(corpus)
    alphabet = sorted(set(ALPHABET).union(characters, *texts))
    needed = len(SPECIAL_TOKENS) + len(alphabet)
    if vocab_size < needed:
        raise ConfigError(
            f"model.from_scratch.vocab_size={vocab_size} is too small: the rows have {len(alphabet)} characters, "
            f"with the special tokens at least {needed} are needed"
        )
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    free = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(f"<|unused_{i}|>", special=True, normalized=False) for i in range(free)])
    assert tokenizer.get_vocab_size() == vocab_size, (
        f"tokenizer has {tokenizer.get_vocab_size()} ids, wanted {vocab_size}"
    )
    return tokenizer


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar: the job draws its own."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNK,
        eos_token=END,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder, save_jinja_files=False)


MODELS: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
"""Dense families, which differ in nothing that ``FromScratchConfig`` could set."""


def _model(config: FromScratchConfig, seed: int) -> PreTrainedModel:
    make_config, make_model = MODELS[config.model_type]
    hf_config = make_config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        initializer_range=config.initializer_range,
        sliding_window=None,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index(END),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = make_model(hf_config).to(torch.float32)
        # transformers leaves the pad token's row 0 and never trains it. Here it is a token like any other, and the
        # slope of a norm at 0 is 1/√eps: one that is sampled would be most of a step's gradient.
        with torch.no_grad():
            model.get_input_embeddings().weight[hf_config.pad_token_id].normal_(0.0, config.initializer_range)
    model.generation_config = GenerationConfig(
        eos_token_id=SPECIAL_TOKENS.index(END), pad_token_id=SPECIAL_TOKENS.index(PAD), do_sample=True
    )
    return model
