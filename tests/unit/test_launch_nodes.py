"""Several nodes: what the launcher says of them, who runs where, and how their supervisors talk."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.engine import make_url

from megarl.buffer.store import VARIABLE
from megarl.config import Config
from megarl.core.errors import ConfigError, FencedError, JobError
from megarl.core.jobs import ProcessKind
from megarl.run.launch.job import healthy_nodes
from megarl.run.nodes import gpu_state, health, node_agent, remote
from megarl.run.nodes.node import Allocation, LocalNode, Spec, Started, find
from megarl.run.nodes.node_agent import Channel, ChannelClosed, greet
from megarl.run.nodes.plan import NodeInfo, plan_job, table
from megarl.run.nodes.remote import Gathering, RemoteNode, RemoteProcess
from megarl.run.postgres import url_of
from megarl.run.process import ports
from megarl.run.process.interrupt import StopRequest
from megarl.run.process.reaper import Reaper
from megarl.run.run_dir.owner import next_attempt
from megarl.run.supervise.process_specs import Addresses, specs
from megarl.run.supervise.supervisor import choose_addresses, watch
from megarl.weights.checkpoint.training.manifest import current_attempt
from tests.unit.small_job import config_of, nodes_of_engines, nodes_of_ranks

KEY = "a secret of enough characters"
STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURMD_NODENAME": "n2",
    "MEGARL_JOB_KEY": KEY,
}


# ---------------------------------------------------------------- what a launcher says


def test_one_machine_is_an_allocation() -> None:
    assert find({}) == Allocation(name=os.uname().nodename)


def test_a_step_of_slurm() -> None:
    assert find(STEP) == Allocation(1, 2, "10.0.0.1", 20017, "n2", "all", "slurm")
    head = find(
        {
            **STEP,
            "SLURM_PROCID": "0",
            "MEGARL_HEAD": "10.0.0.9",
            "MEGARL_HEAD_PORT": "99",
            "MEGARL_ROLE": "trainer",
            "MEGARL_NODES": "3",
        }
    )
    assert head == Allocation(0, 3, "10.0.0.9", 99, "n2", "trainer", "slurm")
    assert head.is_head


def test_torchrun() -> None:
    env = {
        "TORCHELASTIC_RUN_ID": "x",
        "LOCAL_WORLD_SIZE": "1",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "29500",
        "MEGARL_JOB_KEY": KEY,
    }
    assert find(env) == Allocation(1, 2, "h", 29501, os.uname().nodename, "all", "torchrun")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8"}, "--ntasks-per-node=1"),
        ({"MEGARL_JOB_KEY": "short"}, "MEGARL_JOB_KEY"),
        ({"MEGARL_HEAD_PORT": "http"}, "MEGARL_HEAD_PORT=http"),
        ({"MEGARL_HEAD_PORT": "8²"}, "MEGARL_HEAD_PORT=8²"),
        ({"MEGARL_ROLE": "critic"}, "MEGARL_ROLE=critic"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find({**STEP, **change})


def test_a_batch_script_without_srun_is_refused() -> None:
    with pytest.raises(ConfigError, match="srun --ntasks-per-node=1"):
        find({"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2"})


@pytest.mark.parametrize("name", ["SLURM_STEP_ID", "SLURM_STEPID"])
def test_the_shell_of_an_allocation_is_no_step(name: str) -> None:
    """salloc starts it as a step of one task on the first node, launched from the login node."""
    shell = {**STEP, name: "4294967290", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    with pytest.raises(ConfigError, match="this Slurm job has 2 nodes, but megarl was started on one of them"):
        find(shell)
    assert find({**shell, "SLURM_JOB_NUM_NODES": "1"}) == Allocation(name="n2", launcher="slurm")


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"])
@pytest.mark.parametrize("value", [None, "", "4(x2)"])
def test_a_variable_of_slurm_that_is_no_number_is_named(name: str, value: str | None) -> None:
    env = {key: given for key, given in {**STEP, name: value}.items() if given is not None}
    with pytest.raises(ConfigError, match=rf"\${name} is '.*', which is no number"):
        find(env)


# ---------------------------------------------------------------- who runs where


def nodes(count: int, roles: str = "") -> list[NodeInfo]:
    names: dict[str, Any] = {"t": "trainer", "r": "rollout", "a": "all"}
    return [NodeInfo(i, f"n{i}", names[roles[i] if roles else "a"]) for i in range(count)]


@cache
def base() -> Config:
    return config_of(Path("x"), "parallel=dp2")


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_every_process_has_its_node(count: int, each: int, replicas: int, span: int) -> None:
    rollout = replace(base().rollout, replicas=replicas, nodes=span, tp=span)
    config = replace(base(), parallel=replace(base().parallel, dp=count * each), rollout=rollout)
    if span > count:
        with pytest.raises(ConfigError, match="rollout.nodes"):
            plan_job(config, nodes(count))
        return
    plan = plan_job(config, nodes(count))
    ranks, engines = nodes_of_ranks(plan), nodes_of_engines(plan)
    assert [ranks.count(node) for node in range(count)] == [each] * count
    assert list(ranks) == sorted(ranks)  # blocks: neighbours in a tensor-parallel group share a node
    addresses = Addresses("n:1", "n:2", ("n:3",) * replicas, ("n:4" * (span > 1),) * replicas, ("n:5",) * (count - 1))
    started = [spec.env for _, spec in specs(config, plan, addresses, {}, Path("logs"))]
    assert [env["LOCAL_RANK"] for env in started if "RANK" in env] == [str(i) for i in range(each)] * count
    assert len(engines) == replicas and all(len(set(engine)) == span for engine in engines)
    used = [sum(engine[0] == node for engine in engines) for node in {engine[0] for engine in engines}]
    assert max(used) - min(used) <= 1
    text = table(plan, nodes(count))
    assert len(text.splitlines()) == count and "explorer" in text.splitlines()[0]


def test_every_process_of_a_gpu_job_has_its_own() -> None:
    config = config_of(Path("x"), "parallel=tp2", "rollout.replicas=2", "rollout.tp=2")
    on_gpus = replace(config, parallel=replace(config.parallel, backend="nccl"))
    node = NodeInfo(0, "n0", "all", 6)
    plan = plan_job(on_gpus, [node])
    assert [engine.gpus for engine in plan.of(ProcessKind.ENGINE)] == [(2, 3), (4, 5)]
    assert [rank.gpus for rank in plan.of(ProcessKind.TRAINER)] == [(0, 1)] * 2
    assert table(plan, [node]) == (
        "node 0 n0: trainer ranks 0-1 on GPUs 0-1, engines 0-1 on GPUs 2-5, explorer and reward workers"
    )
    with pytest.raises(ConfigError, match="2 trainer ranks and 2 engines of 2 GPUs need 6 GPUs .* but the job has 5"):
        plan_job(on_gpus, [NodeInfo(0, "n0", "all", 5)])
    plan_job(config, [NodeInfo(0, "n0", "all", 0)])


def test_a_colocated_job_needs_the_larger_of_ranks_and_workers() -> None:
    config = config_of(Path("x"), "parallel=tp2", "rollout.replicas=3", "rollout.placement=colocated")
    on_gpus = replace(config, parallel=replace(config.parallel, backend="nccl"))
    plan = plan_job(on_gpus, [NodeInfo(0, "n0", "all", 3)])
    assert [engine.gpus for engine in plan.of(ProcessKind.ENGINE)] == [(0,), (1,), (2,)]
    assert [rank.gpus for rank in plan.of(ProcessKind.TRAINER)] == [(0, 1)] * 2
    with pytest.raises(ConfigError, match="2 trainer ranks and 3 engines of 1 GPUs need 3 GPUs .* but the job has 2"):
        plan_job(on_gpus, [NodeInfo(0, "n0", "all", 2)])
    with pytest.raises(ConfigError, match="take turns: rollout.placement=colocated"):
        plan_job(
            replace(on_gpus, rollout=replace(on_gpus.rollout, placement="separate")), [NodeInfo(0, "n0", "all", 3)]
        )


def test_components_of_a_heterogeneous_job() -> None:
    plan = plan_job(config_of(Path("x"), "parallel=dp2", "rollout.replicas=3"), nodes(4, "ttrr"))
    assert nodes_of_ranks(plan) == (0, 1)
    assert nodes_of_engines(plan) == ((2,), (3,), (2,))
    assert [explorer.node for explorer in plan.of(ProcessKind.EXPLORER)] == [0]
    assert [host.node for host in plan.of(ProcessKind.REWARD_HOST)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("count", "roles", "overrides", "words"),
    [
        (3, "", ["parallel=dp2"], "2 ranks do not spread evenly over 3 trainer nodes"),
        (2, "rt", [], "node 0 must be a trainer node"),
        (2, "tt", [], "rollout.nodes=1"),
        (2, "", ["rollout.nodes=2", "parallel=dp2"], "rollout.nodes=2 must divide the 1 workers"),
    ],
)
def test_what_does_not_spread_is_refused(count: int, roles: str, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_job(config_of(Path("x"), *overrides), nodes(count, roles))


def test_the_port_of_an_engine_that_starts_later_is_held() -> None:
    """Another job of this user took it meanwhile, for a server of its own."""
    config = config_of(Path("x"), "rollout.replicas=2", "rollout.placement=colocated")
    with Reaper() as reaper:
        node = LocalNode(reaper)
        addresses = choose_addresses(plan_job(config, [NodeInfo.of(node)]), {0: node})
        for address in addresses.engines:
            host, _, port = address.rpartition(":")
            assert not ports.is_free(host, int(port))
            with socket.socket() as server:  # as an engine's
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                server.bind((host, int(port)))
        assert ports.is_free("127.0.0.1", int(addresses.rendezvous.rpartition(":")[2]))
        node.free_ports(0)
        assert ports.is_free(host, int(port))


# ---------------------------------------------------------------- who may speak


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def test_only_who_knows_the_key_is_heard() -> None:
    here, there = pair()
    heard: list[object] = []

    def stranger() -> None:
        with pytest.raises(ChannelClosed, match="another key"):
            greet(there, "another key of that length", serving=False, silence_s=5)
        heard.append("refused")

    thread = threading.Thread(target=stranger)
    thread.start()
    with pytest.raises(ChannelClosed):
        greet(here, KEY, serving=True, silence_s=5)
    thread.join(10)
    assert heard == ["refused"]


def test_a_proof_cannot_be_played_back() -> None:
    """Who returns the challenge and the proof that it was sent, as a mirror does, does not know the key."""
    here, there = pair()
    mirror = Channel(there, 5)

    def reflect() -> None:
        for _ in range(2):
            mirror.send(**mirror.receive())

    thread = threading.Thread(target=reflect)
    thread.start()
    with pytest.raises(ChannelClosed, match="another key"):
        greet(here, KEY, serving=True, silence_s=5)
    thread.join(10)


@pytest.mark.parametrize(
    "sent",
    [
        b"[" * 3000 + b"\n",
        b'{"challenge": ' + b"[" * 2000 + b"\n",
        b'{"challenge": "' + b"x" * 100_000,
        b'{"challenge": "\\ud800"}\n{"proof": "\\ud800\\u00e9"}\n',
        b"\xff\xfe\n",
        b"[1]\n",
    ],
    ids=["nested", "nested within", "huge", "surrogates", "no text", "no object"],
)
def test_an_unauthenticated_peer_is_refused_whatever_it_sends(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Without an unhandled exception, and without keeping more than a few KiB of it."""
    [port] = ports.choose("127.0.0.1", 1, None)
    with Gathering(Allocation(0, 2, "127.0.0.1", port), KEY, 5) as gathering, unhandled() as errors:
        gathering.expected.clear()  # else its end waits for them
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.settimeout(15)
            stranger.sendall(sent)
            with suppress(ConnectionResetError):
                while stranger.recv(4096):  # the head closes the connection while this side keeps it open
                    pass
        until(lambda: "wanted to join the job" in caplog.text)
        assert not errors


