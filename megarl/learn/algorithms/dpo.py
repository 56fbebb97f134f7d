"""DPO (2305.18290): preferences as a loss, without a reward model. ``preference=ipo``: IPO (2310.12036).

h = [Σ_t(logp − ref) of the chosen response] − [the same of the rejected response]
sigmoid: −(1 − ε)·log σ(β·h) − ε·log σ(−β·h), ε = ``label_smoothing`` (cDPO; 0: DPO)
ipo: (h − 1/(2β))², with sums over the response as in the paper (TRL averages over tokens, as the authors advised)
The loss is the mean over pairs, so ``aggregation`` has no effect. Computed in float64.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from megarl.config.algorithms import PreferenceConfig
from megarl.core.errors import ConfigError
from megarl.learn.algorithms import terms
from megarl.learn.algorithms.terms import pairs
from megarl.learn.algorithms.types import Algorithm, Loss, LossInput


def loss(batch: LossInput, config: PreferenceConfig) -> Loss:
    """Return the loss in the module's docstring.

    Raises:
        ConfigError: without reference log-probs, or with a ``label_smoothing`` for ipo, which has none.
    """
    if batch.ref_logp is None:
        raise ConfigError(f"{config.name} needs ref_logp for its loss; the trainer must compute it first")
    if config.preference == "ipo" and config.label_smoothing:
        raise ConfigError(
            f"algorithm.label_smoothing={config.label_smoothing} needs preference=sigmoid; with ipo set it to 0"
        )
    place = (batch.mask, batch.row, batch.num_rows)
    counted = pairs.whole(*place)
    chosen, rejected = (
        now - ref.detach()
        for now, ref in zip(pairs.sums(batch.logp, *place), pairs.sums(batch.ref_logp, *place), strict=True)
    )
    h = terms.masked(chosen - rejected, counted)
    if config.preference == "ipo":
        each = (h - 1.0 / (2.0 * config.beta)).square()
    else:
        each = -(1.0 - config.label_smoothing) * logsigmoid(config.beta * h)
        each = each - config.label_smoothing * logsigmoid(-config.beta * h)
    total = terms.masked(each, counted).sum()
    metrics = {"train/loss": (total.detach(), counted.sum())}
    metrics |= pairs.reward_metrics(config.beta * chosen, config.beta * rejected, counted)
    for name, values in zip(("chosen", "rejected"), pairs.sums(batch.logp.detach(), *place), strict=True):
        metrics[f"logps/{name}"] = (values[counted].sum(), counted.sum())
    if batch.entropy is not None:
        entropy = torch.where(batch.mask, batch.entropy.detach().double(), 0.0)
        metrics["actor/entropy"] = (entropy.sum(), batch.mask.sum())
    return Loss(total.to(batch.logp.dtype), metrics)


DPO = Algorithm(
    name="dpo",
    source="Direct Preference Optimization, arXiv 2305.18290",
    roles=frozenset({"actor", "reference"}),
    needs=frozenset({"ref_logp", "pairs"}),
    advantage=None,
    count=pairs.count,
    loss=loss,
    offline=True,
)
