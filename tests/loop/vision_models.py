"""Tiny vision-language models with all their files. Idefics3: of what vLLM has, its kind needs neither torchvision nor
mistral_common. Qwen2.5-VL and Qwen3-VL: the families that megarl trains."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)

from megarl.core.imports import do_without_videos

VOCAB = 200
SPECIAL = ("<pad>", "<bos>", "<eos>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
IMAGE = SPECIAL.index("<image>")
WORDS = ("How", "many", "dogs", "?", "Look", ":", "and", "Answer", "three", "3")
IMAGE_TOKENS = 4
"""Vectors of one image: 4 x 4 patches, each 2 x 2 of them shuffled into one."""

# As SmolVLM's: contents are lists of parts. A text would give nothing.
TEMPLATE = """<bos> {% for message in messages %}{% for part in message['content'] -%}
{% if part['type'] == 'image' %}<image>
{%- elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %} {% endfor -%}
{% if add_generation_prompt %}Answer :{% endif %}"""


QWEN_SPECIAL = ("<pad>", "<eos>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_IMAGE = QWEN_SPECIAL.index("<|image_pad|>")
QWEN_UNIT = 28
"""Sides of a resized image are multiples of it: 2 x 2 patches of 14 pixels, one vector."""
QWEN_TEMPLATE = """{% for message in messages %}{% for part in message['content'] -%}
{% if part['type'] == 'image' %}<|vision_start|> <|image_pad|> <|vision_end|>
{%- elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %} {% endfor -%}
{% if add_generation_prompt %}Answer :{% endif %}"""


def word_tokenizer(special: tuple[str, ...], **roles: str) -> PreTrainedTokenizerFast:
    """A tokenizer of ``VOCAB`` words, split at spaces, the special ones first."""
    words = {word: i for i, word in enumerate((*special, *WORDS))}
    words |= {f"t{i}": i for i in range(len(words), VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    others = [token for token in special if token not in roles.values()]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles, additional_special_tokens=others)


def save_tiny_qwen2_5_vl(path: Path, seed: int = 0, *, max_vectors: int = 16) -> Path:
    """An HF checkpoint directory as :func:`save_tiny_idefics3`; an image has at most ``max_vectors`` vectors."""
    return _save_qwen(path, "qwen2_5_vl", seed, max_vectors)


def save_tiny_qwen3_vl(path: Path, seed: int = 0) -> Path:
    """The same of a Qwen3-VL, of whose layers the first two add vectors of images."""
    return _save_qwen(path, "qwen3_vl", seed, 16)


def _save_qwen(path: Path, family: str, seed: int, max_vectors: int) -> Path:
    save_qwen_processor(path, family, max_vectors=max_vectors)
    torch.manual_seed(seed)
    config_class, model_class, _, sizes = QWEN[family]
    model_class(config_class(**sizes)).float().save_pretrained(path)
    return path


def save_qwen_processor(path: Path, family: str = "qwen2_5_vl", *, max_vectors: int = 16) -> Path:
    """The files of a tiny model of the family without its weights."""
    do_without_videos()
    config_class, model_class, processor_class, sizes = QWEN[family]
    images = Qwen2VLImageProcessorPil(
        size={"shortest_edge": QWEN_UNIT**2, "longest_edge": QWEN_UNIT**2 * max_vectors}, patch_size=14, merge_size=2
    )
    processor_class(
        image_processor=images,
        tokenizer=word_tokenizer(QWEN_SPECIAL, eos_token="<eos>", pad_token="<pad>"),
        chat_template=QWEN_TEMPLATE,
    ).save_pretrained(path)
    config = config_class(**sizes, architectures=[model_class.__name__])
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    return path


QWEN_SIZES: dict[str, Any] = {
    "text_config": {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,  # of 32: vLLM's smallest head on CPU
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 128,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.1,
    },
    "image_token_id": QWEN_IMAGE,
    "video_token_id": QWEN_IMAGE + 1,
    "vision_start_token_id": QWEN_IMAGE - 2,
    "vision_end_token_id": QWEN_IMAGE - 1,
    "tie_word_embeddings": False,
}
_WINDOWS = ("window_size", "fullatt_block_indexes")
QWEN3_SIZES: dict[str, Any] = {
    **QWEN_SIZES,
    "text_config": {
        **QWEN_SIZES["text_config"],
        "head_dim": 32,
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
        },
    },
    "vision_config": {
        **{key: value for key, value in QWEN_SIZES["vision_config"].items() if key not in _WINDOWS},
        **{"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]},
    },
}
_OWN_TOWER = {name: value for name, value in QWEN3_SIZES["vision_config"].items() if "deepstack" not in name}
QWEN3_5_SIZES: dict[str, Any] = {**QWEN3_SIZES, "vision_config": _OWN_TOWER}
QWEN: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor, QWEN_SIZES),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor, QWEN3_SIZES),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3VLProcessor, QWEN3_5_SIZES),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, Qwen3VLProcessor, QWEN3_5_SIZES),
}
"""``model_type`` -> transformers' configuration, model and processor, and the configuration's arguments."""


def save_tiny_idefics3(path: Path, seed: int = 0) -> Path:
    """An HF checkpoint directory: random weights far from a symmetric start, a word-level tokenizer, a processor."""
    edge = {"longest_edge": 32}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    fast = word_tokenizer(SPECIAL, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    Idefics3Processor(
        image_processor=images, tokenizer=fast, image_seq_len=IMAGE_TOKENS, chat_template=TEMPLATE
    ).save_pretrained(path)
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.1,
    }
    config = Idefics3Config(
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
        text_config={
            **sizes,
            "model_type": "llama",
            "vocab_size": VOCAB,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        image_token_id=IMAGE,
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    Idefics3ForConditionalGeneration(config).save_pretrained(path)
    return path


def picture(seed: int, width: int = 40, height: int = 30) -> bytes:
    """A PNG file of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


@torch.no_grad()
def transformers_logp(
    path: Path,
    prompt_ids: np.ndarray,
    response_ids: np.ndarray,
    images: list[bytes],
    pixels: tuple[int | None, int | None] = (None, None),
) -> torch.Tensor:
    """fp32 [len(response_ids)]: log-probs of the response by plain transformers; ``prompt_ids`` with placeholders
    expanded. ``pixels``: fewest and most of an image, in place of the processor's own (both or none)."""
    decoded = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
    ids = torch.tensor([[*prompt_ids.tolist(), *response_ids.tolist()]])
    if (family := json.loads((path / "config.json").read_text())["model_type"]) in QWEN:
        do_without_videos()
        _, model_class, processor_class, _ = QWEN[family]
        model: Any = model_class.from_pretrained(path, dtype=torch.float32)
        size = {} if None in pixels else {"size": dict(zip(("shortest_edge", "longest_edge"), pixels, strict=True))}
        made = processor_class.from_pretrained(path).image_processor(decoded, return_tensors="pt", **size)
        inputs = {name: made[name] for name in ("pixel_values", "image_grid_thw")}
        inputs["mm_token_type_ids"] = (ids == QWEN_IMAGE).int()
    else:
        model = Idefics3ForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
        made = Idefics3Processor.from_pretrained(path).image_processor([decoded], return_tensors="pt")
        inputs = {name: made[name] for name in ("pixel_values", "pixel_attention_mask")}
    logp = model.eval()(input_ids=ids, **inputs).logits.float().log_softmax(-1)[0]
    at = torch.arange(len(prompt_ids) - 1, ids.shape[1] - 1)
    return logp[at, ids[0, at + 1]]
