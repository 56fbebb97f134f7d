"""A tiny vision-language model with all its files. Idefics3: of what vLLM has, its kind needs neither torchvision nor
mistral_common."""

from __future__ import annotations

import io
from pathlib import Path

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
)

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


def save_tiny_idefics3(path: Path, seed: int = 0) -> Path:
    """An HF checkpoint directory: random weights far from a symmetric start, a word-level tokenizer, a processor."""
    words = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
    words |= {f"t{i}": i for i in range(len(words), VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=list(SPECIAL[3:]),
    )
    edge = {"longest_edge": 32}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
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
    path: Path, prompt_ids: np.ndarray, response_ids: np.ndarray, images: list[bytes]
) -> torch.Tensor:
    """fp32 [len(response_ids)]: log-probs of the response by plain transformers; ``prompt_ids`` with placeholders
    expanded."""
    model = Idefics3ForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    processor = Idefics3Processor.from_pretrained(path)
    decoded = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
    pixels = processor.image_processor([decoded], return_tensors="pt")
    ids = torch.tensor([[*prompt_ids.tolist(), *response_ids.tolist()]])
    inputs = {name: pixels[name] for name in ("pixel_values", "pixel_attention_mask")}
    logp = model(input_ids=ids, **inputs).logits.float().log_softmax(-1)[0]
    at = torch.arange(len(prompt_ids) - 1, ids.shape[1] - 1)
    return logp[at, ids[0, at + 1]]
