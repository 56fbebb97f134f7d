"""The asyncio client against a small server that answers as the engine's route does, rightly and wrongly."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from megarl.core.errors import EngineClosed, EngineError, RequestRefused
from megarl.core.schema import WeightsVersion
from megarl.engines.client import engine_choice
from megarl.engines.client.client import EngineClient, Prompt, Sampling
from megarl.engines.client.engine_choice import EngineChoice, WantedWeights
from megarl.engines.client.frames import Completion, Failure, Record, StreamHeartbeat, VersionSpan, encode, unpack_ids
from megarl.engines.client.gather import Gatherer, SampleRequest
from megarl.engines.fleet import EngineRow
from tests.engine_rows import choice_of, having, serving_row

PROMPTS = [Prompt([1, 2], n=2, seed=5), Prompt([3], greedy=True)]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def sample(request: int, index: int, **changes: Any) -> Completion:
    answer = {"token_ids": np.array([7, 8]), "logprobs": np.array([-0.5, -1.25]), "finish_reason": "stop"}
    return Completion(request, index, **(answer | {"versions": (VersionSpan("1.2", 0, 2),)} | changes))


def streaming(
    *records: Record | bytes, then: Callable[[web.Request], None] = lambda request: None, every_s: float = 0.0
) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for record in records:
            await answer.write(record if isinstance(record, bytes) else encode(record))
            await asyncio.sleep(every_s)
        then(request)
        return answer

    return handler


def cut(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


async def served(handler: Handler, ask: Callable[[str], Awaitable[Any]]) -> Any:
    app = web.Application()
    app.router.add_post("/megarl/generate", handler)
    async with TestServer(app) as server:
        return await ask(str(server.make_url("")).rstrip("/"))


def collect(handler: Handler, timeout_s: float = 5.0) -> list[Completion]:
    async def ask(url: str) -> list[Completion]:
        async with EngineClient(choice_of(url), "k", timeout_s) as client:
            return [c async for c in client.generate(PROMPTS, Sampling(max_tokens=4, temperature=0.5))]

    return asyncio.run(served(handler, ask))


def test_what_is_asked_and_what_comes_back() -> None:
    asked: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append((request.headers["Authorization"], await request.json()))
        return await streaming(sample(1, 0), sample(0, 1), sample(0, 0, finish_reason="length"))(request)

    first, _, last = collect(handler)
    assert (first.request, first.index, first.finish_reason) == (1, 0, "stop")
    assert first.token_ids.dtype == np.int32 and first.token_ids.tolist() == [7, 8]
    assert first.logprobs.dtype == np.float32 and first.logprobs.tolist() == [-0.5, -1.25]
    assert first.versions == (VersionSpan("1.2", 0, 2),)
    assert last.finish_reason == "length"
    [(header, body)] = asked
    assert header == "Bearer k"
    prompts = [p | {"token_ids": unpack_ids(base64.b64decode(p["token_ids"]))} for p in body["prompts"]]
    assert prompts == [
        {"token_ids": [1, 2], "n": 2, "seed": 5, "greedy": False},
        {"token_ids": [3], "n": 1, "seed": None, "greedy": True},
    ]
    assert body["sampling"]["temperature"] == 0.5 and body["sampling"]["max_tokens"] == 4


def test_an_engine_that_fails_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Many calls fail at once and are made again; it gives samples, and fails again."""
    monkeypatch.setattr(engine_choice, "LEFT_OUT_S", 0.0)
    caplog.set_level("WARNING", "megarl")
    fails, calls = True, 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        return await (failing if fails else streaming(sample(0, 0)))(request)

    async def ask(url: str) -> None:
        async with EngineClient(choice_of(url), "k") as engine:

            async def give(indices: Sequence[int], timeout_s: float) -> None:
                async with asyncio.TaskGroup() as tasks:
                    gatherer = Gatherer(
                        engine,
                        Sampling(max_tokens=4),
                        tasks,
                        change=lambda n: None,
                        retried=retried,
                        timeout_s=timeout_s,
                        retry_s=0.01,
                        apart=True,
                    )
                    requests = [SampleRequest("g", i, 9, np.array([1], np.int32), (), None) for i in indices]
                    await asyncio.gather(*map(gatherer.sample, requests))

            nonlocal fails
            for failures in (1, 2):
                fails, before = True, calls
                with pytest.raises(ExceptionGroup):
                    await give(range(4), 0.05)
                assert calls - before > 4, "calls are made again"
                assert [text for text in caplog.messages if "mixture" in text] == caplog.messages
                assert len(caplog.messages) == failures
                fails = False
                await give([0], 5.0)

    async def retried(error: EngineError) -> None:
        pass

    asyncio.run(served(handler, ask))


