"""Commands as agents: they end with all that they have started, and see no variable that is not theirs."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import RolloutConfig
from megarl.core.schema import Task
from megarl.explore.agents import program
from megarl.explore.agents.program import (
    OUTPUT_BYTES,
    PASSED,
    AgentFault,
    AgentThread,
    command_environment,
    run_command,
    with_loopback,
)

TASK = Task("t", "s", ({"role": "user", "content": "?"},), "", {"ground_truth": "15"})
DONE = "open(os.environ['MEGARL_RESULT'], 'w').write(json.dumps(given['n']))"
HEAD = "import json, os, subprocess, sys, time\ngiven = json.load(sys.stdin)\n"


def run(source: str, tmp_path: Path, *, timeout_s: float = 60.0, **env: str) -> Any:
    path = tmp_path / "agent.py"
    path.write_text(HEAD + source)
    work = run_command([sys.executable, str(path)], {"n": 0.5}, {"PATH": os.environ["PATH"], **env})
    return asyncio.run(asyncio.wait_for(work, timeout_s))


def is_gone(pid: int) -> bool:
    for _ in range(500):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("own_session", [False, True])
def test_a_child_that_keeps_the_output_open_is_ended(tmp_path: Path, own_session: bool) -> None:
    source = f"""
child = subprocess.Popen(["sleep", "1000"], start_new_session={own_session})
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
{DONE}
"""
    assert run(source, tmp_path) == 0.5
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_a_child_whose_parents_are_gone_is_ended(tmp_path: Path) -> None:
    source = f"""
if os.fork():
    os.wait()
    {DONE}
    sys.exit()
os.setsid()
if os.fork():
    os._exit(0)
open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
time.sleep(1000)
"""
    assert run(source, tmp_path) == 0.5
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_a_command_that_is_cancelled_is_ended_with_all_its_children(tmp_path: Path) -> None:
    source = f"""
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
open({str(tmp_path / "pid")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(1000)
"""
    with pytest.raises(TimeoutError):
        run(source, tmp_path, timeout_s=5.0)
    assert all(map(is_gone, map(int, (tmp_path / "pid").read_text().split())))


def test_much_output_is_not_kept(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source = f"""
for _ in range(200):
    sys.stdout.write("x" * 2**20 + "\\n")
    sys.stderr.write("y" * 2**20 + "\\n")
{DONE}
"""
    assert run(source, tmp_path) == 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 2**10  # KiB


def test_the_last_bytes_are_kept(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"ended with status 3: {'y' * 100}") as raised:
        run("sys.stderr.write('first\\n' + 'y' * 2**20)\nsys.exit(3)", tmp_path)
    assert len(str(raised.value)) < OUTPUT_BYTES + 200


def test_a_command_need_not_read_its_input(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text("import os; open(os.environ['MEGARL_RESULT'], 'w').write('1')")
    given = {"prompt": "x" * 2**22}
    assert asyncio.run(run_command([sys.executable, str(path)], given, {})) == 1
    with pytest.raises(FileNotFoundError):
        asyncio.run(run_command(["/nowhere"], given, {}))


SECRETS = ("MEGARL_JOB_KEY", "HF_TOKEN", "WANDB_API_KEY", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "MY_KEY")


def test_a_command_gets_named_variables_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SECRETS, "HTTP_PROXY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("no_proxy", "intranet")
    monkeypatch.setenv("NO_PROXY", "other")
    found = command_environment("http://127.0.0.1:1/s", ["MY_KEY", "NOT_SET", "no_proxy"])
    assert found["MY_KEY"] == "secret" and found["PATH"] == os.environ["PATH"]
    assert found["NO_PROXY"] == found["no_proxy"] == "intranet,127.0.0.1,localhost"
    assert found.keys() - {*PASSED, "MY_KEY", "NO_PROXY", "no_proxy"} == {
        f"{name}_{kind}" for name in ("OPENAI", "ANTHROPIC") for kind in ("BASE_URL", "API_KEY")
    }
    assert with_loopback({}) == {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}


def test_an_agent_of_a_file_reaches_the_endpoint_beside_a_proxy(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("async def run(base_url, prompt, request_kwargs, metadata): ...")
    source = (
        "import sys, urllib.request as r; from megarl.config.schema import RolloutConfig; "
        "from megarl.explore.agents import program; program.load(RolloutConfig(agent=sys.argv[1])); "
        "print(r.proxy_bypass('127.0.0.1'), r.proxy_bypass('example.org'))"
    )
    env = {**os.environ, "HTTP_PROXY": "http://127.0.0.1:9", "no_proxy": "intranet"}
    argv = [sys.executable, "-c", source, str(tmp_path / "agent.py")]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
    assert [bool(json.loads(word.lower())) for word in done.stdout.split()] == [True, False], done.stderr


EXITS = """
import asyncio, sys
async def stop(): sys.exit(3)
async def run(base_url, prompt, request_kwargs, metadata):
    if metadata == "exit": sys.exit(3)
    if metadata == "cancel": raise asyncio.CancelledError()
    if metadata == "interrupt": raise KeyboardInterrupt()
    if metadata == "task": await asyncio.create_task(stop())
    if metadata == "left":
        asyncio.create_task(stop())
        await asyncio.sleep(0.01)
    return metadata
"""


def test_sys_exit_in_an_agent_ends_that_agent_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "agent.py").write_text(EXITS)
    agent: Any = program.load(RolloutConfig(agent=str(tmp_path / "agent.py")))

    async def main() -> None:
        for how, words in (("exit", "SystemExit: 3"), ("cancel", "CancelledError"), ("interrupt", "KeyboardInterrupt"),
                           ("task", "SystemExit: 3")):  # fmt: skip
            with pytest.raises(AgentFault, match=words):
                await agent("", TASK, {}, how)
        assert await agent("", TASK, {}, "left") == "left"
        assert await agent("", TASK, {}, "good") == "good"

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_agent_is_cancelled_with_its_caller() -> None:
    cancelled = threading.Event()

    async def agent() -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await AgentThread().call(agent)

    asyncio.run(main())
    assert cancelled.wait(60)
