"""Faults done to a running job, one after the other; docs/faults.md is made from what happened.

    python -m tests.system.fault_table [--dir runs/faults] [--only WORD] [hydra overrides]    # writes the table to <dir>/table.md

One job trains while every fault is done to it, each two or more steps behind the one before; where a fault ends the command, the same command
is given again. At its end its checkpoints, metrics, tasks, answers, log-probs and rewards are compared with those of a job that was left
alone. Weight syncs and PostgreSQL have a job of their own, and so has each fault that changes the result by intent (an update left
out, a step taken back). As root the job's directory is a file system of its own, which one fault fills.

*Seconds*: from the fault until a step that had not been recorded is, repeated steps included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.checkpoint.manifest import MANIFEST, finished, latest
from megarl.rollout.engine import group_members
from tests.system.jobs import TINY, Job
from tests.system.soak import END_S, checkpoints_and_metrics, differences, found_in, kill, run_to_its_end

EVERY = 2
STEPS_APART = 3
"""Steps between two faults: a checkpoint lies between them."""
BASE = (
    *TINY,
    "parallel=dp2",
    "rollout.replicas=2",
    "algorithm.group_size=8",
    f"trainer.checkpoint_interval={EVERY}",
    "trainer.keep_checkpoints=1000",
    "trainer.eval_interval=0",
    "cluster.restarts=9",
    "cluster.replacements=99",
    "cluster.stall_s=15",
)
IN_SYNCS = "sync.bucket_bytes=4096"
"""Hundreds of small messages: a sync lasts long enough for something to be done in it."""
PAUSE_S = 25.0
"""How long a database is away: longer than ``cluster.stall_s``."""
FULL_S = 15.0
"""How long a disk is full."""


@dataclass
class Row:
    fault: str
    moment: str
    happened: str
    seconds: float
    attempts: int
    """How many attempts it took beyond the one that was hurt."""


class Injured:
    """A run that faults are done to, over as many starts of its command as that takes."""

    def __init__(self, run_dir: Path, overrides: Sequence[str]) -> None:
        self.run_dir, self.overrides = run_dir, list(overrides)
        self.pids: list[int] = []
        """All processes of the job, as a moment that is short has found them."""
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
        return max((json.loads(line)["step"] for line in lines if '"timing_s/step"' in line and line.endswith("}")), default=0)

    def attempt(self) -> int:
        path = self.run_dir / "attempt"
        return int(path.read_text()) if path.is_file() else 0

    # ---------------------------------------------------------------- moments

    def behind_a_step(self) -> None:
        """A step of this start is recorded; the next one begins with a weight sync."""
        before = self.step()
        self.job.until(lambda: self.step() > before, f"a step behind {before}", poll_s=0.005)

    def in_a_rollout(self) -> None:
        """Some groups of the newest rollout are done, others not."""
        self.behind_a_step()
        self.pids = [self.job.pid, *self.job.processes()]

        def under_way() -> bool:
            states = [state for (state,) in self.job.query(
                "select state from groups where rollout_id = (select rollout_id from rollouts where kind = 'train' order by requested_at desc limit 1)"
            )]  # fmt: skip
            return bool(states) and states.count("done") < len(states)

        self.job.until(under_way, "a rollout under way", poll_s=0.002)

    def in_an_update(self) -> None:
        """All groups of a rollout are done and its step is not recorded."""
        self.in_a_rollout()
        open_groups = "select count(*) from groups where state != 'done'"
        self.job.until(lambda: self.job.query(open_groups) in ([(0,)], []), "the end of the rollout", poll_s=0.002)

    def in_a_checkpoint(self) -> None:
        folder = self.run_dir / "checkpoints"
        self.job.until(lambda: bool([*folder.glob("global_step_*.attempt_*")]), "a checkpoint that is being written", poll_s=0.002)

    def in_a_sync(self) -> None:
        """Of a step with an odd number, before which no checkpoint was due."""
        self.behind_a_step()
        self.pids = [self.job.pid, *self.job.processes()]
        self.engine = self.job.pid_of("engine")
        while not self._next_sync() % EVERY:
            pass

    def _next_sync(self) -> int:
        """Wait for it; the steps recorded before."""
        before = self._syncs()
        self.job.until(lambda: self._syncs() > before, "a sync", poll_s=0.002)
        return self.step()

    def _syncs(self) -> int:
        return (self.run_dir / "logs" / f"attempt_{self.attempt()}" / "engine_0.log").read_text().count("PAUSED_NEW")

    def kill(self, role: str, number: int) -> None:
        os.kill(self.job.pid_of(role), number)


Inject = Callable[[Injured], str]
"""Does it, and says what the job did; the command has been given again if that was needed."""


@dataclass(frozen=True)
class Fault:
    name: str
    moment: Callable[[Injured], None]
    do: Inject


def stopped(injured: Injured, text: str) -> str:
    """The command has ended; it is given again."""
    status = injured.job.wait(90)
    injured.again()
    return f"{text} (status {status}); the same command goes on from the newest checkpoint"


def process(role: str, number: int, text: str) -> Inject:
    def do(injured: Injured) -> str:
        injured.kill(role, number)
        return text

    return do


def reward_workers(injured: Injured) -> str:
    pids = [pid for pid, command in injured.job.processes().items() if "megarl.rewards.worker" in command or "multiprocessing" in command]
    explorer = injured.job.pid_of("explorer")
    children = [pid for pid in pids if _parent(pid) == explorer] or [pid for pid in injured.job.processes() if _parent(pid) == explorer]
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return "they are started anew, their answers are scored again"


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def supervisor_killed(injured: Injured) -> str:
    injured.job.signal(signal.SIGKILL)
    return stopped(injured, "all processes end within seconds, shared memory is freed")


def all_killed(injured: Injured) -> str:
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
    return stopped(injured, "a page of steps was overwritten: the file is set aside, and made again from the rest of it and metrics.jsonl")


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
    time.sleep(FULL_S)
    ballast.unlink()
    return f"no room for {FULL_S:.0f} s: writes to the store wait, a checkpoint that has no room is left out, with a warning"


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
    injured.job.until(lambda: len(finished(folder)) > 1, "two checkpoints")
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
    return "its server still answers `/health`; the sentinel kills it; as above"


def asked_to_stop(injured: Injured) -> str:
    injured.job.signal(signal.SIGTERM)
    return stopped(injured, "a checkpoint is saved within the grace")


def all_asked_to_stop(injured: Injured) -> str:
    """As ``scancel --signal=TERM`` does it."""
    for pid in injured.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    return saved(injured, "engines, explorer and guard end as well; a checkpoint of the current step is saved")


def asked_to_stop_without_engine(injured: Injured) -> str:
    os.kill(injured.engine, signal.SIGKILL)
    noticed = "an engine died in a weight sync"
    before = injured.job.output.read_text().count(noticed)
    injured.job.until(lambda: injured.job.output.read_text().count(noticed) > before, noticed, poll_s=0.01)
    injured.job.signal(signal.SIGTERM)
    return saved(injured, "nobody waits for another engine; a checkpoint of the current step is saved")


def saved(injured: Injured, text: str) -> str:
    """The command ends with a checkpoint of the last step that it recorded."""
    status, newest = injured.job.wait(90), latest(injured.run_dir / "checkpoints")
    if newest is None or newest.name != f"global_step_{injured.step()}" or status != 130:
        raise SystemExit(f"{injured.run_dir}: status {status}, step {injured.step()} is recorded, the newest checkpoint is {newest}")
    return stopped(injured, text)


def supervisor_and_guard_killed(injured: Injured) -> str:
    guards = [pid for pid in injured.pids if b"megarl.launch.guard" in _command(Path(f"/proc/{pid}"))]
    for pid in (*guards, injured.job.pid):
        os.kill(pid, signal.SIGKILL)
    injured.job.wait(10)
    injured.job = Job(injured.run_dir, injured.overrides).start()  # at once: it waits until the others have let go of the directory
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
    time.sleep(PAUSE_S)
    connection.execute("rollback")
    connection.close()
    return f"locked for {PAUSE_S:.0f} s: every process waits and repeats its write"


FAULTS = (
    Fault("trainer rank: SIGKILL", Injured.in_an_update, process("trainer 1", signal.SIGKILL, "the job starts again by itself (`cluster.restarts`)")),
    Fault("trainer rank: SIGSTOP", Injured.in_an_update, process("trainer 1", signal.SIGSTOP,
          "the sentinel names the rank and the collective in which the others wait, with stacks; the job starts again by itself")),
    Fault("engine: SIGKILL", Injured.in_a_rollout, process("engine", signal.SIGKILL, "the other engine goes on; a new one gets the weights, proven equal")),
    Fault("engine: SIGKILL", Injured.behind_a_step, process("engine", signal.SIGKILL, "a new engine gets the weights, proven equal")),
    Fault("engine: SIGSTOP", Injured.in_a_rollout, process("engine", signal.SIGSTOP, "the sentinel kills it; as above")),
    Fault("engine: its core hangs (held by ptrace)", Injured.in_a_rollout, core_hangs),
    Fault("explorer: SIGKILL", Injured.in_a_rollout, process("explorer", signal.SIGKILL, "a new one takes over its groups")),
    Fault("explorer: SIGSTOP", Injured.in_a_rollout, process("explorer", signal.SIGSTOP, "the sentinel kills it; a new one takes over its groups")),
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
)  # fmt: skip
OF_SYNCS = (
    Fault("SIGTERM to all processes", Injured.in_a_sync, all_asked_to_stop),
    Fault("SIGTERM to all processes", Injured.in_a_rollout, all_asked_to_stop),
    Fault("engine: SIGKILL, then SIGTERM", Injured.in_a_sync, asked_to_stop_without_engine),
    Fault("supervisor and guard: SIGKILL", Injured.in_a_sync, supervisor_and_guard_killed),
)
OF_POSTGRES = (
    Fault("PostgreSQL (the job's own): SIGKILL", Injured.behind_a_step, database_killed),
    Fault("PostgreSQL: all its processes SIGSTOP", Injured.behind_a_step, database_stopped),
)
SPOILED = """
import dataclasses, os
from megarl.algorithms.grpo import GRPO

