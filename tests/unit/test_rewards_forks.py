"""Reward workers forked from one process: as those that are started by themselves, and gone when others are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.config.rewards import RewardConfig
from megarl.core.processes.fork import ForkServer
from megarl.rewards import RewardPool, Verdict
from megarl.rewards.pool import child
from megarl.rewards.routes import IMPORTS, imports_of
from tests.unit.test_rewards import TASK

REPORT = """
import json, os, resource, signal, sys, threading
DATA = {"imports": [], "pid": os.getpid()}
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hang":
        while True: pass
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    print(json.dumps({
        "argv": sys.argv[:1], "path": sys.path, "environ": dict(os.environ), "cwd": os.getcwd(),
        "group": os.getpgid(0) == os.getpid(), "session": os.getsid(0), "parent": os.getppid(),
        "handlers": [str(signal.getsignal(number)) for number in signal.valid_signals()],
        "limits": [resource.getrlimit(name) for name in range(16)], "threads": len(os.listdir("/proc/self/task")),
        "files": sorted(os.readlink(link).split(":")[0] for link in links if os.path.exists(link)),
        "imported here": DATA["pid"] == os.getpid(), "shown": open("/proc/self/cmdline").read().split("\\0")[1:3],
        "secret": "very-secret" in open("/proc/self/environ").read(),
    }), flush=True)
    return 1.0
"""


@pytest.fixture
def reporting(tmp_path: Path) -> Path:
    path = tmp_path / "reward.py"
    path.write_text(REPORT)
    return path


@pytest.fixture(autouse=True)
def own_servers() -> Any:
    child.end_servers()
    yield
    child.end_servers()


def command(process: psutil.Process) -> str:
    """Command line; empty once the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # also of one that nobody has waited for
        return ""


def server_processes() -> list[psutil.Process]:
    """Those of this process; what they fork looks like them until its parent is this one."""
    found = [process for process in psutil.Process().children() if "fork.main()" in command(process)]
    return [process for process in found if os.getpgid(process.pid) == os.getpgid(0)]


def report(path: Path, output: Path) -> dict[str, Any]:
    async def main() -> Verdict:
        async with RewardPool(RewardConfig(path=str(path)), output=output) as pool:
            return await pool.score(TASK, "12")

    assert asyncio.run(main()).reward.score == 1.0
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def test_a_forked_worker_is_as_one_that_was_started(
    reporting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late variables differ from the server's; others have a worker started by itself."""
    child.server_of(child.PRELOAD).await_imports()
    monkeypatch.setenv("MEGARL_JOB_KEY", "very-secret")
    forks: list[int | None] = []
    fork = ForkServer.fork

    def noted(*args: Any, **options: Any) -> int | None:
        forks.append(fork(*args, **options))
        return forks[-1]

    monkeypatch.setattr(ForkServer, "fork", noted)
    forked = report(reporting, tmp_path / "forked")
    monkeypatch.setattr(ForkServer, "fork", lambda *_, **__: None)
    fresh = report(reporting, tmp_path / "fresh")
    assert forks[0] is not None and forked["parent"] == os.getpid()
    assert forked.pop("threads") == 1 and fresh.pop("threads") >= 1
    assert forked == fresh
    assert forked["environ"]["MEGARL_JOB_KEY"] == "very-secret" and not forked["secret"] and forked["imported here"]


def test_workers_that_hang_or_are_killed_are_forked_again(reporting: Path) -> None:
    """Also after the server was killed, which ends no worker; another one takes its place."""

    async def main() -> None:
        config = RewardConfig(path=str(reporting), workers=2, timeout_s=4.0, retries=9)
        async with RewardPool(config, output=reporting.parent / "output") as pool:
            first, (server,) = set(pool.pids), server_processes()
            assert (await pool.score(TASK, "hang")).reward.status == "timeout"
            await until(lambda: len(pool.pids) == 2)
            assert not first & set(pool.pids) and server_processes() == [server]
            second = set(pool.pids)
            server.kill()
            assert [(await pool.score(TASK, f"{i}")).kills for i in range(4)] == [0] * 4 and set(pool.pids) == second
            for _ in range(2):  # the first one notices, and is started by itself
                dead = pool.pids
                for pid in dead:
                    os.kill(pid, signal.SIGKILL)
                assert (await pool.score(TASK, "12")).reward.score == 1.0
                await until(lambda dead=dead: len(pool.pids) == 2 and not {*dead} & {*pool.pids})
            (other,) = server_processes()
            assert other != server and not psutil.pid_exists(server.pid)

    asyncio.run(main())


async def until(condition: Any, timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


OWNER = """
import asyncio, sys
from megarl.config.rewards import RewardConfig
from megarl.rewards import RewardPool
async def main():
    async with RewardPool(RewardConfig(workers=3)) as pool:
        print(*pool.pids, flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""


def test_nothing_is_left_of_an_owner_that_is_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    workers = {int(word) for word in owner.stdout.readline().split()}
    children = psutil.Process(owner.pid).children(recursive=True)
    assert len(workers) == 3 and len(children) == 4 and workers < {process.pid for process in children}
    owner.kill()
    owner.communicate()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


def test_modules_of_the_data_sources_are_imported_once() -> None:
    sources = ["reasoning_gym/chain_sum", "math", "no such source"]
    assert imports_of(sources, {}) == sorted({*IMPORTS["reasoning_gym"], *IMPORTS["math"]})
    assert imports_of(["mine"], {"mine": "vision/count"}) == []


def test_imports_that_fail_cost_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "PRELOAD", ("no_such_module",))

    async def main() -> None:
        for _ in range(2):
            began = time.monotonic()
            process = await child.RewardProcess.start(2**16)
            assert process.writer is not None and time.monotonic() - began < 60
            await process.end()
            assert not server_processes()

    asyncio.run(main())
    ((_, server),) = child.servers.items()
    assert server.closed and not server.imported
