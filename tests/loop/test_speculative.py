"""Engines that verify drafts (``rollout.speculative=ngram``) sample what they would without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3ForCausalLM

from megarl.core.errors import WeightSyncError
from megarl.engines.client.client import Completion, Prompt, Sampling
from megarl.run.supervise.process_specs import NGRAM
from megarl.train.parts.speculative import DraftAcceptance
from tests.conftest import examples
from tests.loop.conftest import TINY_ROLLOUT
from tests.loop.engines import RunningEngine, perturbed, tiny_engine, worst_difference
from tests.loop.test_in_flight import published
from tests.loop.test_sync_families import EXPERTS, TP2, Cell, engine_of
from tests.loop.trainers import Ranks, ranks_of, versions
from tests.loop.zygote import Zygote
from tests.parallel.prediction_files import scale_tensor

TOLERANCE = 1e-4
TOKENS = 48
SHARPER = 0.2
"""Temperature at which many drafts are accepted."""
Drafts = Callable[[Prompt, list[int], torch.Tensor], list[int | None]]
"""Known drafts before each token of a response, or None; takes the logits [len(response), V] too."""
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


def check_distribution(
    model: PreTrainedModel, prompts: list[Prompt], samples: list[Completion], drafts_of: Drafts
) -> None:
    """The probability of all likelier tokens is uniform for right samples, and no token is sampled more often for being
    a draft."""
    below, hits, expected, variance, noise = [], 0.0, 0.0, 0.0, torch.Generator().manual_seed(0)
    for c in samples:
        prompt, response = prompts[c.request], c.token_ids.tolist()
        logits = logits_of(model, prompt, response)
        probs = (logits / SHARPER).softmax(-1).double()
        own = probs[range(len(response)), response]
        likelier = torch.where(probs > own[:, None], probs, 0).sum(-1)
        below.append(likelier + own * torch.rand(len(response), generator=noise, dtype=torch.double))
        drafts = drafts_of(prompt, response, logits)
        for p, token, draft in zip(probs, response, drafts, strict=True):
            if draft is not None:
                hits, expected = hits + (token == draft), expected + float(p[draft])
                variance += float(p[draft] * (1 - p[draft]))
    counts = torch.cat(below).histc(BINS, 0, 1)
    mean = counts.sum() / BINS
    chi_square = ((counts - mean) ** 2 / mean).sum()
    assert torch.special.gammaincc(torch.tensor((BINS - 1) / 2, dtype=torch.double), chi_square / 2) > RARE
    assert abs(hits - expected) <= 5 * variance**0.5


def test_samples_have_the_models_distribution(engine: RunningEngine, model: PreTrainedModel) -> None:
    prompts, before = repeating(8, examples(12, 270)), accepted(engine)
    samples = engine.generate(prompts, Sampling(max_tokens=TOKENS, temperature=SHARPER, ignore_eos=True))
    assert accepted(engine, before) > 100
    check_distribution(
        model, prompts, samples, lambda prompt, tokens, _: repeated([*prompt.token_ids, *tokens], len(prompt.token_ids))
    )


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


def test_drafts_from_other_responses(tmp_path: Path, zygote: Zygote) -> None:
    """``suffix`` samples and scores as the model does. A seed does not fix its tokens: drafts depend on the batch."""
    pytest.importorskip("arctic_inference", reason="rollout.speculative=suffix needs the package arctic-inference")
    drafting = tiny_engine(tmp_path, rollout=replace(TINY_ROLLOUT, speculative="suffix", speculative_tokens=3))
    drafting.zygote = zygote
    try:
        loaded = Qwen3ForCausalLM.from_pretrained(drafting.ready().model_path, attn_implementation="eager").eval()
        new, prompts = perturbed(loaded, 1), repeating(8, examples(12, 270))
        published(ranks_of(drafting), new, next(versions))
        for c in drafting.generate(prompts[:1], Sampling(max_tokens=TOKENS, temperature=0.0)):
            assert logits_of(new, prompts[0], c.token_ids.tolist()).argmax(-1).tolist() == c.token_ids.tolist()
        assert worst_difference(new, prompts, drafting.generate(prompts, Sampling(max_tokens=TOKENS))) < TOLERANCE
        samples = drafting.generate(prompts, Sampling(max_tokens=TOKENS, temperature=SHARPER, ignore_eos=True))
        check_distribution(new, prompts, samples, lambda prompt, tokens, _: [None] * len(tokens))
        assert accepted(drafting) > 100
    finally:
        drafting.stop()


PREDICTING = {"speculative": "mtp", "speculative_tokens": 1}


def steady(model: PreTrainedModel) -> PreTrainedModel:
    """Other weights, with which the prediction layer drafts the token that was likeliest before the last one."""
    new = perturbed(model, 1)
    head = new.lm_head.weight
    head.data.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(1)) * head.std())
    new.model.norm.weight.data.fill_(1.0)
    return new


def likeliest_before(prompt: Prompt, response: list[int], logits: torch.Tensor) -> list[int | None]:
    return [None, *logits[:-1].argmax(-1).tolist()]


@pytest.mark.slow
def test_draft_layers(tmp_path: Path, zygote: Zygote) -> None:
    """Draft layers are those of the files, or a sync fails; samples and log-probs are those of the model."""
    cell, prompts = Cell("glm4_moe", TP2, PREDICTING, predicts=True), repeating(8, examples(2, 60))
    with engine_of(cell, tmp_path, zygote) as (engine, ranks, model):
        new, altered = steady(model), "model.layers.2.eh_proj.weight"
        scale_tensor(engine.model_path, altered, 2.0)
        assert ranks.call(lambda rank, publisher: publisher.connect()) == [None, None]
        for found in ranks.publish(new, next(versions)):
            assert isinstance(found, WeightSyncError) and f"elements of {altered} differ" in str(found)
        scale_tensor(engine.model_path, altered, 0.5)
        ranks.publish_whole(new)
        before = accepted(engine)
        greedy = engine.generate(repeating(8, 1), Sampling(max_tokens=TOKENS, temperature=0.0))
        for c in greedy:
            likeliest = logits_of(new, prompts[c.request], c.token_ids.tolist()).argmax(-1)
            assert likeliest.tolist() == c.token_ids.tolist()
        assert worst_difference(new, prompts, engine.generate(prompts, Sampling(max_tokens=24))) < TOLERANCE
        samples = engine.generate(prompts, Sampling(max_tokens=TOKENS, temperature=SHARPER, ignore_eos=True))
        check_distribution(new, prompts, samples, likeliest_before)
        assert accepted(engine, before) > 20
        ranks.publish_whole(perturbed(new, 2))  # the layers have kept their digests


CELLS = (
    Cell("deepseek_v3", TP2, {"tp": 2, **DRAFTING}),
    Cell("qwen3_moe", TP2, {**EXPERTS, **DRAFTING}),
    Cell("gemma3_text", TP2, DRAFTING),
    Cell("qwen2_5_vl", TP2, DRAFTING),
    Cell("glm4_moe", TP2, {"tp": 2, **PREDICTING, "speculative_tokens": 3}, predicts=True),
    Cell("glm4_moe", TP2, {**EXPERTS, **PREDICTING}, predicts=True),
    Cell("qwen3_5", TP2, PREDICTING, "bfloat16", predicts=True),
    Cell("qwen3_next", TP2, {"tp": 2, **PREDICTING}, "bfloat16", predicts=True),
)
"""Other forms of engines, of attention and of drafts."""
ROUNDED = 0.5
"""Largest difference of a log-prob in bfloat16; without drafts it was 0.081 and 0.435 for these two families."""


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_other_engines(cell: Cell, tmp_path: Path, zygote: Zygote) -> None:
    prompts = repeating(8, 2)
    with engine_of(cell, tmp_path, zygote) as (engine, ranks, model):
        new = steady(model) if cell.predicts else perturbed(model, 1)
        ranks.publish_whole(new)
        for temperature in (1.0, 0.0):
            found = engine.generate(prompts, Sampling(max_tokens=24, temperature=temperature, ignore_eos=True))
            if temperature:
                worst = worst_difference(new, prompts, found)
                assert worst < (TOLERANCE if cell.dtype == "float32" else ROUNDED)
        assert accepted(engine) > 0
