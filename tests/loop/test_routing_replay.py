"""Routing replay with real engines: the experts that an engine has recorded, through its prefix cache, several turns
and segments, are those that it computed with, and close the gap to a trainer whose routers would choose others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.buffer.store import Claim
from megarl.config.algorithms import AlgorithmConfig
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from megarl.core.schema import TrainingSample
from megarl.engines.client.client import EngineClient, Prompt, Sampling
from megarl.engines.client.frames import Completion
from megarl.engines.client.gather import Gatherer, SampleRequest
from megarl.explore.explorer.segments import SegmentSampler, SegmentSettings
from megarl.explore.recording.model import TokenLimits
from tests.engine_rows import choice_of
from tests.loop.engines import KEY, RunningEngine, some_prompts
from tests.loop.test_sync_families import TP2, Cell, engine_of
from tests.loop.zygote import Zygote
from tests.parallel.exact import exact_logps, rounding
from tests.parallel.grid import run_grid
from tests.parallel.test_replay import force
from tests.stores import VERSION, make_task

RESPONSE, EXPERTS = 24, 8
ENGINE_GAP = 2e-5
"""Largest difference of one log-prob: float32's rounding, of vLLM's and the trainer's kernels alike."""
SHIFTS = {"expert_bias": 0.1, "weight": 0.02}
"""Deviation of what is added to the trainer's routers: to their biases, which choose and do not weigh, where they have
some; else to their weights."""
ENGINES = (
    Cell("qwen3_moe", TP2, {"routing_replay": True, "tp": 2, "expert_parallel": True}, forked=False),
    Cell("deepseek_v3", TP2, {"routing_replay": True}, forked=False),
)
GRIDS = (ParallelConfig(tp=2, sequence_parallel=True), ParallelConfig(dp=2, ep=2))


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=ENGINES, ids=str)
def running(
    request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningEngine, Any]]:
    with engine_of(request.param, tmp_path_factory.mktemp("routing"), zygote) as (engine, _, model):
        yield engine, model


def forced_logp(
    model: Any, prompt: Sequence[int], completion: Completion, ids: np.ndarray, *, exact: bool = False
) -> torch.Tensor:
    """Log-probs of the response by transformers with these ids [P + R - 1, L, K] forced on it; ``exact``: in
    float64."""
    tokens = torch.tensor([[*prompt, *completion.token_ids.tolist()][:-1]])
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    before = [gate.forward for gate in gates]
    for layer, gate in enumerate(gates):
        force(gate, torch.from_numpy(ids[:, layer].astype(np.int64)))
    with torch.no_grad():
        logps = exact_logps(model, tokens) if exact else model(tokens).logits.float().log_softmax(-1)
    for gate, forward in zip(gates, before, strict=True):
        gate.forward = forward
    return logps[0, len(prompt) - 1 :].gather(1, torch.from_numpy(completion.token_ids.astype(np.int64))[:, None])[:, 0]


def sample(engine: RunningEngine, requests: Sequence[SampleRequest], size: int | None) -> list[Completion]:
    """Whole responses, in segments of ``size`` tokens."""

    async def retried(error: Exception) -> None:
        raise error

    async def all_of_them() -> list[Completion]:
        limits = TokenLimits(response=RESPONSE, trajectory=128)
        sampling = Sampling(max_tokens=RESPONSE, ignore_eos=True, routing=True)
        async with EngineClient(choice_of(engine.url), KEY) as client, asyncio.TaskGroup() as calls:
            gatherer = Gatherer(
                client, sampling, calls, change=lambda more: None, retried=retried, timeout_s=60.0, retry_s=0.1
            )

            async def one(request: SampleRequest) -> Completion:
                claim = Claim("r0", "train", 0, VERSION, request.group, 0, 2, {}, make_task(0), "a", "token", 1)
                sampler = SegmentSampler(gatherer, claim, 0, limits, SegmentSettings(size), None, None, Counter[str]())
                return await sampler.sample(request)

            tasks = [calls.create_task(one(request)) for request in requests]
            return [await task for task in tasks]

    return asyncio.run(all_of_them())


def requests_of(prompts: Sequence[Prompt]) -> list[SampleRequest]:
    return [
        SampleRequest(f"r0/{i}", 0, 2, np.array(prompt.token_ids, np.int32), (), 1000 * i + 1)
        for i, prompt in enumerate(prompts)
    ]


LONG = [Prompt([1, *((j * 5) % 190 + 4 for j in range(length - 1))]) for length in (50, 50, 70)]
"""Prompts that share blocks of the engine's prefix cache."""


def test_recorded_experts_are_those_that_the_engine_computed_with(running: tuple[RunningEngine, Any]) -> None:
    engine, model = running
    for prompts, size in ((some_prompts(4), None), (LONG, None), (LONG, 7)):
        for prompt, found in zip(prompts, sample(engine, requests_of(prompts), size), strict=True):
            assert found.routing is not None and found.routing.dtype == np.int8
            assert len(found.routing) == len(prompt.token_ids) + RESPONSE - 1
            gap = forced_logp(model, list(prompt.token_ids), found, found.routing) - torch.from_numpy(found.logprobs)
            assert float(gap.abs().max()) < ENGINE_GAP
            other = (found.routing + 1) % EXPERTS
            wrong = forced_logp(model, list(prompt.token_ids), found, other) - torch.from_numpy(found.logprobs)
            assert float(wrong.abs().max()) > 0.1


