"""Engines added by order after an attempt's start: how many fit, and where they are placed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megarl.buffer.store import EngineRoom
from megarl.config import Config
from megarl.core.errors import ConfigError
from megarl.core.jobs import ProcessKind, kind_of
from megarl.run.checks.settings import check_memory_of_engine
from megarl.run.nodes.node import LocalNode, NotStarted, Started
from megarl.run.nodes.plan import NodeInfo, Plan, plan_job
from megarl.run.supervise.engine_process import engine_environment
from megarl.run.supervise.process_specs import another_engine


def room_for_engines(config: Config, plan: Plan, nodes: Sequence[NodeInfo], cpus: int | None = None) -> EngineRoom:
    """Return a job's room for engines: GPUs without trainer ranks, or on CPUs one worker per CPU.

    ``rollout.replicas`` engines always fit; a job on several nodes has no room for more.

    Args:
        cpus: CPUs of this machine; None counts the CPUs that this process may use.
    """
    had = config.rollout.replicas
    if plan.takes_turns:
        return EngineRoom(had, 0, "rollout.placement=colocated")
    if len(nodes) > 1:
        return EngineRoom(had, 0, f"{len(nodes)} nodes")
    if config.parallel.backend == "nccl":
        ranks = len(plan.of(ProcessKind.TRAINER))
        why = f"{nodes[0].gpus} GPUs, {ranks} of them the trainer's (parallel)"
        return EngineRoom(had, nodes[0].gpus - ranks, why)
    cpus = len(os.sched_getaffinity(0)) if cpus is None else cpus
    return EngineRoom(had, cpus, f"{cpus} CPUs")


def with_engines(config: Config, number: int, workers: int) -> Config:
    """Return the settings with ``number`` engines of ``workers`` workers each."""
    rollout = replace(config.rollout, replicas=number, tp=workers // config.rollout.pp)
    return replace(config, rollout=rollout)


class MoreEngines:
    """Places engines on this machine that are added after an attempt's start.

    Args:
        started: Processes of the attempt.
    """

    def __init__(self, config: Config, started: Sequence[Started]) -> None:
        self._config = config
        self._like = next((s for s in started if kind_of(s.process.name) is ProcessKind.ENGINE), None)

    def place(self, number: int, workers: int) -> Started:
        """Return an engine with ``workers`` workers, not started yet. Raises ConfigError if it does not fit."""
        like = self._like
        if like is None or like.spec is None or not isinstance(like.node, LocalNode):
            raise ConfigError("engines are added to jobs of one machine only")
        config = with_engines(self._config, number + 1, workers)
        check_memory_of_engine(config)
        plan = plan_job(config, [NodeInfo.of(like.node)])
        own = engine_environment(self._config.rollout)  # the environment depends on the number of workers
        env = {name: value for name, value in like.spec.env.items() if name not in own}
        address = f"{like.node.address}:{like.node.another_port()}"
        spec = another_engine(config, plan, number, address, like.spec.log, env)
        return Started(NotStarted(spec.name, Path(spec.log)), like.node, spec)
