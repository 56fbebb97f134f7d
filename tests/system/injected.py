"""Faults that are done to a running job: what is done, at which moment, and what the job should do."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megarl.buffer.store.tables import WHOLE
from megarl.core.processes.machine import group_members
from megarl.weights.checkpoint.training.manifest import MANIFEST, finished, latest
from tests.loop.held import Held
from tests.system.jobs import Job, parent_of, unread
from tests.system.soak import kill

EVERY = 2
"""Steps between two checkpoints of the job."""
IN_SYNCS = "sync.bucket_bytes=4096"
"""Hundreds of small messages, most of them after what is done in a sync."""
PAUSE_S = 25.0
"""How long a database is away: longer than ``cluster.stall_s``."""
FULL_S = 15.0
"""How long a disk is full."""


class Injured:
    """A run that faults are done to, over as many starts of its command as that takes."""

    def __init__(self, run_dir: Path, overrides: Sequence[str], held: Held) -> None:
        """Start the job, whose settings have those of ``held``."""
        self.run_dir, self.overrides, self.held = run_dir, list(overrides), held
        self.pids: list[int] = []
        """All processes of the job, as a moment has found them."""
        self.paused: set[int] = set()
        """Processes that are stopped to hold a moment open."""
        self.job = Job(run_dir, self.overrides).start()

    def again(self) -> None:
        """The same command, after the last one has ended."""
        self.job.wait(120)
        self.job.until_gone(60)
        self.job = Job(self.run_dir, self.overrides).start()

    def step(self) -> int:
        """The last one recorded."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        return max(
            (json.loads(line)["step"] for line in lines if '"timing_s/step"' in line and line.endswith("}")), default=0
        )

    def attempt(self) -> int:
        path = self.run_dir / "attempt"
        return int(path.read_text()) if path.is_file() else 0

    # ---------------------------------------------------------------- moments

    def pause(self, pid: int) -> None:
        """Stop a process until ``let_go``."""
        os.kill(pid, signal.SIGSTOP)
        self.paused.add(pid)

    def let_go(self) -> None:
        """End what holds the moment open, once the fault is done."""
        if self.held.is_on("train"):
            self.held.release("train")
        for pid in self.paused:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.paused.clear()

    def behind_a_step(self) -> None:
        """A step of this start is recorded; an answer of the next rollout is held back."""
        before = self.step()
        self.until_in_a_rollout(lambda: self.step() > before, f"a step behind {before}")

    def in_a_rollout(self) -> None:
        """An answer of a rollout is held back."""
        self.behind_a_step()
        self.pids = [self.job.pid, *self.job.processes()]

    def until_in_a_rollout(self, condition: Callable[[], bool], what: str) -> None:
        """Hold a rollout open once the condition holds."""
        if not self.held.is_on("train"):
            self.held.hold("train")
        self.held.until(self.job, "train", condition, what)

    def in_an_update(self) -> None:
        """All groups of a rollout are ready and its step is not recorded: trainer rank 1 is stopped."""
        self.in_a_rollout()
        self.end_rollout(self.job.pid_of("trainer 1"))

    def end_rollout(self, *trainers: int) -> None:
        """Let the rollout end while these trainer ranks are stopped, so that its step does not."""
        for pid in trainers:
            self.pause(pid)
        self.held.release("train")
        newest = "(select rollout_id from rollouts where kind = 'train' order by requested_at desc limit 1)"
        states = f"select state from groups where rollout_id = {newest}"
        self.job.until(
            lambda: bool(found := self.job.query(states)) and {state for (state,) in found} <= set(WHOLE),
            "the end of the rollout",
        )

    def in_a_checkpoint(self) -> None:
        """A checkpoint is being written, or was: ``all_killed`` sees which."""
        self.let_go()
        self.job.until(self.writes_a_checkpoint, "a checkpoint that is being written", poll_s=0.002)

    def writes_a_checkpoint(self) -> bool:
        return any((self.run_dir / "checkpoints").glob("global_step_*.attempt_*"))

    def in_a_sync(self) -> None:
        """Of a step with an odd number, before which no checkpoint was due: engine 0 is stopped and has not read the
        call."""
        before = self.step()
        self.until_in_a_rollout(lambda: self.step() > before and self.step() % EVERY == 0, "a step with a checkpoint")
        self.pids = [self.job.pid, *self.job.processes()]
        port, trainers, done = self.job.port_of_engine(), self.job.trainers(), self.step()
        servers = [pid for pid, words in self.job.processes().items() if f"--port {port}" in words]
        [self.engine] = [pid for pid in servers if os.getsid(pid) == pid]
        self.end_rollout(*trainers)
        self.pause(self.engine)
        for pid in trainers:
            self.paused.discard(pid)
            os.kill(pid, signal.SIGCONT)
        self.job.until(lambda: self.step() > done, f"a step behind {done}")
        self.job.until(lambda: unread(port, trainers[0], "server"), "a sync's call that the engine has not read")

    def kill(self, role: str, number: int) -> None:
        pid = self.job.pid_of(role)
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            self.paused.discard(pid)  # it stays so


