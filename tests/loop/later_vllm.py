"""vLLM's pause as later versions have it, made of 0.32's: imported by an engine's server as a middleware.

An engine that is paused with ``abort`` or ``wait`` refuses new requests with status 503; with ``keep`` they queue.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineGenerateError

from megarl.engines.client.names import App, Receive, Scope, Send

REFUSALS = "/later_vllm/refusals"
_pause, _resume, _generate = AsyncLLM.pause_generation, AsyncLLM.resume_generation, AsyncLLM.generate
_closed: set[AsyncLLM] = set()
_refusals = 0


async def pause_generation(self: AsyncLLM, *, mode: Any = "abort", **options: Any) -> None:
    if mode != "keep":
        _closed.add(self)  # before the pause, which may wait long
    await _pause(self, mode=mode, **options)


async def resume_generation(self: AsyncLLM) -> None:
    _closed.discard(self)
    await _resume(self)


async def generate(self: AsyncLLM, *given: Any, **options: Any) -> AsyncGenerator[Any, None]:
    global _refusals
    if self in _closed:
        _refusals += 1
        paused = GracefulHTTPError("the engine is paused; try again", HTTPStatus.SERVICE_UNAVAILABLE)
        if _refusals % 2:  # as it is, and as the cause of vLLM's own error
            raise paused
        raise EngineGenerateError() from paused
    async for output in _generate(self, *given, **options):
        yield output


AsyncLLM.pause_generation, AsyncLLM.resume_generation = pause_generation, resume_generation  # type: ignore[method-assign]
AsyncLLM.generate = generate  # type: ignore[method-assign, assignment]


class Refusals:
    """Middleware that returns the number of refusals; the tests see that there were some."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != REFUSALS:
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(_refusals).encode()})
