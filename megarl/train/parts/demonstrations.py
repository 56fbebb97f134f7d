"""Expert rows in addition to sampled responses (``algorithm.name`` mix and distill, and algorithms of a
user's file)."""

from __future__ import annotations

from megarl.buffer.order.draws import ExpertRow, ExpertRows, data_seed, num_expert_rows
from megarl.config import Config
from megarl.config.algorithms import expert_ratio, reads_teacher
from megarl.learn import algorithms
from megarl.tasks import ChatTokenizer
from megarl.train.batch.images import ImageInputs
from megarl.train.inference.models import Models
from megarl.train.part import Part, StepData
from megarl.train.ranks import TrainState
from megarl.train.rollout.reading import RolloutReader


def draws_experts(config: Config) -> bool:
    """True if the algorithm trains on expert rows."""
    return algorithms.get(config.algorithm.name).has_experts(config.algorithm)


class Demonstrations(Part):
    """Adds expert rows to each step, by ``algorithm.expert_ratio``."""

    def __init__(self, config: Config, models: Models, reader: RolloutReader) -> None:
        self._config, self._rows = config, expert_rows(config, reader, models.images)

    def before_batch(self, state: TrainState, data: StepData) -> None:
        data.demonstrations += drawn(self._rows, self._config, state, sum(t.num_samples for t in data.trajectories))


def drawn(rows: ExpertRows, config: Config, state: TrainState, usual: int) -> list[ExpertRow]:
    """Draw the step's expert rows, to mix with ``usual`` samples."""
    count = num_expert_rows(usual, expert_ratio(config.algorithm))
    return rows.of_step(state.step, count, data_seed(config.trainer.seed, state.rollbacks))


def expert_rows(config: Config, reader: RolloutReader, images: ImageInputs | None) -> ExpertRows:
    """Read the store's expert rows, with image placeholders expanded."""
    tokenizer, teacher = ChatTokenizer.of(config), reads_teacher(config.algorithm)
    expand = images and images.expand
    return ExpertRows(reader.demonstrations(tokenizer, expand, teacher=teacher, teachers=config.teachers))