CALLS = 0

def loss(batch, config):
    global CALLS
    found = GRPO.loss(batch, config)
    if batch.logp.requires_grad and os.environ.get("RANK") == "1":
        CALLS += 1
        if CALLS == 11:
            found = found._replace(total=found.total * float("nan"))
    return found

ALGORITHM = dataclasses.replace(GRPO, name="spoiled", loss=loss)
"""


def suffer(faults: Sequence[Fault], run_dir: Path, overrides: Sequence[str]) -> list[Row]:
    """All faults done to one job, which then trains to its end."""
    injured = Injured(run_dir, overrides)
    rows = []
    try:
        for fault in faults:
            injured.behind_a_step()
            injured.behind_a_step()
            fault.moment(injured)
            job, step, attempt, since = injured.job, injured.step(), injured.attempt(), time.monotonic()
            happened = fault.do(injured)
            if injured.job is not job:  # what ended may have recorded one more
                step = injured.step()
            injured.job.until(lambda step=step: injured.step() > step, f"a step behind {step}, after {fault.name}", poll_s=0.01)  # type: ignore[misc]
            row = Row(fault.name, fault.moment.__name__.replace("_", " "), happened, time.monotonic() - since, injured.attempt() - attempt)
            rows.append(row)
            print(f"step {step}: {row.fault}, {row.moment}: {row.seconds:.1f} s, {row.attempts} new attempts", flush=True)
        if injured.job.wait(END_S) != 0:
            raise SystemExit(f"{run_dir}: the job ended with {injured.job.poll()}; see {injured.job.output}")
    finally:
        injured.job.clean_up()
    return rows


def spoil(root: Path, action: str, happened: str) -> Row:
    """A job in which one rank's loss is once no number; the seconds are from then to the end of that step, or of the one done in its place."""
    run_dir, algorithm = root / f"spoiled_{action}", root / "spoiled.py"
    algorithm.write_text(SPOILED)
    shutil.rmtree(run_dir, ignore_errors=True)
    run_to_its_end(run_dir, [*BASE, "trainer.steps=8", f"algorithm.name={algorithm}", f"trainer.guard.on_nonfinite={action}"])
    store = Job(run_dir, [])
    ((at, data),) = store.query("select at, data from events where kind = 'bad_update'")
    ((then,),) = store.query(f"select min(recorded_at) from steps where recorded_at > {at}")
    assert isinstance(at, float) and isinstance(then, float)
    print(f"NaN, {action}: {then - at:.1f} s, {data}", flush=True)
    return Row("NaN in one rank's loss", f"`trainer.guard.on_nonfinite={action}`", happened, then - at, int((run_dir / "attempt").read_text()) - 1)


