"""Witness of the optimizer: what an update changed of a few weights, against AdamW's formula and the schedule.

With moments m and v after the update, its number n, and the weights w before it:

Δw = −lr·(m / (1 − β1ⁿ) / (√(v / (1 − β2ⁿ)) + ε) + weight_decay·w)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megarl.config.schema import OptimizerConfig
from megarl.learn.training.model import TrainedModel
from megarl.weights.checkpoint.training.state import inner_optimizers

ELEMENTS = 64
"""Elements of each compared tensor."""
TENSORS = 2
"""Compared tensors of each group of parameters."""
ROUNDING = 2.0**-23
"""Relative rounding of a float32 weight."""


def scheduled_rate(config: OptimizerConfig, step: int) -> float:
    """Return the learning rate of a step, counted from 0: a line up over ``warmup_steps``, one down to ``min_lr`` at
    ``decay_steps``."""
    up, down = config.warmup_steps, config.decay_steps
    if step + 1 <= up:
        return config.lr * (step + 1) / up
    if down is None or config.min_lr is None:
        return config.lr
    left = max(0.0, 1.0 - (step - up) / max(1, down - up))
    return config.min_lr + left * (config.lr - config.min_lr)


Few = tuple[Any, dict[str, Any], torch.Tensor, torch.Tensor]
"""(optimizer, group, weights, a few of their values before an update)"""


def _few(inner: Any, group: dict[str, Any], p: torch.Tensor) -> Few:
    return inner, group, p, p.detach().view(-1)[:ELEMENTS].double().cpu()


class OptimizerWitness:
    """Compares the updates of a step. Every rank makes one.

    Args:
        step: Number of the step in the schedule, from 0.
    """

    def __init__(self, config: OptimizerConfig, step: int) -> None:
        self._config, self._rate = config, scheduled_rate(config, step)
        self._chosen: list[tuple[Any, dict[str, Any], torch.Tensor]] = []
        self._kept: list[Few] = []
        self._of_rate = self._of_weights = 0.0
        self._steps, self._updates = 0, 0

    def before(self, trained: TrainedModel) -> None:
        """Choose some weights before an update, and keep them unless they come to the device in its buckets."""
        self._chosen = [
            (inner, group, p)
            for inner in inner_optimizers(trained.optimizer.inner)
            for group in inner.param_groups
            for p in [p for p in group["params"] if p.numel() and p.dtype == torch.float32][:TENSORS]
        ]
        self._kept = [] if trained.model.residents.streams else [_few(*chosen) for chosen in self._chosen]

    @contextmanager
    def around(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Compare the chosen weights of a bucket (``learn/training/streaming.py``) before and after its step."""
        own = {id(p) for p in parameters}
        kept = [_few(*chosen) for chosen in self._chosen if id(chosen[2]) in own]
        yield
        self._compare(kept)

    def after(self) -> None:
        """Compare the kept weights after the update."""
        self._updates += 1
        self._compare(self._kept)

    def _compare(self, kept: Sequence[Few]) -> None:
        for inner, group, p, old in kept:
            steps, rate = int(group.get("step") or 0), self._rate * group.get("lr_mult", 1.0)
            self._steps = max(self._steps, steps)
            self._of_rate = max(self._of_rate, abs(group["lr"] - rate) / max(rate, 1e-30) if rate else group["lr"])
            moments = inner.state.get(p, {})
            if not rate or not steps or moments.get("exp_avg", old).dtype != torch.float32:
                continue
            first, second = (moments[name].view(-1)[:ELEMENTS].double().cpu() for name in ("exp_avg", "exp_avg_sq"))
            config = self._config
            size = (second / (1.0 - config.beta2**steps)).sqrt() + config.eps
            wanted = first / (1.0 - config.beta1**steps) / size + config.weight_decay * group["wd_mult"] * old
            change = p.detach().view(-1)[:ELEMENTS].double().cpu() - old
            apart = (change / group["lr"] + wanted).abs().mean() if group["lr"] else wanted.abs().mean()
            rounding = ROUNDING * float(old.abs().mean()) / rate
            self._of_weights = max(self._of_weights, float(apart) - rounding)

    def metrics(self) -> dict[str, float]:
        """Return this rank's ``check/learning_rate`` (relative), ``check/optimizer`` (in learning rates),
        ``actor/optimizer_steps`` (the optimizer's own count) and ``actor/updates`` (of this step)."""
        return {
            "check/learning_rate": self._of_rate,
            "check/optimizer": self._of_weights,
            "actor/optimizer_steps": float(self._steps),
            "actor/updates": float(self._updates),
        }
