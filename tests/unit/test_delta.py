"""Gated delta net: the chunked rule against its recurrence in float64, and sequences that must not see each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megarl.config.lora import LoraConfig
from megarl.config.schema import ParallelConfig
from megarl.core.errors import ConfigError
from megarl.learn.models.delta import causal_convolution, chunks_of, gated_delta_rule

LENGTHS = [3, 70, 0, 64, 129, 1]


def recurrence(inputs: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """The formula of ``megarl.learn.models.delta``, token by token."""
    query, key, value, decay, beta = (x.double() for x in inputs)
    repeat = value.shape[1] // key.shape[1]
    query, key = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(repeat, 1) for x in (query, key)
    )
    outputs, at = [], 0
    for length in lengths:
        state = torch.zeros(value.shape[1], query.shape[-1], value.shape[-1], dtype=torch.float64)
        for t in range(at, at + length):
            state = state * decay[t].exp()[:, None, None]
            error = value[t] - torch.einsum("hkv,hk->hv", state, key[t])
            state = state + torch.einsum("hk,hv->hkv", key[t], beta[t][:, None] * error)
            outputs.append(torch.einsum("hkv,hk->hv", state, query[t]) * query.shape[-1] ** -0.5)
        at += length
    return torch.stack(outputs)


def drawn(total: int, largest: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(total, h, d, generator=generator) for h, d in ((2, 8), (2, 8), (6, 5)))
    decay = -largest * torch.rand(total, 6, generator=generator)
    return [x.requires_grad_() for x in (query, key, value, decay, torch.rand(total, 6, generator=generator))]


@pytest.mark.parametrize("largest", [1.0, 0.01, 40.0])
def test_chunks_give_the_recurrence_and_its_gradients(largest: float) -> None:
    total = sum(LENGTHS)
    inputs, given = drawn(total, largest), torch.randn(total, 6, 5, generator=torch.Generator().manual_seed(1))
    found = gated_delta_rule(*inputs, chunks_of(LENGTHS))  # type: ignore[arg-type]
    gradients = torch.autograd.grad((found * given).sum(), inputs)
    expected = recurrence(inputs, LENGTHS)
    wanted = torch.autograd.grad((expected * given).sum(), inputs)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=5e-6)


def test_a_sequence_does_not_see_its_neighbours() -> None:
    """Alone and packed, a sequence has the same bits: its chunks do not depend on the others."""
    inputs = [x.detach() for x in drawn(sum(LENGTHS))]
    together = gated_delta_rule(*inputs, chunks_of(LENGTHS))  # type: ignore[arg-type]
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    for length, start in zip(LENGTHS, starts, strict=False):
        alone = gated_delta_rule(*(x[start : start + length] for x in inputs), chunks_of([length]))  # type: ignore[arg-type]
        torch.testing.assert_close(together[start : start + length], alone, rtol=0, atol=1e-7)


def test_the_convolution_is_torchs_of_each_sequence() -> None:
    x, weight = torch.randn(sum(LENGTHS), 7), torch.randn(7, 1, 4)
    found = causal_convolution(x, weight, torch.cat([torch.arange(length) for length in LENGTHS]))
    for mine, own in zip(found.split(LENGTHS), x.split(LENGTHS), strict=True):
        if len(own):
            wanted = F.conv1d(F.pad(own.T[None], (3, 0)), weight, groups=7)[0].T
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


def sizes(family: str = "qwen3_next") -> dict[str, object]:
    from transformers import AutoConfig

    from tests.parallel.families import FAMILIES

    model_type, settings = FAMILIES[family]
    return AutoConfig.for_model(model_type, **settings).to_dict()  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_adapters_are_refused(family: str) -> None:
    from megarl.weights.reshard.adapters import factors_of

    with pytest.raises(ConfigError, match=f"model.lora.rank=4 with {family}"):
        factors_of(sizes(family), LoraConfig(rank=4))


@pytest.mark.parametrize(
    ("family", "parallel", "message"),
    [
        ("qwen3_next", ParallelConfig(cp=2), "parallel.cp=2 with the gated delta nets"),
        ("lfm2", ParallelConfig(cp=2), "parallel.cp=2 with the gated delta nets or short convolutions"),
        ("qwen3_next", ParallelConfig(tp=8), "parallel.tp=8 does not divide num_attention_heads=4"),
    ],
)
def test_grids_that_cut_states_are_refused(family: str, parallel: ParallelConfig, message: str) -> None:
    from megarl.learn.parallel.grid import check_parallel, megatron_grid
    from megarl.weights.architectures import architecture
    from megarl.weights.reshard.grid import check_grid

    config = sizes(family)
    table = architecture(config)
    with pytest.raises(ConfigError, match=message):
        check_grid(table.name, table.sizes(config), megatron_grid(parallel))
        check_parallel(parallel, table.sizes(config))
