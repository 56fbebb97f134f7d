"""The explorer process: claims groups, keeps the engines busy, has every answer scored as it ends, writes whole groups.

``python -m megarl.loop.explorer --config RUN/resolved.json`` with the engines' URLs in ``MEGARL_ENGINES`` (commas
between), the job's key in ``MEGARL_JOB_KEY`` and its attempt in ``MEGARL_ATTEMPT``. Ends with 0 when the job is closed,
with 143 on SIGTERM or SIGINT (its claims are given back), with 1 and the reason when the engines or the store fail for
good. Imports no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from megarl import heartbeat
from megarl.config import Config, load_resolved
from megarl.config.rewards import RewardConfig
from megarl.errors import EngineError, InputError, JobError, RequestRefused
from megarl.metrics import Timeline
from megarl.rewards import RewardPool, Verdict
from megarl.rewards.pool import Judging
from megarl.rewards.process import await_hosts
from megarl.rewards.shape import opens_thinking
from megarl.rewards.tally import EVENT
from megarl.rollout.client import EngineClient, Prompt, Sampling
from megarl.rollout.frames import Completion
from megarl.schema import GREEDY, Task, Trajectory, Turn, WeightsSpan, WeightsVersion
from megarl.store import Claim, Store
from megarl.tasksets import ChatTokenizer, chat_messages

log = logging.getLogger(__name__)

RETRY_S, LONGEST_RETRY_S = 0.5, 4.0
"""Waits before asking again for samples that an engine failed to give, each twice as long as the one before: it may be
replaced meanwhile."""

EVENTS_S = 1.0
"""Seconds between two checks for a line about scoring on the terminal."""

STOPPED = 128 + signal.SIGTERM
"""Exit status of an explorer that was told to stop before the job was closed."""


class Engine(Protocol):
    """Part of ``rollout.client.EngineClient``."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> AsyncGenerator[Completion, None]: ...


class Scorer(Protocol):
    """Part of ``rewards.RewardPool``."""

    async def score(self, task: Task, text: str, *, opened: bool = False) -> Verdict: ...


class RolloutClock:
    """Seconds during which a rollout had generation under way, rewards under way, and both; and what it counted."""

    def __init__(
        self, now: Callable[[], float] = time.monotonic, timeline: Timeline | None = None, rollout_id: str = ""
    ) -> None:
        self._now = now
        self._timeline = timeline
        self._rollout_id = rollout_id
        self._began: dict[str, float] = {}
        self._active = {"generation": 0, "reward": 0}
        self._last = now()
        self._seconds = {"generation_s": 0.0, "reward_s": 0.0, "overlap_s": 0.0}
        self.counts = {"groups": 0, "samples": 0, "greedy": 0, "prompt_tokens": 0, "response_tokens": 0, "retries": 0}

    def change(self, phase: str, by: int) -> None:
        """``by`` more (or fewer) samples are in ``phase``: generation or reward."""
        self._account()
        before, after = self._active[phase], self._active[phase] + by
        self._active[phase] = after
        if before == 0 < after:
            self._began[phase] = time.time()
        if after == 0 < before and self._timeline is not None:
            began = self._began[phase]
            self._timeline.add(phase, began, time.time() - began, rollout=self._rollout_id)

    def metrics(self) -> dict[str, float]:
        """Seconds and counts so far."""
        self._account()
        return {**self._seconds, **{name: float(count) for name, count in self.counts.items()}}

    def _account(self) -> None:
        now = self._now()
        passed, self._last = now - self._last, now
        generating, scoring = self._active["generation"] > 0, self._active["reward"] > 0
        self._seconds["generation_s"] += passed * generating
        self._seconds["reward_s"] += passed * scoring
        self._seconds["overlap_s"] += passed * (generating and scoring)


@dataclass
class _Group:
    """A claimed group on its way: what has been sampled and what has been scored."""

    claim: Claim
    prompt_ids: np.ndarray
    opened: bool
    """The prompt ended inside a thought."""
    seed: int | None
    clock: RolloutClock
    sampled: set[int] = field(default_factory=set)
    scored: dict[int, Trajectory] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        return [j for j in self.claim.indices if j not in self.sampled]


class _Ask(NamedTuple):
    """One prompt of a call to an engine; its sample j is the group's ``first + j``."""

    prompt: Prompt
    group: _Group
    first: int


