"""A dead engine, explorer or reward host is started again, on this node and on another; what must not be replaced ends
the attempt."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megarl.buffer.store import Store
from megarl.core.errors import ConfigError, JobError
from megarl.core.processes.machine import group_members
from megarl.engines.fleet import EngineRow, EngineStatus, EngineTurn, Replacements
from megarl.run.nodes.node import LocalNode, Spec, Started
from megarl.run.process import ports
from megarl.run.process.interrupt import StopRequest
from megarl.run.process.process import Child
from megarl.run.process.reaper import Reaper
from megarl.run.supervise import process_units, supervisor
from megarl.run.supervise.engines import EngineSupervisor, RowsInStore
from megarl.run.supervise.supervisor import watch
from tests.engine_rows import serving_row
from tests.unit.small_job import config_of
from tests.unit.test_launch_nodes import two_nodes

SERVER = """
import mmap, os, socket, sys, time
name, port, folder, end = sys.argv[1:]
shared = open(f"/dev/shm/psm_{os.getpid()}", "w+b")
shared.truncate(4096)
held = mmap.mmap(shared.fileno(), 4096)
server = socket.create_server(("127.0.0.1", int(port)), reuse_port=True)
parent = os.getpid()
begun = os.path.exists(f"{folder}/{name}.pids")
if end != "closes" and os.fork() == 0:
    if end.startswith("held") and not begun:
        import signal
        signal.alarm(60)
        os.setsid()  # where nobody kills it
        with open(f"{folder}/holder.pid", "w") as pid:
            pid.write(str(os.getpid()))
        while os.getppid() == parent:
            time.sleep(0.02)
        os.remove(shared.name)
        for _ in range(int(end.removeprefix("held "))):
            server.accept()
        sys.exit()
    time.sleep(600)  # as an engine's core does, which holds the port too
with open(f"{folder}/{name}.pids", "a") as pids:
    pids.write(f"{os.getpid()}\\n")
first = len(open(f"{folder}/{name}.pids").readlines()) == 1
print("up", flush=True)
while first and end in ("itself", "closes") and server.accept()[0].recv(1):
    pass  # a request, of the watchdog: who looks whether it listens says nothing
if end == "itself" and first:
    time.sleep(0.1)
    sys.exit(3)
if end == "closes" and first:
    server.close()
time.sleep(600)
"""
"""Ends by itself or listens no more, the first time, once somebody has looked whether it listens. ``held N``: what it
has forked lives on, and holds the port until so many have looked."""
PLAIN = """
import os, sys, time
name, folder, code = sys.argv[1:]
with open(f"{folder}/{name}.pids", "a") as pids:
    pids.write(f"{os.getpid()}\\n")
exec(code)
time.sleep(600)
"""
TRAINER = """
import os, sys, time
folder, *plan = sys.argv[1:]
def pids(name):
    path = f"{folder}/{name}.pids"
    return [line for line in open(path)] if os.path.exists(path) else []
for step in plan:
    name, count, number = step.split(":")
    while len(pids(name)) < int(count):
        time.sleep(0.02)
    if int(number):
        os.kill(int(pids(name)[-1]), int(number))
"""
"""Ends with 0 when every NAME:STARTS:SIGNAL of its plan has come to pass: so many starts were seen, and the last one
was sent the signal."""


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_units, "LOOK_S", 0.0)
    monkeypatch.setattr(process_units, "CLOSED_S", 0.2)


def server(name: str, port: int, folder: Path, end: str = "never") -> Spec:
    return Spec(
        name,
        ("-c", SERVER, name, str(port), str(folder), end),
        {},
        str(folder / f"{name}.log"),
        listens=f"127.0.0.1:{port}",
    )


def plain(name: str, folder: Path, code: str = "") -> Spec:
    return Spec(name, ("-c", PLAIN, name, str(folder), code), {}, str(folder / f"{name}.log"))


def trainer(folder: Path, *plan: str) -> Spec:
    return Spec("trainer rank 0", ("-c", TRAINER, str(folder), *plan), {}, str(folder / "trainer.log"))


def starts(folder: Path, name: str) -> list[int]:
    return [int(line) for line in (folder / f"{name}.pids").read_text().split()]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., LocalNode]]:
    """Watches an attempt of these processes until the trainer has ended."""
    with Reaper() as reaper:

        def run(*specs: Spec, replacements: int = 3) -> LocalNode:
            node = LocalNode(reaper)
            started = [Started(node.start(spec), node, spec) for spec in specs]
            watch(started, StopRequest(), config_of(tmp_path, f"cluster.replacements={replacements}"))
            return node

        yield run


def test_what_dies_is_started_again(
    run: Callable[..., LocalNode], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine killed, one that ends by itself once it was up, one of two parts, one that lives but listens no more,
    an explorer that is told to end; each on its own port again, which a process that the dead one forked had held."""
    caplog.set_level(logging.WARNING)
    one, two, three, four, five = ports.choose("127.0.0.1", 5, None)
    part = server("engine 2 part 2", four, tmp_path)
    run(
        server("engine 0", one, tmp_path),
        server("engine 1", two, tmp_path, "itself"),
        server("engine 2", three, tmp_path),
        Spec(part.name, part.argv, part.env, part.log),
        server("engine 3", five, tmp_path, "closes"),
        plain("explorer", tmp_path, "import signal; signal.signal(15, lambda *_: sys.exit(143))"),
        trainer(
            tmp_path,
            "engine 0:1:9",
            "engine 0:2:0",
            "engine 1:2:0",
            "engine 2 part 2:1:9",
            "engine 2:2:0",
            "engine 3:2:0",
            "explorer:1:15",
            "explorer:2:0",
        ),
        replacements=5,
    )
    for name in ("engine 0", "engine 1", "engine 2", "engine 2 part 2", "engine 3", "explorer"):
        first, second = starts(tmp_path, name)
        for pid in (first, second):
            assert not group_members(pid) and not Path(f"/dev/shm/psm_{pid}").exists(), name
    assert (tmp_path / "engine 0.log").read_text() == "up\nup\n"
    said = caplog.text
    assert (
        f"engine 0 was ended by signal 9, its last word 'up' ({tmp_path}/engine 0.log); starting it again "
        "(cluster.replacements: 4 left)" in said
    )
    assert "engine 1 ended with status 3" in said and "explorer ended with status 143" in said
    assert (
        f"engine 3 is alive but no longer listens at 127.0.0.1:{five}" in said
        and "engine 3 was ended by signal 9" in said
    )
    assert "engine 2 part 2 was ended by signal 9" in said and "cluster.replacements: 0 left" in said


