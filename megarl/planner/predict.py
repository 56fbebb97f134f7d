"""Work of one step, and the seconds and bytes of a plan for it, phase by phase."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from megarl.config import Config
from megarl.config.derived import is_teacher
from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.learn import algorithms
from megarl.learn.memory.activation_bytes import activation_bytes
from megarl.learn.parallel.grid import roles_of
from megarl.planner.model_cost import BF16, Device, ModelCost
from megarl.planner.phase_seconds import (
    OVERHEAD_BYTES,
    Lengths,
    Parts,
    RolloutCost,
    TrainingCost,
    copies,
    rank_parameters,
)
from megarl.weights.architectures import ModelSizes, architecture

USUAL_SHARE = 0.4
"""Mean length of responses over ``rollout.max_response_tokens`` where nothing else is known: a guess."""
USUAL_PROMPT = 512
"""Mean tokens of a prompt where nothing else is known: a guess, at most half of ``rollout.max_prompt_tokens``."""


@dataclass(frozen=True)
class StepWork:
    """One step of a job."""

    model: ModelCost
    sizes: ModelSizes
    trajectories: int
    group: int
    prompt: float
    """Mean tokens of a prompt."""
    lengths: Lengths
    updates: int
    micro_batch: int
    """Most tokens of a micro-batch."""
    passes: float
    """Forward passes of models as large as the actor, over all tokens of the step."""
    frozen: int
    """Models with weights alone, each as large as the actor."""
    trained: int
    """Models with an optimizer: the actor, and a critic."""
    samples: bool
    """False for jobs that learn from files."""
    logits_bytes: int | None
    device_share: float
    max_num_seqs: int

    @classmethod
    def of(cls, config: Config, hf_config: Mapping[str, Any], lengths: Lengths | None = None) -> StepWork:
        """Return the work of a job's step. Models of all roles count as large as the actor.

        Args:
            lengths: Lengths of its responses; None guesses them from ``rollout.max_response_tokens``.
        """
        algorithm = algorithms.get(config.algorithm.name)
        roles, rollout, trainer = roles_of(config, algorithm), config.rollout, config.trainer
        updates = trainer.updates_per_step
        frozen = sum(role in ("reference", "reward_model") or is_teacher(role) for role in roles)
        old_logp = (updates - 1) / updates if "old_logp" in algorithm.needs else 0.0
        has_critic = "critic" in roles
        if lengths is None:
            lengths = Lengths.of_mean(USUAL_SHARE * rollout.max_response_tokens, rollout.max_response_tokens)
        prompts = rollout.max_prompt_tokens
        return cls(
            ModelCost.of(hf_config),
            architecture(hf_config).sizes(hf_config),
            trainer.tasks_per_step * config.algorithm.group_size,
            config.algorithm.group_size,
            min(USUAL_PROMPT, prompts / 2) if prompts else USUAL_PROMPT,
            lengths,
            updates,
            trainer.max_tokens_per_micro_batch,
            frozen + old_logp + has_critic,
            frozen,
            1 + has_critic,
            not algorithm.offline,
            trainer.logits_bytes,
            rollout.gpu_memory_utilization or 0.85,
            rollout.max_num_seqs,
        )

    @property
    def tokens(self) -> float:
        """Tokens of prompts and responses of the step."""
        return self.trajectories * (self.prompt + self.lengths.mean)

    @property
    def context(self) -> float:
        """Mean number of tokens that a token attends to."""
        return self.lengths.context(self.prompt)


@dataclass(frozen=True)
class JobPlan:
    """Grid, engines and their placement."""

    grid: ParallelConfig
    recompute: str
    engine_tp: int
    replicas: int
    colocated: bool
    ahead: int
    """``sync.max_staleness``."""
    transport: str

    @classmethod
    def of(cls, config: Config) -> JobPlan:
        """Return the plan that a job's settings describe."""
        rollout, model = config.rollout, config.model
        return cls(
            config.parallel,
            model.recompute
            if model.recompute != "selective" or {"mlp", "moe"} & {*model.recompute_modules}
            else "none",
            rollout.tp * rollout.pp,
            rollout.replicas if algorithms.job_of(config).rollouts else 0,
            rollout.is_colocated,
            config.sync.max_staleness,
            config.sync.transport if config.sync.transport in ("nccl", "gloo") else "nccl",
        )

    @property
    def gpus(self) -> int:
        """Devices of trainer ranks and engine workers together."""
        workers = self.engine_tp * self.replicas
        return max(self.grid.world_size, workers) if self.colocated else self.grid.world_size + workers

    def overrides(self, experts: bool) -> list[str]:
        """Return the settings of this plan, as overrides of ``megarl train``."""
        grid = self.grid
        sizes = {"tp": grid.tp, "pp": grid.pp, "dp": grid.dp, "cp": grid.cp, "ep": grid.ep, "vpp": grid.vpp}
        found = [f"parallel.{name}={size}" for name, size in sizes.items()]
        for name in ("first_stage_layers", "last_stage_layers"):
            found.append(f"parallel.{name}={getattr(grid, name) or 'null'}")
        found.append(f"parallel.sequence_parallel={str(grid.sequence_parallel).lower()}")
        found.append(f"model.recompute={self.recompute}")
        if self.recompute == "selective":
            found.append(f"model.recompute_modules=[{'moe' if experts else 'mlp'}]")
        if self.replicas:
            placement, offload = ("colocated", "memory") if self.colocated else ("separate", "none")
            found.append(f"sync.transport={self.transport}")
            found += [f"rollout.placement={placement}", f"rollout.tp={self.engine_tp}"]
            found += [f"rollout.replicas={self.replicas}", f"trainer.offload={offload}", f"reference.offload={offload}"]
            found.append(f"sync.max_staleness={self.ahead}")
        return found

    def __str__(self) -> str:
        grid = self.grid
        sizes = {"TP": grid.tp, "CP": grid.cp, "PP": grid.pp, "DP": grid.dp, "EP": grid.ep}
        text = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "1 rank"
        if self.recompute != "none":
            text += f", {self.recompute} recompute"
        if not self.replicas:
            return text
        text += f"; {self.replicas} engine{'s' * (self.replicas > 1)} of TP{self.engine_tp}"
        text += ", in turns" if self.colocated else f" on {self.engine_tp * self.replicas} GPUs"
        return text + (f", {self.ahead} step{'s' * (self.ahead > 1)} ahead" if self.ahead else "")


