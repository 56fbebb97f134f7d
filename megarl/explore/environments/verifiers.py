"""Tasksets of verifiers (MIT): ``rollout.environment=verifiers``. The package has a separate virtual environment."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.core.errors import ConfigError, DataError
from megarl.core.processes.machine import kill_group, start_ticks
from megarl.core.schema import Task
from megarl.explore.agents.program import passed_variables
from megarl.explore.environments.types import Observation, checked, refuse

OPTIONS = {"python": str, "env": dict, "path": str, "variables": list}
"""``python``: interpreter of verifiers' virtual environment; ``env``: verifiers' ``[env]`` block; ``path``: folder of a
taskset that is not installed; ``variables``: names of further environment variables for its server."""
SERVER = Path(__file__).with_name("verifiers_server.py")
CHECK_S = 300.0
"""Timeout in seconds for loading a taskset."""


class VerifiersProcess:
    """Server process of the taskset: one per explorer, started by its first episode and restarted after an end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None
        """The server; None before the first episode."""
        self._folder = ""

    def connect(self, options: Mapping[str, Any]) -> socket.socket:
        """Return a connection for an episode."""
        with self._lock:
            if self.process is None or self.process.poll() is not None:
                self._start(options)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(f"{self._folder}/socket")
        return connection

    def end(self) -> None:
        """Kill the server with all episodes and remove its folder."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, options: Mapping[str, Any]) -> None:
        self.end()
        self._folder = tempfile.mkdtemp(prefix="megarl-verifiers-")
        words, env = command(options, "serve", f"{self._folder}/socket")
        self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        limit = threading.Timer(CHECK_S, self.process.kill)
        limit.start()
        ready = self.process.stdout.readline()
        limit.cancel()
        if not ready:
            raise RuntimeError(f"the server of verifiers has ended with status {self.process.wait()}; see the log")


PROCESS = VerifiersProcess()
atexit.register(PROCESS.end)


def command(options: Mapping[str, Any], name: str, *more: str) -> tuple[list[str], dict[str, str]]:
    """Return words and variables of a server command, without the job's keys."""
    env = {**passed_variables(options.get("variables", ())), "PYTHONPATH": options.get("path", "")}
    return [options["python"], "-P", str(SERVER), name, json.dumps(options["env"]), *more], env


class Verifiers:
    """One episode of a task; the taskset's rewards, summed, are the reward of the last response.

    Args:
        task: A row that ``verifiers_server.py rows`` has written: ``extra_info['index']`` is the task's index.
        options: See ``OPTIONS``.
    """

    def __init__(self, task: Task, options: Mapping[str, Any]) -> None:
        self._seen: list[Mapping[str, Any]] = list(task.prompt)
        self._opened = False
        self._socket = PROCESS.connect(options)
        self._lines = self._socket.makefile("rw")
        self.pid: int = self._take()["pid"]
        """Process of the episode."""
        self._started = start_ticks(self.pid)
        self._send({"index": task.extra_info["index"]})

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Raise ConfigError unless the taskset loads in its virtual environment."""
        checked(
            "verifiers", options, OPTIONS, {"python": "/envs/verifiers/bin/python", "env": "{taskset: {id: gsm8k}}"}
        )
        if not os.access(options["python"], os.X_OK):
            refuse("python", options["python"], "is no program; give the Python of an environment with verifiers")
        if not isinstance(options["env"].get("taskset"), Mapping) or not options["env"]["taskset"].get("id"):
            refuse("env", options["env"], "names no taskset; give one as {taskset: {id: NAME}}")
        for name in options.get("variables", ()):
            if not isinstance(name, str) or name.startswith("MEGARL_"):
                refuse(
                    "variables", name, "is no name of a variable of yours; give such as OPENAI_API_KEY, or remove it"
                )
        words, env = command(options, "check")
        try:
            found = subprocess.run(words, env=env, capture_output=True, text=True, timeout=CHECK_S)
        except subprocess.TimeoutExpired:
            refuse("env", options["env"], f"has loaded no task within {CHECK_S:g} s")
        if found.returncode:
            last = found.stderr.strip().rpartition("\n")[2]
            raise ConfigError(
                f"rollout.options.env={options['env']} cannot be loaded by {options['python']} with path="
                f"{options.get('path', '')!r}: {last} (verifiers 0.4 or later and the taskset are installed there, or "
                "rollout.options.path is the folder of its module)"
            )

    @staticmethod
    def check_row(task: Task, options: Mapping[str, Any]) -> None:
        """Raise DataError for a row of another taskset."""
        own = options["env"].get("id")  # id of an environment paired with the taskset
        wanted = f"verifiers/{'' if own is None else f'{own}+'}{options['env']['taskset']['id']}"
        if task.data_source != wanted or not isinstance(task.extra_info.get("index"), int):
            raise DataError(
                f"data_source {task.data_source!r} with extra_info.index={task.extra_info.get('index')!r} is no row of "
                f"{wanted!r}; make rows by `verifiers_server.py rows` (docs/environments.md), or name their taskset in "
                "rollout.options.env"
            )

    def step(self, response: str) -> Observation:
        """Send a response to the waiting request, and return the messages before the next request."""
        if not self._opened:
            self._follow(self._take())
            self._opened = True
        self._send({"response": response})
        self._seen.append({"role": "assistant", "content": response})
        given = self._take()
        if given.get("done"):
            return Observation("", given["reward"], done=True)
        return Observation(self._follow(given))

    def kill(self) -> None:
        """Kill the episode, so that a waiting call raises."""
        if start_ticks(self.pid) == self._started:
            kill_group(self.pid)

    def close(self) -> None:
        """Kill the episode's processes."""
        self.kill()
        self._lines.close()
        self._socket.close()

    def _follow(self, given: Mapping[str, Any]) -> str:
        """Return the text of the user's messages after those already seen."""
        new = messages_after(self._seen, given["messages"], opened=self._opened)
        self._seen += new
        return "\n\n".join(str(message["content"]) for message in new)

    def _send(self, message: Mapping[str, Any]) -> None:
        self._lines.write(json.dumps(message) + "\n")
        self._lines.flush()

    def _take(self) -> dict[str, Any]:
        try:
            line = self._lines.readline()
        except OSError:  # it was killed before it read everything
            line = ""
        if not line:
            raise ConnectionError("the episode's process has ended")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise RuntimeError(f"verifiers: {found['error']}")
        return found


def messages_after(
    seen: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]], *, opened: bool
) -> list[Mapping[str, Any]]:
    """Return the user's messages that a request adds to those already seen.

    Args:
        messages: All messages of the request.
        opened: True if the request follows a response, not only the task's prompt.

    Raises ValueError if seen messages have changed, or an added message is not the user's.
    """
    before, new = messages[: len(seen)], list(messages[len(seen) :])
    for i, known in enumerate(seen):
        found = _plain(before[i]) if i < len(before) else None
        if found != _plain(known):
            fix = "it must not be rewritten" if opened else "make the rows again"
            raise ValueError(f"the environment asks with {found!r:.200} for {_plain(known)!r:.200}; {fix}")
    if any(message["role"] != "user" for message in new) or bool(new) != opened:
        raise ValueError(f"the environment adds {new!r:.200}; a message of the user must follow a response")
    return new


def _plain(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return role and text of a message; verifiers sends an empty response back as None."""
    return message["role"], message.get("content") or ""
