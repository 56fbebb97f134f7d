"""Score answers while others are still being generated, in a queue of worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from megarl.config.rewards import RewardConfig
from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Reward, Task
from megarl.core.text import as_written, without_surrogates
from megarl.rewards.pool.child import PrintedOutput
from megarl.rewards.pool.process import (
    START_TIMEOUT_S,
    LocalRewardProcess,
    RemoteRewardProcess,
    Worker,
    WorkerDied,
    WorkerError,
    WorkerProcess,
    WorkerSpent,
    WorkerUnfit,
    addresses,
)
from megarl.rewards.pool.tally import Tally
from megarl.rewards.routes import CODE, JUDGE, imports_of, route
from megarl.rewards.verdict import FAILURES, LATE, NO_VERDICT, weighed

log = logging.getLogger(__name__)

REVIVE_DELAYS_S = (0.0, 1.0, 5.0, 15.0, 30.0, 60.0)
"""Seconds before each attempt to restart a dead worker; after the last the worker is given up (its host is gone)."""
STUCK_S = sum(REVIVE_DELAYS_S) + 2 * len(REVIVE_DELAYS_S) * START_TIMEOUT_S
"""Seconds in addition to ``reward.timeout_s`` for which all workers may be busy or starting without a fault of the
pool."""


class WorkerQueue:
    """Queue of free workers, used in turn.

    Args:
        size: Number of workers that will be added.
        timeout_s: Maximum seconds of a worker for one answer.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self._left = size
        self._timeout_s = timeout_s
        self.reason = ""
        """Reason why a worker last failed, or why none is left."""
        self._idle: asyncio.Queue[Worker | None] = asyncio.Queue()
        """Free workers; None marks a closed queue or no remaining worker."""
        self._freed_at = time.monotonic()
        """Time of the last put or get of a worker."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self) -> Worker | None:
        """Return the next free running worker; None if all have been given up. A worker that died while idle counts
        against no answer."""
        while True:
            worker = await self._next()
            if worker is None:
                self._idle.put_nowait(None)
                return None
            if worker.up:
                return worker
            self._restart(worker)

    def give_back(self, worker: Worker) -> None:
        """Put a worker back, restarting it first if it is down."""
        if worker.up:
            self._put_back(worker)
        else:
            self._restart(worker)

    async def close(self, reason: str) -> None:
        """Cancel waits for a worker, with ``reason``, and starts in progress."""
        self._give_up(reason)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _next(self) -> Worker | None:
        """Return the next idle worker; None after a wait so long that none can become idle."""
        limit_s = STUCK_S + self._timeout_s
        while True:
            try:
                async with asyncio.timeout_at(
                    asyncio.get_running_loop().time() + self._freed_at + limit_s - time.monotonic()
                ):
                    worker = await self._idle.get()
                self._freed_at = time.monotonic()
                return worker
            except TimeoutError:
                if time.monotonic() - self._freed_at >= limit_s:
                    self._give_up(f"none has become free for {limit_s:.0f} s")

    def _put_back(self, worker: Worker) -> None:
        self._freed_at = time.monotonic()
        self._idle.put_nowait(worker)

    def _give_up(self, reason: str) -> None:
        """Close the queue: later answers do not wait for a worker."""
        self.reason = reason
        self._idle.put_nowait(None)

    def _restart(self, worker: Worker) -> None:
        task = asyncio.create_task(self._bring_up(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring_up(self, worker: Worker) -> None:
        try:
            for delay_s in REVIVE_DELAYS_S:
                await asyncio.sleep(delay_s)
                try:
                    await worker.ready()
                    self._put_back(worker)
                    return
                except (WorkerError, ConfigError, TimeoutError, OSError) as error:
                    self.reason = str(error) or type(error).__name__
                    log.warning("a reward process does not come up: %s", self.reason)
        except Exception:
            self.reason = "an unexpected error, which is in the log"
            log.exception("a reward process does not come up")
        self._left -= 1
        log.error("a reward process is given up; %d are left", self._left)
        if not self._left:
            self._give_up(self.reason)


KNOWN = 4096
"""Number of cached verdicts; answers of a group end within seconds of each other."""
USER = "user"
"""Name of the verifier if ``reward.path`` is set."""


class Verdict(NamedTuple):
    """A reward and, for an error or timeout, the reason. Without a verdict the score is NaN, never 0."""

    reward: Reward
    message: str | None = None
    reported: bool = False
    """True if the function itself returned the message with its status; False if the function failed."""
    verifier: str = ""
    """Family of the verifier."""
    seconds: float = 0.0
    """Seconds in the verifier over all tries."""
    waited_s: float = 0.0
    """Seconds of waiting for a free worker over all tries."""
    tries: int = 1
    kills: int = 0
    """Workers that died or hung on this answer."""
    verified: float | None = None
    """The verifier's score if weights have changed it."""

    @property
    def own_score(self) -> float:
        """Score of the verifier, before ``reward.weight`` and rewards for an answer's form."""
        return self.reward.score if self.verified is None else self.verified

    @property
    def record(self) -> dict[str, Any]:
        """Entry of the trajectory for each verifier's metrics, in addition to the reward."""
        return {
            "verifier": self.verifier,
            "seconds": round(self.seconds, 5),
            "waited_s": round(self.waited_s, 5),
            "tries": self.tries,
            "kills": self.kills,
        }


