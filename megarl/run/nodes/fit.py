"""Reduction of a job to the remaining nodes, and advice for a job that does not fit or leaves GPUs idle.

Spares replace lost nodes. Without spares the job goes on with fewer data-parallel ranks and engines, within the
original number per node.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import log
from typing import NamedTuple

from megarl.config import Config, to_dict
from megarl.config.derived import sections_of
from megarl.core.errors import ArchitectureError, ConfigError, JobError, PlanError
from megarl.core.jobs import ProcessKind
from megarl.learn import algorithms
from megarl.learn.parallel.grid import check_roles, with_dp
from megarl.run.nodes.plan import (
    NodeInfo,
    Plan,
    engine_nodes,
    gpus_needed,
    groups_of,
    idle_gpus,
    kept_from_engines,
    plan_job,
    short_table,
    span_of,
    split_group,
    table,
    trainer_nodes,
    workers_of,
)
from megarl.run.run_dir.changes import Change, changes

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
    for tp in _smaller_sizes(config.parallel.tp, gpus):
        for engine_tp in _smaller_sizes(config.rollout.tp, gpus):
            found = _with_tp(config, tp, engine_tp, gpus)
            for job in sorted(_filling(found, nodes), key=lambda job: abs(_ratio(job) - _ratio(config))):
                if _fits(job, nodes, exactly=True) and _passes(job, usable):
                    return job
    return None


def overrides(old: Config, new: Config) -> list[str]:
    """Return the overrides that change ``old`` into ``new``, which differ only in numbers and switches."""
    return [f"{c.setting}={str(c.new).lower()}" for c in changes(to_dict(old), to_dict(new))]


def _smaller_sizes(size: int, gpus: int) -> list[int]:
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


class Fit(NamedTuple):
    """A job that fits its nodes."""

    config: Config
    """Settings as given, or with a smaller ``dp`` in every grid and fewer ``rollout.replicas``."""
    nodes: tuple[NodeInfo, ...]
    """Nodes with processes; spares are not among them."""
    trainers: int | None
    """Number of nodes with trainer ranks, the first that may have them; None: as many as possible."""

    @property
    def plan(self) -> Plan:
        return plan_job(self.config, self.nodes, trainers=self.trainers)


def fit(
    config: Config, allocated: Sequence[NodeInfo], left: Sequence[NodeInfo], usable: Callable[[Config], None]
) -> Fit:
    """Return the whole job if enough nodes are left, else its largest part that ``cluster.shrink`` allows. No node gets
    more ranks or engines than in the whole job; model-parallel sizes stay.

    Args:
        allocated: All nodes of the launcher, by rank.
        left: Reachable nodes without faults; the first is the head.
        usable: Raises the errors of the checks before a launch for settings that cannot train.

    Raises:
        ConfigError: the whole job does not fit all nodes.
        JobError: no part of the job fits the remaining nodes.
    """
    whole = len(trainer_nodes(allocated)) - config.cluster.spare_nodes
    if whole < 1 and config.cluster.spare_nodes:
        raise ConfigError(
            f"cluster.spare_nodes={config.cluster.spare_nodes} leaves none of the {len(trainer_nodes(allocated))} "
            "nodes that may train; lower it, or add nodes"
        )
    with with_advice(config, _working(allocated, whole), usable):
        plan = plan_job(config, _working(allocated, whole))
        check_idle(config, plan, _working(allocated, whole))
    nodes = _working(left, whole)
    if len(nodes) == len(_working(allocated, whole)):
        return Fit(config, nodes, None)
    there = len(trainer_nodes(nodes))
    engines = config.rollout.replicas
    if algorithms.job_of(config).has(ProcessKind.ENGINE):
        engines = _engines(config, _working(allocated, whole), nodes)
    if (there == whole and engines == config.rollout.replicas) or not config.cluster.shrink:
        return Fit(config, nodes, None)
    if engines and not algorithms.job_of(config).trains:
        return Fit(replace(config, rollout=replace(config.rollout, replicas=engines)), nodes, None)
    each = max(Counter(rank.node for rank in plan.of(ProcessKind.TRAINER)).values())
    for smaller in _smaller(config, engines) if engines else ():
        fitted = _fewest(smaller, nodes, each)
        if fitted is None:
            continue
        try:
            usable(fitted.config)
        except (ArchitectureError, ConfigError, PlanError):
            continue
        return fitted
    size = config.parallel.world_size // config.parallel.dp
    groups = groups_of(config)
    parts = f", in multiples of {groups[0].size} ({groups[0].setting})" if groups else ""
    raise JobError(
        f"{len(left)} of {len(allocated)} nodes are left, and no part of the job fits them: one data-parallel rank "
        f"takes tp*cp*pp = {size} trainer ranks where a node has room for {each}{parts}, an engine "
        f"rollout.nodes={config.rollout.nodes} nodes; run it again with all nodes, or with cluster.shrink=false, which "
        "puts more ranks on each node that is left"
    )


def planned(
    config: Config,
    nodes: Sequence[NodeInfo],
    usable: Callable[[Config], None] = lambda smaller: None,
    verbose: bool = False,
) -> str:
    """Describe a job: its placement (a line per node or, without ``verbose``, per kind of node), its mode, and its end.

    Raises:
        ConfigError: the whole job does not fit the nodes. ``usable``: as in ``fit``, for the plan in the error.
    """
    plan = fit(config, nodes, nodes, usable).plan
    where = table(plan, nodes) if verbose else short_table(plan, nodes)
    return f"{where}\nmode {plan.job.mode}: the job ends when each {plan.job.until.label} has ended"


def reductions(old: Config, new: Config) -> list[Change]:
    """Return the sizes that ``fit`` reduced."""
    sizes = [_sizes(config) for config in (old, new)]
    return [Change(name, size, sizes[1][name]) for name, size in sizes[0].items() if sizes[1][name] != size]


def _sizes(config: Config) -> dict[str, int]:
    grids = {f"{role}.parallel.dp": section.parallel for role, section in sections_of(config).items()}
    found = {"parallel.dp": config.parallel.dp, "rollout.replicas": config.rollout.replicas}
    return found | {name: grid.dp for name, grid in grids.items() if grid is not None}


def _working(nodes: Sequence[NodeInfo], trainers: int) -> tuple[NodeInfo, ...]:
    """Return the nodes without spares: the first ``trainers`` nodes that may train, and all that may not."""
    chosen = trainer_nodes(nodes)[:trainers]
    return tuple(node for node in nodes if node.role == "rollout" or node.rank in chosen)


def _engines(config: Config, whole: Sequence[NodeInfo], nodes: Sequence[NodeInfo]) -> int:
    """Return the number of engines that fit ``nodes``: no group of ``rollout.nodes`` gets more than in the whole
    job."""
    had, has = (len(engine_nodes(some)) // config.rollout.nodes for some in (whole, nodes))
    return min(config.rollout.replicas, has * -(-config.rollout.replicas // had))


def _smaller(config: Config, engines: int) -> Iterator[Config]:
    """Yield the job with each number of data-parallel ranks that all roles' grids support, the largest first."""
    rollout = replace(config.rollout, replicas=engines)
    for dp in range(config.parallel.dp, 0, -1):
        if (found := with_dp(config, dp)) is not None:
            yield replace(found, rollout=rollout)


def _fewest(config: Config, nodes: tuple[NodeInfo, ...], each: int) -> Fit | None:
    """Return the job with its ranks on the fewest nodes that share them evenly, at most ``each`` per node, and as many
    engines as fit; None if there is no such number."""
    ranks = config.parallel.world_size
    gpus = min(node.gpus for node in nodes) if config.parallel.backend == "nccl" else None
    for count in range(1, len(trainer_nodes(nodes)) + 1):
        if ranks % count or ranks // count > each or split_group(config, ranks // count, gpus):
            continue
        for replicas in range(config.rollout.replicas, 0, -1):
            found = Fit(replace(config, rollout=replace(config.rollout, replicas=replicas)), nodes, count)
            with suppress(ConfigError):
                assert found.plan
                return found
    return None
