"""Runs a training job from its settings: checks, preparation, attempts, and the settings of the next attempt."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from megarl.buffer.store import Store
from megarl.config import Config
from megarl.core.errors import ConfigError, FencedError, InputError, JobError, MemoryFullError, NonRetryableError
from megarl.core.jobs import EXPLORE, ProcessKind, of_program
from megarl.core.metrics import COMMAND, END, NOTICE, RESTART, Timeline
from megarl.core.processes.machine import born
from megarl.engines.client.leftovers import remove_stale_folders
from megarl.engines.client.names import KEY_VARIABLE
from megarl.learn.algorithms import job_of
from megarl.learn.memory.phases import OFFLOAD
from megarl.run.checks.job import check, check_micro_batches, check_sizes
from megarl.run.checks.tasksets import Selected
from megarl.run.job_store import job_store, shared_store
from megarl.run.launch.joining import await_run, enter, is_closed, leave
from megarl.run.launch.records import fill_experts
from megarl.run.launch.scale import check_engines
from megarl.run.nodes import health, node_agent
from megarl.run.nodes.fit import Fit, fit, reductions
from megarl.run.nodes.node import Allocation, LocalNode, Node, find, is_loopback
from megarl.run.nodes.notice import Departures, ready
from megarl.run.nodes.plan import NodeInfo, table
from megarl.run.nodes.remote import Gathering, RemoteNode
from megarl.run.postgres import Server
from megarl.run.process.interrupt import INTERRUPT, StopRequest
from megarl.run.process.process import ForkServers
from megarl.run.process.reaper import Reaper
from megarl.run.run_dir.changes import Change, changes_since_last_start
from megarl.run.run_dir.owner import check_fence, held_locks, next_attempt, own_run_dir, run_id, run_key
from megarl.run.run_dir.prepare import with_prompt_limit
from megarl.run.run_dir.resume import (
    check_owner_of_store,
    check_rows_of_run,
    check_store_of_run,
    is_finished,
    set_aside_damaged,
)
from megarl.run.run_dir.store_damage import fill_lost_store, fill_store_of_fetched, replace_damaged_store
from megarl.run.supervise.process_specs import preload, record_settings
from megarl.run.supervise.supervisor import start_attempt, watch
from megarl.run.supervise.trainers import Begun, RankRestarts, Restarts
from megarl.tasks import source_of
from megarl.weights.checkpoint.training.disk_space import written
from megarl.weights.checkpoint.training.manifest import KEPT, current_attempt, newest_state, read_manifest, steps_of
from megarl.weights.checkpoint.training.remote_folder import fetch_newer
from megarl.weights.checkpoint.training.state import latest, read_state

log = logging.getLogger(__name__)

ADVICE = (
    "lower trainer.max_tokens_per_micro_batch (with trainer.packing=false: trainer.micro_batch_size) or "
    "rollout.max_response_tokens, take models from the device (trainer.offload, critic.offload, reference.offload, "
    "reward_model.offload), set model.recompute=selective or full, or use more devices (parallel.tp, parallel.dp)"
)


class MicroBatchBudget:
    """Token budget of micro-batches, which a job may halve once. A start by hand has the configured budget again."""

    def __init__(self, fits: Callable[[Config], None] = check_micro_batches) -> None:
        self._fits = fits
        self._halved: Change | None = None

    def halve(self, config: Config, error: MemoryFullError) -> Config:
        """Return the settings with half the budget.

        Raises NonRetryableError with the settings to change if the budget was halved before or half is too little.
        """
        if self._halved is not None:
            setting, old, new = self._halved
            raise NonRetryableError(f"{error}\nout of memory again, with {setting} {old} -> {new}; {ADVICE}") from error
        try:
            smaller, self._halved = halved(config, self._fits)
        except InputError as too_small:
            raise NonRetryableError(
                f"{error}\nout of memory, and half the micro-batch is too little: {too_small}. Instead, {ADVICE}"
            ) from error
        setting, old, new = self._halved
        log.warning(
            "OUT OF MEMORY: the job goes on with %s %d -> %d. Losses and gradients are equal up to the order of "
            "summation. It is halved once, without counting in cluster.restarts; a resume by hand has %d again",
            setting,
            old,
            new,
            old,
        )
        return smaller


def halved(config: Config, fits: Callable[[Config], None] = check_micro_batches) -> tuple[Config, Change]:
    """Return the settings with half the tokens of a micro-batch (without packing: half the rows), and the change.

    Args:
        fits: Raises InputError if the run's longest sequence does not fit a micro-batch.

    Raises:
        InputError: the value is 1, or half does not fit.
    """
    trainer = config.trainer
    if trainer.packing:
        old, name = trainer.max_tokens_per_micro_batch, "max_tokens_per_micro_batch"
        trainer = replace(trainer, max_tokens_per_micro_batch=old // 2)
    else:
        old, name = trainer.micro_batch_size, "micro_batch_size"
        trainer = replace(trainer, micro_batch_size=old // 2)
    if old == 1:
        raise ConfigError(f"trainer.{name} is 1 already")
    smaller = replace(config, trainer=trainer)
    fits(smaller)
    return smaller, Change(f"trainer.{name}", old, old // 2)


OTHERS = 7
"""Connections to the store besides trainer ranks and explorers: supervisor, tools."""
UNFINISHED = 130
"""Exit status of a job that was stopped and can be resumed."""


def run(config: Config, servers: ForkServers | None = None) -> int:
    """Run the job, or this node's part of it, to its end. Return 0 if it finished, 130 if it was stopped and can be
    resumed. On a job's only machine processes are forked from ``servers``."""
    allocation = find()
    job, run_dir = job_of(config), Path(config.run.dir)
    key = os.environ.get(KEY_VARIABLE) or (secrets.token_urlsafe(24) if job.is_alone else run_key(run_dir))
    if not allocation.is_head:
        return node_agent.serve(allocation, config, key)
    program = job.program
    if allocation.nodes > 1:
        servers = None
    if servers is not None:
        preload(config, servers)
    with (
        Gathering(allocation, key, config.cluster.heartbeat_s) as gathering,
        own_run_dir(run_dir, program) as lock,
        ExitStack() as stack,
    ):
        if job.mode == "both" and (held := [name for name in held_locks(run_dir, program) if EXPLORE in name]):
            raise ConfigError(
                f"run.mode=both: explore programs of the run in {run_dir} are running ({', '.join(held)}); end them, "
                "or set run.mode=train"
            )
        if config.trainer.remote is not None and not job.joins:
            fetch_newer(run_dir, config.trainer.remote)  # with the number of the attempt that wrote it
        last = current_attempt(run_dir, program)  # a higher number from here on means that another job has taken over
        timeline = Timeline(run_dir / "timeline", of_program(COMMAND, program))
        timeline.add("import", born(), time.time() - born(), attempt=last + 1)
        tasks: Mapping[str, Selected] = {}
        if not job.joins:
            with timeline.phase("check"):
                tasks = check(config, repair=True, nodes=allocation.nodes)
                config = with_prompt_limit(config)
        host = config.run.host if allocation.nodes == 1 else allocation.head
        connections = allocation.nodes + config.rollout.explorers + OTHERS
        server = stack.enter_context(
            job_store(
                config.store.url,
                run_dir,
                key,
                host=host,
                connections=connections,
                held=[lock],
                folder=config.store.folder,
            )
            if job.is_alone
            else shared_store(config.store.url, run_dir, key)
        )
        if server is not None:
            fill_lost_store(config, server)
        if not job.joins:
            fill_store_of_fetched(config)
        begun = await_run(config, allocation.nodes) if job.joins else config
        if begun is None or _is_finished(config):
            fix = "" if config.run.mode == "bench" else "raise trainer.steps to go on, or "
            log.info("%s is finished; %stake another run.name to begin again", run_dir, fix)
        else:
            run_attempts(begun, tasks, allocation, gathering, lock, server, key, last, timeline, servers)
        # A rank that receives SIGTERM ends in order: only the run's files show whether the run is finished.
        finished = _is_finished(config)
        if finished and job.trains:  # also the report, which an earlier end may not have written
            from megarl.run.report.html import summary

            report_end(run_dir, config.store.outage_s)
            log.info("%s", summary(run_dir, config.store.outage_s))
    if not finished:
        from megarl.run.report.goodput import account_of

        if job.trains and (spent := account_of(run_dir)) is not None:
            log.info("%s", spent.line())
        log.warning("stopped; run the same command again to resume")
    return 0 if finished else UNFINISHED


