"""Choose the fastest plans for a number of devices: every grid, placement and size of engines that fits."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from megarl.config.schema import ParallelConfig
from megarl.core.errors import ConfigError
from megarl.learn.parallel.grid import megatron_grid
from megarl.planner.model_cost import Device
from megarl.planner.predict import JobPlan, Prediction, StepWork, predict, training_seconds, update_bytes
from megarl.weights.reshard.grid import check_grid, shares_heads

KEPT = 4
"""Grids of one number of devices that are combined with engines."""
LONG = 4096
"""Fewest tokens of a trajectory on one rank for which context parallelism is considered."""
USABLE = 0.94
"""Share of a device's memory that a plan may take."""
TIE = 0.15
"""Plans closer than this share cannot be told apart."""
SIZES = (1, 2, 4, 8, 16, 32, 64)


def grids(work: StepWork, ranks: int, device: Device, name: str) -> Iterator[ParallelConfig]:
    """Yield the grids of ``ranks`` that divide the model. Tensor and context parallelism stay in a link domain."""
    sizes, layers = work.sizes, work.sizes.num_layers
    longest = (work.prompt + work.lengths.cap) / LONG
    ways = [size for size in SIZES if size <= ranks]
    for tp, cp, pp in product(ways, (1, 2, 4, 8), ways):
        dp, left = divmod(ranks, tp * cp * pp)
        if left or tp * cp > device.link_domain or pp > layers or cp > max(1.0, longest):
            continue
        most = -(-layers // pp)
        last = layers - most * (pp - 1)
        if last < 1:
            continue
        uneven = last if last != most else None
        for ep in [size for size in SIZES if size == 1 or sizes.experts]:
            grid = ParallelConfig(
                tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, last_stage_layers=uneven, sequence_parallel=tp > 1,
                overlap_grad_reduce=True, overlap_param_gather=True, backend=device.backend,
            )  # fmt: skip
            try:
                check_grid(name, sizes, megatron_grid(grid))
            except ConfigError:
                continue
            yield grid


def trainers(work: StepWork, ranks: int, device: Device, name: str, colocated: bool) -> list[JobPlan]:
    """Return the fastest trainers on ``ranks`` that fit a device, without engines."""
    found: list[tuple[float, int, JobPlan]] = []
    for number, grid in enumerate(grids(work, ranks, device, name)):
        if grid.dp * work.updates > work.trajectories:
            continue
        for recompute in ("none", "selective", "full"):
            if recompute == "full" and work.sizes.hands_on:  # refused by run/checks/grids.py
                continue
            plan = JobPlan(grid, recompute, 1, 0, colocated, 0, device.backend)
            limit = device.memory_bytes * USABLE
            if update_bytes(work, plan, limit) <= limit:
                update, passes, _ = training_seconds(work, plan, device)
                found.append((update + passes, number, plan))
                break  # what recomputes more is slower
    return [plan for _, _, plan in heapq.nsmallest(KEPT, found, key=lambda row: row[:2])]


def engines(work: StepWork, gpus: int, device: Device) -> Iterator[tuple[int, int]]:
    """Yield (tensor-parallel size, number) of the engines that fill ``gpus`` and fit."""
    for tp in SIZES:
        groups = (0 if work.sizes.kv_lora else work.sizes.kv_heads, work.sizes.global_kv_heads)
        if gpus % tp or work.sizes.heads % tp or not all(shares_heads(number, tp) for number in groups):
            continue
        if (
            work.model.parameters * 2 / tp < device.memory_bytes * work.device_share - 6e9
            and gpus // tp <= work.trajectories
        ):
            yield tp, gpus // tp


def search(work: StepWork, gpus: int, device: Device, name: str, ahead: int = 0, node: int = 8) -> list[Prediction]:
    """Return predictions of the best plans for ``gpus`` devices, fastest first.

    Args:
        ahead: ``sync.max_staleness``.
        node: Devices of a node. On more than four nodes trainer and engines take whole nodes, else halves.
    """
    found: list[Prediction] = []
    if not work.samples:
        found = [predict(work, plan, device) for plan in trainers(work, gpus, device, name, False)]
        return sorted(found, key=lambda one: one.step_s)
    for plan in trainers(work, gpus, device, name, True):
        for tp, number in engines(work, gpus, device):
            transport = transport_in_turns(device, plan.grid, tp, node)
            turns = replace(plan, engine_tp=tp, replicas=number, transport=transport)
            found.append(predict(work, turns, device))
    unit = node if gpus > 4 * node else max(1, node // 2)
    for ranks in sorted({unit * round(gpus * share / unit) for share in (0.25, 0.375, 0.5, 0.625, 0.75)}):
        if not 0 < ranks < gpus:
            continue
        for plan in trainers(work, ranks, device, name, False):
            for tp, number in engines(work, gpus - ranks, device):
                found.append(predict(work, replace(plan, engine_tp=tp, replicas=number, ahead=ahead), device))
    return sorted((one for one in found if one.step_s < math.inf), key=lambda one: one.step_s)


def transport_in_turns(device: Device, grid: ParallelConfig, tp: int, node: int) -> str:
    """Return the transport of engines that share GPUs with the trainer: GPU memory within a node, else gloo.
    NCCL between processes that share their GPUs with others was never run."""
    copy = grid.pp * max(grid.tp * grid.cp, grid.ep * grid.expert_tp)
    return device.backend if max(copy, tp) <= node else "gloo"


def ties(found: list[Prediction]) -> list[Prediction]:
    """Return the plans that cannot be told from the first."""
    return [one for one in found if one.step_s <= found[0].step_s * (1 + TIE)]


def reason(best: Prediction, other: Prediction) -> str:
    """Say in which phase and for which cause a plan takes longer than the best."""
    longer = {phase: other.seconds.get(phase, 0.0) - best.seconds.get(phase, 0.0) for phase in other.seconds}
    phase = max(longer, key=lambda name: longer[name])
    waits = not other.plan.colocated and not other.plan.ahead and other.plan.replicas
    if waits and other.idle > best.idle + 0.1:
        return f"{other.idle:.0%} of its GPU seconds are idle: trainer and engines wait for each other"
    if longer[phase] <= 0:
        return "rollout and update do not overlap as much"
    text = f"{phase} takes {longer[phase]:.3g} s more"
    if phase == "rollout":
        return text + f" on {other.plan.replicas} engines of TP{other.plan.engine_tp}"
    if phase == "update":
        names = ("products", "attention", "elementwise work", "messages", "experts' fixed time")
        more = [a - b for a, b in zip(other.parts.values, best.parts.values, strict=True)]
        most = max(range(len(more)), key=lambda n: more[n])
        cause = names[most] if more[most] > 0.3 * longer[phase] else "the pipeline's bubble, or fewer ranks"
        return f"{text}: {cause}"
    return text
