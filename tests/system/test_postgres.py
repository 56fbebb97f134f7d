"""A real PostgreSQL that is stopped, killed and cut off while processes use it: every group once, every write once."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from select import select as ready
from typing import Any, Literal, NamedTuple

import psutil
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from sqlalchemy import insert, select, update
from sqlalchemy.engine import make_url

from megarl.buffer.store import VARIABLE, Store, check_url, database, transactions
from megarl.buffer.store.claims import EndedGroup, make_ready, report
from megarl.buffer.store.codec import trajectory_to_row
from megarl.buffer.store.tables import ENGINES, STEPS, TRAJECTORIES
from megarl.buffer.store.tables import GROUPS as GROUPS_TABLE
from megarl.config import save_resolved
from megarl.core.errors import ConfigError, FencedError, JobError
from megarl.engines.fleet import EngineTurn
from megarl.run.postgres import Server
from megarl.run.report.html import summary, write_report
from megarl.run.run_dir.resume import is_finished
from tests.conftest import examples
from tests.engine_rows import serving_row
from tests.stores import finish, make_task, make_trajectory, request, rows
from tests.unit.small_job import config_of
from tests.unit.test_fleet import WORLDS, InStore, World, live
from tests.unit.test_resume import begun
from tests.unit.test_store_outage import child, go, shows_that_it_waits

pytestmark = pytest.mark.postgres
NUMBERS_AND_TIMES = (
    "sequence",
    "requested_at",
    "claim_token",
    "beat",
    "recorded_at",
    "published_at",
    "ended_at",
    "event_id",
    "at",
)
"""Columns in which two stores differ that were told the same."""


def password_of(server: Server) -> str:
    password = make_url(server.url).password
    assert password
    return str(password)


GROUPS = 600
WORKER = f"""
import logging, sys
from megarl.buffer.store import Store
from tests.stores import finish
logging.basicConfig(level=logging.INFO)
store, worker = Store("env://MEGARL_STORE_URL", attempt=1, outage_s=200), sys.argv[1]
print("ready", flush=True)
sys.stdin.readline()
while store.rollouts.progress("r0") != ({GROUPS}, {GROUPS}):
    for claim in store.groups.claim(worker, 3):
        assert finish(store, claim), claim
        print(claim.group_id, flush=True)
