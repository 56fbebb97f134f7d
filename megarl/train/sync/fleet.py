"""All engines of a job, called in parallel, and their division into parts that receive weights together."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, TypeVar

from megarl.config.schema import RolloutConfig
from megarl.core.errors import EngineError
from megarl.core.processes import heartbeat
from megarl.engines.client.control import EngineControl
from megarl.engines.fleet import EngineRow
from megarl.engines.sync.link import PartOfWorkers, first_workers
from megarl.engines.sync.shared import Places
from megarl.weights.reshard.adapters import AdapterDelivery
from megarl.weights.reshard.execute import Transport
from megarl.weights.reshard.layout import Layout
from megarl.weights.reshard.layouts import vllm_layout
from megarl.weights.reshard.plan import ReshardPlan, build_plan


@dataclass(frozen=True)
class PartOfEngines:
    """Engines whose workers are the destination ranks of ``plan``; ``first`` is the number of their first worker."""

    engines: Sequence[int]
    plan: ReshardPlan
    first: int = 0

    def transport(self, whole: Transport) -> Transport:
        """Return the transport to this part's ranks, as a section of the transport to all workers."""
        return PartOfWorkers(whole, self.first) if self.first else whole


class EnginePlans:
    """Plans from the trainer's layout to a job's engines: one plan for all, or one for each engine.

    Args:
        each: Make one plan for each engine, even if all have equally many workers.
        adapters: Delivery of adapters, if the trainer's model has any.
    """

    def __init__(
        self,
        source: Layout,
        hf_config: Mapping[str, Any],
        rollout: RolloutConfig,
        *,
        each: bool,
        adapters: AdapterDelivery | None = None,
    ) -> None:
        self._source = source if adapters is None else adapters.layout(source)
        self._adapters = adapters
        self._hf_config, self._rollout, self._each = hf_config, rollout, each
        self._plans: dict[tuple[int, int], ReshardPlan] = {}
        """(workers of an engine, engines) -> their plan."""
        self.workers: Sequence[int] = ()
        """Number of workers of each engine; elastic scaling may change it."""

    @property
    def apart(self) -> bool:
        """True if each engine has a separate plan."""
        return self._each or len(set(self.workers)) > 1

    @property
    def replicas(self) -> int:
        """Number of engines in a plan."""
        return 1 if self.apart else len(self.workers)

    def expect(self, engines: int) -> None:
        """Build the plan for ``engines`` engines with the current workers while engines start, because it is slow."""
        workers = self.workers[0] if self.workers else self._rollout.tp * self._rollout.pp
        self._plan(workers, 1 if self.apart else engines)

    def of_engines(self, workers: Sequence[int]) -> list[ReshardPlan]:
        """Return the plan of each engine, given the number of workers of each. Drops other plans."""
        self.workers = workers
        plans = [self.of(engine) for engine in range(len(workers))]
        self._plans = {key: plan for key, plan in self._plans.items() if any(plan is own for own in plans)}
        return plans

    def of(self, engine: int) -> ReshardPlan:
        """Return the plan of an engine."""
        return self._plan(self.workers[engine], self.replicas)

    def _plan(self, workers: int, replicas: int) -> ReshardPlan:
        if (workers, replicas) not in self._plans:
            pp, expert_parallel = self._rollout.pp, self._rollout.expert_parallel
            engines = vllm_layout(self._hf_config, workers // pp, replicas, pp=pp, expert_parallel=expert_parallel)
            engines = engines if self._adapters is None else self._adapters.layout(engines)
            self._plans[workers, replicas] = build_plan(self._source, engines)
        return self._plans[workers, replicas]


def places_of(places: Places, engine: int, workers: Sequence[int]) -> Places:
    """Return the places from the view of one engine's part; ``workers``: number of workers of each engine."""
    return places.of_workers(first_workers(workers)[engine], workers[engine])


def parts_of(plans: Sequence[ReshardPlan], workers: Sequence[int], places: Places) -> list[PartOfEngines]:
    """Divide a job's engines into parts; ``workers``: number of workers of each engine.

    Args:
        plans: One plan for all engines together, or one for each engine.

    Engines whose workers share memory with the same trainer ranks share a plan, so that buckets are computed once.
    """
    if plans[0].destination.num_ranks == sum(workers):
        return [PartOfEngines(range(len(workers)), replace(plans[0], nearness=places.nearness()))]
    found: dict[tuple[str, tuple[frozenset[int], ...]], ReshardPlan] = {}
    parts = []
    for engine, (plan, first) in enumerate(zip(plans, first_workers(workers), strict=True)):
        mine = places_of(places, engine, workers)
        key = (plan.fingerprint, tuple(frozenset(mine.senders_on_same_machine(i)) for i in range(len(mine.workers))))
        if key not in found:
            found[key] = replace(plan, nearness=mine.nearness())
        parts.append(PartOfEngines([engine], found[key], first))
    return parts


def partners_of(parts: Sequence[PartOfEngines], workers: Sequence[int], rank: int) -> list[list[int]]:
    """Return for each engine the workers that trainer rank ``rank`` sends to; ``workers``: workers of each."""
    receivers: dict[ReshardPlan, list[int]] = {}
    for part in parts:
        if part.plan not in receivers:  # listing one rank's moves in a plan takes up to a second
            receivers[part.plan] = part.plan.receivers_from(rank)
    sent = sorted(part.first + dst for part in parts for dst in receivers[part.plan])
    firsts = first_workers(workers)
    partners: list[list[int]] = [[] for _ in workers]
    for worker in sent:
        engine = bisect_right(firsts, worker) - 1
        partners[engine].append(worker - firsts[engine])
    return partners


_LOOK_S = 1.0
"""Seconds between two checks for engines that are no longer wanted, while waiting for others."""
_ABSENT_S = 0.02
"""Seconds between two checks for engines while all are absent by order."""
T = TypeVar("T")
Call = Callable[[int, EngineControl], T]
"""(index of the engine, its control) -> result."""
_STATE_S = 10.0
"""Timeout in seconds for a live engine's state."""


class EngineFleet:
    """Controls of the engines, in replica order."""

    def __init__(self, urls: Sequence[str], key: str, timeout_s: float) -> None:
        self._engines = [EngineControl(url, key, timeout_s) for url in urls]
        self.starts: list[int] = []
        """Start of each engine, as of the last ``wait_ready``."""
        self.workers: list[int] = []
        """Number of workers of each engine."""

    @property
    def urls(self) -> list[str]:
        """URLs of the engines."""
        return [engine.url for engine in self._engines]

    def part(self, engines: Sequence[int]) -> EngineFleet:
        """Return a fleet of the engines with these numbers."""
        part = EngineFleet([], "", 0.0)
        part._engines = [self._engines[i] for i in engines]
        return part

    @contextmanager
    def calling(self, call: Call[T]) -> Iterator[list[Future[T]]]:
        """Call every engine in a thread; leaving the context waits for all."""
        with ThreadPoolExecutor(max(len(self._engines), 1)) as pool:
            yield [pool.submit(call, i, engine) for i, engine in enumerate(self._engines)]

    def each(self, call: Call[T]) -> list[T]:
        """Call every engine in parallel; raise the first failure after all calls have ended."""
        with self.calling(call) as futures:
            return results(futures)

    def forget_starts(self) -> None:
        """Forget the engines' starts: ``died`` returns nothing until the next ``wait_ready``."""
        self.starts = []

    def wait_ready(
        self, start_s: float, stopping: Callable[[], bool], left_out: Callable[[], Sequence[str]] = tuple
    ) -> None:
        """Wait until every engine serves. Raises EngineError, also if ``left_out`` names an engine during the wait."""
        over = Event()
        with self.calling(
            lambda i, engine: engine.wait_ready(start_s, stopping=lambda: over.is_set() or stopping())
        ) as futures:
            try:
                while wait(futures, timeout=_LOOK_S).not_done:
                    if gone := left_out():
                        raise EngineError(f"the engine at {gone[0]} is no longer to be joined")
            finally:
                over.set()
        results(futures)
        states = self.each(lambda i, engine: engine.state())
        self.starts = [state.start for state in states]
        self.workers = [state.workers for state in states]

    def died(self) -> list[str]:
        """Return the errors of engines that have ended since ``wait_ready``, even if others have replaced them.

        Return an empty list if ``wait_ready`` did not succeed: it already waited long enough.
        """

        def fate(i: int, engine: EngineControl) -> str | None:
            try:
                replaced = engine.state(timeout_s=_STATE_S).start != self.starts[i]
            except EngineError as error:
                return str(error)
            return f"the engine at {engine.url} has been replaced" if replaced else None

        return [found for found in self.each(fate) if found is not None] if self.starts else []

    def close(self, reason: str) -> None:
        """Make every reachable engine refuse generation, and be ready for another update."""
        for engine in self._engines:
            with suppress(EngineError):
                engine.refuse(reason)
                engine.workers("megarl_abandon_update")


def await_wanted(
    engines: Callable[[], Sequence[EngineRow] | None], timeout_s: float, stopping: Callable[[], bool]
) -> Sequence[EngineRow]:
    """Return the engines to join; wait while all are absent by order. Raises EngineError."""
    until = time.monotonic() + timeout_s
    while (rows := engines()) is None:
        if stopping() or time.monotonic() > until:
            raise EngineError("all engines of the job are absent by order; none was wanted again in time")
        heartbeat.beat()
        time.sleep(_ABSENT_S)
    if not rows:
        raise EngineError("the job has no engine: none is registered in its store")
    return rows


def results(futures: Sequence[Future[T]]) -> list[T]:
    """Return the results of calls; raise the first failure."""
    return [future.result() for future in futures]


def failures(futures: Sequence[Future[Any]]) -> list[str]:
    """Return the engines' errors, which explain more than a lost connection; waits 1 s for late ones."""
    done, _ = wait(futures, timeout=1.0)
    return [str(error) for future in done if (error := future.exception()) is not None]
