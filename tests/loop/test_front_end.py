"""The endpoint's stream, and the memory of vLLM's front end for the tokens of unfinished answers, without an engine."""

from __future__ import annotations

import asyncio
import base64
import tracemalloc
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.exceptions import RetryableRequestError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists

from megarl.engines.client.frames import Completion, Decoder, Failure, Record, StreamHeartbeat, pack_ids
from megarl.engines.server.endpoint import (
    Endpoints,
    GenerateBody,
    Progress,
    PromptBody,
    record_of,
    sampling_params,
    stream_frames,
)

TOKENS = 4096


def queued(processor: OutputProcessor, parameters: SamplingParams) -> RequestOutputCollector:
    request = EngineCoreRequest("a", [1, 2, 3], None, parameters, None, 0.0, None, None, None)
    request.external_req_id = "a"
    queue = RequestOutputCollector(parameters.output_kind, "a")
    processor.add_request(request, None, None, 0, queue)
    return queue


def test_bytes_of_a_token_until_its_answer_ends() -> None:
    processor = OutputProcessor(None, log_stats=False)
    queue = queued(processor, sampling_params({"max_tokens": TOKENS}))
    ids = np.random.default_rng(0).integers(300, 150_000, TOKENS)
    logprobs = -np.random.default_rng(1).random(TOKENS, dtype=np.float32)
    ranks = np.full(1, 3)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for i, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            lists = LogprobsLists(token.reshape(1, 1), logprob.reshape(1, 1), ranks, None)
            reason = FinishReason.LENGTH if i == TOKENS - 1 else None
            processor.process_outputs([EngineCoreOutput("a", [int(token)], lists, finish_reason=reason)])
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 150 < held / TOKENS < 220, "docs/experiments.md has the number"
    output = queue.get_nowait()
    assert output is not None
    record = record_of(0, 0, output, expanded=False)
    assert isinstance(record, Completion)
    assert record.token_ids.tolist() == ids.tolist() and record.logprobs.tobytes() == logprobs.tobytes()


class Engine:
    """An engine whose requests give so many outputs each, with as many tokens as their number."""

    output_processor = SimpleNamespace(request_states={})

    def __init__(self, outputs: int) -> None:
        self._outputs = outputs

    async def generate(self, *_: object) -> AsyncIterator[object]:
        for tokens in range(1, self._outputs + 1):
            flat = SimpleNamespace(token_ids=[7] * tokens, logprobs=[-1.0] * tokens)
            output = SimpleNamespace(token_ids=[7] * tokens, logprobs=flat, finish_reason="stop", weight_versions=None)
            yield SimpleNamespace(prompt_token_ids=[1], outputs=[output])


class Refusing(Engine):
    """Refuses the first requests with 503, for others to retry, as later versions of vLLM do in a pause."""

    def __init__(self, progress: Progress, times: int) -> None:
        super().__init__(1)
        self.progress, self.left = progress, times

    async def generate(self, *_: object) -> AsyncIterator[object]:
        if self.left:
            self.left -= 1
            asyncio.get_running_loop().call_later(0.1, setattr, self.progress, "paused", False)
            raise RetryableRequestError("the engine pauses")
        assert not self.progress.paused
        async for output in super().generate():
            yield output


def records_of(engine: Engine, progress: Progress | None = None) -> list[Record]:
    async def ask() -> list[Record]:
        parameters = sampling_params({"max_tokens": 4})
        body = GenerateBody([PromptBody(pack_ids([1]), n=2)], {}, heartbeat_s=0.05)
        told = progress or Progress(engine)  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            chunks = [chunk async for chunk in stream_frames(engine, told, body, parameters, parameters)]  # type: ignore[arg-type]
        return list(Decoder().feed(b"".join(chunks)))

    return [record for record in asyncio.run(ask()) if not isinstance(record, StreamHeartbeat)]


@pytest.mark.parametrize(("outputs", "kind"), [(0, Failure), (1, Completion), (3, Completion)])
def test_every_sample_has_one_frame(outputs: int, kind: type[Record]) -> None:
    """Without one its caller would wait for as long as the engine serves others; with two another's would be lost."""
    records = records_of(Engine(outputs))
    assert [type(record) for record in records] == [kind, kind]
    assert {record.index for record in records if not isinstance(record, StreamHeartbeat)} == {0, 1}
    assert all(len(record.token_ids) == outputs for record in records if isinstance(record, Completion))


@pytest.mark.parametrize(("paused", "kind"), [(True, Completion), (False, Failure)])
def test_requests_that_come_in_a_pause_wait_for_its_end(paused: bool, kind: type[Record]) -> None:
    progress = Progress(Engine(0), paused=paused)  # type: ignore[arg-type]
    assert [type(record) for record in records_of(Refusing(progress, times=2), progress)] == [kind, kind]


@pytest.mark.parametrize(
    ("has", "asked", "refusal"),
    [
        ("1.2", {"oldest": "1.3"}, "weights 1.2 are older than 1.3"),
        ("1.9", {"oldest": "2.1"}, "weights 1.9 are older than 2.1"),
        ("1.3", {"newest": "1.2"}, "weights 1.3 are newer than 1.2"),
        ("1.2", {"start": 8}, "this is start 7 of the engine, and start 8 was asked"),
        ("1.2", {"start": 7, "oldest": "1.2", "newest": "1.2"}, None),
        ("1.10", {"oldest": "1.9"}, None),
        ("1.2", {}, None),
        (None, {"oldest": "1.3", "newest": "1.2"}, None),
    ],
)  # fmt: skip
def test_other_weights_than_are_asked_for_sample_nothing(
    has: str | None, asked: dict[str, Any], refusal: str | None
) -> None:
    """An engine that a publication left out goes on; ``None``: it has the model's files, which its samples name."""
    body = {"prompts": [{"token_ids": base64.b64encode(pack_ids([1])).decode()}], "sampling": {}}
    with TestClient(refusing_app()) as client:
        assert client.post("/megarl/generate", json=body | asked).status_code == 503
        client.post("/megarl/refuse", json={"reason": None, "version": has}).raise_for_status()
        assert client.post("/megarl/generate", json=body | {"oldest": "new"}).status_code == 400
        answer = client.post("/megarl/generate", json=body | asked)
        assert answer.status_code == (409 if refusal else 200)
        assert refusal is None or answer.json() == {"error": refusal}
        client.post("/megarl/refuse", json={"reason": "a mixture"}).raise_for_status()
        assert client.post("/megarl/generate", json=body | asked).json() == {"error": "a mixture"}


def refusing_app() -> FastAPI:
    """Our routes of an engine of start 7 whose weights were not published."""
    app, engine = FastAPI(), Engine(1)
    Endpoints().attach_router(app)
    app.state.engine_client, app.state.megarl_progress = engine, Progress(engine)  # type: ignore[arg-type]
    app.state.megarl_asleep, app.state.megarl_refusing, app.state.megarl_version = False, "not published", None
    app.state.megarl_start = 7
    return app


@pytest.mark.parametrize("seconds", ["0", "-1", "0.0"])
def test_heartbeats_without_a_pause_are_refused(seconds: str) -> None:
    text = '{"prompts": [], "sampling": {}, "heartbeat_s": %s}'
    assert msgspec.json.decode(text % "0.25", type=GenerateBody).heartbeat_s == 0.25
    with pytest.raises(msgspec.ValidationError, match="heartbeat_s"):
        msgspec.json.decode(text % seconds, type=GenerateBody)