def compared(hurt: Path, whole: Path, steps: int) -> tuple[str, list[str]]:
    """What differs from the job without faults. A checkpoint that only one of them has is said apart: a stop saves one, a full disk prevents one."""
    reference = found_in(whole, steps)
    ours, theirs = ({path.name for path in (run / "checkpoints").glob("global_step_*")} for run in (hurt, whole))
    differing = [name for name in differences(hurt, reference, steps) if name.partition("/")[0] not in ours ^ theirs]
    found = found_in(hurt, steps)
    named = "; ".join(f"{name}: {_difference(found.get(name), reference.get(name))}" for name in differing)
    text = f"{len(reference)} things compared, {len(differing)} differ{named and f' ({named})'}"
    return f"{text}; checkpoints left out: {sorted(theirs - ours)}, more than usual: {sorted(ours - theirs)}", differing


def _difference(found: Any, reference: Any) -> str:
    """Of metrics, which."""
    if isinstance(found, dict) and isinstance(reference, dict):
        return ", ".join(sorted(key for key in found.keys() | reference.keys() if found.get(key) != reference.get(key)))
    return "not there" if found is None else "only there" if reference is None else "another value"


def compared_without_store(hurt: Path, whole: Path) -> tuple[str, list[str]]:
    """Weights, moments and metrics of two runs; a job's own PostgreSQL ends with it."""
    found, reference = (
        {name: value for name, value in checkpoints_and_metrics(run).items() if not name.startswith("metrics of val")} for run in (hurt, whole)
    )
    differing = sorted(name for name in found.keys() | reference.keys() if found.get(name) != reference.get(name))
    return f"{len(reference)} things compared (no answers: the server is gone), {len(differing)} differ {differing[:5] or ''}", differing


