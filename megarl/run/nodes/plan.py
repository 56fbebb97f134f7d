"""Plan of a job: its processes, each on a node with its devices. A pure function of settings and nodes, printed before
any process starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megarl.config import Config
from megarl.core.errors import ConfigError
from megarl.core.jobs import Job, ProcessKind
from megarl.learn import algorithms
from megarl.learn.parallel.grid import role_grids, roles_of
from megarl.run.nodes.node import Role

if TYPE_CHECKING:
    from megarl.run.nodes.node import Node

DEEPEP_NODE = 8
"""Maximum ranks of a DeepEP group within a node: each maps the others' memory (DeepEP's ``NUM_MAX_NVL_PEERS``)."""


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
    """Rank of the node."""
    part: int = 0
    """Number of this part of an engine that spans nodes; part 0 is the server."""
    gpus: tuple[int, ...] = ()
    """GPUs of its node that the process sees; a trainer rank also sees its neighbours' GPUs."""

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
    """Processes in the order of their start."""
    takes_turns: bool = False
    """Engines share devices with trainer ranks and leave them while the ranks compute; the trainer starts engines."""

    def of(self, kind: ProcessKind) -> list[Planned]:
        """Return the processes of one kind."""
        return [process for process in self.processes if process.kind is kind]

    def parts(self, engine: Planned) -> int:
        """Return the number of an engine's parts; more than 1 if it spans nodes."""
        return sum(other.number == engine.number for other in self.of(engine.kind))


def trainer_nodes(nodes: Sequence[NodeInfo]) -> list[int]:
    """Return the ranks of the nodes that may have trainer ranks."""
    return [node.rank for node in nodes if node.role != "rollout"]


def engine_nodes(nodes: Sequence[NodeInfo]) -> list[int]:
    """Return the ranks of the nodes that may have engines."""
    return [node.rank for node in nodes if node.role != "trainer"]


def plan_job(config: Config, nodes: Sequence[NodeInfo], *, trainers: int | None = None) -> Plan:
    """Place a job's processes on nodes: trainer ranks in equal blocks, one node after the other, then engines.

    With ``parallel.backend=nccl`` each rank and each engine worker has a separate GPU (colocated: one rank and one
    worker share it), and a group of ``groups_of`` stays on a node. Ranks use as many nodes as these rules allow;
    engines use the remaining GPUs, the emptiest nodes first.

    ``trainers``: number of nodes with trainer ranks, taken from the first that may have them; None: as many as
    possible.

    Raises:
        ConfigError: ranks or engines do not spread evenly or need more GPUs than exist, or a group spans nodes.
    """
    job = algorithms.job_of(config)
    if job.trains and (not trainer_nodes(nodes) or nodes[0].role == "rollout"):
        raise ConfigError(
            "node 0 must be a trainer node (MEGARL_ROLE trainer or all): rank 0 and the explorer run there"
        )
    deal = _deal_on_gpus if config.parallel.backend == "nccl" else _deal_on_cpus
    ranks, engines = deal(config, nodes, job, trainers)
    found = {
        ProcessKind.TRAINER: ranks,
        ProcessKind.ENGINE: engines,
        ProcessKind.REWARD_HOST: [Planned(ProcessKind.REWARD_HOST, node.rank, node.rank) for node in nodes[1:]],
        ProcessKind.EXPLORER: [
            Planned(ProcessKind.EXPLORER, number, nodes[0].rank) for number in range(config.rollout.explorers)
        ],
        ProcessKind.BENCH: [Planned(ProcessKind.BENCH, 0, nodes[0].rank)],
    }
    processes = tuple(process for kind in job.processes for process in found[kind])
    return Plan(job, processes, takes_turns=config.rollout.is_colocated and job.has(ProcessKind.ENGINE))


class Group(NamedTuple):
    """Neighbouring trainer ranks that must be on one node. A group larger than a node fills whole nodes."""

    size: int
    setting: str
    """Settings that determine the group."""


def groups_of(config: Config) -> list[Group]:
    """Return groups of the trainer's grids that stay on a node. On GPUs: tensor-parallel and expert-parallel ranks,
    since links within a node are several times as fast. DeepEP's groups always.

    Megatron's tensor-parallel groups, and its groups of ep x etp, are neighbours and begin at multiples of their size.
    """
    deepep, found = config.model.moe_dispatcher == "deepep", []
    for setting, grid in role_grids(config, roles_of(config, algorithms.get(config.algorithm.name))).items():
        experts = grid.ep * grid.expert_tp if grid.ep > 1 else 1
        if config.parallel.backend == "nccl":
            found += [Group(grid.tp, f"{setting}.tp"), Group(experts, f"{setting}.ep x etp")]
        if deepep:
            found.append(Group(min(experts, DEEPEP_NODE), f"{setting}.ep x etp"))
    return sorted((group for group in found if group.size > 1), key=lambda group: -group.size)


