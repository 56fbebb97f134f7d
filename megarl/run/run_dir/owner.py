"""Ownership of a run directory: by one job at a time, and by the newest of its attempts."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from megarl.core.durable import write_text
from megarl.core.errors import ConfigError, FencedError
from megarl.core.jobs import STORE, TRAIN, of_program
from megarl.core.processes.machine import start_ticks
from megarl.core.processes.secrets import shared_key
from megarl.run.process.reaper import end
from megarl.weights.checkpoint.training.manifest import current_attempt

log = logging.getLogger(__name__)

KEY = "key"
"""File in the run's directory with its key."""
WAIT_S = 0.1
ORPHANS_S = 40.0
"""Seconds that a start waits for the processes of a killed supervisor: longer than they take to end."""
DEAD = "0"
"""Owner of a lock in /proc/<pid>/fdinfo after its death, as some pid namespaces show it."""


def check_writable(setting: str, folder: Path) -> None:
    """Raise ConfigError unless ``folder`` is writable or can be made; makes nothing."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise ConfigError(
            f"{setting} cannot be made or written in ({nearest}: {error.strerror}); set it to another place"
        ) from error


@contextmanager
def own_run_dir(run_dir: Path, program: str = TRAIN) -> Iterator[int]:
    """Lock the run directory for a program: two jobs of one program would overwrite each other's state.

    Yields the lock's descriptor. Every process that keeps it open also holds the lock. So after a supervisor's death
    the next one waits for the job's remaining processes, and kills them after ORPHANS_S. A requeued Slurm job first
    fences its earlier self, which may still run if its node's daemon was killed.

    Raises:
        ConfigError: another live job holds the lock.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle: IO[str] = (run_dir / of_program("lock", program)).open("a+")
    except OSError as error:
        raise ConfigError(
            f"run.dir={run_dir} cannot be made or written in ({error.strerror}); set run.dir to another place"
        ) from error
    try:
        _lock(run_dir, handle, program)
        handle.truncate(0)
        handle.write(
            f"{os.getpid()} {os.uname().nodename} {os.environ.get('SLURM_JOB_ID', '')} {start_ticks(os.getpid())}"
        )
        handle.flush()
        yield handle.fileno()
    finally:
        handle.close()


def held_locks(run_dir: Path, program: str) -> list[str]:
    """Return the names of locks that other programs hold now."""
    held = []
    for path in run_dir.glob("lock*"):
        with path.open("rb") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if path.name != of_program("lock", program):
                    held.append(path.name)
    return held


def is_running(run_dir: Path) -> bool:
    """Return True if a job of the run lives: a program that trains or explores holds its lock."""
    return bool(held_locks(run_dir, STORE))


def _lock(run_dir: Path, handle: IO[str], program: str) -> None:
    """Take the lock. Raises ConfigError."""
    fenced = ended = False
    deadline = time.monotonic() + ORPHANS_S
    while not _locked(handle):
        handle.seek(0)
        pid, host, slurm_job, started = _holder(handle.read())
        here = host == os.uname().nodename
        earlier_self = slurm_job != "" and slurm_job == os.environ.get("SLURM_JOB_ID")
        if earlier_self and not fenced:
            next_attempt(run_dir, program=program)
            fenced = True
        lives = not earlier_self and here and is_alive(pid, started)
        if lives or time.monotonic() > deadline:
            holders = _holders(handle)
            orphans = [holder for holder, owner in holders.items() if owner in (pid, DEAD)]
            if ended or not here or is_alive(pid, started) or not orphans:
                raise ConfigError(_in_use(run_dir, pid, host, lives, holders))
            _end(orphans, pid)
            ended, deadline = True, time.monotonic() + ORPHANS_S
        time.sleep(WAIT_S)


def _locked(handle: IO[str]) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use(run_dir: Path, pid: str, host: str, lives: bool, holders: Iterable[int]) -> str:
    others = [str(holder) for holder in holders if str(holder) != pid]
    held = f", its lock is held here by process {', '.join(others)}" if others and not lives else ""
    return (
        f"run.dir={run_dir} is in use by {'' if lives else 'what is left of '}process {pid or 'unknown'} on "
        f"{host or 'this machine'}{held}; end that job or choose another run.name"
    )


def _holders(handle: IO[str]) -> dict[int, str]:
    """Return living process of this machine that holds the lock -> process that took the lock and passed on its
    descriptor."""
    found: dict[int, str] = {}
    lock = os.fstat(handle.fileno())
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or is another user's
            for number in os.listdir(folder / "fd"):
                if os.path.samestat((folder / "fd" / number).stat(), lock):
                    text = (folder / "fdinfo" / number).read_text()
                    found.update((int(folder.name), line.split()[5]) for line in text.splitlines() if " FLOCK " in line)
    return found


def _end(orphans: Sequence[int], supervisor: str) -> None:
    """Kill the remaining processes of a dead supervisor without a reaper.

    A session leader, like the job's processes, is killed with its session. Any other process is killed alone: its group
    may be the shell's that started the job, and this process's.
    """
    names = ", ".join(f"process {pid}" for pid in orphans)
    log.warning("ending %s: left of process %s, which is dead, and alive %g s later", names, supervisor, ORPHANS_S)
    for pid in orphans:
        with suppress(ProcessLookupError):
            if os.getsid(pid) == pid:
                end([pid], 0.0)
            else:
                os.kill(pid, signal.SIGKILL)


def run_key(run_dir: Path) -> str:
    """Return the key of a run with several programs, stored in its directory for all of them. Raises ConfigError."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.dir={run_dir} cannot be made ({error.strerror}); set run.dir to another place"
        ) from error
    return shared_key(run_dir / KEY)


def run_id(run_dir: Path) -> str:
    """Return the run's identity, made at the first call. The store has it too, to detect another run's store."""
    path = run_dir / "run_id"
    if not path.is_file():
        write_text(path, secrets.token_hex(8))
    return path.read_text().strip()


def _holder(text: str) -> tuple[str, str, str, str]:
    """Return (process, machine, Slurm job, start of the process in clock ticks) of the lock's owner."""
    pid, host, job, started, *_ = [*text.split(" "), "", "", "", ""]
    return pid, host, job, started


def is_alive(pid: str, started: str) -> bool:
    """Return True if the process lives and its number was not reused. ``started`` is empty in a lock of an older
    version."""
    if not (pid.isascii() and pid.isdecimal()) or (started and str(start_ticks(int(pid))) != started):
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a zombie: dead, but its parent has not waited for it


def next_attempt(run_dir: Path, last: int | None = None, program: str = TRAIN) -> int:
    """Count a start of a job, which fences all earlier ones of its program.

    Weights versions contain the trainer's attempt, so none is ever reused.

    Args:
        last: The caller's newest attempt; None fences any attempt.

    Raises:
        FencedError: a later attempt than ``last`` has begun.
    """
    path = run_dir / of_program("attempt", program)
    with path.with_name(f"{path.name}.lock").open("a") as lock:  # two heads of one run may count simultaneously
        fcntl.flock(lock, fcntl.LOCK_EX)
        if last is not None:
            check_fence(run_dir, last, program)
        attempt = current_attempt(run_dir, program) + 1
        write_text(path, str(attempt))
    return attempt


def check_fence(run_dir: Path, attempt: int, program: str = TRAIN) -> None:
    """Raise FencedError if a later attempt of the program has begun."""
    if (newest := current_attempt(run_dir, program)) > attempt:
        raise FencedError(f"attempt {newest} of the run in {run_dir} has begun; attempt {attempt} ends")
