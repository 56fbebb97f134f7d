"""A job on two simulated nodes that share a directory, started again as a cluster's queue would do it.

Each node is a network namespace, and a clock and a disk of its own (``shims.py``). All processes of a node are those in
its namespace, so that one which has lost its parent, its title or its environment is still found.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import create_engine

from megarl.core.metrics import records
from megarl.core.processes import heartbeat
from megarl.core.processes.fork import ForkServer
from megarl.exam.processes import ENVIRONMENT, MODULES
from megarl.run.job_store import store_of_run
from tests.system.commands import Command
from tests.system.fault_table import without_counts
from tests.system.jobs import TINY, last_of_each, parent_of
from tests.system.networks import Networks
from tests.system.shims import Shim
from tests.system.soak import NOT_COMPARED, answers, checkpoints_and_metrics

STEPS, TASKS = 20, 8
NODES = ("n0", "n1")
STALL_S, SILENT_S = 45.0, 15.0
"""``cluster.stall_s`` and ``cluster.heartbeat_s`` of the job."""
CONNECT_S = 60.0
"""``cluster.connect_timeout_s``: the commands are given at the same moment."""
STORE = "job://postgres"
SETTINGS = last_of_each([
    *TINY, "parallel=dp2", "store=postgres", f"trainer.steps={STEPS}", f"trainer.tasks_per_step={TASKS}",
    "trainer.checkpoint_interval=2", "trainer.keep_checkpoints=100", "trainer.eval_interval=0",
    "cluster.restarts=1000", "cluster.replacements=1000", "cluster.shrink=false", f"cluster.stall_s={STALL_S:.0f}",
    f"cluster.heartbeat_s={SILENT_S:.0f}", f"cluster.connect_timeout_s={CONNECT_S:.0f}",
    "cluster.max_clock_skew_s=7200",
])  # fmt: skip
DISK = "1g"
"""Size of the disk that both nodes share."""
PREEMPTED = 130
END_S, LOOK_S, SEGMENTS_S = 300.0, 0.1, 5.0
"""Longest wait for the commands of other nodes and for processes to end; seconds between two looks, and between two at
shared memory."""
TRAINER, EXPLORER, ENGINE = "megarl.run.start trainer", "megarl.run.start explorer", "megarl.engines.server.server"
REWARDS, REAPER = "megarl rewards serve", "megarl.run.process.reaper"
SEGMENT = re.compile(r"/dev/shm/\S+")


class ChaosError(Exception):
    """A job under faults has ended otherwise than it should."""


class Ground:
    """Two nodes for one job after the other. Call ``close``.

    Args:
        folder: Folder of the jobs' directories and logs.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        _remove_old(folder)
        taken = {path.name for path in Path("/sys/class/net").iterdir()}
        number = random.SystemRandom().choice([n for n in range(1, 250) if f"mgr{n}br" not in taken])
        (folder / "network").write_text(str(number))
        self.networks = Networks(number, NODES)
        self.networks.make()
        self.shims = [Shim(folder / "shims", name) for name in NODES]
        compiled = folder / "compiled"
        own = {**os.environ, **ENVIRONMENT, "MEGARL_JOB_KEY": "a key of the tests, long enough"}
        own["TORCHINDUCTOR_CACHE_DIR"] = str(compiled)
        self._own = [{**own, **shim.environment} for shim in self.shims]
        self._servers: list[ForkServer] = []
        for env in self._own:  # one after the other: each imports for its limit of time on a busy machine
            self._servers.append(ForkServer.start(MODULES, env))
            if not self._servers[-1].await_imports():
                raise ChaosError("the modules of a job's processes cannot be imported")

    def fork(self, node: int, argv: Sequence[str], temporary: Path, log: Path) -> Command:
        """Start ``python ARGV`` on a node."""
        env = {**self._own[node], "TMPDIR": str(temporary)}
        variables = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "1", "RANK": str(node)}
        variables |= {"WORLD_SIZE": str(len(NODES)), "MASTER_ADDR": self.networks.address(0), "MASTER_PORT": "29500"}
        argv = [*self.networks.inside_python(NODES[node], variables), *argv]
        with log.open("ab") as output:
            pid = self._servers[node].fork(argv, env, output.fileno(), {})
        if pid is None:
            raise ChaosError(f"node {node} cannot fork: {sorted(self._servers[node].differing(env))}")
        return Command(pid)

    def processes(self) -> dict[int, int]:
        """Return the living processes of both nodes: pid -> node."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):
                name = self.networks.of_process(int(folder.name))
                if name is not None and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found[int(folder.name)] = NODES.index(name)
        return found

    def close(self) -> None:
        """Kill all processes of the nodes and remove the nodes."""
        for pid in self.processes():
            send(pid, signal.SIGKILL)
        for server in self._servers:
            server.close()
        self.networks.remove()
        (self.folder / "network").unlink(missing_ok=True)


class ChaosJob:
    """The job's commands on both nodes, over as many starts as it takes."""

    def __init__(self, ground: Ground, name: str, settings: Sequence[str] = ()) -> None:
        self.ground, self.name = ground, name
        self.run_dir, self.logs = ground.folder / name, ground.folder / f"{name}.logs"
        self.settings = last_of_each([*SETTINGS, *settings])
        self.starts = 0
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir()
        self.run_dir.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "chaos", str(self.run_dir)], check=True)
        self.temporary = Path(tempfile.mkdtemp(prefix="chaos-"))
        self._commands: list[Command] = []
        self._segments: set[Path] = set()
        self._looked_at = 0.0

    def start(self) -> None:
        """Give the command on both nodes, the earlier ones of which have ended."""
        self.starts += 1
        argv = ["megarl", "train", *self.settings, f"run.dir={self.run_dir}"]
        self._commands = [
            self.ground.fork(node, argv, self.temporary, self.logs / f"{self.starts}.node{node}.log")
            for node in range(len(NODES))
        ]

    @property
    def commands(self) -> list[int]:
        """Process ids of the nodes' commands that run."""
        return [command.pid for command in self._commands if command.poll() is None]

    def status(self) -> int | None:
        """Return the status of the first node's command; None while it runs."""
        return self._commands[0].poll()

    def done(self) -> int:
        """Return the newest step in ``metrics.jsonl``."""
        found = (r["step"] for r in records(self.run_dir / "metrics.jsonl") if "training/global_step" in r)
        return max((int(step) for step in found), default=0)

    def go_on(self) -> bool:
        """Start the commands again if a kill or a preemption has ended them; False once the job has ended well.

        A queue also does so where a node died before the job began. Raises ChaosError if it has ended otherwise.
        """
        status = self.status()
        if status is None:
            if time.monotonic() - self._looked_at > SEGMENTS_S:
                self.processes()
            return True
        self.until_ended(f"the first node's command has ended with {status}")
        if status == 0:
            return False
        is_alone = f"did not come to {self.ground.networks.address(0)}" in self.said()
        if status == PREEMPTED or status < 0 or is_alone:
            self.start()
            return True
        raise ChaosError(f"start {self.starts} ended with status {status} ({self.logs})")

    def said(self) -> str:
        """Return what the first node's command of this start has printed."""
        return (self.logs / f"{self.starts}.node0.log").read_text(errors="replace")

    def until_ended(self, after: str) -> None:
        """Wait until no process of either node lives. Raises ChaosError naming those that are left."""
        end = time.monotonic() + END_S
        while self.commands or self.ground.processes():
            if time.monotonic() > end:
                left = {pid: words(pid) for pid in [*self.commands, *self.processes()]}
                raise ChaosError(f"{END_S:.0f} s after {after} there are still {left} ({self.logs})")
            time.sleep(LOOK_S)

    def processes(self) -> dict[int, int]:
        """Return pid -> node of all living processes; notes their shared memory."""
        self._looked_at, found = time.monotonic(), self.ground.processes()
        for pid in found:
            with suppress(OSError):
                self._segments |= set(map(Path, SEGMENT.findall(Path(f"/proc/{pid}/maps").read_text())))
        return found

    def of(self, command: str) -> list[int]:
        """Return the processes with these words in their command lines, without forks of them."""
        said = {pid: words(pid) for pid in sorted(self.processes())}
        return [p for p, text in said.items() if command in text and command not in said.get(parent_of(p), "")]

    def phase(self) -> str:
        """Return the phase in the last heartbeat of trainer rank 0."""
        for pid in self.of(TRAINER):
            with suppress(psutil.Error, OSError, KeyError):
                if psutil.Process(pid).environ()["RANK"] == "0":
                    return heartbeat.Memory.of(pid).read().phase
        return "no trainer rank"

    def left_over(self) -> list[str]:
        """Return what the job has left of processes, shared memory and temporary files."""
        processes = [f"process {pid}: {words(pid)}" for pid in self.processes()]
        return [*processes, *(str(p) for p in sorted({*self._segments, *self.temporary.iterdir()}) if p.exists())]

    def found(self) -> dict[str, Any]:
        """Return what two jobs must have alike: name -> value. Raises ChaosError if a group was used twice or never.

        Metrics of steps are the store's: a full disk leaves records out of ``metrics.jsonl``.
        """
        found = without_counts(checkpoints_and_metrics(self.run_dir))
        with store_of_run(STORE, self.run_dir) as store:
            found |= answers(store, STEPS)
            engine = create_engine(os.environ["MEGARL_STORE_URL"])
            with closing(engine.raw_connection()) as connection, closing(connection.cursor()) as cursor:
                cursor.execute("select group_id, state, used_by from groups where rollout_id like 'train-%'")
                groups = cursor.fetchall()
                cursor.execute("select step, metrics from steps order by step")
                recorded = {step: json.loads(metrics) for step, metrics in cursor.fetchall()}
            engine.dispose()
        for step, metrics in recorded.items():
            kept = {name: value for name, value in metrics.items() if not NOT_COMPARED.match(name)}
            found |= without_counts({f"metrics of step {step}": {"step": step, **kept}})
        used = [used_by for _, _, used_by in groups]
        counts = {step: used.count(step) for step in range(1, STEPS + 1)}
        if list(recorded) != list(counts) or set(counts.values()) != {TASKS}:
            raise ChaosError(f"steps {list(recorded)}, groups of each step {counts}")
        return found | {f"group {group_id}": [state, used_by] for group_id, state, used_by in groups}

    def close(self, keep: bool) -> None:
        """Kill what lives; remove the run's directory and temporary files unless they are evidence."""
        for pid in [*self.commands, *self.processes()]:
            send(pid, signal.SIGKILL)
        for command in self._commands:
            command.wait(END_S)
        if not keep:
            subprocess.run(["umount", "-l", str(self.run_dir)], check=True)
            self.run_dir.rmdir()
            for segment in self._segments:
                segment.unlink(missing_ok=True)
            shutil.rmtree(self.temporary)


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def words(pid: int) -> str:
    """Return a process's command line; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _remove_old(folder: Path) -> None:
    """Remove nodes and disks of a run that was killed."""
    if (file := folder / "network").is_file():
        old = Networks(int(file.read_text()), NODES)
        for path in Path("/proc").glob("[0-9]*"):
            if old.of_process(int(path.name)) is not None:
                send(int(path.name), signal.SIGKILL)
        old.remove()
    for path in folder.glob("*"):
        if path.is_dir() and path.is_mount():
            subprocess.run(["umount", "-l", str(path)], check=True)
            path.rmdir()
