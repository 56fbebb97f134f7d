"""Task folders of Harbor (Apache-2.0): ``rollout.environment=harbor``, and the sandbox of one task.

Commands run in bubblewrap, without a container.
"""

from __future__ import annotations

import io
import json
import logging
import math
import re
import socket
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from megarl.core.errors import ConfigError, DataError, SandboxError
from megarl.core.schema import Task
from megarl.core.text import without_thought
from megarl.explore.environments.types import Observation, checked, refuse
from megarl.sandbox import bubblewrap
from megarl.sandbox.bubblewrap import INSIDE_UID, LOOKUPS, as_they_are, find
from megarl.sandbox.interface import MIB
from megarl.tasks.harbor import TESTS_MB, HarborTask, read_folder

PROGRAM = Path(__file__).with_name("harbor_inside.py").read_text()
STARTER = ThreadPoolExecutor(1, thread_name_prefix="harbor")
"""Thread that starts all sandboxes: a sandbox ends with its starting thread, and an episode's calls use several
threads."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib32")
HOME = "/root"
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": HOME, "LANG": "C.UTF-8"}
TESTS_ENVIRONMENT = {**ENVIRONMENT, "PYTHONNOUSERSITE": "1"}
"""Hides modules that an episode put in ``HOME``, which Python would run first."""
LOG_MB = 256
REPLY_S = 20.0
"""Seconds added to a request's limit, for the sandbox's start, its files and killing processes."""
PROVE_S = 20.0
PROBE = "test ! -e {} && test $(grep -c : /proc/net/dev) -le 1 && test $(ls -d /proc/[0-9]* | wc -l) -le 8"
"""Fails if a program sees a file, the network or processes of this machine."""


class HarborSandbox:
    """Files and processes of one episode. Raises SandboxError if the sandbox fails."""

    def __init__(self, task: HarborTask) -> None:
        self._task = task
        self._link, inside = socket.socketpair()
        with inside:
            self.process = STARTER.submit(self._start, inside).result()
            """Process of the sandbox."""
        self._lines = self._link.makefile("rwb")
        self._files = files_of(task.copies)

    def run(self, command: str, seconds: float, most: int) -> dict[str, Any]:
        """Run a shell command in the task's folder: returns ``output``, at most ``most`` bytes; ``limit``, ``time`` or
        ``memory`` if killed; ``seconds``."""
        files, self._files = self._files, b""
        return self._ask("run", seconds, files, most=most, command=command, env={**ENVIRONMENT, **self._task.env})

    def tests(self, seconds: float, most: int) -> dict[str, Any]:
        """Kill all processes and run the task's tests; returns as ``run``, with ``reward`` and its ``file``."""
        if self._files:
            self.run("true", seconds, most)
        env = {**TESTS_ENVIRONMENT, **self._task.env, **self._task.verifier_env}
        files = files_of([(self._task.folder / "tests", "/")])
        return self._ask("tests", seconds, files, most=most, env=env)

    def kill(self) -> None:
        """Kill the sandbox; a waiting call raises."""
        self.process.kill()

    def close(self) -> None:
        """Kill the sandbox and wait for its end."""
        self.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        self._lines.close()
        self._link.close()

    def _ask(self, do: str, seconds: float, files: bytes, **given: Any) -> dict[str, Any]:
        asked = {"do": do, "size": len(files), "seconds": seconds, "cwd": self._task.workdir}
        head = json.dumps({**asked, "memory": self._task.memory_mb * MIB, **given})
        self._link.settimeout(seconds + REPLY_S)
        try:
            self._lines.write(head.encode() + b"\n" + files)
            self._lines.flush()
            line = self._lines.readline()
        except OSError as error:
            line, why = b"", str(error)
        else:
            why = "it has ended"
        if not line:
            self.kill()
            words = bubblewrap.last_words(self.process)
            raise SandboxError(f"the sandbox of {self._task.folder} does not reply: {why} {words}".strip())
        found: dict[str, Any] = json.loads(line)
        return found

    def _start(self, inside: socket.socket) -> subprocess.Popen[bytes]:
        task, host, link = self._task, find(), inside.fileno()
        own = {f"/{place.split('/')[1]}" for place in (task.workdir, *(place for _, place in task.copies))}
        sizes = dict.fromkeys(sorted({*own, HOME, "/tmp"}), task.storage_mb) | {"/logs": LOG_MB, "/tests": TESTS_MB}
        with bubblewrap.filter_pipe(host.filter) as filter_fd:
            words = bubblewrap.command(
                host.bwrap, ["/python/bin/python3", "-S", "-s", "-c", PROGRAM, str(link)], shown=_shown(),
                writable={place: mb * MIB for place, mb in sizes.items()}, filter_fd=filter_fd,
            )  # fmt: skip
            return bubblewrap.start(words, [link, filter_fd], host.user)


