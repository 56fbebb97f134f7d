"""Bytes of the residents of every trainer rank and engine worker of a job, against the memory of its devices.

Activations, logits, communication buffers and CUDA's own memory are not included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any, Literal

from megarl.config import Config
from megarl.config.derived import path_of, sections_of
from megarl.config.lora import LoraConfig
from megarl.core.errors import ConfigError
from megarl.core.jobs import ProcessKind
from megarl.engines.client.names import EIGHT_BIT_BLOCK, EIGHT_BITS
from megarl.learn import algorithms
from megarl.learn.algorithms import Algorithm
from megarl.learn.memory.ledger import Ledger, human
from megarl.learn.memory.phases import Phase, PhasePlan, offload_setting
from megarl.learn.memory.resident_bytes import ITEM_BYTES, model_bytes
from megarl.learn.parallel.grid import role_grids, roles_of
from megarl.learn.training.role_adapters import SCORING, role_lora, shares_base
from megarl.weights.architectures import Head, architecture
from megarl.weights.checkpoint.formats.hf_source import read_hf_config
from megarl.weights.checkpoint.formats.score_files import ScoreFiles
from megarl.weights.reshard.layout import Layout, LayoutRow
from megarl.weights.reshard.layouts import vllm_layout

TRAINED = frozenset({"actor", "critic"})
INPUTS_CUT = ("o_proj", "down_proj")
"""Layers with inputs split by tensor parallelism."""
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""vLLM's names of a model's embedding and output weight."""


def resident_bytes(
    config: Config, algorithm: Algorithm, hf_configs: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, int]]:
    """Return ``role.kind`` -> bytes on the device, for every trainer rank. ``average``: the copy for
    ``evaluation.average``.

    A reward model in training is counted with its score head. Its warm start trains a language model, which takes more.
    With adapters the bytes are for the time after the warm start (``warm_start_bytes``).

    Args:
        hf_configs: Role -> its model's config.json. A missing role has the actor's.

    Raises:
        ConfigError: a grid does not divide its model.
    """
    roles = roles_of(config, algorithm)
    grids = role_grids(config, roles)
    ranks: list[dict[str, int]] = [{} for _ in range(config.parallel.world_size)]
    for role in ("actor", *roles):
        scores = "reward" in algorithm.roles if role == "actor" else role in SCORING
        head: Head = "score" if scores else "lm"
        dtype = (None if role == "actor" else sections_of(config)[role].dtype) or config.model.dtype
        setting = "parallel" if role == "actor" else f"{role}.parallel"
        found = model_bytes(
            hf_configs.get(role, hf_configs["actor"]),
            replace(config.model, dtype=dtype, lora=role_lora(config, role)),
            grids[setting],
            head,
            trained=role in TRAINED,
            setting=setting,
            lent=shares_base(config, role),
            bucket_bytes=config.trainer.stream_optimizer_bytes,
        )
        for rank, kinds in zip(ranks, found, strict=True):
            rank.update({f"{role}.{kind}": size for kind, size in kinds.items()})
    if config.evaluation.average is not None:
        settings = replace(config.model, dtype="float32")
        found = model_bytes(hf_configs["actor"], settings, grids["parallel"], "lm", trained=False, setting="parallel")
        for rank, kinds in zip(ranks, found, strict=True):
            rank["average.parameters"] = kinds["parameters"]
    return ranks


def warm_start_bytes(config: Config, hf_config: Mapping[str, Any]) -> list[dict[str, int]]:
    """Return ``actor.kind`` -> bytes on the device in a warm start, which trains the whole model, for every trainer
    rank.

        Raises:
            ConfigError: the grid does not divide the model.
    """
    model = replace(config.model, lora=LoraConfig())
    found = model_bytes(hf_config, model, config.parallel, "lm", trained=True)
    return [{f"actor.{kind}": size for kind, size in kinds.items()} for kinds in found]