def model_settings(recompute: str, experts: bool) -> ModelConfig:
    """Return the model's settings that decide its activations."""
    modules = ["moe" if experts else "mlp"] if recompute == "selective" else []
    return ModelConfig(dtype="bfloat16", recompute=recompute, recompute_modules=modules)  # type: ignore[arg-type]


class TransportRate(NamedTuple):
    """Rate of a transport: bytes per second of dense weights and of experts, of one receiver or of the whole model."""

    dense: float
    experts: float
    of: Literal["receiver", "model"]
    fixed_s: float


TRANSPORTS: dict[str, TransportRate] = {
    "nccl": TransportRate(25e9, 25e9, "receiver", 0.3),
    "gloo": TransportRate(1.9e9, 1.9e9, "receiver", 0.5),
    "gather": TransportRate(5.0e9, 1.85e9, "model", 0.0),
    "nemo": TransportRate(26e9, 26e9, "model", 0.0),
}
"""``nccl``: slices from rank to worker, half of a network port. ``gloo``: through host memory (docs/benchmarks/gpu.md).
``gather``: whole parameters gathered and sent to all workers, verl's published rows. ``nemo``: NeMo-RL's refit in
turns."""


def sync_seconds(model: ModelCost, tp: int, device: Device, transport: str) -> float:
    """Return the seconds of a sync of all weights to engines of ``tp`` devices, all engines at once."""
    rate = TRANSPORTS[transport]
    experts = sum(layer.parameters[1] for layer in model.layers) * BF16
    dense = model.parameters * BF16 - experts
    ways = tp if rate.of == "receiver" else 1
    most = min(1.0, device.network_rate / rate.dense) if rate.of == "receiver" else 1.0
    return rate.fixed_s + (dense / rate.dense + experts / rate.experts) / ways / most


GRADIENT, OPTIMIZER = 4, 12
"""Bytes of a parameter beside its weight: float32 gradient; float32 master and moments."""
CONTEXT_BYTES = 2.5e9
"""Bytes of a device for CUDA, NCCL's buffers and the caching allocator's rounding."""
CLIFF = 0.2
"""Distance of the KV cache's slots from the trajectories of an engine, as a share, below which a plan has a warning."""
TURN_S = 3.0
"""Seconds of engines that sleep and wake, beyond the bytes that move."""


@dataclass(frozen=True)
class Prediction:
    """A plan's step."""

    plan: JobPlan
    seconds: dict[str, float]
    """Phase (``rollout``, ``inference``, ``update``, ``sync``, ``moves``) -> seconds."""
    step_s: float
    tokens: float
    gpus: int
    memory: dict[str, float]
    """Phase (``update``, ``rollout``) -> bytes of the fullest device."""
    parts: Parts
    """Seconds of the updates of a step by cause, without gradients' messages and the optimizer."""
    idle: float
    """Share of device seconds in which a device has no work."""
    warnings: tuple[str, ...] = field(default=())

    @property
    def rate(self) -> float:
        """Tokens of prompts and responses per second and device."""
        return self.tokens / self.step_s / self.gpus


