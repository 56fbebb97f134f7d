"""Description of a job for `megarl train --check`: one line per question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.config.algorithms import reads_distribution, teacher_top_k
from megarl.config.schema import OptimizerConfig, ParallelConfig
from megarl.core.jobs import ProcessKind
from megarl.learn import algorithms
from megarl.learn.algorithms import Algorithm
from megarl.learn.memory.activation_bytes import activation_bytes, divergence_bytes
from megarl.learn.memory.ledger import Ledger, human
from megarl.learn.memory.phases import Phase
from megarl.learn.parallel.grid import megatron_grid, role_grids, roles_of
from megarl.weights.architectures import ModelSizes, architecture
from megarl.weights.checkpoint.formats.hf_source import read_hf_config
from megarl.weights.reshard.adapters import TrainedPart

WIDTH = 11
"""Width in characters of a line's name."""


def summary(
    config: Config,
    hf_config: Mapping[str, Any],
    ledger: Ledger,
    rows: Mapping[str, int],
    bad_rows: Mapping[str, int] = {},
) -> str:
    """Describe a job, one line per question.

    Args:
        hf_config: The actor's config.json.
        rows: Split -> number of the job's rows.
        bad_rows: Split -> number of rows that ``taskset.bad_rows=drop`` drops.
    """
    job, algorithm = algorithms.job_of(config), algorithms.get(config.algorithm.name)
    found, limit = architecture(hf_config), config.rollout.max_prompt_tokens
    lines = {
        "model": f"{_count(found, hf_config)} parameters, {config.model.dtype}, {config.model.path}"
        + _adapters(config, hf_config, algorithm),
        "trainer": _grids(config, roles_of(config, algorithm)),
        "engines": _engines(config) if job.has(ProcessKind.ENGINE) else "none",
        "batch": _batch(config, algorithm.offline),
        "rows": ", ".join(f"{number:,} {split}" for split, number in rows.items())
        + "".join(f"; {number:,} bad of {split} left out" for split, number in bad_rows.items() if number),
        "lengths": (f"prompts up to {limit} tokens, " if limit else "prompts of any length, ")
        + f"responses up to {config.rollout.max_response_tokens} tokens",
        "rates": _rates(config, roles_of(config, algorithm)),
        "intervals": _intervals(config),
        "memory": memory(config, found.sizes(hf_config), ledger),
        "ends": f"after {config.trainer.steps} steps",
    }
    if algorithm.offline:
        del lines["lengths"]
    return "\n".join(f"{name:<{WIDTH}}{text}" for name, text in lines.items())


def memory(config: Config, sizes: ModelSizes, ledger: Ledger) -> str:
    """Describe the bytes of the fullest device in an update, with estimated activations, and in the phase with most
    models."""
    kept = activation_bytes(
        sizes, config.model, config.parallel, config.trainer.max_tokens_per_micro_batch, config.trainer.logits_bytes
    )
    kept += _divergence(config, sizes)
    update, largest = ledger.most(Phase.UPDATE).total, ledger.largest()
    text = f"update {human(update)} of models and about {human(kept)} of activations"
    if largest.phase is not Phase.UPDATE and largest.total != update:
        text += f"; {largest.phase} {human(largest.total)} of models" + (" and engines" if ledger.colocated else "")
    budget = config.cluster.device_bytes
    if budget is None:
        return text
    text += f"; of {human(budget)} a device"
    if update + kept > budget:
        fixes = "lower trainer.max_tokens_per_micro_batch, set model.recompute, or raise parallel.tp"
        text += f" (MORE THAN A DEVICE HAS: {fixes})"
    return text


