"""The session of a job that trains a reward model: a language model at first, then the same one with a score head."""

from __future__ import annotations

from pathlib import Path

from megarl.checkpoint import state
from megarl.checkpoint.hf_source import has_score
from megarl.loop.session import Session, State
from megarl.training.model import TrainedModel, cut_for


class ScoringSession(Session):
    """The actor is the reward model, once the warm start (which is a language model's) is over.

    A checkpoint of step 0 holds what the warm start left, later ones the reward model. Without a warm start the job may go
    on with a sequence-classification checkpoint.
    """

    def resume(self) -> State:
        found = self.newest_checkpoint()
        language = bool(self.config.trainer.warm_start.steps) and (
            found is None or state.manifest_of(found)["step"] == 0 or found.parent.name == "warm_start"
        )
        if language is (self.actor.head is None):
            del self.actor  # before the next one takes its room
            self.actor = self._language_model() if language else self._reward_model()
        if language or found is not None:
            return super().resume()
        path = Path(self.config.model.path)
        self.actor.load_hf(path, score="stored" if has_score(path) else "zeros")
        return State()

    def begin_reinforcement_learning(self) -> None:
        """The reward model takes the weights that the warm start left; its score head begins with zeros."""
        if self.actor.head is None:
            if self.state.step:
                self.put_random_states()
            return
        with self.timeline.phase("load"):
            scoring = self._reward_model()
            scoring.copy_from(self.actor, bucket_bytes=self.config.sync.bucket_bytes)
            self.actor = scoring

    def _reward_model(self) -> TrainedModel:
        config = self.config
        cut = cut_for(config.parallel, config.trainer)
        return TrainedModel(self.hf_config, config.model, config.parallel, None, cut, config.trainer.optimizer)
