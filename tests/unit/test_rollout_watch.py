"""A watch tells an engine that has lost its weights from one that is busy, against a server that answers as told."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megarl.core.errors import EngineError
from megarl.engine.client.control import EngineControl
from megarl.engine.client.watch import EngineWatch
from megarl.run.process import probe as probes
from megarl.run.process.probe import Probe

STATE: dict[str, Any] = {"version": "1.4", "paused": False, "refusing": None, "start": 1, "workers": 1}


BODIES = {"no JSON": b"<html>", "nested": b"[" * 100_000, "other fields": b'{"up": true}', "no object": b"[1]"}
BROKEN = [*BODIES, "reset", "short", "short refusal"]


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    state = STATE
    asked = 0
    delay_s = 0.0
    broken = ""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked += 1
        time.sleep(self.server.delay_s)
        text = json.dumps(self.server.state).encode()
        if self.server.broken == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        if self.server.broken in BODIES:
            text = BODIES[self.server.broken]
        self.send_response(500 if self.server.broken == "short refusal" else 200)
        self.send_header("Content-Length", str(len(text) + 10 * self.server.broken.startswith("short")))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def watched() -> Iterator[tuple[Server, EngineWatch]]:
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    engine = EngineControl(f"http://127.0.0.1:{server.server_port}", "k")
    try:
        with EngineWatch([engine], "1.4", every_s=0.02, answer_s=0.1) as watch:
            until(lambda: server.asked > 2)
            assert watch.lost is None
            yield server, watch
    finally:
        server.shutdown()
        server.server_close()


def until(what: Any) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "default", "refusing": "not published yet", "start": 2}, "has weights default instead of 1.4"),
        ({"refusing": "the transfer failed"}, "refuses: the transfer failed"),
    ],
)
def test_another_process_in_its_place_is_a_loss(change: dict[str, Any], words: str) -> None:
    with watched() as (server, watch):
        server.state = STATE | change
        until(lambda: watch.lost is not None)
        assert words in str(watch.lost)


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_answer_ends_no_watch(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a healthy engine would count as stalled, and one that has replaced it never get weights."""
    monkeypatch.setattr(probes, "EVERY_S", 0.02)
    with watched() as (server, watch):
        engine = EngineControl(f"http://127.0.0.1:{server.server_port}", "k", timeout_s=5.0)
        probe = Probe(engine.url, "k", os.getpgid(0), lambda: server.fileno() != -1)
        server.broken, asked = how, server.asked
        with pytest.raises(EngineError, match=f"the engine at {engine.url} "):
            engine.state()
        until(lambda: server.asked > asked + 3)
        assert watch.lost is None
        server.broken, count = "", probe.count
        until(lambda: probe.count > count)
        server.state = STATE | {"version": "default"}
        until(lambda: watch.lost is not None)


def test_one_that_is_silent_or_gone_may_be_busy_or_come_back() -> None:
    with watched() as (server, watch):
        server.delay_s, asked = 0.5, server.asked
        until(lambda: server.asked > asked + 2)
        assert watch.lost is None
        server.shutdown()
        server.server_close()
        time.sleep(0.2)  # it looks some times
        assert watch.lost is None
        again = Server(server.server_address, Handler)
        again.state = STATE | {"version": "default", "start": 2}
        threading.Thread(target=again.serve_forever, args=(0.01,), daemon=True).start()
        until(lambda: watch.lost is not None)
        again.shutdown()
        again.server_close()
