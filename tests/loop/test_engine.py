"""A real vLLM server: the key on every path, tokens in and out, log-probs, seeds, and what a client sees when it
dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from megarl.config.schema import ModelConfig, RolloutConfig
from megarl.core.errors import EngineError
from megarl.core.processes.machine import group_members
from megarl.engines.client.client import EngineClient, Prompt, Sampling, StreamSilence
from megarl.engines.client.control import EngineControl
from megarl.engines.client.frames import Completion, StreamHeartbeat
from megarl.engines.client.names import bearer
from megarl.run.process import ports
from megarl.run.process.process import Child
from megarl.run.supervise.process_specs import engine_process
from tests.conftest import SOAK
from tests.engine_rows import choice_of
from tests.loop.conftest import TINY_ROLLOUT
from tests.loop.engines import (
    EOS,
    HOST,
    KEY,
    RunningEngine,
    some_prompts,
    tiny_engine,
    transformers_logp,
    worst_difference,
)
from tests.loop.under_way import OPTIONS, HasDone, hold, under_way, until
from tests.loop.zygote import Zygote

T = TypeVar("T")
FP32_TOLERANCE = 1e-4
REFUSALS = "/later_vllm/refusals"


@pytest.fixture(scope="module")
def model(shared_engine: RunningEngine) -> Qwen3ForCausalLM:
    path = shared_engine.config.model.path
    return Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def status_of(url: str, method: str, headers: dict[str, str]) -> int:
    request = urllib.request.Request(url, method=method, headers=headers, data=b"{}" if method == "POST" else None)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


PATHS = [
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/ping"),
    ("GET", "/no/such/path"),
    ("GET", "/v1/models"),
    ("GET", "/megarl/state"),
    ("GET", "/megarl/drafts"),
    ("GET", "/server_info"),
    ("OPTIONS", "/v1/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/megarl/generate"),
    ("POST", "/megarl/refuse"),
    ("POST", "/megarl/asleep"),
    ("POST", "/collective_rpc"),
    ("POST", "/pause"),
    ("POST", "/start_weight_update"),
    ("POST", "/update_weights"),
    ("POST", "/sleep"),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_every_path_asks_for_the_key(engine: RunningEngine, method: str, path: str) -> None:
    wrong = [{}, bearer("another key"), {"Authorization": KEY}, {"Authorization": f"bearer {KEY}"}]
    assert [status_of(engine.url + path, method, headers) for headers in wrong] == [401] * len(wrong)


def test_the_key_opens_and_dev_routes_are_there(engine: RunningEngine) -> None:
    assert status_of(engine.url + "/health", "GET", bearer(KEY)) == 200
    assert status_of(engine.url + "/no/such/path", "GET", bearer(KEY)) == 404
    state = engine.control.state()
    assert (state.paused, state.refusing) == (False, None)


def test_the_key_is_not_in_any_command_line(engine: RunningEngine) -> None:
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in group_members(engine.pid)]
    assert len(lines) >= 2
    assert not any(KEY.encode() in line for line in lines)


def test_log_probs_are_those_of_transformers(engine: RunningEngine, model: Qwen3ForCausalLM) -> None:
    prompts = some_prompts(count=8, n=4)
    completions = engine.generate(prompts, Sampling(max_tokens=12))
    assert [(c.request, c.index) for c in completions] == [(i, j) for i in range(8) for j in range(4)]
    assert worst_difference(model, prompts, completions) < FP32_TOLERANCE
    for c in completions:
        assert c.token_ids.dtype == np.int32 and c.logprobs.dtype == np.float32 and len(c.token_ids) == len(c.logprobs)
        ended = c.token_ids[-1] == EOS
        assert c.finish_reason == ("stop" if ended else "length") and (ended or len(c.token_ids) == 12)
        assert EOS not in c.token_ids[:-1]
        assert [(s.start, s.end) for s in c.versions] == [(0, len(c.token_ids))]


def test_log_probs_are_of_the_distribution_sampled_from(engine: RunningEngine, model: Qwen3ForCausalLM) -> None:
    prompts = some_prompts(count=2)
    for completion in engine.generate(prompts, Sampling(max_tokens=4, temperature=0.5, ignore_eos=True)):
        tokens = [*prompts[completion.request].token_ids, *completion.token_ids.tolist()]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -5:-1].float()
        expected = (logits / 0.5).log_softmax(-1)[torch.arange(4), torch.tensor(tokens[-4:])]
        np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=FP32_TOLERANCE)


def test_greedy_follows_transformers(engine: RunningEngine, model: Qwen3ForCausalLM) -> None:
    prompts = some_prompts(count=4)
    for completion in engine.generate(prompts, Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)):
        tokens = list(prompts[completion.request].token_ids)
        for token in completion.token_ids.tolist():
            with torch.no_grad():
                assert token == model(torch.tensor([tokens])).logits[0, -1].argmax().item()
            tokens.append(token)


def test_seeds_reproduce_each_sample(engine: RunningEngine) -> None:
    sampling = Sampling(max_tokens=8, ignore_eos=True)

    def tokens(prompts: list[Prompt]) -> list[list[int]]:
        return [c.token_ids.tolist() for c in engine.generate(prompts, sampling)]

    ids = [1, 20, 30, 40]
    together = tokens([Prompt(ids, n=4, seed=7)])
    assert tokens([Prompt(ids, n=4, seed=7)]) == together
    assert [tokens([Prompt(ids, n=1, seed=7 + j)])[0] for j in range(4)] == together
    assert len({tuple(t) for t in together}) == 4


def test_seeded_prompts_beyond_one_prefill_batch(engine: RunningEngine) -> None:
    """vLLM 0.32.0 dies on CPU when a seeded request's prefill is cut in two; the engine's settings must prevent it."""
    # 64 sequences at once of 180 tokens, more than the 8192 of a batch, and no prefix in common.
    prompts = [Prompt([1, 3 + i, *range(3, 181)], seed=i) for i in range(100)]
    assert len(engine.generate(prompts, Sampling(max_tokens=2, ignore_eos=True))) == 100


def test_probe_is_the_log_prob_of_given_tokens(engine: RunningEngine, model: Qwen3ForCausalLM) -> None:
    tokens = [1, 9, 77, 150, 199, 4, 4, 31]
    expected = transformers_logp(model, tokens[:1], tokens[1:]).numpy()
    np.testing.assert_allclose(engine.control.probe(tokens).prefill, expected, atol=FP32_TOLERANCE)


def test_answers_arrive_one_by_one(later_engine: RunningEngine) -> None:
    """A short answer must not wait for a long one of the same call: it is scored meanwhile."""
    engine = later_engine
    both = [Prompt([1, 7, 8], seed=2), Prompt([1, 5, 6], seed=1, max_tokens=2)]

    async def before_the_long_one() -> list[int]:
        arrived: list[int] = []

        async def read() -> None:
            async for completion in client.generate(both, Sampling(max_tokens=180, ignore_eos=True)):
                arrived.append(len(completion.token_ids))

        async with EngineClient(choice_of(engine.url), KEY) as client:
            reading = await begun(engine, read(), len(both))
            if not await asyncio.to_thread(hold, engine, reading, tokens=3):
                return []
            try:
                await asyncio.to_thread(until, lambda: bool(arrived))
                return list(arrived)
            finally:
                await asyncio.to_thread(engine.control.resume)
                await reading

    while not (arrived := asyncio.run(before_the_long_one())):
        pass
    assert arrived == [2]

    async def order() -> list[int]:
        # Which sample ends when depends on where each meets the end of sequence: lengths come out sorted.
        async with EngineClient(choice_of(engine.url), KEY) as client:
            answers = client.generate([Prompt([1, 5, 6], n=32, seed=1)], Sampling(max_tokens=60))
            return [len(c.token_ids) for c in await (await begun(engine, collected(answers), 32))]

    lengths = asyncio.run(order())
    assert lengths == sorted(lengths) and len(set(lengths)) > 3


async def begun(engine: RunningEngine, asking: Coroutine[Any, Any, T], requests: int) -> asyncio.Task[T]:
    """Start ``asking``, whose requests the engine begins in the same step."""
    await asyncio.to_thread(engine.control.pause, "keep")
    task = asyncio.create_task(asking)
    await asyncio.to_thread(until, lambda: len(under_way(engine)) == requests)
    await asyncio.to_thread(engine.control.resume)
    return task


def test_leaving_early_aborts_the_rest(later_engine: RunningEngine) -> None:
    async def leave() -> bool:
        """Return True if requests were under way, and are held."""
        async with EngineClient(choice_of(later_engine.url), KEY) as client:
            prompts = [Prompt([1, 5, 6]), *(Prompt([1, 7, i + 9], n=8) for i in range(60))]
            async with aclosing(client.generate(prompts, Sampling(max_tokens=60, ignore_eos=True))) as answers:
                async for _ in answers:
                    later_engine.control.pause("keep")
                    return bool(under_way(later_engine))
        raise AssertionError("no answer came")

    try:
        while not asyncio.run(leave()):
            later_engine.control.resume()
        until(lambda: not under_way(later_engine))
    finally:
        later_engine.control.resume()


def answered(engine: RunningEngine, timeout_s: float, meanwhile: Callable[[HasDone], object]) -> list[Completion]:
    """Samples of a call that lasts some seconds; ``meanwhile`` runs in a thread."""

    async def ask() -> list[Completion]:
        async with EngineClient(choice_of(engine.url), KEY, timeout_s) as client:
            prompts = [Prompt([1, 5, i + 6], n=8) for i in range(40)]
            answers = client.generate(prompts, Sampling(max_tokens=60, ignore_eos=True))
            task = asyncio.create_task(collected(answers))
            await asyncio.to_thread(meanwhile, task)
            return await task

    return asyncio.run(ask())


def test_a_pause_that_aborts_returns_the_samples_cut_short(later_engine: RunningEngine) -> None:
    def cut(answers: HasDone) -> None:
        if hold(later_engine, answers):
            later_engine.control.pause("abort")
            held.append(True)

    held: list[bool] = []
    try:
        while not held:
            completions = answered(later_engine, 60.0, cut)
    finally:
        later_engine.control.resume()
    assert len(completions) == 320
    assert any(c.finish_reason == "abort" and 0 < len(c.token_ids) < 60 for c in completions)


TIMEOUT_S, BEATS = 2.0, 6
"""A timeout, and more heartbeats than it has: a client gets four of them within it."""


@pytest.fixture
def paused_beats(monkeypatch: pytest.MonkeyPatch) -> list[StreamHeartbeat]:
    """Heartbeats that clients have taken in a pause."""
    beats: list[StreamHeartbeat] = []
    beat = StreamSilence.beat

    def noted(silence: StreamSilence, heartbeat: StreamHeartbeat) -> None:
        beat(silence, heartbeat)
        if heartbeat.paused:
            beats.append(heartbeat)

    monkeypatch.setattr(StreamSilence, "beat", noted)
    return beats


def test_a_pause_longer_than_the_timeout_is_no_silence(
    later_engine: RunningEngine, paused_beats: list[StreamHeartbeat]
) -> None:
    def pause(answers: HasDone) -> None:
        if hold(later_engine, answers):
            until(lambda: len(paused_beats) >= BEATS or answers.done())
            later_engine.control.resume()

    while len(paused_beats) < BEATS:
        completions = answered(later_engine, TIMEOUT_S, pause)
    assert len(completions) == 320 and {len(c.token_ids) for c in completions} == {60}


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_requests_that_a_paused_engine_refuses_are_held(
    later_engine: RunningEngine, mode: Any, paused_beats: list[StreamHeartbeat]
) -> None:
    """vLLM 0.33 answers 503 to a request that comes in such a pause; tests/loop/later_vllm.py makes 0.32 do so."""
    engine, sampling = later_engine, Sampling(max_tokens=8, ignore_eos=True)
    expected = engine.generate(some_prompts(6, n=2), sampling)
    before = refusals(engine)
    engine.control.pause(mode)

    async def ask() -> list[Completion]:
        async with EngineClient(choice_of(engine.url), KEY, timeout_s=TIMEOUT_S) as client:
            asked = asyncio.create_task(collected(client.generate(some_prompts(6, n=2), sampling)))
            while await asyncio.to_thread(refusals, engine) < before + 12:
                await asyncio.sleep(0.05)
            before_resume = len(paused_beats)
            await asyncio.to_thread(until, lambda: len(paused_beats) >= before_resume + BEATS or asked.done())
            assert not asked.done(), "a pause is no silence"
            await asyncio.to_thread(engine.control.resume)
            return await asked

    completions = sorted(asyncio.run(ask()), key=lambda c: (c.request, c.index))
    assert [c.token_ids.tolist() for c in completions] == [c.token_ids.tolist() for c in expected]
    assert refusals(engine) == before + 12, "each was refused once, and asked again when the pause was over"


def test_a_core_that_hangs_while_the_server_lives_is_an_engine_error(later_engine: RunningEngine) -> None:
    [core] = set(group_members(later_engine.pid)) - {later_engine.pid}

    def stop(answers: HasDone) -> None:
        until(lambda: answers.done() or any(under_way(later_engine)))
        os.kill(core, signal.SIGSTOP)

    try:
        with pytest.raises(EngineError, match=f"{later_engine.url} is up, but has generated no token"):
            while answered(later_engine, TIMEOUT_S, stop):  # all had ended before the core was stopped
                os.kill(core, signal.SIGCONT)
    finally:
        os.kill(core, signal.SIGCONT)
    assert later_engine.generate(some_prompts(1), Sampling(max_tokens=1))


@pytest.fixture(scope="module")
def later_engine(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Iterator[RunningEngine]:
    engine = tiny_engine(tmp_path_factory.mktemp("later"), rollout=TINY_ROLLOUT)
    engine.zygote, engine.options = zygote, ("--middleware", "tests.loop.later_vllm.Refusals", *OPTIONS)
    try:
        yield engine.ready()
    finally:
        engine.stop()


async def collected(completions: AsyncIterator[Completion]) -> list[Completion]:
    return [completion async for completion in completions]


def refusals(engine: RunningEngine) -> int:
    with urllib.request.urlopen(
        urllib.request.Request(engine.url + REFUSALS, headers=bearer(KEY)), timeout=30
    ) as answer:
        return int(answer.read())


LONG = 40_000 if SOAK else 4_000


@pytest.fixture(scope="module")
def long_engine(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Iterator[RunningEngine]:
    heads = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": LONG + 1000}
    rollout = RolloutConfig(max_prompt_tokens=900, max_response_tokens=LONG + 100, max_num_seqs=8, kv_cache_bytes=2**26)
    engine = tiny_engine(tmp_path_factory.mktemp("long"), rollout=rollout, sizes=heads | sizes)
    engine.zygote = zygote
    try:
        yield engine.ready()
    finally:
        engine.stop()


@pytest.mark.slow
def test_an_answer_of_many_thousand_tokens(long_engine: RunningEngine) -> None:
    """With a timeout that is a fraction of the time it takes: 1.7 ms a token and more, all of it vLLM's Python."""
    prompts = [Prompt([1, 5, 6], seed=1), *(Prompt([1, 7, i + 9], seed=2) for i in range(3))]

    async def ask(client: EngineClient, prompt: Prompt, tokens: int) -> Completion:
        [completion] = [c async for c in client.generate([prompt], Sampling(max_tokens=tokens, ignore_eos=True))]
        return completion

    async def ask_all() -> list[Completion]:
        async with EngineClient(choice_of(long_engine.url), KEY, timeout_s=3.0) as client:
            return await asyncio.gather(*(ask(client, p, LONG if i == 0 else 50) for i, p in enumerate(prompts)))

    long, *short = asyncio.run(ask_all())
    assert [len(c.token_ids) for c in short] == [50] * 3
    assert (len(long.token_ids), long.finish_reason) == (LONG, "length")
    assert [(s.start, s.end) for s in long.versions] == [(0, LONG)]
    model = Qwen3ForCausalLM.from_pretrained(
        long_engine.model_path, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    assert worst_difference(model, prompts, [long]) < FP32_TOLERANCE


@pytest.mark.parametrize(
    ("prompts", "sampling", "words"),
    [
        ([Prompt([1] * 300)], Sampling(max_tokens=4), "192"),  # longer than the context
        ([Prompt([1, 5])], Sampling(max_tokens=4, temperature=-1.0), "temperature"),
        ([Prompt([1, 100_000])], Sampling(max_tokens=4), "vocab"),
    ],
)
def test_a_bad_request_is_refused_with_its_reason(
    engine: RunningEngine, prompts: list[Prompt], sampling: Sampling, words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        engine.generate(prompts, sampling)
    assert engine.generate(some_prompts(1), Sampling(max_tokens=1))


def test_a_refusing_engine_says_why(engine: RunningEngine) -> None:
    engine.control.refuse("its weights are a mixture")
    try:
        for path in ("/megarl/generate", "/inference/v1/generate", "/v1/completions"):
            assert status_of(engine.url + path, "POST", bearer(KEY)) == 503
        with pytest.raises(EngineError, match="its weights are a mixture"):
            engine.generate(some_prompts(1), Sampling(max_tokens=1))
        assert engine.control.state().refusing == "its weights are a mixture"
    finally:
        engine.control.refuse(None)
    assert engine.generate(some_prompts(1), Sampling(max_tokens=1))


def test_a_start_that_fails_is_told_with_the_last_lines(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    [port] = ports.choose(HOST, 1, None)
    argv, environment = engine_process(str(tmp_path), RolloutConfig(max_prompt_tokens=128), ModelConfig(), HOST, port)
    child = Child("engine", argv, {**environment, "MEGARL_JOB_KEY": KEY}, tmp_path / "engine.log")
    try:
        control = EngineControl(f"http://{HOST}:{port}", KEY, log=child.log)
        with pytest.raises(EngineError, match=r"died after(.|\n)*model_type"):
            control.wait_ready(120, alive=lambda: child.poll() is None)
    finally:
        child.signal(signal.SIGKILL)


def test_further_options_reach_vllm(tmp_path: Path, zygote: Zygote) -> None:
    options = {
        "max_num_batched_tokens": 4321,
        "enable_prefix_caching": False,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "watermark": 0.125,
        "disable_cascade_attn": True,
    }
    running = tiny_engine(tmp_path, rollout=replace(TINY_ROLLOUT, engine_options=options))
    running.zygote = zygote
    try:
        url = running.ready().url + "/server_info?config_format=json"
        with urllib.request.urlopen(urllib.request.Request(url, headers=bearer(KEY)), timeout=30) as answer:
            found = json.load(answer)["vllm_config"]
        assert found["scheduler_config"]["max_num_batched_tokens"] == 4321
        assert found["scheduler_config"]["watermark"] == 0.125
        assert found["cache_config"]["enable_prefix_caching"] is False
        assert found["structured_outputs_config"]["disable_any_whitespace"] is True
        assert found["model_config"]["disable_cascade_attn"] is True
        assert running.generate(some_prompts(1), Sampling(max_tokens=2))
    finally:
        running.stop()


@pytest.mark.parametrize("victim", ["server", "core"])
def test_a_killed_engine_is_an_error_at_once(engine: RunningEngine, victim: str) -> None:
    members = group_members(engine.pid)
    [core] = set(members) - {engine.pid}

    async def answers() -> None:
        async with EngineClient(choice_of(engine.url), KEY, timeout_s=600) as client:
            prompts = [Prompt([1, 5, i + 6], n=8) for i in range(100)]
            first = True
            async for _ in client.generate(prompts, Sampling(max_tokens=60, ignore_eos=True)):
                if first:
                    os.kill(core if victim == "core" else engine.pid, signal.SIGKILL)
                    first = False

    with pytest.raises(EngineError):
        asyncio.run(asyncio.wait_for(answers(), 60))
    engine.stop()
    assert group_members(members[0]) == []
