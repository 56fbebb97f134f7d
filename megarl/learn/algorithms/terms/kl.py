"""KL to the reference outside of a loss: the penalty on rewards, and the adaptive coefficient.

k1, k2, k3 (Schulman, 2020) as in ``ops/policy.py``, with logp of the step's starting policy.
"""

from __future__ import annotations

from functools import partial

import torch

from megarl.config.algorithms import KLConfig
from megarl.core.errors import ConfigError
from megarl.learn.algorithms.terms.reduction import Tokens, Totals
from megarl.ops.policy import kl_estimates

LARGEST_ERROR = 0.2
"""Bound of KL / target − 1 (Ziegler et al., 1909.08593)."""


def estimates(logp: torch.Tensor, ref_logp: torch.Tensor, estimator: str) -> torch.Tensor:
    """Return float64 estimates in the inputs' shape, without gradient."""
    return kl_estimates((ref_logp.double() - logp.double()).detach(), estimator)


def totals(logp: torch.Tensor, ref_logp: torch.Tensor, kept: Tokens, estimator: str) -> Totals:
    """Return totals of the KL over kept tokens of log-probs [T] in the whole step; :func:`adapted` takes their mean."""
    return kept.totals(partial(estimates, estimator=estimator), logp, ref_logp)


def adapted(kl: float, responses: int, config: KLConfig) -> float:
    """Return the next step's coefficient: coef · (1 + clip(kl/target − 1, ±0.2) · responses / horizon); ``coef``
    without a target.

    The coefficient is the controller's whole state. A ``kl`` of NaN leaves it unchanged.

    Args:
        kl: Mean per token of the step that ends.
        responses: Number of responses of that step.
        config: Settings of that step, with its coefficient.

    Raises:
        ConfigError: the horizon is so short that one step could set the coefficient to 0, where it would stay.
    """
    if config.target is None or kl != kl:
        return config.coef
    if responses * LARGEST_ERROR >= config.horizon:
        raise ConfigError(
            f"algorithm.kl.horizon={config.horizon} is too short for the {responses} responses of a step: the "
            f"coefficient would reach 0; set it above {responses * LARGEST_ERROR:g}"
        )
    error = min(max(kl / config.target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
    return config.coef * (1.0 + error * responses / config.horizon)
