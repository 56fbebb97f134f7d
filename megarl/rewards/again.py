"""Second verdicts: a process beside the pool scores a few responses again, by a path of its own.

The process takes the verifier from the table itself and returns its result without weights. So what the explorer does
between a response and its stored reward is compared with something else than itself: queues, retries, timeouts, caches,
the order of a group. A verifier that is wrong in itself is wrong here too. ``python -m megarl.rewards.again PARENT``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from megarl.config.load import from_dict, to_dict
from megarl.config.rewards import RewardConfig
from megarl.core.errors import ConfigError
from megarl.core.processes.fork import Forked
from megarl.core.processes.machine import die_with
from megarl.core.processes.secrets import hide_secrets
from megarl.core.schema import Task
from megarl.core.text import as_written
from megarl.rewards.pool.child import END_S, PRELOAD, SOCKET, kill_tree, server_of, started
from megarl.rewards.pool.worker import CPU_SHARE, FILE, bound_memory, load_function, stop_timers, verdict_of
from megarl.rewards.routes import CODE, FAMILIES, JUDGE, Scorer, route
from megarl.rewards.verdict import LATE, to_verdict, with_question

COSTLY = ("", CODE, JUDGE, LATE)
"""BareVerifiers that are not asked again: they start programs, ask a model, or are people."""


class SecondVerifier:
    """Owner of the process; asks without waiting. A process that hangs or dies is replaced; its questions are lost."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._socket: socket.socket | None = None
        self._asked: dict[int, float] = {}
        """Number of a question without a reply -> time until which it is awaited."""
        self._number, self._bytes = 0, b""
        self._unsent = bytearray()
        """Questions that the socket has no room for yet: the process reads none while it starts."""

    def start(self) -> None:
        """Start the process; do nothing if it runs."""
        if self._process is not None:
            return
        ours, its = socket.socketpair()
        with its:
            command = [__name__, str(os.getpid())]
            self._process = started(server_of(PRELOAD), command, its.fileno(), subprocess.DEVNULL)
        ours.setblocking(False)
        self._socket = ours
        self._send(to_dict(self._config))

    @property
    def is_asked(self) -> bool:
        """True while a question has no reply and its time is not over."""
        return any(until > time.monotonic() for until in self._asked.values())

    def ask(self, task: Task, text: str, *, in_thinking: bool) -> int | None:
        """Ask for the verdict on a response; return the question's number, or None while older ones are unanswered."""
        if any(until < time.monotonic() for until in self._asked.values()):
            self.close()
        self.start()
        self._number += 1
        question = {
            "number": self._number,
            "data_source": task.data_source,
            "text": text,
            "truth": task.ground_truth,
            "info": task.extra_info,
            "question": task.question,
            "in_thinking": in_thinking,
        }
        if not self._send(question):
            return None
        self._asked[self._number] = time.monotonic() + START_S + (1 + len(self._asked)) * self._config.timeout_s
        return self._number

    def replies(self, wait_s: float) -> dict[int, dict[str, Any]]:
        """Return the verdicts that have come, by number, once all have or after ``wait_s``. One that could not be given
        has ``error`` alone."""
        found: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + wait_s
        with selectors.DefaultSelector() as selector:
            if self._socket is not None:
                selector.register(self._socket, selectors.EVENT_READ)
            while self._asked and self._socket is not None:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
                selector.modify(self._socket, events)
                ready = selector.select(max(0.0, until - time.monotonic()))
                if not ready:
                    break
                if ready[0][1] & selectors.EVENT_WRITE:
                    self._flush()
                if not ready[0][1] & selectors.EVENT_READ or self._socket is None:
                    continue
                with suppress(OSError):
                    self._bytes += (data := self._socket.recv(2**16))
                    if data:
                        *lines, self._bytes = self._bytes.split(b"\n")
                        for reply in map(json.loads, lines):
                            if self._asked.pop(number := reply.pop("number"), None) is not None:
                                found[number] = reply
                        continue
                self.close()
        return found

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            kill_tree(process.pid)
            with suppress(subprocess.TimeoutExpired):  # in a system call of a broken disk it ends later
                process.wait(END_S)
        if self._socket is not None:
            self._socket.close()
        self._socket, self._bytes = None, b""
        self._unsent.clear()
        self._asked.clear()

    def _send(self, content: dict[str, Any]) -> bool:
        self._unsent += json.dumps(content).encode() + b"\n"
        return self._flush()

    def _flush(self) -> bool:
        """Send as much as the socket takes; return False if the process has ended."""
        assert self._socket is not None
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return False
        return True


START_S = 60.0
"""Seconds that the process may take to start and to import verifiers."""


class BareVerifiers:
    """Verifiers of the settings without what surrounds them in the pool."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._user = None
        if config.path is not None:
            os.environ[FILE] = config.path
            self._user = load_function(config.path)
        self._scorers: dict[str, Scorer] = {}

    def score(self, data_source: str, text: str, truth: Any, info: Any, question: str, in_thinking: bool) -> Any:
        """Return ``to_verdict`` of the verifier's result. Raises its exceptions."""
        if self._user is not None:
            result = self._user(data_source=data_source, solution_str=text, ground_truth=truth, extra_info=info)
            return to_verdict(asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result)
        if data_source not in self._scorers:
            family, rest = route(data_source, self._config.routes)
            self._scorers[data_source] = FAMILIES[family](rest, self._config)
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SHARE * self._config.timeout_s)
        try:
            return verdict_of(
                self._scorers[data_source], as_written(text, in_thinking), truth, with_question(info, question)
            )
        finally:
            stop_timers()


async def _awaited(result: Any) -> Any:
    return await result


def main(arguments: list[str]) -> None:
    hide_secrets()
    die_with(int(arguments[0]), signal.SIGKILL)
    connection = socket.socket(fileno=int(os.environ.pop(SOCKET)))
    connection.set_inheritable(False)
    questions, replies = connection.makefile("r", encoding="utf-8"), connection.makefile("w", encoding="utf-8")
    config = from_dict(RewardConfig, json.loads(questions.readline()))
    if config.path is None:
        bound_memory()
    try:
        verifiers = BareVerifiers(config)
    except ConfigError:  # the explorer's workers report it
        return
    for line in questions:
        question = json.loads(line)
        number = question.pop("number")
        try:
            reply = verifiers.score(**question)
        except Exception as error:  # the user's code may raise any exception; then nothing is compared
            reply = {"error": type(error).__name__}
        replies.write(json.dumps({"number": number, **reply}) + "\n")
        replies.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
