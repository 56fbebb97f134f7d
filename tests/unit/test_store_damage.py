"""A store whose file was changed, cut short or taken back by a power cut: one line says so, and the run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy

from megarl.buffer.store import Store, database
from megarl.buffer.store.database import open_engine
from megarl.buffer.store.tables import REMADE, SCHEMA
from megarl.core.errors import ConfigError, JobError, StoreDamagedError
from megarl.run.run_dir.store_damage import fault, replace_store
from tests.engine_rows import serving_row
from tests.power_cut import ForgetfulDisk
from tests.stores import finish, make_task, request

STEPS = 40


def filled(path: Path) -> str:
    """A store of two whole rollouts, ``STEPS`` steps and an evaluation, with nothing left in its log; returns its
    URL."""
    url = f"sqlite:///{path}"
    store = Store(url)
    store.begin_attempt(1)
    store.tasks.add("train", [make_task(i) for i in range(6)])
    for number in range(2):
        request(store, f"r{number}", step=number)
        for claim in store.groups.claim("a", 6):
            assert finish(store, claim)
    for step in range(1, STEPS + 1):
        store.journal.record_step(step, {"reward": step / 7, "filler": 1000.0 + step})
    store.journal.record_event("trainer", "evaluation", {"step": 1, "accuracy": 0.5})
    store.close()
    return url


def garbage(path: Path) -> None:
    """Over the pages of tasks."""
    content = bytearray(path.read_bytes())
    place = content.index(b'"ground_truth"') // 4096 * 4096
    content[place : place + 8192] = os.urandom(8192)
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def no_database(path: Path) -> None:
    path.write_bytes(b"x" * 20000)


def page_of_steps(path: Path) -> None:
    content = bytearray(path.read_bytes())
    place = content.index(b'"filler":1020') // 4096 * 4096
    content[place : place + 100] = b"\xff" * 100
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [garbage, cut_short, no_database, page_of_steps])
def test_a_damaged_file_is_told_in_one_line_and_set_aside(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "store.db"
    url = filled(path)
    assert fault(path) is None
    damage(path)
    broken = path.read_bytes()
    found = fault(path)
    assert found and "\n" not in found
    with pytest.raises(StoreDamagedError, match=rf"store {url} is damaged: ") as raised:
        store = Store(url)
        (
            store.journal.steps(),
            store.tasks.read("train"),
            store.journal.events(),
            [store.groups.trajectories(f"r{i}") for i in range(2)],
        )
    assert "\n" not in str(raised.value)
    aside = replace_store(path, {})
    assert aside == tmp_path / "store.db.damaged" and aside.read_bytes() == broken
    Store(url).begin_attempt(2)


def one_byte(text: bytes, other: bytes) -> Callable[[Path], None]:
    """Of a row: SQLite's check of pages sees nothing."""

    def damage(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content.replace(text, text[:-1] + other, 1))

    return damage


ROWS = {
    "no text": one_byte(b'"filler":1020', b"\xff"),
    "no JSON": one_byte(b'{"reward"', b" "),
    "a task": one_byte(b'"ground_truth"', b"\xff"),
}


@pytest.mark.parametrize("damage", ROWS)
def test_a_row_that_no_start_could_read_is_found(tmp_path: Path, damage: str) -> None:
    """Else every start would end with the promise that the next one sets the file aside."""
    path = tmp_path / "store.db"
    url = filled(path)
    ROWS[damage](path)
    assert fault(path) is not None
    store = Store(url)
    with pytest.raises(StoreDamagedError, match="start the run again"):
        store.journal.steps(), store.tasks.read("train")
    store.close()


@pytest.mark.parametrize("cut", range(5))
def test_a_replacement_that_was_cut_off_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int) -> None:
    """Before each of its renames; then the log of a killed job lies beside the file too."""
    path = tmp_path / "store.db"
    url = filled(path)
    code = f"import os\nfrom megarl.buffer.store import Store\nStore({url!r}).journal.close_job()\nos._exit(9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    path.write_bytes(b"x" * 20000)
    replace, done = os.replace, []

    def dies(source: object, target: object) -> None:
        if len(done) == cut:
            raise KeyboardInterrupt
        done.append(target)
        replace(str(source), str(target))

    steps: dict[int, dict[str, float | None]] = {step: {"reward": 0.5} for step in range(1, 100)}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", dies)
        replace_store(path, steps)
    assert fault(path) is not None
    aside = replace_store(path, steps)
    assert fault(path) is None and aside.read_bytes() == b"x" * 20000
    store = Store(url)
    assert store.journal.steps() == list(steps.items())
    store.close()
    assert sorted(p.name for p in tmp_path.iterdir() if "damaged" not in p.name) == ["store.db"]


