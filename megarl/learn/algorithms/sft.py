"""Supervised fine-tuning: loss = Σ_t w_t·(−logp_t), w_t by ``aggregation``.

With a ``divergence`` the loss is Σ_t w_t·(``cross_entropy_coef``·(−logp_t) + D_t), D_t from the distributions of a
teacher that has scored the rows (``megarl data teach``): ``ops/divergence.py``.
"""

from __future__ import annotations

from megarl.config.algorithms import AlgorithmConfig, SFTConfig, reads_distribution
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.terms import from_teacher
from megarl.learn.algorithms.types import Algorithm, Loss, LossInput


def loss(batch: LossInput, config: AlgorithmConfig) -> Loss:
    """Return the loss of the file's head. Raises ConfigError as ``from_teacher.divergence``."""
    mask = batch.mask
    weights = terms.token_weights(mask, batch.row, batch.num_rows, config, share=batch.share, dtype=batch.logp.dtype)
    count = terms.denominator(mask, batch.row, batch.num_rows, config)
    total = -(weights * terms.masked(batch.logp, mask)).sum()
    metrics = {"train/loss": (total.detach(), count)}
    if batch.entropy is not None:
        metrics["actor/entropy"] = ((weights * terms.masked(batch.entropy, mask)).sum().detach(), count)
    if not reads_distribution(config):
        return Loss(total, metrics)
    assert isinstance(config, SFTConfig), "the settings of sft, or of a user's file"
    term, of_teacher = from_teacher.divergence(batch, config)
    return Loss(config.cross_entropy_coef * total + term.to(total.dtype), metrics | of_teacher)


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
