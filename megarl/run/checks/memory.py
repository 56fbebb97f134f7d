"""Bytes of the residents of every trainer rank and engine worker of a job, computed before a process starts.

Activations, logits, communication buffers and CUDA's own memory are not included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from itertools import zip_longest
from math import prod
from typing import Any, Literal

from megarl.config import Config
from megarl.config.lora import LoraConfig
from megarl.config.model_roles import sections_of
from megarl.engines.client.names import EIGHT_BIT_BLOCK, EIGHT_BITS
from megarl.learn.algorithms import Algorithm
from megarl.learn.memory.resident_bytes import ITEM_BYTES, model_bytes
from megarl.learn.parallel.grid import role_grids, roles_of
from megarl.learn.training.role_adapters import SCORING, role_lora, shares_base
from megarl.weights.architectures import Head, architecture
from megarl.weights.reshard.layout import LayoutRow
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
    workers = []
    for worker in range(layout.num_ranks):
        sizes = {
            row.local: _weight_bytes(
                row, share, layout.dtype_of(row.parts[0]) or config.model.dtype, rollout.weight_dtype == "fp8"
            )
            for row, share in layout.rows_of(worker)
        }
        if one_copy and EMBEDDING in sizes:
            sizes.pop(LM_HEAD, None)
        weights = sum(sizes.values())
        cache = rollout.cache_bytes
        if cache is None:
            assert rollout.gpu_memory_utilization is not None, "one of the two decides"
            share = int(rollout.gpu_memory_utilization * (config.cluster.device_bytes or 0))
            cache = max(0, share - weights)
        found = {"engine.weights": weights, "engine.kv_cache": cache}
        if rollout.weight_dtype == "fp8" and rollout.tp > 1:
            # Workers agree on the scales of these tensors after all have arrived.
            found["engine.sync"] = sum(
                prod(row.local_shape(share)) * ITEM_BYTES[config.model.dtype]
                for row, share in layout.rows_of(worker)
                if row.local.split(".")[-2] in INPUTS_CUT and _in_eight_bits(row)
            )
        workers.append(found)
    return workers


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