@pytest.mark.parametrize(
    "message",
    [
        {"event": "beat", "heartbeats": {"p": [1, 2]}},
        {"event": "beat", "heartbeats": 3},
        {"event": "ended", "name": "p"},
        {"event": "answer"},
        {"event": "beat", "heartbeats": {"p": ["x"] * 6}},
    ],
)
def test_a_malformed_message_of_a_node_is_its_fault(message: dict[str, Any], tmp_path: Path) -> None:
    """And not the silent end of the thread that reads it."""
    here, there = pair()
    facts = asdict(health.facts("n1", "127.0.0.1"))
    with unhandled() as errors:
        node = RemoteNode(Channel(here, 60), {"rank": 1, "role": "all", "facts": facts})
        process = node.processes["p"] = RemoteProcess(spec("p", "", tmp_path), node)
        Channel(there, 60).send(**message)
        until(lambda: node.fault() is not None)
        assert "malformed message" in str(node.fault()) and process.poll() == 1 and "malformed" in process.tail()
    assert not errors


def test_a_connection_that_cannot_be_accepted_closes_no_door(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "ACCEPT_AGAIN_S", 0.05)
    [port] = ports.choose("127.0.0.1", 1, None)
    gathering = Gathering(Allocation(0, 2, "127.0.0.1", port), KEY, 5)
    door = gathering.door
    assert door is not None

    class Failing:
        failures = 2

        def accept(self) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError(24, "Too many open files")
            return door.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(door, name)

    gathering.door = Failing()  # type: ignore[assignment]
    gathering.expected.clear()
    with gathering, socket.create_connection(("127.0.0.1", port)) as node:
        node.settimeout(30)
        assert b"challenge" in node.recv(4096), "the door is open"
        assert "Too many open files" in caplog.text


