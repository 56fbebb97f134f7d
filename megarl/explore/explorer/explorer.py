"""The explorer process: claims groups, runs a workflow for each trajectory, scores it when it ends, puts whole groups
into the buffer, and evaluates.

``python -m megarl.run.start explorer --config RUN/resolved.json`` with the job's key in ``MEGARL_JOB_KEY`` and its
attempt in ``MEGARL_ATTEMPT``; it finds the engines in the store. Exits with 0 when the job is closed, with 143 on
SIGTERM or SIGINT (after releasing its claims), with 1 and the reason when the engines or the store fail permanently.
Imports no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megarl.buffer.store import Claim, Store
from megarl.config import Config, load_resolved
from megarl.config.algorithms import teacher_top_k
from megarl.core.errors import EngineError, InputError, JobError, describe
from megarl.core.jobs import EXPLORE, PROGRAM, REWARD_HOSTS, STOPPED, TRAIN, logs_of
from megarl.core.metrics import Timeline
from megarl.core.processes import heartbeat
from megarl.core.schema import GREEDY, Trajectory, WeightsVersion
from megarl.engines.client.client import EngineClient, Sampling
from megarl.engines.client.engine_choice import EVERY_S, EngineChoice
from megarl.engines.client.gather import Engine, Gatherer
from megarl.engines.fleet import EngineRow
from megarl.explore import workflows
from megarl.explore.explorer.claimed import ClaimedGroup, EngineTime, RolloutClock, SamplesUnderWay, StoreQueue
from megarl.explore.explorer.iterations import PartialRollouts
from megarl.explore.explorer.other_explorers import Lease, record_evaluations, share_of
from megarl.explore.explorer.trajectories import Scorer, Teaching, TrajectoryRunner, TrajectorySettings
from megarl.explore.explorer.weight_files import FileFeeder
from megarl.explore.recording.model import RenderedPrompt, Workflow
from megarl.explore.workflows.single_turn import single_turn
from megarl.rewards import RewardPool
from megarl.rewards.judge.family import ENGINES
from megarl.rewards.pool.pool import Judging
from megarl.rewards.pool.process import await_hosts
from megarl.rewards.pool.tally import EVENT
from megarl.tasks import ChatTokenizer

log = logging.getLogger(__name__)

CLOSED = object()
"""Stands for the mark of a closed job's store."""
LOOK_S = 1.0
"""Most seconds between two looks for groups in a store that seems unchanged."""
EVENTS_S = 1.0
"""Seconds between two checks for a line about scoring on the terminal."""


@dataclass(frozen=True)
class AskedEngines:
    """Engines that sample for an explorer."""

    client: Engine
    choice: EngineChoice
    """Rows of the engines. Newly claimed groups are spread over the engines with the weights, one call each."""
    are_updated: Callable[[], Awaitable[bool]] | None = None
    """Returns True while an engine receives weights; None for the job's own engines. If another program's trainer
    publishes the weights, no group is claimed until an engine has the requested weights."""
    feeder: FileFeeder | None = None
    """Loads weights from files into the engines; None if another process publishes them."""
    timeout_s: float = 7.5
    """Seconds of retries while the engines return no samples."""


@dataclass(frozen=True)
class ClaimSettings:
    """Groups that an explorer claims."""

    worker: str
    """Name under which it claims them."""
    capacity: int
    """Samples kept in generation at once; greedy answers are not counted."""
    backlog: int = 8192
    """Most answers that wait for their score; above it no further group is claimed."""
    poll_s: float = 0.02
    """Seconds between two looks for groups."""
    silence_s: float = 30.0
    """Heartbeat timeout of other workers in seconds; their groups are then free."""

    @classmethod
    def of(cls, config: Config, worker: str) -> ClaimSettings:
        """Return the settings of one explorer, from its share of the job's configuration."""
        capacity = config.rollout.concurrent_groups * (config.algorithm.group_size + config.rollout.spare)
        return cls(worker, capacity, config.reward.backlog, config.store.poll_s, config.cluster.heartbeat_s)


DEFAULT_TRAJECTORIES = TrajectorySettings()


