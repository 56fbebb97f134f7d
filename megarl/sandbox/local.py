"""The sandbox on this machine: started from outside, one for each batch of tests.

A ``Zygote`` makes sandboxes; it is itself a long-lived sandbox that runs no programs. On machines without nested
namespaces each sandbox is a separate bwrap.

The submission's sandbox contains only the program and the current test's input. Its output is untrusted and is judged
outside; tests written as assertions run in a second sandbox without the submission's processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import marshal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

from megarl.core.errors import SandboxError
from megarl.core.text import without_surrogates
from megarl.sandbox import bubblewrap
from megarl.sandbox.bubblewrap import Host
from megarl.sandbox.inside.values import encode
from megarl.sandbox.interface import CheckResult, Checks, Limit, Limits, Result, Test, owners

START_S = 60.0
"""Most seconds for bwrap and Python to start, on a very busy machine."""
GRACE_S = 5.0
"""Seconds after ``wall_s``, enforced by the launcher inside, until the sandbox is killed from outside."""
GONE_S = 20.0
"""Most seconds for the kernel to remove a killed sandbox, on a very busy machine."""
HEAD = struct.Struct("<iBBddIII")
STDERR_BYTES = 4096
LIMITS: tuple[Limit | None, ...] = (None, "wall", "cpu", "memory", "output", "processes", "file")
"""Results of a test. ``HEAD``, ``STDERR_BYTES`` and ``LIMITS`` must equal those in inside/launcher.py."""
REQUEST = struct.Struct("<cQ")
"""Format of a request; must equal that in inside/zygote.py."""
ZYGOTE_TMP_BYTES = 2**20
MARSHAL = 2
"""Marshal version that every supported Python inside can read."""


class Outer:
    """A bwrap process with our code as process 1 inside, and our socket to that code."""

    def __init__(self, host: Host, first: str, tmp_bytes: int, passed: socket.socket | None, filtered: bool) -> None:
        self.link, inside = socket.socketpair()
        passed_fd = -1 if passed is None else passed.fileno()
        try:
            with inside, bubblewrap.filter_pipe(host.filter) if filtered else contextlib.nullcontext() as filter_fd:
                words = host.command(first, tmp_bytes, inside.fileno(), passed_fd, filter_fd)
                given = [inside.fileno(), passed_fd, -1 if filter_fd is None else filter_fd]
                self._process = bubblewrap.start(words, [fd for fd in given if fd >= 0], host.user)
        except SandboxError:
            self.link.close()
            raise
        with contextlib.suppress(OSError):  # if it has died, `last_words` has the reason
            self.link.sendall(host.code + marshal.dumps(host.filter, MARSHAL))

    def last_words(self) -> str:
        """Kill bwrap and return its error output."""
        self._kill()
        return bubblewrap.last_words(self._process)

    def _kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GONE_S)

    def close(self) -> bool:
        """Kill bwrap, and with it everything inside (--die-with-parent).

        Return True if a signal had already killed bwrap. A sandbox that ends by itself has an exit code instead.
        """
        if is_over(self.link):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GONE_S)
        status = self._process.poll()
        self._kill()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self.link.close()
        return status is not None and status < 0


class Zygote:
    """Makes sandboxes, one at a time. It ends with the thread that started it, so no other thread may use it."""

    def __init__(self, host: Host) -> None:
        self._outer = Outer(host, "zygote", ZYGOTE_TMP_BYTES, None, filtered=False)
        if read(self._outer.link, 1, time.monotonic() + START_S) != b"R":
            output = self._outer.last_words()
            self._outer.close()
            raise SandboxError(f"bwrap did not start the sandbox: {output or f'nothing within {START_S:g} s'}")

    def __del__(self) -> None:
        if hasattr(self, "_outer"):
            self._outer.close()

    def open(self, tmp_bytes: int, passed: socket.socket | None) -> socket.socket:
        """Open a new sandbox and return the link to its launcher. Call ``end`` before the next one."""
        here, inside = socket.socketpair()
        with inside:
            self._send(REQUEST.pack(b"S", tmp_bytes), [inside, *([] if passed is None else [passed])])
        return here

    def end(self) -> bool:
        """Kill the sandbox and wait for its end. Return False if the zygote failed; it is then killed too."""
        with contextlib.suppress(SandboxError):
            self._send(REQUEST.pack(b"E", 0), [])
            if read(self._outer.link, 1, time.monotonic() + GONE_S) == b"E":
                return True
        self._outer.close()
        return False

    def _send(self, data: bytes, descriptors: list[socket.socket]) -> None:
        try:
            self._outer.link.settimeout(START_S)
            socket.send_fds(self._outer.link, [data], [descriptor.fileno() for descriptor in descriptors])
        except OSError as error:
            raise SandboxError(f"the sandbox that makes sandboxes has ended: {error}") from error


class Box:
    """Sends jobs to a launcher and receives results. Leaving the context kills the sandbox."""

    def __init__(self, source: Zygote | Outer, link: socket.socket, limits: Limits) -> None:
        self._source = source
        self._link = link
        self._most = limits.output_bytes
        self._unsent = b""
        self.used = False
        """True if a test left files or processes behind: the next test needs another box."""
        self.lost = False
        """True if the sandbox was killed from outside; set on leaving the context. A missing result is then not the
        program's fault."""
        self._ready = self._closed = False

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the sandbox and wait for its end; later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        if isinstance(self._source, Zygote):
            self.lost = not self._source.end()
            self._link.close()
        else:
            self.lost = self._source.close()

    def start_answer(self, program: str, limits: Limits, wall_s: float, watch_s: float | None = None) -> None:
        """Run the program and let it serve calls over the descriptor passed to it.

        ``watch_s``: seconds between two checks of its memory; None for the default.
        """
        job = {"kind": "answer", "program": without_surrogates(program), "limits": dataclasses.asdict(limits)}
        self.set_job(job if watch_s is None else {**job, "watch_s": watch_s})
        self.send_test(Test(), wall_s, limits)

    def set_job(self, job: dict[str, Any]) -> None:
        """Set the job, once and before any test; it is sent with the first test."""
        self._unsent = marshal.dumps(job, MARSHAL)

    def send_test(self, test: Test, wall_s: float, limits: Limits) -> None:
        call = None if test.call is None else (test.call.function, json.dumps(encode(list(test.call.arguments))))
        stdin = test.stdin.encode("utf-8", "surrogateescape")
        if len(stdin) > limits.tmp_bytes // 2:
            raise SandboxError(
                f"a test's stdin has {len(stdin)} bytes: raise the limit tmp_bytes ({limits.tmp_bytes}) to twice that"
            )
        data = self._unsent + marshal.dumps({"stdin": stdin, "call": call, "wall_s": wall_s}, MARSHAL)
        self._unsent = b""
        if isinstance(self._source, Outer):
            self.wait()  # until the launcher runs: the code that loads it must not read the job
        with contextlib.suppress(OSError):  # it has died: `receive` finds no result
            self._link.settimeout(START_S)
            self._link.sendall(data)

    def wait(self) -> None:
        """Wait for the launcher. Raises SandboxError if it does not start."""
        if self._ready:
            return
        first = self._read(1, time.monotonic() + START_S)
        if first == b"!":  # a zygote's child that could not become a launcher
            raise SandboxError(f"the sandbox does not start: {self._link.recv(1000).decode(errors='replace')}")
        if first != b"R":
            output = self._source.last_words() if isinstance(self._source, Outer) else "its zygote has ended"
            raise SandboxError(f"bwrap did not start the sandbox: {output or f'nothing within {START_S:g} s'}")
        self._ready = True

    def receive(self, timeout_s: float) -> Result | None:
        """Return the next result; None if the sandbox ended without one or timed out. Its start has a separate
        timeout."""
        self.wait()
        deadline = time.monotonic() + timeout_s
        head = self._read(HEAD.size, deadline)
        if head is None:
            return None
        code, limit, used, seconds, cpu_s, *sizes = HEAD.unpack(head)
        self.used = bool(used)
        if limit >= len(LIMITS) or max(sizes) > max(self._most, STDERR_BYTES):
            return None  # not from our launcher
        parts = [self._read(size, deadline + GRACE_S) for size in sizes]
        if None in parts:
            return None
        out, err, value = (cast(bytes, part).decode("utf-8", "replace") for part in parts)
        return Result(code, LIMITS[limit], out, err, value or None, seconds, cpu_s)

    def receive_now(self) -> Result | None:
        """Return the result if the process has already ended, else None."""
        return self.receive(0.02)

    def _read(self, size: int, deadline: float) -> bytes | None:
        return read(self._link, size, deadline)


