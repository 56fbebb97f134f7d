"""Part of a training job: the hooks through which one feature joins its steps. Settings select a job's parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megarl.buffer.order.draws import ExpertRow
from megarl.buffer.store import Store
from megarl.config import Config
from megarl.core.schema import Task, Trajectory
from megarl.learn.algorithms import Algorithm
from megarl.train.batch.batch import StepBatch
from megarl.train.batch.images import StepImages
from megarl.train.inference.models import Models
from megarl.train.memory import PhaseMemory
from megarl.train.ranks import Ranks, Reporter, RunContext, TrainState
from megarl.train.rollout.evaluation import Evaluates
from megarl.train.rollout.reading import RolloutReader
from megarl.train.rollout.rollouts import Rollouts, StepGroups, Wait
from megarl.train.sync.probe import SentWeights
from megarl.train.sync.publish import WeightPublisher
from megarl.train.sync.weights import WeightSync

Metrics = dict[str, float]


@dataclass
class StepData:
    """Trajectories and expert rows of a step, kept until its batch is made."""

    groups: StepGroups
    trajectories: list[Trajectory]
    """Trajectories of ``groups``, with the scores of a reward model in their rewards."""
    images: StepImages | None
    demonstrations: list[ExpertRow] = field(default_factory=list)
    metrics: Metrics = field(default_factory=dict)
    read: list[tuple[Trajectory, Task]] = field(default_factory=list)
    """Trajectories with their arrays, and their tasks, that alarms have read for this step."""

    def clear(self) -> None:
        """Drop the trajectories: the batch has copied their arrays."""
        self.trajectories.clear()
        self.groups.trajectories.clear()
        self.read.clear()


@dataclass(frozen=True)
class Services:
    """Services of a job that samples. A part's constructor names the services that it uses."""

    config: Config
    algorithm: Algorithm
    context: RunContext
    store: Store
    ranks: Ranks
    reporter: Reporter
    models: Models
    memory: PhaseMemory
    reader: RolloutReader
    links: WeightPublisher | None
    """None if weights are delivered as files."""
    weights: WeightSync
    rollouts: Rollouts
    evaluation: Evaluates
    wait: Wait
    newest: Callable[[], Path | None]
    """``Checkpointer.newest``."""
    export: Callable[[Path], None]
    """``TrainerRank.export``."""


class Part:
    """Hooks of a step; the defaults do nothing. Every rank calls every hook, in the order of ``parts.PARTS``."""

    def begin(self, state: TrainState) -> None:
        """Run at the beginning of a step, before its weights are published."""

    def evaluated(self, state: TrainState) -> SentWeights | None:
        """Return the weights that an evaluation uses; None for the actor's weights."""
        return None

    def before_publish(self, state: TrainState) -> None:
        """Run before engines receive weights, in a step or for an evaluation. Raises Stopped."""

    def after_publish(self, state: TrainState) -> Metrics:
        """Run once the engines have verified weights; return metrics."""
        return {}

    def before_batch(self, state: TrainState, data: StepData) -> None:
        """Run when the step's groups are complete, before any model computes with them. May change ``data``."""

    def before_update(self, state: TrainState, batch: StepBatch) -> None:
        """Run after inference has filled the batch, before the first update."""

    def after_update(self, state: TrainState) -> None:
        """Run after the models are updated, before a checkpoint counts that. ``state`` is the state before the step."""

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        """Run after the step counts, before its metrics are written."""

    def finish(self) -> None:
        """Run after the last step and the last evaluation."""
