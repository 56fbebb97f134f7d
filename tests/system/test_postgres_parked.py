"""A real PostgreSQL whose data are on a local disk while it is up, and parked in the run's directory when it is not."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from megarl.buffer.store import OWN_SERVER, VARIABLE, Store
from megarl.core.errors import ConfigError
from megarl.run import local_disk, postgres
from megarl.run.job_store import job_store, store_of_run
from megarl.run.postgres import Server
from megarl.run.run_dir.store_damage import fill_lost_store
from tests.unit.small_job import config_of

pytestmark = pytest.mark.postgres
NETWORK = "27 1 254:0 / / rw - ext4 /dev/vda rw\n28 27 0:40 / {run} rw - lustre 10.0.0.1@o2ib:/scratch rw,flock\n"


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's directory that mountinfo shows on Lustre, with a local disk for it in TMPDIR."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (tmp_path / "mountinfo").write_text(NETWORK.format(run=run_dir))
    monkeypatch.setattr(local_disk, "MOUNTS", tmp_path / "mountinfo")
    monkeypatch.setitem(postgres.SETTINGS, "fsync", "off")  # no power cut here
    monkeypatch.setattr(os, "fsync", lambda _: None)
    on_node(1, run_dir, monkeypatch)
    return run_dir


def on_node(number: int, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have this node's local disk from here on; returns it."""
    disk = run_dir.parent / f"disk of node {number}"
    disk.mkdir(exist_ok=True)
    monkeypatch.setenv("TMPDIR", str(disk))
    return disk


@contextmanager
def up(run_dir: Path) -> Iterator[Server]:
    with job_store(OWN_SERVER, run_dir, "key", host="127.0.0.1") as server:
        assert server is not None
        yield server


def add(kind: str) -> list[str]:
    """Record an event; returns all of them."""
    store = Store(OWN_SERVER)
    store.journal.record_event("trainer", kind, {})
    found = [event["kind"] for event in store.journal.events()]
    store.close()
    return found


def killed(server: Server) -> None:
    """End the server without warning, and leave its data as they are."""
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    os.kill(server.pid, signal.SIGKILL)
    server.poll()
    psutil.wait_procs(processes[1:], 30)


def park_until(park: Callable[[], None], moment: str, in_order: bool) -> None:
    """Park in a process that ends without clean-up where it would call this function of ``local_disk``."""
    if (pid := os.fork()) == 0:
        try:
            owner = local_disk if hasattr(local_disk, moment) else local_disk.Parking
            setattr(owner, moment, lambda *_: os._exit(9))
            park()
        finally:
            os._exit(1)
    assert in_order and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def steps(run_dir: Path, numbers: Sequence[int]) -> None:
    lines = [json.dumps({"step": n, "training/global_step": n, "actor/loss": n / 8}) for n in numbers]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines))


def test_data_are_parked_and_taken_whatever_ends_the_server(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, first = run_dir / "postgres", on_node(1, run_dir, monkeypatch)
    with up(run_dir) as server:
        assert server.data.is_relative_to(first) and not (home / "data").exists()
        assert add("parked") == ["parked"]
        keeps_others_away_while_it_parks(server, monkeypatch)
    assert (home / "data" / "PG_VERSION").is_file() and not any(first.iterdir())
    on_node(2, run_dir, monkeypatch)
    with up(run_dir) as server:
        assert add("before the kill") == ["parked", "before the kill"]
        away = server.data
        killed(server)
    assert away.is_dir() and (home / local_disk.AWAY).is_file()
    on_node(3, run_dir, monkeypatch)  # another temporary folder of the same node
    for moment in ("replace_directory", "forget"):  # copied, and not renamed; renamed, and still away
        with up(run_dir) as server:
            assert add(moment)[:2] == ["parked", "before the kill"]
            assert server.data == away
            monkeypatch.setattr(server.parking, "park", partial(park_until, server.parking.park, moment))
        server.parking.let_go()
    with up(run_dir) as server:
        assert server.data != away, "they had been parked"
        assert add("last") == ["parked", "before the kill", "replace_directory", "forget", "last"]
    assert not (home / local_disk.AWAY).exists()


def keeps_others_away_while_it_parks(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has ended by then, and has let its lock go."""
    park = server.parking.park

    def tried(in_order: bool) -> None:
        assert in_order
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match="in use by another PostgreSQL server"):
            patch.setattr(postgres, "LOCK_S", 0.2)
            Server(server.folder, "key").start()
        park()

    monkeypatch.setattr(server.parking, "park", tried)


def test_a_lost_store_gives_way_to_one_with_the_runs_steps(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Read by a tool first, which begins no new store."""
    config = config_of(run_dir, f"store.url={OWN_SERVER}")
    with up(run_dir) as server:
        add("lost")
        folder = server.data.parent
        killed(server)
    steps(run_dir, [1, 2, 3])
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=f"{folder} of this host, .*, is gone"), store_of_run(OWN_SERVER, run_dir):
        pass
    with up(run_dir) as server:
        fill_lost_store(config, server)
        assert caplog.text.count("THE STORE'S DATA WERE NOT PARKED") == 1 and f"{folder} of this host" in caplog.text
        fill_lost_store(config, server)
        assert add("new") == ["new"]
    assert caplog.text.count("THE STORE'S DATA WERE NOT PARKED") == 1
    before = (run_dir / "postgres" / "data").stat().st_ino
    with store_of_run(OWN_SERVER, run_dir, read_only=True) as store:
        assert [step for step, _ in store.journal.steps()] == [1, 2, 3]
    assert (run_dir / "postgres" / "data").stat().st_ino == before, "a tool that reads has parked its copy"
