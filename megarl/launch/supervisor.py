"""Starts the processes of a job on this machine and watches them; a dead one ends the job with its last lines."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from megarl import algorithms
from megarl.checkpoint.state import write_text
from megarl.config import Config, save_resolved
from megarl.errors import ConfigError, JobError
from megarl.launch import ports
from megarl.launch.guard import Guard
from megarl.launch.interrupt import INTERRUPT
from megarl.launch.process import Child
from megarl.rollout.engine import engine_process, shared_memory

log = logging.getLogger(__name__)

WATCH_S = 0.1
STOP_S = 10.0
"""How long processes get to end after SIGTERM once one of them has died."""
ORPHANS_S = 40.0
"""How long a start waits for the processes of a supervisor that was killed: longer than they take to end."""


@contextmanager
def own_run_dir(run_dir: Path) -> Iterator[int]:
    """Hold the run directory: two jobs in one directory would overwrite each other's state.

    Yields the lock's descriptor. Every process that keeps it open holds the directory too, so that after the death of
    a supervisor the next one waits until all of the job's processes are gone.

    Raises:
        ConfigError: another live job holds it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle: IO[str] = (run_dir / "lock").open("a+")
    except OSError as error:
        raise ConfigError(
            f"run.dir={run_dir} cannot be made or written in ({error.strerror}); set run.dir to another place"
        ) from error
    deadline = time.monotonic() + ORPHANS_S
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                handle.seek(0)
                holder = handle.read().strip()
                if _is_alive(holder) or time.monotonic() > deadline:
                    raise ConfigError(
                        f"run.dir={run_dir} is in use by {'' if _is_alive(holder) else 'what is left of '}"
                        f"process {holder or 'unknown'}; end that job or choose another run.name"
                    ) from None
            time.sleep(WATCH_S)
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        yield handle.fileno()
    finally:
        handle.close()


def _is_alive(pid: str) -> bool:
    if not pid.isdigit():
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # dead, and its parent has not asked yet


def next_attempt(run_dir: Path) -> int:
    """Count this start of the job; weights versions carry the number, so none is ever used twice."""
    path = run_dir / "attempt"
    attempt = int(path.read_text()) + 1 if path.is_file() else 1
    write_text(path, str(attempt))
    return attempt


def start_job(config: Config, lock: int, guard: Guard) -> list[Child]:
    """Start engines, trainer ranks and the explorer, all under ``guard``; each holds the run directory by ``lock``.

    An offline job has trainer ranks alone.
    """
    run_dir = Path(config.run.dir)
    offline = algorithms.get(config.algorithm.name).offline
    host = config.run.host
    attempt = next_attempt(run_dir)
    resolved = run_dir / "resolved.json"
    save_resolved(config, resolved)
    numbers = ports.choose(host, ports.needed(0 if offline else config.rollout.replicas), config.run.port)
    rendezvous, link, *engine_ports = numbers
    logs = run_dir / "logs" / f"attempt_{attempt}"
    key = os.environ.get("MEGARL_JOB_KEY") or secrets.token_urlsafe(24)
    env = {
        "MEGARL_JOB_KEY": key,
        "MEGARL_ATTEMPT": str(attempt),
        "MEGARL_ENGINES": ",".join(f"http://{host}:{p}" for p in engine_ports),
        "MEGARL_LINK": f"{host}:{link}",
        "MEGARL_TTY": "1" if sys.stderr.isatty() else "0",
        "PYTHONUNBUFFERED": "1",
    }
    children: list[Child] = []

    def start(name: str, argv: list[str], more: Mapping[str, str], log: str, echo: bool = False) -> None:
        children.append(Child(name, argv, {**env, **more}, logs / log, echo=echo, keep=[lock]))
        guard.add(children[-1].pid)

    try:
        for i, port in enumerate(engine_ports):
            argv, engine_env = engine_process(
                config.model.path, config.rollout, config.model, host=host, port=port
            )
            start(f"engine {i}", argv, engine_env, f"engine_{i}.log")
        for rank in range(config.parallel.world_size):
            argv = [sys.executable, "-m", "megarl.loop", "trainer", "--config", str(resolved)]
            rank_env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(config.parallel.world_size),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(rendezvous),
                "OMP_NUM_THREADS": str(config.trainer.num_threads),
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            }
            start(f"trainer rank {rank}", argv, rank_env, f"trainer_{rank}.log", echo=rank == 0)
        if not offline:
            argv = [sys.executable, "-m", "megarl.loop", "explorer", "--config", str(resolved)]
            start("explorer", argv, {"OMP_NUM_THREADS": "1"}, "explorer.log")
    except BaseException:
        stop(children, STOP_S)
        raise
    log.info("started %s; logs in %s", ", ".join(c.name for c in children), logs)
    return children