def test_a_later_turn_records_what_earlier_ones_have_not(running: tuple[RunningEngine, Any]) -> None:
    engine, model = running
    [request] = requests_of(some_prompts(1))
    [first] = sample(engine, [request], None)
    assert first.routing is not None
    context = np.concatenate([request.token_ids, first.token_ids, np.array([9, 8, 7], np.int32)])
    again = SampleRequest("r0/0", 0, 2, context, (), 1, turn=1, routed=len(first.routing))
    for size in (None, 5):
        [second] = sample(engine, [again], size)
        assert second.routing is not None and len(second.routing) == 1 + 3 + RESPONSE - 1
        ids = np.concatenate([first.routing, second.routing])
        gap = forced_logp(model, context.tolist(), second, ids) - torch.from_numpy(second.logprobs)
        assert float(gap.abs().max()) < ENGINE_GAP


def test_a_request_without_expert_ids_gets_none(running: tuple[RunningEngine, Any]) -> None:
    [found] = running[0].generate(some_prompts(1), Sampling(max_tokens=4, ignore_eos=True))
    assert found.routing is None


def on_grid(
    rank: int, path: str, grid: ParallelConfig, samples: list[TrainingSample], exact: torch.Tensor
) -> dict[str, Any]:
    """Runs in each rank: largest differences from the engine's log-probs, with the engine's weights and with routers
    that choose otherwise; and errors of trainer and engine against ``exact``, float64 of all responses."""
    from megarl.learn import algorithms
    from megarl.learn.batching import of_samples
    from megarl.learn.parallel import process_groups
    from megarl.learn.training import objectives
    from megarl.learn.training.model import TrainedModel, micro_batching_for
    from megarl.learn.training.schedule import Head
    from megarl.weights.checkpoint.formats import hf
    from tests.parallel.families import VOCAB

    process_groups.initialize(grid, seed=1)
    micro_batching = micro_batching_for(grid, TrainerConfig(max_tokens_per_micro_batch=256))
    hf_config = hf.read_hf_config(Path(path))
    actor = TrainedModel(hf_config, ModelConfig(path=path), grid, Head(VOCAB), micro_batching, OptimizerConfig())
    actor.model.load_hf(Path(path))
    rows, found = of_samples(samples), dict[str, Any]()
    assert rows.engine_logp is not None and rows.routing is not None

    engine = rows.engine_logp[rows.mask]

    def logp() -> torch.Tensor:
        return actor.model.outputs(rows, [actor.model.micro_batches(rows)])[rows.mask]

    def gap() -> float:
        return float((logp() - engine).abs().max())

    found["own"] = gap()
    actor.model.replays_routing = True
    found["replayed"] = gap()
    found["errors"] = {"trainer": rounding(logp(), exact), "engine": rounding(engine, exact)}
    generator = torch.Generator().manual_seed(3)
    own = actor.model.tensors
    kind = next(kind for kind in SHIFTS if any(name.endswith(f"router.{kind}") for name in own))
    for name in sorted(name for name in own if name.endswith(f"router.{kind}")):
        own[name].add_(SHIFTS[kind] * torch.randn(own[name].shape, generator=generator))
    found["shifted, replayed"] = gap()
    sums = actor.backward(
        rows, actor.model.micro_batches(rows), objectives.policy(algorithms.get("sft"), AlgorithmConfig(), rows)
    )
    found["changed"] = sums["actor/routing_changed"][0] if sums else -1.0
    actor.model.replays_routing = False
    found["shifted, own"] = gap()
    return found


@pytest.mark.parametrize("grid", GRIDS, ids=["tp2-sp", "ep2"])
def test_replay_closes_the_gap_to_a_trainer_that_would_choose_others(
    running: tuple[RunningEngine, Any], grid: ParallelConfig
) -> None:
    engine, model = running
    prompts = [*some_prompts(6), *LONG]
    completions = sample(engine, requests_of(prompts), None)
    samples = [
        TrainingSample(
            np.array(prompt.token_ids, np.int32),
            found.token_ids,
            np.ones(RESPONSE, np.bool_),
            found.logprobs,
            "length",
            routing=found.routing,
        )
        for prompt, found in zip(prompts, completions, strict=True)
    ]
    exact = torch.cat(
        [
            forced_logp(model, list(prompt.token_ids), found, found.routing, exact=True)
            for prompt, found in zip(prompts, completions, strict=True)
            if found.routing is not None
        ]
    )
    for found in run_grid(2, on_grid, engine.config.model.path, grid, samples, exact):
        print(found)
        trainer, engine_error = found["errors"]["trainer"]["mean"], found["errors"]["engine"]["mean"]
        assert 0.5 < trainer / engine_error < 2, "the gap is the rounding of both sides"
        assert found["own"] < ENGINE_GAP and found["replayed"] < ENGINE_GAP
        assert found["shifted, own"] > 2 * found["shifted, replayed"] and found["changed"] != 0.0
        assert found["shifted, replayed"] < ENGINE_GAP or model.config.model_type == "qwen3_moe"
