"""The reaper, and what a job's processes would leave behind: children, temporary folders, shared memory."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from megarl.core.errors import JobError
from megarl.core.processes.machine import group_members
from megarl.engines.client.leftovers import own_folder, remove_stale_folders
from megarl.run import postgres
from megarl.run.nodes.node import LocalNode, Spec, stop
from megarl.run.process import ports
from megarl.run.process import reaper as reapers
from megarl.run.process.process import Child
from megarl.run.process.reaper import Reaper, end
from megarl.run.run_dir.owner import own_run_dir
from tests.system.shims import Shim
from tests.unit.test_launch import child, read_or_empty


def test_a_process_is_gone_with_its_last_thread(tmp_path: Path) -> None:
    """When a process is killed its first thread is a zombie at once, while another may hold its sockets for long."""
    code = (
        "import os, socket, threading, time, ctypes; server = socket.create_server(('127.0.0.1', 0))\n"
        "if os.fork(): time.sleep(600)\n"
        "threading.Thread(target=time.sleep, args=(600,)).start(); print(os.getpid(), server.getsockname()[1], "
        "flush=True)\n"
        "ctypes.CDLL(None).syscall(60, 0)  # exit of this thread alone\n"
    )
    process = child(tmp_path, code)
    while len(process.log.read_text().split()) < 2:
        time.sleep(0.02)
    forked, port = map(int, process.log.read_text().split())
    while " Z " not in Path(f"/proc/{forked}/stat").read_text():
        time.sleep(0.02)
    assert forked in group_members(process.pid)
    stop([process], 0.0)
    assert ports.is_free("127.0.0.1", port)


def test_guard_kills_what_does_not_end(tmp_path: Path) -> None:
    """A whole group, whatever its leader does; one that has ended already is no trouble."""
    code = (
        "import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN); "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"
    )
    deaf, gone = child(tmp_path, code), child(tmp_path, "")
    deadline = time.monotonic() + 30
    assert gone.wait(30)
    while len(group_members(deaf.pid)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    deaf.signal(signal.SIGTERM)
    end([deaf.pid, gone.pid], after_s=0.5)
    assert deaf.wait(30) and deaf.poll() == -signal.SIGKILL
    while group_members(deaf.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


SUPERVISOR = """
import logging, sys, time
from pathlib import Path
from megarl.run.process.reaper import Reaper
from megarl.run.nodes.node import LocalNode, Spec
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
code = (
    "import os, signal, time; signal.signal(15, signal.SIG_IGN); open(os.environ['TMPDIR'] + '/left', 'w'); "
    "print(os.environ['TMPDIR'], flush=True); time.sleep(600)"
)
with Reaper(alone_s=0.2) as reaper:
    child = LocalNode(reaper).start(Spec("engine 0", ("-c", code), {}, sys.argv[1]))
    while "\\n" not in child.log.read_text():
        time.sleep(0.02)
    print("reaper", reaper.process.pid, flush=True)
    print("child", child.pid, flush=True)
    first = reaper.process.pid
    while reaper.process.pid == first:
        time.sleep(0.02)
    reaper.add(child.pid, child.folder)  # returns when the new one has been told
    print("told", flush=True)
    time.sleep(600)
"""


def test_a_guard_that_was_killed_has_a_successor(tmp_path: Path) -> None:
    """Which ends what a supervisor that is killed then leaves, and removes an engine's temporary folder."""
    log = tmp_path / "engine_0.log"
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(log)], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        reaper, engine = (int(supervisor.stdout.readline().split()[1]) for _ in range(2))
        folder = Path(log.read_text().strip())
        assert (folder / "left").exists()
        os.kill(reaper, signal.SIGKILL)
        assert (
            "the reaper of this job's processes has ended (status -9); starting another" in supervisor.stdout.readline()
        )
        assert supervisor.stdout.readline() == "told\n"
        supervisor.kill()
    deadline = time.monotonic() + 30
    while group_members(engine) or folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_job_goes_on_and_ends_when_its_guard_is_killed(tmp_path: Path) -> None:
    with Reaper(alone_s=10) as reaper:
        reaper.process.kill()
        process = child(tmp_path, "import time; time.sleep(0.5)")
        reaper.add(process.pid)
    assert not group_members(process.pid)


def test_a_guard_that_is_stopped_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reapers, "END_S", 0.2)
    process = child(tmp_path, "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)")
    with Reaper(alone_s=0.2) as reaper:
        reaper.add(process.pid)
        os.kill(reaper.process.pid, signal.SIGSTOP)
    assert reaper.process.poll() == -signal.SIGKILL
    assert process.wait(30) and process.poll() == -signal.SIGKILL  # what it would have done was done without it


def test_a_guard_forgets_what_is_gone(tmp_path: Path) -> None:
    """Another process may get its number."""
    with Reaper() as reaper:
        node = LocalNode(reaper)
        node.start(Spec("explorer", ("-c", "import time; time.sleep(600)"), {}, str(tmp_path / "explorer.log")))
        assert reaper.groups
        node.stop(["explorer"], 0.0)
        assert not reaper.groups