class Explorer:
    """Claims groups until the job is closed.

    Args:
        event_lines: Returns a line about failing rewards, or None; it is logged and recorded as an event for the
            terminal.
        teachers: As for ``TrajectoryRunner``.
    """

    def __init__(
        self,
        store: Store,
        engines: AskedEngines,
        scorer: Scorer,
        tokenizer: ChatTokenizer,
        claims: ClaimSettings,
        workflow: Workflow = single_turn,
        trajectories: TrajectorySettings = DEFAULT_TRAJECTORIES,
        *,
        timeline: Timeline | None = None,
        event_lines: Callable[[], str | None] = lambda: None,
        teachers: Teaching | None = None,
    ) -> None:
        self._flights: set[asyncio.Task[None]] = set()
        self._store, self._engines, self._tokenizer, self._claims = store, engines, tokenizer, claims
        self._choice, self._trajectories, self._event_lines = engines.choice, trajectories, event_lines
        segments, worker = trajectories.segments, claims.worker
        self._runner = TrajectoryRunner(
            workflow,
            scorer,
            tokenizer,
            trajectories,
            record=StoreQueue(partial(self._call, store.segments.append)).put if segments.tokens else None,
            forget=partial(self._call, store.segments.forget) if segments.tokens else None,
            teachers=teachers,
        )
        self.under_way = SamplesUnderWay(claims.capacity)
        """Claimed samples that have not ended."""
        suspend = self.under_way.suspend
        self._partial = PartialRollouts(store, self._call, segments.budget, segments.pacing, claims.poll_s, suspend)
        self._worker = worker
        self._clocks: dict[tuple[str, WeightsVersion], RolloutClock] = {}
        self._writer = StoreQueue(partial(self._call, store.groups.put_all))
        # One thread keeps calls in order: no queued claim runs after the final release.
        self._store_thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._lease = Lease(store, worker, self._call, claims.silence_s)
        self._engine_time = EngineTime(store, worker, self._call)
        self._new_clock = partial(RolloutClock, timeline=timeline, generates=self._engine_time.change)

    async def run(self) -> None:
        """Work until the job is closed; remaining claims are released at any end.

        Raises EngineError when an engine keeps failing, JobError if the store is unreachable or fences this process.
        """
        try:
            await self._call(self._store.groups.release, self._worker)  # claims of a killed predecessor
            await self._call(record_evaluations, self._store, self._worker)
            async with asyncio.TaskGroup() as tasks:
                works = [heartbeat.beat_periodically(self._mark), self._lease.keep(), self._partial.keep()]
                works += [_report(self._event_lines, self._record), self._engine_time.keep()]
                works.append(self._choice.keep(partial(self._call, self._store.engines.own)))
                if (are_updated := self._engines.are_updated) is not None:
                    works.append(self._keep_claims(are_updated))
                if self._engines.feeder is not None:
                    works.append(self._engines.feeder.keep(partial(self._call, self._store.engines.delivered)))
                keeping = [tasks.create_task(work) for work in works]
                while (mark := await self._call(self._mark_of_open)) is not CLOSED:
                    conditions, claims = self._conditions(), await self._claim()
                    groups = [await self._group(claim) for claim in claims]
                    for batch in _batches(groups, self._calls_of):
                        flight = tasks.create_task(self._run_groups(batch))
                        self._flights.add(flight)
                        flight.add_done_callback(self._flights.discard)
                    if not claims:
                        await self._await_change(mark, conditions)
                for task in (*keeping, *self._flights):
                    task.cancel()
        except BaseExceptionGroup as failures:
            if (failure := _first(failures)) is None:
                raise
            raise failure from failures
        finally:
            await self._call(self._store.groups.release, self._worker)
            self._store_thread.shutdown(wait=False)  # idle after its last call

    def _mark_of_open(self) -> object:
        """Return the mark of the store before a look for groups; CLOSED if the job is closed."""
        mark = self._store.database.mark()
        return mark if self._store.journal.job_state() == "open" else CLOSED

    def _conditions(self) -> tuple[Any, ...]:
        """Return what claims depend on besides the store."""
        may_ask = self._engines.are_updated is None or self._choice.is_open
        is_behind = self._runner.scoring >= self._claims.backlog
        return self.under_way.free, self.under_way.evaluates, is_behind, may_ask, frozenset(self._lease.silent)

    async def _await_change(self, mark: object, conditions: tuple[Any, ...]) -> None:
        """Wait until another look may find groups: the store or the conditions changed, or ``LOOK_S`` passed."""
        until = time.monotonic() + LOOK_S
        await asyncio.sleep(self._claims.poll_s)
        while (
            mark is not None
            and time.monotonic() < until
            and self._conditions() == conditions
            and await self._call(self._store.database.mark) == mark
        ):
            await asyncio.sleep(self._claims.poll_s)

    async def _keep_claims(self, are_updated: Callable[[], Awaitable[bool]]) -> None:
        """Release all claims if for ``silence_s`` no engine had the weights and none received any."""
        since = time.monotonic()
        while True:
            await asyncio.sleep(min(EVERY_S, self._claims.silence_s))
            if self._choice.is_open:
                since = time.monotonic()
            elif time.monotonic() - since > self._claims.silence_s and not await are_updated():
                await self._give_back()
                since = time.monotonic()

    async def _give_back(self) -> None:
        """Release all claims: other explorers may have engines with weights."""
        if flights := list(self._flights):
            log.warning("no engine may be asked: %d calls are given up, and their claims given back", len(flights))
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        self.under_way.forget()
        await self._call(self._store.groups.release, self._worker)

    async def _record(self, kind: str, data: Mapping[str, Any]) -> None:
        await self._call(self._store.journal.record_event, self._worker, kind, data)

    def _mark(self) -> str:
        """Return the status text for the heartbeat. A running workflow counts as progress even without samples in
        flight, and so does a teacher that is asked: its requests have time limits."""
        if (in_workflow := self._runner.in_workflow) or self._runner.taught:
            heartbeat.count_work()
        return (
            f"{self.under_way.total} samples being generated, {self._runner.scoring} scored, "
            f"{in_workflow} trajectories in their workflow, {self._runner.taught} wait for their teacher"
        )

    async def _claim(self) -> list[Claim]:
        free = self.under_way.free
        if free < 1 or self._runner.scoring >= self._claims.backlog:
            return []
        if self._engines.are_updated is not None and not self._choice.is_open:
            return []
        of_kinds = {"max_samples": free, "evaluations": self.under_way.evaluates}
        claims = await self._call(self._store.groups.claim, self._worker, free, **of_kinds, silent=self._lease.silent)
        if claims:
            await self._choice.look()  # with these groups' weights, and the engines of an evaluation
            self._choice.expect(max(claim.oldest for claim in claims))
        self.under_way.begin(claims, {claim.rollout_id for claim in claims if self._choice.is_held(claim.rollout_id)})
        return claims

    def _calls_of(self, claim: Claim) -> int:
        return len(self._choice.usable(sampling_of(claim, self._choice).wanted)) or 1

    async def _group(self, claim: Claim) -> ClaimedGroup:
        clock = self._clocks.setdefault((claim.rollout_id, claim.version), self._new_clock(claim.rollout_id))
        prompt = RenderedPrompt.of(claim.task, self._tokenizer)
        return ClaimedGroup(claim, prompt, _seed(claim), clock, await self._partial.pace(claim))

    async def _run_groups(self, groups: Sequence[ClaimedGroup]) -> None:
        """Run the workflow for every trajectory of some groups of one rollout."""
        clock = groups[0].clock

        async def retried(error: EngineError) -> None:
            clock.counts["retries"] += 1
            await self._record("engine_retry", {"error": str(error)})

        with self.under_way.until_passed([group.claim for group in groups]):
            async with asyncio.TaskGroup() as tasks:
                gatherer = Gatherer(
                    self._engines.client,
                    sampling_of(groups[0].claim, self._choice),
                    tasks,
                    change=partial(clock.change, "generation"),
                    retried=retried,
                    timeout_s=self._engines.timeout_s,
                    retry_s=self._trajectories.retry_s,
                    awaits_weights=self._engines.are_updated is not None,
                    apart=groups[0].claim.num_samples > groups[0].claim.group_size,
                )
                for group in groups:
                    for index in group.claim.indices:
                        group.running[index] = tasks.create_task(self._run_trajectory(group, index, gatherer))

    async def _run_trajectory(self, group: ClaimedGroup, index: int, gatherer: Gatherer) -> None:
        generated = partial(self._generated, group, index)
        group.scored[index] = await self._runner.run(group, index, gatherer, generated)
        del group.running[index]
        if (members := group.members(self._trajectories.rewards)) is not None:
            self.under_way.end(group.claim, group.cut_spare())
            if not group.running:
                await self._finish(group, members)

    async def _generated(self, group: ClaimedGroup, index: int) -> None:
        if index != GREEDY:
            group.generating.discard(index)
            self.under_way.end(group.claim)
        if group.pace is not None:
            await group.pace.ended(index)

    async def _finish(self, group: ClaimedGroup, members: list[Trajectory]) -> None:
        if not await self._writer.put(group.ended(members)):
            log.warning("group %s was asked for again: its samples are dropped", group.claim.group_id)
        elif group.claim.kind == "eval":
            await self._call(record_evaluations, self._store, self._worker, group.claim.rollout_id)

    async def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._store_thread, lambda: function(*args, **kwargs))


