"""Advice for a job that does not fit its nodes or leaves GPUs idle: sizes that use all GPUs, and the number of nodes
for the job with its present sizes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import log

from megarl.config import Config, to_dict
from megarl.core.errors import ArchitectureError, ConfigError, PlanError
from megarl.core.jobs import ProcessKind
from megarl.learn import algorithms
from megarl.learn.parallel.grid import check_roles, with_dp
from megarl.run.nodes.plan import (
    NodeInfo,
    Plan,
    gpus_needed,
    idle_gpus,
    kept_from_engines,
    plan_job,
    span_of,
    workers_of,
)
from megarl.run.run_dir.changes import changes

MOST_IDLE = 0.25
"""Share of a job's GPUs that its plan may leave idle."""
MOST_NODES = 512
COMMAND = "MEGARL_COMMAND"
"""Environment variable with the script of a Slurm job and its arguments."""


def check_idle(config: Config, plan: Plan, nodes: Sequence[NodeInfo]) -> None:
    """Raise ConfigError if a plan leaves more than a quarter of the GPUs idle and ``cluster.allow_idle`` is false."""
    if config.parallel.backend != "nccl" or config.cluster.allow_idle:
        return
    idle, has = idle_gpus(plan, nodes), sum(node.gpus for node in nodes)
    count = sum(map(len, idle.values()))
    if count > MOST_IDLE * has:
        names = {node.rank: str(node) for node in nodes}
        where = ", ".join(f"{len(gpus)} of {names[rank]}" for rank, gpus in idle.items())
        raise ConfigError(f"{count} of {has} GPUs would be idle: {where}. cluster.allow_idle=true runs the job anyway")


@contextmanager
def with_advice(config: Config, nodes: Sequence[NodeInfo], usable: Callable[[Config], None]) -> Iterator[None]:
    """Add fitting sizes, and the number of nodes for the present sizes, to a plan's ConfigError.

    ``usable``: raises for sizes that the job's models do not support.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError("\n  ".join([str(error), *advice(config, nodes, usable)])) from error


def advice(
    config: Config, nodes: Sequence[NodeInfo], usable: Callable[[Config], None], env: Mapping[str, str] = os.environ
) -> list[str]:
    """Return lines of advice: settings that use every GPU of the nodes, and the number of nodes for the present
    sizes."""
    lines, spanning, gpus = [], config, min(node.gpus for node in nodes)
    if on_gpus := config.parallel.backend == "nccl":
        if (fitting := fitting_sizes(config, nodes, usable)) is not None:
            lines.append(f"to use all {sum(node.gpus for node in nodes)} GPUs: {' '.join(overrides(config, fitting))}")
        spanning = _with_tp(config, config.parallel.tp, config.rollout.tp, gpus)
    count = number_of_nodes(spanning, gpus)
    if count is not None and count != len(nodes):
        options = f"--nodes={count}" + (f" --gpus-per-node={gpus}" if on_gpus else "")
        command = " ".join([env.get(COMMAND) or "slurm/train_grpo.sh ...", *overrides(config, spanning)])
        lines.append(f"to run it as it is: sbatch {options} {command}")
    return lines


def number_of_nodes(config: Config, gpus: int) -> int | None:
    """Return the smallest number of nodes with ``gpus`` GPUs each that fits a job with at most a quarter idle; None if
    there is none. On CPUs: the smallest number over which ranks and engines spread evenly."""
    needs = gpus_needed(config, algorithms.job_of(config))
    least = max(1, -(-needs // max(1, gpus))) if config.parallel.backend == "nccl" else config.rollout.nodes
    for count in range(least, min(2 * least, MOST_NODES) + 1):
        if _fits(config, [NodeInfo(rank, "", "all", gpus) for rank in range(count)], exactly=False):
            return count
    return None


def fitting_sizes(config: Config, nodes: Sequence[NodeInfo], usable: Callable[[Config], None]) -> Config | None:
    """Return the job with a ``dp`` and ``rollout.replicas`` that use every GPU of the nodes; None if there are none.
    ``tp`` shrinks only if necessary. The trainer's share of GPUs stays as near as possible to the job's."""
    gpus = min(node.gpus for node in nodes)
    for tp in _smaller(config.parallel.tp, gpus):
        for engine_tp in _smaller(config.rollout.tp, gpus):
            found = _with_tp(config, tp, engine_tp, gpus)
            for job in sorted(_filling(found, nodes), key=lambda job: abs(_ratio(job) - _ratio(config))):
                if _fits(job, nodes, exactly=True) and _passes(job, usable):
                    return job
    return None


def overrides(old: Config, new: Config) -> list[str]:
    """Return the overrides that change ``old`` into ``new``, which differ only in numbers and switches."""
    return [f"{c.setting}={str(c.new).lower()}" for c in changes(to_dict(old), to_dict(new))]


def _smaller(size: int, gpus: int) -> list[int]:
    """Return ``size`` and its halves, without sizes that exceed a node but do not fill nodes."""
    sizes = [size]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return [size for size in sizes if size <= gpus or size % max(1, gpus) == 0]


def _with_tp(config: Config, tp: int, engine_tp: int, gpus: int) -> Config:
    parallel = replace(config.parallel, tp=tp, sequence_parallel=config.parallel.sequence_parallel and tp > 1)
    found = replace(config, parallel=parallel, rollout=replace(config.rollout, tp=engine_tp))
    return replace(found, rollout=replace(found.rollout, nodes=span_of(found, gpus) or 1))


def _filling(config: Config, nodes: Sequence[NodeInfo]) -> Iterator[Config]:
    """Yield the job with each pair of ``dp`` and ``rollout.replicas`` that uses exactly the existing GPUs."""
    job, total = algorithms.job_of(config), sum(node.gpus for node in nodes)
    unit, workers = config.parallel.world_size // config.parallel.dp, workers_of(config)
    engines = job.has(ProcessKind.ENGINE)
    if not job.trains:
        if total % workers == 0:
            yield replace(config, rollout=replace(config.rollout, replicas=total // workers))
        return
    for dp in range(1, total // unit + 1):
        left = total - kept_from_engines(config, unit * dp)
        shared = left == total  # engines and ranks both use all GPUs
        whole = unit * dp == total if shared or not engines else left > 0
        if not whole or (engines and left % workers):
            continue
        if (found := with_dp(config, dp)) is not None:
            replicas = left // workers if engines else config.rollout.replicas
            yield replace(found, rollout=replace(config.rollout, replicas=replicas))


def _ratio(config: Config) -> float:
    """Return the logarithm of trainer ranks per engine worker."""
    return log(config.parallel.world_size / (config.rollout.replicas * workers_of(config)))


def _fits(config: Config, nodes: Sequence[NodeInfo], *, exactly: bool) -> bool:
    try:
        plan = plan_job(config, nodes)
        check_idle(config, plan, nodes)
    except ConfigError:
        return False
    return not (exactly and idle_gpus(plan, nodes))


def _passes(config: Config, usable: Callable[[Config], None]) -> bool:
    try:
        check_roles(config)
        usable(config)
    except (ArchitectureError, ConfigError, PlanError):
        return False
    return True
