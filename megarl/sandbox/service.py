"""``megarl sandbox serve``: this host's sandbox over HTTP, for machines without namespaces.

A client with the key can use this host's cores within each request's limits, and nothing else. Results go to the client
and are not stored.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from megarl.core.errors import ConfigError, SandboxError
from megarl.sandbox import client
from megarl.sandbox.interface import Sandbox
from megarl.sandbox.selftest import local_sandbox

MIN_KEY = 16


class Service:
    """At most ``workers`` requests run and ``queue`` more wait; others get 503 and may retry."""

    def __init__(self, sandbox: Sandbox, key: str, workers: int, queue: int) -> None:
        for name, value, least in (("workers", workers, 1), ("queue", queue, 0)):
            if value < least:
                raise ConfigError(f"--{name} {value}: must be at least {least}")
        if len(key) < MIN_KEY:
            raise ConfigError(
                f"{client.KEY_VARIABLE} has {len(key)} characters: set it to a random key of at least {MIN_KEY}, here "
                "and where the reward workers run (python -c 'import secrets; print(secrets.token_urlsafe())')"
            )
        self._sandbox = sandbox
        self._key = key
        self._expected = f"Bearer {key}".encode()
        self._places = workers + queue
        self._taken = 0
        # bwrap ends with the thread that started it (--die-with-parent), so the threads live as long as the service
        self._threads = ThreadPoolExecutor(workers)

    def application(self) -> web.Application:
        """The HTTP application."""
        app = web.Application(client_max_size=client.MAX_BODY_BYTES, middlewares=[self._with_key])
        app.add_routes([web.get("/health", self._health), web.post("/run", self._run), web.post("/check", self._check)])
        return app

    @web.middleware
    async def _with_key(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._expected):
            return _problem(401, "the key is missing or wrong: send Authorization: Bearer <key>")
        response = await handler(request)
        if isinstance(response, web.Response) and isinstance(response.body, bytes):
            name = request.headers.get(client.REQUEST_HEADER, "")
            response.headers[client.SIGNATURE_HEADER] = client.signature(self._key, name, response.body)
        return response

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"sandbox": self._sandbox.describe(), "taken": self._taken, "places": self._places})

    async def _run(self, request: web.Request) -> web.Response:
        def work(body: dict[str, Any]) -> Any:
            tests = [client.a_test_from(item) for item in body["tests"]]
            results = self._sandbox.run(body["program"], tests, client.limits_from(body["limits"]), bool(body["stop"]))
            return {"results": [client.to_json(result) for result in results]}

        return await self._answer(request, work)

    async def _check(self, request: web.Request) -> web.Response:
        def work(body: dict[str, Any]) -> Any:
            checks = client.checks_from(body["checks"])
            return {
                "result": client.to_json(
                    self._sandbox.check(body["program"], checks, client.limits_from(body["limits"]))
                )
            }

        return await self._answer(request, work)

    async def _answer(self, request: web.Request, work: Callable[[dict[str, Any]], Any]) -> web.Response:
        if self._taken >= self._places:
            return _problem(503, "every place is taken; come again", {"Retry-After": "1"})
        self._taken += 1
        job = asyncio.ensure_future(self._work(request, work))
        job.add_done_callback(self._free)  # also if the client has gone: its program runs until its limits
        return await asyncio.shield(job)

    def _free(self, job: asyncio.Future[Any]) -> None:
        self._taken -= 1

    async def _work(self, request: web.Request, work: Callable[[dict[str, Any]], Any]) -> web.Response:
        try:
            body = await request.json()
            return web.json_response(await asyncio.get_running_loop().run_in_executor(self._threads, work, body))
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
            return _problem(400, f"{type(error).__name__}: {error}".splitlines()[0][:300])
        except SandboxError as error:
            return _problem(500, str(error))


def _problem(status: int, text: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": text}, status=status, headers=headers)


def serve(host: str, port: int, workers: int | None, queue: int, python: str | None = None) -> int:
    """Serve until a signal. Raises SandboxError if this host does not isolate, ConfigError for an invalid key or
    number."""
    service = Service(local_sandbox(python), client.key(), workers or len(os.sched_getaffinity(0)), queue)
    logging.info("sandbox service on http://%s:%d: %s", host, port, service._sandbox.describe())
    web.run_app(service.application(), host=host, port=port, print=None, access_log=None)
    return 0
