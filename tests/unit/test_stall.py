"""Heartbeats, and what a supervisor says and does when there are none: of real processes, stopped and blocked."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.core.errors import JobError
from megarl.core.processes import heartbeat
from megarl.engines.client.control import EngineControl
from megarl.run.nodes.node import LocalNode, Spec, Started
from megarl.run.process import ports, stacks
from megarl.run.process.process import Child
from megarl.run.process.reaper import Reaper
from megarl.run.process.stacks import Account, ProcessSnapshot
from megarl.run.supervise import watchdog
from megarl.run.supervise.watchdog import Watchdog
from tests.unit.small_job import config_of

STALL_S = 10.0
MARKING = (
    "import time\nfrom megarl.core.processes import heartbeat\nheartbeat.begin()\n"
    "with heartbeat.phase({phase!r}, 6):\n    while True:\n        heartbeat.beat()\n        time.sleep(0.02)\n"
)
SILENT = (
    "import time\nfrom megarl.core.processes import heartbeat\nheartbeat.begin()\n"
    "with heartbeat.phase('update', 6):\n    time.sleep(600)\n"
)
TICKING = (
    "import asyncio\nfrom megarl.core.processes import heartbeat\nheartbeat.begin()\n"
    "asyncio.run(heartbeat.beat_periodically(lambda: '3 samples being generated', 0.02))\n"
)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    with Reaper() as reaper:
        node = LocalNode(reaper)
        yield node
        node.stop(list(node.children), 0.0)


def start(node: LocalNode, name: str, code: str, folder: Path, *arguments: str, **env: str) -> Child:
    """A child that has made its first mark."""
    child = node.start(Spec(name, ("-c", code, *arguments), env, str(folder / f"{name}.log")))
    until(lambda: child.heartbeat().beats > 0, child)
    return child


def until(what: Callable[[], bool], child: Child) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline and child.poll() is None, child.tail()
        time.sleep(0.02)


class Clock:
    """Time that passes for watchdogs when a test lets it pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


def watchdog_of(folder: Path, *overrides: str) -> Watchdog:
    config = config_of(folder, *overrides)
    return Watchdog(replace(config, cluster=replace(config.cluster, stall_s=STALL_S)), folder / "logs")


def watched(
    dog: Watchdog,
    children: Sequence[Child],
    node: LocalNode,
    clock: Clock,
    end: Callable[[], bool] = lambda: False,
    moving: Sequence[Child] = (),
) -> str:
    """What the watchdog says when it gives up; "" when ``end`` was first. No time passes until ``moving`` have moved
    again."""
    deadline = time.monotonic() + 60
    while not end():
        assert time.monotonic() < deadline, "it says nothing"
        for child, before in [(child, child.heartbeat().beats) for child in moving]:
            until(lambda child=child, before=before: child.heartbeat().beats != before, child)  # type: ignore[misc]
        clock.now += STALL_S / 5
        try:
            dog.look([Started(child, node) for child in children])
        except JobError as error:
            return str(error)
    return ""


def stopped(child: Child) -> None:
    child.signal(signal.SIGSTOP)
    until(lambda: child.heartbeat().state == "T", child)


# ---------------------------------------------------------------- the page


def test_a_host_of_reward_workers_is_seen_to_work(node: LocalNode, tmp_path: Path) -> None:
    """A host that seems to start for longer than ``rollout.start_timeout_s`` is killed, in the middle of its work."""
    argv = ("-m", "megarl", "rewards", "serve", "--port", "0", "--workers", "1", "--output", str(tmp_path / "output"))
    env = {"MEGARL_JOB_KEY": "a key of the tests, long enough"}
    host = node.start(Spec("reward host 1", argv, env, str(tmp_path / "host.log")))
    until(lambda: host.heartbeat().phase == "serving", host)