def engine_bytes(config: Config, hf_config: Mapping[str, Any]) -> list[dict[str, int]]:
    """Return bytes of ``engine.weights`` and ``engine.kv_cache`` for every worker of every engine. With 8-bit weights
    and tensor parallelism also ``engine.sync``: weights kept in ``model.dtype`` until a sync is complete.

    On CPUs a tied model's output weight is a separate tensor (vLLM packs it), on GPUs it is the embedding. The KV
    cache's bytes are an upper bound, since vLLM uses whole blocks. With ``rollout.gpu_memory_utilization`` they are
    that share of ``cluster.device_bytes`` without the weights (real caches are smaller: the share includes
    activations), or 0 without a budget.

    Raises:
        ConfigError: the engines' grid does not divide the model.
    """
    rollout = config.rollout
    layout = vllm_layout(
        hf_config, rollout.tp, rollout.replicas, pp=rollout.pp, expert_parallel=rollout.expert_parallel
    )
    one_copy = architecture(hf_config).sizes(hf_config).tied and config.parallel.backend == "nccl"
    of_kind: dict[object, dict[str, int]] = {}  # replicas have the same content
    workers = []
    for worker in range(layout.num_ranks):
        kind = layout.kind(worker)
        if kind not in of_kind:
            of_kind[kind] = _worker_bytes(config, layout, worker, one_copy=one_copy)
        workers.append(dict(of_kind[kind]))
    return workers


def _worker_bytes(config: Config, layout: Layout, worker: int, *, one_copy: bool) -> dict[str, int]:
    """Return a worker's bytes by resident. ``one_copy``: the output weight is the embedding."""
    rollout, dtype, rows = config.rollout, config.model.dtype, layout.rows_of(worker)
    eight_bits = rollout.weight_dtype == "fp8"
    sizes = {
        row.local: _weight_bytes(row, share, layout.dtype_of(row.parts[0]) or dtype, eight_bits) for row, share in rows
    }
    if one_copy and EMBEDDING in sizes:
        sizes.pop(LM_HEAD, None)
    weights = sum(sizes.values())
    cache = rollout.cache_bytes
    if cache is None:
        assert rollout.gpu_memory_utilization is not None, "one of the two decides"
        part = int(rollout.gpu_memory_utilization * (config.cluster.device_bytes or 0))
        cache = max(0, part - weights)
    found = {"engine.weights": weights, "engine.kv_cache": cache}
    if eight_bits and rollout.tp > 1:
        # Workers agree on the scales of these tensors after all have arrived.
        found["engine.sync"] = sum(
            prod(row.local_shape(share)) * ITEM_BYTES[dtype]
            for row, share in rows
            if row.local.split(".")[-2] in INPUTS_CUT and _in_eight_bits(row)
        )
    return found


def _weight_bytes(row: LayoutRow, share: int, dtype: str, eight_bits: bool) -> int:
    """Return the bytes of a worker's local tensor. In 8 bits: one per element, and a float32 scale per output channel
    of a linear layer. A block of experts has two scales: after a sync vLLM's kernel keeps separate ones."""
    shape, kind = row.local_shape(share), _in_eight_bits(row) if eight_bits else None
    scales = {"linear": shape[0], "experts": 2 * prod(shape) // EIGHT_BIT_BLOCK**2, None: 0}[kind]
    return prod(shape) * (1 if kind else ITEM_BYTES[dtype]) + 4 * scales


def _in_eight_bits(row: LayoutRow) -> Literal["linear", "experts"] | None:
    """Return the kind of a local tensor that ``rollout.weight_dtype=fp8`` stores in 8 bits; None for other tensors."""
    layer = row.local.split(".")[-2]
    if layer == "routed_experts":
        return "experts"
    if not row.local.endswith(".weight") or "proj" not in layer:
        return None
    part = row.parts[0].removesuffix(".weight")
    return None if any(fnmatch(part, pattern) for pattern in EIGHT_BITS["ignore"]) else "linear"


def device_bytes(
    ranks: Sequence[Mapping[str, int]], workers: Sequence[Mapping[str, int]], *, nodes: int = 1
) -> list[dict[str, int]]:
    """Return the residents of every device that trainer ranks and engine workers share.

    On one node rank n and worker n share a device (``run/nodes/plan.py``). On several nodes, whose placement is unknown
    here, every rank is assumed to share with the largest worker.
    """
    if nodes > 1 and workers:
        largest = {name: max(worker[name] for worker in workers) for name in workers[0]}
        workers = [largest] * len(ranks)
    nothing: Mapping[str, int] = {}
    return [{**rank, **worker} for rank, worker in zip_longest(ranks, workers, fillvalue=nothing)]


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
