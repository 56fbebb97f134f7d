"""Parts of a job's engines that take new weights together: all of them, or each by itself (``sync.pause``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.core.config.schema import RolloutConfig
from megarl.engine.sync.link import PartOfWorkers
from megarl.engine.sync.shared import Places
from megarl.weights.reshard.execute import Transport
from megarl.weights.reshard.layout import Layout
from megarl.weights.reshard.layouts import vllm_layout
from megarl.weights.reshard.plan import ReshardPlan, build_plan


@dataclass(frozen=True)
class Part:
    """Engines whose workers are the destination ranks of ``plan``, from worker ``first`` of all on."""

    engines: Sequence[int]
    plan: ReshardPlan
    first: int = 0

    def transport(self, whole: Transport) -> Transport:
        """Return the transport to this part's ranks, as part of the one to all workers."""
        return PartOfWorkers(whole, self.first) if self.first else whole


def plan_for(source: Layout, hf_config: Mapping[str, Any], rollout: RolloutConfig, replicas: int) -> ReshardPlan:
    """Plan from the trainer's layout to so many engines."""
    return build_plan(
        source,
        vllm_layout(hf_config, rollout.tp, replicas=replicas, pp=rollout.pp, expert_parallel=rollout.expert_parallel),
    )


def places_of(places: Places, engine: int, workers: int) -> Places:
    """Return the places as a part of one engine sees them, which has so many workers."""
    return places.of_workers(engine * workers, workers)


def parts_of(plan: ReshardPlan, engines: int, workers: int, places: Places) -> list[Part]:
    """Cut a job's engines into parts: as many as ``plan`` goes into them, which is for one engine or for all.

    Engines whose workers are on the same machines share a plan, so that buckets are computed once.
    """
    if plan.destination.num_ranks == engines * workers:
        return [Part(range(engines), replace(plan, nearness=places.nearness()))]
    plans: dict[tuple[str, ...], ReshardPlan] = {}
    parts = []
    for engine in range(engines):
        mine = places_of(places, engine, workers)
        key = tuple(mine.workers)
        if key not in plans:
            plans[key] = replace(plan, nearness=mine.nearness())
        parts.append(Part([engine], plans[key], engine * workers))
    return parts
