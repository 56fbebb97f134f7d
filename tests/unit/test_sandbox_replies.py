"""Replies that no sandbox service gives: each is a SandboxError, never a result."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megarl.config.rewards import CodeConfig
from megarl.core.errors import SandboxError
from megarl.rewards.code import make_scorer
from megarl.sandbox import client
from megarl.sandbox.client import RemoteSandbox
from megarl.sandbox.interface import Checks, Limits, Test

KEY = "sixteen letters.."
RESULT = {"exit_code": 0, "limit": None, "stdout": "1", "stderr": "", "value": None, "seconds": 0.1, "cpu_s": 0.1}
CHECKED = {"passed": [True, True], "reasons": ["", ""], "row_error": None, "limit": None, "stderr": "", "seconds": 0.1}
ASSERTS = json.dumps({"test_list": ["assert f(1) == 1", "assert f(2) == 2"]})
CALLS = json.dumps({"inputs": ["1", "2"], "outputs": ["1", "1"]})
CHANGES: tuple[dict[str, Any], ...] = (
    {"exit_code": "0"}, {"exit_code": True}, {"exit_code": 0.5}, {"exit_code": None}, {"limit": "none"},
    {"limit": 0}, {"limit": []}, {"stdout": None}, {"stdout": 1}, {"stderr": ["a"]}, {"value": 1},
    {"value": {"t": 1}}, {"seconds": "1"}, {"seconds": float("nan")}, {"cpu_s": -1}, {"cpu_s": True},
    {"seconds": 10**400}, {"more": 1},
)  # fmt: skip


class Service(http.server.ThreadingHTTPServer):
    """Gives ``reply``, signed unless ``signed`` says otherwise."""

    reply: Any = None
    signed: Callable[[str, bytes], str] = staticmethod(lambda name, body: client.signature(KEY, name, body))
    status = 200
    more: dict[str, str]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Service
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        reply = self.server.reply
        body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(self.server.status)
        self.send_header(client.SIGNATURE_HEADER, self.server.signed(self.headers[client.REQUEST_HEADER] or "", body))
        for name, value in {"Content-Length": str(len(body)), **self.server.more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(client, "BUSY_S", 0.3)
    with Service(("127.0.0.1", 0), Handler) as server:
        server.more = {}
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def sandbox_of(service: Service) -> RemoteSandbox:
    return RemoteSandbox(f"http://127.0.0.1:{service.server_port}", KEY)


def run(service: Service, **more: Any) -> Any:
    return sandbox_of(service).run("", [Test(), Test()], Limits(total_s=more.pop("total_s", 60.0)), **more)


def verdict(service: Service, tests: str) -> dict[str, Any]:
    return make_scorer(sandbox_of(service), CodeConfig())("def f(x): return x", tests, None)


def test_right_replies_are_taken(service: Service) -> None:
    service.reply = {"results": [RESULT, RESULT]}
    assert [result.stdout for result in run(service)] == ["1", "1"]
    service.reply = {"results": [{**RESULT, "exit_code": 3}]}
    assert [result.exit_code for result in run(service, stop=True)] == [3]
    service.reply = {"results": [RESULT]}
    assert len(run(service, total_s=0.001)) == 1  # there was no time for the other
    service.reply = {"result": CHECKED}
    assert sandbox_of(service).check("", Checks(("", "")), Limits()).passed == (True, True)


@pytest.mark.parametrize(
    "reply",
    [
        b"", b"{", b"\xff\xfe", b"<html>", b"[" * 100_000, b'{"results": [1e999]}', b"1" * 5000, None, [], {}, "text",
        {"results": None}, {"results": {}}, {"results": [None]}, {"results": [RESULT, 1]},
        {"results": [RESULT]}, {"results": []}, {"results": [RESULT] * 3},
        *({"results": [RESULT, {**RESULT, **change}]} for change in CHANGES),
        *({"results": [RESULT, {k: v for k, v in RESULT.items() if k != name}]} for name in RESULT),
    ],
    ids=lambda reply: str(reply)[:80],
)  # fmt: skip
def test_results_that_no_sandbox_gives_are_none(service: Service, reply: Any) -> None:
    service.reply = reply
    with pytest.raises(SandboxError):
        run(service)
    found = verdict(service, CALLS)
    assert found["status"] == "error" and "SandboxError" in found["reason"]


@pytest.mark.parametrize(
    "change",
    [
        {"passed": [True]}, {"reasons": [""]}, {"passed": [True, False]}, {"reasons": ["limit: wall", ""]},
        {"passed": [], "reasons": []}, {"passed": None}, {"passed": "ab"},
        {"passed": [True, False, True], "reasons": ["", "wrong", ""]}, {"passed": [1, 1]}, {"passed": ["", ""]},
        {"passed": [True, None]}, {"reasons": [None, ""]}, {"reasons": [0, 0]}, {"row_error": 1}, {"limit": "none"},
        {"stderr": None}, {"seconds": None}, {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_verdicts_of_assertions_that_no_sandbox_gives_are_none(service: Service, change: dict[str, Any]) -> None:
    service.reply = {"result": {**CHECKED, **change}}
    with pytest.raises(SandboxError, match="is no reply"):
        sandbox_of(service).check("", Checks(("", "")), Limits())
    assert verdict(service, ASSERTS)["status"] == "error"


def test_results_after_the_one_that_ends_a_request(service: Service) -> None:
    service.reply = {"results": [{**RESULT, "exit_code": 1}, RESULT]}
    with pytest.raises(SandboxError, match="follow"):
        run(service, stop=True)
    assert len(run(service)) == 2


@pytest.mark.parametrize("reply", [None, {}, {"sandbox": 1}, []])
def test_a_service_that_is_none_describes_nothing(service: Service, reply: Any) -> None:
    service.reply = reply
    with pytest.raises(SandboxError, match="is no reply"):
        sandbox_of(service).describe()


def test_a_reply_to_another_request_or_changed_on_the_way_is_refused(service: Service) -> None:
    service.reply = {"results": [RESULT, RESULT]}
    for signed in (
        lambda name, body: "",
        lambda name, body: client.signature(KEY, "another", body),
        lambda name, body: client.signature(KEY, name, body + b" "),
        lambda name, body: client.signature("another key", name, body),
    ):
        service.signed = signed  # type: ignore[method-assign]
        with pytest.raises(SandboxError, match="changed on the way"):
            run(service)


def test_nothing_of_a_refused_reply_is_read_as_the_next(service: Service) -> None:
    sandbox = sandbox_of(service)
    service.reply, service.more = {"results": [RESULT, RESULT]}, {"Content-Length": "5"}
    with pytest.raises(SandboxError):
        sandbox.run("", [Test(), Test()], Limits())
    service.more = {}
    assert len(sandbox.run("", [Test(), Test()], Limits())) == 2


@pytest.mark.parametrize("length", ["1000000000000", "9" * 30])
def test_a_reply_without_end_is_not_read(service: Service, length: str) -> None:
    service.reply, service.more = {"results": []}, {"Content-Length": length}
    with pytest.raises(SandboxError, match="sent more than"):
        run(service)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_service_that_cannot_now_is_asked_again(service: Service, status: int) -> None:
    service.status, service.reply = status, {"results": [RESULT, RESULT]}
    timer = threading.Timer(0.1, setattr, (service, "status", 200))
    timer.start()
    assert len(run(service)) == 2
    timer.join()


@pytest.mark.parametrize("status", [201, 204, 302, 400, 401, 404, 500])
def test_other_statuses_are_no_results(service: Service, status: int) -> None:
    service.status, service.reply = status, {"results": [RESULT, RESULT]}
    with pytest.raises(SandboxError):
        run(service)