class Explorer:
    """Claims groups until the job is closed.

    Args:
        capacity: Samples kept in generation at once; greedy answers are not counted.
        backlog: Answers that may wait for their score; when there are more, no further group is claimed.
        calls: Calls over which newly claimed groups are spread (one for each engine).
        engine_timeout_s: How long samples are asked for again while engines give none of them.
        event_lines: A line about failing rewards, if there is one; it goes to the log and, as an event of the store, to
            the terminal.
    """

    def __init__(
        self,
        store: Store,
        engine: Engine,
        scorer: Scorer,
        tokenizer: ChatTokenizer,
        *,
        worker: str,
        capacity: int,
        backlog: int = 8192,
        calls: int = 1,
        poll_s: float = 0.02,
        engine_timeout_s: float = 7.5,
        retry_s: float = RETRY_S,
        timeline: Timeline | None = None,
        event_lines: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._timeline = timeline
        self._event_lines = event_lines
        self._store = store
        self._engine = engine
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._worker = worker
        self._capacity = capacity
        self._backlog = backlog
        self._calls = calls
        self._poll_s = poll_s
        self._engine_timeout_s = engine_timeout_s
        self._retry_s = retry_s
        self._generating = 0
        self._scoring = 0
        self._clocks: dict[tuple[str, WeightsVersion], RolloutClock] = {}
        # One thread, so that the store's calls never hold up the loop and happen in the order in which they are made:
        # claims given back at the end cannot be overtaken by a claim that was still waiting.
        self._store_thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    async def run(self) -> None:
        """Work until the job is closed; claims still held are given back, however this ends.

        Raises EngineError when an engine keeps failing, JobError when the store is gone or fences this process.
        """
        flights: set[asyncio.Task[None]] = set()
        try:
            await self._call(self._store.release_claims, self._worker)  # of a predecessor that was killed
            async with asyncio.TaskGroup() as tasks:
                ticking = tasks.create_task(heartbeat.beat_periodically(self._at))
                reporting = tasks.create_task(self._report())
                while await self._call(self._store.job_state) == "open":
                    claims = await self._claim()
                    for batch in self._batches(claims):
                        flight = tasks.create_task(self._run_groups(batch))
                        flights.add(flight)
                        flight.add_done_callback(flights.discard)
                    if not claims:
                        await asyncio.sleep(self._poll_s)
                for task in (ticking, reporting, *flights):
                    task.cancel()
        except BaseExceptionGroup as failures:
            if (failure := _first(failures)) is None:
                raise
            raise failure from failures
        finally:
            await self._call(self._store.release_claims, self._worker)
            self._store_thread.shutdown(wait=False)  # idle: that was its last call

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(EVENTS_S)
            if (line := self._event_lines()) is not None:
                log.warning("%s", line)
                await self._call(self._store.record_event, self._worker, EVENT, {"line": line})

    def _at(self) -> str:
        return f"{self._generating} samples being generated, {self._scoring} scored"

    async def _claim(self) -> list[Claim]:
        free = self._capacity - self._generating
        if free < 1 or self._scoring >= self._backlog:
            return []
        claims = await self._call(self._store.claim_groups, self._worker, free, max_samples=free)
        self._generating += sum(claim.group_size for claim in claims)
        return claims

    def _batches(self, claims: Sequence[Claim]) -> list[list[_Group]]:
        """One list of groups for each call to an engine: same rollout, spread over the engines."""
        rollouts: dict[str, list[_Group]] = {}
        for claim in claims:
            rollouts.setdefault(claim.rollout_id, []).append(self._group(claim))
        return [groups[i :: self._calls] for groups in rollouts.values() for i in range(min(self._calls, len(groups)))]

    def _group(self, claim: Claim) -> _Group:
        seed = claim.sampling.get("seed")
        if seed is not None:  # of its own for every group, so that no two groups draw the same numbers
            seed = int(np.random.SeedSequence([seed, claim.position]).generate_state(1)[0])
        clock = self._clocks.setdefault(
            (claim.rollout_id, claim.version), RolloutClock(timeline=self._timeline, rollout_id=claim.rollout_id)
        )
        messages, kwargs = chat_messages(claim.task), claim.task.chat_template_kwargs
        text = self._tokenizer.render(messages, kwargs)
        return _Group(claim, self._tokenizer.rendered_ids(text), opens_thinking(text), seed, clock)

    async def _run_groups(self, groups: Sequence[_Group]) -> None:
        """Sample and score some groups of one rollout, asking again for what an engine failed to give."""
        async with asyncio.TaskGroup() as scoring:
            since, missing, delay_s = time.monotonic(), -1, self._retry_s
            while True:
                try:
                    await self._generate(groups, scoring)
                    return
                except RequestRefused:
                    raise
                except EngineError as error:
                    if (left := sum(len(group.missing) for group in groups)) != missing:
                        since, missing, delay_s = time.monotonic(), left, self._retry_s
                    if time.monotonic() - since > self._engine_timeout_s:
                        raise
                    log.warning("%s; asking again in %g s", error, delay_s)
                    groups[0].clock.counts["retries"] += 1
                    await self._call(self._store.record_event, self._worker, "engine_retry", {"error": str(error)})
                    await asyncio.sleep(delay_s)
                    delay_s = min(2 * delay_s, max(self._retry_s, LONGEST_RETRY_S))

    async def _generate(self, groups: Sequence[_Group], scoring: asyncio.TaskGroup) -> None:
        """Make one call for all that is missing; each answer is scored from the moment it ends."""
        asks = [ask for group in groups for ask in _asks(group)]
        clock, outstanding = groups[0].clock, sum(ask.prompt.n for ask in asks)
        sampling = _sampling(groups[0].claim.sampling)
        clock.change("generation", outstanding)
        aborted = 0
        try:
            async with aclosing(self._engine.generate([ask.prompt for ask in asks], sampling)) as completions:
                async for completion in completions:
                    outstanding -= 1
                    heartbeat.count_work()
                    clock.change("generation", -1)
                    _, group, first = asks[completion.request]
                    if completion.finish_reason == "abort":
                        aborted += 1
                        continue
                    index = first + completion.index
                    group.sampled.add(index)
                    self._generating -= index != GREEDY
                    scoring.create_task(self._score(group, index, completion))
        finally:
            clock.change("generation", -outstanding)
        if aborted:
            raise EngineError(f"the engine cut {aborted} samples short")

    async def _score(self, group: _Group, index: int, completion: Completion) -> None:
        group.clock.change("reward", 1)
        self._scoring += 1
        try:
            text = self._tokenizer.decode(completion.token_ids)
            verdict = await self._scorer.score(group.claim.task, text, opened=group.opened)
        finally:
            heartbeat.count_work()
            self._scoring -= 1
            group.clock.change("reward", -1)
        if verdict.message is not None:
            log.warning("task %s: reward %s: %s", group.claim.task.task_id, verdict.reward.status, verdict.message)
        group.scored[index] = trajectory(group.claim, index, group.prompt_ids, completion, verdict)
        if len(group.scored) == len(group.claim.indices):
            await self._finish(group)

    async def _finish(self, group: _Group) -> None:
        counts, members = group.clock.counts, [group.scored[j] for j in group.claim.indices]
        counts["groups"] += 1
        counts["samples"] += group.claim.group_size
        counts["greedy"] += len(members) - group.claim.group_size
        counts["prompt_tokens"] += sum(member.prompt_length for member in members)
        counts["response_tokens"] += sum(member.response_length for member in members)
        if not await self._call(self._store.finish_group, group.claim, members, group.clock.metrics()):
            log.warning(
                "group %s is no longer ours: its rollout was asked for again; its samples are dropped",
                group.claim.group_id,
            )

    async def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._store_thread, lambda: function(*args, **kwargs))


