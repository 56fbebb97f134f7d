"""A front of a real ``megarl sandbox serve`` that answers every third request in one of more than 40 wrong ways.

Replies are cut, changed, late or others'; zygotes, their bwrap and the service itself are killed around a program.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from megarl.run.process import ports
from megarl.sandbox import client

KEY = "a key of the tests, long enough"
HOST = "127.0.0.1"
START_S = 120.0
SLEEP = "import time; time.sleep(0.5)\n"
"""Before a program that something is to happen to while it runs."""
Json = dict[str, Any]


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def slow(self) -> Request:
        fields = json.loads(self.body)
        body = json.dumps({**fields, "program": SLEEP + fields["program"]}).encode()
        return replace(self, body=body, headers={**self.headers, "content-length": str(len(body))})


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes
    signature: str = ""

    def head(self, **more: str) -> bytes:
        lines = {"Content-Type": "application/json", client.SIGNATURE_HEADER: self.signature}
        lines |= {"Content-Length": str(len(self.body))} | {k.replace("_", "-"): v for k, v in more.items()}
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value != "-")
        return f"HTTP/1.1 {self.status} Whatever\r\n{text}\r\n".encode()


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


CHUNKED = {"Transfer_Encoding": "chunked", "Content_Length": "-"}
BROKEN: dict[str, Callable[[Reply], bytes]] = {
    "no reply": lambda reply: b"",
    "half a head": lambda reply: half(reply.head()),
    "no body": lambda reply: reply.head(),
    "half a body": lambda reply: reply.head() + half(reply.body),
    "half a body without a length": lambda reply: reply.head(Content_Length="-") + half(reply.body),
    "no HTTP": lambda reply: b"220 mail ready\r\n\r\n" + reply.body,
    "no chunk": lambda reply: reply.head(**CHUNKED) + b"none\r\n" + reply.body,
    "no last chunk": lambda reply: reply.head(**CHUNKED) + b"%x\r\n" % len(reply.body) + reply.body + b"\r\n",
    "length of a half": lambda reply: reply.head(Content_Length=str(len(reply.body) // 2)) + reply.body,
    "length without end": lambda reply: reply.head(Content_Length=str(10**12)) + reply.body,
    "length that is none": lambda reply: reply.head(Content_Length="many") + half(reply.body),
}
"""What is sent before the connection is closed."""
STATUSES = (204, 302, 401, 404, 429, 500, 502, 503, 504)
BODIES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda body: b"",
    "a page": lambda body: b"<html><body>It works!</body></html>",
    "null": lambda body: b"null",
    "not UTF-8": lambda body: b"\xff\xfe" + body,
    "nested": lambda body: b"[" * 100_000,
    "changed": lambda body: body.replace(b"true", b"null").replace(b'exit_code": 0', b'exit_code": 1') + b" ",
}
"""Without a signature that fits."""


def items_of(reply: Json) -> list[Json]:
    return reply["results"] if "results" in reply else [reply["result"]]  # type: ignore[no-any-return]


def changed(reply: Json, **values: Any) -> Json:
    for item in items_of(reply):
        item.update({name: value for name, value in values.items() if name in item})
    return reply


def longer(reply: Json, more: int) -> Json:
    """One result more or less."""
    lists = [reply["results"]] if "results" in reply else [reply["result"][name] for name in ("passed", "reasons")]
    for found in lists:
        found[:] = found[:-1] if more < 0 else [*found, found[-1]]
    return reply


def without_fields(reply: Json) -> Json:
    for item in items_of(reply):
        for name in ("exit_code", "reasons"):
            item.pop(name, None)
    return reply


SIGNED: dict[str, Callable[[Json], Any]] = {
    "no fields": without_fields,
    "more fields": lambda reply: [item.update(more=1) for item in items_of(reply)] and reply,
    "texts for numbers": lambda reply: changed(reply, exit_code="0", passed=["yes", "no"], reasons=["", ""]),
    "a truth for a number": lambda reply: changed(reply, exit_code=True, seconds=True),
    "null for a text": lambda reply: changed(reply, stdout=None, stderr=None),
    "an unknown limit": lambda reply: changed(reply, limit="time"),
    "no time": lambda reply: changed(reply, seconds=float("nan")),
    "a result too many": lambda reply: longer(reply, 1),
    "a result too few": lambda reply: longer(reply, -1),
    "no results": lambda reply: {},
    "a list": lambda reply: [reply],
}
"""As if the service itself had sent them."""
KILLS = ("zygote before", "zygote while", "bwrap while", "zygote after", "service while", "service after")
OTHERS = ("refused", "reset", "reset in the body", "of another request", "late")
KINDS = (*BROKEN, *map(str, STATUSES), *BODIES, *SIGNED, *OTHERS, *KILLS)


class FaultySandbox:
    """The front and the service behind it. Use as a context manager."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self.port, self._service_port = ports.choose(HOST, 2, None)
        self.given: list[str] = []
        """Kinds of faults that requests had."""
        self.requests = 0
        self._posts = itertools.count()
        self._gets = itertools.count()
        self._lock = threading.Lock()
        self._waiting = list(KINDS)
        self._last = Reply(200, b"{}")
        self._closed = self._refusing = False
        self._up = threading.Event()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> FaultySandbox:
        self._start()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._thread.join()
        self._service.kill()
        self._service.wait()

    def _start(self) -> None:
        command = [sys.executable, "-m", "megarl", "sandbox", "serve", "--port", str(self._service_port)]
        with self._output.open("ab") as output:
            self._service = subprocess.Popen(
                [*command, "--workers", "2"], env={**os.environ, client.KEY_VARIABLE: KEY}, stderr=output
            )
        until = time.monotonic() + START_S
        while not listens(self._service_port):
            assert self._service.poll() is None and time.monotonic() < until, self._output.read_text()
            time.sleep(0.05)
        self._up.set()

    def _restart(self) -> None:
        self._up.clear()
        self._service.kill()
        self._service.wait()
        self._start()

    def _listen(self) -> None:
        while not self._closed:
            with socket.create_server((HOST, self.port)) as server:
                server.settimeout(0.02)
                while not self._closed and not self._refusing:
                    with contextlib.suppress(TimeoutError):
                        threading.Thread(target=self._serve, args=(server.accept()[0],), daemon=True).start()
            if self._refusing:
                time.sleep(0.3)
                self._refusing = False

    def _serve(self, link: socket.socket) -> None:
        with link, link.makefile("rb") as reader, contextlib.suppress(OSError, http.client.HTTPException):
            while (request := read(reader)) is not None and self._answer(request, link):
                pass

    def _answer(self, request: Request, link: socket.socket) -> bool:
        """False: the connection is over."""
        kind = self._next(request)
        if kind is None:
            reply = self._forward(request)
            link.sendall(reply.head() + reply.body)
            return True
        happened = goes_on = False
        try:
            happened, goes_on = self._fail(kind, request, link)
        finally:
            with self._lock:
                (self.given if happened else self._waiting).append(kind)
        return goes_on

    def _next(self, request: Request) -> str | None:
        """The fault of this request, if it has one. Of looks at the service one has, after the job began."""
        with self._lock:
            if request.method == "GET":
                return "500" if self.requests and not next(self._gets) else None
            self.requests += 1
            if next(self._posts) % 3 != 2:
                return None
            self._waiting = self._waiting or list(KINDS)
            return self._waiting.pop(0)

    def _fail(self, kind: str, request: Request, link: socket.socket) -> tuple[bool, bool]:
        """(whether it has happened, whether the connection goes on)."""
        if kind in KILLS:
            return self._kill(kind, request, link)
        if kind in ("refused", "reset"):
            self._refusing = self._refusing or kind == "refused"
            reset(link)
            return True, False
        if kind == "late":
            link.settimeout(START_S)
            with contextlib.suppress(ConnectionError):
                link.recv(1)  # until its worker has been killed
            return True, False
        last, reply = self._last, self._forward(request)
        sent, goes_on = reply.head() + reply.body, True
        if reply.status == 200:
            self._last = reply
        elif not kind.isdecimal():
            link.sendall(sent)  # another fault, of a program that ran beside this one
            return False, True
        if kind in BROKEN:
            sent, goes_on = BROKEN[kind](reply), False
        elif kind == "reset in the body":
            link.sendall(reply.head() + half(reply.body))
            reset(link)
            return True, False
        elif kind == "of another request":
            sent = last.head() + last.body
        elif kind in BODIES:
            body = BODIES[kind](reply.body)
            sent = replace(reply, body=body).head() + body
        elif kind in SIGNED:
            body = json.dumps(SIGNED[kind](json.loads(reply.body))).encode()
            signature = client.signature(KEY, request.headers.get(client.REQUEST_HEADER.lower(), ""), body)
            sent = Reply(200, body, signature).head() + body
        else:
            body = b"" if kind == "204" else b'{"error": "none"}'
            sent = Reply(int(kind), body).head(Location=self.url + request.path) + body
        link.sendall(sent)
        return True, goes_on

    def _kill(self, kind: str, request: Request, link: socket.socket) -> tuple[bool, bool]:
        what, when = kind.split()
        if when != "while":
            if when == "before":
                kill(self._zygotes())
            reply = self._forward(request)
            if when == "after":
                kill(self._zygotes()) if what == "zygote" else self._restart()
            link.sendall(reply.head() + reply.body)
            return True, True
        found: list[Reply] = []

        def forward() -> None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                found.append(self._forward(request.slow()))

        thread = threading.Thread(target=forward)
        thread.start()
        killed = False
        while thread.is_alive() and not (killed and what == "service"):
            if busy := [zygote for zygote in self._zygotes() if children(zygote)]:
                if what == "service":
                    self._restart()
                else:
                    kill(busy if what == "zygote" else [bwrap for z in busy if (bwrap := z.parent()) is not None])
                killed = True
            time.sleep(0.01)
        thread.join()
        if not found:
            reset(link)
            return killed, False
        link.sendall(found[0].head() + found[0].body)
        return killed and found[0].status == 500, True

    def _zygotes(self) -> list[psutil.Process]:
        """Processes 1 of the service's lasting sandboxes: the children of its bwraps."""
        with contextlib.suppress(psutil.Error):
            return [inner for bwrap in psutil.Process(self._service.pid).children() for inner in children(bwrap)]
        return []

    def _forward(self, request: Request) -> Reply:
        """Raises OSError or HTTPException when the service is killed meanwhile."""
        self._up.wait(START_S)
        connection = http.client.HTTPConnection(HOST, self._service_port, timeout=START_S)
        try:
            connection.request(request.method, request.path, request.body, request.headers)
            response = connection.getresponse()
            body = response.read()
            return Reply(response.status, body, response.getheader(client.SIGNATURE_HEADER, ""))
        finally:
            connection.close()


def read(reader: Any) -> Request | None:
    """The next request; None at the end of a connection."""
    words = reader.readline().decode().split()
    if len(words) < 3:
        return None
    headers = {}
    while line := reader.readline().decode().strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return Request(words[0], words[1], headers, reader.read(int(headers.get("content-length", 0))))


def reset(link: socket.socket) -> None:
    """End a connection by RST when it is closed."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return process.children()
    return []


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def listens(port: int) -> bool:
    with socket.socket() as link:
        return link.connect_ex((HOST, port)) == 0
