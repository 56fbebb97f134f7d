"""Norms of the trainer against the epsilon of the model's config, once, by what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megarl.train.inference.models import Models
from megarl.train.part import Metrics, Part
from megarl.train.ranks import Reporter, TrainState

SMALL = 0.1
"""Factor of the smaller input."""
WITHIN = 0.05
"""Relative difference of two ratios that are equal, also after rounding to bfloat16."""


class Norms(Part):
    """Compares, after the first update of an attempt, the epsilon of each norm of hidden states and heads.

    Before an update the actor may not be in memory.
    """

    def __init__(self, models: Models, reporter: Reporter) -> None:
        self._models, self._reporter = models, reporter
        self._is_due, self._wrong = True, 0.0

    def after_update(self, state: TrainState) -> None:
        if not self._is_due:
            return
        self._is_due = False
        model = self._models.actor.model
        with model.grid():
            found = [each for chunk in model.chunks for each in wrong_norms(chunk, model.hf_config)]
        if found:
            self._wrong = float(len(found))
            self._reporter.log(
                f"alarm norms: step {state.step + 1}: {len(found)} norms do not compute with the epsilon "
                f"{epsilon_of(model.hf_config):g} of the model's config, the first {found[0]}; look at what makes them"
            )

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        if self._wrong:
            metrics["alarm/norms"] = self._wrong
            self._wrong = 0.0


def epsilon_of(config: Mapping[str, Any]) -> float | None:
    """Return the epsilon of a config.json; None if it has none."""
    value = config.get("rms_norm_eps", config.get("norm_eps"))
    return None if value is None else float(value)


@torch.no_grad()
def wrong_norms(stage: torch.nn.Module, config: Mapping[str, Any]) -> list[str]:
    """Return names of RMS norms whose outputs for a small and a smaller input are not in the ratio of the epsilon.

    For inputs x and s·x, with m the mean square of x, the ratio is s·sqrt(m + ε) / sqrt(s²·m + ε), whatever the weight
    is. Norms of other widths than hidden states and heads may have an epsilon of their own.
    """
    epsilon, width = epsilon_of(config), config.get("hidden_size")
    heads = config.get("num_attention_heads")
    own = config.get("head_dim") or (width // heads if width and heads else None)
    if not epsilon:
        return []
    ratio = SMALL * ((10.0 * epsilon + epsilon) / (SMALL**2 * 10.0 * epsilon + epsilon)) ** 0.5
    found = []
    for name, module in stage.named_modules():
        weight = getattr(module, "weight", None)
        if (
            not type(module).__name__.endswith("RMSNorm")
            or weight is None
            or tuple(weight.shape) not in ((width,), (own,))
        ):
            continue
        x = torch.ones_like(weight)
        x[1::2] = -1.0
        x *= (10.0 * epsilon) ** 0.5
        large, small = (float(module(each[None, None]).float().norm()) for each in (x, SMALL * x))
        if large and abs(small / large / ratio - 1.0) > WITHIN:
            found.append(name)
    return found