def trajectory(
    claim: Claim, index: int, prompt_ids: np.ndarray, completion: Completion, verdict: Verdict
) -> Trajectory:
    """A trajectory of one response: tokens and log-probs exactly as the engine gave them."""
    prompt = prompt_ids if completion.prompt_ids is None else completion.prompt_ids
    return Trajectory(
        rollout_id=claim.rollout_id,
        task_id=claim.task.task_id,
        group_id=claim.group_id,
        index=index,
        group_size=claim.group_size,
        turns=(Turn("user", prompt), model_turn(completion, claim.version, follows=0)),
        reward=verdict.reward,
        metadata={"reward": verdict.record} | ({} if verdict.message is None else {"reward_message": verdict.message}),
    )


def model_turn(completion: Completion, asked: WeightsVersion, follows: int) -> Turn:
    """A completion as a turn; an engine that names no weights ran with those that the rollout was asked for."""
    spans = completion.versions or [("default", 0, len(completion.token_ids))]
    return Turn(
        "model",
        completion.token_ids,
        follows,
        completion.logprobs,
        tuple(
            WeightsSpan(start, end, asked if version == "default" else WeightsVersion.parse(version))
            for version, start, end in spans
        ),
        completion.finish_reason,
    )


def _asks(group: _Group) -> list[_Ask]:
    """The group's samples as one prompt; after a failure each missing one by itself, with the seed that it had. The
    greedy answer is a prompt of its own."""
    missing, size, images = group.missing, group.claim.group_size, group.claim.task.images
    sampled = [j for j in missing if j != GREEDY]
    asks = (
        []
        if len(sampled) == len(missing)
        else [_Ask(Prompt(group.prompt_ids, greedy=True, images=images), group, GREEDY)]
    )
    if len(sampled) == size:
        return [*asks, _Ask(Prompt(group.prompt_ids, size, group.seed, images=images), group, 0)]
    seeds = [None if group.seed is None else group.seed + j for j in sampled]
    return asks + [
        _Ask(Prompt(group.prompt_ids, 1, seed, images=images), group, j) for j, seed in zip(sampled, seeds, strict=True)
    ]