"""


def test_every_group_once_while_the_server_is_stopped_and_killed(server: Server, url: str) -> None:
    store = Store(url, outage_s=200)
    store.begin_attempt(1)
    store.tasks.add("train", [make_task(i) for i in range(GROUPS)])
    request(store, groups=GROUPS)
    command, environment = [sys.executable, "-c", WORKER], {**os.environ, VARIABLE: url}
    workers = [
        subprocess.Popen(
            [*command, name],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    with ThreadPoolExecutor(2) as threads:
        ends = threads.map(lambda worker: worker.communicate("go\n", timeout=250), workers)
        until_done(store, 100)
        server.stop()
        time.sleep(3)
        server.start()
        until_done(store, 300)
        os.kill(server.pid, signal.SIGKILL)
        server.start()
        middle = store.rollouts.progress("r0")[0]
        outputs, logs = zip(*ends, strict=True)
    assert [worker.returncode for worker in workers] == [0, 0], logs
    assert 300 <= middle < GROUPS, "the server was not killed in the middle, or lost what was committed"
    finished = [output.split() for output in outputs]
    assert all(finished) and Counter(group for groups in finished for group in groups) == {
        f"r0/{i}": 1 for i in range(GROUPS)
    }
    assert len(store.groups.trajectories("r0")) == 2 * GROUPS
    column = list(GROUPS_TABLE.c.keys()).index("attempt")
    attempts = Counter(row[column] for row in rows(url)["groups"])
    assert attempts == {1: GROUPS}, "a group was claimed twice"
    for log in logs:
        assert log.count("trying again for up to 200 s") >= 1 and log.count("back after") == log.count("trying again")
        assert f"megarl:***@127.0.0.1:{server.port}/megarl" in log and password_of(server) not in log
    store.close()


def until_done(store: Store, groups: int) -> None:
    while store.rollouts.progress("r0")[0] < groups:
        time.sleep(0.01)


COMMIT = b"COMMIT\0"  # not that of BEGIN ISOLATION LEVEL READ COMMITTED


class Proxy:
    """Passes on what client and server say; loses the connection at a COMMIT when told to."""

    def __init__(self, port: int) -> None:
        self.lose: Literal["", "before", "after"] = ""
        """Cut the next COMMIT off before the server gets it, or when it has done it."""
        self.lost = 0
        self.meanwhile: Callable[[], None] = lambda: None
        """Called when the server has committed and the client does not know."""
        self._server = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._server)) as server:
            while True:
                for source in ready([client, server], [], [])[0]:
                    data = source.recv(1 << 20)
                    if source is client and self.lose and COMMIT in data:
                        where, self.lose = self.lose, ""
                        if where == "after":
                            server.sendall(data)
                            if b"COMMIT" not in server.recv(1 << 20):
                                return  # not counted as lost
                            self.meanwhile()
                        self.lost += 1
                        return
                    if not data:
                        return
                    (server if source is client else client).sendall(data)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    assert server.port is not None
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


def through(proxy: Proxy, url: str) -> str:
    return make_url(url).set(port=proxy.port).render_as_string(hide_password=False)


def names(claims: Any) -> Any:
    """Claims by what two stores have in common."""
    return [(claim.group_id, claim.attempt, claim.task.task_id) for claim in claims]


SCRIPT: list[tuple[str, Callable[[Store, list[Any]], Any]]] = [
    ("begin_attempt", lambda store, held: store.begin_attempt(3)),
    ("add_tasks", lambda store, held: store.tasks.add("train", [make_task(i) for i in range(6)])),
    ("request_rollout", lambda store, held: request(store)),
    ("claim_groups", lambda store, held: names(held.extend(store.groups.claim("a", 3, max_samples=4)) or held)),
    ("put", lambda store, held: finish(store, held.pop())),
    ("beat", lambda store, held: store.workers.beat("a")),
    ("release_claims", lambda store, held: [store.groups.release("a")][:0]),  # how many it were may get lost
    ("claim_groups", lambda store, held: names(held.extend(store.groups.claim("b", 2)) or held)),
    ("put", lambda store, held: [finish(store, claim) for claim in held[1:]]),  # what a had is released
    ("old put", lambda store, held: finish(store, held.pop(0))),
    ("record_step", lambda store, held: store.journal.record_step(1, {"reward": 1.0})),
    ("record_step", lambda store, held: store.journal.record_step(1, {"reward": 2.0})),
    ("record_event", lambda store, held: store.journal.record_event("trainer", "evaluation", {"step": 9})),
    ("record_event", lambda store, held: store.journal.record_event("trainer", "retry", {"n": 1})),
    ("close_job", lambda store, held: store.journal.close_job()),
    ("open_job", lambda store, held: store.journal.open_job()),
    ("request_rollout", lambda store, held: request(store, step=1)),
    ("request_rollout", lambda store, held: request(store, "r1", step=2, greedy=True)),
    ("discard_rollouts", lambda store, held: store.rollouts.discard(2)),
]  # fmt: skip


@pytest.mark.parametrize("lose", ["before", "after"])
def test_a_write_whose_commit_is_not_confirmed_is_done_once(
    lose: Literal["before", "after"], proxy: Proxy, url: str, new_postgres: Callable[[], str]
) -> None:
    """Each write loses its connection at COMMIT; the store then holds, and answers, what one without losses does."""
    calm = new_postgres()
    undisturbed, disturbed = Store(calm), Store(through(proxy, url), outage_s=200)
    held: tuple[list[Any], list[Any]] = ([], [])
    for i, (name, write) in enumerate(SCRIPT):
        expected = write(undisturbed, held[0])
        proxy.lose, proxy.lost = lose, 0
        answer = write(disturbed, held[1])
        assert proxy.lost == 1, f"step {i}, {name}: nothing was lost"
        assert answer == expected, f"step {i}, {name}"
        found, wanted = (rows(u, NUMBERS_AND_TIMES) for u in (url, calm))
        for content in (found, wanted):  # the attempt is kept with a mark of its own
            content["job"] = [(key, value.split()[0]) for key, value in content["job"]]
        assert found == wanted, f"step {i}, {name}"
    undisturbed.close()
    disturbed.close()


def test_a_rollout_is_not_asked_for_again_by_its_own_repetition(proxy: Proxy, url: str) -> None:
    """Between the commit and the repetition another process claims a group: it may finish it."""
    other, trainer = Store(url), Store(through(proxy, url), outage_s=200)
    other.tasks.add("train", [make_task(i) for i in range(6)])
    done: list[bool] = []
    proxy.meanwhile = lambda: done.extend(finish(other, claim) for claim in other.groups.claim("e", 1))
    proxy.lose = "after"
    request(trainer)
    assert done == [True] and other.rollouts.progress("r0") == (1, 6)
    other.close()
    trainer.close()


def test_the_end_of_a_job_outlives_a_lost_connection(
    proxy: Proxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor looks whether the run is finished, and writes the report."""
    begun(tmp_path, finished=True)
    store = Store(url)
    store.journal.close_job()
    store.close()
    monkeypatch.setenv("MEGARL_TEST_URL", through(proxy, url))
    config = config_of(tmp_path, "trainer.steps=2", "store.url=env://MEGARL_TEST_URL")
    save_resolved(config, tmp_path / "resolved.json")
    outage_s = config.store.outage_s
    for look in (
        lambda: is_finished(config, tmp_path),
        lambda: write_report(tmp_path, outage_s),
        lambda: summary(tmp_path, outage_s),
    ):
        proxy.lose, proxy.lost = "before", 0
        assert look() and proxy.lost == 1


