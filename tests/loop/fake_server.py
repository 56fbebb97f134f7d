"""A server that answers ``/megarl/generate`` as an engine does, without one: it breaks, cuts and holds back as told."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager

import numpy as np
from aiohttp import web

from megarl.engines.client.client import EngineClient, Prompt, Sampling
from megarl.engines.client.frames import Completion, StreamHeartbeat, VersionSpan, encode, unpack_ids
from megarl.tasks import ChatTokenizer
from tests.engine_rows import choice_of

KEY = "key of the job"


def answer(tokenizer: ChatTokenizer, prompt: Prompt, seed: int) -> np.ndarray:
    """The right answer for even seeds, 0 for odd ones."""
    question = tokenizer.decode(prompt.token_ids)
    return tokenizer.response_ids(str(int(question.split(" ")[0]) + 1) if seed % 2 == 0 else "0")


def broken(http: web.Request, stream: web.StreamResponse) -> web.StreamResponse:
    assert http.transport is not None
    http.transport.abort()
    return stream


class FakeServer:
    """``/megarl/generate`` as the engine's endpoint speaks it. ``alive`` off: the connection breaks mid-answer.
    ``cuts``: bytes after which the connection breaks, of the first calls. ``held``: only heartbeats until it is set."""

    def __init__(self, tokenizer: ChatTokenizer, cuts: Sequence[int] = ()) -> None:
        self.tokenizer, self.alive, self.delay_s = tokenizer, True, 0.0
        self.cuts = list(cuts)
        self.received, self.held = threading.Event(), threading.Event()
        self.held.set()
        self.calls: list[list[tuple[int | None, int]]] = []
        """(seed, n) of every prompt."""

    async def handle(self, http: web.Request) -> web.StreamResponse:
        if http.headers.get("Authorization") != f"Bearer {KEY}":
            return web.Response(status=401)
        body = await http.json()
        self.received.set()
        self.calls.append([(record["seed"], record["n"]) for record in body["prompts"]])
        stream = web.StreamResponse()
        await stream.prepare(http)
        left, beats = self.cuts.pop(0) if self.cuts else None, 0
        while not self.held.is_set():
            beats += 1
            await stream.write(encode(StreamHeartbeat(64 * beats, False)))
            await asyncio.sleep(0.02)
        for i, record in enumerate(body["prompts"]):
            for j in range(record["n"]):
                if not self.alive:
                    return broken(http, stream)
                await asyncio.sleep(self.delay_s)
                ids = answer(self.tokenizer, Prompt(unpack_ids(base64.b64decode(record["token_ids"]))), j)
                logprobs, spans = np.full(len(ids), -0.5, np.float32), (VersionSpan("2.7", 0, len(ids)),)
                frame = encode(Completion(i, j, ids, logprobs, "stop", spans))
                await stream.write(frame[:left])
                if left is not None and (left := left - len(frame)) <= 0:
                    await asyncio.sleep(0.05)  # what was written is on its way
                    return broken(http, stream)
        return stream


@contextmanager
def serving(server: FakeServer) -> Iterator[str]:
    loop, started, urls = asyncio.new_event_loop(), threading.Event(), []

    async def start() -> None:
        app = web.Application()
        app.router.add_post("/megarl/generate", server.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.set()

    def main() -> None:
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


class Connected:
    """An engine of the explorer, over HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Completion]:
        async with (
            EngineClient(choice_of(self.url), KEY) as client,
            aclosing(client.generate(prompts, sampling)) as answers,
        ):
            async for completion in answers:
                yield completion
