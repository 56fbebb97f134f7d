"""HTTP endpoint for agents on loopback: OpenAI's chat completions, Anthropic's messages, a URL for each trajectory."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from megarl.explore.agents import anthropic, openai
from megarl.explore.agents.request import Asked, BadRequest, Repeated, Reply, SentBack
from megarl.explore.agents.session import NO_ROOM, ROOM, Session

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_BODY_BYTES = 64 * 2**20
"""Limit of a request: a trajectory's images in base64, and 20 MiB of text."""
STOP_S = 0.5
"""Grace period in seconds, applied twice, for requests when the server stops; their agents are already cancelled."""
MODEL = "megarl"
"""Name of the model in the list of models. Requests may use any name."""


class AgentServer:
    """Serves sessions. Use as an async context manager."""

    def __init__(self, socket: Path | None = None) -> None:
        """Args:
        socket: Path of an additional UNIX socket, for sandboxes without a network.
        """
        self._socket = socket
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._served = 0

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/{session}/v1/chat/completions", self._chat),
                web.post("/{session}/v1/messages", self._messages),
                web.get("/{session}/v1/models", self._models),
            ]
        )
        # Cancel handlers of disconnected clients, so that sessions notice.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=STOP_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0)
        await site.start()
        if self._socket is not None:
            await web.UnixSite(self._runner, self._socket).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @asynccontextmanager
    async def serving(self, session: Session) -> AsyncIterator[str]:
        """Yield a session's unguessable base URL, without the ``/v1``; close the session afterwards."""
        name = secrets.token_urlsafe(16)
        self._sessions[name] = session
        try:
            yield f"http://{HOST}:{self._port}/{name}"
        finally:
            del self._sessions[name]
            await session.close()

    def _session(self, request: web.Request) -> Session:
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise BadRequest("this session has ended", "not_found")
        return session

    def _number(self, prefix: str) -> str:
        self._served += 1
        return f"{prefix}-{self._served}"

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            body, replies = await self._replies(request, openai.asked_of, openai.sent_back)
        except BadRequest as error:
            return _refused({"error": {"message": str(error), "type": "invalid_request_error", "code": error.code}})
        number = self._number("chatcmpl")
        if body.get("stream"):
            return await _stream(request, openai.chunks_of(replies, number, body))
        return web.json_response(openai.response_of(replies, number, body))

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        try:
            body, [reply] = await self._replies(request, anthropic.asked_of, anthropic.sent_back)
        except BadRequest as error:
            return _refused({"type": "error", "error": {"type": "invalid_request_error", "message": str(error)}})
        number = self._number("msg")
        if body.get("stream"):
            return await _stream(request, anthropic.events_of(reply, number, body))
        return web.json_response(anthropic.response_of(reply, number, body))

    async def _replies(
        self, request: web.Request, asked_of: Callable[[Any, Repeated], Asked], sent_back: SentBack
    ) -> tuple[dict[str, Any], list[Reply]]:
        """Return a request's body and its responses. Raises BadRequest for any invalid body before sampling, because
        clients retry after status 500."""
        session = self._session(request)
        try:
            body = json.loads(await _read(request))
            asked = asked_of(body, session.repeated)
        except ValueError as error:
            raise BadRequest(f"the body is no JSON: {error}") from error
        except RecursionError as error:
            raise BadRequest("the body is nested too deeply") from error
        return body, await session.complete(asked, sent_back)

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL}
        return web.json_response({"object": "list", "data": [model]})


async def _read(request: web.Request) -> bytes:
    """Return the body of a request. Raises BadRequest if it is too large, truncated or wrongly encoded."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise BadRequest(f"a request of more than {MAX_BODY_BYTES // 2**20} MiB {ROOM}", NO_ROOM) from error
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body cannot be read: {error}") from error


def _refused(error: dict[str, Any]) -> web.Response:
    return web.json_response(error, status=400)


async def _stream(request: web.Request, events: Iterator[str]) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    await stream.write("".join(events).encode())
    await stream.write_eof()
    return stream