def test_a_reader_sees_whole_records(tmp_path: Path) -> None:
    """While they are written at full speed."""
    enough = tmp_path / "enough"
    code = (
        "import itertools, os\nfrom megarl.core.processes import heartbeat\nheartbeat.begin()\n"
        "for i in itertools.count():\n    with heartbeat.phase(f'phase {i}' * (1 + i % 7), i):\n        pass\n"
        f"    if i % 1000 == 999 and os.path.exists({str(enough)!r}):\n        print(i + 1)\n        break\n"
    )
    child = Child("c", [sys.executable, "-c", code], {}, tmp_path / "c.log")
    before, phases = 0, 0
    while child.poll() is None:
        found = child.memory.read()
        assert found.beats >= before
        before = found.beats
        if found.step:
            i = found.step - 1
            assert found.phase == (f"phase {i}" * (1 + i % 7))[:80]
            phases += 1
            if phases == 1000:
                enough.touch()
    assert child.poll() == 0, child.tail()
    beats = 2 * int(child.log.read_text()) + 1
    assert (child.memory.read().beats, child.memory.read().phase) == (beats, heartbeat.START)


def test_phases_and_patience_end_with_their_blocks(node: LocalNode, tmp_path: Path) -> None:
    code = (
        "import os, sys, threading\nfrom megarl.core.processes import heartbeat\nheartbeat.begin()\n"
        "heartbeat.set_phase('between steps')\n"
        "def stop(): print('at', flush=True); sys.stdin.readline()\n"
        "with heartbeat.phase('step', 1):\n    with heartbeat.phase('update'), heartbeat.timeout(77):\n        {}\n    "
        "{}\n{}\n"
    )
    wanted = {0: ("update", 2, 77.0), 1: ("step", 2, 0.0), 2: ("between steps", 0, 0.0)}
    for place, found in wanted.items():
        at = ["import time; print('at', flush=True); time.sleep(60)" if i == place else "pass" for i in range(3)]
        child = start(node, f"c{place}", code.format(*at), tmp_path)
        until(lambda child=child: "at" in child.log.read_text(), child)  # type: ignore[misc]
        beat = child.heartbeat()
        assert (beat.phase, beat.step, beat.timeout_s) == found
        assert heartbeat.Memory.of(child.pid).read() == child.memory.read(), "of a process that others watch"


def test_marks_of_forks_and_threads_do_not_count(node: LocalNode, tmp_path: Path) -> None:
    code = (
        "import os, threading, time\nfrom megarl.core.processes import heartbeat\nheartbeat.begin()\n"
        "def many():\n    for _ in range(100):\n        heartbeat.beat()\n"
        "thread = threading.Thread(target=many); thread.start(); thread.join()\n"
        "pid = os.fork()\nmany() if pid == 0 else os.waitpid(pid, 0)\n"
        "pid or os._exit(0)\nprint('at', flush=True)\ntime.sleep(60)\n"
    )
    child = start(node, "c", code, tmp_path)
    until(lambda: "at" in child.log.read_text(), child)
    assert child.heartbeat().beats == 1


def test_without_a_supervisor_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "other").open("wb") as file:  # the number may be another file's
        for number in ("", "9999", str(file.fileno())):
            monkeypatch.setenv(heartbeat.VARIABLE, number)
            assert heartbeat.listen() is None


# ---------------------------------------------------------------- who is where

RANK = """
import sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from megarl.core.processes import heartbeat

def late(folder):
    while not (folder / 'go').exists():
        time.sleep(0.01)

rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
store = dist.TCPStore('127.0.0.1', port, 2, rank == 0, timedelta(seconds=60))
dist.init_process_group('gloo', store=store, world_size=2, rank=rank, timeout=timedelta(seconds=300))
heartbeat.begin()
with heartbeat.phase('update', 6):
    print('up', flush=True)
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    late(folder)
    dist.recv(torch.ones(1), 0)
"""


def rows_of(children: Sequence[Child], node: LocalNode) -> list[ProcessSnapshot]:
    accounts = node.accounts([child.name for child in children])
    return [ProcessSnapshot(c.name, c.heartbeat().phase, c.heartbeat().step, 3.0, accounts[c.name]) for c in children]


