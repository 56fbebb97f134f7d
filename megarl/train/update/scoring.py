"""The models of a job that trains a reward model: a language model at first, then the same one with a score head."""

from __future__ import annotations

from pathlib import Path

from megarl.train.update.models import Models
from megarl.weights.checkpoint.formats.hf_source import has_score
from megarl.weights.checkpoint.training import state


class ScoringModels(Models):
    """The actor is the reward model, once the warm start (which is a language model's) is over.

    A checkpoint of step 0 holds the weights after the warm start, later ones the reward model. Without a warm start the
    job may go on with a sequence-classification checkpoint.
    """

    def make_actor(self, checkpoint: Path | None) -> None:
        """Make a language model for the warm start, else a reward model."""
        language = bool(self._config.trainer.warm_start.steps) and (
            checkpoint is None or state.manifest_of(checkpoint)["step"] == 0 or checkpoint.parent.name == "warm_start"
        )
        if not hasattr(self, "actor") or language is (self.actor.model.head is None):
            self.__dict__.pop("actor", None)  # before the next one takes its room
            self.actor = self._actor(self.head if language else None)

    def load_beginning(self) -> None:
        """Give the actor the weights that the run begins with; a score head may begin with zeros."""
        path = Path(self._config.model.path)
        self.actor.model.load_hf(
            path, score="stored" if self.actor.model.head is not None or has_score(path) else "zeros"
        )

    def score_from_here(self) -> None:
        """Give the weights that the warm start left to a reward model; its score head begins with zeros."""
        if self.actor.model.head is not None:
            scoring = self._actor(None)
            scoring.model.copy_from(self.actor.model, bucket_bytes=self._config.sync.bucket_bytes)
            self.actor = scoring