def is_over(link: socket.socket) -> bool:
    """Return True if the other side has closed and all its data have been read."""
    try:
        link.setblocking(False)
        return not link.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def read(link: socket.socket, size: int, deadline: float) -> bytes | None:
    """Read ``size`` bytes; None if the other side ends first or ``deadline`` (time.monotonic()) passes."""
    data = bytearray()
    while len(data) < size:
        link.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            piece = link.recv(min(size - len(data), 2**20))
        except OSError:  # a timeout is one
            return None
        if not piece:
            return None
        data += piece
    return bytes(data)


SLACK_S = 0.5
"""Grace period in seconds for the tests' process to report a total timeout before the program's process is killed."""


class LocalSandbox:
    """See ``Sandbox``. Thread-safe; each thread has a separate zygote. Made by ``open_sandbox``, after the
    self-test."""

    def __init__(self, host: Host) -> None:
        self.host = host
        """This machine's bwrap and interpreter."""
        self._threads = threading.local()

    def run(self, program: str, tests: Sequence[Test], limits: Limits, stop: bool = False) -> list[Result]:
        job = {"kind": "test", "program": without_surrogates(program), "limits": dataclasses.asdict(limits)}
        deadline = time.monotonic() + limits.total_s
        results: list[Result] = []
        while (
            len(results) < len(tests) and not (stop and results and not results[-1].ok) and time.monotonic() < deadline
        ):
            with self.open(limits) as box:
                box.set_job(job)
                results += _batch(box, tests[len(results) :], limits, deadline, stop)
            if box.lost:
                raise SandboxError("the sandbox was ended from outside while a program ran")
        return results

    def check(self, program: str, checks: Checks, limits: Limits) -> CheckResult:
        failed = (False,) * len(checks.tests)
        texts = Checks(tuple(map(without_surrogates, checks.tests)), without_surrogates(checks.setup), checks.entry)
        try:
            asked, library = owners(texts)
        except (SyntaxError, ValueError) as error:
            why = f"the tests do not parse: {error}"
            return CheckResult(failed, (why,) * len(failed), row_error=why)
        job = {
            "kind": "check",
            "tests": list(texts.tests),
            "setup": texts.setup,
            "entry": checks.entry,
            "asked": asked,
            "library": library,
        }
        deadline = time.monotonic() + limits.total_s
        both = dataclasses.replace(limits, cpu_s=limits.cpu_s * max(1, len(failed)), wall_s=limits.total_s + SLACK_S)
        here, there = socket.socketpair()
        with here, there, self.open(both, here) as tests, self.open(both, there) as answers:
            here.close()  # each end is now in one sandbox alone, and closes with it
            there.close()
            answers.start_answer(program, both, both.wall_s + SLACK_S)
            answers.wait()  # its start does not count towards the first test
            left = max(0.01, deadline - time.monotonic())
            tests.set_job({**job, "limits": dataclasses.asdict(both), "times": (limits.wall_s, left)})
            tests.send_test(Test(), left + SLACK_S, both)
            verdict = tests.receive(left + SLACK_S + GRACE_S)
            found = json.loads(verdict.value or "{}") if verdict is not None and verdict.ok else None
            answer = None
            if not (found and all(found["passed"])):
                tests.close()  # so that a program still running finds no peer and ends
                answer = answers.receive_now()
        if tests.lost or answers.lost:
            raise SandboxError("a sandbox was ended from outside while tests ran")
        if verdict is None or found is None:
            limit = (answer.limit if answer else None) or (verdict.limit if verdict else "wall")
            reason = f"limit: {limit}" if limit else f"the tests' process {verdict.reason if verdict else 'vanished'}"
            return CheckResult(failed, (reason,) * len(failed), limit=limit, stderr=answer.stderr if answer else "")
        if found["row_error"]:
            return CheckResult(failed, (found["row_error"],) * len(failed), row_error=found["row_error"])
        stderr, limit = (answer.stderr, answer.limit) if answer else ("", None)
        return CheckResult(tuple(found["passed"]), tuple(found["reasons"]), None, limit, stderr, verdict.seconds)

    def describe(self) -> str:
        slow = "" if self.host.nested else "; slowly: no namespaces within namespaces"
        return f"bubblewrap on this machine, Python {self.host.version} ({self.host.python}){slow}"

    @contextlib.contextmanager
    def open(self, limits: Limits, passed: socket.socket | None = None) -> Iterator[Box]:
        """Open a fresh sandbox; ``passed`` is passed in with its link. Leaving the context kills the sandbox."""
        if not self.host.nested:
            outer = Outer(self.host, "launcher", limits.tmp_bytes, passed, filtered=True)
            with Box(outer, outer.link, limits) as box:
                yield box
            return
        idle: list[Zygote] = self._threads.__dict__.setdefault("idle", [])
        while idle and not idle[-1].end():  # nothing to end: it answers, if nobody has killed it
            idle.pop()
        zygote = idle.pop() if idle else Zygote(self.host)
        with Box(zygote, zygote.open(limits.tmp_bytes, passed), limits) as box:
            yield box
        if not box.lost:
            idle.append(zygote)


def _batch(box: Box, tests: Sequence[Test], limits: Limits, deadline: float, stop: bool) -> Iterator[Result]:
    """Yield results of tests in one sandbox, until a test fails with ``stop``, leaves files or processes behind, or
    ends the sandbox."""
    for i, test in enumerate(tests):
        left = deadline - time.monotonic()
        if left <= 0:
            return
        wall_s = min(left, limits.wall_s)
        box.send_test(test, wall_s, limits)
        result = box.receive(wall_s + GRACE_S)
        if result is None and i > 0:
            return  # an earlier test's leftovers may be the cause
        if result is None:
            result = Result(-9, "wall", "", "the sandbox ended without a result", None, wall_s, 0.0)
        if result.limit == "wall" and wall_s < limits.wall_s:
            return  # the total time ran out, not the test's own
        yield result
        if box.used or (stop and not result.ok):
            return