def table(rows: Sequence[Row]) -> str:
    lines = ["| fault | moment | what happened | seconds | attempts |", "|---|---|---|---|---|"]
    lines += [f"| {row.fault} | {row.moment} | {row.happened} | {row.seconds:.1f} | {row.attempts or ''} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/faults"))
    parser.add_argument("--only", default="")
    arguments, overrides = parser.parse_known_args()
    root = arguments.dir.resolve()
    root.mkdir(parents=True, exist_ok=True)
    steps = (len(FAULTS) + 1) * (STEPS_APART + 1)
    settings = [*BASE, f"trainer.steps={steps}", *overrides]
    whole, hurt, of_syncs, of_postgres = root / "whole", root / "hurt", root / "syncs", root / "postgres"
    if not (whole / "hf" / "config.json").is_file():
        run_to_its_end(whole, settings)
    rows: list[Row] = []
    verdicts: list[str] = []
    differing: list[str] = []
    faults = [fault for fault in FAULTS if arguments.only in f"{fault.name}, {fault.moment.__name__}"]
    if faults:
        shutil.rmtree(hurt, ignore_errors=True)
        hurt.mkdir()
        with own_file_system(hurt) as alone:
            rows += suffer([fault for fault in faults if alone or fault.do is not disk_filled], hurt, settings)
            text, found = compared(hurt, whole, steps)
            verdicts, differing = [*verdicts, f"the job of all faults on SQLite: {text}"], differing + found
    faults = [fault for fault in OF_SYNCS if arguments.only in f"{fault.name}, {fault.moment.__name__}"]
    if faults:
        shutil.rmtree(of_syncs, ignore_errors=True)
        rows += suffer(faults, of_syncs, [*settings, IN_SYNCS])
        text, found = compared(of_syncs, whole, steps)
        verdicts, differing = [*verdicts, f"the job of faults in syncs: {text}"], differing + found
    faults = [fault for fault in OF_POSTGRES if arguments.only in f"{fault.name}, {fault.moment.__name__}"]
    if faults:
        shutil.rmtree(of_postgres, ignore_errors=True)
        rows += suffer(faults, of_postgres, [*settings, "store=postgres"])
        text, found = compared_without_store(of_postgres, whole)
        verdicts, differing = [*verdicts, f"the job on PostgreSQL: {text}"], differing + found
    if not arguments.only:
        rows += [spoil(root, "skip", "the update is left out on all ranks"), spoil(root, "rollback", "back to the newest checkpoint, in process; other tasks")]
    for verdict in verdicts:
        print(verdict)
    (root / "table.md").write_text(table(rows) + "".join(f"\n{verdict}" for verdict in verdicts) + "\n")
    print((root / "table.md").read_text())
    sys.exit(1 if differing else 0)


@contextmanager
def own_file_system(folder: Path) -> Iterator[bool]:
    """Mount one on ``folder`` where this user may; False where not."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g", "none", str(folder)], capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


if __name__ == "__main__":
    main()