def test_a_store_says_when_it_gives_up(server: Server, url: str, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(url, outage_s=0.3)
    server.stop()
    with pytest.raises(
        JobError, match=r"could not be used for 0.3 s \(store.outage_s=0.3\): .*; bring the database back"
    ) as raised:
        store.journal.record_step(1, {})
    with pytest.raises(ConfigError, match="cannot be reached: connection") as refused:
        check_url(server.url)
    caplog.set_level(logging.INFO)
    server.start()
    store.journal.record_step(1, {})
    assert [step for step, _ in store.journal.steps()] == [1]
    assert "trying again for up to 0.3 s" in caplog.text
    for text in (str(raised.value), str(refused.value), caplog.text, server.log.read_text()):
        assert password_of(server) not in text
    store.close()


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """Within, all processes of the server are stopped: the machine still accepts connections and takes what is sent."""
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children()]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_stopped_server_is_no_stall(server: Server, url: str, when: str) -> None:
    """Neither in a statement nor in a connect, and both go on with the server."""
    store = Store(url)
    with child(url, when) as (process, memory):
        with stopped(server):
            go(process)
            assert shows_that_it_waits(memory)
            assert process.poll() is None
        assert process.wait(60) == 0
    assert [step for step, _ in store.journal.steps()] == [1]
    store.close()


def test_a_stopped_server_is_waited_for_as_long_as_is_set(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.3)
    store = Store(url, outage_s=0.3)
    with (
        stopped(server),
        pytest.raises(JobError, match=r"could not be used for 0.3 s \(store.outage_s=0.3\): no answer for"),
    ):
        store.journal.record_step(1, {})
    store.journal.record_step(2, {})
    assert 2 in [step for step, _ in store.journal.steps()]
    store.close()


def with_option(url: str, option: str) -> str:
    parsed = make_url(url)
    options = {"options": f"{parsed.query['options']} -c{option}"}
    return parsed.update_query_dict(options).render_as_string(hide_password=False)


@contextmanager
def locked_rows(server: Server, url: str) -> Iterator[None]:
    """Within, another transaction holds all groups, longer than the ``lock_timeout`` of a role or database allows."""
    with psycopg.connect(server.url.replace("+psycopg", "")) as other:
        other.execute(f"SELECT * FROM {schema_of(url)}.groups FOR UPDATE")
        yield


