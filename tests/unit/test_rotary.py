"""Rotary embedding of packed sequences: the bits of Megatron's own function, forwards and backwards."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from megarl.learn.models.packed import frequencies, rotate_packed
from megarl.weights.architectures import architecture
from megarl.weights.architectures.complete import complete
from megarl.weights.architectures.rope import ropes

LENGTHS = [(4,), (4, 8, 4), (16, 4, 4, 12, 8)]
"""Multiples of 2 * cp, up to cp = 2."""


@dataclass(frozen=True)
class Group:
    """A context-parallel group as far as positions need one."""

    at: int
    of: int

    def rank(self) -> int:
        return self.at

    def size(self) -> int:
        return self.of


@pytest.fixture(scope="module")
def megatron() -> ModuleType:
    """Megatron's module, loaded again: in the one that a process shares the function may be replaced already."""
    spec = importlib.util.find_spec("megatron.core.models.common.embeddings.rope_utils")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("group", [Group(0, 1), Group(0, 2), Group(1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "variant",
    [{}, {"rotary_interleaved": True}, {"multi_latent_attention": True, "mscale": 1.3}],
    ids=["halves", "neighbours", "mla"],
)
@pytest.mark.parametrize("width", [8, 12], ids=["all rotates", "a part passes"])
def test_bits_are_megatrons(megatron, lengths, group, dtype, variant, width):
    generator = torch.Generator().manual_seed(1)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    freqs = torch.rand(max(lengths) + 3, 1, 1, 8, generator=generator) * 40
    t = torch.randn(sum(lengths) // group.size(), 3, width, generator=generator).to(dtype)
    upstream = torch.randn(t.shape, generator=generator).to(dtype)
    results = []
    for function in (megatron._apply_rotary_pos_emb_thd, rotate_packed, rotate_packed):  # the last finds the tables
        leaf = t.clone().requires_grad_()
        out = function(leaf, cu_seqlens, freqs, cp_group=group, **variant)
        out.backward(upstream)
        results.append((out.detach(), leaf.grad))
    for out, grad in results[1:]:
        assert out.dtype == dtype
        assert torch.equal(out, results[0][0])
        assert torch.equal(grad, results[0][1])


def test_tables_follow_freqs_and_scale(megatron):
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    t = torch.ones(5, 1, 4)
    for freqs in (torch.rand(4, 1, 1, 4), torch.rand(4, 1, 1, 4)):
        for mscale in (1.0, 2.0):
            ours = rotate_packed(t, cu_seqlens, freqs, mscale=mscale, cp_group=Group(0, 1))
            theirs = megatron._apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, mscale=mscale, cp_group=Group(0, 1))
            assert torch.equal(ours, theirs)


_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        {
            **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 4096},
            **{"low_freq_factor": 2.0, "high_freq_factor": 6.0},
        },
        _YARN,
        {**_YARN, "factor": 1.0},
        {**_YARN, "attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0},
        {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
        {**_YARN, "mscale": 0.7},
    ],
)
def test_frequencies_are_those_of_transformers(rope: dict) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=rope, max_position_embeddings=16384)
    expected = LlamaRotaryEmbedding(config)
    settings = complete(config.to_dict())
    found = ropes(architecture(settings), settings)[0]
    assert torch.equal(frequencies(found, 128), expected.inv_freq)
    assert found.attention_factor == expected.attention_scaling
