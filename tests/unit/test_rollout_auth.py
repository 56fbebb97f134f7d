"""The key middleware against bare ASGI scopes; the loop tests ask a real server."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from megarl.engines.client.names import KEY_VARIABLE, RequireKey, bearer

Message = MutableMapping[str, Any]


def answer(scope: dict[str, Any]) -> list[Message]:
    """What the middleware sends for a scope; the app after it sends ``{"type": "app"}``."""
    sent: list[Message] = []

    async def app(scope: Message, receive: Any, send: Any) -> None:
        await send({"type": "app"})

    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(RequireKey(app)(scope, receive, send))
    return sent


def http(*headers: tuple[bytes, bytes], kind: str = "http") -> dict[str, Any]:
    return {"type": kind, "path": "/collective_rpc", "headers": list(headers)}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(KEY_VARIABLE, "s3cret")
    return "s3cret"


def test_the_key_opens(key: str) -> None:
    [(name, value)] = bearer(key).items()
    assert answer(http((name.lower().encode(), value.encode()))) == [{"type": "app"}]


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ((b"authorization", b"Bearer s3cre"),),
        ((b"authorization", b"Bearer s3crets"),),
        ((b"authorization", b"s3cret"),),
        ((b"authorization", b"Bearer "),),
        ((b"authorization", "Bearer \u00e9".encode()),),
        ((b"x-authorization", b"Bearer s3cret"),),
        ((b"authorization", b"Bearer other"), (b"authorization", b"Bearer s3cret")),  # ambiguous
    ],
)
def test_anything_else_is_401(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    start, body = answer(http(*headers))
    assert start["status"] == 401
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert b"s3cret" not in body["body"]


def test_websockets_need_it_too() -> None:
    [message] = answer(http(kind="websocket"))
    assert message["type"] == "websocket.close"


def test_startup_and_shutdown_pass() -> None:
    assert answer({"type": "lifespan"}) == [{"type": "app"}]


def test_a_server_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "")
    with pytest.raises(ValueError, match=KEY_VARIABLE):
        answer({"type": "lifespan"})
