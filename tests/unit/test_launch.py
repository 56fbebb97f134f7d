"""Ports, processes and run directories of a job."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.buffer.store import Store
from megarl.config import Config
from megarl.core.errors import ConfigError, FencedError, JobError, MemoryFullError, NonRetryableError
from megarl.core.jobs import JOBS
from megarl.core.metrics import Timeline
from megarl.core.processes.machine import group_members
from megarl.core.schema import Task
from megarl.run.launch import job
from megarl.run.launch.job import MicroBatchBudget
from megarl.run.nodes.node import Allocation, LocalNode, Spec, Started
from megarl.run.nodes.plan import NodeInfo, Plan, plan_job
from megarl.run.nodes.remote import Gathering
from megarl.run.process import ports
from megarl.run.process.interrupt import StopRequest
from megarl.run.process.process import Child
from megarl.run.process.reaper import Reaper
from megarl.run.run_dir import owner as run_dir
from megarl.run.run_dir.owner import next_attempt, own_run_dir
from megarl.run.supervise.supervisor import start_attempt, watch
from megarl.weights.checkpoint.training.manifest import current_attempt
from tests.engine_rows import serving_row
from tests.unit.small_job import config_of, refused


@pytest.fixture
def busy_port() -> Any:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_port_in_use(prepared: Path, busy_port: int) -> None:
    refused(ConfigError, config_of(prepared, f"run.port={busy_port}"), f"port {busy_port}", "in use", "run.port")


def test_engines_that_take_turns_sample_no_step_ahead(prepared: Path) -> None:
    config = config_of(prepared, "rollout.placement=colocated", "sync.max_staleness=1")
    refused(ConfigError, config, "sync.max_staleness=1", "rollout.placement=colocated", "rollout.placement=separate")


def test_a_later_port_of_the_job_in_use(prepared: Path, busy_port: int) -> None:
    refused(ConfigError, config_of(prepared, f"run.port={busy_port - 2}"), "in use", f"run.port={busy_port - 2} takes")


def test_starting_on_a_port_in_use_launches_nothing(prepared: Path, busy_port: int, tmp_path: Path) -> None:
    config = config_of(prepared, f"run.port={busy_port}")
    config = replace(config, run=replace(config.run, dir=str(tmp_path)))
    in_use = pytest.raises(ConfigError, match=f"port {busy_port} .* in use")
    with own_run_dir(tmp_path) as lock, Reaper(lock) as reaper, in_use:
        plan = plan_job(config, [NodeInfo(0, "", "all")])
        start_attempt(config, plan, [LocalNode(reaper, [lock], first_port=config.run.port)], 1, "a key")
    assert not (tmp_path / "logs").exists()
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in read_or_empty(p)]


def test_a_trainer_alone_takes_the_engines_of_an_earlier_start_out(tmp_path: Path) -> None:
    """It looks for engines of programs that are alive, and would wait for a sign of that start's."""
    config = config_of(tmp_path, "run.mode=train")
    store = Store(config.store.url)
    store.begin_attempt(1)
    store.engines.register([serving_row(0, "http://127.0.0.1:1")])
    assert start_attempt(config, Plan(JOBS["train"], ()), [], 1, "key") == []
    assert store.engines.read() == []
    store.close()


def test_port_that_is_none(prepared: Path) -> None:
    refused(ConfigError, config_of(prepared, "run.port=65535"), "run.port=65535", "65535")


def test_host_of_another_machine(prepared: Path) -> None:
    refused(ConfigError, config_of(prepared, "run.host=192.0.2.1"), "run.host=192.0.2.1", "this machine")


def test_chosen_ports_are_free_and_differ() -> None:
    chosen = ports.choose("127.0.0.1", 20, None)
    assert len(set(chosen)) == 20
    assert all(ports.is_free("127.0.0.1", port) for port in chosen)


def test_port_of_a_server_that_has_just_closed_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()
            client.recv(1)
    assert ports.is_free("127.0.0.1", port) and not ports.can_be_held("127.0.0.1", port)
    monkeypatch.setattr(ports, "LOWEST", port)
    monkeypatch.setattr(ports, "LARGEST", port + 1)
    with pytest.raises(ConfigError, match=f"no 1 free ports between {port}"):
        ports.choose("127.0.0.1", 1, None)