def _batches(claimed: Sequence[ClaimedGroup], calls_of: Callable[[Claim], int]) -> list[list[ClaimedGroup]]:
    """Return a list of groups for each engine call: of one rollout, spread over the engines."""
    rollouts: dict[str, list[ClaimedGroup]] = {}
    for group in claimed:
        rollouts.setdefault(group.claim.rollout_id, []).append(group)
    found = []
    for groups in rollouts.values():
        calls = calls_of(groups[0].claim)
        found += [groups[i::calls] for i in range(min(calls, len(groups)))]
    return found


async def _report(lines: Callable[[], str | None], record: Callable[..., Coroutine[Any, Any, None]]) -> None:
    """Log and record the lines about failing rewards, until cancelled."""
    while True:
        await asyncio.sleep(EVENTS_S)
        if (line := lines()) is not None:
            log.warning("%s", line)
            await record(EVENT, {"line": line})


def sampling_of(claim: Claim, engines: EngineChoice) -> Sampling:
    """Return the sampling of a claim. An evaluation requires its exact weights, from engines that keep them for it, if
    any."""
    own = {name: value for name, value in claim.sampling.items() if name not in ("seed", "greedy", "spare")}
    if not _of_trainer(claim):
        return Sampling(**own)
    if claim.kind != "eval":
        return Sampling(**own, oldest=claim.oldest)
    rollout = claim.rollout_id if engines.is_held(claim.rollout_id) else ""
    return Sampling(**own, oldest=claim.oldest, newest=claim.version, rollout=rollout)


