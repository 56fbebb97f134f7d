"""Specs of an attempt's processes: the command line, environment, log and GPUs of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from megarl.core.config import Config
from megarl.core.jobs import ProcessKind
from megarl.core.metrics import TIMELINE
from megarl.engine.client.names import UNTIL_PUBLISHED
from megarl.explore.rewards.judge.family import ENGINES
from megarl.explore.store import VARIABLE
from megarl.learn import algorithms
from megarl.run.nodes.node import Spec
from megarl.run.nodes.placement import Placement
from megarl.run.process.forkserver import ForkServers
from megarl.run.supervise.engine_process import engine_environment, engine_process

Placed = tuple[int, Spec]
"""The rank of a node, and a process to start there."""


class Addresses(NamedTuple):
    """Addresses of an attempt's servers, HOST:PORT."""

    rendezvous: str
    link: str
    engines: tuple[str, ...]
    engine_groups: tuple[str, ...]
    """Rendezvous of the parts of each engine; "" for an engine on one node."""
    reward_hosts: tuple[str, ...]


@dataclass(frozen=True)
class _Attempt:
    config: Config
    placement: Placement
    addresses: Addresses
    env: Mapping[str, str]
    """Environment of every process."""
    logs: Path

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.config.parallel.backend == "nccl" else "cpu"

    def spec(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: str,
        *,
        echo: bool = False,
        listens: str = "",
        gpus: tuple[int, ...] = (),
    ) -> Spec:
        gpus = gpus if self.device == "cuda" else ()
        return Spec(name, tuple(argv), {**self.env, **env}, str(self.logs / log), echo, listens, gpus)


def urls(addresses: Addresses) -> list[str]:
    """URLs of the engines, by number."""
    return [f"http://{address}" for address in addresses.engines]


def resolved(config: Config) -> Path:
    """The file with the settings of a run, which its processes read."""
    return Path(config.run.dir) / "resolved.json"


def specs(
    config: Config, placement: Placement, addresses: Addresses, environment: Mapping[str, str], logs: Path
) -> list[Placed]:
    """The processes of a job in the order in which they are started.

    ``environment``: variables of the attempt, for all processes.
    """
    env = {
        **environment,
        "MEGARL_LINK": addresses.link,
        "MEGARL_REWARD_HOSTS": ",".join(f"{address}*{config.reward.workers}" for address in addresses.reward_hosts),
        "PYTHONUNBUFFERED": "1",
    }
    if VARIABLE in os.environ:  # other nodes do not inherit it
        env[VARIABLE] = os.environ[VARIABLE]
    attempt = _Attempt(config, placement, addresses, env, logs)
    return [placed for kind in algorithms.get(config.algorithm.name).job.processes for placed in _SPECS[kind](attempt)]


def preload(config: Config, servers: ForkServers) -> None:
    """Have fork servers import what the job's processes need, while the job is checked."""
    for kind in algorithms.get(config.algorithm.name).job.processes:
        if kind is ProcessKind.ENGINE:
            servers.preload(kind, engine_environment(config.rollout))
        elif kind is ProcessKind.TRAINER:
            servers.preload(kind, _trainer_threads(config))


def _trainer_threads(config: Config) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(config.trainer.num_threads), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def _engines(attempt: _Attempt) -> Iterator[Placed]:
    config, addresses, kind = attempt.config, attempt.addresses, ProcessKind.ENGINE
    for i, span in enumerate(attempt.placement.engines):
        host, _, port = addresses.engines[i].rpartition(":")
        for part, node in enumerate(span):
            group = (part, addresses.engine_groups[i]) if len(span) > 1 else None
            argv, env = engine_process(
                config.model.path, config.rollout, config.model, host, int(port), attempt.device, group
            )
            env |= {UNTIL_PUBLISHED: "1", TIMELINE: f"{config.run.dir}/timeline/{kind.stem}_{i}"}
            yield node, attempt.spec(
                kind.named(i, part), argv[1:], env, kind.log(i, part),
                listens=addresses.engines[i] if part == 0 else "", gpus=attempt.placement.engine_gpus(i, node),
            )  # fmt: skip


def _trainers(attempt: _Attempt) -> Iterator[Placed]:
    config, placement, kind = attempt.config, attempt.placement, ProcessKind.TRAINER
    host, _, port = attempt.addresses.rendezvous.rpartition(":")
    for rank, node in enumerate(placement.trainer):
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(placement.local_rank(rank)),
            "WORLD_SIZE": str(config.parallel.world_size),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            **_trainer_threads(config),
        }
        argv = ["-m", "megarl.run.start", kind.stem, "--config", str(resolved(config))]
        gpus = placement.trainer_gpus(node)
        yield node, attempt.spec(kind.named(rank), argv, env, kind.log(rank), echo=rank == 0, gpus=gpus)


def _reward_hosts(attempt: _Attempt) -> Iterator[Placed]:
    kind = ProcessKind.REWARD_HOST
    for node, address in zip(attempt.placement.reward_hosts, attempt.addresses.reward_hosts, strict=True):
        host, _, port = address.rpartition(":")
        argv = ["-m", "megarl", "rewards", "serve", "--host", host, "--port", port]
        argv += ["--workers", str(attempt.config.reward.workers)]
        argv += ["--output", str(attempt.logs / f"reward_output_{node}.log")]
        env = {"OMP_NUM_THREADS": "1", ENGINES: ",".join(urls(attempt.addresses))}
        yield node, attempt.spec(kind.named(node), argv, env, kind.log(node), listens=address)


def _explorers(attempt: _Attempt) -> Iterator[Placed]:
    assert attempt.placement.explorer is not None
    kind = ProcessKind.EXPLORER
    argv = ["-m", "megarl.run.start", kind.stem, "--config", str(resolved(attempt.config))]
    yield attempt.placement.explorer, attempt.spec(kind.label, argv, {"OMP_NUM_THREADS": "1"}, f"{kind.stem}.log")


_SPECS: Mapping[ProcessKind, Callable[[_Attempt], Iterator[Placed]]] = {
    ProcessKind.ENGINE: _engines,
    ProcessKind.TRAINER: _trainers,
    ProcessKind.REWARD_HOST: _reward_hosts,
    ProcessKind.EXPLORER: _explorers,
}