def test_port_that_another_job_of_this_user_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both jobs' engines would listen there, and get each other's requests."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    monkeypatch.setattr(ports, "LOWEST", port)
    monkeypatch.setattr(ports, "LARGEST", port + 1)
    with ports.hold("127.0.0.1", port), pytest.raises(ConfigError, match=f"no 1 free ports between {port}"):
        ports.choose("127.0.0.1", 1, None)
    assert ports.choose("127.0.0.1", 1, None) == [port]


CHOOSING = """
from megarl.run.process import ports
print(ports.choose("127.0.0.1", 1, None)[0], flush=True)
input()
"""


def test_port_that_another_process_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs that start together would listen on one port, before a server of either does."""
    with subprocess.Popen(
        [sys.executable, "-c", CHOOSING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin and other.stdout
        port = int(other.stdout.readline())
        monkeypatch.setattr(ports, "LOWEST", port)
        monkeypatch.setattr(ports, "LARGEST", port + 1)
        with pytest.raises(ConfigError, match=f"no 1 free ports between {port}"):
            ports.choose("127.0.0.1", 1, None)
        ports.hold("127.0.0.1", port).close()  # a server can listen there
        other.stdin.write("\n")
    assert ports.choose("127.0.0.1", 1, None) == [port]


OF_ANOTHER_USER = """
import os, socket, sys
os.setuid(65534)
for host in ("127.0.0.1", "0.0.0.0"):
    with socket.socket() as s:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            s.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            s.bind((host, int(sys.argv[1])))
            s.listen()
            print("taken")
        except OSError as error:
            print(error.strerror)
"""


def taken_by_another_user(port: int) -> bool:
    done = subprocess.run(
        [sys.executable, "-c", OF_ANOTHER_USER, str(port)], capture_output=True, text=True, timeout=60, check=True
    )
    assert len(done.stdout.splitlines()) == 2
    return "taken" in done.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="only root can try as another user")
def test_no_other_user_can_listen_where_a_server_of_the_job_will(tmp_path: Path) -> None:
    """Its port is in its command line before it listens; who listened there would be sent the job's key."""
    [port] = ports.choose("127.0.0.1", 1, None)
    assert taken_by_another_user(port), "else nothing is shown below"
    listen = (
        f"import socket, time; s = socket.create_server(('127.0.0.1', {port}), reuse_port=True); print('up', "
        "flush=True); time.sleep(600)"
    )
    with Reaper() as reaper:
        node = LocalNode(reaper)
        for code in ("import time; time.sleep(600)", listen):  # one that has not begun to listen, its successor
            process = node.start(
                Spec("reward host 0", ("-c", code), {}, str(tmp_path / "log"), listens=f"127.0.0.1:{port}")
            )
            assert not taken_by_another_user(port)
            while code == listen and "up" not in process.log.read_text():
                time.sleep(0.02)
            node.stop(["reward host 0"], 0.0)
            assert not taken_by_another_user(port), "while nobody listens, before the next one is started"
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=5)
        node.free_ports(1)  # the next attempt's
        assert taken_by_another_user(port)


def child(tmp_path: Path, code: str, **options: Any) -> Child:
    return Child("engine 0", [sys.executable, "-c", code], {}, tmp_path / "engine_0.log", **options)


def test_last_lines_begin_with_the_exception(tmp_path: Path) -> None:
    """A server that ends in order prints much after the cause of its end."""
    process = child(
        tmp_path,
        "print('hello'); print('(EngineCore) RuntimeError: no such head_dim'); "
        "[print('closing', i) for i in range(90)]",
    )
    assert process.wait(30)
    assert process.tail().splitlines() == [
        "(EngineCore) RuntimeError: no such head_dim",
        "...",
        *(f"closing {i}" for i in range(70, 90)),
    ]


def test_last_lines_are_of_this_process(tmp_path: Path) -> None:
    (tmp_path / "engine_0.log").write_text("ValueError: of an earlier one\n")
    silent = child(tmp_path, "")
    assert silent.wait(30)
    assert silent.tail() == "(it printed nothing)"
    bar = child(tmp_path, "print('10%\\r20%', end='')")
    assert bar.wait(30)
    assert bar.tail().splitlines() == ["10%", "20%"]


