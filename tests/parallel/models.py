"""A tiny seeded Qwen3 as an HF checkpoint, for grid tests."""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.weights.checkpoint.formats.hf_source import open_hf
from megarl.weights.reshard import layout

VOCAB = 200  # no multiple of the padded vocabulary's divisor


def save_tiny_qwen3(path: Path, *, tied: bool = False, seed: int = 0, layers: int = 4) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
            initializer_range=0.15,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
            rms_norm_eps=1e-6,
        )
    )
    for name, p in model.named_parameters():
        if "norm" in name:  # ones would hide a norm that is not loaded
            p.data.add_(0.2 * torch.randn_like(p))
    model.save_pretrained(path)
    return path


def logical_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The logical tensors of an HF checkpoint."""
    source = open_hf(path)
    try:
        return {name: source.read(name, layout.whole(shape)) for name, shape in source.shapes.items()}
    finally:
        source.close()