@contextmanager
def unhandled() -> Iterator[list[str]]:
    """Exceptions that ended a thread."""
    found: list[str] = []
    before, threading.excepthook = threading.excepthook, lambda hook: found.append(str(hook.exc_value))
    try:
        yield found
    finally:
        threading.excepthook = before


def test_silence_is_an_end() -> None:
    here, _there = pair()
    with pytest.raises(ChannelClosed, match="silent"):
        Channel(here, 0.2).receive()


# ---------------------------------------------------------------- a head and a node, in two processes


@contextmanager
def two_nodes(tmp_path: Path) -> Iterator[tuple[Any, LocalNode, Path]]:
    """A real supervisor of node 1, in a process of its own, and the head's view of it."""
    [port] = ports.choose("127.0.0.1", 1, None)
    config = config_of(tmp_path)
    allocation = Allocation(0, 2, "127.0.0.1", port, "n0")
    code = (
        "import sys\nfrom pathlib import Path\nfrom dataclasses import replace\n"
        "from megarl.run.nodes import node_agent as agent\n"
        "from megarl.run.nodes.node import Allocation\nfrom tests.unit.small_job import config_of\n"
        f"sys.exit(agent.serve(Allocation(1, 2, '127.0.0.1', {port}, 'n1'), config_of(Path({str(tmp_path)!r}), "
        f"'cluster.stall_s=2'), {KEY!r}))"
    )
    with Reaper() as reaper, Gathering(allocation, KEY, config.cluster.heartbeat_s) as gathering:
        here = LocalNode(reaper, name="n0")
        supervisor = here.start(
            Spec(
                "supervisor", ("-c", code), {"PYTHONPATH": str(Path(__file__).parents[2])}, str(tmp_path / "agent.log")
            )
        )
        try:
            (node,) = gathering.wait(240)
            yield node, here, tmp_path
        finally:
            if supervisor.poll() is None:
                for other in gathering.nodes.values():
                    other.end()
            assert supervisor.wait(120), "the node's supervisor did not end with the job"


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, LocalNode, Path]]:
    with two_nodes(tmp_path_factory.mktemp("run")) as made:
        yield made