def test_what_dies_while_another_is_replaced_is_replaced_next(tmp_path: Path) -> None:
    class Unlucky(LocalNode):
        def start(self, spec: Spec) -> Child:
            again = (tmp_path / f"{spec.name}.pids").exists()
            child = super().start(spec)
            if again and spec.name == "engine 0":
                self.children["explorer"].signal(signal.SIGKILL)
                assert self.children["explorer"].wait(30)
            return child

    [port] = ports.choose("127.0.0.1", 1, None)
    ranks = trainer(tmp_path, "explorer:1:0", "engine 0:1:9", "engine 0:2:0", "explorer:2:0")
    with Reaper() as reaper:
        node = Unlucky(reaper)
        started = [
            Started(node.start(spec), node, spec)
            for spec in (server("engine 0", port, tmp_path), plain("explorer", tmp_path), ranks)
        ]
        watch(started, StopRequest(), config_of(tmp_path))
    assert len(starts(tmp_path, "explorer")) == 2


def test_a_port_that_is_still_held_is_waited_for(
    run: Callable[..., LocalNode], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who looked whether the successor listens would find what is left of the dead one, and kill the successor when
    that is gone."""
    [port] = ports.choose("127.0.0.1", 1, None)
    run(server("engine 0", port, tmp_path, "held 20"), trainer(tmp_path, "engine 0:1:9", "engine 0:2:0"))
    assert len(starts(tmp_path, "engine 0")) == 2
    assert caplog.text.count("starting it again") == 1 and "no more" not in caplog.text


def test_a_port_that_is_held_for_ever_is_named(
    run: Callable[..., LocalNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_units, "FREE_S", 0.3)
    [port] = ports.choose("127.0.0.1", 1, None)
    try:
        with pytest.raises(
            JobError, match=f"engine 0 cannot be started again: somebody else listens at 127.0.0.1:{port}"
        ):
            run(server("engine 0", port, tmp_path, "held 100000"), trainer(tmp_path, "engine 0:1:9", "engine 0:2:0"))
    finally:
        os.kill(int((tmp_path / "holder.pid").read_text()), signal.SIGKILL)


def test_when_they_are_used_up_a_death_ends_the_attempt(run: Callable[..., LocalNode], tmp_path: Path) -> None:
    [port] = ports.choose("127.0.0.1", 1, None)
    plan = ("engine 0:1:9", "engine 0:2:9", "engine 0:3:0")
    said = (
        r"engine 0 was ended by signal 9, not started again: cluster.replacements=1 used up \(engine 0 1x\); .*; its "
        r"last lines"
    )
    with pytest.raises(JobError, match=said):
        run(server("engine 0", port, tmp_path), trainer(tmp_path, *plan), replacements=1)
    assert len(starts(tmp_path, "engine 0")) == 2


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("engine 0", "sys.exit('ValueError: no such model')"),
        ("explorer", "sys.exit('the store is gone for good')"),
        ("trainer rank 1", "os.kill(os.getpid(), 9)"),
    ],
)
def test_what_its_successor_would_not_mend_ends_the_attempt(
    run: Callable[..., LocalNode], tmp_path: Path, name: str, code: str
) -> None:
    with pytest.raises(JobError, match=name) as raised:
        run(plain(name, tmp_path, code), trainer(tmp_path, f"{name}:2:0"), replacements=0)
    assert len(starts(tmp_path, name)) == 1 and "cluster.replacements" not in str(raised.value)


def test_an_engine_of_another_node(tmp_path: Path) -> None:
    """Its end is told once: not of its successor, which has its name."""
    with two_nodes(tmp_path) as (node, here, folder):
        [port] = node.free_ports(1)
        specs = [
            (node, server("engine 0", port, folder)),
            (here, trainer(folder, "engine 0:1:9", "engine 0:2:9", "engine 0:3:0")),
        ]
        started = [Started(n.start(spec), n, spec) for n, spec in specs]
        watch(started, StopRequest(), config_of(tmp_path))
        assert len(starts(folder, "engine 0")) == 3
        assert not any(group_members(pid) for pid in starts(folder, "engine 0"))


def test_a_deleted_log_ends_nothing(
    run: Callable[..., LocalNode], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    [port] = ports.choose("127.0.0.1", 1, None)
    spec = server("engine 0", port, tmp_path)
    log = tmp_path / "logs" / "engine 0.log"
    delete = f"import shutil; shutil.rmtree({str(log.parent)!r})\n"
    ranks = trainer(tmp_path, "engine 0:1:9", "engine 0:2:0")
    code = TRAINER.replace("    if int(number):\n", f"    if int(number):\n        {delete}")
    run(
        Spec(spec.name, spec.argv, spec.env, str(log), listens=spec.listens),
        Spec(ranks.name, ("-c", code, *ranks.argv[2:]), {}, ranks.log),
    )
    assert "its last word '(its log is gone: No such file or directory)'" in caplog.text
    assert log.read_text() == "up\n"


def test_nothing_is_replaced_once_the_job_is_asked_to_stop(run: Callable[..., LocalNode], tmp_path: Path) -> None:
    request = StopRequest()
    with Reaper() as reaper:
        node = LocalNode(reaper)
        waiting = "import signal; signal.signal(15, lambda *_: (time.sleep(1), sys.exit(0))); print('up', flush=True)"
        started = [
            Started(node.start(spec), node, spec)
            for spec in (plain("explorer", tmp_path), plain("trainer rank 0", tmp_path, waiting))
        ]
        while "up" not in (tmp_path / "trainer rank 0.log").read_text():
            time.sleep(0.02)
        request.count = 1
        os.kill(started[0].process.pid, signal.SIGKILL)
        watch(started, request, config_of(tmp_path))
    assert len(starts(tmp_path, "explorer")) <= 1


def test_engines_are_ended_and_started_by_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away by order: neither replaced nor a death; no replacement is used up."""
    monkeypatch.setattr(supervisor, "LOOK_S", 0.01)
    acts: list[None] = []
    act = EngineSupervisor.act

    def noted(self: EngineSupervisor, **how: bool) -> bool:
        acts.append(None)
        return act(self, **how)

    monkeypatch.setattr(EngineSupervisor, "act", noted)
    config, port = config_of(tmp_path, "cluster.replacements=0"), ports.choose("127.0.0.1", 1, None)[0]
    store = Store(config.store.url)
    store.begin_attempt(1)
    store.engines.register([serving_row(0, f"http://127.0.0.1:{port}", state=EngineStatus.STARTING)])

    def until(state: EngineStatus) -> None:
        while store.engines.own()[0].state is not state:
            time.sleep(0.01)

    def order() -> None:
        until(EngineStatus.SERVING)
        store.engines.turn([0], EngineTurn.AWAY)
        until(EngineStatus.ABSENT)
        assert not [pid for pid in starts(tmp_path, "engine 0") if alive(pid)]
        seen = len(acts)
        while len(acts) < seen + 5:
            time.sleep(0.01)
        assert len(starts(tmp_path, "engine 0")) == 1
        store.engines.turn([0], EngineTurn.HERE)

    with Reaper() as reaper, ThreadPoolExecutor() as pool:
        node = LocalNode(reaper)
        specs = [server("engine 0", port, tmp_path), trainer(tmp_path, "engine 0:2:0")]
        ordered = pool.submit(order)
        watch([Started(node.start(spec), node, spec) for spec in specs], StopRequest(), config, 1)
        ordered.result()
    assert len(starts(tmp_path, "engine 0")) == 2
    store.close()


def test_a_store_that_is_away_holds_nobody_up(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/store.db")
    looks: list[float] = []

    def away() -> list[EngineRow]:
        looks.append(time.monotonic())
        raise JobError("away") if len(looks) < 3 else ConfigError("its folder is gone")

    store.engines.own = away  # type: ignore[method-assign]
    rows, replacements = RowsInStore(store, 0.01), Replacements(0)
    engines = EngineSupervisor([], process_units.Units([], replacements), replacements, 0.0)
    rows.start()
    while len(looks) < 5:
        rows.exchange(engines)
        assert engines.act()
        time.sleep(0.01)
    rows.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