def test_an_engines_temporary_folder_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short enough for the names of sockets; what torch compiles stays where it was."""
    code = (
        "import os, tempfile; tempfile.mkdtemp(); print(os.environ['VLLM_RPC_BASE_PATH'], tempfile.gettempdir(), "
        "os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    )
    shared = tempfile.mkdtemp()
    monkeypatch.setattr(tempfile, "tempdir", shared)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with Reaper() as reaper:
        node = LocalNode(reaper)
        process = node.start(Spec("engine 0", ("-c", code), {}, str(tmp_path / "engine_0.log")))
        assert process.wait(30)
        folder, same, compiled = process.tail().split()
        assert folder == same and Path(folder).parent == Path(shared) and Path(folder).is_dir()
        assert Path(compiled).parent == Path(shared)
        node.stop(["engine 0"], 0.0)
        assert not Path(folder).exists()
        with pytest.raises(JobError, match="engine 1 cannot be started on this machine: .*engine_0.log"):
            node.start(Spec("engine 1", ("-c", code), {}, str(tmp_path / "engine_0.log" / "engine_1.log")))
    os.rmdir(shared)  # nothing is left in it


def test_the_folders_of_a_killed_start_are_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this run that no process uses."""
    shared = Path(tempfile.mkdtemp())
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    code = (
        "import sys; from pathlib import Path; from megarl.engines.client.leftovers import own_folder\n"
        "for run in sys.argv[1:]: print(own_folder(Path(run))[0])"
    )
    runs = [str(tmp_path / "run")] * 2 + [str(tmp_path / "other")]
    made = subprocess.run(
        [sys.executable, "-c", code, *runs],
        env={**os.environ, "TMPDIR": str(shared)},
        capture_output=True,
        text=True,
        check=True,
    )
    stale, used, other = map(Path, made.stdout.split())
    current, _ = own_folder(tmp_path / "run")
    (shared / "megarl-else").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with subprocess.Popen(["sleep", "600"], env={"TMPDIR": str(used)}) as engine:
        assert remove_stale_folders(tmp_path / "link") == [stale]
        assert not stale.exists()
        assert all(path.is_dir() for path in (used, other, current, shared / "megarl-else"))
        engine.kill()
    assert remove_stale_folders(tmp_path / "run") == [used]
    shutil.rmtree(shared)