def test_a_log_that_is_gone_is_told(tmp_path: Path) -> None:
    """Its folder was deleted; who comes next gets a new one."""
    process = child(tmp_path / "logs", "")
    assert process.wait(30)
    shutil.rmtree(tmp_path / "logs")
    assert process.tail() == "(its log is gone: No such file or directory)"
    assert process.last_output_at() > time.time() - 60
    again = child(tmp_path / "logs", "print('hello')")
    assert again.wait(30) and again.tail() == "hello"


def test_what_a_process_prints_is_shown_to_its_last_byte(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    process = child(tmp_path, "import sys; sys.stdout.write('x' * 300_000 + 'end')", echo=True)
    assert process.wait(30)
    assert capfdbinary.readouterr().err == b"x" * 300_000 + b"end"


def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    """However the parent ends; and it can still print, so that its own end is an orderly one."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom megarl.run.process.process import Child\n"
        'words = \'import signal, sys, time; signal.signal(15, lambda *_: sys.exit(print("told to end"))); print("up", '
        "flush=True); time.sleep(60)'\n"
        f"child = Child('c', [sys.executable, '-c', words], {{}}, Path({str(tmp_path / 'c.log')!r}))\n"
        "while 'up' not in Path(child.log).read_text():\n    time.sleep(0.05)\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/cmdline").exists() and read_or_empty(Path(f"/proc/{pid}/cmdline")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (tmp_path / "c.log").read_text() == "up\ntold to end\n"


BLOCKED = """
import os, sys
from pathlib import Path
from megarl.run.process.process import Child
waits = (
    "import os, signal, threading; from megarl.core.processes.machine import end_after_parent; "
    "signal.signal(15, signal.SIG_IGN); end_after_parent(0.2); "
    "os.fork(); print('up', flush=True); lock = threading.Lock(); lock.acquire(); lock.acquire()"
)
child = Child("trainer rank 0", [sys.executable, "-c", waits], {}, Path(sys.argv[1]))
while child.log.read_text().count("up") < 2:  # itself, and what it has forked
    pass
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_process_that_waits_without_end_ends_after_its_parent(tmp_path: Path) -> None:
    """Whatever it waits for, when nobody is there to kill it."""
    done = subprocess.run([sys.executable, "-c", BLOCKED, str(tmp_path / "log")], stdout=subprocess.PIPE, timeout=60)
    deadline = time.monotonic() + 30
    while group_members(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "the supervisor died" in (tmp_path / "log").read_text()


TRAINER = (
    "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(0.5), sys.exit({status}))); print('up', "
    "flush=True); time.sleep(60)"
)


def watch_stopping(tmp_path: Path, trainer: str, *, engine_dies: bool = False) -> None:
    """``watch`` a job that is asked to stop."""
    codes = {"engine 0": "import time; time.sleep(60)", "trainer rank 0": trainer}
    children = [Child(name, [sys.executable, "-c", code], {}, tmp_path / name) for name, code in codes.items()]
    while "up" not in (tmp_path / "trainer rank 0").read_text():
        time.sleep(0.02)
    request = StopRequest()
    request.count = 1
    if engine_dies:
        children[0].signal(signal.SIGTERM)
        assert children[0].wait(10)
    with Reaper() as reaper:
        node = LocalNode(reaper, children={c.name: c for c in children})
        watch([Started(c, node) for c in children], request, config_of(tmp_path))
    assert all(child.poll() is not None for child in children)


def test_stop_of_a_whole_session_is_a_stop(tmp_path: Path) -> None:
    """Slurm and systemd signal every process: an engine that ends first does not keep the trainer from saving."""
    watch_stopping(tmp_path, TRAINER.format(status=0), engine_dies=True)


def test_stop_before_a_trainer_listens_is_a_stop(tmp_path: Path) -> None:
    watch_stopping(tmp_path, "import time; print('up', flush=True); time.sleep(60)")


WAITING = (
    "import os, signal, sys, time; signal.signal(15, lambda *_: None); print('up', flush=True)\n"
    "while os.path.exists('/proc/{engine}/fd/0'):\n    time.sleep(0.05)\n"
)


def test_an_engine_that_hangs_is_ended_before_the_grace_is_over(tmp_path: Path) -> None:
    """The trainer may wait for it in C, in a weight sync; freed, it saves."""
    engine = child(tmp_path, "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)")
    trainer = Child(
        "trainer rank 0", [sys.executable, "-c", WAITING.format(engine=engine.pid)], {}, tmp_path / "trainer_0.log"
    )
    while "up" not in trainer.log.read_text():
        time.sleep(0.02)
    request = StopRequest()
    request.count = 1
    with Reaper() as reaper:
        node = LocalNode(reaper, children={c.name: c for c in (engine, trainer)})
        watch([Started(c, node) for c in (engine, trainer)], request, config_of(tmp_path, "run.shutdown_grace_s=8"))
    assert trainer.poll() == 0 and engine.poll() == -signal.SIGKILL


def test_trainer_that_fails_while_it_stops_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="trainer rank 0 ended with status 3"):
        watch_stopping(tmp_path, TRAINER.format(status=3))


def test_what_would_come_again_is_told_from_what_may_pass(tmp_path: Path) -> None:
    with pytest.raises(NonRetryableError, match="trainer rank 0 ended with status 4"):
        watch_stopping(tmp_path, TRAINER.format(status=NonRetryableError.STATUS))


def test_a_trainer_that_ran_out_of_memory_is_told_from_others(tmp_path: Path) -> None:
    with pytest.raises(MemoryFullError, match="trainer rank 0 ended with status 5"):
        watch_stopping(tmp_path, TRAINER.format(status=MemoryFullError.STATUS))


def run_attempts(config: Config, lock: int) -> None:
    """The attempts of a job on this machine, after attempt 0."""
    gathering, timeline = Gathering(Allocation(), "", 1.0), Timeline(Path(config.run.dir), "c")
    job.run_attempts(config, {}, Allocation(), gathering, lock, None, "", 0, timeline)


def test_the_engines_of_a_job_leave_the_store_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    store = Store(config.store.url)

    def start(config: Config, plan: object, nodes: object, attempt: int, *_: object) -> list[Started]:
        store.begin_attempt(attempt)
        store.engines.register([serving_row(0, "http://a")])
        return []

    monkeypatch.setattr(job, "start_attempt", start)
    monkeypatch.setattr(job, "watch", lambda *_: None)
    monkeypatch.setattr(job, "fill_store", lambda *_: None)
    with (tmp_path / "lock").open("w") as lock:
        run_attempts(config, lock.fileno())
    assert store.engines.read() == []
    store.close()


def test_a_trainer_without_engines_removes_those_of_a_start_that_was_killed(prepared: Path, tmp_path: Path) -> None:
    """Else they would be engines of a program that is silent. Those of other programs stay."""
    config = config_of(prepared, "run.mode=train")
    config = replace(
        config,
        run=replace(config.run, dir=str(tmp_path)),
        store=replace(config.store, url=f"sqlite:///{tmp_path}/store.db"),
    )
    store, other = (Store(config.store.url, program=program) for program in ("train", "explore-0"))
    for each in (store, other):
        each.engines.register([serving_row(0, f"http://{each.program}", each.program)])
    store.begin_attempt(1)

    class Full(LocalNode):
        def start(self, spec: Spec) -> Any:
            raise JobError("no process can be started")

    with own_run_dir(tmp_path) as lock, Reaper(lock) as reaper, pytest.raises(JobError, match="no process can"):
        start_attempt(config, plan_job(config, [NodeInfo(0, "", "all")]), [Full(reaper, [lock])], 1, "a key")
    assert [engine.url for engine in store.engines.read()] == ["http://explore-0"]
    for each in (store, other):
        each.close()


@pytest.mark.parametrize("restarts", [0, 2])
def test_out_of_memory_is_followed_by_half_the_budget_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    """Other failures in between use up the restarts, with the smaller budget."""
    config = config_of(tmp_path, f"cluster.restarts={restarts}", "trainer.max_tokens_per_micro_batch=4096")
    ends: list[type[JobError]] = [MemoryFullError, *[JobError] * restarts, MemoryFullError]
    budgets: list[int] = []

    def start(config: Config, plan: object, nodes: object, attempt: int, *_: object) -> list[Started]:
        budgets.append(config.trainer.max_tokens_per_micro_batch)
        return []

    def end(*_: object) -> None:
        raise ends.pop(0)("it ended")

    monkeypatch.setattr(job, "start_attempt", start)
    monkeypatch.setattr(job, "watch", end)
    monkeypatch.setattr(job, "fill_store", lambda *_: None)
    monkeypatch.setattr(job, "MicroBatchBudget", lambda: MicroBatchBudget(lambda config: None))
    with (tmp_path / "lock").open("w") as lock, pytest.raises(NonRetryableError, match=r"again, with .*4096 -> 2048"):
        run_attempts(config, lock.fileno())
    assert budgets == [4096, *[2048] * (restarts + 1)] and ends == []


@pytest.mark.parametrize(("error", "starts"), [(JobError, 3), (NonRetryableError, 1)])
def test_only_what_may_pass_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[JobError], starts: int
) -> None:
    config = config_of(tmp_path, "cluster.restarts=2")
    attempts: list[int] = []

    def start(config: Config, plan: object, nodes: object, attempt: int, *_: object) -> list[Started]:
        attempts.append(attempt)
        return []

    def end(*_: object) -> None:
        raise error("it ended")

    monkeypatch.setattr(job, "start_attempt", start)
    monkeypatch.setattr(job, "watch", end)
    monkeypatch.setattr(job, "fill_store", lambda *_: None)
    with (tmp_path / "lock").open("w") as lock, pytest.raises(error, match="it ended"):
        run_attempts(config, lock.fileno())
    assert attempts == list(range(1, starts + 1))


