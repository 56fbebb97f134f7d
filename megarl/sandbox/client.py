"""The client of a ``megarl sandbox serve``: requests and replies as JSON, the same for both sides."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import http.client
import json
import os
import secrets
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from megarl.core.errors import SandboxError
from megarl.sandbox.inside import values
from megarl.sandbox.interface import Call, CheckResult, Checks, Limit, Limits, Result, Sandbox, Test
from megarl.sandbox.selftest import local_sandbox

KEY_VARIABLE = "MEGARL_SANDBOX_KEY"
MAX_BODY_BYTES = 64 * 2**20
REQUEST_HEADER, SIGNATURE_HEADER = "Megarl-Request", "Megarl-Signature"
"""Headers: the client's random name of a request; in the reply, the ``signature`` of both."""


def key() -> str:
    return os.environ.get(KEY_VARIABLE, "")


def signature(key: str, request: str, reply: bytes) -> str:
    """Return the signature that proves a reply complete, from the service and for this request."""
    return hmac.new(
        key.encode(), request.encode("utf-8", "surrogateescape") + b"\n" + reply, hashlib.sha256
    ).hexdigest()


def to_json(value: Any) -> Any:
    """Convert any dataclass of the interface but ``Test``."""
    return dataclasses.asdict(value)


def a_test_to(test: Test) -> Any:
    call = (
        None
        if test.call is None
        else {"function": test.call.function, "arguments": values.encode(list(test.call.arguments))}
    )
    return {"stdin": test.stdin, "call": call}


def a_test_from(data: dict[str, Any]) -> Test:
    call = data.get("call")
    made = (
        None if call is None else Call(_is(call["function"], str), tuple(_is(values.decode(call["arguments"]), list)))
    )
    return Test(_is(data["stdin"], str), made)


def limits_from(data: dict[str, Any]) -> Limits:
    return Limits(**data)


def checks_from(data: dict[str, Any]) -> Checks:
    tests = tuple(_is(test, str) for test in data["tests"])
    return Checks(tests, _is(data["setup"], str), None if data["entry"] is None else _is(data["entry"], str))


def description_from(reply: Any) -> str:
    """Return the description in a reply. Raises LookupError, TypeError or ValueError for an invalid reply, as the
    functions below."""
    return str(_is(_is(reply, dict)["sandbox"], str))


def results_from(reply: Any) -> list[Result]:
    return [_result_from(item) for item in _is(_is(reply, dict)["results"], list)]


def _result_from(data: Any) -> Result:
    made = Result(**_is(data, dict))
    for value, kind in ((made.stdout, str), (made.stderr, str), (made.exit_code, int)):
        _is(value, kind)
    _is_text_or_none(made.value)
    _is_limit(made.limit)
    for seconds in (made.seconds, made.cpu_s):
        _is_time(seconds)
    return made


def check_result_from(reply: Any) -> CheckResult:
    data = _is(_is(reply, dict)["result"], dict)
    passed = tuple(_is(item, bool) for item in _is(data["passed"], list))
    reasons = tuple(_is(item, str) for item in _is(data["reasons"], list))
    if passed != tuple(not reason for reason in reasons):
        raise ValueError("the reasons are not those of the tests that failed")
    made = CheckResult(**{**data, "passed": passed, "reasons": reasons})
    _is_text_or_none(made.row_error)
    _is_limit(made.limit)
    _is(made.stderr, str)
    _is_time(made.seconds)
    return made


def _is_text_or_none(value: Any) -> None:
    if value is not None:
        _is(value, str)


def _is_limit(value: Any) -> None:
    if value is not None and value not in get_args(Limit):
        raise ValueError(f"{str(value)[:40]!r} is no limit")


