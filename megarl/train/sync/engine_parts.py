"""Division of a job's engines into parts that receive weights together: all, or one by one (``sync.pause``)."""

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
