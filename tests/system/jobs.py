"""A real job through the command line, for tests that watch it, break it and look for what it leaves behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from megarl.engines.client.leftovers import shared_memory
from tests.system import commands

TINY = (
    "experiment=quickstart",
    "trainer.tasks_per_step=8",
    "trainer.updates_per_step=2",
    "trainer.checkpoint_interval=2",
    "trainer.warm_start.steps=5",
    "trainer.warm_start.batch_size=32",
    "taskset.options.max_terms=2",
    "taskset.options.max_digits=2",
    "taskset.options.slip_percent=0",
    "taskset.train_size=300",
    "taskset.eval_size=40",
    "taskset.warm_start_size=300",
    "rollout.max_response_tokens=8",
    "rollout.kv_cache_bytes=33554432",
    "rollout.max_num_seqs=64",
)
"""The quickstart on few rows: everything that a job has, in about half a minute, most of it imports."""
MARK = "MEGARL_TEST_JOB"
START_S = 240.0
"""How long a start may take on a loaded machine before a test gives up waiting for something to happen."""

_LIBC = ctypes.CDLL(None)


def last_of_each(overrides: Sequence[str]) -> list[str]:
    """Each setting once, with the value that is given last: a job is refused where one is given twice."""
    return list({override.partition("=")[0]: override for override in overrides}.values())


def end_with_the_tests() -> None:
    """SIGTERM when pytest is killed, so that its jobs do not go on training."""
    _LIBC.prctl(1, signal.SIGTERM)


def unread(port: int, client: int, by: Literal["server", "client"]) -> bool:
    """Return True if a connection of process ``client`` to a port holds bytes that the server, or the client, has not
    read. They stay where that process is stopped."""
    clients = set()
    with suppress(psutil.NoSuchProcess):
        clients = {c.laddr.port for c in psutil.Process(client).net_connections() if c.raddr and c.raddr.port == port}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, queues, *_ = line.split()
        places = [int(address.rpartition(":")[2], 16) for address in (local, remote)]
        server, other = places if by == "server" else places[::-1]
        if server == port and other in clients and state != "0A" and int(queues.rpartition(":")[2], 16):
            return True
    return False


def parent_of(pid: int) -> int:
    """Return a process's parent; 0 if it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


@dataclass
class Job:
    """``megarl train``, or another command, as a process group of its own; every process of the job carries a mark in
    its environment."""

    run_dir: Path
    overrides: Sequence[str]
    command: Sequence[str] = ("train",)
    """Words of the command before the overrides."""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    _process: subprocess.Popen[bytes] | commands.Command | None = None
    _sessions: set[int] = field(default_factory=set)
    _segments: set[Path] = field(default_factory=set)
    """Shared memory of processes that this test has killed."""

    def start(self) -> Job:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        argv = ["-m", "megarl", *self.command, *last_of_each(self.overrides), f"run.dir={self.run_dir}"]
        env = {**os.environ, MARK: self.mark}
        with self.output.open("wb") as output:
            self._process = commands.start(argv, env, output.fileno()) or subprocess.Popen(
                [sys.executable, *argv],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_the_tests,
            )
        return self

    @property
    def output(self) -> Path:
        """What the command printed."""
        return self.run_dir.with_name(f"{self.run_dir.name}.{self.mark[:8]}.log")

    @property
    def has_started(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    @contextmanager
    def stopped(self, *pids: int) -> Iterator[None]:
        """Keep processes from going on, so that what they would end lasts."""
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def kill_all(self) -> None:
        """SIGKILL for everything that the job has started, supervisor and reaper first."""
        self._segments |= self.shared_memory()
        for pid in [self.pid, *self.processes()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait(30)
        self.until_gone(60)

    def poll(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def processes(self) -> dict[int, str]:
        """Living processes of the job, the command itself left out: pid -> command line.

        Marked in their environment, or in a session in which such a one has been seen: vLLM's own processes write their
        titles over it.
        """
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                marked = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes()
                if marked and int(folder.name) != self.pid:
                    self._sessions.add(int(session))
                if state != "Z" and int(folder.name) != self.pid and (marked or int(session) in self._sessions):
                    command = (folder / "cmdline").read_bytes()
                    found[int(folder.name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def pid_of(self, role: str) -> int:
        """The process of a role: ``engine``, ``explorer <number>``, ``reward`` (a worker) or ``trainer <rank>``;
        without a number any of them."""
        kind, _, rank = role.partition(" ")
        words = {
            "engine": "megarl.engines.server.server",
            "explorer": "megarl.run.start explorer",
            "reward": "megarl.rewards.pool.worker",
            "trainer": "megarl.run.start trainer",
        }[kind]
        found = self.processes()
        for pid, command in found.items():
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            # A rank's spawned helpers have another command line; the engine's server leads its session.
            if words not in command or words in found.get(psutil.Process(pid).ppid(), ""):
                continue  # the latter is a rank's writer of checkpoints, forked from it
            if not rank or f"RANK={rank}".encode() in environment or f"--number {rank}" in command:
                return pid
        raise AssertionError(f"no {role} among {found}")

    def writer(self) -> int:
        """The process that writes the checkpoints of trainer rank 0: a fork of it that looks like it."""
        rank_0 = self.pid_of("trainer 0")
        [pid] = [p.pid for p in psutil.Process(rank_0).children() if p.cmdline() == psutil.Process(rank_0).cmdline()]
        return pid

    def trainers(self) -> list[int]:
        """Both ranks of a job on two."""
        return [self.pid_of(f"trainer {rank}") for rank in range(2)]

    def port_of_engine(self) -> int:
        """The port of engine 0."""
        [[url]] = self.query("select url from engines where number = 0")
        return int(str(url).rpartition(":")[2])

    def steps(self) -> list[int]:
        """Steps recorded in the store so far."""
        return [int(row[0]) for row in self.query("select step from steps order by step")]

    def query(self, sql: str) -> list[tuple[object, ...]]:
        """Rows of the job's store, read without disturbing it; none before there is a store."""
        with suppress(sqlite3.OperationalError):
            connection = sqlite3.connect(f"file:{self.run_dir}/store.db?mode=ro", uri=True)
            try:
                return connection.execute(sql).fetchall()
            finally:
                connection.close()
        return []

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = START_S, poll_s: float = 0.05) -> None:
        """Wait for a condition while the job runs. Raises AssertionError with the job's output."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.poll() is None, f"ended with {self.poll()} before {what}:\n{self.output.read_text()}"
            assert time.monotonic() < deadline, f"no {what} after {timeout_s} s:\n{self.output.read_text()}"
            time.sleep(poll_s)

    def until_step(self, step: int) -> None:
        """Wait until the store has this step's metrics."""
        self.until(lambda: step in self.steps(), f"step {step}")

    def until_gone(self, timeout_s: float) -> float:
        """Wait until no process of the job lives; returns the seconds. Raises AssertionError naming what is left."""
        start = time.monotonic()
        while left := self.processes():
            assert time.monotonic() - start < timeout_s, f"left after {timeout_s} s: {left}"
            time.sleep(0.05)
        return time.monotonic() - start

    def shared_memory(self) -> set[Path]:
        """Shared-memory files that processes of the job have open; none may be there when the job has ended."""
        return {path for session in self._sessions for path in shared_memory(session)}

    def clean_up(self) -> None:
        """Kill whatever of the job still lives; remove the shared memory that nobody else could have removed."""
        self._segments |= self.shared_memory()
        for pid in [*self.processes(), self.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait(30)
        for segment in self._segments:
            segment.unlink(missing_ok=True)
