"""A small, randomly initialised HF checkpoint with a new tokenizer, for jobs without a pretrained model.

It is an ordinary checkpoint directory: plain ``transformers`` and vLLM load it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
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
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLImageProcessorPil,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)
from transformers.utils import logging

from megarl.config.schema import FromScratchConfig
from megarl.core.durable import replace_directory
from megarl.core.errors import ConfigError
from megarl.core.imports import do_without_videos

PAD, UNK, USER, ASSISTANT, END = SPECIAL_TOKENS = ("<|pad|>", "<|unk|>", "<|user|>", "<|assistant|>", "<|end|>")
"""Ids 0..4. ``<|end|>`` is the end-of-sequence token. A character outside the corpus becomes ``<|unk|>``."""

VISION, DEEPSTACK, HYBRID = "qwen2_5_vl", "qwen3_vl", "qwen3_5"
"""Model families that take images."""
VISION_TOKENS = VISION_START, VISION_END, IMAGE, VIDEO = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Special tokens of these families, with ids 5..8. The processor repeats ``<|image_pad|>`` once for each vector."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ '<|user|>' + message.content }}{% elif "
    "message.role == 'assistant' %}{{ '<|assistant|>' + message.content + '<|end|>' }}{% else %}{{ "
    "raise_exception('role ' + message.role + ' is not user or assistant') }}{% endif %}{% endfor %}{% if "
    "add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

VISION_CHAT_TEMPLATE = (
    "{% macro text(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}{% if "
    f"part.type == 'image' %}}{{{{ '{VISION_START}{IMAGE}{VISION_END}' }}}}"
    "{% elif part.type == 'text' %}{{ part.text }}{% else %}{{ raise_exception('a part of a content is ' + part.type + "
    "', not image or text') }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    + CHAT_TEMPLATE.replace("message.content", "text(message.content)")
)
"""The same template for contents that may be lists of ``{type: image}`` and ``{type: text, text}``."""

PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+ ?|\s+"
"""Pattern of one piece: a word with the space before it, one digit, an operator with the spaces around it, or other
space. The alternatives cover every character, so decoding is joining. Each digit is a separate token."""

ALPHABET = "0123456789+-*/=()., "
"""Characters in every vocabulary: responses may need a digit that no prompt has."""


def create(
    path: str | os.PathLike[str], config: FromScratchConfig, corpus: Iterable[str], seed: int, characters: str = ""
) -> None:
    """Write config.json, model.safetensors (float32), tokenizer files and generation_config.json to a new directory.

    ``corpus`` are prompts as model input, without the chat template; ``characters`` are the responses' characters. The
    same arguments write the same bytes. The directory appears complete or not at all.

    Raises ConfigError if the directory exists, the model type is not in ``MODELS``, head counts do not divide, sizes of
    the vision tower do not fit, or the vocabulary is smaller than the corpus' characters.
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
    if config.sees:
        _check_vision(config)
    special = SPECIAL_TOKENS + (VISION_TOKENS if config.sees else ())
    tokenizer = train_tokenizer(corpus, config.vocab_size, characters, special)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _quiet():
            _model(config, seed).save_pretrained(temporary)
            save_tokenizer(tokenizer, temporary, config)
        replace_directory(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def train_tokenizer(
    corpus: Iterable[str], vocab_size: int, characters: str = "", special: Sequence[str] = SPECIAL_TOKENS
) -> Tokenizer:
    """Train a byte-pair tokenizer over the corpus' characters and ``characters``, with exactly ``vocab_size`` ids;
    ``special`` come first, and unused ids are named ``<|unused_i|>``. Raises ConfigError if the characters alone do not
    fit.
    """
    texts = list(corpus)
    alphabet = sorted(set(ALPHABET).union(characters, *texts))
    needed = len(special) + len(alphabet)
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
        special_tokens=list(special),
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
    """Turn off transformers' progress bar within the context: the job draws another one."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _check_vision(config: FromScratchConfig) -> None:
    """Raise ConfigError if sizes of language model or tower do not fit each other."""
    tower, where = config.vision, "model.from_scratch"
    if config.model_type == VISION and config.head_dim * config.num_attention_heads != config.hidden_size:
        raise ConfigError(
            f"{where}.head_dim={config.head_dim} is not hidden_size / num_attention_heads = {config.hidden_size} / "
            f"{config.num_attention_heads}, as {VISION} has it; set one of the three"
        )
    unit = 4 if config.model_type == HYBRID else 2
    if config.head_dim % unit or config.head_dim < 4 * unit:
        raise ConfigError(
            f"{where}.head_dim={config.head_dim} must be a multiple of {unit} and at least {4 * unit} for "
            f"{config.model_type}"
        )
    if tower.hidden_size % (4 * tower.num_heads):
        raise ConfigError(
            f"{where}.vision.hidden_size={tower.hidden_size} must be a multiple of 4 * num_heads = "
            f"{4 * tower.num_heads}: each head turns by the row and the column of a patch"
        )
    if config.model_type == VISION and tower.window_size % (unit := tower.patch_size * tower.spatial_merge_size):
        raise ConfigError(
            f"{where}.vision.window_size={tower.window_size} must be a multiple of patch_size * spatial_merge_size = "
            f"{unit}"
        )


def save_tokenizer(tokenizer: Tokenizer, folder: Path, config: FromScratchConfig) -> None:
    """Write the tokenizer's files, and the processor's for a model that takes images."""
    vision = config.sees
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNK,
        eos_token=END,
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        **({"additional_special_tokens": list(VISION_TOKENS)} if vision else {}),
    )
    if not vision:
        fast.chat_template = CHAT_TEMPLATE
        fast.save_pretrained(folder, save_jinja_files=False)
        return
    tower = config.vision
    do_without_videos()
    token = (tower.patch_size * tower.spatial_merge_size) ** 2  # pixels
    images = Qwen2VLImageProcessorPil(
        size={"shortest_edge": token, "longest_edge": token * tower.max_image_tokens},
        patch_size=tower.patch_size,
        merge_size=tower.spatial_merge_size,
        temporal_patch_size=FRAMES,
    )
    make = Qwen2_5_VLProcessor if config.model_type == VISION else Qwen3VLProcessor
    make(image_processor=images, tokenizer=fast, chat_template=VISION_CHAT_TEMPLATE).save_pretrained(folder)


FRAMES = 2
"""Frames of a patch; an image is used as two equal frames."""
MODELS: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    VISION: (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    DEEPSTACK: (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    HYBRID: (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
}
"""Dense families. They differ in no setting of ``FromScratchConfig`` except the vision towers of three."""
PLACES = 16 * 16
"""Rows of a tower's table of positions, which is stretched over each image."""
LEVELS = 3
"""Most layers that add vectors of images, as in the published models."""


def _model(config: FromScratchConfig, seed: int) -> PreTrainedModel:
    make_config, make_model = MODELS[config.model_type]
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "sliding_window": None,
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index(END),
        "dtype": "float32",
    }
    hf_config = make_config(**(_with_tower(config, sizes) if config.sees else sizes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = make_model(hf_config).to(torch.float32)
        # transformers zeroes the pad token's row and never trains it. Here pad is an ordinary token, and the slope of a
        # norm at 0 is 1/√eps: a sampled pad token would dominate a step's gradient.
        with torch.no_grad():
            model.get_input_embeddings().weight[SPECIAL_TOKENS.index(PAD)].normal_(0.0, config.initializer_range)
    model.generation_config = GenerationConfig(
        eos_token_id=SPECIAL_TOKENS.index(END), pad_token_id=SPECIAL_TOKENS.index(PAD), do_sample=True
    )
    return model


def _with_tower(config: FromScratchConfig, sizes: dict[str, Any]) -> dict[str, Any]:
    """Make the arguments of a vision-language model's config: ``sizes`` of the language model, sizes of the tower,
    token ids."""
    tower, family = config.vision, config.model_type
    # What the last layer adds to images' tokens reaches no other token, and would learn nothing.
    levels = max(1, min(tower.depth, config.num_hidden_layers - 1, LEVELS))
    if family == VISION:
        del sizes["head_dim"]  # this family derives it from hidden_size / num_attention_heads
    if family == HYBRID:
        sizes |= _delta_nets(config)
    dtype, tied = sizes.pop("dtype"), sizes.pop("tie_word_embeddings")
    pairs = config.head_dim // (4 if family == HYBRID else 2)
    # For each of height and width, in Qwen's proportions: 16, 24, 24 of 64, or every third one.
    across = pairs * 3 // 8 if family == VISION else pairs // 3
    sizes["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [pairs - 2 * across, across, across],
        **({} if family == VISION else {"mrope_interleaved": True}),
        **({"partial_rotary_factor": 0.5} if family == HYBRID else {}),
    }
    of_family: dict[str, dict[str, Any]] = {
        VISION: {
            "window_size": tower.window_size,
            "fullatt_block_indexes": list(
                range(tower.full_attention_every - 1, tower.depth, tower.full_attention_every)
            ),
        },
        DEEPSTACK: {"num_position_embeddings": PLACES, "deepstack_visual_indexes": list(range(levels))},
        HYBRID: {"num_position_embeddings": PLACES},
    }
    start, end, image, video = range(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + len(VISION_TOKENS))
    return {
        "text_config": sizes,
        "vision_config": {
            "depth": tower.depth,
            "hidden_size": tower.hidden_size,
            "intermediate_size": tower.intermediate_size,
            "num_heads": tower.num_heads,
            "out_hidden_size": config.hidden_size,
            "patch_size": tower.patch_size,
            "spatial_merge_size": tower.spatial_merge_size,
            "temporal_patch_size": FRAMES,
            **of_family[family],
            "initializer_range": config.initializer_range,
        },
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
        "tie_word_embeddings": tied,
        "dtype": dtype,
    }


def _delta_nets(config: FromScratchConfig) -> dict[str, Any]:
    """Make the settings of gated delta nets: in three of four layers, but not the last one; heads of 128, the width
    that vLLM has on CPUs."""
    last = config.num_hidden_layers - 1
    attends = [layer % 4 == 3 or layer == last for layer in range(config.num_hidden_layers)]
    return {
        "layer_types": ["full_attention" if attention else "linear_attention" for attention in attends],
        "linear_num_key_heads": config.num_key_value_heads,
        "linear_num_value_heads": config.num_attention_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
