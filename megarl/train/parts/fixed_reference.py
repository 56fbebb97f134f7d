"""Check that a reference without ``reference.refresh`` stays the actor's first weights."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megarl.config import Config
from megarl.core.errors import NotResident
from megarl.learn.training.model import Model
from megarl.train.batch.batch import StepBatch
from megarl.train.inference.models import Models
from megarl.train.part import Metrics, Part
from megarl.train.ranks import TrainState

ELEMENTS = 64
"""Elements of each parameter that are compared."""


class FixedReference(Part):
    """Compares some of the reference's weights with those at the start, and in a run's first step its log-probs with
    the actor's, which has the same weights then."""

    def __init__(self, config: Config, models: Models) -> None:
        own = config.reference.dtype
        self._models, self._same_type = models, own in (None, config.model.dtype)
        self._kept: tuple[int, torch.Tensor] | None = None
        """Rollbacks of the run, and weights after the last of them."""
        self._batch: StepBatch | None = None
        self._changed = self._is_model = False
        self._found = 0.0

    def before_update(self, state: TrainState, batch: StepBatch) -> None:
        self._changed, reference = False, self._models.reference
        compares = not state.step and self._same_type and batch.sequences.ref_logp is not None
        self._batch = batch if compares else None  # the first update fills the actor's log-probs
        self._is_model = isinstance(reference, Model)
        if not isinstance(reference, Model):
            return
        try:
            reference.residents.require("parameters")
        except NotResident:
            return
        now = torch.cat([_few(p) for chunk in reference.chunks for p in chunk.parameters()])
        if self._kept is None or self._kept[0] != state.rollbacks:
            self._kept = state.rollbacks, now
        self._changed = not torch.equal(self._kept[1], now)

    def after_update(self, state: TrainState) -> None:
        batch, self._batch = self._batch, None
        self._found = 0.0
        if batch is not None and batch.sequences.old_logp is not None and batch.sequences.ref_logp is not None:
            kept = batch.kept(batch.sequences.mask)
            apart = kept.totals(_difference, batch.sequences.old_logp, batch.sequences.ref_logp)
            self._found = apart.mean if apart.number else 0.0
        if self._is_model:
            changed = torch.tensor(float(self._changed))
            dist.all_reduce(changed, dist.ReduceOp.MAX)
            self._found = max(self._found, float(changed))

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        metrics["check/reference"] = self._found


def _few(parameter: torch.Tensor) -> torch.Tensor:
    flat = parameter.detach().view(-1)
    return flat[:: max(1, len(flat) // ELEMENTS)].float().cpu()


def _difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a - b).abs()
