"""Python sessions of trajectories: one interpreter each, in the sandbox, whose variables stay from call to call."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from megarl.core.errors import SandboxError
from megarl.core.text import without_surrogates
from megarl.sandbox.box import START_S, Box, read
from megarl.sandbox.interface import MIB, Limits
from megarl.sandbox.local import LocalSandbox

PROGRAM = Path(__file__).with_name("session_inside.py").read_text()
LATE_S = 2.0
"""Beyond a call's limit, for code that does not let itself be interrupted; after that its session is killed."""
LAST_WORDS_S = 1.0
"""For the sandbox to say which limit has ended a session."""
WATCH_S = 0.5
"""Seconds between two looks at a session's memory: most of the time it waits, and each look takes CPU."""
PROCESSES = 8
LIFE_S = 10.0**6
"""Longest life of a session: that of its trajectory is shorter."""
HEAD_BYTES, ESCAPED = 2**15, 12
"""Beside the characters that are asked for a reply has an error; and bytes of JSON for a character, at most."""
GONE = "The session has ended ({}), and its variables are gone. The next call begins a new one."


class PythonSessions:
    """Sandboxes of an explorer's sessions: as many as trajectories ask for, since a bound could make them wait for each
    other. Each is made and used by a thread of its own, with which it would end.

    Args:
        calls: Most calls of a session, by which its CPU time is limited.
        most: Characters of a result.
    """

    def __init__(self, sandbox: LocalSandbox, memory_mib: int, timeout_s: float, calls: int, most: int) -> None:
        memory, cpu_s = memory_mib * MIB, math.ceil((timeout_s + LATE_S) * (calls + 1))
        own = {"address_space_bytes": memory, "memory_bytes": memory, "file_bytes": 64 * MIB, "processes": PROCESSES}
        self.limits = Limits(cpu_s, LIFE_S, LIFE_S, **own)
        self.sandbox, self.timeout_s, self.most = sandbox, timeout_s, most
        self._threads: list[ThreadPoolExecutor] = []
        self._idle: list[ThreadPoolExecutor] = []

    def take(self) -> ThreadPoolExecutor:
        """Return a thread that no session has; one that had one keeps a sandbox warm."""
        if not self._idle:
            self._threads.append(ThreadPoolExecutor(1, thread_name_prefix="python-session"))
            self._idle.append(self._threads[-1])
        return self._idle.pop()

    def give_back(self, thread: ThreadPoolExecutor) -> None:
        """Let another session have a thread."""
        self._idle.append(thread)

    def close(self) -> None:
        """End the threads, and what they hold, as soon as no call of theirs runs."""
        for thread in self._threads:
            thread.shutdown(wait=False)


class PythonSession:
    """Python of one trajectory. Its sandbox begins with the first call, and again after a call that has ended it."""

    def __init__(self, sessions: PythonSessions) -> None:
        self._sessions = sessions
        self._thread: ThreadPoolExecutor | None = None
        self._held = ExitStack()
        self._open: tuple[Box, socket.socket] | None = None

    async def run(self, code: str) -> str:
        """Text that some code prints, its last value and its error, or the reason why the session has ended.

        Raises SandboxError when the sandbox fails.
        """
        if self._thread is None:
            self._thread = self._sessions.take()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, without_surrogates(code))

    async def close(self) -> None:
        """Kill all of it, a call that runs too. It is done even where the caller is cancelled."""
        if (thread := self._thread) is None:
            return
        if self._open is not None:
            with suppress(OSError):  # its thread has closed it
                self._open[1].shutdown(socket.SHUT_RDWR)  # a call that runs gets no reply

        def end() -> None:
            try:
                self._end()
            finally:
                self._sessions.give_back(thread)

        await asyncio.shield(asyncio.wrap_future(thread.submit(end)))

    def _run(self, code: str) -> str:
        if self._open is None:
            self._open = self._begun()
        box, link = self._open
        timeout_s, most = self._sessions.timeout_s, self._sessions.most
        deadline = time.monotonic() + timeout_s + LATE_S
        reply = self._ask(link, "call", deadline, on=0, args=[code, timeout_s, most], named={})
        if isinstance(reply, dict):
            if isinstance(text := reply.get("value"), str):
                return without_surrogates(text)
            if "raised" in reply:  # the code has broken the session's own program
                return without_surrogates(f"Error: {reply.get('message')}"[:most])
        late = time.monotonic() >= deadline
        result = None if late else box.receive(LAST_WORDS_S)
        self._end()
        if box.lost:
            raise SandboxError("the sandbox of a Python session was ended from outside")
        if late:
            return GONE.format(f"the call did not end within {timeout_s:g} s")
        return GONE.format("it has ended itself" if result is None or result.ok else result.reason)

    def _begun(self) -> tuple[Box, socket.socket]:
        """Sandbox with the session's program. Raises SandboxError."""
        limits = self._sessions.limits
        link, inside = socket.socketpair()
        self._held.callback(link.close)
        with inside:
            box = self._held.enter_context(self._sessions.sandbox.open(limits, inside))
        box.start_answer(PROGRAM, limits, LIFE_S, WATCH_S)
        box.wait()
        if self._ask(link, "names", time.monotonic() + START_S, names=["run"]) is None:
            self._end()
            raise SandboxError("a Python session does not begin in the sandbox")
        return box, link

    def _ask(self, link: socket.socket, do: str, deadline: float, **given: Any) -> Any:
        """Reply to one request; None where none comes, or none of a size that was asked for."""
        data = json.dumps({"do": do, **given}).encode()
        try:
            link.settimeout(max(0.001, deadline - time.monotonic()))
            link.sendall(len(data).to_bytes(4, "little") + data)
        except OSError:
            return None
        head = read(link, 4, deadline)
        size = int.from_bytes(head, "little") if head is not None else 0
        if not 0 < size <= HEAD_BYTES + ESCAPED * self._sessions.most:
            return None
        body = read(link, size, deadline)
        try:
            return None if body is None else json.loads(body)
        except (ValueError, RecursionError):
            return None

    def _end(self) -> None:
        self._open = None
        self._held.close()