@pytest.mark.parametrize("reaper_lives", [False, True])
def test_the_shared_memory_of_a_killed_engine_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reaper_lives: bool
) -> None:
    """By the reaper, though nothing maps it any more; by the next start where the reaper was killed too. A file of the
    same name that is another's stays."""
    shared = Path(tempfile.mkdtemp())
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    own, other = (Path(f"/dev/shm/psm_{secrets.token_hex(8)}") for _ in range(2))
    code = f"""
import sys
from pathlib import Path
from megarl.run.nodes.node import LocalNode, Spec
from megarl.run.process.reaper import Reaper
maps = "import mmap, time\\nheld = [open(path, 'w+b') for path in {[str(own), str(other)]!r}]\\n"
maps += "for file in held: file.truncate(4096)\\nmaps = [mmap.mmap(file.fileno(), 4096) for file in held]\\n"
node = LocalNode(Reaper(), run_dir=Path({str(tmp_path)!r}))
process = node.start(Spec("engine 0", ("-c", maps + "print('up', flush=True); time.sleep(600)"), {{}}, "engine.log"))
while "up" not in process.log.read_text(): pass
node.note("engine 0")
print(process.folder, process.pid, node.reaper.process.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(shared)},
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as supervisor:
        assert supervisor.stdout is not None
        folder, engine, reaper = supervisor.stdout.readline().split()
        other.rename(f"{other}.kept")
        other.touch()
        os.kill(int(engine), signal.SIGKILL)
        while group_members(int(engine)):
            time.sleep(0.02)
        if not reaper_lives:
            os.kill(int(reaper), signal.SIGKILL)
        supervisor.kill()
    try:
        if reaper_lives:
            while group_members(int(reaper)):
                time.sleep(0.02)
            assert not Path(folder).exists()
        else:
            assert own.exists() and Path(folder).is_dir()
            assert remove_stale_folders(tmp_path) == [Path(folder)]
        assert not own.exists() and other.exists()
    finally:
        for path in (own, other, Path(f"{other}.kept")):
            path.unlink(missing_ok=True)
        shutil.rmtree(shared, ignore_errors=True)


def test_a_killed_program_of_postgresql_leaves_no_shared_memory() -> None:
    """initdb fills its folder with a server that has some."""
    segment = Path(f"/dev/shm/PostgreSQL.{secrets.randbelow(2**32)}")
    code = (
        f"import mmap, time; file = open({str(segment)!r}, 'w+b'); file.truncate(4096); "
        "held = mmap.mmap(file.fileno(), 4096); print('up', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        assert program.stdout is not None and program.stdout.readline() == "up\n" and segment.exists()
        postgres.kill_session(program)
    assert not segment.exists()


def test_shared_memory_of_before_a_jump_of_the_clock_is_found(tmp_path: Path) -> None:
    """A supervisor whose clock is set ahead by an hour removes what its engines made before."""
    segment, shim = Path(f"/dev/shm/psm_{secrets.token_hex(8)}"), Shim(tmp_path, "node")
    code = (
        "import mmap, os, sys; from megarl.engines.client.leftovers import shared_memory; "
        f"file = open({str(segment)!r}, 'w+b'); file.truncate(4096); held = mmap.mmap(file.fileno(), 4096)\n"
        "for line in sys.stdin: print(*shared_memory(os.getpgrp()), flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **shim.environment}, start_new_session=True, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        found = []
        for jump in (0, 3600, -3600):
            shim.jump(jump)
            process.stdin.write("\n")
            process.stdin.flush()
            found.append(process.stdout.readline().split())
        process.stdin.close()
    segment.unlink()
    assert found == [[str(segment)]] * 3


def test_a_folder_of_sockets_has_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder, environment = own_folder()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/{uuid.uuid4()}")
    assert environment["TMPDIR"] == environment["VLLM_RPC_BASE_PATH"] == str(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("ended_by", ["reaper", "supervisor"])
def test_shared_memory_that_is_made_late_is_removed(tmp_path: Path, ended_by: str) -> None:
    """By an engine that was starting when its job was told to end, and had to be killed."""
    segment = Path(f"/dev/shm/psm_{secrets.token_hex(8)}")
    code = (
        "import mmap, signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(1); file = "
        f"open({str(segment)!r}, 'w+b'); file.truncate(4096); held = mmap.mmap(file.fileno(), 4096); time.sleep(600)"
    )
    deaf = child(tmp_path, code)
    while "up" not in deaf.log.read_text():
        time.sleep(0.02)
    if ended_by == "reaper":
        end([deaf.pid], after_s=3)
    else:
        stop([deaf], grace_s=3)
    assert deaf.wait(30) and deaf.poll() == -signal.SIGKILL
    assert not segment.exists()


@pytest.mark.parametrize("ended_by", ["reaper", "supervisor"])
def test_files_of_others_in_shared_memory_survive_a_stop(tmp_path: Path, ended_by: str) -> None:
    """A model, an environment or a run may lie in /dev/shm, and a segment of another job may be mapped."""
    name = secrets.token_hex(8)
    folder = Path(f"/dev/shm/{name}")
    theirs = [Path(f"/dev/shm/{name}.safetensors"), folder / f"psm_{name}", Path(f"/dev/shm/psm_{name}")]
    own = Path(f"/dev/shm/psm_{name}00")
    try:
        folder.mkdir()
        for path in theirs:
            path.write_bytes(bytes(4096))
        time.sleep(4)  # a file no older than the process could be its own
        code = (
            "import mmap, sys, time\n"
            "held = [open(path, 'a+b') for path in sys.argv[1:]]\n"
            "for file in held[-2:]: file.truncate(4096)\n"
            "maps = [mmap.mmap(file.fileno(), 4096) for file in held]\n"
            "print('up', flush=True); time.sleep(600)"
        )
        late = f"/dev/shm/{name}.new"
        process = Child(
            "test", [sys.executable, "-c", code, *map(str, theirs), late, str(own)], {}, tmp_path / "test.log"
        )
        while "up" not in process.log.read_text():
            assert process.poll() is None, process.tail()
            time.sleep(0.02)
        if ended_by == "reaper":
            end([process.pid], after_s=0)
        else:
            stop([process], grace_s=1)
        assert process.wait(30) and not own.exists()
        assert all(path.exists() for path in (*theirs, Path(late)))
    finally:
        shutil.rmtree(folder)
        for path in (*theirs, own, Path(f"/dev/shm/{name}.new")):
            path.unlink(missing_ok=True)


def test_what_a_childs_processes_started_in_groups_of_their_own_ends_with_it(tmp_path: Path) -> None:
    """As reward processes of an explorer do."""
    started = tmp_path / "pid"
    inner = (
        f"import os, time; os.setpgid(0, 0); open({str(started)!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(600)"
    )
    process = child(tmp_path, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])")
    while not (started.exists() and started.read_text().endswith(" ")):
        assert process.poll() is None, process.tail()
        time.sleep(0.02)
    process.signal(signal.SIGKILL)
    assert process.wait(30)
    until = time.monotonic() + 30
    while b"State:\tS" in read_or_empty(Path("/proc", started.read_text().strip(), "status")):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_guard_waits_for_what_ends_by_itself(tmp_path: Path) -> None:
    with own_run_dir(tmp_path) as lock, Reaper(lock) as reaper:
        process = child(tmp_path, "import time; time.sleep(0.5)")
        reaper.add(process.pid)
    assert not group_members(process.pid)
    assert process.wait(30) and process.poll() == 0