def stop(children: list[Child], grace_s: float) -> None:
    """SIGTERM to all, then SIGKILL to what is left after ``grace_s``; returns when all are gone, their shared memory too."""
    segments = {path for child in children for path in shared_memory(child.pid)}
    for child in children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for child in children:
        child.wait(max(0.0, deadline - time.monotonic()))
    segments.update(path for child in children for path in shared_memory(child.pid))  # made since by what did not end
    for child in children:
        child.signal(signal.SIGKILL)  # whole groups: also what a dead process left behind
        child.wait(5)
    for path in segments:
        path.unlink(missing_ok=True)


class StopRequest:
    """Turns SIGINT and SIGTERM into a flag: the first asks for a resumable end, the third ends at once."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> StopRequest:
        self._before = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def watch(children: list[Child], stop_request: StopRequest, shutdown_grace_s: float) -> None:
    """Wait until the trainer has ended, finished or stopped on request, then end the rest.

    Raises:
        JobError: a process died; carries its name, exit status and last lines. All others are gone by then.
    """
    trainers = [c for c in children if c.name.startswith("trainer")]
    others = [c for c in children if c not in trainers]
    asked_at: float | None = None
    try:
        while True:
            if stop_request.count and asked_at is None:
                asked_at = time.monotonic()
                log.warning("stopping: saving a checkpoint (interrupt twice more to end at once)")
                for child in trainers:
                    child.signal(signal.SIGTERM)
            late = asked_at is not None and time.monotonic() - asked_at > shutdown_grace_s
            early = asked_at is not None and any(c.poll() == -signal.SIGTERM for c in trainers)  # had no handler yet
            if stop_request.count > 2 or late or early:
                log.warning("ended without a new checkpoint; the run resumes from the last one")
                return
            # Once asked, who stops a whole session or Slurm step has ended the others too: only a trainer's failure is news.
            _raise_for_dead(children if asked_at is None else trainers)
            if all(c.poll() == 0 for c in trainers):
                return
            time.sleep(WATCH_S)
    finally:
        stop(others + trainers, STOP_S)


def _raise_for_dead(children: list[Child]) -> None:
    if _failed(children):
        # A peer often fails because another died first: give the first cause a moment to show.
        time.sleep(0.5)
        first, *others = sorted(_failed(children), key=lambda c: c.log.stat().st_mtime)
        also = "".join(f"\nthen {_ending(child)} ({child.log})" for child in others)
        raise JobError(f"{_ending(first)}; its last lines ({first.log}):\n{first.tail()}{also}")


def _ending(child: Child) -> str:
    status = child.poll()
    how = f"was ended by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
    return f"{child.name} {how}"


def _failed(children: list[Child]) -> list[Child]:
    dead = [c for c in children if c.poll() is not None]
    # An explorer ends with 0 when the trainer has closed the job; an engine never ends by itself.
    return [c for c in dead if c.poll() != 0 or c.name.startswith("engine")]


def run_job(config: Config, lock: int) -> None:
    """Run a whole job in a directory held by ``lock``, until it ends or is stopped. Raises as ``watch`` does."""
    with StopRequest() as stop_request, Guard(lock) as guard:
        INTERRUPT.check()
        watch(start_job(config, lock, guard), stop_request, config.run.shutdown_grace_s)