def shown(path: Path) -> str | None:
    """Return the folder of this machine that contains ``path`` and is visible in every sandbox; None without one."""
    sources = [source for option, source in pairwise(_shown()) if option in ("--ro-bind", "--ro-bind-try")]
    return next((source for source in sources if path.resolve().is_relative_to(Path(source).resolve())), None)


def _shown() -> list[str]:
    """Return bwrap's arguments that mount the system's programs and our interpreter."""
    return [*as_they_are(SYSTEM), *LOOKUPS, *find().binds]


def files_of(copies: Iterable[tuple[Path, str]]) -> bytes:
    """Return a tar file of files and folders at their places; links stay links."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as files:
        for source, place in copies:
            files.add(source, place.strip("/") or ".", filter=_anyones)
    return packed.getvalue()


def _anyones(file: tarfile.TarInfo) -> tarfile.TarInfo:
    """Make a file owned and writable by the user inside."""
    file.uid = file.gid = INSIDE_UID
    file.uname = file.gname = ""
    file.mode |= 0o700 if file.isdir() else 0o600
    return file


def prove() -> None:
    """Raise ConfigError unless a sandbox starts and hides files, network and processes of this machine."""
    with tempfile.NamedTemporaryFile() as secret:
        task = HarborTask(Path("/"), "", "/app", (), PROVE_S, PROVE_S, 1024, 64, {}, {})
        try:
            sandbox = HarborSandbox(task)
            try:
                done = sandbox.run(f"{PROBE.format(secret.name)} && echo hidden", PROVE_S, 4096)
            finally:
                sandbox.close()
        except SandboxError as error:
            raise ConfigError(f"rollout.environment=harbor: {error}") from error
    if done["output"] != "hidden\n":
        raise ConfigError(
            f"rollout.environment=harbor: bubblewrap does not hide this machine here ({done['output'].strip()})"
        )


log = logging.getLogger(__name__)

Number = int | float
OPTIONS = {"turns": int, "command_s": Number, "tests_s": Number, "output_bytes": int, "reward": str, "rules": str}
"""``turns``: most responses; ``command_s``, ``tests_s``: upper bounds on task.toml's limits; ``output_bytes``: of an
observation; ``reward``: the key in reward.json; ``rules``: text after the instruction."""
TURNS, COMMAND_S, TESTS_S, OUTPUT_BYTES, REWARD = 20, 60.0, 200.0, 4096, "reward"
RULES = (
    "You work in a Linux shell without a network, in {workdir}. Write one command, or several lines, in a block that "
    "begins with ```bash and ends with ```; you then see its output. Each block runs in a new shell. When all is done, "
    "write DONE on a line of its own."
)
UNREAD = "Write a command in a block that begins with ```bash and ends with ```, or DONE on a line of its own."
BLOCK = re.compile(r"^```(?:bash|sh|shell)[ \t]*\n(.*?)(?:(^```)[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
"""A block and its end. An unclosed block extends to the end of the text and is not run."""
DONE = re.compile(r"^[ \t]*DONE[ \t.]*$", re.MULTILINE)
ENDED = {"time": "(the command was ended after {:g} s)", "memory": "(out of memory: all processes were killed)"}


class Harbor:
    """One episode of a task.

    A response has a block of commands, and the observation is their output; or it declares the task done. The tests
    then run in the same sandbox, after all processes are killed and reward files removed. They also run after the last
    of ``turns``, after the task's time limit, and after a limit of the trajectory. Without a reward file the reward is
    0.

    Args:
        task: A row of ``read_folders``: ``extra_info['folder']`` is the task's folder.
        options: See ``OPTIONS``.
    """

    def __init__(self, task: Task, options: Mapping[str, Any]) -> None:
        self.check_row(task)
        self._options = options
        self._task = read_folder(Path(task.extra_info["folder"]))
        self._left = options.get("turns", TURNS)
        self._seconds = self._task.agent_s
        self._most = options.get("output_bytes", OUTPUT_BYTES)
        self.sandbox = HarborSandbox(self._task)
        """Shell in which the model acts."""

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Raise ConfigError unless the options are valid and a sandbox can be made."""
        checked("harbor", options, OPTIONS)
        for name in ("turns", "command_s", "tests_s", "output_bytes"):
            if name in options and not 0 < options[name] < math.inf:
                refuse(name, options[name], "must be above 0")
        if options.get("output_bytes", OUTPUT_BYTES) < 2:
            refuse("output_bytes", options["output_bytes"], "must be 2 or more: it has a first and a last half")
        prove()

    @staticmethod
    def check_run_dir(run_dir: Path) -> None:
        """Raise ConfigError if sandboxes would show the run's directory."""
        if (place := shown(run_dir)) is not None:
            raise ConfigError(
                f"run.dir={run_dir}: every sandbox of rollout.environment=harbor shows {place}, and with it the run's "
                "files; set it to a folder elsewhere"
            )

    @staticmethod
    def check_row(task: Task) -> None:
        """Raise DataError for a row without a task folder, or with a folder that sandboxes show."""
        folder = task.extra_info.get("folder")
        if not isinstance(folder, str):
            raise DataError(
                "extra_info.folder names no task folder, which rollout.environment=harbor plays; give a folder of "
                "Harbor tasks for the taskset's file, or set another environment"
            )
        if (place := shown(Path(folder))) is not None:
            raise DataError(
                f"{folder}: every sandbox shows {place}, its tests and solution too; move the task elsewhere"
            )

    @staticmethod
    def longest_call_s(options: Mapping[str, Any]) -> float:
        """Return the longest seconds of a call that runs a command and then the tests."""
        return float(options.get("command_s", COMMAND_S) + options.get("tests_s", TESTS_S))

    def reset(self) -> str:
        """Return the rules for responses."""
        return str(self._options.get("rules", RULES)).replace("{workdir}", self._task.workdir)

    def step(self, response: str) -> Observation:
        """Run the commands of a response, and after the last response the tests."""
        self._left -= 1
        answer = without_thought(response)
        blocks = [block for block, end in BLOCK.findall(answer) if end]
        done = DONE.search(BLOCK.sub(lambda block: "" if block[2] else block[0], answer)) is not None
        seen = "\n".join(self._run(block) for block in blocks[:1]) or ("" if done else UNREAD)
        if done or not self._left or self._seconds <= 0:
            return Observation("", self.end(), done=True)
        return Observation(seen)

    def end(self) -> float:
        """Run the tests and return their reward."""
        limit = min(self._task.verifier_s, self._options.get("tests_s", TESTS_S))
        found = self.sandbox.tests(limit, OUTPUT_BYTES)
        try:
            if found["limit"]:
                raise ValueError(ENDED[found["limit"]].format(limit))
            return reward_of(found.get("file"), found.get("reward", ""), self._options.get("reward", REWARD))
        except (ValueError, OverflowError, RecursionError) as error:
            last = found["output"].strip()[-300:]
            log.warning("%s: the tests give no reward, which counts as 0: %s; %s", self._task.folder, error, last)
            return 0.0

    def kill(self) -> None:
        """Kill a timed-out call."""
        self.sandbox.kill()

    def close(self) -> None:
        """End the sandbox and its processes."""
        self.sandbox.close()

    def _run(self, command: str) -> str:
        limit = min(self._options.get("command_s", COMMAND_S), self._seconds)
        found = self.sandbox.run(command, limit, self._most)
        self._seconds -= found["seconds"]
        ended = ENDED[found["limit"]].format(limit) if found["limit"] else ""
        return "\n".join(filter(None, (found["output"].rstrip("\n"), ended))) or "(no output)"


def reward_of(file: str | None, text: str, name: str) -> float:
    """Parse the reward in a file as Harbor does. Raises ValueError if it has none, OverflowError if it exceeds a float.

    Args:
        name: Key of the reward in a reward.json with several.
    """
    if file is None:
        raise ValueError("there is neither /logs/verifier/reward.json nor reward.txt")
    value: Any = json.loads(text) if file == "reward.json" else text
    if isinstance(value, dict):
        if name not in value and len(value) != 1:
            raise ValueError(f"{file} has no {name!r}, but {', '.join(map(str, value))}; set rollout.options.reward")
        value = value[name] if name in value else next(iter(value.values()))
    if file == "reward.json" and not isinstance(value, int | float):
        raise ValueError(f"{file} has {value!r:.60}, which is no number")
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{file} has {value!r:.60}, which is not finite")
    return number
