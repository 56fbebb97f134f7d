"""Plan of a job: its processes, each on a node with its devices. A pure function of settings and nodes, printed before
anything starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megarl.core.config import Config
from megarl.core.errors import ConfigError
from megarl.core.jobs import Job, ProcessKind
from megarl.learn import algorithms
from megarl.learn.parallel.grid import role_grids, roles_of
from megarl.run.nodes.allocation import Role

if TYPE_CHECKING:
    from megarl.run.nodes.node import Node

DEEPEP_NODE = 8
"""Ranks of a group that DeepEP takes to be on one node: each maps the others' memory (its ``NUM_MAX_NVL_PEERS``)."""


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


class Planned(NamedTuple):
    """A process of a plan."""

    kind: ProcessKind
    number: int
    node: int
    """Rank."""
    part: int = 0
    """Number among the parts of an engine that spans nodes; part 0 serves."""
    gpus: tuple[int, ...] = ()
    """GPUs of its node that it sees; a trainer rank sees those of its neighbours too."""

    @property
    def name(self) -> str:
        return self.kind.named(self.number, self.part)

    @property
    def log(self) -> str:
        return self.kind.log(self.number, self.part)


@dataclass(frozen=True)
class Plan:
    """The processes of a job on its nodes."""

    job: Job
    processes: tuple[Planned, ...]
    """In the order in which they start."""

    def of(self, kind: ProcessKind) -> list[Planned]:
        """Processes of one kind."""
        return [process for process in self.processes if process.kind is kind]

    def parts(self, engine: Planned) -> int:
        """Number of an engine's parts; more than 1 for one that spans nodes."""
        return sum(other.number == engine.number for other in self.of(engine.kind))


def trainer_nodes(nodes: Sequence[NodeInfo]) -> list[int]:
    """Ranks of the nodes that may have trainer ranks."""
    return [node.rank for node in nodes if node.role != "rollout"]


def engine_nodes(nodes: Sequence[NodeInfo]) -> list[int]:
    """Ranks of the nodes that may have engines."""
    return [node.rank for node in nodes if node.role != "trainer"]


def plan_job(config: Config, nodes: Sequence[NodeInfo], *, trainers: int | None = None) -> Plan:
    """Trainer ranks in equal blocks, one node after the other, so that tensor-parallel ranks are neighbours; engines in
    turn.

    ``trainers``: only so many of the nodes that may have trainer ranks get some, the first ones; None is all.

    Raises:
        ConfigError: the ranks or engines do not spread evenly over the nodes that may have them, or want more GPUs than
            a node has.
    """
    job = algorithms.job_of(config)
    found = {
        ProcessKind.TRAINER: _ranks_of(config, nodes, trainers) if job.trains else [],
        ProcessKind.ENGINE: _engines(config, engine_nodes(nodes)) if job.has(ProcessKind.ENGINE) else [],
        ProcessKind.REWARD_HOST: [Planned(ProcessKind.REWARD_HOST, node.rank, node.rank) for node in nodes[1:]],
        ProcessKind.EXPLORER: [
            Planned(ProcessKind.EXPLORER, number, nodes[0].rank) for number in range(config.rollout.explorers)
        ],
        ProcessKind.BENCH: [Planned(ProcessKind.BENCH, 0, nodes[0].rank)],
    }
    plan = Plan(job, tuple(process for kind in job.processes for process in found[kind]))
    return _with_gpus(config, nodes, plan) if config.parallel.backend == "nccl" else plan


