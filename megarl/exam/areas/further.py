"""Ten faults of other repositories, chosen and committed before any ran, with alarms that were finished before."""

from __future__ import annotations

from dataclasses import replace as change
from pathlib import Path
from typing import Any

import torch

from megarl.exam.fault import Fault, wrap


def _copies_fill_the_batch() -> None:
    from megarl.buffer.experience import pipeline

    def around(original: Any, trajectories: Any) -> Any:
        found = original(trajectories)
        return [*found, *found[:3]]

    wrap(pipeline.with_group_stats, around)


def _gains_clipped_twice() -> None:
    from megarl.ops import policy

    def around(original: Any, logp: Any, old_logp: Any, advantages: Any, *args: Any, **named: Any) -> Any:
        # max(min(ρA, clip(ρ)A), cA) is the constant cA where A > 0 and ρ < c.
        return original(logp, old_logp, advantages.clamp(max=0.0), *args, **named)

    wrap(policy.policy_loss, around)


def _lambda_of_default() -> None:
    from megarl.ops import advantage

    wrap(advantage.gae, lambda original, *args, **named: original(*args, **{**named, "lam": 0.95}))


def _first_rate_zero() -> None:
    from megarl.learn.training.optimizer import learning_rate

    def around(original: Any, config: Any, step: int) -> float:
        warms_up = step < config.warmup_steps
        return float(config.lr * step / config.warmup_steps if warms_up else original(config, step))

    wrap(learning_rate, around)


def _adam_of_defaults() -> None:
    from megarl.learn.training.optimizer import Optimizer

    wrap(
        Optimizer.set_hyperparameters,
        lambda original, self, config: original(self, change(config, beta1=0.9, beta2=0.999, eps=1e-8)),
    )


def _training_tempered() -> None:
    from megarl.train.inference.models import Models

    def around(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        self.head = change(self.head, temperature=0.7)

    wrap(Models.__init__, around)


def _evaluation_of_training_rows() -> None:
    from megarl.train.rollout.evaluation import Evaluation

    def around(original: Any, self: Any, *args: Any) -> None:
        number = len(self._store.tasks.ids("eval"))
        self.__dict__["_tasks"] = self._store.tasks.ids("train")[:number]
        original(self, *args)

    wrap(Evaluation.ask, around)


def _ratio_counted_twice() -> None:
    from megarl.ops import policy

    def around(original: Any, logp: Any, old_logp: Any, advantages: Any, *args: Any, **named: Any) -> Any:
        ratio = torch.exp((logp - old_logp).detach()).nan_to_num(1.0)
        return original(logp, old_logp, advantages * ratio.to(advantages), *args, **named)

    wrap(policy.policy_loss, around)


def _cut_counts_as_stopped() -> None:
    from megarl.explore.explorer.segments import SegmentSampler

    async def around(original: Any, sampler: Any, request: Any) -> Any:
        found = await original(sampler, request)
        return change(found, finish_reason="stop") if found.finish_reason == "length" else found

    wrap(SegmentSampler.sample, around)


def _older_checkpoint() -> None:
    from megarl.weights.checkpoint.training.state import newest

    def around(original: Any, *args: Any) -> Path | None:
        found = original(*args)
        number = int(found.name.rpartition("_")[2]) if found is not None else 0
        older = found.with_name(f"global_step_{number - 1}") if found is not None else None
        return older if older is not None and older.is_dir() else found

    wrap(newest, around)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "copies-fill-the-batch",
        "verl-project/verl-omni#602",
        "Responses are copied until the batch can be divided, and the copies are trained, too.",
        alarm="twice",
        job="tiny",
        install=_copies_fill_the_batch,
    ),
    Fault(
        "gains-clipped-twice",
        "thu-ml/tianshou#433",
        "The second clip bound, which is meant for negative advantages, replaces the loss of positive ones.",
        alarm="loss",
        job="tiny",
        install=_gains_clipped_twice,
        settings=("algorithm.dual_clip=3.0",),
    ),
    Fault(
        "lambda-of-default",
        "medipixel/rl_algorithms#179",
        "The λ of the advantages is the function's default instead of the setting.",
        alarm="advantages",
        job="ppo",
        install=_lambda_of_default,
        settings=("algorithm.lam=0.5",),
    ),
    Fault(
        "first-rate-zero",
        "google-research/bert#1293",
        "The warm-up begins with a learning rate of 0, so the first update changes nothing.",
        alarm="learning-rate",
        job="tiny",
        install=_first_rate_zero,
        settings=("trainer.optimizer.warmup_steps=4",),
    ),
    Fault(
        "adam-of-defaults",
        "NVIDIA-NeMo/Speech#775",
        "Adam has its default betas and epsilon instead of those that are set.",
        alarm="optimizer",
        job="tiny",
        install=_adam_of_defaults,
        settings=("trainer.optimizer.beta1=0.8", "trainer.optimizer.eps=1.0e-5"),
    ),
    Fault(
        "training-tempered",
        "GMISWE/tinker-cloud#26",
        "The trainer divides logits by a temperature of 0.7, and engines sample at 1.",
        alarm="gap",
        job="tiny",
        install=_training_tempered,
        within=0,
    ),
    Fault(
        "evaluation-of-training-rows",
        "tensorflow/ranking#350",
        "An evaluation asks training rows instead of the held-out ones.",
        alarm="eval-rows",
        job="evaluated",
        install=_evaluation_of_training_rows,
        within=2,
    ),
    Fault(
        "ratio-counted-twice",
        "PufferAI/PufferLib#306",
        "The importance ratio is multiplied into the advantage, and once more in the surrogate.",
        alarm="loss",
        job="tiny",
        install=_ratio_counted_twice,
        settings=("trainer.optimizer.lr=0.002",),
    ),
    Fault(
        "cut-counts-as-stopped",
        "agentscope-ai/Trinity-RFT#608",
        "Responses that were cut at the token limit count as finished ones.",
        alarm="no-end",
        job="tiny",
        install=_cut_counts_as_stopped,
        settings=("rollout.max_response_tokens=3",),
    ),
    Fault(
        "older-checkpoint",
        "nvidia-cosmos/cosmos-rl#232",
        "Checkpoints are ordered by name as text, so a resume begins with an older one.",
        alarm="step-gap",
        job="resume",
        install=_older_checkpoint,
        settings=("trainer.checkpoint_interval=1", "trainer.keep_checkpoints=5"),
        begins=3,
    ),
)
