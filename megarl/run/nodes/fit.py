"""Reduction of a job to the remaining nodes, a pure function. Spares replace lost nodes. Without spares the job goes on
with fewer data-parallel ranks and engines, within the original number per node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from megarl.config import Config
from megarl.config.model_roles import sections_of
from megarl.core.errors import ArchitectureError, ConfigError, JobError, PlanError
from megarl.core.jobs import ProcessKind
from megarl.learn import algorithms
from megarl.learn.parallel.grid import with_dp
from megarl.run.nodes.advice import check_idle, with_advice
from megarl.run.nodes.plan import (
    NodeInfo,
    Plan,
    engine_nodes,
    groups_of,
    plan_job,
    short_table,
    split_group,
    table,
    trainer_nodes,
)
from megarl.run.run_dir.changes import Change


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
