"""Runs the hostile programs, each in the sandbox and two at a time, under an outer guard of its own. ``python -m
tests.system.escape_runner`` in the guard.

The guard (``guarded``) bounds this process and all that it starts, in case the sandbox fails: address space and number
of processes by rlimits (the sandbox is started as nobody, whom they bind), and where this machine lets us, memory and
processes by a cgroup; time by a kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

GUARD_BYTES = 1536 * 2**20
GUARD_PROCESSES = 200
GUARD_S = 180.0
ADD = "a, b = map(int, input().split())\nprint(a + b)"
LANES = 2
"""Hostile programs at a time, each with sandboxes of its own."""
SUM = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}


def cgroups() -> Iterator[tuple[Path, dict[str, str]]]:
    """Of this process: folders in which a group can be made, and what bounds it there."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield (
                Path("/sys/fs/cgroup") / path.lstrip("/"),
                {"memory.max": str(GUARD_BYTES), "pids.max": str(GUARD_PROCESSES)},
            )
        elif controllers == "memory":
            yield Path("/sys/fs/cgroup/memory") / path.lstrip("/"), {"memory.limit_in_bytes": str(GUARD_BYTES)}
        elif controllers == "pids":
            yield Path("/sys/fs/cgroup/pids") / path.lstrip("/"), {"pids.max": str(GUARD_PROCESSES)}


@contextlib.contextmanager
def guard_groups() -> Iterator[list[Path]]:
    made: list[Path] = []
    for parent, bounds in cgroups():
        group = parent / f"megarl-escapes-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            made.append(group)
            for name, value in bounds.items():
                if not (group / name).exists():
                    raise OSError
                (group / name).write_text(value)
            continue
        if made and made[-1] == group:
            group.rmdir()
            made.pop()
    try:
        yield made
    finally:
        for group in made:
            for _ in range(50):
                try:
                    group.rmdir()
                    break
                except OSError:
                    time.sleep(0.1)


def guarded() -> tuple[list[dict[str, Any]], str]:
    """One report for each escape, then one on the host; and what was said besides."""

    def bound() -> None:
        os.setsid()
        for group in groups:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        resource.setrlimit(resource.RLIMIT_AS, (GUARD_BYTES, GUARD_BYTES))
        if os.geteuid() == 0:  # sandboxes run as nobody, who has no other processes; for us it would count all of ours
            resource.setrlimit(resource.RLIMIT_NPROC, (GUARD_PROCESSES, GUARD_PROCESSES))

    with guard_groups() as groups, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.system.escape_runner"],
            stdout=out,
            stderr=err,
            preexec_fn=bound,  # noqa: PLW1509
            cwd=Path(__file__).parents[2],
            env={**os.environ, "MEGARL_ESCAPE_CANARY": "x"},
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GUARD_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for group in groups:  # what left the process group
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        process.wait()
        out.seek(0)
        err.seek(0)
        return [json.loads(line) for line in out], err.read()


def beside_us() -> int:
    """Sandboxes' processes that are alive in our own cgroups, which are the guard's where this machine has them."""
    ours = Path("/proc/self/cgroup").read_text()
    count = 0
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            is_sandbox = b"/python/bin/python3" in Path(f"/proc/{entry}/cmdline").read_bytes()
            count += is_sandbox and Path(f"/proc/{entry}/cgroup").read_text() == ours
    return count


def left_over(before: int) -> int:
    """More of them than before, once the kernel has had time to take away what it killed."""
    until = time.monotonic() + 10.0
    while (left := beside_us() - before) > 0 and time.monotonic() < until:
        time.sleep(0.02)
    return left


def main() -> None:
    from megarl.config.rewards import CodeConfig
    from megarl.rewards.code import make_scorer
    from megarl.sandbox.selftest import local_sandbox
    from tests.system.escapes import ESCAPES, NEXT, SEEN, Escape

    short = make_scorer(local_sandbox(), CodeConfig(cpu_s=1, wall_s=2.0, item_s=20.0, memory_mib=256))
    patient = make_scorer(
        local_sandbox(), CodeConfig(cpu_s=5, wall_s=30.0, item_s=60.0, memory_mib=256)
    )  # for a busy machine

    def hangs(escape: Escape) -> bool:
        return escape.reason in ("limit", "wall") or "hang" in escape.name or "without end" in escape.name

    def attempt(escape: Escape) -> dict[str, Any]:
        """In the thread, and so the mothers, that the next one uses too."""
        program = escape.program
        for key, value in facts.items():
            program = program.replace(key, value)
        start = time.monotonic()
        verdict = (short if hangs(escape) else patient)(f"```python\n{program}\n```", escape.row, None)
        seconds = time.monotonic() - start
        verdict.pop("pred")
        return {"name": escape.name, "verdict": verdict, "seconds": seconds, "next": following()}

    def following() -> list[str]:
        """An item of each kind, which also look for traces of the one before."""
        found = [patient(ADD, SUM, None), patient(SEEN, NEXT, None)]
        return [verdict["status"] if verdict["status"] == "ok" else verdict["reason"] for verdict in found]

    with contextlib.ExitStack() as stack:
        lanes = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(LANES)]
        for lane in lanes:
            assert lane.submit(following).result() == ["ok", "ok"]  # from here on each has its mothers
        before = beside_us()
        secret = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "secret"
        os.chmod(secret.parent, 0o755)
        secret.write_text("secret")
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(tcp.getsockname())
        name = f"megarl-escape-{os.getpid()}"
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind("\0" + name)
        unix.listen()
        facts = {
            "{secret}": str(secret),
            "{port}": str(tcp.getsockname()[1]),
            "{name}": name,
            "{pid}": str(os.getpid()),
        }
        escapes = sorted(ESCAPES, key=hangs)  # those that take long beside each other
        for i in range(0, len(escapes), LANES):
            jobs = [lane.submit(attempt, escape) for lane, escape in zip(lanes, escapes[i : i + LANES], strict=False)]
            reports = [job.result() for job in jobs]
            alive = left_over(before)
            for report in reports:
                sys.stdout.write(json.dumps({**report, "alive": alive}) + "\n")
                sys.stdout.flush()
        reached = []
        for listener in (tcp, udp, unix):
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                listener.recv(10) if listener is udp else listener.accept()
                reached.append(str(listener))
        grouped = "megarl-escapes" in Path("/proc/self/cgroup").read_text()
        host = {
            "grouped": grouped,
            "alive": left_over(before),
            "reached": reached,
            "secret": secret.read_text(),
            "beside": os.listdir(secret.parent),
        }
    sys.stdout.write(json.dumps({"name": "the host", **host}) + "\n")


if __name__ == "__main__":
    main()