def split_group(config: Config, each: int, gpus: int | None) -> Group | None:
    """Return a group that blocks of ``each`` ranks would split; None if there is none.

    ``gpus``: GPUs per node; None if nodes have no fixed number of places.
    """
    for group in groups_of(config):
        fills_nodes = gpus is not None and each == gpus < group.size and group.size % gpus == 0
        if each % group.size and not fills_nodes:
            return group
    return None


Dealt = tuple[list[Planned], list[Planned]]
"""(trainer ranks, parts of engines)."""


def _deal_on_cpus(config: Config, nodes: Sequence[NodeInfo], job: Job, trainers: int | None) -> Dealt:
    """Place ranks on every node, and engines in turn. Raises ConfigError."""
    ranks = []
    if job.trains:
        chosen, world = trainer_nodes(nodes)[:trainers], config.parallel.world_size
        if world % len(chosen):
            raise ConfigError(
                f"parallel tp*cp*dp*pp = {world} ranks do not spread evenly over {len(chosen)} trainer nodes; change "
                "parallel.dp or the number of nodes"
            )
        if (group := split_group(config, world // len(chosen), None)) is not None:
            raise ConfigError(  # CPUs keep only these groups on a node
                f"model.moe_dispatcher=deepep: every {group.size} neighbouring ranks of a group of {group.setting} "
                f"must be on one node, but {world} ranks on {len(chosen)} trainer nodes are "
                f"{world // len(chosen)} on each; have a multiple of {group.size} on a node (parallel.dp, number of "
                f"nodes), lower {group.setting.split()[0]}, or set model.moe_dispatcher to alltoall"
            )
        ranks = _blocks(world, chosen)
    return ranks, _parts(config, _spans(config, engine_nodes(nodes))) if job.has(ProcessKind.ENGINE) else []


def _deal_on_gpus(config: Config, nodes: Sequence[NodeInfo], job: Job, trainers: int | None) -> Dealt:
    """Place each process with its GPUs. Raises ConfigError."""
    world, may = config.parallel.world_size, trainer_nodes(nodes)
    gpus = min((node.gpus for node in nodes if node.rank in may), default=0)
    if job.has(ProcessKind.ENGINE):
        _check_engine_groups(config, nodes)
    counts = [trainers] if trainers is not None else range(len(may), 0, -1)
    for count in counts if job.trains else [0]:
        each = world // count if count else 0
        if count and (world % count or each > gpus or split_group(config, each, gpus)):
            continue
        ranks = [rank._replace(gpus=tuple(range(each))) for rank in _blocks(world, may[:count])] if count else []
        taken = dict.fromkeys(may[:count], kept_from_engines(config, each))
        engines = _engines_on_gpus(config, nodes, taken) if job.has(ProcessKind.ENGINE) else []
        if engines is not None:
            return ranks, engines
    raise ConfigError(_no_room(config, nodes, job))


def _blocks(world: int, nodes: Sequence[int]) -> list[Planned]:
    each = world // len(nodes)
    return [Planned(ProcessKind.TRAINER, rank, nodes[rank // each]) for rank in range(world)]


def _spans(config: Config, nodes: Sequence[int]) -> list[Sequence[int]]:
    """Return the groups of nodes that an engine spans. Raises ConfigError."""
    span = config.rollout.nodes
    if span > len(nodes):
        raise ConfigError(
            f"rollout.nodes={span} for each engine, but {len(nodes)} nodes may have engines; lower it or add nodes"
        )
    if workers_of(config) % span:
        raise ConfigError(
            f"rollout.nodes={span} must divide the {workers_of(config)} workers of an engine (rollout.tp * rollout.pp)"
        )
    return [nodes[i : i + span] for i in range(0, len(nodes) - span + 1, span)]


def _parts(config: Config, spans: Sequence[Sequence[int]]) -> list[Planned]:
    """Return every part of every engine, placed in turn."""
    return [
        Planned(ProcessKind.ENGINE, i, node, part)
        for i in range(config.rollout.replicas)
        for part, node in enumerate(spans[i % len(spans)])
    ]


def _keeps_groups(config: Config, nodes: int, gpus: int) -> bool:
    """Return True if an engine's tensor-parallel workers over ``nodes`` nodes stay within one node of ``gpus`` GPUs or
    fill nodes."""
    each, left = divmod(workers_of(config), nodes)
    return left == 0 and (each % config.rollout.tp == 0 or each == gpus < config.rollout.tp)


def span_of(config: Config, gpus: int) -> int | None:
    """Return the number of nodes of an engine: ``rollout.nodes``, else the fewest that work; None if there is none."""
    workers = workers_of(config)
    spans = (config.rollout.nodes, *range(1, workers + 1))
    return next((n for n in spans if workers <= n * gpus and _keeps_groups(config, n, gpus)), None)


def _check_engine_groups(config: Config, nodes: Sequence[NodeInfo]) -> None:
    """Raise ConfigError if an engine's tensor-parallel workers span nodes but would fit one, or fill a node in part."""
    rollout, gpus = config.rollout, min((node.gpus for node in nodes if node.role != "trainer"), default=0)
    if not gpus or _keeps_groups(config, rollout.nodes, gpus):
        return
    span = span_of(config, gpus)
    fix = f"rollout.nodes={span}" if span is not None else f"rollout.tp={rollout.tp // gpus * gpus}"
    raise ConfigError(
        f"rollout.nodes={rollout.nodes} for an engine of rollout.tp={rollout.tp} x rollout.pp={rollout.pp}: its "
        f"tensor-parallel workers would span nodes of {gpus} GPUs without filling them; set {fix}"
    )


def _engines_on_gpus(config: Config, nodes: Sequence[NodeInfo], taken: Mapping[int, int]) -> list[Planned] | None:
    """Place every part of every engine on GPUs of ``nodes`` after the first ``taken`` of each; None if one has no
    place."""
    each = workers_of(config) // config.rollout.nodes
    free = {node.rank: node.gpus - taken.get(node.rank, 0) for node in nodes if node.role != "trainer"}
    first = {node.rank: node.gpus - free[node.rank] for node in nodes if node.rank in free}
    there = [node for node, count in free.items() if count >= each]
    if len(there) < config.rollout.nodes:
        return None
    spans, found = _spans(config, there), []
    for number in range(config.rollout.replicas):
        span = max(spans, key=lambda span: min(free[node] for node in span))
        for part, node in enumerate(span):
            if free[node] < each:
                return None
            free[node] -= each
            gpus = tuple(range(first[node], first[node] + each))
            first[node] += each
            found.append(Planned(ProcessKind.ENGINE, number, node, part, gpus))
    return found


def _no_room(config: Config, nodes: Sequence[NodeInfo], job: Job) -> str:
    """Return the resources that the nodes lack, for an error."""
    ranks = config.parallel.world_size if job.trains else 0
    engines = config.rollout.replicas if job.has(ProcessKind.ENGINE) else 0
    needs = gpus_needed(config, job)
    what = " and ".join(
        [f"{ranks} trainer ranks"] * bool(ranks) + [f"{engines} engines of {workers_of(config)} GPUs"] * bool(engines)
    )
    sizes = " or ".join(map(str, sorted({node.gpus for node in nodes})))
    there = f"{len(nodes)} nodes of {sizes} GPUs" if len(nodes) > 1 else f"{sizes} GPUs"
    has = sum(node.gpus for node in nodes)
    if needs > has:
        could_share = ranks and engines and not config.rollout.is_colocated
        turns = ", or let them take turns: rollout.placement=colocated trainer.offload=memory" if could_share else ""
        return f"{what} need {needs} GPUs (parallel.backend=nccl), but the job has {has}{turns}"
    groups = ", ".join(f"{group.setting} = {group.size}" for group in groups_of(config))
    kept = f" with equal loads and groups that stay on a node ({groups})" if groups and ranks else " with equal loads"
    return f"{what} do not fit {there}{kept}"


def gpus_needed(config: Config, job: Job) -> int:
    """Return the number of GPUs of trainer ranks and engine workers; colocated ones share GPUs."""
    ranks = config.parallel.world_size * job.trains
    workers = config.rollout.replicas * workers_of(config) * job.has(ProcessKind.ENGINE)
    return max(ranks, kept_from_engines(config, ranks) + workers)


def kept_from_engines(config: Config, ranks: int) -> int:
    """Return the number of GPUs that ``ranks`` trainer ranks take from engines: 0 if colocated."""
    return 0 if config.rollout.is_colocated else ranks


def workers_of(config: Config) -> int:
    """Return the number of an engine's workers."""
    return config.rollout.tp * config.rollout.pp


def idle_gpus(plan: Plan, nodes: Sequence[NodeInfo]) -> dict[int, list[int]]:
    """Return rank of a node -> its GPUs without a process. Nodes without idle GPUs are left out; a job on CPUs gives
    {}."""
    if not any(process.gpus for process in plan.processes):
        return {}
    used = {node.rank: set[int]() for node in nodes}
    for process in plan.processes:
        used[process.node].update(process.gpus)
    found = {node.rank: [gpu for gpu in range(node.gpus) if gpu not in used[node.rank]] for node in nodes}
    return {rank: gpus for rank, gpus in found.items() if gpus}


_OTHERS = {
    ProcessKind.EXPLORER: "explorer and reward workers",
    ProcessKind.REWARD_HOST: "reward workers",
    ProcessKind.BENCH: "bench",
}


def table(plan: Plan, nodes: Sequence[NodeInfo]) -> str:
    """Return one line per node; for jobs on GPUs with its idle GPUs."""
    lines, idle = [], idle_gpus(plan, nodes)
    for node in nodes:
        here = [process for process in plan.processes if process.node == node.rank]
        ranks = [process for process in here if process.kind is ProcessKind.TRAINER]
        parts = [_ranks(ranks)] if ranks else []
        parts += _engines(plan, [process for process in here if process.kind is ProcessKind.ENGINE])
        for kind, number in Counter(process.kind for process in here if process.kind in _OTHERS).items():
            parts.append(_OTHERS[kind] if number == 1 else f"{number} {_OTHERS[kind]}".replace("explorer", "explorers"))
        if node.rank in idle:
            parts.append(f"idle: {_numbers(idle[node.rank])}")
        lines.append(f"{node}: {', '.join(parts) or 'nothing'}")
    return "\n".join(lines)


def short_table(plan: Plan, nodes: Sequence[NodeInfo]) -> str:
    """Return one line per run of nodes with equal numbers of ranks, engines and idle GPUs: the line of the run's first
    node."""
    idle = idle_gpus(plan, nodes)
    kinds = {node.rank: Counter[object](p.kind for p in plan.processes if p.node == node.rank) for node in nodes}
    lines, runs = table(plan, nodes).splitlines(), list[list[int]]()
    for i, node in enumerate(nodes):
        kind = (kinds[node.rank], len(idle.get(node.rank, ())))
        before = nodes[i - 1].rank if i else None
        if before is not None and kind == (kinds[before], len(idle.get(before, ()))):
            runs[-1].append(i)
        else:
            runs.append([i])
    return "\n".join(lines[run[0]] + (f" (and {len(run) - 1} like it)" if len(run) > 1 else "") for run in runs)


def _ranks(ranks: Sequence[Planned]) -> str:
    first, last = ranks[0], ranks[-1]
    names = first.name if len(ranks) == 1 else f"trainer ranks {first.number}-{last.number}"
    return names + _gpus(first)


def _engines(plan: Plan, parts: Sequence[Planned]) -> list[str]:
    """Describe the engines of a node: all whole engines in one text, each part of an engine that spans nodes in its
    own."""
    whole = [part for part in parts if plan.parts(part) == 1]
    found = []
    if len(whole) > 1:
        numbers = [part.number for part in whole]
        in_a_row = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        names = f"{numbers[0]}-{numbers[-1]}" if in_a_row else " ".join(map(str, numbers))
        gpus = [gpu for part in whole for gpu in part.gpus]
        found.append(f"engines {names}" + (f" on {_numbers(gpus)}" if gpus else ""))
    elif whole:
        found.append(whole[0].name + _gpus(whole[0]))
    return found + [
        f"{part.kind.named(part.number)} (part {part.part + 1} of {plan.parts(part)}){_gpus(part)}"
        for part in parts
        if part not in whole
    ]


def _gpus(process: Planned) -> str:
    return f" on {_numbers(process.gpus)}" if process.gpus else ""


def _numbers(gpus: Sequence[int]) -> str:
    """Return the numbers of GPUs as ranges."""
    first, last = gpus[0], gpus[-1]
    return f"GPU {first}" if first == last else f"GPUs {first}-{last}"