def test_a_second_damage_keeps_the_file_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    kept = []
    for name in ("store.db.damaged", "store.db.damaged_2", "store.db.damaged_3"):
        path.write_bytes(name.encode() * 1000)
        kept.append((tmp_path / name, path.read_bytes()))
        assert replace_store(path, {}) == tmp_path / name
    assert all(file.read_bytes() == content for file, content in kept)


@pytest.mark.parametrize("schema", ["7", "99"])
def test_a_store_of_another_version_is_refused(tmp_path: Path, schema: str) -> None:
    url = filled(tmp_path / "store.db")
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text(f"update job set value = '{schema}' where key = 'schema'"))
    engine.dispose()
    with pytest.raises(
        ConfigError, match=f"schema {schema}, this version of megarl has schema {SCHEMA}; take another run.name"
    ):
        Store(url)


@pytest.mark.parametrize("schema", REMADE)
def test_a_store_with_an_earlier_table_of_engines_is_taken(tmp_path: Path, schema: str) -> None:
    """Each start of a job writes the engines; all else is as it was."""
    url = filled(tmp_path / "store.db")
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text(f"update job set value = '{schema}' where key = 'schema'"))
        connection.execute(sqlalchemy.text("drop table engines"))
        connection.execute(sqlalchemy.text("create table engines (program varchar, number integer, orders integer)"))
    engine.dispose()
    store = Store(url)
    before = store.tasks.ids("train")
    store.engines.register([serving_row(0, "http://e")])
    assert len(store.engines.own()) == 1 and before and Store(url).tasks.ids("train") == before
    store.close()


WRITER = """
import os, signal, sys
from megarl.buffer.store import Store
store = Store(sys.argv[1])
store.begin_attempt(1)
other = Store(sys.argv[1], attempt=1)
for step in range(1, 6):
    other.journal.record_step(step, {})
if sys.argv[2] == "synced":
    store.sync()
other.journal.record_step(6, {})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["synced", "not synced"])
def test_what_is_synced_outlives_a_power_cut(tmp_path: Path, when: str) -> None:
    """On a disk that keeps only what was synced; without ``sync`` the steps are gone, or this test could not fail."""
    run = tmp_path / "run"
    disk = ForgetfulDisk(tmp_path, run)
    run.mkdir()
    environment = {**os.environ, **disk.environment}
    subprocess.run([sys.executable, "-c", WRITER, f"sqlite:///{run}/store.db", when], env=environment, check=False)
    assert len(Store(f"sqlite:///{run}/store.db").journal.steps()) == 6
    assert fault(disk.kept / "store.db") is None
    store = Store(f"sqlite:///{disk.kept}/store.db")
    assert [step for step, _ in store.journal.steps()] == ([1, 2, 3, 4, 5] if when == "synced" else [])
    store.close()


def test_a_file_that_cannot_be_written_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = filled(tmp_path / "store.db")
    monkeypatch.setattr(database, "enter_wal", lambda connection: connection.execute("PRAGMA query_only=1"))
    with pytest.raises(
        ConfigError, match=rf"store\.url={url} cannot be .* \(attempt to write a readonly database\); .* set store\.url"
    ) as raised:
        Store(url).journal.record_step(1, {})
    assert "\n" not in str(raised.value)
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(
        ConfigError, match=r"folder\.db cannot be .* \(unable to open database file\); .* set store\.url"
    ):
        Store(f"sqlite:///{tmp_path}/folder.db")


@pytest.mark.parametrize("killed", [False, True])
def test_a_look_at_a_store_changes_nothing(tmp_path: Path, killed: bool) -> None:
    """With a log, which a killed job leaves, SQLite may write the log's index again."""
    url = filled(tmp_path / "store.db")
    if killed:
        code = f"import os\nfrom megarl.buffer.store import Store\nStore({url!r}).journal.close_job()\nos._exit(9)"
        assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert ("store.db-wal" in files) == killed
    store = Store(url, read_only=True)
    assert fault(tmp_path / "store.db") is None
    assert store.journal.job_state() == ("closed" if killed else "open")
    store.close()
    files.pop("store.db-shm", None)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix != ".db-shm"} == files


def test_a_stop_request_ends_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.db"
    filled(path)
    monkeypatch.setattr(database, "PROGRESS_STEPS", 10)
    with pytest.raises(JobError, match=r"asked to stop while .*store\.db was checked"):
        fault(path, lambda: True)