def _ranks_of(config: Config, nodes: Sequence[NodeInfo], trainers: int | None) -> list[Planned]:
    """Every trainer rank. Raises ConfigError."""
    chosen = trainer_nodes(nodes)[:trainers]
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
    each, (together, setting) = world // len(chosen), ranks_together(config)
    if each % together:
        raise ConfigError(
            f"model.moe_dispatcher=deepep: of the ranks that {setting}.ep x etp share experts, DeepEP needs each "
            f"{together} neighbours on one node, but {world} ranks on {len(chosen)} trainer nodes are {each} on each; "
            f"have a multiple of {together} on a node (parallel.dp, number of nodes), lower {setting}.ep, or set "
            "model.moe_dispatcher to alltoall"
        )
    return [Planned(ProcessKind.TRAINER, rank, chosen[rank // each]) for rank in range(world)]


def ranks_together(config: Config) -> tuple[int, str]:
    """Return the number of neighbouring trainer ranks that must be on one node, and the setting of the grid that needs
    it: 1 without DeepEP.

    Megatron's groups of ep x etp are neighbours, and begin at multiples of their size.
    """
    if config.model.moe_dispatcher != "deepep":
        return 1, "parallel"
    grids = role_grids(config, roles_of(config, algorithms.get(config.algorithm.name)))
    found = [(min(grid.ep * grid.expert_tp, DEEPEP_NODE), setting) for setting, grid in grids.items() if grid.ep > 1]
    return max(found, key=lambda each: each[0], default=(1, "parallel"))


def _engines(config: Config, nodes: Sequence[int]) -> list[Planned]:
    """Every part of every engine. Raises ConfigError."""
    span = config.rollout.nodes
    if span > len(nodes):
        raise ConfigError(
            f"rollout.nodes={span} for each engine, but {len(nodes)} nodes may have engines; lower it or add nodes"
        )
    if workers_of(config) % span:
        raise ConfigError(
            f"rollout.nodes={span} must divide the {workers_of(config)} workers of an engine (rollout.tp * rollout.pp)"
        )
    groups = [nodes[i : i + span] for i in range(0, len(nodes) - span + 1, span)]
    return [
        Planned(ProcessKind.ENGINE, i, node, part)
        for i in range(config.rollout.replicas)
        for part, node in enumerate(groups[i % len(groups)])
    ]


def workers_of(config: Config) -> int:
    """Number of an engine's workers."""
    return config.rollout.tp * config.rollout.pp


def _with_gpus(config: Config, nodes: Sequence[NodeInfo], plan: Plan) -> Plan:
    """The plan, where each process that computes on a GPU has one of its own, or, colocated, a trainer rank and an
    engine worker have one together. Raises ConfigError."""
    each = workers_of(config) // config.rollout.nodes
    colocated = config.rollout.placement == "colocated"
    on_node = Counter(rank.node for rank in plan.of(ProcessKind.TRAINER))
    engines = Counter(part.node for part in plan.of(ProcessKind.ENGINE))
    for node in nodes:
        ranks, workers = on_node[node.rank], each * engines[node.rank]
        if (max(ranks, workers) if colocated else ranks + workers) > node.gpus:
            whose = "its own" if not colocated else "which may be that of one of the other kind"
            fix = "" if colocated else ", or have them take turns with rollout.placement=colocated"
            raise ConfigError(
                f"{node} would have {ranks} trainer ranks and {workers} engine workers, each with a GPU, {whose} "
                f"(parallel.backend=nccl), but has {node.gpus} GPUs; add nodes or GPUs (sbatch --gpus-per-node), lower "
                f"parallel.dp or rollout.replicas{fix}"
            )
    free: Counter[int] = Counter() if colocated else Counter(on_node)
    placed = []
    for process in plan.processes:
        if process.kind is ProcessKind.TRAINER:
            process = process._replace(gpus=tuple(range(on_node[process.node])))
        elif process.kind is ProcessKind.ENGINE:
            process = process._replace(gpus=tuple(range(free[process.node], free[process.node] + each)))
            free[process.node] += each
        placed.append(process)
    return Plan(plan.job, tuple(placed))


_OTHERS = {
    ProcessKind.EXPLORER: "explorer and reward workers",
    ProcessKind.REWARD_HOST: "reward workers",
    ProcessKind.BENCH: "bench",
}


def table(plan: Plan, nodes: Sequence[NodeInfo]) -> str:
    """One line for each node."""
    lines = []
    for node in nodes:
        here = [process for process in plan.processes if process.node == node.rank]
        ranks = [process for process in here if process.kind is ProcessKind.TRAINER]
        parts = [_ranks(ranks)] if ranks else []
        parts += [f"{_engine(plan, process)}{_gpus(process)}" for process in here if process.kind is ProcessKind.ENGINE]
        for kind, number in Counter(process.kind for process in here if process.kind in _OTHERS).items():
            parts.append(_OTHERS[kind] if number == 1 else f"{number} {_OTHERS[kind]}".replace("explorer", "explorers"))
        lines.append(f"{node}: {', '.join(parts) or 'nothing'}")
    return "\n".join(lines)


def _ranks(ranks: Sequence[Planned]) -> str:
    first, last = ranks[0], ranks[-1]
    names = first.name if len(ranks) == 1 else f"trainer ranks {first.number}-{last.number}"
    return names + _gpus(first)


def _engine(plan: Plan, process: Planned) -> str:
    parts = plan.parts(process)
    name = process.kind.named(process.number)
    return name if parts == 1 else f"{name} (part {process.part + 1} of {parts})"


def _gpus(process: Planned) -> str:
    if not process.gpus:
        return ""
    first, last = process.gpus[0], process.gpus[-1]
    return f" on GPU {first}" if first == last else f" on GPUs {first}-{last}"
