"""Jobs over several nodes without Slurm: under torchrun, and with nodes that are cut off one after the other."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from megarl.run.nodes.node import Allocation
from megarl.run.process import ports
from megarl.run.report.goodput import account_of
from tests.system import commands
from tests.system.jobs import START_S, TINY, end_with_the_tests, last_of_each
from tests.system.networks import Networks, possible

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(3 * START_S)]
KEY = {"MEGARL_JOB_KEY": "a key of the tests, long enough"}
DPO = (
    *(
        "experiment=dpo",
        "parallel=dp2",
        "store=postgres",
        "trainer.tasks_per_step=16",
        "trainer.checkpoint_interval=1",
        "trainer.eval_interval=0",
    ),
    *(setting for setting in TINY if setting.startswith(("trainer.warm_start", "taskset"))),
)

ONLINE = last_of_each(
    [*TINY, "parallel=dp2", "store=postgres", "trainer.checkpoint_interval=1", "trainer.eval_interval=0"]
)


class Nodes:
    """A supervisor on each node, as processes of this machine."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.job: Sequence[str] = DPO
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes] | commands.Command] = []

    def start(self, argv: Sequence[str], *settings: str, fork: bool = False) -> None:
        """Start ``python ARGV train ...``; ``fork``: from a process that has its imports."""
        argv = [*argv, "train", *self.job, *settings, f"run.dir={self.run_dir}"]
        env = {**os.environ, **KEY}
        with self._output(len(self._processes)).open("wb") as output:
            self._processes.append(
                (commands.start(argv, env, output.fileno()) if fork else None)
                or subprocess.Popen(
                    [sys.executable, *argv], env=env, stdout=output, stderr=output, preexec_fn=end_with_the_tests
                )
            )

    def start_in(self, networks: Networks, names: Sequence[str], *settings: str, roles: Sequence[str] = ()) -> None:
        """Start a supervisor in each namespace, with the variables of torchrun, from a process that has its imports."""
        for rank, name in enumerate(names):
            env = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "1", "RANK": str(rank)}
            env |= {"WORLD_SIZE": str(len(names)), "MASTER_ADDR": networks.address(0), "MASTER_PORT": "29500"}
            env |= {"MEGARL_ROLE": roles[rank]} if roles else {}
            self.start([*networks.inside_python(name, env), "megarl"], *settings, fork=True)

    def wait(self, node: int) -> int:
        return self._processes[node].wait(START_S)

    def signal(self, node: int, number: int) -> None:
        _send(self._processes[node], number)

    def said(self, node: int = 0) -> str:
        return self._output(node).read_text()

    def steps(self) -> list[int]:
        path = self.run_dir / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        return [record["step"] for record in records if "actor/loss" in record]

    def until(self, what: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + START_S
        while not what():
            assert self._processes[0].poll() is None and time.monotonic() < deadline, f"no {name}: {self.said()}"
            time.sleep(0.1)

    def pids(self, module: str) -> dict[str, int]:
        """The job's processes that run a module, not their forks: rank -> pid."""
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                words = process.cmdline()
                parent = process.parent()
                if module not in words or str(self.run_dir) not in " ".join(words):
                    continue
                if parent is None or module not in parent.cmdline():
                    found[process.environ().get("RANK", "")] = process.pid
        return found

    def end(self) -> None:
        for process in self._processes:
            _send(process, signal.SIGTERM)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            _send(process, signal.SIGKILL)

    def _output(self, node: int) -> Path:
        return self._folder / f"node{node}.log"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.end()


FIND = "from megarl.run.nodes.node import find; print(find(), flush=True)"


def torchrun(rank: int, port: int) -> list[str]:
    """Arguments of Python before a program that torchrun starts on each of two nodes."""
    where = f"--nnodes=2 --node-rank={rank} --nproc-per-node=1 --master-addr=127.0.0.1 --master-port={port}"
    return ["-m", "torch.distributed.run", *where.split(), "--no-python"]


def test_torchrun_gives_the_nodes_of_a_job(tmp_path: Path) -> None:
    """What the job below finds in variables that are written by hand; in ``make soak`` torchrun starts a job."""
    port = ports.choose("127.0.0.1", 1, None)[0]
    started = []
    for rank in range(2):
        argv = [*torchrun(rank, port), sys.executable, "-c", FIND]
        with (tmp_path / f"node{rank}.log").open("wb") as output:
            env = {**os.environ, **KEY}
            started.append(
                commands.start(argv, env, output.fileno())
                or subprocess.Popen([sys.executable, *argv], env=env, stdout=output, stderr=output)
            )
    said = [process.wait(START_S) or (tmp_path / f"node{i}.log").read_text() for i, process in enumerate(started)]
    for rank in range(2):
        name = os.uname().nodename
        assert str(Allocation(rank, 2, "127.0.0.1", port + 1, name, "all", "torchrun")) in str(said[rank]), said


@pytest.mark.soak
def test_torchrun_starts_the_supervisors(nodes: Nodes) -> None:
    port = ports.choose("127.0.0.1", 1, None)[0]
    for rank in range(2):
        nodes.start([*torchrun(rank, port), sys.executable, "-m", "megarl"], "trainer.steps=2")
    assert [nodes.wait(0), nodes.wait(1)] == [0, 0], nodes.said()
    assert nodes.steps() == [1, 2]
    assert all(f"node {rank} {os.uname().nodename}: trainer rank {rank}" in nodes.said() for rank in range(2))


@contextmanager
def in_networks(nodes: Nodes, names: Sequence[str], *settings: str, roles: Sequence[str] = ()) -> Iterator[Networks]:
    """A job whose nodes have networks of their own; both end with the block."""
    networks = Networks(random.SystemRandom().randrange(1, 250), names)
    try:
        networks.make()
        nodes.start_in(networks, names, *settings, roles=roles)
        yield networks
    finally:
        nodes.end()
        networks.remove()


@pytest.mark.skipif(not possible(), reason="needs root and network namespaces")
def test_nodes_that_are_cut_off_are_replaced_and_then_done_without(nodes: Nodes) -> None:
    """A link goes down and nobody is told: a spare takes the node's place, with the state that the head has kept for
    it. Then its link goes down too, and the job ends on the head alone, where that state does not fit."""
    steps = 12
    more = (f"trainer.steps={steps}", "cluster.restarts=2", "cluster.spare_nodes=1", "cluster.heartbeat_s=3")
    nodes.job = last_of_each([*DPO, "trainer.checkpoint_interval=100", "trainer.keep_state=neighbour"])
    with in_networks(nodes, ["n0", "n1", "n2"], *more) as networks:
        nodes.until(lambda: max(nodes.steps(), default=0) >= 2, "second step")
        assert "spare nodes: node 2" in nodes.said()
        networks.cut("n1")
        nodes.until(lambda: "spare nodes: none is left" in nodes.said(), "start with the spare")
        before = max(nodes.steps())
        nodes.until(lambda: max(nodes.steps()) > before, "step with the spare")
        assert f"resumed from {nodes.run_dir}/checkpoints/kept/global_step_" in nodes.said()
        networks.cut("n2")
        assert [nodes.wait(rank) for rank in range(3)] == [0, 1, 1], nodes.said()
    said = nodes.said()
    assert said.count("lost: silent for 3 s") >= 2
    assert "THE JOB GOES ON SMALLER, 1 of 3 nodes are left: parallel.dp 2 -> 1" in said
    assert all("node 0 is lost" in nodes.said(rank) for rank in (1, 2))
    assert nodes.steps() == list(range(1, steps + 1))  # none twice, none missing
    assert json.loads((nodes.run_dir / "resolved.json").read_text())["parallel"]["dp"] == 1
    left = [path.parent for path in Path("/proc").glob("[0-9]*/cmdline") if str(nodes.run_dir).encode() in _read(path)]
    assert not left


@pytest.mark.skipif(not possible(), reason="needs root and network namespaces")
def test_a_node_that_leaves_with_notice_is_done_without(nodes: Nodes) -> None:
    """SIGTERM to the supervisor of one node: its rank saves, and the job goes on from that step on the head alone."""
    with in_networks(nodes, ["n0", "n1"], "trainer.steps=8", "cluster.on_notice=go_on"):
        nodes.until(lambda: max(nodes.steps(), default=0) >= 2, "second step")
        nodes.signal(1, signal.SIGTERM)
        assert [nodes.wait(rank) for rank in range(2)] == [0, 0], nodes.said()
    said = nodes.said()
    assert "leaves with notice: the job has saved, and goes on without it" in said
    assert "THE JOB GOES ON SMALLER, 1 of 2 nodes are left: parallel.dp 2 -> 1" in said
    assert nodes.steps() == list(range(1, 9))  # none twice, none missing
    spent = account_of(nodes.run_dir)
    assert spent is not None and sum(spent.seconds.values()) == pytest.approx(spent.wall_s)
    assert spent.seconds["notice"] > 0 and spent.seconds["restart"] > 0 and not spent.seconds.keys() & {"down"}


@pytest.mark.soak
@pytest.mark.skipif(not possible(), reason="needs root and network namespaces")
def test_the_engines_of_a_node_that_leaves_with_notice_drain(nodes: Nodes) -> None:
    """SIGTERM to a node that has one of two engines and a reward host: the only attempt goes on without it."""
    nodes.job = ONLINE
    more = ("parallel.dp=1", "rollout.replicas=2", "trainer.steps=6", "cluster.on_notice=go_on")
    with in_networks(nodes, ["n0", "n1"], *more, roles=["all", "rollout"]):
        nodes.until(lambda: max(nodes.steps(), default=0) >= 2, "second step")
        nodes.signal(1, signal.SIGTERM)
        assert [nodes.wait(rank) for rank in (1, 0)] == [0, 0], nodes.said()
    said = nodes.said()
    assert "leaves with notice: engine 1, reward host 1 drain, and the job goes on" in said and "has left" in said
    assert "GOES ON SMALLER" not in said and "resumed from" not in said
    assert (nodes.run_dir / "attempt").read_text().strip().startswith("1")
    assert nodes.steps() == list(range(1, 7))
    spent = account_of(nodes.run_dir)
    assert spent is not None and sum(spent.seconds.values()) == pytest.approx(spent.wall_s)
    assert not spent.seconds.keys() & {"notice", "restart", "down", "lost work"}


@pytest.mark.soak
@pytest.mark.skipif(not possible(), reason="needs root and network namespaces")
def test_ranks_on_two_nodes_start_again_alone(nodes: Nodes) -> None:
    """The rank of the second node is killed: new ranks on both nodes join the engine, which goes on."""
    nodes.job = ONLINE
    with in_networks(nodes, ["n0", "n1"], "trainer.steps=5", "cluster.restarts=1"):
        nodes.until(lambda: max(nodes.steps(), default=0) >= 2, "second step")
        engine = nodes.pids("megarl.engines.server.server")
        assert "node 1" in nodes.said() and engine
        os.kill(nodes.pids("megarl.run.start")["1"], signal.SIGKILL)
        nodes.until(lambda: "resumed from" in nodes.said(), "new ranks")
        assert nodes.pids("megarl.engines.server.server") == engine
        assert [nodes.wait(rank) for rank in range(2)] == [0, 0], nodes.said()
    assert "all other processes go on" in nodes.said()
    assert nodes.steps() == list(range(1, 6))


def _send(process: subprocess.Popen[bytes] | commands.Command, number: int) -> None:
    if process.poll() is None:
        os.kill(process.pid, number)


def _read(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""
