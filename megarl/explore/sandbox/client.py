"""The sandbox of a ``megarl sandbox serve``, and the choice between it and this machine's own."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

from megarl.core.errors import SandboxError
from megarl.explore.sandbox import wire
from megarl.explore.sandbox.interface import CheckResult, Checks, Limits, Result, Sandbox, Test
from megarl.explore.sandbox.proven import local_sandbox

CONNECT_S = 10.0
BUSY_S = 60.0
"""Seconds that a request waits for a place in the service's queue, or for a service that is being restarted."""
REPLY_S = 90.0
"""Beyond the limits' own time: waiting for a worker, and starts on a busy host."""
PAUSE_S = 0.2


def open_sandbox(url: str | None = None, python: str | None = None) -> Sandbox:
    """This machine's sandbox with that interpreter, after its self-test; or with an URL the service there, which has
    its own.

    Raises SandboxError when the isolation is not proven, the service does not answer, or MEGARL_SANDBOX_KEY is not its
    key.
    """
    if url is None or not url:
        return local_sandbox(python)
    remote = RemoteSandbox(url, wire.key())
    remote.describe()
    return remote


class RemoteSandbox:
    """See ``Sandbox``. One connection, kept open; not for several threads at once."""

    def __init__(self, url: str, key: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SandboxError(f"reward.code.url={url}: must be http://HOST:PORT or https://HOST:PORT")
        if not key:
            raise SandboxError(f"{wire.KEY_VARIABLE} is empty: it must be the key of the service at {url}")
        self._url = url
        self._path = parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port, timeout=CONNECT_S)

    def run(self, program: str, tests: Sequence[Test], limits: Limits, stop: bool = False) -> list[Result]:
        body = {
            "program": program,
            "tests": [wire.a_test_to(t) for t in tests],
            "limits": wire.to_json(limits),
            "stop": stop,
        }
        found = self._ask("POST", "/run", body, REPLY_S + limits.total_s)
        return [wire.result_from(item) for item in found["results"]]

    def check(self, program: str, checks: Checks, limits: Limits) -> CheckResult:
        body = {"program": program, "checks": wire.to_json(checks), "limits": wire.to_json(limits)}
        return wire.check_result_from(self._ask("POST", "/check", body, REPLY_S + limits.total_s)["result"])

    def describe(self) -> str:
        return f"{self._ask('GET', '/health', None, CONNECT_S)['sandbox']}, at {self._url}"

    def _ask(self, method: str, path: str, body: Any, timeout_s: float) -> Any:
        """A program has no lasting effect, so a request whose connection broke is simply made again."""
        data = None if body is None else json.dumps(body)
        until = time.monotonic() + BUSY_S
        while True:
            try:
                self._connection.timeout = timeout_s
                if self._connection.sock is not None:
                    self._connection.sock.settimeout(timeout_s)
                self._connection.request(method, self._path + path, data, self._headers)
                with self._connection.getresponse() as response:
                    text, status = response.read().decode(), response.status
                why = f"{status}: {text[:300]}"
                if status == 200:
                    return json.loads(text)
            except TimeoutError as error:
                self._connection.close()
                raise SandboxError(
                    f"the sandbox service at {self._url} did not answer within {timeout_s:g} s"
                ) from error
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                status, why = 0, str(error) or type(error).__name__
            if status == 401:
                raise SandboxError(
                    f"the sandbox service at reward.code.url={self._url} refuses the key in {wire.KEY_VARIABLE}"
                )
            if status not in (0, 503) or time.monotonic() > until:
                raise SandboxError(f"the sandbox service at reward.code.url={self._url} fails: {why}")
            time.sleep(PAUSE_S)
