"""Causes that ``megarl diff`` reads from numbers alone, where weights and settings agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.diff.causes import cause_of
from megarl.diff.operation_errors import CACHE, SAMPLER, Finding, compare, first
from megarl.engines.tracing import points
from megarl.engines.tracing.points import EngineTrace, Record
from megarl.learn.models.attention import attend

TOKENS, HEADS, WIDTH, VOCAB = 20, 4, 16, 50
FACTS: dict[str, Any] = {
    "config": {"num_experts_per_tok": 2}, "file": {"num_experts_per_tok": 2}, "dtype": "float32", "layers": 1,
    "quantization": None, "kv_cache_dtype": "auto",
}  # fmt: skip


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trace(whole: Record) -> EngineTrace:
    logits, tokens = random(4, VOCAB, seed=9), list(range(TOKENS))
    sampled = torch.tensor(tokens[-4:])[:, None]
    reported = logits.log_softmax(-1).gather(-1, sampled)[:, 0]
    return EngineTrace(tokens, TOKENS - 4, whole, {}, {}, torch.zeros(TOKENS - 1), logits, reported, FACTS)


def attended(window: int | None) -> Record:
    query, key, value = (random(TOKENS, HEADS * WIDTH, seed=seed) for seed in range(3))
    split = [x.unflatten(-1, (HEADS, WIDTH)).transpose(0, 1)[None] for x in (query, key, value)]
    out = attend(*split, window=window)[0].transpose(0, 1).flatten(1)
    names = (points.ROTATED_QUERY, points.ROTATED_KEY, points.VALUE, points.ATTENTION)
    return {(0, name): x for name, x in zip(names, (query, key, value, out), strict=True)}


def named(engine: EngineTrace, trainer: Record, **more: Any) -> tuple[Finding, str, str]:
    """The first finding, the name and the sentence of its cause."""
    scaled = more.get("scaled", torch.cat([torch.zeros(TOKENS - 5), engine.reported]))
    found = first(compare(engine, trainer, engine.logp, scaled, None))
    assert found is not None
    cause = cause_of(found, engine, trainer, more.get("window"), 1.0)
    return found, cause.name, cause.text


@pytest.mark.parametrize("windows", [(7, None), (None, 7), (7, 6)])
def test_the_window_is_found_from_the_output_of_attention(windows: tuple[int | None, int | None]) -> None:
    engine, trainer = windows
    found, name, text = named(trace(attended(engine)), attended(trainer), window=trainer)
    assert (found.operation, name) == (points.ATTENTION, "window")
    assert f"engine attends to {engine or 'all'} tokens, the trainer to {trainer or 'all'}" in text


def test_the_expert_is_found_from_the_tokens_that_differ() -> None:
    router, out = random(TOKENS, 6), random(TOKENS, 8)
    wrong = (router.topk(2, dim=-1).indices == 4).any(-1)
    assert wrong.any() and not wrong.all()
    own = {(0, points.ROUTER): router, (0, points.MLP): out}
    held = own | {(0, points.MLP): torch.where(wrong[:, None], 0.5 * out, out)}
    found, name, text = named(trace(held), own)
    assert (found.operation, name) == (points.MLP, "missing expert") and "expert 4" in text


def test_one_number_of_each_token_is_the_epsilon_of_a_norm() -> None:
    own = {(0, points.ATTENTION_INPUT): random(TOKENS, 8)}
    held = {(0, points.ATTENTION_INPUT): own[0, points.ATTENTION_INPUT] * (0.5 + random(TOKENS, 1).abs())}
    assert named(trace(held), own)[1] == "norm epsilon"


def test_the_temperature_is_fitted() -> None:
    engine = trace({})
    sampled = torch.tensor(engine.tokens[-4:])[:, None]
    at = (engine.logits / 0.6).log_softmax(-1).gather(-1, sampled)[:, 0]
    right = torch.cat([torch.zeros(TOKENS - 5), engine.reported])
    found, name, text = named(replace(engine, reported=at), {}, scaled=right)
    assert (found.operation, name) == (SAMPLER, "temperature") and "0.6" in text
    fewer = replace(engine, reported=engine.reported + 0.3 * torch.arange(4))
    assert named(fewer, {}, scaled=right)[1] == "sampling"


def test_the_cache_is_compared_with_the_engine_itself() -> None:
    whole = {(0, points.ATTENTION): random(TOKENS, 8)}
    engine = replace(trace(whole), cached={(0, points.ATTENTION): whole[0, points.ATTENTION][-3:] * 1.01})
    found, name, _ = named(engine, whole)
    assert (found.operation, name) == (CACHE, "stale KV")


def test_a_weight_without_an_effect_is_found_too() -> None:
    weights = {"model.layers.0.mlp.experts.3.up_proj.weight": "is zero"}
    found, name, text = named(replace(trace({}), weights=weights), {})
    assert (found.point, name) == ((0, points.MLP), "missing expert") and "experts.3" in text
