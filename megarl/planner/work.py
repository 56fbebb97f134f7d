"""Work of one step (trajectories to sample, forward passes, updates), and a plan: where each of them runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.config import Config
from megarl.config.derived import is_teacher
from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.learn import algorithms
from megarl.learn.parallel.grid import roles_of
from megarl.planner.model_cost import ModelCost
from megarl.planner.rollout import Lengths
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