class Judging(Protocol):
    """Part of ``judge.Judge`` that the pool uses."""

    async def score(
        self,
        solution_str: str,
        ground_truth: Any,
        extra_info: dict[str, Any] | None = None,
        question: str | None = None,
    ) -> dict[str, Any]: ...


class RewardPool:
    """``reward.workers`` processes here and the processes of ``reward.hosts``. Use as an async context manager.

    Args:
        judge: Scores the answers of family ``judge``, without a worker.
        key: The job's key, for ``reward.hosts``.
        output: Size-limited file for what reward functions print; by default it goes to stderr.
        sources: Data sources of future tasks: workers import their verifiers at the start, not with the first answer.

    Raises ConfigError on entering if ``reward.path`` is unusable or a host of ``reward.hosts`` is unreachable.
    """

    def __init__(
        self,
        config: RewardConfig,
        judge: Judging | None = None,
        key: str = "",
        output: Path | None = None,
        sources: Collection[str] = (),
    ) -> None:
        self._config = config
        self._sources = sources
        self._judge = judge
        self._output = None if output is None else PrintedOutput(output)
        self.tally = Tally()
        """Counts of scoring, failed tries included."""
        modules = imports_of(sources, config.routes) if config.path is None else []
        processes: list[WorkerProcess] = [LocalRewardProcess(self._output, modules) for _ in range(config.workers)]
        processes += [RemoteRewardProcess(address, key) for address in addresses(config.hosts)]
        self.workers = [Worker(config, process) for process in processes]
        """Workers on this machine, then workers of ``reward.hosts``."""
        self.queue = WorkerQueue(len(self.workers), config.timeout_s)
        self._preparing: list[asyncio.Task[None]] = []
        self._quarantine: set[bytes] = set()
        self._scoring: dict[bytes, asyncio.Future[None]] = {}
        """Answers being scored, by digest."""
        self._known: dict[bytes, Verdict] = {}
        """Verdicts of the last scored answers."""

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(worker.ready() for worker in self.workers))
        except (ConfigError, WorkerError) as error:
            await self.close()
            raise ConfigError(str(error)) from error
        self._preparing = [asyncio.create_task(self._prepare(worker)) for worker in self.workers]
        return self

    async def _prepare(self, worker: Worker) -> None:
        """Add a worker to the queue once it has imported the verifiers of ``sources``. A failed import is reported by
        the first answer that needs the verifier."""
        own = [source for source in self._sources if self._judge is None or _verifier(self._config, source) != JUDGE]
        try:
            for source in own:
                with contextlib.suppress(WorkerError, TimeoutError):
                    await worker.prepare(source)
                if not worker.up:
                    break
        finally:
            self.queue.give_back(worker)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers on this machine."""
        return [worker.pid for worker in self.workers if worker.pid is not None]

    async def close(self) -> None:
        """End every worker, busy or idle. Waiting answers get no verdict."""
        for task in self._preparing:
            task.cancel()
        await asyncio.gather(*self._preparing, return_exceptions=True)
        await self.queue.close("the pool of reward processes is closed")
        await asyncio.gather(*(worker.kill() for worker in self.workers))
        if self._output is not None:
            self._output.close()

    async def score(self, task: Task, text: str, *, in_thinking: bool = False) -> Verdict:
        """Score one answer. Errors of the reward function are not raised, but become the verdict's status.

        An answer without a verdict is retried while there are workers, within ``reward.retries`` and
        ``reward.max_kills``. Equal answers to one task are scored once by megarl's verifiers if the verdict depends on
        nothing else. A user's function, the judge, and programs (which have a time limit) are called for each answer.

        Args:
            in_thinking: The prompt ended inside a thought (``shape.opens_thinking``).
        """
        request = {
            "data_source": task.data_source,
            "solution_str": text,
            "ground_truth": task.ground_truth,
            "extra_info": task.extra_info,
            "question": task.question,
            "in_thinking": in_thinking,
        }
        key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).digest()
        verdict = Verdict(_NONE, verifier=_verifier(self._config, task.data_source), tries=0)
        if verdict.verifier in (USER, JUDGE, CODE):
            return await self._score(task, request, key, verdict)
        asked = time.monotonic()
        while (scoring := self._scoring.get(key)) is not None:
            await asyncio.wait([scoring])
        if (known := self._known.get(key)) is not None:
            self.tally.add(known.reward.status, known.message)
            return known._replace(seconds=0.0, waited_s=time.monotonic() - asked, tries=1, kills=0)
        ended = self._scoring[key] = asyncio.get_running_loop().create_future()
        try:
            verdict = await self._score(task, request, key, verdict)
        finally:
            del self._scoring[key]
            ended.set_result(None)
        if verdict.reward.status not in NO_VERDICT:
            self._known[key] = verdict
            if len(self._known) > KNOWN:
                del self._known[next(iter(self._known))]
        return verdict

    async def _score(self, task: Task, request: dict[str, Any], key: bytes, verdict: Verdict) -> Verdict:
        """Return the verdict on one answer, from a worker or the judge; ``verdict`` has its verifier."""
        if verdict.verifier == JUDGE and self._judge is not None:
            with self.tally.waiting():
                verdict = await self._judged(self._judge, request, verdict)
            self.tally.add(verdict.reward.status, verdict.message)
            return verdict
        if key in self._quarantine:
            return verdict._replace(
                message=f"quarantined: this answer ended {self._config.max_kills} reward processes before"
            )
        failures = 0
        while True:
            died_before = verdict.kills
            tried = verdict.tries
            with self.tally.waiting():
                verdict = await self._try(request, verdict)
            if verdict.tries == tried:
                continue  # that worker lacks the verifier: try another
            self.tally.add(verdict.reward.status, verdict.message)
            if verdict.reward.status not in FAILURES:
                return verdict
            if verdict.kills >= self._config.max_kills:
                self._quarantine.add(key)
                return verdict._replace(
                    message=f"quarantined after {verdict.kills} reward processes: {verdict.message}"
                )
            failures += verdict.kills == died_before or verdict.reward.status == "timeout"
            if failures > self._config.retries:
                return verdict
            log.warning("task %s: reward %s: %s; trying again", task.task_id, verdict.reward.status, verdict.message)

    async def _judged(self, judge: Judging, request: dict[str, Any], verdict: Verdict) -> Verdict:
        """Return the judge's verdict; the judge has separate limits and retries."""
        began = time.monotonic()
        text, question = request["solution_str"], request["question"]
        answer = as_written(text, request["in_thinking"])
        result = await judge.score(answer, request["ground_truth"], request["extra_info"], question)
        found = _of_reply(weighed(result, text, question, request["in_thinking"], self._config))
        return found._replace(verifier=verdict.verifier, seconds=time.monotonic() - began)

    async def _try(self, request: dict[str, Any], before: Verdict) -> Verdict:
        """Make one try on the next free worker; add its counts and times to those of the earlier tries, ``before``."""
        asked = time.monotonic()
        worker = await self.queue.take()
        began, limit = time.monotonic(), START_TIMEOUT_S
        died = False
        if worker is None:
            return before._replace(
                tries=before.tries + 1, message=f"no reward process comes up any more: {self.queue.reason}"
            )
        try:
            await worker.prepare(request["data_source"])
            began, limit = time.monotonic(), self._config.timeout_s
            found = _of_reply(await worker.score(request))
        except WorkerUnfit as error:
            self.queue.reason = str(error)
            return before._replace(waited_s=before.waited_s + time.monotonic() - asked)
        except TimeoutError:
            died = True
            found = Verdict(Reward(math.nan, "timeout"), f"no verdict within {limit:g} s")
        except WorkerSpent:
            died = True
            found = _wrong(request, self._config)
        except WorkerDied as error:
            died = True
            found = Verdict(_NONE, f"{error} while scoring")
        except WorkerError as error:
            found = Verdict(_NONE, without_surrogates(str(error)))
        finally:
            self.queue.give_back(worker)
        ended = time.monotonic()
        return found._replace(
            verifier=before.verifier,
            seconds=before.seconds + ended - began,
            waited_s=before.waited_s + began - asked,
            tries=before.tries + 1,
            kills=before.kills + died,
        )


_NONE = Reward(math.nan, "error")


def _verifier(config: RewardConfig, data_source: str) -> str:
    """Return the family of the verifier; "" if there is none, which a worker then reports."""
    if config.path is not None:
        return USER
    with contextlib.suppress(DataError):
        return route(data_source, config.routes)[0]
    return ""


def _wrong(request: dict[str, Any], config: RewardConfig) -> Verdict:
    """Return the verdict on a response that one of megarl's verifiers cannot score in time."""
    text, question, in_thinking = (request[name] for name in ("solution_str", "question", "in_thinking"))
    return _of_reply(weighed({"score": 0.0, "status": "wrong"}, text, question, in_thinking, config))


def _of_reply(reply: dict[str, Any]) -> Verdict:
    status = reply["status"]
    if status == LATE:
        return Verdict(Reward(math.nan, status, reply["parts"]))
    if status in NO_VERDICT:
        message = reply.get("reason") or f"the reward function reported {status}"
        return Verdict(Reward(math.nan, status, reply["parts"]), message, reported=True)
    return Verdict(Reward(reply["score"], status, reply["parts"]), verified=reply.get("verified"))
