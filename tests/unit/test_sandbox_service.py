"""Requests that a sandbox service cannot read, before any program runs; tests/system/test_sandbox.py has those that it
can."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from megarl.sandbox.client import to_json
from megarl.sandbox.interface import Limits
from megarl.sandbox.service import Service

KEY = "sixteen letters.."
NESTED = "[" * 5000 + "]" * 5000
CALL = json.dumps({"program": "", "limits": to_json(Limits()), "stop": False, "tests": []})


class NoSandbox:
    def run(self, *request: Any) -> list[Any]:
        return []

    def check(self, *request: Any) -> Any:
        raise AssertionError("no request gets so far")

    def describe(self) -> str:
        return "none"


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/run", NESTED, "application/json"),
        ("/check", NESTED, "application/json"),
        (
            "/run",
            CALL.replace("[]", f'[{{"stdin": "", "call": {{"function": "f", "arguments": {NESTED}}}}}]'),
            "application/json",
        ),
        ("/run", "{}", "application/json; charset=none-such"),
        ("/run", "[1]", "application/json"),
        ("/check", '{"a":\n', "application/json"),
    ],
    ids=["nested", "nested check", "nested arguments", "charset", "no object", "cut off"],
)
def test_a_request_that_cannot_be_read_is_a_400_of_one_line(
    path: str, body: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> tuple[int, dict[str, Any]]:
        runner = web.AppRunner(Service(NoSandbox(), KEY, 1, 1).application())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": kind}
        try:
            async with (
                asyncio.timeout(60),
                aiohttp.ClientSession() as client,
                client.post(url, data=body, headers=headers) as answer,
            ):
                return answer.status, await answer.json(content_type=None)
        finally:
            await runner.cleanup()

    status, answer = asyncio.run(main())
    assert status == 400 and "\n" not in answer["error"]
    assert "Traceback" not in caplog.text