def report_end(run_dir: Path, outage_s: float) -> None:
    """Write the report of a finished run; wait up to ``outage_s`` for space on a full disk. A report that cannot be
    written is no failure of the run."""
    from megarl.run.report.html import write_report

    try:
        written(run_dir / "report", partial(write_report, run_dir, outage_s), outage_s)
    except JobError as error:
        log.warning("%s, then `megarl report %s` writes the report; the run itself is finished", error, run_dir)


def _is_finished(config: Config) -> bool:
    """Return True if the run is finished; an explore program uses the state that the trainer's program wrote."""
    return is_closed(config) if job_of(config).joins else is_finished(config, Path(config.run.dir))


def run_attempts(
    config: Config, tasks: Mapping[str, Selected], allocation: Allocation, gathering: Gathering, lock: int,
    server: Server | None, key: str, last: int, timeline: Timeline,
    servers: ForkServers | None = None,
) -> None:  # fmt: skip
    """Run attempts after attempt ``last`` until one ends in order or ``cluster.restarts`` are used up.

    Once, an attempt that ran out of memory is followed by an extra one with smaller micro-batches.

    Raises:
        FencedError: another job has begun an attempt.
        JobError: the last attempt failed.
    """
    job, run_dir = job_of(config), Path(config.run.dir)
    with StopRequest() as stop_request, ExitStack() as stack:
        INTERRUPT.check()
        others = gathering.wait(config.cluster.connect_timeout_s, stop_request.is_set) if allocation.nodes > 1 else []
        everybody = [*others]
        others = healthy_nodes(config, allocation, others)
        if config.cluster.on_notice == "wait":
            for node in others:
                node.stop_request = stop_request
        for folder in remove_stale_folders(run_dir):
            log.info("removed %s, which a killed start of this run had left", folder)
        reaper = stack.enter_context(Reaper(lock))
        if not job.joins:
            shutil.rmtree(run_dir / "checkpoints" / KEPT, ignore_errors=True)  # of a command that was killed
            stack.callback(shutil.rmtree, run_dir / "checkpoints" / KEPT, ignore_errors=True)
        here = LocalNode(
            reaper,
            [lock],
            run_dir=run_dir,
            name=allocation.name,
            role=allocation.role,
            address=config.run.host,
            first_port=config.run.port,
            servers=servers,
        )
        stack.callback(here.end_kept)
        if allocation.nodes > 1:
            here.address, here.interface, here.first_port = allocation.head, health.interface_of(allocation.head), None
        elif not job.is_alone and not is_loopback(here.address):  # programs on other machines connect to it
            here.interface = health.interface_of(here.address)
        restarts, budget = Restarts(config.cluster.restarts), MicroBatchBudget()
        while True:
            with timeline.phase("prepare"):
                there = ready(others) if config.cluster.on_notice == "go_on" else [n for n in others if n.is_there()]
                fitted, nodes = _fitted(config, here, everybody, there)
                asked = Departures(stop_request, [node for node in nodes if isinstance(node, RemoteNode)])
                attempt = last = begin_attempt(config, stop_request, last)
                if not job.joins:
                    shutil.rmtree(run_dir / OFFLOAD, ignore_errors=True)  # files of killed ranks
                    fill_store(config, tasks, attempt, fitted.config)
                else:
                    enter(config, attempt)
            alone = RankRestarts(
                fitted.config,
                fitted.plan,
                attempt,
                restarts,
                timeline.phase(RESTART)(partial(begin_with_engines, fitted.config, stop_request, attempt)),
                partial(_last_step, fitted.config),
            )
            try:
                with timeline.phase("spawn"):
                    started = start_attempt(fitted.config, fitted.plan, nodes, attempt, key)
                watch(started, asked, fitted.config, attempt, server, alone, check_engines)
                timeline.add(END, time.time(), 0.0)
                if not asked.goes_on() or _is_finished(config) or not _still_fits(config, here, everybody, others):
                    return
                last = alone.attempt
            except (FencedError, NonRetryableError):
                raise
            except JobError as error:
                smaller = None
                if isinstance(error, MemoryFullError) and not stop_request.count:
                    smaller = budget.halve(config, error)
                elif not restarts.left or stop_request.count:
                    raise
                log.error("%s", error)
                last = alone.attempt
                check_fence(run_dir, last, job.program)
                if smaller is None:
                    restarts.left -= 1
                config = smaller or config
                log.warning("starting again from the newest checkpoint (cluster.restarts: %d left)", restarts.left)
                if job.joins:
                    continue
                set_aside_damaged(run_dir, digests=config.trainer.verify_checkpoints, stopping=stop_request.is_set)
                replace_damaged_store(config, stopping=stop_request.is_set)
            finally:
                if job.has(ProcessKind.ENGINE):
                    leave(config, alone.attempt)
                if asked.at is not None:
                    timeline.add(NOTICE, asked.at, time.time() - asked.at)