def _is_time(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**40:
        raise TypeError(f"{str(value)[:40]!r} should be a time")


def _is(value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{str(value)[:40]!r} should be of type {kind.__name__}")
    return value


CONNECT_S = 10.0
BUSY_S = 60.0
"""Seconds that a request waits for a place in the service's queue, or for a service that is being restarted."""
REPLY_S = 90.0
"""Seconds added to the limits' time, for the queue and for starts on a busy host."""
PAUSE_S = 0.2
PASSING = (0, 429, 502, 503, 504)
"""Statuses after which a request is retried; 0 stands for no reply. Proxies send 502 and 504 while a service
restarts."""
EARLY_S = 0.1
"""Largest difference in seconds between both sides' clocks, when tests have no result because time ran out."""
PIECE_BYTES, HEAD_BYTES, STDERR_BYTES = 2**20, 2**16, 2**12
ESCAPED = 6
"""Most bytes of JSON per byte of output."""


def open_sandbox(url: str | None = None, python: str | None = None) -> Sandbox:
    """Open this machine's sandbox with interpreter ``python``, after its self-test; or the service at ``url``, with its
    own interpreter.

    Raises SandboxError if the isolation is not proven, the service does not reply, or MEGARL_SANDBOX_KEY is not its
    key.
    """
    if url is None or not url:
        return local_sandbox(python)
    remote = RemoteSandbox(url, key())
    remote.describe()
    return remote


class RemoteSandbox:
    """See ``Sandbox``. Keeps one connection open; not thread-safe."""

    def __init__(self, url: str, key: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SandboxError(f"reward.code.url={url}: must be http://HOST:PORT or https://HOST:PORT")
        if not key:
            raise SandboxError(f"{KEY_VARIABLE} is empty: it must be the key of the service at {url}")
        self._url = url
        self._key = key
        self._path = parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port, timeout=CONNECT_S)

    def run(self, program: str, tests: Sequence[Test], limits: Limits, stop: bool = False) -> list[Result]:
        body = {"program": program, "tests": [a_test_to(t) for t in tests], "limits": to_json(limits), "stop": stop}
        began = time.monotonic()
        found = self._ask("POST", "/run", body, REPLY_S + limits.total_s, _most_bytes(len(tests), limits))
        with self._understood():
            results = results_from(found)
            if stop and not all(result.ok for result in results[:-1]):
                raise ValueError("results follow one that is not ok")
            stopped = stop and bool(results) and not results[-1].ok
            _check_count(len(results), min(len(results), len(tests)) if stopped else len(tests), limits, began)
        return results

    def check(self, program: str, checks: Checks, limits: Limits) -> CheckResult:
        body = {"program": program, "checks": to_json(checks), "limits": to_json(limits)}
        began = time.monotonic()
        found = self._ask("POST", "/check", body, REPLY_S + limits.total_s, _most_bytes(1, limits))
        with self._understood():
            result = check_result_from(found)
            _check_count(len(result.passed), len(checks.tests), limits, began)
        return result

    def describe(self) -> str:
        found = self._ask("GET", "/health", None, CONNECT_S, HEAD_BYTES)
        with self._understood():
            return f"{description_from(found)}, at {self._url}"

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        """Raise SandboxError for an invalid reply, which must not count as a program's result."""
        try:
            yield
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            raise SandboxError(f"the sandbox service at {self._url} sent what is no reply: {why}") from error

    def _ask(self, method: str, path: str, body: Any, timeout_s: float, most: int) -> Any:
        """Send a request, and retry after a lost connection: programs have no lasting effects."""
        data = None if body is None else json.dumps(body)
        until = time.monotonic() + BUSY_S
        while True:
            try:
                status, text = self._exchange(method, path, data, timeout_s, most)
                why = f"{status}: {text[:300].decode(errors='replace')}"
            except TimeoutError as error:
                raise SandboxError(
                    f"the sandbox service at {self._url} did not answer within {timeout_s:g} s"
                ) from error
            except (OSError, http.client.HTTPException) as error:
                status, why = 0, str(error) or type(error).__name__
            if status == 200:
                with self._understood():
                    return json.loads(text)
            if status == 401:
                raise SandboxError(
                    f"the sandbox service at reward.code.url={self._url} refuses the key in {KEY_VARIABLE}"
                )
            if status not in PASSING or time.monotonic() > until:
                raise SandboxError(f"the sandbox service at reward.code.url={self._url} fails: {why}")
            time.sleep(PAUSE_S)

    def _exchange(self, method: str, path: str, data: str | None, timeout_s: float, most: int) -> tuple[int, bytes]:
        """Send one request; return the status and body of its reply. The connection is kept only after a complete
        reply: leftover bytes would be taken for the next reply."""
        name = secrets.token_hex(16)
        kept = False
        try:
            self._connection.timeout = timeout_s
            if self._connection.sock is not None:
                self._connection.sock.settimeout(timeout_s)
            self._connection.request(method, self._path + path, data, {**self._headers, REQUEST_HEADER: name})
            with self._connection.getresponse() as response:
                text, status = self._read(response, most), response.status
                signed = response.getheader(SIGNATURE_HEADER, "")
            kept = hmac.compare_digest(signed.encode(), signature(self._key, name, text).encode())
        finally:
            if not kept:
                self._connection.close()
        if status == 200 and not kept:
            raise SandboxError(
                f"what answers at reward.code.url={self._url} is no `megarl sandbox serve` of this version, or its "
                f"reply was changed on the way: {text[:100]!r}"
            )
        return status, text

    def _read(self, response: http.client.HTTPResponse, most: int) -> bytes:
        data = bytearray()
        while len(data) <= most and (response.length or 0) <= most:
            piece = response.read(PIECE_BYTES)
            data += piece
            if not piece:
                if response.length:
                    raise http.client.IncompleteRead(bytes(data[:HEAD_BYTES]), response.length)
                return bytes(data)
        raise SandboxError(f"the sandbox service at {self._url} sent more than the {most} bytes that a reply can have")


def _most_bytes(results: int, limits: Limits) -> int:
    """Return the largest size of a reply in bytes: output, returned value and error output of each result."""
    return HEAD_BYTES + results * ESCAPED * (2 * limits.output_bytes + STDERR_BYTES)


def _check_count(results: int, tests: int, limits: Limits, began: float) -> None:
    """Raise ValueError for too many results, or too few although time was left."""
    seconds = time.monotonic() - began
    if results > tests or (results < tests and seconds < limits.total_s - EARLY_S):
        raise ValueError(f"{tests} tests have {results} results after {seconds:.2f} s of {limits.total_s:g} s")
