"""Requests that an engine has not ended, and a pause that holds them open: a middleware of the engine's server."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from megarl.engines.client.names import App, Receive, Scope, Send, bearer
from tests.loop.engines import KEY, RunningEngine

PATH = "/under_way"
PROBES = "/inference/v1/generate"
LATE_S = 0.5
"""Seconds by which probes are late: whatever goes on without waiting for one goes on before it."""
OPTIONS = ("--middleware", "tests.loop.under_way.UnderWay")
"""Options of vLLM's server, for ``RunningEngine.options``."""


class HasDone(Protocol):
    """A future or a task."""

    def done(self) -> bool: ...


class UnderWay:
    """Middleware that returns the tokens of each request under way, and the ids of all requests that have ended. It
    holds probes back for a moment."""

    def __init__(self, app: App) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        ended: list[str] = []
        generate = AsyncLLM.generate
        self._app, self._ended = app, ended

        async def generate_and_note(self: AsyncLLM, *given: Any, **options: Any) -> AsyncGenerator[Any, None]:
            async for output in generate(self, *given, **options):
                if output.finished:
                    ended.append(output.request_id)
                yield output

        AsyncLLM.generate = generate_and_note  # type: ignore[method-assign, assignment]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == PROBES:
            await asyncio.sleep(LATE_S)
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        states = scope["app"].state.engine_client.output_processor.request_states.values()
        tokens = [state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None]
        body = json.dumps({"tokens": tokens, "ended": self._ended}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


def _asked(engine: RunningEngine) -> dict[str, Any]:
    request = urllib.request.Request(engine.url + PATH, headers=bearer(KEY))
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def under_way(engine: RunningEngine) -> list[int]:
    """Number of tokens of each request that the engine has not ended."""
    tokens: list[int] = _asked(engine)["tokens"]
    return tokens


def ended(engine: RunningEngine) -> list[str]:
    """Ids of the requests that the engine has ended, in that order; ``megarl-…`` but for probes."""
    ids: list[str] = _asked(engine)["ended"]
    return ids


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def hold(engine: RunningEngine, answers: HasDone, running: int = 1, tokens: int = 1) -> bool:
    """Pause the engine while ``running`` requests have at least so many tokens each. Return False if ``answers`` are
    done before that: ask again."""

    def run() -> bool:
        return sum(of >= tokens for of in under_way(engine)) >= running

    while not answers.done():
        if run():
            engine.control.pause("keep")
            if run():
                return True
            engine.control.resume()
        time.sleep(0.005)
    return False