def begin_attempt(config: Config, stop_request: StopRequest, last: int | None = None) -> int:
    """Begin the attempt after ``last`` and return its number. Waits up to ``store.outage_s`` for space on a full disk.

    Raises:
        FencedError: a later attempt has begun.
        JobError: the number cannot be written.
    """
    run_dir, program = Path(config.run.dir), job_of(config).program
    following = partial(next_attempt, run_dir, last, program)
    return written(
        run_dir / of_program("attempt", program), following, config.store.outage_s, lambda: bool(stop_request.count)
    )


def begin_with_engines(config: Config, stop_request: StopRequest, first: int, last: int) -> Begun:
    """Begin the attempt after ``last`` for new trainer ranks. Processes of attempt ``first`` and later ones other than
    trainer ranks may go on.

    Raises as ``begin_attempt``; JobError if no whole checkpoint is left.
    """
    run_dir = Path(config.run.dir)
    set_aside_damaged(run_dir, digests=config.trainer.verify_checkpoints, stopping=stop_request.is_set)
    attempt = begin_attempt(config, stop_request, last)
    shutil.rmtree(run_dir / OFFLOAD, ignore_errors=True)  # files of killed ranks
    with closing(Store(config.store.url, outage_s=config.store.outage_s, program=job_of(config).program)) as store:
        store.begin_attempt(attempt, first)
        _drop_kept(config, run_dir, store)
        _discard_rollouts(config, run_dir, store, claims=False)
        return Begun(attempt, store.journal.last_step())


