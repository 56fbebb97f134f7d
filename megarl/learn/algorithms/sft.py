"""Supervised fine-tuning: loss = Σ_t w_t·(−logp_t), w_t by ``aggregation``."""

from __future__ import annotations

from megarl.config.algorithms import AlgorithmConfig
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.types import Algorithm, Loss, LossInput


def loss(batch: LossInput, config: AlgorithmConfig) -> Loss:
    """Return the negative log-likelihood of the demonstrated tokens."""
    mask = batch.mask
    weights = terms.token_weights(mask, batch.row, batch.num_rows, config, share=batch.share, dtype=batch.logp.dtype)
    count = terms.denominator(mask, batch.row, batch.num_rows, config)
    total = -(weights * terms.masked(batch.logp, mask)).sum()
    metrics = {"train/loss": (total.detach(), count)}
    if batch.entropy is not None:
        metrics["actor/entropy"] = ((weights * terms.masked(batch.entropy, mask)).sum().detach(), count)
    return Loss(total, metrics)


SFT = Algorithm(
    name="sft",
    source="maximum likelihood",
    roles=frozenset({"actor"}),
    needs=frozenset(),
    advantage=None,
    count=terms.denominator,
    loss=loss,
    offline=True,
)