Inject = Callable[[Injured], str]
"""Does it, and says what the job did; the command has been given again if that was needed."""


@dataclass(frozen=True)
class Fault:
    name: str
    moment: Callable[[Injured], None]
    do: Inject


def stopped(injured: Injured, text: str) -> str:
    """The command has ended, or is about to; it is given again."""
    injured.let_go()
    status = injured.job.wait(90)
    injured.again()
    return f"{text} (status {status}); the same command goes on from the newest checkpoint"


def process(role: str, number: int, text: str) -> Inject:
    def do(injured: Injured) -> str:
        injured.kill(role, number)
        return text

    return do


def reward_workers(injured: Injured) -> str:
    pids = [
        pid
        for pid, command in injured.job.processes().items()
        if "megarl.rewards.pool.worker" in command or "multiprocessing" in command
    ]
    explorer = injured.job.pid_of("explorer")
    children = [pid for pid in pids if parent_of(pid) == explorer] or [
        pid for pid in injured.job.processes() if parent_of(pid) == explorer
    ]
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return "they are started again, their answers are scored again"


def supervisor_killed(injured: Injured) -> str:
    injured.job.signal(signal.SIGKILL)
    return stopped(injured, "all processes end within seconds, shared memory is freed")


def all_killed(injured: Injured) -> str:
    kill(injured.job)
    while not injured.writes_a_checkpoint():  # it was whole before the kill
        injured.again()
        injured.behind_a_step()
        injured.in_a_checkpoint()
        kill(injured.job)
    return stopped(injured, "what was half written is not used")


def server_of(injured: Injured) -> int:
    """The job's PostgreSQL: the one whose data is in the run."""
    [pid] = [
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if str(injured.run_dir).encode() in (command := _command(folder)) and b"postgres\0-D" in command
    ]
    return pid


def _command(folder: Path) -> bytes:
    with suppress(OSError):
        return (folder / "cmdline").read_bytes()
    return b""


def database_killed(injured: Injured) -> str:
    os.kill(server_of(injured), signal.SIGKILL)
    return "the supervisor starts it again; every process waits and repeats its write"


def database_stopped(injured: Injured) -> str:
    pid = server_of(injured)
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for one in (pid, *children):
            with suppress(ProcessLookupError):
                os.kill(one, number)
        if number == signal.SIGSTOP:
            injured.let_go()
            time.sleep(PAUSE_S)
    return f"stopped for {PAUSE_S:.0f} s: every process waits"


def damaged_store(injured: Injured) -> str:
    kill(injured.job)
    path = injured.run_dir / "store.db"
    sqlite3.connect(path).execute("pragma wal_checkpoint(truncate)").fetchone()
    content = path.read_bytes()
    page = content.index(b'"training/global_step":') // 4096 * 4096  # of the table of steps
    with path.open("r+b") as file:
        file.seek(page)
        file.write(b"\xff" * 100)
    return stopped(
        injured, "a page of steps was overwritten: the file is set aside, and a new one has the steps of metrics.jsonl"
    )


