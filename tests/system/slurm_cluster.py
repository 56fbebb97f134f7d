"""A real Slurm on this machine: a controller and four nodes, each in a network of its own with a scratch folder of its
own.

``python -m tests.system.slurm_cluster FOLDER`` keeps one up until Ctrl-C, to try things by hand.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from megarl.engines.client.leftovers import shared_memory
from tests.system.jobs import end_with_the_tests
from tests.system.networks import Networks, possible

NODES = ("node1", "node2", "node3", "node4")
CONF = """
ClusterName=megarl
SlurmctldHost={host}({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.sock,cred_expire=10
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/%n.log
SlurmctldPort={port}
TaskProlog={root}/prolog
SlurmdTimeout=10
InactiveLimit=0
MinJobAge=7200
KillWait=20
OverTimeLimit=0
MessageTimeout=10
ReturnToService=2
JobRequeue=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SchedulerParameters=sched_interval=1,requeue_delay=1,bf_interval=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why no Slurm can be started here; None when it can."""
    if os.geteuid() != 0:
        return "slurmctld and network namespaces need root"
    lacking = [
        name for name in ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter") if shutil.which(name) is None
    ]
    return f"{', '.join(lacking)} not installed (apt-get install slurm-wlm munge iproute2)" if lacking else None


class SlurmCluster:
    """Use as a context manager; ends all that it started, by process id."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._number = random.SystemRandom().randrange(1, 250)  # others may be up on this machine
        self._networks = Networks(self._number, NODES) if possible() else None
        self.env = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
        for name in [name for name in self.env if name.startswith("SLURM_") and name != "SLURM_CONF"]:
            del self.env[name]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        for folder in ("state", "run", "log", *(f"spool-{n}" for n in NODES), *(f"scratch-{n}" for n in NODES)):
            (self.root / folder).mkdir(parents=True)
        (self.root / "prolog").write_text(f'#!/bin/sh\necho "export TMPDIR={self.root}/scratch-$SLURMD_NODENAME"\n')
        (self.root / "prolog").chmod(0o755)
        host, controller = os.uname().nodename, self._networks.controller if self._networks else "127.0.0.1"
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr={self.address(i)} Port={17000 + 2 * self._number + i} "
            "CPUs=8 RealMemory=16000"
            for i, name in enumerate(NODES)
        ]
        (self.root / "slurm.conf").write_text(
            CONF.format(
                host=host, port=16000 + self._number, controller=controller, root=self.root, nodes="\n".join(lines)
            )
        )
        try:
            if self._networks is not None:
                self._networks.make()
            self._start_munge()
            self._daemon("slurmctld", ["slurmctld", "-D"])
            for name in NODES:
                self.start_node(name)
            self._until(
                lambda: self.run("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(NODES),
                60,
                "the nodes to be idle",
            )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, node: int) -> str:
        return self._networks.address(node) if self._networks else "127.0.0.1"

    def _start_munge(self) -> None:
        key, run = self.root / "munge.key", self.root / "run"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for folder in (self.root, run):
            folder.chmod(0o755)
        self._daemon(
            "munged",
            [
                "munged",
                "--force",
                "--foreground",
                f"--key-file={key}",
                f"--socket={run}/munge.sock",
                f"--pid-file={run}/munge.pid",
                f"--log-file={self.root}/log/munged.log",
                f"--seed-file={run}/seed",
            ],
        )
        self._until((run / "munge.sock").exists, 10, "munged")

    def start_node(self, name: str) -> None:
        self._daemon(name, [*(self._networks.inside(name) if self._networks else []), "slurmd", "-D", "-N", name])

    def kill_node(self, name: str) -> None:
        """kill -9 of a node's daemon; the job's processes on it live on."""
        self._daemons[name].kill()
        self._daemons.pop(name).wait()

    def _daemon(self, name: str, argv: list[str]) -> None:
        with (self.root / "log" / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                argv, env=self.env, stdout=output, stderr=output, start_new_session=True, preexec_fn=_ready_to_end
            )

    def run(self, *argv: str, env: Mapping[str, str] = {}, cwd: Path | None = None) -> str:
        """Output of one of Slurm's commands. Raises RuntimeError with what it said."""
        done = subprocess.run(argv, env={**self.env, **env}, cwd=cwd, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)}: {done.stderr or done.stdout}")
        return done.stdout

    def submit(self, *argv: str, cwd: Path, env: Mapping[str, str] = {}) -> int:
        """Job number of ``sbatch``."""
        return int(self.run("sbatch", "--parsable", *argv, cwd=cwd, env=env).split(";")[0])

    def state(self, job: int) -> str:
        """PENDING, RUNNING, COMPLETED, ..."""
        shown = self.run("scontrol", "show", "job", str(job))
        return shown.partition("JobState=")[2].split()[0]

    def states(self, array: int) -> dict[int, str]:
        """State of each task of an array that is a job by now."""
        shown = self.run("scontrol", "-o", "show", "job", str(array))
        return {int(task): state for task, state in re.findall(r"ArrayTaskId=(\d+) .*?JobState=(\w+)", shown)}

    def wait(self, job: int, timeout_s: float) -> str:
        """Final state of a job."""
        self._until(
            lambda: self.state(job) not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING"),
            timeout_s,
            f"job {job}",
        )
        return self.state(job)

    def _until(self, what: object, timeout_s: float, name: str) -> None:
        assert callable(what)
        deadline = time.monotonic() + timeout_s
        while not what():
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"== {p}\n{p.read_text(errors='replace')[-1500:]}" for p in sorted((self.root / "log").iterdir())
                )
                raise TimeoutError(f"no {name} after {timeout_s:.0f} s\n{logs}")
            time.sleep(0.3)

    def _shared_memory(self) -> set[Path]:
        """Shared memory of the jobs that still run: nobody else removes it when all of a job is killed."""
        found: set[Path] = set()
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if os.fsencode(self.root) in environment.read_bytes():
                    found |= shared_memory(os.getsid(int(environment.parent.name)))
        return found

    def close(self) -> None:
        segments = self._shared_memory()
        if "slurmctld" in self._daemons:
            with suppress(RuntimeError):
                self.run("scancel", "--full", "--signal=KILL", "--user=root")
                self._until(lambda: not self.run("squeue", "-h", "-t", "R,CG").strip(), 15, "end of jobs")
        for daemon in reversed(self._daemons.values()):
            with suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGTERM)
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
        self._daemons.clear()
        for segment in segments:
            segment.unlink(missing_ok=True)
        if self._networks is not None:
            self._networks.remove()


def _ready_to_end() -> None:
    """A daemon ends with the tests, and has no signals blocked."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    end_with_the_tests()


def main() -> None:
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    with SlurmCluster(Path(sys.argv[1])) as cluster:
        sys.stdout.write(f"export SLURM_CONF={cluster.env['SLURM_CONF']}\n")
        sys.stdout.flush()
        signal.sigwait(ends)


if __name__ == "__main__":
    main()