def test_two_ranks_that_do_not_meet(node: LocalNode, tmp_path: Path, clock: Clock) -> None:
    """One sleeps outside of the collective in which the other waits; then it is in another one; then it is stopped."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    (port,) = ports.choose("127.0.0.1", 1, None)
    env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    specs = (
        Spec(f"trainer rank {r}", (str(script), str(r), str(port), str(tmp_path)), env, str(tmp_path / f"{r}.log"))
        for r in range(2)
    )
    ranks = [node.start(spec) for spec in specs]
    for rank in ranks:
        until(lambda rank=rank: "up" in rank.log.read_text(), rank)  # type: ignore[misc]

    def shown() -> tuple[list[ProcessSnapshot], str]:
        rows = rows_of(ranks, node)
        return rows, f"{stacks.table(rows)}\n{stacks.verdict(rows)}"

    until(lambda: rows_of(ranks, node)[0].location.collective == "all_reduce", ranks[0])
    outside = r"trainer rank 1 \| update, step 7 \| 3 s    \| in no collective: .*/rank.py:1[01] \(late\): (time|while)"
    until(lambda: re.search(outside, shown()[1]) is not None, ranks[1])  # now and then it is within exists()
    rows, text = shown()
    assert f"trainer rank 0 | update, step 7 | 3 s    | in all_reduce from {script}:" in text
    assert text.endswith("likely: trainer rank 1 is to blame: in no collective, while trainer rank 0 is in all_reduce")

    (tmp_path / "go").touch()
    until(lambda: rows_of(ranks, node)[1].location.collective == "recv", ranks[1])
    assert re.search(r"to blame: in (recv|all_reduce), while the others are in (recv|all_reduce)$", shown()[1])

    stopped(ranks[1])
    said = watched(watchdog_of(tmp_path), ranks, node, clock)
    assert "no trainer rank has moved for" in said and f"cluster.stall_s={STALL_S:g}" in said
    assert "likely: trainer rank 1 is to blame: stopped by a signal" in said
    kept = (tmp_path / "logs" / "stall_1.txt").read_text()
    assert str(tmp_path / "logs" / "stall_1.txt") in said
    assert "--- trainer rank 0\n" in kept and "distributed_c10d.py" in kept
    assert all(rank.wait(30) and rank.poll() == -signal.SIGKILL for rank in ranks)  # the stopped one too


def account(*frames: str, state: str = "S") -> Account:
    lines = [f'  File "{frame.split(":")[0]}", line {frame.split(":")[1]} in {frame.split(":")[2]}' for frame in frames]
    return Account(
        state, "", 0x10, "\n".join(["Current thread 0x00000010 (most recent call first):", *lines]) if frames else ""
    )


C10D, LOGGER = (
    "/x/site-packages/torch/distributed/distributed_c10d.py",
    "/x/site-packages/torch/distributed/c10d_logger.py:83:wrapper",
)


def test_the_call_is_named_that_a_person_knows() -> None:
    """A collective within a collective, torch's wrapper around it, and the code that called it."""
    mappings = "/x/site-packages/megatron/core/tensor_parallel/mappings.py:88:_reduce"
    inner = account(f"{C10D}:2810:all_gather", LOGGER, f"{C10D}:3000:all_gather_object", LOGGER, mappings)
    assert (
        str(stacks.location_of(inner))
        == "in all_gather_object from megatron/core/tensor_parallel/mappings.py:88 (_reduce)"
    )


def test_a_collective_in_a_thread_of_autograd_counts() -> None:
    main = account("/x/site-packages/torch/autograd/graph.py:823:_engine_run_backward")
    other = account(f"{C10D}:2810:all_reduce", LOGGER, "/x/m.py:5:backward").stacks.replace(
        "Current thread 0x00000010", "Thread 0x00000020"
    )
    both = main._replace(stacks=f"{other}\n\n{main.stacks}")
    assert stacks.location_of(both).collective == "all_reduce"