def disk_filled(injured: Injured) -> str:
    assert injured.run_dir.is_mount(), "it would fill somebody's disk"
    ballast = injured.run_dir / "ballast"
    size, chunk = 0, 1 << 28
    with ballast.open("wb") as file:
        while chunk >= 1 << 12:
            try:
                os.posix_fallocate(file.fileno(), size, chunk)
                size += chunk
            except OSError:
                chunk //= 2
    injured.let_go()
    time.sleep(FULL_S)
    ballast.unlink()
    return (
        f"no room for {FULL_S:.0f} s: writes to the store wait, a checkpoint that has no room is left out, with a "
        "warning"
    )


def damaged_checkpoint(injured: Injured) -> str:
    newest = newest_killed(injured)
    file = max(newest.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        byte = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte[0] ^ 1]))
    said = stopped(injured, f"one bit of {newest.name} was turned: its digest tells, it is set aside, loudly")
    return said.replace("the newest checkpoint", "the one before")


def newest_killed(injured: Injured) -> Path:
    """The newest checkpoint of the job, whose processes are gone; there is one before it."""
    folder = injured.run_dir / "checkpoints"
    injured.until_in_a_rollout(lambda: len(finished(folder)) > 1, "two checkpoints")
    kill(injured.job)
    return finished(folder)[-1]


def manifest_removed(injured: Injured) -> str:
    newest = newest_killed(injured)
    (newest / MANIFEST).unlink()
    ended = stopped(injured, f"{newest.name} is set aside with a warning that names the file")
    return ended.replace("the newest checkpoint", "the one before")


def moved_aside(injured: Injured) -> str:
    newest = newest_killed(injured)
    newest.rename(newest.with_name(f".{newest.name}.old"))
    return stopped(injured, f"{newest.name} gets its name back, with a warning")


HOLD = """
import ctypes, os, sys
PTRACE_ATTACH, WALL = 16, 0x40000000
libc, pid = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
if libc.ptrace(PTRACE_ATTACH, pid, None, None):
    raise OSError(ctypes.get_errno(), "ptrace")
while os.WIFSTOPPED(os.waitpid(pid, WALL)[1]):  # until it is killed
    pass
"""


def core_hangs(injured: Injured) -> str:
    """Its one thread that computes, held as by a debugger: to others the process looks busy."""
    server = injured.job.pid_of("engine")
    [core] = set(group_members(server)) - {server}
    subprocess.Popen([sys.executable, "-c", HOLD, str(core)])
    return "its server still answers `/health`; the watchdog kills it; as above"


def asked_to_stop(injured: Injured) -> str:
    injured.job.signal(signal.SIGTERM)
    return stopped(injured, "a checkpoint is saved within the grace")


def all_asked_to_stop(injured: Injured) -> str:
    """As ``scancel --signal=TERM`` does it."""
    for pid in injured.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    return saved(injured, "engines, explorer and reaper end as well; a checkpoint of the current step is saved")


def asked_to_stop_without_engine(injured: Injured) -> str:
    os.kill(injured.engine, signal.SIGKILL)
    noticed = "engine 0 was ended by signal 9"
    before = injured.job.output.read_text().count(noticed)
    injured.job.until(lambda: injured.job.output.read_text().count(noticed) > before, noticed, poll_s=0.01)
    injured.job.signal(signal.SIGTERM)
    return saved(injured, "nobody waits for another engine; a checkpoint of the current step is saved")


def saved(injured: Injured, text: str) -> str:
    """The command ends with a checkpoint of the last step that it recorded."""
    injured.let_go()
    status, newest = injured.job.wait(90), latest(injured.run_dir / "checkpoints")
    if newest is None or newest.name != f"global_step_{injured.step()}" or status != 130:
        raise SystemExit(
            f"{injured.run_dir}: status {status}, step {injured.step()} is recorded, the newest checkpoint is {newest}"
        )
    return stopped(injured, text)


def supervisor_and_reaper_killed(injured: Injured) -> str:
    reapers = [pid for pid in injured.pids if b"megarl.run.process.reaper" in _command(Path(f"/proc/{pid}"))]
    for pid in (*reapers, injured.job.pid):
        os.kill(pid, signal.SIGKILL)
    injured.let_go()
    injured.job.wait(10)
    injured.job = Job(
        injured.run_dir, injured.overrides
    ).start()  # at once: it waits until the others have let go of the directory
    return "the ranks save and end by themselves; the same command, given at once, goes on from that checkpoint"