def test_a_job_that_was_fenced_takes_no_further_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes fail, as a fenced attempt's do. To start again would fence the attempt that has taken over."""
    config = config_of(tmp_path, "cluster.restarts=2")

    def fail(*_: object) -> None:
        next_attempt(tmp_path)  # another head
        raise JobError("the store refuses what comes of attempt 1")

    monkeypatch.setattr(job, "start_attempt", lambda *_, **__: [])
    monkeypatch.setattr(job, "watch", fail)
    monkeypatch.setattr(job, "fill_store", lambda *_: None)
    monkeypatch.setattr(
        job, "set_aside_damaged", lambda *_, **__: pytest.fail("the checkpoints are the other attempt's now")
    )
    with (
        (tmp_path / "lock").open("w") as lock,
        pytest.raises(FencedError, match=r"attempt 2 .*has begun.* attempt 1 ends"),
    ):
        run_attempts(config, lock.fileno())
    assert current_attempt(tmp_path) == 2


def test_a_job_that_is_fenced_before_its_first_attempt_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was requeued while it checked its inputs: the later head has counted already."""

    def check(*_: object, **__: object) -> dict[str, list[Task]]:
        next_attempt(tmp_path)
        return {}

    monkeypatch.setattr(job, "check", check)
    monkeypatch.setattr(job, "start_attempt", lambda *_, **__: pytest.fail("it would fence the other"))
    with pytest.raises(FencedError, match="attempt 1 .*has begun"):
        job.run(config_of(tmp_path))
    assert current_attempt(tmp_path) == 1


def read_or_empty(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.mark.parametrize("place", ["/proc/nothing", "file"])
def test_run_directory_that_cannot_be_made(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run.dir=.*cannot be made") as raised:
        job.run(config_of(tmp_path / place))
    assert str(tmp_path / place) in str(raised.value)


def test_run_directory_in_use(tmp_path: Path) -> None:
    """By another process, as it is in life: a lock of one's own process would prove less."""
    hold = (
        "import sys\nfrom pathlib import Path\nfrom megarl.run.run_dir.owner import own_run_dir\n"
        f"with own_run_dir(Path({str(tmp_path)!r})):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError) as raised:
            job.run(config_of(tmp_path))
        for word in (str(tmp_path), "in use", str(holder.pid), "run.name"):
            assert word in str(raised.value)
        holder.stdin.close()
        holder.wait(30)
    with own_run_dir(tmp_path):  # free again
        assert (tmp_path / "lock").read_text().split()[0] == str(os.getpid())


def test_a_later_process_of_the_same_number_does_not_hold_the_directory(tmp_path: Path) -> None:
    with own_run_dir(tmp_path):
        pid, *_, started = (tmp_path / "lock").read_text().split(" ")
    assert run_dir.is_alive(pid, started) and run_dir.is_alive(pid, "")
    assert not run_dir.is_alive(pid, str(int(started) + 1))
    assert not run_dir.is_alive("\u00b2", "") and not run_dir.is_alive("\u0663", "")


ORPHANS = """
import os, signal, sys
from pathlib import Path
from megarl.run.process.process import Child
from megarl.run.run_dir.owner import own_run_dir
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
with own_run_dir(Path(sys.argv[1])) as lock:
    child = Child("trainer rank 0", [sys.executable, "-c", deaf], {}, Path(sys.argv[1], "trainer_0.log"), keep=[lock])
    while "up" not in child.log.read_text():
        pass
    print(child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)  # and there is no reaper
"""


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[int]:
    """A process of a job whose supervisor and reaper were killed: it holds the run directory's lock and does not end by
    itself."""
    done = subprocess.run([sys.executable, "-c", ORPHANS, str(tmp_path)], stdout=subprocess.PIPE, timeout=60)
    yield int(done.stdout)
    with suppress(ProcessLookupError):
        os.kill(int(done.stdout), signal.SIGKILL)


def test_a_start_ends_what_a_killed_supervisor_and_its_guard_left(
    tmp_path: Path, orphan: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_dir, "ORPHANS_S", 0.3)
    waiter = "import sys, time; file = open(sys.argv[1], 'a+'); print('open', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", waiter, str(tmp_path / "lock")], stdout=subprocess.PIPE) as other:
        try:
            assert (
                other.stdout is not None and other.stdout.readline()
            )  # it has the file open, and does not hold the lock
            with own_run_dir(tmp_path):
                assert not group_members(orphan)
                assert other.poll() is None
        finally:
            other.kill()
    assert f"process {orphan}" in caplog.text


