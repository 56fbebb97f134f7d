"""Witness of a step's critic updates: values, returns and the gradient of each value against plain formulas."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from megarl.config.algorithms import PPOConfig
from megarl.learn import plain
from megarl.learn.algorithms import Loss
from megarl.learn.algorithms.terms.reduction import counts
from megarl.learn.training.objectives import LossTokens, Objective
from megarl.train.batch.batch import StepBatch
from megarl.train.update.witness import plain_advantages

SMALL = 0.01
"""Size below which a value's difference does not grow relative to it: an untrained head's values are rounding."""


class CriticWitness:
    """Compares the critic's updates of a step while their micro-batches pass. Every rank makes one, before them."""

    def __init__(self, batch: StepBatch, config: PPOConfig) -> None:
        self._sequences, self._config = batch.sequences, config
        sequences, mask = batch.sequences, batch.sequences.mask
        assert sequences.values is not None and sequences.returns is not None, "the inference phase fills both"
        of_step = sequences.together(counts(mask, sequences.lengths))
        self._denominators = [
            max(1.0, float(of_step[[i for unit in update for i in unit]].sum())) for update in batch.updates
        ]
        self._returns = torch.zeros(len(mask), dtype=torch.float64)
        unscaled = plain_advantages(batch, replace(config, whiten_advantages=False))
        self._returns[mask] = unscaled + sequences.values[mask].double()
        apart = (sequences.returns[mask].double() - self._returns[mask]).abs()
        self._largest = torch.zeros(4, dtype=torch.float64)
        """Largest difference of a return, and the largest return; the same of a value."""
        if len(apart):
            self._largest[:2] = torch.stack([apart.max(), self._returns[mask].abs().max()])
        self._gradient = torch.zeros(2, dtype=torch.float64)
        """Sum of differences of gradients, and of their sizes."""

    def watching(self, objective: Objective, update: int) -> Objective:
        """Return the objective of an update, whose micro-batches are compared here as they pass.

        Args:
            update: Number within the step, from 0; epochs of the step count on.
        """
        denominator = self._denominators[update % len(self._denominators)]

        def loss(kept: LossTokens, outputs: torch.Tensor) -> Loss:
            values, old = outputs.detach()[:, 0].double().cpu(), self._old(kept)
            if not update and len(values):
                found = torch.stack([(values - old).abs().max(), old.abs().max()])
                self._largest[2:] = torch.maximum(self._largest[2:], found)
            if outputs.requires_grad:
                wanted = plain.value_gradient(self._config, values, old, self._returns[kept.index]) / denominator
                outputs.register_hook(partial(self._compare, wanted))
            return objective.loss(kept, outputs)

        return replace(objective, loss=loss)

    def _old(self, kept: LossTokens) -> torch.Tensor:
        assert self._sequences.values is not None
        return self._sequences.values[kept.index].double()

    def _compare(self, wanted: torch.Tensor, gradient: torch.Tensor) -> None:
        apart = gradient.detach()[:, 0].double().cpu() - wanted
        self._gradient += torch.stack([apart.abs().sum(), wanted.abs().sum()])

    def metrics(self) -> dict[str, float]:
        """Return ``check/critic``, the largest relative difference of the step. Every rank calls it."""
        largest, gradient = self._largest.clone(), self._gradient.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        dist.all_reduce(gradient)
        of_returns = float(largest[0] / largest[1].clamp(min=1.0))
        of_values = float(largest[2] / largest[3].clamp(min=SMALL))
        return {"check/critic": max(of_returns, of_values, float(gradient[0] / gradient[1].clamp(min=1e-12)))}