async def refused(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": "its weights are a mixture"}, status=503)


async def failing(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": "its weights are a mixture"}, status=500)


async def silent(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(10)
    return web.Response()


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (refused, "503.*its weights are a mixture"),
        (silent, "gone or silent"),
        (streaming(sample(0, 0), then=cut), "gone or silent|2 of 3 samples missing"),
        (streaming(sample(0, 0), sample(0, 1)), "1 of 3 samples missing"),
        (streaming(sample(0, 0), Failure(1, 0, "EngineDeadError: gone", False)), "prompt 1, sample 0.*gone"),
        (streaming(sample(0, 0), encode(sample(0, 1))[:20]), "http://.*ended within a frame"),
        (streaming(sample(0, 0), encode(sample(0, 1))[:20], then=cut), "http://.*gone or silent"),
        (streaming(sample(0, 0), b"HTTP/1.1 502 Bad Gateway"), "http://.*broken stream.*unknown kind"),
        (streaming(sample(0, 0), b"SMPL" + b"\xff" * 8), "http://.*broken stream.*too long"),
    ],
)
def test_every_failure_is_an_engine_error(handler: Handler, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        collect(handler, timeout_s=0.5 if handler is silent else 60.0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (sample(0, 0), "sample 0 of prompt 0"),  # a second time
        (sample(2, 0), "sample 0 of prompt 2"),
        (sample(1, 1), "sample 1 of prompt 1"),
        (sample(-1, 0), "sample 0 of prompt -1"),
        (sample(0, -1), "sample -1 of prompt 0"),
    ],
)
def test_a_sample_that_is_not_outstanding_is_an_engine_error(wrong: Completion, words: str) -> None:
    """Whoever asked would take it for another one."""
    with pytest.raises(EngineError, match=f"http://.*{words}"):
        collect(streaming(sample(0, 0), wrong, sample(0, 1), sample(1, 0)))


def test_a_sample_too_many_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="http://.*sample 0 of prompt 1"):
        collect(streaming(sample(0, 0), sample(0, 1), sample(1, 0), sample(1, 0)))


@pytest.mark.parametrize(
    "spans", [[(0, 1)], [(1, 2)], [(0, 1), (0, 2)], [(0, 3)], [(0, 2), (2, 1)], [(0, -1), (-1, 2)]]
)
def test_versions_that_do_not_tile_the_tokens_are_an_engine_error(spans: list[tuple[int, int]]) -> None:
    wrong = sample(0, 0, versions=tuple(VersionSpan("1.2", start, end) for start, end in spans))
    with pytest.raises(EngineError, match="http://.*prompt 0, sample 0.*versions"):
        collect(streaming(wrong, sample(0, 1), sample(1, 0)))


async def in_latin_1(request: web.Request) -> web.StreamResponse:
    return web.Response(body="Zugriff verweigert: Schlüssel".encode("latin-1"), status=500, content_type="text/plain")


