"""Parts of a job's engines that take new weights together: all of them, or each by itself (``sync.pause``)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.config.schema import RolloutConfig
from megarl.engines.sync.link import PartOfWorkers, first_workers
from megarl.engines.sync.shared import Places
from megarl.weights.reshard.adapters import AdapterDelivery
from megarl.weights.reshard.execute import Transport
from megarl.weights.reshard.layout import Layout
from megarl.weights.reshard.layouts import vllm_layout
from megarl.weights.reshard.plan import ReshardPlan, build_plan


@dataclass(frozen=True)
class PartOfEngines:
    """Engines whose workers are the destination ranks of ``plan``, from worker ``first`` of all on."""

    engines: Sequence[int]
    plan: ReshardPlan
    first: int = 0

    def transport(self, whole: Transport) -> Transport:
        """Return the transport to this part's ranks, as part of the one to all workers."""
        return PartOfWorkers(whole, self.first) if self.first else whole


class EnginePlans:
    """Plans from the trainer's layout to a job's engines: one for all, or each engine its own.

    Args:
        each: Each has its own, also where all have as many workers.
        adapters: Way of the adapters, where the trainer's model has some.
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
        """(workers of an engine, engines) -> the plan to them."""
        self.workers: Sequence[int] = ()
        """Workers of each engine; those that were scaled may have others."""

    @property
    def apart(self) -> bool:
        """True where each engine has a plan of its own."""
        return self._each or len(set(self.workers)) > 1

    @property
    def replicas(self) -> int:
        """Number of engines in a plan."""
        return 1 if self.apart else len(self.workers)

    def expect(self, engines: int) -> None:
        """Plan for so many engines with the workers of now, which takes a while: engines start meanwhile."""
        workers = self.workers[0] if self.workers else self._rollout.tp * self._rollout.pp
        self._plan(workers, 1 if self.apart else engines)

    def of_engines(self, workers: Sequence[int]) -> list[ReshardPlan]:
        """Plan for engines that have so many workers each; return each one's plan. Other plans are forgotten."""
        self.workers = workers
        plans = [self.of(engine) for engine in range(len(workers))]
        self._plans = {key: plan for key, plan in self._plans.items() if any(plan is own for own in plans)}
        return plans

    def of(self, engine: int) -> ReshardPlan:
        """The plan of an engine."""
        return self._plan(self.workers[engine], self.replicas)

    def _plan(self, workers: int, replicas: int) -> ReshardPlan:
        if (workers, replicas) not in self._plans:
            pp, expert_parallel = self._rollout.pp, self._rollout.expert_parallel
            engines = vllm_layout(self._hf_config, workers // pp, replicas, pp=pp, expert_parallel=expert_parallel)
            engines = engines if self._adapters is None else self._adapters.layout(engines)
            self._plans[workers, replicas] = build_plan(self._source, engines)
        return self._plans[workers, replicas]


def places_of(places: Places, engine: int, workers: Sequence[int]) -> Places:
    """Return the places as a part of one engine sees them, of engines that have so many workers each."""
    return places.of_workers(first_workers(workers)[engine], workers[engine])


def parts_of(plans: Sequence[ReshardPlan], workers: Sequence[int], places: Places) -> list[PartOfEngines]:
    """Cut a job's engines, which have so many workers each, into parts.

    Args:
        plans: One for all of them together, or for each engine its own.

    Engines whose workers are on the same machines share a plan, so that buckets are computed once.
    """
    if plans[0].destination.num_ranks == sum(workers):
        return [PartOfEngines(range(len(workers)), replace(plans[0], nearness=places.nearness()))]
    found: dict[tuple[str, tuple[str, ...]], ReshardPlan] = {}
    parts = []
    for engine, (plan, first) in enumerate(zip(plans, first_workers(workers), strict=True)):
        mine = places_of(places, engine, workers)
        key = (plan.fingerprint, tuple(mine.workers))
        if key not in found:
            found[key] = replace(plan, nearness=mine.nearness())
        parts.append(PartOfEngines([engine], found[key], first))
    return parts


def partners_of(parts: Sequence[PartOfEngines], workers: Sequence[int], rank: int) -> list[list[int]]:
    """Return for each engine the workers that trainer rank ``rank`` sends to, of engines that have so many each."""
    receivers: dict[ReshardPlan, list[int]] = {}
    for part in parts:
        if part.plan not in receivers:  # one rank's moves in a plan take up to a second to list
            receivers[part.plan] = part.plan.receivers_from(rank)
    sent = sorted(part.first + dst for part in parts for dst in receivers[part.plan])
    firsts = first_workers(workers)
    partners: list[list[int]] = [[] for _ in workers]
    for worker in sent:
        engine = bisect_right(firsts, worker) - 1
        partners[engine].append(worker - firsts[engine])
    return partners