def predict(work: StepWork, plan: JobPlan, device: Device) -> Prediction:
    """Predict a step. Seconds are infinite where the engines' weights leave no KV cache."""
    training, inference, parts = training_seconds(work, plan, device)
    seconds = {"inference": inference, "update": training}
    memory = {"update": update_bytes(work, plan)}
    warnings: list[str] = []
    if not work.samples or not plan.replicas:
        step = training + inference
        return Prediction(plan, seconds, step, work.tokens, plan.gpus, memory, parts, 0.0)
    engine = RolloutCost(work.model, plan.engine_tp, device, work.device_share, work.max_num_seqs)
    each = math.ceil(work.trajectories / plan.replicas)
    seconds["rollout"] = engine.seconds(each, work.prompt, work.lengths, work.group, ahead=plan.ahead)
    memory["rollout"] = device.memory_bytes * work.device_share
    kv_bytes = memory["rollout"] - engine.weight_bytes - OVERHEAD_BYTES
    if kv_bytes <= 0:
        memory["rollout"] = engine.weight_bytes + OVERHEAD_BYTES
    slots = engine.slots(work.prompt, work.lengths)
    if abs(slots / each - 1) < CLIFF and slots < work.max_num_seqs:
        warnings.append(
            f"the KV cache of an engine holds about {slots:,.0f} of its {each:,} trajectories: within "
            f"{CLIFF:.0%} of a cliff"
        )
    seconds["sync"] = sync_seconds(work.model, plan.engine_tp, device, plan.transport)
    trainer = training + inference
    if plan.colocated:
        seconds["moves"] = TURN_S + 2 * _moved_bytes(work, plan) / device.host_rate
    else:
        seconds["moves"] = 0.0
    if plan.colocated or not plan.ahead:
        step = seconds["rollout"] + trainer
    else:
        step = max(seconds["rollout"], trainer)
    step += seconds["sync"] + seconds["moves"]
    workers, ranks = plan.engine_tp * plan.replicas, plan.grid.world_size
    busy = workers * seconds["rollout"] + ranks * trainer
    idle = max(0.0, 1 - busy / (plan.gpus * (step - seconds["moves"] - seconds["sync"]))) if step < math.inf else 1.0
    return Prediction(plan, seconds, step, work.tokens, plan.gpus, memory, parts, idle, tuple(warnings))


def training_seconds(work: StepWork, plan: JobPlan, device: Device) -> tuple[float, float, Parts]:
    """Return the seconds of a step's updates and of its forward passes, and the causes of the former."""
    return _training_seconds(work, plan.grid, plan.recompute, device)


@lru_cache(maxsize=4096)
def _training_seconds(
    work: StepWork, grid: ParallelConfig, recompute: str, device: Device
) -> tuple[float, float, Parts]:
    modules = ("mlp", "moe") if recompute == "selective" else ()
    cost = TrainingCost(work.model, grid, device, recompute, modules)
    tokens = work.tokens / work.updates
    update = work.trained * work.updates * cost.update(tokens, work.micro_batch, work.context)
    passes = work.passes * cost.passes(work.tokens, work.micro_batch, work.context)
    number = cost.micro_batches(tokens, work.micro_batch)
    parts = cost.micro_batch(tokens / grid.dp / number, work.context, trains=True)
    return update, passes, parts * (number * work.updates * work.trained)


def update_bytes(work: StepWork, plan: JobPlan, limit: float = math.inf) -> float:
    """Return the bytes of the fullest device in an update, with activations, logits and CUDA's own. Activations are
    left out if the rest is above ``limit``."""
    weights, optimizer = _state_bytes(work, plan)
    gradients = weights // BF16 * GRADIENT
    frozen = 0.0 if plan.colocated else work.frozen * weights
    held = (weights + gradients + optimizer) * work.trained + frozen + CONTEXT_BYTES
    if held > limit:
        return held
    settings = model_settings(plan.recompute, bool(work.model.experts))
    return held + activation_bytes(work.sizes, settings, plan.grid, work.micro_batch, work.logits_bytes)


def _moved_bytes(work: StepWork, plan: JobPlan) -> float:
    """Return the bytes that leave a device for the rollout: weights and optimizer of all models."""
    weights, optimizer = _state_bytes(work, plan)
    return (weights + optimizer) * work.trained + weights * work.frozen


def _state_bytes(work: StepWork, plan: JobPlan) -> tuple[float, float]:
    """Return the bytes of one model's weights and of its optimizer on the fullest rank."""
    dense, experts = rank_parameters(work.model, plan.grid)
    of_dense, of_experts = copies(plan.grid)
    return (dense + experts) * BF16, OPTIMIZER * (dense / of_dense + experts / of_experts)
