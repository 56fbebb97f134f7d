"""Starts the processes of one attempt of a job on its nodes and watches them. A dead process is replaced, or ends the
attempt with its last lines."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from megarl.buffer.store import Store
from megarl.config import Config
from megarl.core.errors import FencedError, JobError, MemoryFullError, NonRetryableError
from megarl.core.jobs import PROGRAM, STOPPED, ProcessKind, kind_of, logs_of
from megarl.engines.client.names import KEY_VARIABLE
from megarl.engines.fleet import EngineRow, Replacements
from megarl.learn.algorithms import job_of
from megarl.run.nodes.node import LocalNode, Node, NotStarted, Process, Spec, Started, on_every_node
from megarl.run.nodes.notice import Departures
from megarl.run.nodes.plan import NodeInfo, Plan, workers_of
from megarl.run.postgres import Server
from megarl.run.process import ports
from megarl.run.process.interrupt import StopAsked
from megarl.run.run_dir.owner import check_fence
from megarl.run.supervise.drains import Drains
from megarl.run.supervise.engines import (
    LOOK_OFTEN_S,
    LOOK_S,
    EngineSupervisor,
    MoreEngines,
    RowsInStore,
    first_rows,
    room_for_engines,
)
from megarl.run.supervise.process_specs import Addresses, record_settings, specs
from megarl.run.supervise.process_units import SETTLE_S, Units, ending, failed, is_engine
from megarl.run.supervise.trainers import RankRestarts
from megarl.run.supervise.watchdog import Watchdog

log = logging.getLogger(__name__)

WATCH_S = 0.1
FENCE_S = 1.0
"""Seconds between two checks for a later attempt."""
ENGINES_SHARE = 0.25
"""Part of ``run.shutdown_grace_s`` after which the engines end: a trainer that waits for a hung engine can still
save."""
STOPPING = {
    ProcessKind.TRAINER: "saving a checkpoint",
    ProcessKind.EXPLORER: "giving claims back",
    ProcessKind.BENCH: "answers that are finished are kept",
}
"""Kind whose end ends a job -> its reaction to a stop request, for the log."""
STOP_S = 10.0
"""Seconds for processes to end after SIGTERM once one of them has died."""
RANKS_STOP_S = 2.0
"""Seconds for trainer ranks to end once one has died: a rank in a collective with it handles no signal, and no rank can
save a checkpoint without it."""


def start_attempt(config: Config, plan: Plan, nodes: Sequence[Node], attempt: int, key: str) -> list[Started]:
    """Start the processes of a plan, each on its node.

    Raises:
        ConfigError: a port is taken; nothing was started.
        JobError: a node failed to start a process; the started ones are ended.
    """
    by_rank = {node.rank: node for node in nodes}
    addresses = choose_addresses(plan, by_rank)
    logs = _logs(config, attempt)
    environment = {KEY_VARIABLE: key, "MEGARL_ATTEMPT": str(attempt), PROGRAM: plan.job.program}
    environment["MEGARL_TTY"] = "1" if sys.stderr.isatty() else "0"
    record_settings(config)
    placed = specs(config, plan, addresses, environment, logs)
    rows = _rows_of([spec for _, spec in placed], config, attempt, away=plan.takes_turns)
    _register_engines(config, plan, rows, attempt, nodes)
    started: list[Started] = []
    try:
        for rank, spec in placed:
            node = by_rank[rank]
            spec.env.update(_node_environment(node))
            later = plan.takes_turns and is_engine(spec.name)  # the trainer orders its start
            process = NotStarted(spec.name, Path(spec.log)) if later else node.start(spec)
            started.append(Started(process, node, spec))
    except BaseException:
        stop(started, STOP_S)
        raise
    running = [s for s in started if not isinstance(s.process, NotStarted)]
    names = ", ".join(s.process.name + (f" on {s.node.name}" if len(nodes) > 1 else "") for s in running)
    log.info("started %s; logs in %s", names, logs)
    return started


def _rows_of(placed: Sequence[Spec], config: Config, attempt: int, *, away: bool) -> list[EngineRow]:
    return first_rows(placed, job_of(config).program, attempt, workers_of(config), away=away)


def _register_engines(
    config: Config, plan: Plan, rows: Sequence[EngineRow], attempt: int, nodes: Sequence[Node]
) -> None:
    """Write the engines, and the room for more, into the store for explorer and trainer.

    A job without engines removes the rows of an earlier start, because its trainer would wait for their heartbeats.
    """
    if not plan.job.rollouts:
        return
    store = Store(config.store.url, attempt=attempt, outage_s=config.store.outage_s, program=plan.job.program)
    try:
        room = room_for_engines(config, plan, [NodeInfo.of(node) for node in nodes]) if rows else None
        store.engines.register(rows, room)
    finally:
        store.close()


def choose_addresses(plan: Plan, nodes: dict[int, Node]) -> Addresses:
    """Choose the address of every listening process of a plan. Each node is asked once for its ports, so that none is
    used twice."""
    ranks = plan.of(ProcessKind.TRAINER)
    first = ranks[0].node if ranks else 0
    linked = bool(ranks) and plan.job.rollouts
    engines = [engine for engine in plan.of(ProcessKind.ENGINE) if not engine.part]
    hosts = [host.node for host in plan.of(ProcessKind.REWARD_HOST)]
    wanted = [*([first] if ranks else []), *([first] if linked else []), *hosts]
    wanted += [engine.node for engine in engines for _ in range(2 if plan.parts(engine) > 1 else 1)]
    free = {rank: iter(nodes[rank].free_ports(wanted.count(rank))) for rank in dict.fromkeys(wanted)}

    def listen(rank: int) -> str:
        return f"{nodes[rank].address}:{next(free[rank])}"

    rendezvous = listen(first) if ranks else ""
    link = listen(first) if linked else ""
    serving = tuple(listen(engine.node) for engine in engines)
    groups = tuple(listen(engine.node) if plan.parts(engine) > 1 else "" for engine in engines)
    for engine, address in zip(engines, serving, strict=True):
        # An engine that takes turns with the trainer starts later: hold its port, or another job could take it.
        if isinstance(node := nodes[engine.node], LocalNode):
            with suppress(OSError):  # another process took it, which the engine's start reports
                ports.hold_in(node.held, address)
    return Addresses(rendezvous, link, serving, groups, tuple(listen(node) for node in hosts))


def _logs(config: Config, attempt: int) -> Path:
    return logs_of(config.run.dir, attempt, job_of(config).program)


def _node_environment(node: Node) -> dict[str, str]:
    """Return the variable that names the network interface of a node's processes; {} for a job on one machine, which
    uses loopback."""
    if not node.interface:
        return {}
    interfaces = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), node.interface)
    return {"MEGARL_NODE_ADDRESS": node.address, "VLLM_HOST_IP": node.address, **interfaces}


def stop(started: Sequence[Started], grace_s: float) -> None:
    """Send SIGTERM to all, then SIGKILL to the rest after ``grace_s``; return when all have ended. Nodes work in
    parallel."""
    on_every_node(started, lambda node, names: node.stop(names, grace_s))


def watch(
    started: Sequence[Started],
    stop_request: StopAsked,
    config: Config,
    attempt: int | None = None,
    server: Server | None = None,
    restarts: RankRestarts | None = None,
    check_engines: Callable[[Config, int], None] = lambda config, number: None,
) -> None:
    """Replace dead processes until the deciding ones (``Job.until``) have finished or stopped on request, then end the
    rest.

    Args:
        attempt: Number of this attempt; a later attempt in the run's directory ends it.
        restarts: Starts trainer ranks again alone, which begins another attempt; None ends the attempt instead.
        check_engines: Raises ConfigError if the job cannot go on with this number of engines.
        server: The job's own database: restarted whenever it ends, also by the signal with which Slurm stops a step.

    Raises:
        JobError: a process died and was not replaced: its name, exit status and last lines. Or the trainer makes no
            progress: the location of each process. All processes have ended by then.
        NonRetryableError: a process died of an error that would recur.
        MemoryFullError: a trainer rank ran out of memory.
        FencedError: a later attempt has begun.
    """
    started = list(started)
    replacements = Replacements(config.cluster.replacements)
    units = Units(started, replacements)
    job = job_of(config)

    def deciding() -> list[Process]:
        return [s.process for s in started if kind_of(s.process.name) is job.until]

    asked = STOPPED if job.joins else 0
    """Exit status of a process that ended in order after a stop request."""
    engines: list[Process] = []
    asked_at: float | None = None
    looked_at = 0.0
    watchdog = Watchdog(config, _logs(config, attempt or 0))
    # Engines that take turns with the trainer are started by order in each step.
    often, more = any(isinstance(s.process, NotStarted) for s in started), MoreEngines(config, started)
    rows = _rows_of([s.spec for s in started if s.spec is not None], config, attempt or 0, away=often)
    supervisor = EngineSupervisor(rows, units, replacements, STOP_S, more, often=often)
    in_store = None
    if attempt is not None and job.has(ProcessKind.ENGINE):
        store = Store(config.store.url, attempt=attempt, program=job.program, has_tables=True, outlives=True)
        in_store = RowsInStore(store, LOOK_OFTEN_S if often else LOOK_S, beats=not job.is_alone)
        in_store.start()
    drains = None
    if isinstance(stop_request, Departures) and in_store is not None:
        drains = Drains(config, started, units, supervisor, in_store.order_away, check_engines, STOP_S)
        stop_request.drain = drains.begin
    try:
        while True:
            if attempt is not None and time.monotonic() - looked_at > FENCE_S:
                looked_at = time.monotonic()
                check_fence(Path(config.run.dir), attempt, job.program)
            if server is not None and server.poll() is not None:
                log.warning("the job's PostgreSQL has ended (status %s); starting it again", server.poll())
                server.start()
            if stop_request.count and asked_at is None:
                asked_at = time.monotonic()
                engines = [s.process for s in units.present() if is_engine(s.process.name)]
                log.warning("stopping: %s (interrupt twice more to end at once)", STOPPING[job.until])
                for process in deciding():
                    process.signal(signal.SIGTERM)
            engines_s = ENGINES_SHARE * config.run.shutdown_grace_s
            if engines and asked_at is not None and time.monotonic() - asked_at > engines_s:
                while engines:
                    engines.pop().signal(signal.SIGKILL)
            late = asked_at is not None and time.monotonic() - asked_at > config.run.shutdown_grace_s
            early = asked_at is not None and any(p.poll() == -signal.SIGTERM for p in deciding())  # no handler yet
            if stop_request.count > 2 or late or early:
                log.warning(
                    "ending at once: what is not saved within %g s is lost; the run resumes from the newest checkpoint "
                    "that is whole",
                    STOP_S,
                )
                return
            # After a stop request, a stop of the whole session or Slurm step may have ended the others too: only a
            # trainer's failure matters.
            if in_store is not None:
                in_store.exchange(supervisor)
            if asked_at is None:
                is_well = units.look()
                if stop_request.count:
                    continue  # the stop may have ended the others as well
                if not is_well and restarts is not None and restarts.begin(started, units):
                    attempt = restarts.attempt
                    continue
                if not ((is_well or units.replace_others()) and supervisor.act()):
                    _raise_for_dead([s.process for s in units.present()], units.used_up)
            else:
                supervisor.act(stopping=True)
                _raise_for_dead([p for p in deciding() if p.poll() != asked], "")
            if all(p.poll() in (0, asked if asked_at is not None else 0) for p in deciding()):
                return
            if asked_at is None:
                if drains is not None:
                    drains.act()
                watchdog.look(started)
            time.sleep(WATCH_S)
    except FencedError:
        for s in started:
            s.process.signal(signal.SIGKILL)
        raise
    finally:
        if in_store is not None:
            in_store.close()
        ranks = [s for s in started if kind_of(s.process.name) is ProcessKind.TRAINER]
        if any(failed(s.process) for s in ranks):
            stop(ranks, RANKS_STOP_S)
        stop(started, STOP_S)


def _raise_for_dead(processes: Sequence[Process], used_up: str) -> None:
    if _failed(processes):
        time.sleep(SETTLE_S)
        first, *others = sorted(_failed(processes), key=lambda p: p.last_output_at())
        also = "".join(f"\nthen {ending(process)} ({process.log})" for process in others)
        statuses = {process.poll() for process in processes}
        kinds = (kind for kind in (NonRetryableError, MemoryFullError) if kind.STATUS in statuses)
        raise next(kinds, JobError)(
            f"{ending(first)}{used_up and f', {used_up}'}; its last lines ({first.log}):\n{first.tail()}{also}"
        )


def _failed(processes: Sequence[Process]) -> list[Process]:
    return [process for process in processes if failed(process)]
