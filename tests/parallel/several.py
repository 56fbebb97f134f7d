"""Trajectories of several samples each: the batch of the parity matrix cut so, and what its losses are by definition.

A trajectory counts as one response: its mean is over its tokens in all samples, and denominators count trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from megarl.config.algorithms import AlgorithmConfig, KLConfig, MixConfig
from tests.parallel.batches import sequences_of

if TYPE_CHECKING:
    from megarl.learn.batching import Sequences

TRAJECTORY = torch.tensor([0, 0, 1, 1, 1, 2])
"""Of each row: whatever the micro-batches, samples of one trajectory are apart."""
WITHOUT_TOKENS = 2
"""First row of the second trajectory: what counts it is its next row."""
EXPERT = torch.arange(6) == 5
"""Demonstrated rows, for mix."""
_KL = KLConfig(coef=0.1)
OBJECTIVES: tuple[AlgorithmConfig, ...] = (
    AlgorithmConfig(name="grpo", aggregation="seq_mean_token_mean", clip_high=0.28, entropy_coef=0.01, kl=_KL),
    AlgorithmConfig(name="grpo", aggregation="seq_mean_token_sum_norm", aggregation_length=16, clip_high=0.28, kl=_KL),
    AlgorithmConfig(
        name="gspo",
        importance="sequence_mean",
        aggregation="seq_mean_token_mean",
        clip_low=0.01,
        clip_high=0.02,
        kl=_KL,
    ),
    MixConfig(name="mix", mu=0.3, aggregation="seq_mean_token_mean", kl=_KL),
    MixConfig(name="mix", mu=0.3, aggregation="seq_mean_token_mean", kl=_KL, expert_loss="off_policy"),
)


@dataclass
class Expected:
    loss: torch.Tensor
    size: float
    """Sum of the loss's terms without their signs."""
    apart: float
    """The loss, were each sample a trajectory."""
    metrics: dict[str, tuple[float, float]]
    """Name -> value, sum of its terms without their signs."""

    def detached(self) -> Expected:
        return replace(self, loss=self.loss.detach())


def kept(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """bool [N, S]: the batch's mask, with a sample that has no token in the loss."""
    mask = batch["mask"].clone()
    mask[WITHOUT_TOKENS] = False
    return mask


def several(batch: dict[str, torch.Tensor], settings: AlgorithmConfig) -> Sequences:
    """The step of an objective."""
    more = {"expert": EXPERT} if settings.name == "mix" else {}
    batch = batch | {"engine_logp": batch["ref_logp"]}  # of the teacher, for mix
    return replace(sequences_of(**(batch | {"mask": kept(batch)})), trajectory=TRAJECTORY, **more)


def expected_of(
    settings: AlgorithmConfig, batch: dict[str, torch.Tensor], logp: torch.Tensor, entropy: torch.Tensor
) -> Expected:
    """Loss and metrics from [N, S] of the next tokens, in float64, each token's weight by definition."""
    mask = kept(batch)
    row = torch.arange(len(mask))[:, None].expand_as(mask)[mask]
    logp, entropy, old, ref, advantages = (
        x[mask].double() for x in (logp, entropy, batch["old_logp"], batch["ref_logp"], batch["advantages"])
    )
    shown = EXPERT[row] if settings.name == "mix" else torch.zeros_like(row, dtype=torch.bool)
    change = logp - old
    if settings.importance == "sequence_mean":
        change = torch.stack([change[row == r].mean() for r in row])
    ratio = change.exp()
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    surrogate = -torch.minimum(ratio * advantages, bounded * advantages)
    log_r = ref - logp
    k3 = (log_r.exp() - log_r - 1).clamp(max=10)
    policy = surrogate + settings.kl.coef * k3 - settings.entropy_coef * entropy

    log_x = logp - ref
    taught = -logp
    if isinstance(settings, MixConfig) and settings.expert_loss == "off_policy":
        taught = -log_x.exp() / (log_x.exp() + (settings.expert_shaping or 0))

    def loss(unit: torch.Tensor) -> tuple[torch.Tensor, float]:
        """(loss, sum of its terms without signs) where ``unit`` [T] numbers what counts as a response."""
        w, of_shown = weights(settings, unit, ~shown), weights(settings, unit, shown)
        mu = settings.mu if isinstance(settings, MixConfig) else 0.0
        terms = (1 - mu) * w * torch.stack([surrogate, settings.kl.coef * k3, -settings.entropy_coef * entropy])
        imitation = mu * of_shown * taught
        assert torch.allclose(terms.sum(), ((1 - mu) * w * policy).sum())
        return terms.sum() + imitation.sum(), float((terms.abs().sum() + imitation.abs().sum()).detach())

    sampled, tokens = weights(settings, TRAJECTORY[row], ~shown), (~shown) / (~shown).sum()
    clipped = (bounded * advantages < ratio * advantages).double()
    values = {
        "actor/pg_loss": sampled * surrogate,
        "actor/kl_loss": sampled * k3,
        "actor/entropy": sampled * entropy,
        "actor/ppo_kl": tokens * (old - logp),
        "actor/pg_clipfrac": tokens * clipped,
    }
    if settings.name == "mix":
        name = "actor/sft_loss" if settings.expert_loss == "sft" else "actor/expert_loss"
        values[name] = weights(settings, TRAJECTORY[row], shown) * taught
        if settings.expert_loss == "off_policy":
            values["actor/expert_ratio/mean"] = shown / shown.sum() * log_x.exp()
    whole, size = loss(TRAJECTORY[row])
    metrics = {name: (float(x.detach().sum()), float(x.detach().abs().sum())) for name, x in values.items()}
    return Expected(whole, size, float(loss(row)[0].detach()), metrics)


def weights(settings: AlgorithmConfig, unit: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """float64 [T]: weight of each token in the aggregation over those of ``which``, 0 elsewhere."""
    found = torch.zeros(len(unit), dtype=torch.float64)
    units = unit[which].unique()
    for number in units:
        mine = which & (unit == number)
        each = mine.sum() if settings.aggregation == "seq_mean_token_mean" else settings.aggregation_length
        found[mine] = 1.0 / (float(each) * len(units))
    return found
