"""Exponential moving average of the actor, which evaluations use instead of the actor (``evaluation.average``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from megarl.config import Config
from megarl.learn.training.optimizer import whole_digests
from megarl.train.inference.models import Models
from megarl.train.part import Part
from megarl.train.ranks import RunContext, TrainState
from megarl.train.sync.probe import SentWeights, probe_text

ROLE = "average"


class AveragedActor(Part):
    """Keeps the average: a float32 model on the actor's grid, saved in checkpoints.

    avg ← d · avg + (1 - d) · actor after each step, d = ``evaluation.average`` (Polyak and Juditsky, 1992).
    """

    def __init__(self, config: Config, context: RunContext, models: Models, newest: Callable[[], Path | None]) -> None:
        assert config.evaluation.average is not None, "the settings ask for this part"
        self._config, self._context, self._models = config, context, models
        self._decay = config.evaluation.average
        models.add(ROLE, "float32", newest())

    @torch.no_grad()
    def after_update(self, state: TrainState) -> None:
        self._models.finish_gathers()
        actor = self._models.actor.model.tensors
        for name, mean in self._models.more[ROLE].tensors.items():
            mean.lerp_(actor[name].to(mean), 1.0 - self._decay)

    def evaluated(self, state: TrainState) -> SentWeights:
        average, actor = self._models.more[ROLE], self._models.actor.model.tensors
        tensors = {name: mean.to(actor[name].dtype) for name, mean in average.tensors.items()}
        return SentWeights(tensors, whole_digests(tensors), probe_text(self._config, self._models.head, average))

    def finish(self) -> None:
        """Write the average as an HF checkpoint next to the actor's."""
        self._models.export(self._models.more[ROLE], self._context.run_dir / "hf_average", self._context.rank)
