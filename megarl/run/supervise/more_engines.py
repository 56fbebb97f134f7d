"""Engines that join an attempt after its start, by order: how many there is room for, and where they are placed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megarl.core.config import Config
from megarl.core.errors import ConfigError
from megarl.core.jobs import ProcessKind, kind_of
from megarl.explore.store import EngineRoom
from megarl.run.checks.settings import check_memory_of_engine
from megarl.run.nodes.node import LocalNode, NotStarted, Started
from megarl.run.nodes.plan import NodeInfo, Plan, plan_job, workers_of
from megarl.run.supervise.specs import another_engine


def room_for_engines(config: Config, plan: Plan, nodes: Sequence[NodeInfo], cpus: int | None = None) -> EngineRoom:
    """Most engines that a job may be scaled to: on GPUs those that the trainer leaves, else one worker a CPU.

    A job may always have ``rollout.replicas`` again; one on several nodes has no room for more.

    Args:
        cpus: Of this machine; None counts those that this process may use.
    """
    had, workers = config.rollout.replicas, workers_of(config)
    each = f"rollout.tp={config.rollout.tp} * rollout.pp={config.rollout.pp} workers each"
    if config.rollout.placement == "colocated" or len(nodes) > 1:
        return EngineRoom(had, f"{len(nodes)} nodes, rollout.placement={config.rollout.placement}")
    if config.parallel.backend == "nccl":
        ranks = len(plan.of(ProcessKind.TRAINER))
        most = max(had, (nodes[0].gpus - ranks) // workers)
        return EngineRoom(most, f"{nodes[0].gpus} GPUs, {ranks} of them the trainer's (parallel), {each}")
    cpus = len(os.sched_getaffinity(0)) if cpus is None else cpus
    return EngineRoom(max(had, cpus // workers), f"{cpus} CPUs, {each}")


class MoreEngines:
    """Places engines that an attempt did not begin with, on this machine.

    Args:
        started: Processes of the attempt.
    """

    def __init__(self, config: Config, started: Sequence[Started]) -> None:
        self._config = config
        self._like = next((s for s in started if kind_of(s.process.name) is ProcessKind.ENGINE), None)

    def place(self, number: int) -> Started:
        """Return an engine that is to be started. Raises ConfigError where it has no place."""
        like = self._like
        if like is None or like.spec is None or not isinstance(like.node, LocalNode):
            raise ConfigError("engines are added to jobs of one machine only")
        config = replace(self._config, rollout=replace(self._config.rollout, replicas=number + 1))
        check_memory_of_engine(config)
        plan = plan_job(config, [NodeInfo.of(like.node)])
        spec = another_engine(config, plan, number, f"{like.node.address}:{like.node.another_port()}", like.spec)
        return Started(NotStarted(spec.name, Path(spec.log)), like.node, spec)
