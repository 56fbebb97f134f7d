"""Files with the batch of each step (``trainer.keep_batches``)."""

from __future__ import annotations

from megarl.train.batch.batch import StepBatch
from megarl.train.batch.batch_file import kept_batch
from megarl.train.inference.models import Models
from megarl.train.part import Part
from megarl.train.ranks import Reporter, TrainState


class KeptBatches(Part):
    """Writes the batch of each step to a file."""

    def __init__(self, reporter: Reporter, models: Models) -> None:
        self._reporter, self._models = reporter, models

    def before_update(self, state: TrainState, batch: StepBatch) -> None:
        self._reporter.keep_batch(state.step + 1, kept_batch(batch, self._models.actor.model))