def _of_trainer(claim: Claim) -> bool:
    """Return False for weights read from the model's files, which have no attempt."""
    return bool(claim.version.attempt)


def urls_of_the_start(registered: Sequence[EngineRow], replicas: int) -> list[str]:
    """Return the URLs of the job's initial engines. ``megarl scale`` keeps them if ``reward.path`` may use them as the
    judge."""
    return [engine.url for engine in registered if engine.url and engine.number < replicas]


def _seed(claim: Claim) -> int | None:
    """Return a group's seed, different for every group; None if sampling has no seed."""
    seed = claim.sampling.get("seed")
    return None if seed is None else int(np.random.SeedSequence([seed, claim.position]).generate_state(1)[0])


def _first(failures: BaseExceptionGroup[BaseException]) -> EngineError | JobError | None:
    """Return the first error of an engine or the store, if no task failed for another reason."""
    failing, others = failures.split((EngineError, JobError))
    if failing is None or others is not None:
        return None
    failure: BaseException = failing
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    assert isinstance(failure, EngineError | JobError)
    return failure


async def explore(config: Config, key: str, worker: str, number: int = 0) -> None:
    """Run one explorer of a job until the job is closed.

    Args:
        worker: Name under which it claims groups.
        number: Its number among the job's explorers.

    Raises EngineError, JobError or ConfigError for permanent failures.
    """
    hosts = [host for host in os.environ.get(REWARD_HOSTS, "").split(",") if host]
    await await_hosts(hosts)  # started by the supervisor on every other node
    config = share_of(config, hosts, number)
    tokenizer, trajectories = ChatTokenizer.of(config), TrajectorySettings.of(config)
    engine_timeout_s = (
        config.rollout.start_timeout_s + config.sync.timeout_s
    )  # time for a replacement engine to get weights
    store = Store(
        config.store.url,
        attempt=int(os.environ["MEGARL_ATTEMPT"]),
        outage_s=config.store.outage_s,
        program=os.environ.get(PROGRAM, TRAIN),
        outlives=True,
    )
    try:
        registered = store.engines.own()
        if not any(row.url for row in registered):
            raise JobError("no engine is registered in the store: `megarl train` registers those that it starts")
        # Reward workers only know these engines, for a judge in `reward.path`.
        os.environ[ENGINES] = ",".join(urls_of_the_start(registered, config.rollout.replicas))
        choice = EngineChoice(registered)
        async with (
            EngineClient(choice, key, config.rollout.request_timeout_s, heartbeat.count_work) as engine,
            opened_judge(config, choice.urls, key, engine_timeout_s) as judge,
            opened_teachers(config, tokenizer) as teachers,
            RewardPool(
                config.reward,
                judge,
                key,
                _logs(config) / (f"reward_output_{worker}.log" if number else "reward_output.log"),
                store.tasks.data_sources(),
            ) as scorer,
            workflows.opened(config.rollout, tokenizer) as workflow,
        ):
            of_another = store.program.startswith(EXPLORE)
            feeds = of_another and config.sync.method == "checkpoint" and number == 0
            explorer = Explorer(
                store,
                AskedEngines(
                    engine,
                    choice,
                    engine.are_updated if of_another else None,
                    FileFeeder.of(config, choice, key) if feeds else None,
                    engine_timeout_s,
                ),
                scorer,
                tokenizer,
                ClaimSettings.of(config, worker),
                workflow,
                trajectories,
                timeline=Timeline(Path(config.run.dir) / "timeline", worker),
                event_lines=lambda: scorer.tally.line() or (teachers and teachers.tally.line()) or None,
                teachers=teachers,
            )
            gc.collect()
            gc.freeze()  # skip modules in later collections
            await explorer.run()
    finally:
        store.close()


