"""How PostgreSQL's programs are started, with programs of that name that only write down what they got."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megarl.core.errors import JobError
from megarl.run import postgres
from megarl.run.postgres import Identity, Server

PROGRAM = """#!/bin/sh
seen={seen}/$(basename $0)
case "$*" in *--version*) echo "postgres (PostgreSQL) 15.3"; exit 0;; *--single*) seen=$seen.single;; esac
env > $seen.env; ls -l /proc/self/fd > $seen.fds; echo $$ > $seen.pid.new; mv $seen.pid.new $seen.pid
{then}
"""
MAKE = 'test $(basename $0) = initdb && { mkdir -p "$2" && echo 15 > "$2"/PG_VERSION; exit 0; }'
SERVE = 'case "$*" in *--single*) exit 0;; esac; exec sleep 1000'
HANG = "sleep 1000 & wait"
"""The child keeps the program's output open."""
START = """
import sys
from pathlib import Path
from megarl.run import postgres
postgres.identity_of = lambda folder: postgres.Identity("me", 0, {})
postgres.Server(Path(sys.argv[1]), "key").start()
"""


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the programs write down what they got."""
    (tmp_path / "seen").mkdir()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(postgres, "identity_of", lambda folder: Identity("me", os.geteuid(), {}))
    return tmp_path / "seen"


def install(seen: Path, then: str) -> None:
    for name in ("initdb", "postgres"):
        program = seen.parent / "bin" / name
        program.write_text(PROGRAM.format(seen=seen, then=then))
        program.chmod(0o755)


def until_written(path: Path) -> str:
    deadline = time.monotonic() + 60
    while not path.is_file():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.01)
    return path.read_text()


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_no_program_gets_a_key_and_each_holds_the_run(seen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(seen, f"{MAKE}\n{SERVE}")
    monkeypatch.setattr(postgres, "START_S", 2.0)
    monkeypatch.setattr(postgres, "STOP_S", 0.5)  # it inherits an ignored SIGINT where pytest is in the background
    secrets = {"MEGARL_JOB_KEY": "s3cret", "OPENAI_API_KEY": "s3cret", "HF_TOKEN": "s3cret", "PGPASSWORD": "s3cret"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    run_lock = seen.parent / "lock"
    with run_lock.open("w") as held:
        server = Server(seen.parent / "postgres", "key", held=[held.fileno()])
        with pytest.raises(JobError, match="does not answer after 2 s"):
            server.start()
    for name in ("initdb", "postgres.single", "postgres"):
        text = (seen / f"{name}.env").read_text()
        assert "PATH=" in text and not [word for word in ("s3cret", *secrets) if word in text], name
        files = (seen / f"{name}.fds").read_text()
        assert str(run_lock) in files and str(server.folder / "lock") in files, name


@pytest.mark.parametrize("program", ["initdb", "postgres.single"])
def test_a_program_that_hangs_is_ended_and_named(seen: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    install(seen, HANG if program == "initdb" else f"{MAKE}\n{HANG}")
    monkeypatch.setattr(postgres, "START_S", 1.0)
    with pytest.raises(
        JobError, match=rf"{program.partition('.')[0]} has not ended after 1 s in {seen.parent}/postgres"
    ):
        Server(seen.parent / "postgres", "key").start()
    assert gone(int((seen / f"{program}.pid").read_text()))


def test_a_program_that_hangs_ends_with_the_process_that_started_it(seen: Path) -> None:
    install(seen, "exec sleep 1000")
    process = subprocess.Popen([sys.executable, "-c", START, str(seen.parent / "postgres")])
    pid = int(until_written(seen / "initdb.pid"))
    process.kill()
    process.wait()
    left = gone(pid)
    if not left:
        os.kill(pid, signal.SIGKILL)
    assert left
