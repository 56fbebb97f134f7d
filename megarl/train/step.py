"""A step of reinforcement learning: weights to the engines, responses back, an update. Features are ``parts``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from megarl.buffer.order.pacing import Pacing
from megarl.core.errors import NonRetryableError
from megarl.core.schema import WeightsVersion
from megarl.learn.memory.phases import Phase
from megarl.train.batch.batch import filter_overlong
from megarl.train.batch.samples import trajectory_metrics
from megarl.train.loop.rank import TrainerRank
from megarl.train.part import Metrics, Part, Services, StepData
from megarl.train.parts import parts_of
from megarl.train.ranks import TrainState
from megarl.train.rollout.evaluation import Evaluates
from megarl.train.rollout.group_part import Published
from megarl.train.services import services_of
from megarl.train.sync.colocated import free_devices
from megarl.train.sync.probe import SentWeights
from megarl.train.update.gap import engine_gap


class OnlineSteps:
    """Steps that train on responses sampled with the step's weights (``course.Steps``)."""

    services: Services
    parts: Sequence[Part] = ()
    is_connected = False
    """True once ``services`` and ``parts`` are made."""
    rollbacks = 0
    """Number of rollbacks at the last publication."""
    evaluated: Metrics | None = None
    """Metrics of a publication for an evaluation; the next step samples with the same version."""
    has_given = False
    """True while engines have other weights than the actor's, for an evaluation."""

    def __init__(self, rank: TrainerRank) -> None:
        self.rank = rank
        if rank.config.rollout.is_colocated:
            free_devices(rank.context, rank.store, rank.ranks)

    @property
    def version(self) -> WeightsVersion | None:
        """Weights published last; None before the engines are joined."""
        return self.services.weights.version if self.is_connected else None

    @property
    def evaluation(self) -> Evaluates | None:
        """Evaluations of the job; None before the engines are joined."""
        return self.services.evaluation if self.is_connected else None

    def step(self, state: TrainState) -> TrainState:
        """Make one step: sync, rollout, inference, update."""
        rank, phase = self.rank, partial(self.rank.timeline.phase, step=state.step)
        rank.timeline.reset()
        with phase("step"):
            with phase("sync"):
                for part in self.parts:
                    part.begin(state)
                synced = self.publish_if_due(state)
            data = self.take(state)
            for part in self.parts:
                part.before_batch(state, data)
            with phase("batch"):
                batch = rank.learner.batch_of(data.trajectories, data.demonstrations, data.groups.lags, data.images)
                data.clear()
            with phase("inference"):
                rank.inference.fill(batch)
                sampled = batch.sequences.sampled
                filter_overlong(batch, rank.config.algorithm)
            with phase("update"):
                for part in self.parts:
                    part.before_update(state, batch)
                after, trained = rank.learner.train_step(state, batch)
                trained |= engine_gap(batch, sampled, rank.config)
            # Rewards in the estimator's metrics already have the KL penalty subtracted.
            metrics = trajectory_metrics(batch.outcomes, data.groups.report) | data.metrics | trained | synced
            metrics |= data.groups.account.metrics(batch.trained, batch.excluded)
            for part in self.parts:
                part.after_update(state)
            after = rank.end_step(after, metrics, self.version, data.groups.used)
        metrics |= data.groups.metrics
        for part in self.parts:
            part.after_step(after, metrics)
        tokens = int(batch.sequences.step_lengths.sum())
        rank.reporter.record_step(after.step, metrics, tokens=tokens, used=data.groups.used)
        return after

    def publish(self, state: TrainState, given: SentWeights | None = None) -> Metrics:
        """Publish the actor's weights, or ``given``, to the engines under a new, verified version. Raises Stopped."""
        for part in self.parts:
            part.before_publish(state)
        metrics = self.services.weights.publish(state.step, given)
        for part in self.parts:
            metrics |= part.after_publish(state)
        return metrics

    def publish_if_due(self, state: TrainState) -> Metrics:
        """Publish the weights if the step needs newer ones than were published last. Raises Stopped."""
        weights, synced = self.services.weights, dict[str, float]()
        due = Pacing.of(self.rank.config.sync).publishes(state.step) or self.has_given
        if due or self.rollbacks != state.rollbacks or not weights.version.n:
            # If a model has computed since, colocated engines may have freed their memory.
            published = self.evaluated if self.rank.memory.phase is Phase.ROLLOUT else None
            synced, self.rollbacks, self.has_given = published or self.publish(state), state.rollbacks, False
        self.evaluated = None
        if self.rank.context.rank == 0:
            self.rank.store.pacing.record_live(weights.version)  # also versions published by an evaluation
        return synced

    def take(self, state: TrainState) -> StepData:
        """Wait for the step's groups and verify them. Raises Stopped; NonRetryableError if no group is left."""
        services, weights, models = self.services, self.services.weights, self.rank.models
        groups = services.rollouts.groups(state, Published(weights.version, weights.step))
        if not groups.trajectories:
            rollout = groups.rollout_ids[-1] if groups.rollout_ids else f"of step {state.step + 1}"
            raise NonRetryableError(
                f"rollout {rollout} left nothing to train on: {groups.report.dropped}; "
                f"{'; '.join(groups.report.messages)}"
            )
        self.rank.reporter.dropped(state.step + 1, groups.report.messages)
        with self.rank.timeline.phase("batch", step=state.step):
            images = models.images and models.images.of_step(services.reader.images(groups.trajectories))
        return StepData(groups, groups.trajectories, images)

    def prepare(self, state: TrainState) -> None:
        """Build the other models."""
        self.rank.build_models(state)

    def connect(self) -> None:
        """Make the services and parts of the job, and join the engines. Raises Stopped."""
        with self.rank.timeline.phase("wait_for_engine"):
            self.services = services_of(self.rank)
            self.parts = parts_of(self.services)
            self.is_connected = True
            self.rank.memory.enter(Phase.SYNC)
            self.services.weights.connect()

    def evaluate(self, state: TrainState, name: str) -> None:
        """Publish and evaluate the weights. Raises Stopped."""
        evaluation = self.services.evaluation
        evaluation.wait(state.step)
        given = next((found for part in self.parts if (found := part.evaluated(state)) is not None), None)
        synced, self.has_given = self.publish(state, given), given is not None
        evaluation.run(state, self.services.weights.version, name)
        # Engines that keep this version skip the next one, which the others get.
        self.evaluated = None if evaluation.is_open or self.has_given else synced