def _logs(config: Config) -> Path:
    return logs_of(config.run.dir, os.environ["MEGARL_ATTEMPT"], os.environ.get(PROGRAM, TRAIN))


@asynccontextmanager
async def opened_judge(
    config: Config, engines: Callable[[], Sequence[str]], key: str, engine_timeout_s: float
) -> AsyncIterator[Judging | None]:
    """Open the judge of ``reward.judge``; yield None if no model judges.

    Args:
        engines: Returns the current URLs of the job's engines, used if ``url`` is "rollout".
        engine_timeout_s: Seconds to wait for an engine.
    """
    if config.reward.judge.url is None:
        yield None
        return
    from megarl.rewards.judge.judge import Judge  # 0.3 s

    async with Judge(config.reward.judge, engines, key, engine_timeout_s) as judge:
        yield judge


@asynccontextmanager
async def opened_teachers(config: Config, tokenizer: ChatTokenizer) -> AsyncIterator[Teaching | None]:
    """Open the connections to the teachers at URLs; yield None if the job has no teachers."""
    if not config.teachers:
        yield None
        return
    from megarl.rewards.teacher_server import TeacherServers  # 0.3 s

    async with TeacherServers(config.teachers, teacher_top_k(config.algorithm), tokenizer.largest_id) as servers:
        yield servers


async def _until_signal(config: Config, key: str, worker: str, number: int) -> int:
    """Run :func:`explore`, stopped cleanly by SIGTERM or SIGINT; return the exit status.

    The supervisor needs the status to detect an explorer that ended early: the trainer would wait forever.
    """
    work = asyncio.ensure_future(explore(config, key, worker, number))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        log.info("stopped; claims given back")
        return STOPPED
    return 0


def run_through(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, int]) -> int:
    """Run ``work`` to its end; SystemExit in a workflow's task is raised where the task is awaited, and does not end
    the loop."""
    task = loop.create_task(work)
    while True:
        try:
            return loop.run_until_complete(task)
        except SystemExit as error:
            if task.done():
                raise
            log.warning("a task of a workflow raised %s", describe(error))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m megarl.run.start explorer", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--config", required=True, help="the run's resolved.json")
    parser.add_argument(
        "--worker", default="explorer-0", help="name of this explorer within the job (default %(default)s)"
    )
    parser.add_argument("--number", type=int, default=0, help="its number among the job's explorers")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    for client in ("httpx", "openai", "anthropic"):  # clients used by agents log a line per request
        logging.getLogger(client).setLevel(logging.WARNING)
    missing = [name for name in ("MEGARL_JOB_KEY", "MEGARL_ATTEMPT") if not os.environ.get(name)]
    if missing:
        parser.error(f"{', '.join(missing)} must be set in the environment; `megarl train` does")
    try:
        # asyncio.run would wait for threads blocked in users' code; `leave` ends them with the process
        config, key = load_resolved(arguments.config), os.environ["MEGARL_JOB_KEY"]
        work = _until_signal(config, key, arguments.worker, arguments.number)
        return run_through(asyncio.new_event_loop(), work)
    except (EngineError, JobError, InputError) as error:
        log.error("explorer %s: %s", arguments.worker, error)
        return 1