def _last_step(config: Config) -> int:
    with closing(Store(config.store.url, read_only=True, outage_s=config.store.outage_s)) as store:
        return store.journal.last_step()


def _fitted(
    config: Config, here: LocalNode, others: Sequence[RemoteNode], left: Sequence[RemoteNode]
) -> tuple[Fit, list[Node]]:
    """Return the largest job that fits the remaining nodes, and the nodes that it uses. Logs lost nodes and reductions.

    Raises as ``fit``.
    """
    nodes: list[Node] = [here, *left]
    there = [NodeInfo.of(node) for node in nodes]
    allocated = there[:1] + [NodeInfo.of(node) for node in others]
    fitted = fit(config, allocated, there, check_sizes)
    used = {node.rank for node in fitted.nodes}
    missing = [node for node in others if node not in left]
    for node in missing:
        log.warning(
            "node %d %s is %s", node.rank, node.name, "left out" if node.fault() is None else f"lost: {node.fault()}"
        )
    spares = [str(node) for node in there if node.rank not in used]
    if config.cluster.spare_nodes:
        log.info("spare nodes: %s", ", ".join(spares) or "none is left")
    if smaller := reductions(config, fitted.config):
        log.warning(
            "THE JOB GOES ON SMALLER, %d of %d nodes are left: %s. A step has the same rows, and the trainer's results "
            "are equal up to the order of summation. Started again with all nodes it has its full size.",
            len(there),
            len(allocated),
            ", ".join(f"{c.setting} {c.old} -> {c.new}" for c in smaller),
        )
    if len(used) > 1:
        log.info("%s", table(fitted.plan, fitted.nodes))
    return fitted, [node for node in nodes if node.rank in used]


def _still_fits(config: Config, here: LocalNode, others: Sequence[RemoteNode], left: Sequence[RemoteNode]) -> bool:
    """Return True if the job fits the nodes that do not leave; logs why not."""
    head = NodeInfo.of(here)
    nodes = [NodeInfo.of(node) for node in left if not node.stop_request.is_set()]
    try:
        fit(config, [head, *map(NodeInfo.of, others)], [head, *nodes], check_sizes)
    except (ConfigError, JobError) as error:
        log.warning("%s: the job waits until it has its nodes again", error)
        return False
    return True


