"""Files with the batch of each step (``trainer.keep_batches``)."""

from __future__ import annotations

from megarl.train.batch.batch import StepBatch
from megarl.train.batch.batch_file import kept_batch, kept_values
from megarl.train.inference.models import Models
from megarl.train.part import Part
from megarl.train.ranks import Reporter, TrainState


class KeptBatches(Part):
    """Writes the batch of each step to files: its tokens before the updates, all else that they read after them."""

    def __init__(self, reporter: Reporter, models: Models) -> None:
        self._reporter, self._models = reporter, models
        self._batch: StepBatch | None = None

    def before_update(self, state: TrainState, batch: StepBatch) -> None:
        self._reporter.keep_batch(state.step + 1, kept_batch(batch, self._models.actor.model))
        self._batch = batch  # the first update fills its log-probs

    def after_update(self, state: TrainState) -> None:
        batch, self._batch = self._batch, None
        assert batch is not None, "before_update comes first"
        self._reporter.keep_batch(state.step + 1, kept_values(batch, self._models.actor.model))
