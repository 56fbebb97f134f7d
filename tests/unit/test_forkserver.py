"""What is forked from a server is as if it had been started by itself: environment, output, parent, signals, end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megarl.core.processes.fork import Forked, ForkServer
from megarl.core.processes.secrets import SECRET
from megarl.run.process import process as forkserver

LAUNCHER = """
import json, os, signal, sys, threading, time
from pathlib import Path
from megarl.core.jobs import ProcessKind
from megarl.run.process import process as forkserver
from megarl.core.processes.fork import Forked
from megarl.run.process.process import ForkServers
from megarl.run.process.process import Child
forkserver.COMMON = ("decimal",)
forkserver.PRELOAD = {ProcessKind.ENGINE: ("fractions", *MODULES), ProcessKind.TRAINER: ()}
folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
os.environ["PYTHONPATH"] = str(folder)  # of what is started by itself
servers = ForkServers([1])
servers.preload(ProcessKind.ENGINE, {"OMP_NUM_THREADS": "1", "READ_EARLY": "a"})
def start(number, module, servers, *words, name="engine", **env):
    env = {"OMP_NUM_THREADS": "1", "READ_EARLY": "a", "MEGARL_JOB_KEY": "secret", "RANK": "3", **env}
    argv = [sys.executable, "-m", module, *words]
    return Child(f"{name} {number}", argv, env, folder / f"{number}.log", servers=servers, keep=[kept.fileno()])
def is_forked(child):
    return isinstance(child.process, Forked)
kept = open(folder / "kept", "w")
"""
REPORT = """
import json, os, signal, sys, __main__
print("to stdout", flush=True)
print("to stderr", file=sys.stderr)
os.system("echo of a child")
handlers = {str(number): str(signal.getsignal(number)) for number in signal.valid_signals()}
links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if int(name) < 500
         and os.path.exists(f"/proc/self/fd/{name}")]
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "environ": dict(os.environ), "cwd": os.getcwd(), "name": __name__,
    "spec": __main__.__spec__.name, "parent": os.getppid(), "session": os.getsid(0) == os.getpid(),
    "group": os.getpgid(0) == os.getpid(), "handlers": handlers, "files": sorted(map(str, links)),
    "shown": open("/proc/self/cmdline").read().split("\\0"),
    "variables": open("/proc/self/environ").read().split("\\0"),
    "umask": os.umask(0), "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "modules": "fractions" in sys.modules,
    "heartbeat": os.fstat(int(os.environ["MEGARL_HEARTBEAT"])).st_size, "stdin": sys.stdin.read(),
}))
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Any:
    """Run lines in a launcher with a fork server; its output as JSON."""
    started: list[subprocess.Popen[str]] = []

    def run(lines: str, modules: dict[str, str], preload: tuple[str, ...] = (), wait: bool = True) -> Any:
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        (tmp_path / "launch.py").write_text(LAUNCHER.replace("MODULES", repr(preload)) + lines)
        command = [sys.executable, str(tmp_path / "launch.py"), str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        started.append(process)
        if not wait:
            return process
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        return json.loads(output)

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("ignored", ["", "SIGINT SIGHUP SIGUSR1"])
def test_a_forked_process_is_as_one_that_was_started(launcher: Any, tmp_path: Path, ignored: str) -> None:
    """Also where the launcher ignores signals, as in the background of a shell, or handles those that its own
    launcher had ignored."""
    lines = (
        f"""
for name in {ignored.split()}:
    signal.signal(getattr(signal, name), signal.SIG_IGN)
signal.signal(signal.SIGUSR2, lambda *_: None)
"""
        + """
children = [start(0, "report", servers, "--config", "x y"), start(1, "report", None, "--config", "x y")]
statuses = [child.wait(60) and child.poll() for child in children]
print(json.dumps([[is_forked(child) for child in children], statuses, os.getpid()]))
"""
    )
    assert launcher(lines, {"report": REPORT})[:2] == [[True, False], [0, 0]]
    logs = [(tmp_path / f"{number}.log").read_text().splitlines() for number in (0, 1)]
    assert sorted(logs[0][:-1]) == sorted(logs[1][:-1]) == ["of a child", "to stderr", "to stdout"]
    forked, fresh = (json.loads(lines[-1]) for lines in logs)
    assert forked.pop("modules") and not fresh.pop("modules")
    seen = forked["variables"]
    for found in (forked, fresh):
        found["files"] = [re.sub(r"\d+", "", name) for name in found["files"]]
        for which in ("environ", "handlers"):
            found[which].pop("MEGARL_HEARTBEAT", None)
        shown = [word for word in found["variables"] if not SECRET.search(word.partition("=")[0])]
        found["variables"] = sorted(word for word in shown if not word.startswith("MEGARL_"))
    for number in (getattr(signal, name) for name in ignored.split()):
        assert fresh["handlers"][str(number)] == str(signal.SIG_IGN)
    assert "MEGARL_JOB_KEY=secret" not in seen and forked["environ"]["MEGARL_JOB_KEY"] == "secret"
    assert "RANK=3" in forked["variables"] and forked["session"] and forked["group"]
    assert {name for name in forked if forked[name] != fresh[name]} == set()


def test_a_process_whose_imports_would_read_something_else_is_started(launcher: Any) -> None:
    lines = """
children = [start(0, "end", servers, READ_EARLY="b"), start(1, "end", servers, MASTER_PORT="7"),
            start(2, "end", servers, OMP_NUM_THREADS="2"), start(3, "end", servers, name="trainer rank")]
print(json.dumps([[is_forked(child) for child in children], [child.wait(60) and child.poll() for child in children]]))
"""
    assert launcher(lines, {"end": ""}) == [[False, True, False, False], [0, 0, 0, 0]]


ENDS = {
    "a status": ("import sys; sys.exit(3)", 3, ""),
    "a text": ("import sys; sys.exit('no model')", 1, "no model"),
    "an exception": ("import json; json.loads('{')", 1, "JSONDecodeError"),
    "a signal": ("import os; os.kill(os.getpid(), 9)", -9, ""),
    "at exit": ("import atexit; atexit.register(print, 'last words')", 0, "last words"),
    "a thread": (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('later'))).start()",
        0,
        "later",
    ),
    "interrupt": ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
}


