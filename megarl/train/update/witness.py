"""Witness of a step's actor updates: advantages, loss and gradient against plain formulas (``learn/plain.py``).

The gradient that the loss sends to each token's log-prob and entropy is compared with the formula's.

The gradient of every parameter cannot be computed a second time within a step. One sum of it can: a factor s on the
last norm's weight γ (and bias) is a factor on the logits z, and log-prob and entropy H of a token give
d logp / ds = z_target − E[z] = logp + H. Hence, after all micro-batches, ranks and reductions,

γ·∂loss/∂γ = Σ_t ∂loss/∂logp_t · (logp_t + H_t).

The left side is what the optimizer is about to use; the right side is summed from the head's outputs. They differ if
gradients are scaled by the number of micro-batches or ranks, are reduced twice or never, or belong to other tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from megarl.config.algorithms import AlgorithmConfig, PPOConfig
from megarl.core.metrics import Sums
from megarl.learn import plain
from megarl.learn.algorithms import Loss
from megarl.learn.algorithms.terms.reduction import counts
from megarl.learn.batching import Sequences
from megarl.learn.models.gpt import unwrap
from megarl.learn.training.model import TrainedModel
from megarl.learn.training.objectives import LossTokens, Objective, sample_shares
from megarl.train.batch.batch import StepBatch
from megarl.weights.megatron_private import first_element


class Witness:
    """Adds up each update while its micro-batches pass. Every rank makes one, before a step's updates.

    Args:
        config: The algorithm's settings with the step's KL coefficient; ``plain.covers`` them.
    """

    def __init__(self, batch: StepBatch, config: AlgorithmConfig) -> None:
        sequences, rows = batch.sequences, batch.rows
        self._sequences, self._config, self._unchanged = sequences, config, False
        held = counts(sequences.mask, sequences.lengths)
        of_step = sequences.together(held)
        trajectories = [(row.group_id, row.index) for row in rows]
        self._denominators: list[float] = []
        for update in batch.updates:
            numbers = sorted(chain(*update))
            own = [trajectories[i] for i in numbers]
            self._denominators.append(plain.denominator(config, of_step[numbers], own))
        self._share = sample_shares(sequences)[0]
        self.advantages = torch.zeros(len(sequences.tokens), dtype=torch.float64)
        """float64 [T], by the plain formulas; 0 outside the loss."""
        self.advantages[sequences.mask] = plain_advantages(batch, config)
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64)
        self._largest: dict[str, float] = {}
        """Largest differences of the step's updates so far."""

    def watching(self, objective: Objective, update: int, *, unchanged: bool) -> Objective:
        """Return the objective of an update, whose micro-batches are added up here as they pass.

        Args:
            update: Number within the step, from 0; epochs of the step count on.
            unchanged: The update begins with the weights that computed the step, so its log-probs are the old ones.
        """
        self._sums, self._unchanged = torch.zeros_like(self._sums), unchanged
        denominator = self._denominators[update % len(self._denominators)]

        def loss(kept: LossTokens, outputs: torch.Tensor) -> Loss:
            wanted, apart = self._add(kept, outputs.detach()[:, :2].double().cpu(), denominator)
            if outputs.requires_grad:
                outputs.register_hook(partial(self._compare, wanted))
            found = objective.loss(kept, outputs)
            if apart is not None and "actor/ppo_kl" in found.metrics:
                seen = float(found.metrics["actor/ppo_kl"][0])
                known = torch.stack([(seen - apart.sum()).abs(), apart.abs().sum() + FLOOR * len(apart)])
                self._sums[OLD : OLD + 2] += known
            return found

        return replace(objective, loss=loss)

    def _compare(self, wanted: torch.Tensor, gradient: torch.Tensor) -> None:
        apart = gradient.detach()[:, : wanted.shape[1]].double().cpu() - wanted
        self._sums[TOKENS : TOKENS + 2] += torch.stack([apart.abs().sum(), wanted.abs().sum()])

    def _add(
        self, kept: LossTokens, outputs: torch.Tensor, denominator: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add a micro-batch; return the gradient of its outputs, and the old minus the new log-probs."""
        sequences, share = self._sequences, self._share

        def picked(given: torch.Tensor | None) -> torch.Tensor | None:
            return None if given is None else given[kept.index].double()

        logp, entropy = outputs.unbind(1)
        old = None if self._unchanged else picked(sequences.old_logp)
        tokens = plain.PlainTokens(
            row=kept.row,
            logp=logp,
            entropy=entropy,
            advantages=self.advantages[kept.index],
            old_logp=logp if old is None else old,
            ref_logp=picked(sequences.ref_logp),
            engine_logp=picked(sequences.engine_logp),
            share=None if share is None else share[kept.numbers],
        )
        terms, gradient, of_entropy = plain.loss_and_gradient(self._config, self._config.kl.coef, tokens, denominator)
        slopes = gradient * (logp + entropy)
        self._sums[:4] += torch.stack([terms.sum(), terms.abs().sum(), slopes.sum(), slopes.abs().sum()])
        return torch.stack([gradient, of_entropy], dim=1), None if old is None else old - logp

    def differences(self, trained: TrainedModel, sums: Sums) -> dict[str, float]:
        """Return the step's largest relative differences so far: ``check/advantages``, ``check/loss``,
        ``check/old_logp`` and ``check/gradient``.

        Every rank calls it, after ``TrainedModel.gradient_norm`` and before the step. An unknown difference is left
        out: of the gradient where the last norm is not trained, or entropy is in the loss.

        Args:
            sums: Result of ``TrainedModel.backward``.
        """
        if not self._largest:  # once a step: updates do not change advantages
            self._largest["check/advantages"] = self._difference_of_advantages()
        counted = float("actor/loss" in sums)  # one rank of each replica
        left = norm_slope(trained)
        of_job = sums.get("actor/loss", (0.0, 0.0))[0]
        beside = torch.tensor([of_job, left or 0.0, float(left is not None)], dtype=torch.float64)
        found = torch.cat([self._sums * counted, beside])
        dist.all_reduce(found)
        loss, loss_size, slope, slope_size, apart, size, old, old_size, of_job, of_norm, ranks = found.tolist()
        metrics = {"check/loss": max(abs(of_job - loss) / max(loss_size, TINY), apart / max(size, TINY))}
        if old_size:
            metrics["check/old_logp"] = old / old_size
        if ranks and not self._config.entropy_coef:
            metrics["check/gradient"] = abs(of_norm - slope) / max(slope_size, TINY)
        self._largest = {name: max(value, self._largest.get(name, 0.0)) for name, value in metrics.items()} | {
            name: value for name, value in self._largest.items() if name not in metrics
        }
        return self._largest

    def _difference_of_advantages(self) -> float:
        """Return the largest difference over the ranks, relative to the largest advantage. Every rank calls it."""
        sequences = self._sequences
        assert sequences.advantages is not None, "the step's advantages are estimated before its updates"
        here = self.advantages[sequences.mask]
        apart = (sequences.advantages[sequences.mask].double() - here).abs()
        largest = torch.tensor([float(x.max()) if len(x) else 0.0 for x in (apart, here.abs())], dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest[0] / largest[1].clamp(min=1.0))


SUMS = ("loss", "its size", "slope", "its size", "token gradients", "their size", "old log-probs", "their size")
"""Sums of an update: right sides, or distances of the job from them, each with the sum of its terms' sizes."""
TOKENS, OLD = 4, 6
"""Places in ``SUMS``."""
FLOOR = 1e-5
"""Nats a token by which log-probs differ from the old ones by rounding."""
TINY = 1e-12
"""A step whose terms are smaller has no gradient."""


def norm_slope(trained: TrainedModel) -> float | None:
    """Return this rank's part of γ·∂loss/∂γ of the last norm (with its bias's part); None where no rank trains it, or
    where logits are no multiple of the norm's output.

    The parts of data-parallel ranks add up; of tensor-parallel ranks, which have the same norm, one counts.
    """
    from megatron.core import parallel_state

    found, known = 0.0, False
    with trained.model.grid():
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        for chunk in trained.model.chunks:
            stage = unwrap(chunk)
            norm = getattr(getattr(stage, "decoder", None), "final_layernorm", None)
            if norm is not None and getattr(getattr(stage, "output_layer", None), "softcap", None) is not None:
                return None
            for parameter in () if norm is None else norm.parameters():
                if not parameter.requires_grad:
                    return None
                known = True
                centre = float(getattr(norm, "zero_centred", False) or getattr(norm, "zero_centered_gamma", False))
                optimizer = trained.optimizer.inner
                for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
                    found += _slope(inner, parameter, centre) if first and not inner.is_stub_optimizer else 0.0
    return found if known else None


def _slope(optimizer: Any, parameter: torch.nn.Parameter, centre: float) -> float:
    """Return (value + centre)·gradient of the elements that this rank's optimizer has."""
    place = optimizer.model_param_group_index_map.get(parameter)
    if place is None:
        return 0.0
    share = optimizer.optimizer.param_groups[place[0]]["params"][place[1]]
    gradient = getattr(share, "decoupled_grad", None)
    gradient = share.grad if gradient is None else gradient
    if gradient is None or not share.numel():
        return 0.0
    start = first_element(optimizer, parameter)
    values = parameter.detach().view(-1)[start : start + share.numel()].double() + centre
    return float(values @ gradient.detach().view(-1).double())


def plain_advantages(batch: StepBatch, config: AlgorithmConfig) -> torch.Tensor:
    """Return float64 [M]: advantages of the held tokens in the loss, by plain formulas. Every rank calls it."""
    sequences, rows = batch.sequences, batch.rows
    held = counts(sequences.mask, sequences.lengths)
    row = torch.repeat_interleave(torch.arange(len(held)), held)
    rewards, mask = [one.reward.score for one in rows], sequences.mask
    if config.name in plain.BY_GROUP:
        names = [(one.group_id, one.index) for one in rows]
        of_rows = plain.advantages_of_responses(config, rewards, [one.group_id for one in rows], names)
    else:
        greedy = [one.greedy.reward.score if one.greedy and config.name == "remax" else 0.0 for one in rows]
        of_rows = torch.tensor(rewards, dtype=torch.float64) - torch.tensor(greedy, dtype=torch.float64)
    return plain.token_advantages(
        config,
        row,
        sequences.held(of_rows),
        together=sequences.together,
        kl=_penalty(sequences, config),
        values=None if sequences.values is None else sequences.values[mask].double(),
        bootstrap=_bootstrap(batch, config),
    )


def _penalty(sequences: Sequences, config: AlgorithmConfig) -> torch.Tensor | None:
    kl = config.kl
    if kl.place != "reward" or not kl.coef or sequences.old_logp is None or sequences.ref_logp is None:
        return None
    d = (sequences.ref_logp.double() - sequences.old_logp.double())[sequences.mask]
    of = {"k1": -d, "k2": 0.5 * d * d, "k3": (torch.exp(d.clamp(max=10.0)) - 1.0 - d).clamp(max=10.0)}
    return kl.coef * of[kl.estimator]


def _bootstrap(batch: StepBatch, config: AlgorithmConfig) -> torch.Tensor | None:
    sequences = batch.sequences
    if not isinstance(config, PPOConfig) or not config.bootstrap_truncated or sequences.values is None:
        return None
    truncated = sequences.held(torch.tensor([reason == "length" for reason in batch.finish_reasons]))
    return torch.where(truncated, sequences.values[sequences.cu_seqlens[1:] - 1].double(), 0.0)
