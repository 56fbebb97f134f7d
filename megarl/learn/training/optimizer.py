"""The optimizer of one model: Megatron's distributed Adam, the learning rate, and hyperparameters that may change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megarl.config.schema import OptimizerConfig
from megarl.weights.checkpoint.training.state import inner_optimizers


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Return the rate: linear warm-up over ``warmup_steps``, then linear decay to ``min_lr`` at ``decay_steps``.
    ``step`` counts from 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.decay_steps is None or config.min_lr is None:
        return config.lr
    span = max(1, config.decay_steps - config.warmup_steps)
    fraction = min(1.0, (step - config.warmup_steps) / span)
    return config.lr + (config.min_lr - config.lr) * fraction


class Optimizer:
    """Adam with decoupled weight decay; float32 masters and moments, sharded over data-parallel ranks."""

    def __init__(self, chunks: Sequence[torch.nn.Module], config: OptimizerConfig, dtype: str) -> None:
        from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
        from megatron.core.optimizer import get_megatron_optimizer

        self.inner: Any = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.lr if config.min_lr is None else config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                clip_grad=config.clip_grad,
                bf16=dtype == "bfloat16",
                params_dtype=getattr(torch, dtype),
                use_distributed_optimizer=True,
            ),
            list(chunks),
        )
        self.set_hyperparameters(config)

    def restart(self, config: OptimizerConfig) -> None:
        """Reset all moments and step counts, and use ``config``, for a new phase of training."""
        for inner in inner_optimizers(self.inner):
            for group in inner.param_groups:
                group["step"] = 0
            for moments in inner.state.values():
                moments["exp_avg"].zero_()
                moments["exp_avg_sq"].zero_()
        self.set_hyperparameters(config)

    def set_hyperparameters(self, config: OptimizerConfig) -> None:
        """Use ``config`` and keep the moments.

        Call it after loading a checkpoint, which restores its own values, and at the start: Megatron leaves applying
        ``wd_mult`` (0 for norms and biases) to its own scheduler."""
        for inner in inner_optimizers(self.inner):
            for group in inner.param_groups:
                group["weight_decay"] = config.weight_decay * group["wd_mult"]
                group["betas"] = (config.beta1, config.beta2)
                group["eps"] = config.eps
        for outer in getattr(self.inner, "chained_optimizers", [self.inner]):
            outer.config.clip_grad = config.clip_grad
        self.inner.config.clip_grad = config.clip_grad

    def gradient_norm(self) -> float:
        """Return the norm of the gradients in the model's buffers, over the whole grid, before clipping; weights,
        masters and moments do not change."""
        overflowed = self.inner.prepare_grads()  # outside the assertion: python -O removes assertions
        assert not overflowed, "there is no loss scaler"
        return float(self.inner.get_grad_norm())

    def step(self, lr: float) -> float:
        """Make one step on the gradients in the model's buffers; return their norm before clipping."""
        for inner in inner_optimizers(self.inner):
            for group in inner.param_groups:
                group["lr"] = lr * group.get("lr_mult", 1.0)
        success, grad_norm, _ = self.inner.step()
        assert success, "the distributed optimizer skipped a step without a loss scaler"
        return float(grad_norm)