def test_it_ends_as_one_that_was_started(launcher: Any, tmp_path: Path) -> None:
    lines = f"""
children = [start(number, f"end_{{number}}", servers) for number in range({len(ENDS)})]
print(json.dumps([child.wait(60) and child.poll() if is_forked(child) else None for child in children]))
"""
    modules = {f"end_{number}": text for number, (text, _, _) in enumerate(ENDS.values())}
    assert launcher(lines, modules) == [status for _, status, _ in ENDS.values()]
    for number, (_, _, words) in enumerate(ENDS.values()):
        assert words in (tmp_path / f"{number}.log").read_text()
    assert "runpy" in (tmp_path / "2.log").read_text()


WAITS = """
import os, pathlib, signal, sys, time
def stop(*_):
    pathlib.Path(sys.argv[1]).write_text("asked")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1] + ".pid").write_text(str(os.getpid()))
while True:
    time.sleep(0.1)
"""


def until(condition: Any, timeout_s: float = 60.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


def test_it_is_asked_to_end_when_its_launcher_is_killed_and_no_server_is_left(launcher: Any, tmp_path: Path) -> None:
    lines = """
child = start(0, "waits", servers, str(folder / "asked"))
import psutil
server = [str(process.pid) for process in psutil.Process().children()]
print(json.dumps([is_forked(child), server]), flush=True)
time.sleep(1000)
"""
    process = launcher(lines, {"waits": WAITS}, wait=False)
    forked, children = json.loads(process.stdout.readline())
    assert forked and len(children) == 2  # the first server, and what was forked
    assert until(lambda: (tmp_path / "asked.pid").exists())
    process.send_signal(signal.SIGKILL)
    assert until(lambda: (tmp_path / "asked").exists())
    assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


def test_without_a_server_what_runs_goes_on_and_others_are_started(launcher: Any, tmp_path: Path) -> None:
    lines = """
first = start(0, "waits", servers, str(folder / "asked"))
for path in Path("/proc").glob("[0-9]*/stat"):
    fields = path.read_text().rpartition(")")[2].split()
    if fields[1] == str(os.getpid()) and path.parent.name != str(first.pid):
        os.kill(int(path.parent.name), signal.SIGKILL)  # its servers end with it
time.sleep(0.5)
second = start(1, "end", servers)
print(json.dumps([is_forked(first), first.poll(), is_forked(second), second.wait(60) and second.poll()]))
first.signal(signal.SIGKILL)
first.wait(60)
"""
    assert launcher(lines, {"waits": WAITS, "end": ""}) == [True, None, False, 0]
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    "module",
    [
        "raise ValueError('no such library')",
        "import threading, time; threading.Thread(target=time.sleep, args=[9]).start()",
    ],
)
def test_imports_that_fail_or_start_threads_leave_no_server(launcher: Any, module: str) -> None:
    lines = """
child = start(0, "end", servers)
print(json.dumps([is_forked(child), child.wait(60) and child.poll()]))
"""
    assert launcher(lines, {"end": "", "broken": module}, preload=("broken",)) == [False, 0]


def test_two_servers_fork_at_the_same_time() -> None:
    """Whether a process adopts is one setting of all of its threads."""
    environment = dict(os.environ)

    def forked(server: ForkServer) -> list[int]:
        with open(os.devnull, "wb") as null:
            pids = [server.fork(["-m", "keyword"], environment, null.fileno(), {}) for _ in range(100)]
        return [Forked(pid).wait(60) for pid in pids if pid is not None]

    servers = [ForkServer.start((), environment) for _ in range(2)]
    try:
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(forked, servers)) == [[0] * 100] * 2
    finally:
        for server in servers:
            server.close()


def test_what_is_preloaded_can_be_imported() -> None:
    """As the servers do it: what is common is imported once, and each kind's in a fork of that process."""
    source = """
import gc, importlib, json, os, sys, threading
gc.disable()
common, kinds = json.loads(sys.argv[1])
for name in common:
    importlib.import_module(name)
for kind, modules in kinds.items():
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        for name in modules:
            importlib.import_module(name)
        print(f"{kind} has {threading.active_count()} thread(s)", flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""
    kinds = {kind.name: modules for kind, modules in forkserver.PRELOAD.items()}
    argv = [sys.executable, "-W", "ignore", "-c", source, json.dumps([forkserver.COMMON, kinds])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_PLUGINS": "megarl"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=240)
    for kind in kinds:
        assert f"{kind} has 1 thread(s)" in done.stdout.splitlines(), f"{kind}: {done.stderr[-2000:]}"
    assert kinds.keys() == {"ENGINE", "TRAINER", "EXPLORER"}


def test_a_forked_process_deregisters_no_operators_of_imported_libraries() -> None:
    source = """
import weakref
from megarl.core.processes.fork import leave_libraries
def deregister(): print("deregistered")
deregister.__module__ = "torch.library"
class Owner: pass
library, own = Owner(), Owner()
weakref.finalize(library, deregister)
weakref.finalize(own, print, "own")
leave_libraries()
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["own"]