def spec(name: str, code: str, folder: Path) -> Spec:
    return Spec(name, ("-c", code), {"GIVEN": "here"}, str(folder / f"{name}.log"))


PRINT_GPUS = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"


@pytest.mark.parametrize("there", [False, True])
def test_a_process_sees_its_gpus_alone(joined: Any, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this node's, which the launcher gave, by their names there."""
    node, here, folder = joined
    monkeypatch.setattr(here, "visible", ["3", "5", "GPU-8932"])
    process = (node if there else here).start(
        replace(spec(f"gpus {there}", PRINT_GPUS, folder), gpus=() if there else (0, 2))
    )
    deadline = time.monotonic() + 20
    while process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert Path(process.log).read_text() == ("''\n" if there else "'3,GPU-8932'\n")
    assert (here.gpus, node.gpus) == (3, len(gpu_state.visible()))


@pytest.mark.parametrize("sent", ["megarl", "other"])
def test_a_database_password_is_not_sent_to_other_nodes(joined: Any, sent: str) -> None:
    """That of the job's own server is made again from the key, which the node has; of another one the node has the URL
    itself."""
    node, _, folder = joined
    url = url_of(KEY, "127.0.0.1", 5432).replace("/megarl?", f"/{sent}?")
    said: list[bytes] = []
    send = node.channel.socket.sendall
    with pytest.MonkeyPatch.context() as patch:
        watched = type("Watched", (), {"sendall": lambda self, data: (said.append(data), send(data))})()
        patch.setattr(node.channel, "socket", watched)
        start = spec(f"store {sent}", f"import os; print(os.environ[{VARIABLE!r}])", folder)
        start = replace(start, env={**start.env, VARIABLE: url})
        if sent == "other":
            with pytest.raises(JobError, match=f"{VARIABLE} is set on node 0 only: export it on every node"):
                node.start(start)
        else:
            process = node.start(start)
            deadline = time.monotonic() + 20
            while process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert process.log.read_text().strip() == url
    password = make_url(url).password
    assert password and said and not any(password.encode() in data for data in said)


def test_processes_of_another_node(joined: Any) -> None:
    node, here, folder = joined
    assert node.facts.versions == health.facts("n0", "127.0.0.1").versions
    assert len(set(node.free_ports(5))) == 5
    failing = node.start(spec("failing", "import os, sys; print(os.environ['GIVEN']); sys.exit(3)", folder))
    lasting = node.start(spec("trainer rank 0", "import time; print('up', flush=True); time.sleep(60)", folder))
    until(lambda: failing.poll() is not None)
    assert (failing.poll(), failing.tail()) == (3, "here")
    assert lasting.poll() is None
    with pytest.raises(JobError, match="engine 0 ended with status 3"):
        failing.name = "engine 0"
        watch([Started(failing, node), Started(lasting, node)], node.stop_request, config_of(folder))
    until(lambda: lasting.poll() is not None)  # all of it is ended


def test_an_engine_of_another_node_leaves_no_temporary_files(joined: Any) -> None:
    node, here, folder = joined
    code = "import tempfile, time; print(tempfile.mkdtemp(), flush=True); time.sleep(600)"
    process = node.start(spec("engine 7", code, folder))
    until(lambda: "\n" in process.log.read_text())
    own = Path(process.log.read_text().strip()).parent
    assert own.is_dir() and own.name.startswith("megarl-")
    node.stop([process.name], 0.0)
    assert not own.exists()


def test_a_rank_of_another_node_that_is_stopped_is_named(joined: Any) -> None:
    """Its node tells that it does not move, and its stacks; those of one that sleeps are told too."""
    node, here, folder = joined
    code = (
        "import time\nfrom megarl.core.processes import heartbeat\nheartbeat.begin()\n"
        "with heartbeat.phase('update', 6):\n    time.sleep(600)\n"
    )
    stopped, asleep = (node.start(spec(f"trainer rank {i}", code, folder)) for i in range(2))
    until(lambda: stopped.heartbeat().phase == asleep.heartbeat().phase == "update")
    stopped.signal(signal.SIGSTOP)
    config = config_of(folder, "cluster.stall_s=2")
    with pytest.raises(JobError) as raised:
        watch([Started(stopped, node), Started(asleep, node)], StopRequest(), config, None)
    said = str(raised.value)
    assert re.search(r"trainer rank 0 \| update, step 7 \| \d+ s +\| stopped by a signal \(state T\)", said), said
    assert re.search(r"trainer rank 1 \| update, step 7 \| \d+ s +\| in no collective: .*<string>:5", said), said
    assert "likely: trainer rank 0 is to blame: stopped by a signal" in said
    until(lambda: stopped.poll() == asleep.poll() == -signal.SIGKILL)


def test_a_lost_node_is_named_and_ends_what_it_runs(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as (node, here, folder):
        _lose(node, here, folder)


def _lose(node: Any, here: LocalNode, folder: Path) -> None:
    alive = folder / "alive"
    code = f"import os, time, pathlib\npathlib.Path({str(alive)!r}).write_text(f'{{os.getpid()}} ')\ntime.sleep(600)"
    process = node.start(spec("engine 0", code, folder))
    until(lambda: alive.is_file() and alive.read_text().endswith(" "))
    assert lives(int(alive.read_text()))
    here.children["supervisor"].signal(9)
    until(lambda: process.poll() is not None)
    assert "its node n1 is lost" in process.tail()
    assert node.fault() is not None
    until(lambda: not lives(int(alive.read_text())))  # PR_SET_PDEATHSIG, or the node's reaper


def test_a_node_that_is_not_well_is_named(joined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node, _, folder = joined
    allocation = Allocation(0, 2, "127.0.0.1", 1, "n0")
    config = config_of(folder)
    assert healthy_nodes(config, allocation, [node]) == [node]
    monkeypatch.setattr(node, "facts", replace(node.facts, versions={**node.facts.versions, "torch": "1.0"}, clock=0.0))
    with pytest.raises(JobError, match=r"node n1: its clock is .* torch 1.0, but"):
        healthy_nodes(config, allocation, [node])
    without = replace(config, cluster=replace(config.cluster, exclude_unhealthy=True))
    assert healthy_nodes(without, allocation, [node]) == []


def test_a_run_directory_that_is_not_shared_is_told(joined: Any) -> None:
    node, _, folder = joined
    health.write_token(folder, "one")
    assert node.check_run_dir(str(folder), "one") is None
    assert "file system that all nodes share" in str(node.check_run_dir(str(folder / "other"), "one"))
    assert "file system that all nodes share" in str(node.check_run_dir(str(folder), "two"))


@pytest.mark.timeout(60)
def test_a_stop_ends_the_wait_for_nodes() -> None:
    [port] = ports.choose("127.0.0.1", 1, None)
    with Gathering(Allocation(0, 3, "127.0.0.1", port), KEY, 5) as gathering:
        with pytest.raises(KeyboardInterrupt):
            gathering.wait(600, lambda: True)
        gathering.expected.clear()  # else its end waits for them too


def test_nodes_that_do_not_come_are_counted(tmp_path: Path) -> None:
    [port] = ports.choose("127.0.0.1", 1, None)
    with Gathering(Allocation(0, 3, "127.0.0.1", port), KEY, 5) as gathering:
        with pytest.raises(JobError, match="nodes 1, 2 of 3 did not come"):
            gathering.wait(0.2)
        gathering.expected.clear()  # else its end waits for them too


def test_a_head_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path, "cluster.connect_timeout_s=0.1")
    with pytest.raises(JobError, match="node 0 at 127.0.0.1:1 cannot be reached"):
        node_agent.serve(Allocation(1, 2, "127.0.0.1", 1), config, KEY)


def test_a_later_attempt_ends_this_one(tmp_path: Path) -> None:

    with Reaper() as reaper:
        here = LocalNode(reaper)
        process = here.start(spec("trainer rank 0", "import time; time.sleep(60)", tmp_path))
        attempt = next_attempt(tmp_path)
        next_attempt(tmp_path)
        assert current_attempt(tmp_path) == attempt + 1
        with pytest.raises(FencedError, match="attempt 2 of the run in .* has begun"):
            watch([Started(process, here)], StopRequest(), config_of(tmp_path), attempt)
        assert process.poll() is not None


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def until(what: Any) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)
