"""Expert rows in addition to sampled responses (``algorithm.name=mix``, and algorithms of a user's file)."""

from __future__ import annotations

from megarl.buffer.order.draws import ExpertRow, ExpertRows, data_seed, num_expert_rows
from megarl.config import Config
from megarl.config.algorithms import MixConfig, reads_teacher
from megarl.learn import algorithms
from megarl.tasks import ChatTokenizer
from megarl.train.batch.images import ImageInputs
from megarl.train.inference.models import Models
from megarl.train.part import Part, StepData
from megarl.train.rank.state import TrainState
from megarl.train.rollout.reading import RolloutReader


def draws_experts(config: Config) -> bool:
    """True if the algorithm trains on expert rows."""
    return "expert" in algorithms.get(config.algorithm.name).needs


class Demonstrations(Part):
    """Adds expert rows to each step, by ``algorithm.expert_ratio``."""

    def __init__(self, config: Config, models: Models, reader: RolloutReader) -> None:
        self._config, self._rows = config, expert_rows(config, reader, models.images)

    def before_batch(self, state: TrainState, data: StepData) -> None:
        data.demonstrations += drawn(self._rows, self._config, state, sum(t.num_samples for t in data.trajectories))


def drawn(rows: ExpertRows, config: Config, state: TrainState, usual: int) -> list[ExpertRow]:
    """Draw the step's expert rows, to mix with ``usual`` samples."""
    settings = config.algorithm
    assert isinstance(settings, MixConfig), "mix and algorithms of a user's file have expert rows"
    count = num_expert_rows(usual, settings.expert_ratio)
    return rows.of_step(state.step, count, data_seed(config.trainer.seed, state.rollbacks))


def expert_rows(config: Config, reader: RolloutReader, images: ImageInputs | None) -> ExpertRows:
    """Read the store's expert rows, with image placeholders expanded."""
    tokenizer, teacher = ChatTokenizer.of(config), reads_teacher(config.algorithm)
    return ExpertRows(reader.demonstrations(tokenizer, images and images.expand, teacher=teacher))