def later_attempt(injured: Injured) -> str:
    (injured.run_dir / "attempt").write_text(str(injured.attempt() + 1))
    return stopped(injured, "the older attempt sees it within a second, kills its processes and writes nothing more")


def later_attempt_and_death(injured: Injured) -> str:
    (injured.run_dir / "attempt").write_text(str(injured.attempt() + 1))
    injured.kill("trainer 1", signal.SIGKILL)
    return stopped(injured, "the older job ends though restarts are left, and takes no further number")


def database_locked(injured: Injured) -> str:
    connection = sqlite3.connect(injured.run_dir / "store.db", timeout=30, isolation_level=None)
    connection.execute("begin exclusive")
    injured.let_go()
    time.sleep(PAUSE_S)
    connection.execute("rollback")
    connection.close()
    return f"locked for {PAUSE_S:.0f} s: every process waits and repeats its write"


FAULTS = (
    Fault(
        "trainer rank: SIGKILL",
        Injured.in_an_update,
        process("trainer 1", signal.SIGKILL, "the job starts again by itself (`cluster.restarts`)"),
    ),
    Fault(
        "trainer rank: SIGSTOP",
        Injured.in_an_update,
        process(
            "trainer 1",
            signal.SIGSTOP,
            "the watchdog names the rank and the collective in which the others wait, with stacks; the job starts "
            "again by itself",
        ),
    ),
    Fault(
        "engine: SIGKILL",
        Injured.in_a_rollout,
        process("engine", signal.SIGKILL, "the other engine goes on; a new one gets the weights, proven equal"),
    ),
    Fault(
        "engine: SIGKILL",
        Injured.behind_a_step,
        process("engine", signal.SIGKILL, "a new engine gets the weights, proven equal"),
    ),
    Fault(
        "engine: SIGSTOP", Injured.in_a_rollout, process("engine", signal.SIGSTOP, "the watchdog kills it; as above")
    ),
    Fault("engine: its core hangs (held by ptrace)", Injured.in_a_rollout, core_hangs),
    Fault(
        "explorer: SIGKILL",
        Injured.in_a_rollout,
        process("explorer", signal.SIGKILL, "a new one takes over its groups"),
    ),
    Fault(
        "explorer: SIGSTOP",
        Injured.in_a_rollout,
        process("explorer", signal.SIGSTOP, "the watchdog kills it; a new one takes over its groups"),
    ),
    Fault("reward workers: SIGKILL", Injured.in_a_rollout, reward_workers),
    Fault("supervisor: SIGKILL", Injured.in_a_rollout, supervisor_killed),
    Fault("everything: SIGKILL", Injured.in_a_checkpoint, all_killed),
    Fault("a bit of the newest checkpoint turned", Injured.behind_a_step, damaged_checkpoint),
    Fault("`state.json` of the newest checkpoint removed", Injured.behind_a_step, manifest_removed),
    Fault("newest checkpoint moved aside, as by a kill in a save", Injured.behind_a_step, moved_aside),
    Fault("SIGTERM (time limit, Ctrl-C)", Injured.in_an_update, asked_to_stop),
    Fault("a later attempt begins", Injured.in_a_rollout, later_attempt),
    Fault("trainer rank: SIGKILL as a later attempt begins", Injured.in_a_rollout, later_attempt_and_death),
    Fault("SQLite file locked", Injured.in_a_rollout, database_locked),
    Fault("SQLite file damaged", Injured.behind_a_step, damaged_store),
    Fault("disk full", Injured.behind_a_step, disk_filled),
)
OF_SYNCS = (
    Fault("SIGTERM to all processes", Injured.in_a_sync, all_asked_to_stop),
    Fault("SIGTERM to all processes", Injured.in_a_rollout, all_asked_to_stop),
    Fault("engine: SIGKILL, then SIGTERM", Injured.in_a_sync, asked_to_stop_without_engine),
    Fault("supervisor and reaper: SIGKILL", Injured.in_a_sync, supervisor_and_reaper_killed),
)
OF_POSTGRES = (
    Fault("PostgreSQL (the job's own): SIGKILL", Injured.behind_a_step, database_killed),
    Fault("PostgreSQL: all its processes SIGSTOP", Injured.behind_a_step, database_stopped),
)