@contextmanager
def read_only(server: Server, url: str) -> Iterator[None]:
    """Within, the server takes no write, as while it is maintained or another one takes its place. Sessions that were
    made within stay read-only."""
    change = "ALTER ROLE CURRENT_USER {} default_transaction_read_only"
    with psycopg.connect(server.url.replace("+psycopg", ""), autocommit=True) as admin:
        others = "FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        admin.execute(change.format("SET") + " = on")
        admin.execute(f"SELECT pg_terminate_backend(pid, 10000) {others}")
        try:
            yield
        finally:
            admin.execute("SET default_transaction_read_only = off")
            admin.execute(change.format("RESET"))


def schema_of(url: str) -> str:
    return str(make_url(url).query["options"]).removeprefix("-csearch_path=")


@pytest.mark.parametrize(("held", "state"), [(locked_rows, "55P03"), (read_only, "25006")])
def test_a_write_that_the_server_refuses_for_now_is_done_later(
    held: Callable[..., Any], state: str, server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, wait = threading.Event(), transactions.Outage.wait

    def waiting(self: Any, error: Any) -> None:
        if error.orig.sqlstate == state:
            refused.set()
        wait(self, error)

    store = Store(with_option(url, "lock_timeout=100"), outage_s=200)
    store.tasks.add("train", [make_task(i) for i in range(6)])
    request(store)
    (claim,) = store.groups.claim("a", 1)
    monkeypatch.setattr(transactions.Outage, "wait", waiting)
    with ThreadPoolExecutor(1) as threads:
        with held(server, url):
            finishing = threads.submit(finish, store, claim)
            assert refused.wait(60), finishing.exception()
        assert finishing.result()
    assert store.rollouts.progress("r0") == (1, 6) and len(store.groups.trajectories("r0")) == 2
    store.close()


def test_a_server_that_takes_no_write_is_named(server: Server, url: str) -> None:
    store = Store(url, outage_s=0.3)
    with read_only(server, url), pytest.raises(JobError, match="read-only transaction; let this user write in it"):
        store.journal.record_step(1, {})
    store.close()


@contextmanager
def set_at_end(event: threading.Event) -> Iterator[None]:
    """Also where the block fails: a thread that waits for the event would keep the test from ending."""
    try:
        yield
    finally:
        event.set()


class Met(NamedTuple):
    """A write, and another call that came while it was under way."""

    written: Any
    """Result of the write."""
    other: Any
    """Result of the other call."""
    waited: bool
    """True if the other call had not ended when the write went on."""


def meet(server: Server, writer: Store, write: Callable[[Any], Any], other: Callable[[], Any]) -> Met:
    """Call ``write`` in a transaction, and ``other`` beside it; commit once ``other`` waits for a lock or has ended."""
    inside, go = threading.Event(), threading.Event()

    def slow(connection: Any, again: bool) -> Any:
        done = write(connection)
        inside.set()
        go.wait()
        return done

    with (
        ThreadPoolExecutor(2) as threads,
        psycopg.connect(server.url.replace("+psycopg", ""), autocommit=True) as look,
        set_at_end(go),
    ):
        writing = threads.submit(writer.database.write, slow)
        inside.wait()
        calling = threads.submit(other)
        while not calling.done() and not look.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone():
            time.sleep(0.01)
        waited = not calling.done()
        go.set()
        return Met(writing.result(), calling.result(), waited)


def test_a_new_attempt_waits_for_writes_under_way(server: Server, url: str) -> None:
    """And those that come after it see it: nothing of the old attempt is written after it has begun."""
    first = Store(url)
    first.begin_attempt(1)
    old, new = Store(url, attempt=1), Store(url)

    def write(connection: Any) -> None:
        connection.execute(STEPS.insert(), {"step": 1, "recorded_at": 0.0, "metrics": "{}"})

    def begin() -> list[int]:
        new.begin_attempt(2)
        return [step for step, _ in new.journal.steps()]

    met = meet(server, old, write, begin)
    assert met.waited
    assert met.other == [1], "it began before what was under way had ended"
    for store in (first, old, new):
        store.close()


def test_an_order_and_a_turn_of_one_moment_both_stay(server: Server, url: str) -> None:
    """Each has columns of its own; who comes second reads what the first has written."""
    first, second = Store(url), Store(url)
    first.engines.register([serving_row(i, f"http://{i}") for i in range(2)])

    def order_away(connection: Any) -> None:
        connection.execute(select(ENGINES).with_for_update()).all()
        connection.execute(update(ENGINES).where(ENGINES.c.number == 1).values(wanted=False, order=1))

    assert meet(server, first, order_away, lambda: second.engines.turn([1], EngineTurn.ASLEEP)).other == {1: 1}
    assert [(e.wanted, e.order, e.turn) for e in first.engines.own()] == [
        (True, 0, EngineTurn.HERE),
        (False, 1, EngineTurn.ASLEEP),
    ]
    first.close()
    second.close()


def test_every_sequence_of_engines(url: str) -> None:
    """As ``tests/unit/test_fleet.py`` has it with SQLite."""

    @settings(max_examples=examples(3, 300), deadline=None, suppress_health_check=list(HealthCheck))
    @given(**WORLDS)
    def in_postgres(begin: int, shared: bool, actions: list[Any]) -> None:
        live(World(begin, shared, InStore(url)), actions)

    in_postgres()


def test_who_scales_meanwhile_sees_engines_that_were_added(server: Server, url: str) -> None:
    first, second = Store(url), Store(url)
    first.engines.register([serving_row(0, "http://0")])

    def add(connection: Any) -> None:
        connection.execute(select(ENGINES).with_for_update()).all()
        connection.execute(insert(ENGINES), [asdict(serving_row(1, "http://1"))])

    assert meet(server, first, add, lambda: second.engines.scale("train", 3)).other == (2, 1)
    assert [found.number for found in first.engines.own()] == [0, 1, 2]
    first.close()
    second.close()


def test_a_rollout_is_asked_for_again_while_a_group_of_it_is_being_finished(server: Server, url: str) -> None:
    """Nothing of the old one stays, so the new one's groups can be finished."""
    explorer, trainer = Store(url), Store(url)
    trainer.tasks.add("train", [make_task(i) for i in range(6)])
    request(trainer)
    claims = explorer.groups.claim("e", 2)

    def finish_first(connection: Any) -> bool:
        members = [make_trajectory(claims[0], i) for i in claims[0].indices]
        ended = EndedGroup(claims[0], members, {"samples": 2.0})
        done = make_ready(connection, ended)
        connection.execute(insert(TRAJECTORIES), [trajectory_to_row(member) for member in members])
        report(connection, [ended])
        return done

    met = meet(server, explorer, finish_first, lambda: request(trainer))
    assert met.waited and met.written
    assert trainer.rollouts.progress("r0") == (0, 6) and rows(url)["trajectories"] == []
    assert not finish(explorer, claims[1])
    assert all(finish(explorer, claim) for claim in explorer.groups.claim("e", 6)) and trainer.rollouts.progress(
        "r0"
    ) == (6, 6)
    explorer.close()
    trainer.close()


def test_a_process_that_stands_still_in_a_write_does_not_hold_up_the_next_attempt(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it was stopped, or its node cut off: its session is ended, and when it goes on it writes nothing."""
    first = Store(url)
    first.begin_attempt(1)
    monkeypatch.setattr(database, "IDLE_S", 0.5)
    frozen, new = Store(url, attempt=1, outage_s=200), Store(url)
    inside, go = threading.Event(), threading.Event()

    def slow(connection: Any, again: bool) -> None:
        connection.exec_driver_sql("INSERT INTO steps VALUES (1, 0, '{}')")
        inside.set()
        go.wait()

    with ThreadPoolExecutor(1) as threads, set_at_end(go):
        writing = threads.submit(frozen.database.write, slow)
        inside.wait()
        new.begin_attempt(2)
        go.set()
        with pytest.raises(FencedError, match="attempt 2 has begun since"):
            writing.result()
    assert new.journal.steps() == []
    for store in (first, frozen, new):
        store.close()
