"""The job's key, required on every path of an engine server.

vLLM's ``--api-key`` guards only some prefixes, and its development routes (``/collective_rpc`` above all) run any code
that the caller names. This middleware guards all paths. Standard library only: vLLM imports it by name
(``--middleware megarl.engines.client.auth.RequireKey``).
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

KEY_VARIABLE = "MEGARL_JOB_KEY"


def bearer(key: str) -> dict[str, str]:
    """Return the header that ``RequireKey`` requires."""
    return {"Authorization": f"Bearer {key}"}


class RequireKey:
    """ASGI middleware: 401 for every request whose ``Authorization`` header is not ``Bearer $MEGARL_JOB_KEY``."""

    def __init__(self, app: App) -> None:
        key = os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise ValueError(f"{KEY_VARIABLE} is empty: an engine server needs the job's key in its environment")
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "the job's key is missing or wrong"})
        else:
            await _unauthorized(send)

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


async def _unauthorized(send: Send) -> None:
    body = b'{"error": "the job\'s key is missing or wrong: send Authorization: Bearer <key>"}'
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