async def without_end(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(status=500)
    await answer.prepare(request)
    with suppress(ConnectionError):
        for _ in range(1000):
            await answer.write(b"no " * 2**16)
    return answer


@pytest.mark.parametrize(("handler", "words"), [(in_latin_1, "verweigert"), (without_end, "no no no")])
def test_any_body_of_an_error_is_an_engine_error(handler: Handler, words: str) -> None:
    with pytest.raises(EngineError, match=rf"http://.*500.*{words}") as failed:
        collect(handler)
    assert len(str(failed.value)) < 10**5


def test_a_frame_that_never_ends_is_an_engine_error() -> None:
    """Its length is wrong, so that heartbeats count as its bytes and no read times out."""
    lying = encode(sample(0, 1))[:8] + (2**30).to_bytes(4, "little") + encode(sample(0, 1))[12:]
    with pytest.raises(EngineError, match=r"http://.*part of a frame.*request_timeout_s=0\.3\b"):
        collect(
            streaming(sample(0, 0), lying, *[StreamHeartbeat(n, False) for n in range(100)], every_s=0.02),
            timeout_s=0.3,
        )


@pytest.mark.parametrize("then", [cut, lambda request: None])
def test_a_connection_that_ends_within_a_frame_loses_no_whole_one(then: Callable[[web.Request], None]) -> None:
    got: list[Completion] = []

    async def ask(url: str) -> None:
        async with EngineClient(choice_of(url), "k") as client:
            async for completion in client.generate(PROMPTS, Sampling(max_tokens=4)):
                got.append(completion)
                await asyncio.sleep(0)

    last = encode(sample(1, 0))
    with pytest.raises(EngineError, match="http://"):
        asyncio.run(served(streaming(sample(0, 1), sample(0, 0), last[: len(last) // 2], then=then), ask))
    assert [(c.request, c.index) for c in got] == [(0, 1), (0, 0)]


def test_a_sample_of_forty_thousand_tokens_comes_whole() -> None:
    """As a line of JSON it was longer than the HTTP client takes."""
    ids, logprobs = np.arange(40_000, dtype=np.int32), -np.linspace(0.001, 9, 40_000, dtype=np.float32)
    long = sample(1, 0, token_ids=ids, logprobs=logprobs, versions=(VersionSpan("1.2", 0, 40_000),))
    *_, last = collect(streaming(sample(0, 0), sample(0, 1), long))
    assert last.token_ids.tobytes() == ids.tobytes() and last.logprobs.tobytes() == logprobs.tobytes()


def collected_with(beats: list[StreamHeartbeat], timeout_s: float) -> tuple[int, int]:
    """(samples, times that progress was reported) of a call whose first sample comes after ``beats``, 20 ms apart."""
    progressed: list[None] = []

    async def ask(url: str) -> int:
        async with EngineClient(choice_of(url), "k", timeout_s, lambda: progressed.append(None)) as client:
            return len([c async for c in client.generate(PROMPTS, Sampling(max_tokens=4))])

    handler = streaming(*beats, sample(0, 0), sample(0, 1), sample(1, 0), every_s=0.02)
    return asyncio.run(served(handler, ask)), len(progressed)


def test_an_engine_that_generates_may_take_longer_than_the_timeout() -> None:
    assert collected_with([StreamHeartbeat(64 * n, False) for n in range(20)], 1.0) == (3, 19)


def test_a_weight_update_is_no_silence() -> None:
    assert collected_with([StreamHeartbeat(5, n > 0) for n in range(20)], 1.0) == (3, 0)


def test_an_engine_that_is_up_and_generates_nothing_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match=r"http://.*no token.*request_timeout_s=1\b"):
        collected_with([StreamHeartbeat(5, False)] * 20, 1.0)


def test_heartbeats_are_asked_for_more_often_than_the_timeout() -> None:
    asked: list[float] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append((await request.json())["heartbeat_s"])
        return await streaming(sample(0, 0), sample(0, 1), sample(1, 0))(request)

    for timeout_s in (2.0, 300.0):
        collect(handler, timeout_s)
    assert asked[0] <= 1 and 1 <= asked[1] <= 30


def test_no_server_is_an_engine_error() -> None:
    async def ask() -> None:
        async with EngineClient(choice_of("http://127.0.0.1:1"), "k") as client:
            async for _ in client.generate(PROMPTS, Sampling(max_tokens=4)):
                pass

    with pytest.raises(EngineError, match="gone or silent"):
        asyncio.run(ask())


def test_the_newest_of_all_oldest_weights_goes_with_a_call() -> None:
    """That of the response that goes on, where it is newer than the group's."""
    asked: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append((await request.json()).get("oldest"))
        return await streaming(sample(0, 0), sample(1, 0))(request)

    async def ask(url: str) -> None:
        async with EngineClient(choice_of(url), "k") as client:
            for group, response in ((None, None), ((1, 1), None), ((1, 1), (1, 2)), ((1, 2), (1, 1)), ((1, 1), (1, 3))):
                sampling = Sampling(max_tokens=4, oldest=group and WeightsVersion(*group))
                prompts = [Prompt([1]), Prompt([2], oldest=response and WeightsVersion(*response))]
                async for _ in client.generate(prompts, sampling):
                    pass

    with pytest.raises(EngineError, match=r"samples with weights 1\.2, which are older than 1\.3"):
        asyncio.run(served(handler, ask))
    assert asked == [None, "1.1", "1.2", "1.2", "1.3"]


def test_calls_go_to_the_engine_with_the_fewest_unfinished_samples() -> None:
    calls: list[str] = []
    release = asyncio.Event()

    def engine(name: str) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            calls.append(name)
            records = [sample(i, j) for i, p in enumerate((await request.json())["prompts"]) for j in range(p["n"])]
            await release.wait()
            return await streaming(*records)(request)

        return handler

    async def scenario() -> None:
        async def both(first: str) -> Any:
            async def inner(second: str) -> None:
                async with EngineClient(choice_of(first, second), "k") as client:

                    async def ask(n: int) -> int:
                        async with aclosing(client.generate([Prompt([1], n=n)], Sampling(max_tokens=1))) as answers:
                            return len([c async for c in answers])

                    tasks = []
                    for n in (5, 2, 2, 2):  # a, b, b (2 < 5), b (4 < 5)
                        tasks.append(asyncio.create_task(ask(n)))
                        while len(calls) < len(tasks):
                            await asyncio.sleep(0.005)
                    release.set()
                    assert await asyncio.gather(*tasks) == [5, 2, 2, 2]
                    assert await ask(1) == 1
                    assert set(client.engines.outstanding.values()) == {0}

            await served(engine("b"), inner)

        await served(engine("a"), both)

    asyncio.run(scenario())
    assert calls == ["a", "b", "b", "b", "a"]


def test_an_engine_that_failed_is_left_out_while_others_live() -> None:
    """It has the fewest unfinished samples of all, always; where no other lives it is asked again."""
    calls: list[str] = []
    broken = {"a"}

    def engine(name: str) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            calls.append(name)
            return await (failing if name in broken else streaming(sample(0, 0)))(request)

        return handler

    async def scenario() -> None:
        async def both(first: str) -> None:
            async def inner(second: str) -> None:
                async with EngineClient(choice_of(first, second), "k") as client:

                    async def ask() -> int:
                        return len([c async for c in client.generate([Prompt([1])], Sampling(max_tokens=1))])

                    with pytest.raises(EngineError):
                        await ask()
                    assert [await ask() for _ in range(3)] == [1, 1, 1]
                    broken.add("b")
                    for _ in range(2):
                        with pytest.raises(EngineError):
                            await ask()
                    broken.clear()
                    assert await ask() == 1

            await served(engine("b"), inner)

        await served(engine("a"), both)

    asyncio.run(scenario())
    assert calls == ["a", "b", "b", "b", "b", "a", "b"]


async def too_long(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": "the prompt is too long"}, status=400)


@pytest.mark.parametrize(
    ("handler", "for_itself"),
    [
        (too_long, True),
        (streaming(Failure(0, 0, "ValueError: no image", True)), True),
        (streaming(Failure(0, 0, "EngineDeadError: gone", False)), False),
        (refused, False),
    ],
)
def test_what_would_be_refused_again_is_told_apart(handler: Handler, for_itself: bool) -> None:
    with pytest.raises(EngineError) as failed:
        collect(handler)
    assert isinstance(failed.value, RequestRefused) == for_itself


def test_a_call_goes_home_unless_that_engine_is_busier() -> None:
    """Unfinished samples of engines a and b, a being the home -> where the next call goes."""
    engines = choice_of("a", "b")

    def chosen(home: str, a: int, b: int) -> str:
        engines.outstanding.update(a=a - engines.outstanding["a"], b=b - engines.outstanding["b"])
        return asyncio.run(engines.choose(WantedWeights(), home)).url

    assert [chosen("b", 0, 0), chosen("b", 60, 64), chosen("b", 8, 10)] == ["b", "b", "b"]
    assert [chosen("b", 0, 1), chosen("b", 8, 16), chosen("gone", 2, 1), chosen("", 1, 2)] == ["a", "a", "b", "a"]
    engines.left_out["b"] = time.monotonic() + 60
    assert chosen("b", 9, 0) == "a"


@pytest.mark.parametrize("awaits", [True, False])
def test_weights_of_another_program_are_awaited_however_long_that_takes(awaits: bool) -> None:
    """Those of the job's own trainer for as long as an engine may take that is replaced."""
    rows, looks = [serving_row(0, "")], 0

    async def read() -> list[EngineRow]:
        nonlocal looks
        looks += 1
        return [having(rows[0], WeightsVersion(1, 2)) if looks > 5 else rows[0]]

    async def retried(error: EngineError) -> None:
        raise AssertionError("no call was made")

    async def ask(url: str) -> None:
        rows[0] = replace(rows[0], url=url)
        engines = EngineChoice(rows)
        keeping = asyncio.create_task(engines.keep(read))
        async with EngineClient(engines, "k") as client, asyncio.TaskGroup() as tasks:
            asked = Sampling(max_tokens=4, oldest=WeightsVersion(1, 2))
            gatherer = Gatherer(
                client,
                asked,
                tasks,
                change=lambda n: None,
                retried=retried,
                timeout_s=0.1,
                retry_s=0.01,
                awaits_weights=awaits,
            )
            request = SampleRequest("g", 0, 9, np.array([1], np.int32), (), None)
            assert (await gatherer.sample(request)).token_ids.tolist() == [7, 8]
        keeping.cancel()

    if awaits:
        asyncio.run(asyncio.wait_for(served(streaming(sample(0, 0)), ask), 30))
        return
    with pytest.raises(ExceptionGroup) as failed:
        asyncio.run(asyncio.wait_for(served(streaming(sample(0, 0)), ask), 30))
    assert failed.group_contains(EngineClosed, match="engine 0 is serving and has no weights")