def _sampling(settings: dict[str, Any]) -> Sampling:
    return Sampling(**{name: value for name, value in settings.items() if name not in ("seed", "greedy")})


def _first(failures: BaseExceptionGroup[BaseException]) -> EngineError | JobError | None:
    """The first error of an engine or of the store, if no task failed for another reason."""
    failing, others = failures.split((EngineError, JobError))
    if failing is None or others is not None:
        return None
    failure: BaseException = failing
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    assert isinstance(failure, EngineError | JobError)
    return failure


async def explore(config: Config, engines: Sequence[str], key: str, worker: str) -> None:
    """Run one explorer of a job until the job is closed. Raises EngineError, JobError or ConfigError when it cannot go
    on."""
    tokenizer = ChatTokenizer.of(config)
    engine_timeout_s = (
        config.rollout.start_timeout_s + config.sync.timeout_s
    )  # an engine is replaced, and given the weights
    store = Store(config.store.url, attempt=int(os.environ["MEGARL_ATTEMPT"]), outage_s=config.store.outage_s)
    try:
        async with (
            EngineClient(engines, key, config.rollout.request_timeout_s, heartbeat.count_work) as engine,
            _judge(config, engines, key, engine_timeout_s) as judge,
            RewardPool(
                await _with_hosts_of_nodes(config.reward), judge, key, _logs(config) / "reward_output.log"
            ) as scorer,
        ):
            explorer = Explorer(
                store,
                engine,
                scorer,
                tokenizer,
                worker=worker,
                capacity=config.rollout.concurrent_groups * config.algorithm.group_size,
                backlog=config.reward.backlog,
                calls=len(engines),
                engine_timeout_s=engine_timeout_s,
                poll_s=config.store.poll_s,
                timeline=Timeline(Path(config.run.dir) / "timeline", worker),
                event_lines=scorer.tally.line,
            )
            await explorer.run()
    finally:
        store.close()


def _logs(config: Config) -> Path:
    return Path(config.run.dir) / "logs" / f"attempt_{os.environ['MEGARL_ATTEMPT']}"


async def _with_hosts_of_nodes(config: RewardConfig) -> RewardConfig:
    """The supervisor starts a host of reward workers on every other node, which takes a moment. Raises ConfigError."""
    hosts = [host for host in os.environ.get("MEGARL_REWARD_HOSTS", "").split(",") if host]
    await await_hosts(hosts)
    return replace(config, hosts=[*config.hosts, *hosts])


@asynccontextmanager
async def _judge(
    config: Config, engines: Sequence[str], key: str, engine_timeout_s: float
) -> AsyncIterator[Judging | None]:
    if config.reward.judge.url is None:
        yield None
        return
    from megarl.rewards.judge import Judge  # 0.3 s

    async with Judge(config.reward.judge, engines, key, engine_timeout_s) as judge:
        yield judge


async def _until_signal(config: Config, engines: Sequence[str], key: str, worker: str) -> int:
    """:func:`explore`, ended in order by SIGTERM or SIGINT; returns the exit status.

    The supervisor reads in it whether the job is closed: without an explorer the trainer would wait forever.
    """
    work = asyncio.ensure_future(explore(config, engines, key, worker))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        log.info("stopped; claims given back")
        return STOPPED
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The process; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m megarl.loop.explorer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, help="the run's resolved.json")
    parser.add_argument(
        "--worker", default="explorer-0", help="name of this explorer within the job (default %(default)s)"
    )
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    missing = [name for name in ("MEGARL_ENGINES", "MEGARL_JOB_KEY", "MEGARL_ATTEMPT") if not os.environ.get(name)]
    if missing:
        parser.error(f"{', '.join(missing)} must be set in the environment; `megarl train` does")
    engines = os.environ["MEGARL_ENGINES"].split(",")
    try:
        return asyncio.run(
            _until_signal(load_resolved(arguments.config), engines, os.environ["MEGARL_JOB_KEY"], arguments.worker)
        )
    except (EngineError, JobError, InputError) as error:
        log.error("explorer %s: %s", arguments.worker, error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
