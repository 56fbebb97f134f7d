"""Placement of a job's processes on nodes: a pure function of settings and nodes, printed before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megarl.core.config import Config
from megarl.core.errors import ConfigError
from megarl.core.jobs import ProcessKind
from megarl.learn import algorithms
from megarl.run.nodes.allocation import Role

if TYPE_CHECKING:
    from megarl.run.nodes.node import Node


class NodeInfo(NamedTuple):
    """Facts of a node that a placement depends on."""

    rank: int
    name: str
    role: Role
    gpus: int = 0

    @staticmethod
    def of(node: Node) -> NodeInfo:
        return NodeInfo(node.rank, node.name, node.role, node.gpus)

    def __str__(self) -> str:
        return f"node {self.rank} {self.name}".strip()


@dataclass(frozen=True)
class Placement:
    """Node ranks. ``engines``: the nodes of each engine, the first of which serves."""

    trainer: tuple[int, ...]
    engines: tuple[tuple[int, ...], ...]
    explorer: int | None
    reward_hosts: tuple[int, ...]
    """Nodes that have reward workers beside those of the explorer's."""
    workers: int = 0
    """Workers of an engine on each of its nodes."""

    def local_rank(self, rank: int) -> int:
        """Number of a trainer rank among those of its node."""
        return self.trainer[:rank].count(self.trainer[rank])

    def trainer_gpus(self, node: int) -> tuple[int, ...]:
        """Numbers of a node's first GPUs, one for each of its trainer ranks."""
        return tuple(range(self.trainer.count(node)))

    def engine_gpus(self, engine: int, node: int) -> tuple[int, ...]:
        """GPUs of an engine's workers on a node, after the trainer's and the engines' before it."""
        first = self.trainer.count(node) + self.workers * sum(node in span for span in self.engines[:engine])
        return tuple(range(first, first + self.workers))


def trainer_nodes(nodes: Sequence[NodeInfo]) -> list[int]:
    """Ranks of the nodes that may have trainer ranks."""
    return [node.rank for node in nodes if node.role != "rollout"]


def engine_nodes(nodes: Sequence[NodeInfo]) -> list[int]:
    """Ranks of the nodes that may have engines."""
    return [node.rank for node in nodes if node.role != "trainer"]


def place(config: Config, nodes: Sequence[NodeInfo], *, trainers: int | None = None) -> Placement:
    """Trainer ranks in equal blocks, one node after the other, so that tensor-parallel ranks are neighbours; engines in
    turn.

    ``trainers``: only so many of the nodes that may have trainer ranks get some, the first ones; None is all.

    Raises:
        ConfigError: the ranks or engines do not spread evenly over the nodes that may have them, or want more GPUs than
            a node has.
    """
    chosen, rollouts = trainer_nodes(nodes)[:trainers], engine_nodes(nodes)
    job = algorithms.get(config.algorithm.name).job
    world = config.parallel.world_size
    if not chosen or nodes[0].role == "rollout":
        raise ConfigError(
            "node 0 must be one of the trainer's (MEGARL_ROLE trainer or all): rank 0 and the explorer run there"
        )
    if world % len(chosen):
        raise ConfigError(
            f"parallel tp*cp*dp*pp = {world} ranks do not spread evenly over {len(chosen)} trainer nodes; change "
            "parallel.dp or the number of nodes"
        )
    if ProcessKind.ENGINE not in job.processes:
        return _with_gpus(config, nodes, Placement(_blocks(chosen, world), (), None, ()))
    span, replicas = config.rollout.nodes, config.rollout.replicas
    workers = config.rollout.tp * config.rollout.pp
    if not rollouts or span > len(rollouts):
        raise ConfigError(
            f"rollout.nodes={span} for each engine, but {len(rollouts)} nodes may have engines; lower it or add nodes"
        )
    if workers % span:
        raise ConfigError(
            f"rollout.nodes={span} must divide the {workers} workers of an engine (rollout.tp * rollout.pp)"
        )
    groups = [tuple(rollouts[i : i + span]) for i in range(0, len(rollouts) - span + 1, span)]
    engines = tuple(groups[i % len(groups)] for i in range(replicas))
    hosts = tuple(node.rank for node in nodes[1:])
    return _with_gpus(config, nodes, Placement(_blocks(chosen, world), engines, nodes[0].rank, hosts, workers // span))


def _with_gpus(config: Config, nodes: Sequence[NodeInfo], placement: Placement) -> Placement:
    """The placement, where each process that computes on a GPU has one of its own. Raises ConfigError."""
    for node in nodes if config.parallel.backend == "nccl" else ():
        ranks = placement.trainer.count(node.rank)
        workers = placement.workers * sum(node.rank in span for span in placement.engines)
        if ranks + workers > node.gpus:
            raise ConfigError(
                f"{node} would have {ranks} trainer ranks and {workers} engine workers, each with a GPU of its own "
                f"(parallel.backend=nccl), but has {node.gpus} GPUs; add nodes or GPUs (sbatch --gpus-per-node), or "
                "lower parallel.dp or rollout.replicas"
            )
    return placement


def _blocks(nodes: Sequence[int], world: int) -> tuple[int, ...]:
    each = world // len(nodes)
    return tuple(node for node in nodes for _ in range(each))


def table(placement: Placement, nodes: Sequence[NodeInfo]) -> str:
    """One line for each node."""
    lines = []
    for node in nodes:
        parts = [_ranks([r for r, n in enumerate(placement.trainer) if n == node.rank])]
        engines = [(i, span) for i, span in enumerate(placement.engines) if node.rank in span]
        parts += [f"{ProcessKind.ENGINE.named(i)}{_part(span, node.rank)}" for i, span in engines]
        parts += ["explorer and reward workers"] * (node.rank == placement.explorer)
        parts += ["reward workers"] * (node.rank in placement.reward_hosts)
        lines.append(f"{node}: {', '.join(part for part in parts if part) or 'nothing'}")
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return ProcessKind.TRAINER.named(ranks[0]) if len(ranks) == 1 else f"trainer ranks {ranks[0]}-{ranks[-1]}"


def _part(span: Sequence[int], node: int) -> str:
    return "" if len(span) == 1 else f" (part {span.index(node) + 1} of {len(span)})"