def test_who_gives_no_stacks_is_described_by_its_state(node: LocalNode, tmp_path: Path) -> None:
    """And is not signalled without a handler: that would end it."""
    child = node.start(
        Spec("engine 0", ("-c", "import time; print('up', flush=True); time.sleep(600)"), {}, str(tmp_path / "e.log"))
    )
    until(lambda: "up" in child.log.read_text(), child)
    found = node.accounts(["engine 0"])["engine 0"]
    assert (found.stacks, found.state, child.poll()) == ("", "S", None)
    stopped(child)
    row = ProcessSnapshot("engine 0", "serving", 0, 3.0, node.accounts(["engine 0"])["engine 0"])
    assert row.cells()[3].startswith("stopped by a signal (state T)")
    assert child.poll() is None


# ---------------------------------------------------------------- what is done


def test_a_stopped_explorer_is_killed_and_nobody_else(
    node: LocalNode, tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    """A rank that waits for another one that moves is left alone, however long it is silent."""
    codes = {"trainer rank 0": MARKING.format(phase="rollout"), "trainer rank 1": SILENT, "explorer": TICKING}
    children = [start(node, name, code, tmp_path) for name, code in codes.items()]
    stopped(children[2])
    dog = watchdog_of(tmp_path)
    assert watched(dog, children, node, clock, lambda: children[2].poll() is not None, moving=children[:1]) == ""
    assert children[2].poll() == -signal.SIGKILL
    assert (
        "explorer gave no heartbeat" in caplog.text
        and "likely: explorer is to blame: stopped by a signal" in caplog.text
    )
    assert [child.poll() for child in children[:2]] == [None, None]


def test_a_stopped_engine_is_to_blame_for_silent_ranks(node: LocalNode, tmp_path: Path, clock: Clock) -> None:
    """Any process of its group: the server may go on answering."""
    trainer = start(node, "trainer rank 0", SILENT, tmp_path)
    code = (
        "import subprocess, sys\nworker = subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(600)'])\nprint(worker.pid, flush=True)\nworker.wait()"
    )
    engine = node.start(Spec("engine 0", ("-c", code), {}, str(tmp_path / "e.log")))
    until(lambda: engine.heartbeat().beats > 0 and engine.log.read_text() != "", engine)
    os.kill(int(engine.log.read_text()), signal.SIGSTOP)
    until(lambda: engine.heartbeat().state == "T", engine)
    dog = watchdog_of(tmp_path)
    assert watched(dog, [trainer, engine], node, clock, lambda: engine.poll() is not None) == ""
    assert (engine.poll(), trainer.poll()) == (-signal.SIGKILL, None)


SERVER = """
import sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    left = 2
    def do_GET(self):
        if self.path != "/health":
            Handler.left -= 1
            if Handler.left < 0:
                time.sleep(600)
        self.send_response(200 if self.headers["Authorization"] == "Bearer the key" else 401)
        self.end_headers()
        self.wfile.write(b'{"version": "1.1", "paused": false, "refusing": null, "start": 1, "workers": 1}')
    def log_message(self, *args): pass

ThreadingHTTPServer.allow_reuse_port = True
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server(node: LocalNode, port: int, folder: Path) -> Child:
    """An engine whose core answers twice."""
    spec = Spec(
        "engine 0",
        ("-c", SERVER, str(port)),
        {"MEGARL_JOB_KEY": "the key"},
        str(folder / "e.log"),
        listens=f"127.0.0.1:{port}",
    )
    return node.start(spec)


def test_an_engine_that_takes_weights_has_time(node: LocalNode, tmp_path: Path, clock: Clock) -> None:
    """As much as a sync may take, while the trainer waits for it."""
    (port,) = ports.choose("127.0.0.1", 1, None)
    engine = server(node, port, tmp_path)
    until(lambda: engine.heartbeat().beats == 2, engine)
    go = tmp_path / "go"
    syncing = (
        f"import os\nwith heartbeat.timeout(600):\n    heartbeat.beat()\n    while not os.path.exists({str(go)!r}):\n"
    )
    syncing += "        time.sleep(0.01)\n"
    code = MARKING.format(phase="rollout").replace("with heartbeat.phase", syncing + "with heartbeat.phase")
    trainer, dog = start(node, "trainer rank 0", code, tmp_path), watchdog_of(tmp_path)
    late = clock.now + 5 * STALL_S
    assert watched(dog, [trainer, engine], node, clock, lambda: clock.now > late) == ""
    assert (engine.poll(), trainer.poll()) == (None, None)
    go.touch()
    until(lambda: trainer.heartbeat().phase == "rollout", trainer)
    assert watched(dog, [trainer, engine], node, clock, lambda: engine.poll() is not None, moving=[trainer]) == ""
    assert trainer.poll() is None


def test_an_engine_whose_core_no_longer_answers_is_killed(node: LocalNode, tmp_path: Path, clock: Clock) -> None:
    (port,) = ports.choose("127.0.0.1", 1, None)
    trainer = start(node, "trainer rank 0", MARKING.format(phase="rollout"), tmp_path)
    engine = server(node, port, tmp_path)
    until(lambda: engine.heartbeat().beats == 2, engine)
    EngineControl(f"http://127.0.0.1:{port}", "the key").health(60.0)
    dog = watchdog_of(tmp_path)
    assert watched(dog, [trainer, engine], node, clock, lambda: engine.poll() is not None, moving=[trainer]) == ""
    assert (engine.poll(), trainer.poll()) == (-signal.SIGKILL, None)
    assert engine.probe is not None and engine.probe.count == 2


def test_a_stopped_rank_is_found_while_another_one_moves(node: LocalNode, tmp_path: Path, clock: Clock) -> None:
    """Rank 0 goes on looking for groups of a rollout for a while."""
    ranks = [start(node, f"trainer rank {i}", MARKING.format(phase="rollout"), tmp_path) for i in range(2)]
    stopped(ranks[1])
    said = watched(watchdog_of(tmp_path), ranks, node, clock, moving=ranks[:1])
    assert "trainer rank 1 has not moved for" in said


def test_a_rollout_that_stands_still_is_said(node: LocalNode, tmp_path: Path, clock: Clock) -> None:
    codes = {"trainer rank 0": MARKING.format(phase="rollout"), "explorer": TICKING}
    children = [start(node, name, code, tmp_path) for name, code in codes.items()]
    dog = watchdog_of(tmp_path, "rollout.request_timeout_s=10")
    said = watched(dog, children, node, clock, moving=children)
    assert "waits for a rollout: no sample has ended" in said and "the explorer: 3 samples being generated" in said


def test_who_was_stopped_together_with_the_job_blames_nobody(node: LocalNode, tmp_path: Path, clock: Clock) -> None:
    """``scontrol suspend`` stops the supervisor as well: what it did not see was no silence."""
    trainer = start(node, "trainer rank 0", SILENT, tmp_path)
    dog, started = watchdog_of(tmp_path), [Started(trainer, node)]
    for _ in range(3):
        clock.now += 10 * STALL_S
        dog.look(started)
    assert trainer.poll() is None


def test_a_start_and_a_patient_phase_have_time(node: LocalNode, tmp_path: Path, clock: Clock) -> None:
    starting = node.start(Spec("trainer rank 0", ("-c", "import time; time.sleep(600)"), {}, str(tmp_path / "t.log")))
    patient = start(node, "trainer rank 1", SILENT.replace("with ", "with heartbeat.timeout(600), "), tmp_path)
    late = clock.now + 5 * STALL_S
    assert watched(watchdog_of(tmp_path), [starting, patient], node, clock, lambda: clock.now > late) == ""