BESIDE_ORPHANS = """
import os, sys, time
from pathlib import Path
from megarl.run.run_dir import owner as run_dir
run_dir.ORPHANS_S = 0.3
started = os.fork()
if not started:
    with run_dir.own_run_dir(Path(sys.argv[1])):
        if not os.fork():
            time.sleep(600)  # a process of a library, in the group of whoever started the job
        os.kill(os.getpid(), 9)
os.waitpid(started, 0)
with run_dir.own_run_dir(Path(sys.argv[1])):
    print("started again", flush=True)
"""


def test_a_start_ends_no_process_beside_an_orphan(tmp_path: Path) -> None:
    """An orphan that leads no session is in the group of the shell, and of the start that ends it."""
    done = subprocess.run(
        [sys.executable, "-c", BESIDE_ORPHANS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )
    assert (done.returncode, done.stdout) == (0, "started again\n"), done.stderr


def test_a_start_names_what_it_may_not_end(tmp_path: Path, orphan: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor ran on another machine, so it may live; a process here holds the lock."""
    monkeypatch.setattr(run_dir, "ORPHANS_S", 0.3)
    text = (tmp_path / "lock").read_text().split(" ")
    (tmp_path / "lock").write_text(" ".join([text[0], "another-machine", ""]))
    with (
        pytest.raises(ConfigError, match=f"process {text[0]} on another-machine.*held here by process {orphan}"),
        own_run_dir(tmp_path),
    ):
        pass
    assert group_members(orphan)


def test_attempts_are_counted(tmp_path: Path) -> None:
    assert [next_attempt(tmp_path) for _ in range(3)] == [1, 2, 3]


def test_a_number_is_taken_once(tmp_path: Path) -> None:
    """Two heads of one run may count at the same time."""
    with ThreadPoolExecutor(8) as pool:
        taken = [*pool.map(lambda _: next_attempt(tmp_path), range(80))]
    assert sorted(taken) == list(range(1, 81))


def test_who_was_fenced_takes_no_number(tmp_path: Path) -> None:
    assert next_attempt(tmp_path, 0) == 1
    assert next_attempt(tmp_path, 1) == 2
    with pytest.raises(FencedError, match=rf"attempt 2 of the run in {tmp_path} has begun; attempt 1 ends"):
        next_attempt(tmp_path, 1)
    assert current_attempt(tmp_path) == 2