def _divergence(config: Config, sizes: ModelSizes) -> int:
    """Return the bytes of a divergence from teachers in an update; 0 without one."""
    if not reads_distribution(config.algorithm):
        return 0
    trainer, grid, heads = config.trainer, config.parallel, []
    for teacher in config.teachers.values() if not teacher_top_k(config.algorithm) else ():
        size = int(read_hf_config(Path(str(teacher.path)))["hidden_size"])
        heads.append((size, config.model.head_dtype or teacher.dtype or config.model.dtype))
    tokens = -(-trainer.max_tokens_per_micro_batch // grid.cp)
    return divergence_bytes(sizes.vocab // grid.tp, tokens, heads, trainer.logits_bytes)


def _adapters(config: Config, hf_config: Mapping[str, Any], algorithm: Algorithm) -> str:
    """Describe the adapters of the trained model; "" without adapters."""
    lora = config.model.lora
    if not lora.is_used:
        return ""
    part = TrainedPart.of(hf_config, lora, "lm" if "actor" in algorithm.roles else "score")
    warm = f", after {config.trainer.warm_start.steps} steps of the whole" if config.trainer.warm_start.steps else ""
    return f"; adapters of rank {lora.rank}: {part} are trained{warm}"


def _count(found: Any, hf_config: Mapping[str, Any]) -> str:
    number = sum(map(prod, found.tensors(hf_config).values()))
    value, unit = (number / 1e9, "B") if number >= 1e9 else (number / 1e6, "M")
    return f"{value:.3g} {unit}"


def _grids(config: Config, roles: Sequence[str]) -> str:
    grids = role_grids(config, roles)
    actor = grids.pop("parallel")
    alike = [setting.removesuffix(".parallel") for setting, grid in grids.items() if grid == actor]
    others = [f"{setting.removesuffix('.parallel')} {_grid(g)}" for setting, g in grids.items() if g != actor]
    names = ", ".join(["actor", *alike])
    return "; ".join([f"{actor.world_size} ranks ({actor.backend}): {names} {_grid(actor)}", *others])


def _grid(grid: ParallelConfig) -> str:
    text = str(megatron_grid(grid))
    return text + (" with sequence parallelism" if grid.sequence_parallel else "")


def _engines(config: Config) -> str:
    rollout = config.rollout
    size = f"tp={rollout.tp}" + (f" pp={rollout.pp}" if rollout.pp > 1 else "")
    over = f" over {rollout.nodes} nodes each" if rollout.nodes > 1 else ""
    turns = ", in turn with the trainer" if rollout.is_colocated else ""
    ahead = f", {config.sync.max_staleness} steps ahead" if config.sync.max_staleness else ""
    cache = (
        f"{rollout.gpu_memory_utilization:g} of a GPU"
        if rollout.gpu_memory_utilization is not None
        else f"{human(rollout.cache_bytes or 0)} of KV cache"
    )
    return f"{rollout.replicas} of {size}{over}{turns}{ahead}, {cache}, weights by {config.sync.transport}"


def _batch(config: Config, offline: bool) -> str:
    trainer = config.trainer
    rows, each = trainer.tasks_per_step, f"{trainer.tasks_per_step:,} rows a step"
    if not offline:
        rows *= config.algorithm.group_size
        each = f"{trainer.tasks_per_step:,} tasks x {config.algorithm.group_size} responses a step"
    updates = trainer.updates_per_step
    micro = (
        f"micro-batches of up to {trainer.max_tokens_per_micro_batch:,} tokens"
        if trainer.packing
        else (f"micro-batches of {trainer.micro_batch_size} rows")
    )
    return f"{each}, {updates} update{'s' * (updates > 1)} of {rows // updates:,}, {micro}"


def _rates(config: Config, roles: Sequence[str]) -> str:
    found = {"actor": config.trainer.optimizer}
    if "critic" in roles:
        found["critic"] = config.critic.optimizer
    if config.trainer.warm_start.steps:
        found[f"warm start of {config.trainer.warm_start.steps} steps"] = config.trainer.warm_start.optimizer
    return ", ".join(f"{name} {_rate(optimizer)}" for name, optimizer in found.items())


def _rate(optimizer: OptimizerConfig) -> str:
    warm = f" after {optimizer.warmup_steps} steps" if optimizer.warmup_steps else ""
    decay = f" down to {optimizer.min_lr:g} at step {optimizer.decay_steps}" if optimizer.decay_steps else ""
    return f"{optimizer.lr:g}{warm}{decay}"


def _intervals(config: Config) -> str:
    trainer = config.trainer
    named = {"evaluation": trainer.eval_interval, "checkpoint": trainer.checkpoint_interval}
    if algorithms.job_of(config).rollouts:
        named["weights"] = config.sync.interval
    return ", ".join(
        f"{name} {'never' if not every else 'each step' if every == 1 else f'each {every} steps'}"
        for name, every in named.items()
    )
