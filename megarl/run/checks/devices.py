"""Check before the start: memory of a job's models and engines on each device, in each phase, against budgets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.config.model_roles import path_of
from megarl.core.errors import ConfigError
from megarl.core.jobs import ProcessKind
from megarl.learn import algorithms
from megarl.learn.algorithms import Algorithm
from megarl.learn.memory.ledger import Ledger, human
from megarl.learn.memory.phases import Phase, PhasePlan, offload_setting
from megarl.learn.parallel.grid import roles_of
from megarl.run.checks.memory import device_bytes, engine_bytes, resident_bytes, warm_start_bytes
from megarl.weights.checkpoint.formats.hf_source import read_hf_config
from megarl.weights.checkpoint.formats.score_files import ScoreFiles


def has_budget(config: Config) -> bool:
    """Return True if a setting limits device, host or disk memory."""
    cluster = config.cluster
    return (cluster.device_bytes, cluster.host_bytes, config.trainer.offload_disk_bytes) != (None, None, None)


def ledger_of(config: Config, algorithm: Algorithm, hf_config: Mapping[str, Any], nodes: int | None = 1) -> Ledger:
    """Return the memory ledger of a job's trainer ranks, with the engine workers that share their devices.

    Args:
        hf_config: The actor's config.json.
        nodes: Machines of the job; its ranks are assumed to spread evenly over them. None if unknown.

    Raises:
        ConfigError: a grid does not divide its model.
    """
    hf_configs = {"actor": hf_config}
    for role in roles_of(config, algorithm):
        if (path := path_of(config, role)) is not None:
            hf_configs[role] = read_hf_config(ScoreFiles.of(Path(path)).base)
    ranks = resident_bytes(config, algorithm, hf_configs)
    engines = algorithms.job_of(config).rollouts
    colocated = engines and config.rollout.is_colocated
    if colocated:
        ranks = device_bytes(ranks, engine_bytes(config, hf_config), nodes=2 if nodes is None else nodes)
    phases = tuple(phase for phase in Phase if engines or phase not in (Phase.SYNC, Phase.ROLLOUT))
    adapted = config.model.lora.is_used and config.trainer.warm_start.steps > 0
    start = warm_start_bytes(config, hf_config) if adapted else None
    return Ledger(PhasePlan.of(config), ranks, colocated, config.rollout.offload == "memory", phases, start)


def check_devices(config: Config, algorithm: Algorithm, hf_config: Mapping[str, Any], nodes: int | None = 1) -> None:
    """Check that models and engines fit the budgets of devices, hosts and disks.

    Arguments as ``ledger_of``; host memory is not checked if the number of nodes is unknown.

    Raises:
        ConfigError: names phase, residents, the budget's setting and the nearest plan that fits.
    """
    ledger = ledger_of(config, algorithm, hf_config, nodes)
    cluster = config.cluster
    if cluster.device_bytes is not None:
        if not ledger.fits(cluster.device_bytes):
            raise ConfigError(_too_large(ledger, cluster.device_bytes))
        if algorithms.job_of(config).has(ProcessKind.ENGINE):
            check_engine_devices(config, hf_config, cluster.device_bytes)
    if cluster.host_bytes is not None and nodes is not None:
        on_gpus = config.parallel.backend == "nccl"
        _check_host(ledger, max(1, nodes - cluster.spare_nodes), cluster.host_bytes, kept=on_gpus)
    if config.trainer.offload_disk_bytes is not None:
        _check_disk(ledger, config.trainer.offload_disk_bytes)


def _check_host(ledger: Ledger, nodes: int, budget: int, *, kept: bool) -> None:
    """Raise ConfigError if offloaded copies exceed a node's budget; ``kept`` as in ``Ledger.host_bytes``."""
    on_node = sum(ledger.host_bytes(rank, kept=kept) for rank in range(len(ledger.ranks))) // nodes
    if on_node > budget:
        others = ", or rollout.offload to sleep" if ledger.keeps_weights else ""
        raise ConfigError(
            f"offload=memory moves {human(on_node)} ({on_node} bytes) into the memory of a node, more than "
            f"cluster.host_bytes={budget}; raise it, or set a role's offload to disk{others}"
        )


def _check_disk(ledger: Ledger, budget: int) -> None:
    """Raise ConfigError if a rank exceeds the disk budget in any phase."""
    phases, ranks = ledger.of_job, range(len(ledger.ranks))
    most = max((ledger.at(phase, rank) for rank in ranks for phase in phases), key=lambda found: found.disk)
    if most.disk > budget:
        raise ConfigError(
            f"offload=disk has {human(most.disk)} ({most.disk} bytes) of rank {most.rank} on disk in phase "
            f"{most.phase}, more than trainer.offload_disk_bytes={budget}; raise it, or set a role's offload to memory"
        )


def _too_large(ledger: Ledger, budget: int) -> str:
    most = ledger.largest()
    sizes = sorted(most.device.items(), key=lambda item: -item[1])
    held = ", ".join(f"{name} {human(size)}" for name, size in sizes if size)
    nearest = ledger.nearest(budget)
    if nearest is None:
        fix = (
            "whatever is offloaded: raise it, spread the models over more ranks (parallel, <role>.parallel), or lower "
            "rollout.kv_cache_bytes or rollout.gpu_memory_utilization of colocated engines"
        )
    else:
        moved = [role for role, place in nearest.away.items() if place is not ledger.plan.away[role]]
        fix = "nearest that fits: " + " ".join(f"{offload_setting(role)}=memory" for role in moved)
    return (
        f"phase {most.phase} has {human(most.total)} ({most.total} bytes) on the device of rank {most.rank} ({held}), "
        f"more than cluster.device_bytes={budget}; {fix}"
    )


def check_engine_devices(config: Config, hf_config: Mapping[str, Any], budget: int) -> None:
    """Raise ConfigError if an engine worker needs more than a device, or its weights leave no memory for its KV
    cache."""
    workers = engine_bytes(config, hf_config)
    number, most = max(enumerate(workers), key=lambda item: sum(item[1].values()))
    share = config.rollout.gpu_memory_utilization
    if share is not None and not all(worker["engine.kv_cache"] for worker in workers):
        raise ConfigError(
            f"engine worker {number} has weights of {human(most['engine.weights'])}, which leave nothing for its KV "
            f"cache of rollout.gpu_memory_utilization={share:g} of cluster.device_bytes={budget}; raise it, or raise "
            "rollout.tp"
        )
    if (total := sum(most.values())) > budget:
        held = ", ".join(f"{name} {human(size)}" for name, size in most.items())
        raise ConfigError(
            f"engine worker {number} has {human(total)} ({total} bytes) on its device ({held}), more than "
            f"cluster.device_bytes={budget}; raise it, lower rollout.kv_cache_bytes, or raise rollout.tp"
        )
