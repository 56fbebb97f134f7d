"""Scores of a reward model, added to the verifiers' rewards (``reward_model.path``)."""

from __future__ import annotations

from megarl.buffer.experience import add_model_scores
from megarl.config import Config
from megarl.core.metrics import spread
from megarl.learn.memory.phases import Phase
from megarl.train.inference.inference import model_scores
from megarl.train.inference.models import Models
from megarl.train.memory import PhaseMemory
from megarl.train.part import Part, StepData
from megarl.train.ranks import Reporter, TrainState
from megarl.train.rollout.reading import RolloutReader


class RewardModelScores(Part):
    """Adds ``reward_model.coef`` times the score to the reward of each trajectory."""

    def __init__(
        self, config: Config, models: Models, memory: PhaseMemory, reporter: Reporter, reader: RolloutReader
    ) -> None:
        self._with_arrays = reader.with_arrays
        self._coef, self._models, self._memory, self._reporter = config.reward_model.coef, models, memory, reporter

    def before_batch(self, state: TrainState, data: StepData) -> None:
        model = self._models.reward_model
        assert model is not None, "the job has a reward model"
        with self._reporter.timeline.phase("inference", step=state.step):
            self._memory.enter(Phase.SCORES)
            scores = model_scores(model, data.trajectories, data.images, self._with_arrays)
            data.trajectories = add_model_scores(data.trajectories, scores, self._coef)
        data.metrics |= spread("reward_model/score", scores)
