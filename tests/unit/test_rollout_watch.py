"""An engine that has lost its weights is told from one that is busy; broken answers are errors."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megarl.core.errors import EngineError
from megarl.engines.client.control import EngineControl
from megarl.engines.fleet import EngineRow, EngineStatus, EngineTurn, Fleet
from megarl.run.process import process as probes
from megarl.run.process.process import Probe
from megarl.train.sync.look import lost
from tests.engine_rows import serving_row

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
def served() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def until(what: Any) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


GIVEN = [serving_row(0, "http://a"), serving_row(1, "http://b")]
GONE = [replace(row, wanted=False) for row in GIVEN]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (GIVEN, None),
        ([GIVEN[0], replace(GIVEN[1], start=9)], "engine 1 was started again at http://b"),
        ([GIVEN[0], replace(GIVEN[1], start=9, workers=2)], None),
        ([replace(row, start=9, workers=2) for row in GIVEN], "engine 0 was started again at http://a"),
        ([GIVEN[0], replace(GIVEN[1], start=9, state=EngineStatus.STARTING)], None),
        ([GIVEN[0], replace(GIVEN[1], state=EngineStatus.ABSENT)], None),
        ([GIVEN[0], replace(GIVEN[1], wanted=False)], None),
        ([replace(GIVEN[1], start=9, state=EngineStatus.STARTING)], None),
        ([replace(row, turn=EngineTurn.AWAY) for row in GIVEN], None),
        (
            [*(replace(row, wanted=False) for row in GIVEN), serving_row(2, "http://c")],
            "no engine .* is there, and http://c is",
        ),
        ([serving_row(0, "http://c", "explore-1")], "no engine that was given the weights is there, and http://c is"),
        ([], None),
    ],
)
def test_another_start_in_its_place_is_a_loss_once_it_serves(rows: list[EngineRow], words: str | None) -> None:
    """Until then the others go on; so they do where one is wanted no more, or has other workers by order."""
    found = lost(Fleet(rows), GIVEN)
    assert found is None if words is None else re.search(words, found or "")


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_answer_is_an_error_and_ends_no_probe(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a healthy engine would count as stalled."""
    monkeypatch.setattr(probes, "EVERY_S", 0.02)
    with served() as server:
        engine = EngineControl(f"http://127.0.0.1:{server.server_port}", "k", timeout_s=5.0)
        probe = Probe(engine.url, "k", os.getpgid(0), lambda: server.fileno() != -1)
        server.broken, asked = how, server.asked
        with pytest.raises(EngineError, match=f"the engine at {engine.url} "):
            engine.state()
        until(lambda: server.asked > asked + 3)
        server.broken, count = "", probe.count
        until(lambda: probe.count > count)