def healthy_nodes(config: Config, allocation: Allocation, others: Sequence[RemoteNode]) -> list[RemoteNode]:
    """Return the other nodes without faults.

    Raises:
        JobError: more nodes are faulty than there are spares, and cluster.exclude_unhealthy is off; or the head is
            faulty.
    """
    if not others:
        return []
    token = secrets.token_hex(8)
    health.write_token(Path(config.run.dir), token)
    head = health.facts(allocation.name or "node 0", allocation.head)
    faults = health.faults(head, [(node.facts, node.arrived) for node in others], config)
    for node in others:
        if (fault := node.check_run_dir(config.run.dir, token)) is not None:
            faults.setdefault(node.name, []).append(fault)
    if not faults:
        return list(others)
    text = health.described(faults)
    if head.name in faults or not (config.cluster.exclude_unhealthy or len(faults) <= config.cluster.spare_nodes):
        raise JobError(
            f"{text}; fix it, or leave the node out (sbatch --exclude, cluster.exclude_unhealthy=true, "
            "cluster.spare_nodes)"
        )
    log.warning("left out: %s", text)
    return [node for node in others if node.name not in faults]


def fill_store(config: Config, tasks: Mapping[str, Selected], attempt: int, fitted: Config) -> None:
    """Prepare the store for an attempt before the explorer starts, which would claim open groups before engines have
    the weights.

    Begins the attempt, which fences all earlier ones, and adds the tasks. Deletes groups of weights that the newest
    checkpoint does not include, and groups requested ahead with changed settings.
    """
    run_dir = Path(config.run.dir)
    store = Store(config.store.url, outage_s=config.store.outage_s, program=job_of(config).program)
    check_owner_of_store(config, run_dir, store)
    store.begin_attempt(attempt)
    check_store_of_run(config, run_dir, store)
    store.journal.set_run_id(run_id(run_dir))
    _drop_kept(fitted, run_dir, store)
    if config.run.mode != "bench":  # a bench keeps its answers, which have one model
        _discard_rollouts(config, run_dir, store, claims=True)
    for split, selected in tasks.items():
        if store.tasks.read(split) != selected.tasks:
            check_rows_of_run(config, store, split, selected.tasks)
            store.tasks.add(split, selected.tasks)
            sources = Counter(source_of(task.task_id) for task in selected.tasks)
            data = {"split": split, "tasks": len(selected.tasks), "dropped": selected.dropped}
            store.journal.record_event(
                "supervisor", "tasks", data | ({} if "" in sources else {"sources": dict(sources)})
            )
    fill_experts(config, store)
    record_settings(fitted)  # before explore programs see the open job
    store.journal.open_job()
    store.close()


def _drop_kept(config: Config, run_dir: Path, store: Store) -> None:
    """Remove the manifests of kept states that an attempt cannot go on from: its grid is another, or the store lacks
    their steps."""
    found = latest(run_dir / "checkpoints" / KEPT)
    if found is None:
        return
    made = read_manifest(found).get("made", {})
    if made.get("parallel") != asdict(config.parallel) or steps_of([found])[0] > store.journal.last_step():
        shutil.rmtree(found.parent)


def _discard_rollouts(config: Config, run_dir: Path, store: Store, *, claims: bool) -> None:
    """Delete groups of earlier attempts that were requested with later weights than the newest checkpoint's; without a
    checkpoint, all groups, as their model and rows may have changed. ``claims`` as in ``Store.rollouts.discard``."""
    found = newest_state(run_dir / "checkpoints")
    # Groups requested ahead have samples and verdicts of the earlier settings.
    changed = any(change.trains() for change in changes_since_last_start(config, run_dir))
    from_step = 0 if found is None else int(read_state(found)["step"])
    for step in sorted(step for step in store.evaluations.uncounted().values() if step < from_step):
        log.warning("the evaluation of step %d was under way when the job ended: it is not measured", step)
        store.journal.record_event("supervisor", "evaluation_lost", {"step": step})
    store.rollouts.discard(from_step, ahead=changed, saved=found is not None and not changed, claims=claims)
