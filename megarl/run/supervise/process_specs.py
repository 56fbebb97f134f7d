"""Specs of an attempt's processes: the command line, environment, log and GPUs of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from megarl.buffer.store import VARIABLE
from megarl.config import Config
from megarl.core.jobs import ProcessKind, of_program, worker_of
from megarl.core.metrics import TIMELINE
from megarl.engines.client.names import COLD, COLD_FOLDER, UNTIL_PUBLISHED
from megarl.learn import algorithms
from megarl.rewards.judge.family import ENGINES
from megarl.run.nodes.node import Spec
from megarl.run.nodes.plan import Plan, Planned
from megarl.run.process.forkserver import ForkServers
from megarl.run.supervise.engine_process import engine_environment, engine_process

Placed = tuple[int, Spec]
"""(rank of a node, process to start there)."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Environment variables of processes that need only one compute thread."""


class Addresses(NamedTuple):
    """Addresses of an attempt's servers, HOST:PORT."""

    rendezvous: str
    link: str
    engines: tuple[str, ...]
    engine_groups: tuple[str, ...]
    """Rendezvous of the parts of each engine; "" for an engine on one node."""
    reward_hosts: tuple[str, ...]


class _Command(NamedTuple):
    """Command line of a planned process."""

    argv: Sequence[str]
    env: Mapping[str, str]
    """Variables of this process, in addition to the variables of all."""
    listens: str = ""


@dataclass(frozen=True)
class _Attempt:
    config: Config
    plan: Plan
    addresses: Addresses
    logs: Path


def urls(addresses: Addresses) -> list[str]:
    """Return the URLs of the engines, by number."""
    return [f"http://{address}" for address in addresses.engines]


def resolved(config: Config) -> Path:
    """Return the file with a run's settings, which its processes read. A program that joins the run has a separate
    file."""
    job = algorithms.job_of(config)
    return Path(config.run.dir) / f"{of_program('resolved', job.program) if job.joins else 'resolved'}.json"


def specs(config: Config, plan: Plan, addresses: Addresses, environment: Mapping[str, str], logs: Path) -> list[Placed]:
    """Return the processes of a plan in the order of their start.

    ``environment``: variables of the attempt, for all processes.
    """
    env = {
        **environment,
        "MEGARL_LINK": addresses.link,
        "MEGARL_REWARD_HOSTS": ",".join(f"{address}*{config.reward.workers}" for address in addresses.reward_hosts),
        "PYTHONUNBUFFERED": "1",
    }
    if VARIABLE in os.environ:  # other nodes do not inherit this process's environment
        env[VARIABLE] = os.environ[VARIABLE]
    attempt, placed = _Attempt(config, plan, addresses, logs), []
    for process in plan.processes:
        argv, own, listens = _COMMANDS[process.kind](attempt, process)
        first = process.kind is plan.job.until and process.number == 0
        log = str(logs / process.log)
        spec = Spec(process.name, tuple(argv), {**env, **own}, log, first, listens, process.gpus)
        placed.append((process.node, spec))
    return placed


def another_engine(
    config: Config, plan: Plan, number: int, address: str, log: str, environment: Mapping[str, str]
) -> Spec:
    """Return the spec of an engine of ``plan`` that joins an attempt at ``address``; its log is next to ``log``."""
    logs = Path(log).parent
    addresses = Addresses("", "", ("",) * number + (address,), ("",) * (number + 1), ())
    process = plan.of(ProcessKind.ENGINE)[number]
    argv, own, listens = _engine(_Attempt(config, plan, addresses, logs), process)
    env = {**environment, **own}
    return Spec(process.name, tuple(argv), env, str(logs / process.log), listens=listens, gpus=process.gpus)


def preload(config: Config, servers: ForkServers) -> None:
    """Make fork servers import the modules of the job's processes while the job is checked."""
    for kind in algorithms.job_of(config).processes:
        if kind is ProcessKind.ENGINE:
            servers.preload(kind, engine_environment(config.rollout))
        elif kind is ProcessKind.TRAINER:
            servers.preload(kind, _trainer_threads(config))
        elif kind is ProcessKind.EXPLORER:
            servers.preload(kind, ONE_THREAD)


def _trainer_threads(config: Config) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(config.trainer.num_threads), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def _engine(attempt: _Attempt, process: Planned) -> _Command:
    config, address = attempt.config, attempt.addresses.engines[process.number]
    host, _, port = address.rpartition(":")
    group = attempt.addresses.engine_groups[process.number]
    span = (process.part, group) if group else None
    device: Literal["cpu", "cuda"] = "cuda" if config.parallel.backend == "nccl" else "cpu"
    leaves = config.rollout.offload if attempt.plan.takes_turns else None
    argv, env = engine_process(
        config.model.path, config.rollout, config.model, host, int(port), device, span, config.sync.pause, leaves,
        config.sync.adapter,
    )  # fmt: skip
    name = of_program(f"{process.kind.stem}_{process.number}", attempt.plan.job.program)
    timeline = f"{config.run.dir}/timeline/{name}"
    env |= {UNTIL_PUBLISHED: "1", TIMELINE: timeline, COLD: f"{config.run.dir}/{COLD_FOLDER}"}
    return _Command(argv[1:], env, "" if process.part else address)


def _trainer(attempt: _Attempt, process: Planned) -> _Command:
    config = attempt.config
    host, _, port = attempt.addresses.rendezvous.rpartition(":")
    neighbours = [rank for rank in attempt.plan.of(process.kind) if rank.node == process.node]
    env = {
        "RANK": str(process.number),
        "LOCAL_RANK": str(neighbours.index(process)),
        "WORLD_SIZE": str(config.parallel.world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        **_trainer_threads(config),
    }
    return _Command(_started(attempt, process), env)


def _reward_host(attempt: _Attempt, process: Planned) -> _Command:
    hosts = attempt.plan.of(process.kind)
    address = attempt.addresses.reward_hosts[hosts.index(process)]
    host, _, port = address.rpartition(":")
    argv = ["-m", "megarl", "rewards", "serve", "--host", host, "--port", port]
    argv += ["--workers", str(attempt.config.reward.workers)]
    argv += ["--output", str(attempt.logs / f"reward_output_{process.node}.log")]
    return _Command(argv, {**ONE_THREAD, ENGINES: ",".join(urls(attempt.addresses))}, address)


def _bench(attempt: _Attempt, process: Planned) -> _Command:
    return _Command(_started(attempt, process), ONE_THREAD)


def _explorer(attempt: _Attempt, process: Planned) -> _Command:
    number = process.number
    worker = ["--worker", worker_of(attempt.plan.job.program, number), "--number", str(number)]
    return _Command([*_started(attempt, process), *worker], ONE_THREAD)


def _started(attempt: _Attempt, process: Planned) -> list[str]:
    return ["-m", "megarl.run.start", process.kind.stem, "--config", str(resolved(attempt.config))]


_COMMANDS: Mapping[ProcessKind, Callable[[_Attempt, Planned], _Command]] = {
    ProcessKind.ENGINE: _engine,
    ProcessKind.TRAINER: _trainer,
    ProcessKind.REWARD_HOST: _reward_host,
    ProcessKind.EXPLORER: _explorer,
    ProcessKind.BENCH: _bench,
}
