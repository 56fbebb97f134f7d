"""Engines that verify drafts (``rollout.speculative=ngram``) sample what they would without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3ForCausalLM

from megarl.engines.client.client import Prompt, Sampling
from megarl.run.supervise.process_specs import NGRAM
from megarl.train.parts.acceptance import DraftAcceptance
from tests.conftest import examples
from tests.loop.conftest import TINY_ROLLOUT
from tests.loop.engines import RunningEngine, perturbed, tiny_engine, worst_difference
from tests.loop.test_in_flight import published
from tests.loop.test_sync_families import EXPERTS, TP2, Cell, engine_of
from tests.loop.trainers import Ranks, ranks_of, versions
from tests.loop.zygote import Zygote

TOLERANCE = 1e-4
TOKENS = 48
SHARPER = 0.2
"""Temperature at which many drafts are accepted."""
DRAFTING = {"speculative": "ngram", "speculative_tokens": 3}
BINS = 20
RARE = 1e-6
"""Probability with which a test of right samples fails."""


def repeating(count: int, n: int) -> list[Prompt]:
    """Prompts whose ends were there before, so that drafts begin with the second token."""
    return [Prompt([1, *([5 + i, 9 + i, 7 + i % 2, 30 + i] * 6)], n, seed=1000 * i) for i in range(count)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Iterator[RunningEngine]:
    rollout = replace(TINY_ROLLOUT, **DRAFTING)
    engine = tiny_engine(tmp_path_factory.mktemp("drafting"), rollout=rollout)
    engine.config = replace(engine.config, sync=replace(engine.config.sync, pause="keep"))
    engine.zygote = zygote
    try:
        yield engine.ready()
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def ranks(engine: RunningEngine) -> Ranks:
    return ranks_of(engine)


@pytest.fixture(scope="module")
def model(engine: RunningEngine, ranks: Ranks) -> PreTrainedModel:
    """Published to the engine, so that every test is of weights that a sync has brought and verified."""
    loaded = Qwen3ForCausalLM.from_pretrained(engine.model_path, attn_implementation="eager").eval()
    new = perturbed(loaded, 1)
    published(ranks, new, next(versions))
    return new


@torch.no_grad()
def logits_of(model: PreTrainedModel, prompt: Prompt, response: list[int]) -> torch.Tensor:
    """[len(response), V]: what the model says before each token."""
    at = len(prompt.token_ids) - 1
    return model(torch.tensor([[*prompt.token_ids, *response]])).logits.float()[0, at:-1]


def accepted(engine: RunningEngine, before: int = 0) -> int:
    return engine.control.drafts().accepted - before


def test_greedy_tokens_are_the_likeliest(engine: RunningEngine, model: PreTrainedModel) -> None:
    prompts, before = repeating(8, 1), accepted(engine)
    greedy = engine.generate(prompts, Sampling(max_tokens=TOKENS, temperature=0.0))
    for c in greedy:
        likeliest = logits_of(model, prompts[c.request], c.token_ids.tolist()).argmax(-1)
        assert likeliest.tolist() == c.token_ids.tolist()
    drafts = engine.control.drafts()
    assert accepted(engine, before) > 20 and drafts.accepted < drafts.drafted


def test_a_seed_gives_the_same_tokens_in_any_batch(engine: RunningEngine, model: PreTrainedModel) -> None:
    prompts, sampling = repeating(8, 4), Sampling(max_tokens=TOKENS)
    whole, part = engine.generate(prompts, sampling), engine.generate(prompts[:1], sampling)
    assert worst_difference(model, prompts, whole) < TOLERANCE
    for one, again in zip(part, whole[:4], strict=True):
        assert np.array_equal(one.token_ids, again.token_ids) and np.array_equal(one.logprobs, again.logprobs)


def repeated(tokens: list[int], start: int) -> list[int | None]:
    """Before each token from ``start`` on: the token that followed the same NGRAM[0] tokens first, or None."""
    found: list[int | None] = []
    for end in range(start, len(tokens)):
        last = tokens[end - NGRAM[0] : end]
        places = (at for at in range(NGRAM[0], end) if tokens[at - NGRAM[0] : at] == last)
        found.append(next((tokens[at] for at in places), None))
    return found


def test_samples_have_the_models_distribution(engine: RunningEngine, model: PreTrainedModel) -> None:
    """The probability of all likelier tokens is uniform for right samples, and no token is sampled more often for being
    a draft."""
    prompts, before, noise = repeating(8, examples(12, 270)), accepted(engine), torch.Generator().manual_seed(0)
    samples = engine.generate(prompts, Sampling(max_tokens=TOKENS, temperature=SHARPER, ignore_eos=True))
    below, hits, expected, variance = [], 0.0, 0.0, 0.0
    for c in samples:
        prompt, response = prompts[c.request], c.token_ids.tolist()
        probs = (logits_of(model, prompt, response) / SHARPER).softmax(-1).double()
        own = probs[range(len(response)), response]
        likelier = torch.where(probs > own[:, None], probs, 0).sum(-1)
        below.append(likelier + own * torch.rand(len(response), generator=noise, dtype=torch.double))
        drafts = repeated([*prompt.token_ids, *response], len(prompt.token_ids))
        for p, token, draft in zip(probs, response, drafts, strict=True):
            if draft is not None:
                hits, expected = hits + (token == draft), expected + float(p[draft])
                variance += float(p[draft] * (1 - p[draft]))
    counts = torch.cat(below).histc(BINS, 0, 1)
    mean = counts.sum() / BINS
    chi_square = ((counts - mean) ** 2 / mean).sum()
    assert torch.special.gammaincc(torch.tensor((BINS - 1) / 2, dtype=torch.double), chi_square / 2) > RARE
    assert accepted(engine, before) > 100 and abs(hits - expected) < 5 * variance**0.5


def test_the_metric_is_of_one_step(engine: RunningEngine, ranks: Ranks, model: PreTrainedModel) -> None:
    part, shares = DraftAcceptance(cast(Any, SimpleNamespace(rank=0)), ranks.publishers[0]), []
    counts = [engine.control.drafts()]
    for prompts in (repeating(4, 2), repeating(2, 1), []):
        if prompts:
            engine.generate(prompts, Sampling(max_tokens=TOKENS, temperature=SHARPER, ignore_eos=True))
        data = SimpleNamespace(metrics=dict[str, float]())
        part.before_batch(cast(Any, None), cast(Any, data))
        counts.append(engine.control.drafts())
        shares.append(data.metrics.get("rollout/draft_acceptance"))
    (_, first, second, last) = counts
    assert shares[0] == first.accepted / first.drafted and last == second
    assert shares[1:] == [(second.accepted - first.accepted) / (second.drafted - first.drafted), None]


CELLS = (
    Cell("deepseek_v3", TP2, {"tp": 2, **DRAFTING}),
    Cell("qwen3_moe", TP2, {**EXPERTS, **DRAFTING}),
    Cell("gemma3_text", TP2, DRAFTING),
    Cell("qwen2_5_vl", TP2, DRAFTING),
)
"""Other forms of engines and attention."""


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_other_engines(cell: Cell, tmp_path: Path, zygote: Zygote) -> None:
    prompts = repeating(8, 2)
    with engine_of(cell, tmp_path, zygote) as (engine, ranks, model):
        new = perturbed(model, 1)
        ranks.publish_whole(new)
        for temperature in (1.0, 0.0):
            found = engine.generate(prompts, Sampling(max_tokens=24, temperature=temperature, ignore_eos=True))
            if temperature:
                assert worst_difference(new, prompts, found) < TOLERANCE
        assert accepted(engine) > 0
