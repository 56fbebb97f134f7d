"""A step of reinforcement learning: weights to the engines, answers back, an update. Features are ``parts``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from megarl.core.errors import NonRetryableError
from megarl.core.phases import Phase
from megarl.core.schema import WeightsVersion
from megarl.explore.experience import with_group_stats
from megarl.explore.order.pacing import Pacing
from megarl.train.loop.base import Trainer
from megarl.train.part import Metrics, Part, Services, StepData
from megarl.train.parts import parts_of
from megarl.train.rank.state import TrainState
from megarl.train.rollout.asking import Published
from megarl.train.services import services_of
from megarl.train.sync.weights import Stopped
from megarl.train.update.batch import StepBatch, filter_overlong, make_batch
from megarl.train.update.gap import engine_gap
from megarl.train.update.outcomes import trajectory_metrics
from megarl.train.update.updates import RollBack


class OnlineTrainer(Trainer):
    """Trains on answers that engines sample with the weights of the step."""

    services: Services
    parts: Sequence[Part] = ()
    """Made when the engines are joined."""
    rollbacks = 0
    """Number of rollbacks before the last publication."""
    evaluated: Metrics | None = None
    """Metrics of the publication for an evaluation; the step that follows samples with that version too."""

    @property
    def version(self) -> WeightsVersion:
        """Weights published last."""
        return self.services.weights.version if self.parts else super().version

    def step(self, state: TrainState) -> TrainState:
        """Make one step: sync, rollout, inference, update."""
        phase = partial(self.timeline.phase, step=state.step)
        self.timeline.reset()
        with phase("step"):
            with phase("sync"):
                for part in self.parts:
                    part.begin(state)
                synced = self.publish_if_due(state)
            data = self.take(state)
            for part in self.parts:
                part.before_batch(state, data)
            with phase("batch"):
                batch = self.batch_of(data)
            with phase("inference"):
                self.learner.infer(batch)
                sampled = batch.sequences.sampled
                filter_overlong(batch, self.config.algorithm)
            with phase("update"):
                for part in self.parts:
                    part.before_update(state, batch)
                after, trained = self.learner.train_step(state, batch)
                trained |= engine_gap(batch, sampled, self.config)
            # Rewards in the metrics of the estimate are those with the KL taken off.
            metrics = trajectory_metrics(batch.outcomes, data.groups.report) | data.metrics | trained | synced
            metrics |= data.groups.account.metrics(batch.trained, batch.excluded)
            for part in self.parts:
                part.after_update(state)
            after = self.end_step(after, metrics, data.groups.used)
        metrics |= data.groups.metrics
        for part in self.parts:
            part.after_step(after, metrics)
        tokens = int(batch.sequences.step_lengths.sum())
        self.reporter.record_step(after.step, metrics, tokens=tokens, used=data.groups.used)
        return after

    def publish(self, state: TrainState) -> Metrics:
        """Give the engines the actor's weights under a new version, proven equal. Raises Stopped."""
        for part in self.parts:
            part.before_publish(state)
        metrics = self.services.weights.publish(state.step)
        for part in self.parts:
            metrics |= part.after_publish(state)
        return metrics

    def publish_if_due(self, state: TrainState) -> Metrics:
        """Publish the weights where the step needs other ones than were published last. Raises Stopped."""
        weights, synced = self.services.weights, dict[str, float]()
        due = Pacing.of(self.config.sync).publishes(state.step)
        if due or self.rollbacks != state.rollbacks or not weights.version.n:
            # Where a model has computed since, engines on its device may have left.
            published = self.evaluated if self.memory.phase is Phase.ROLLOUT else None
            synced, self.rollbacks = published or self.publish(state), state.rollbacks
        self.evaluated = None
        if self.context.rank == 0:
            self.store.pacing.record_live(weights.version)  # also those that an evaluation has published
        return synced

    def take(self, state: TrainState) -> StepData:
        """Wait for the step's groups, and verify them. Raises Stopped; NonRetryableError where nothing is left."""
        services, weights = self.services, self.services.weights
        groups = services.rollouts.groups(state, Published(weights.version, weights.step), self.models.head.vocab_size)
        if groups is None:
            raise Stopped
        if not groups.trajectories:
            raise NonRetryableError(
                f"rollout {groups.rollout_ids[-1]} left nothing to train on: {groups.report.dropped}; "
                f"{'; '.join(groups.report.messages)}"
            )
        for message in groups.report.messages:
            self.reporter.log(f"dropped from training: {message}")
        with self.timeline.phase("batch", step=state.step):
            images = self.models.images and self.models.images.of_step(services.reader.images(groups.trajectories))
        return StepData(groups, groups.trajectories, images)

    def batch_of(self, data: StepData) -> StepBatch:
        """Make the step's batch, and let go of its trajectories: their arrays are in the batch."""
        config, groups = self.config, data.groups
        trajectories = with_group_stats(data.trajectories)
        given = (trajectories, data.demonstrations, self.algorithm, config.algorithm, config.trainer.updates_per_step)
        replays = config.rollout.routing_replay
        batch = make_batch(*given, groups.lags, data.images, self.learner.share, replays_routing=replays)
        for held in (trajectories, data.trajectories, groups.trajectories):
            held.clear()
        return batch

    def connect(self) -> None:
        """Make the services and parts of the job, and join the engines. Raises Stopped."""
        with self.timeline.phase("wait_for_engine"):
            self.services = services_of(self)
            self.parts = parts_of(self.services)
            self.memory.enter(Phase.SYNC)
            self.services.weights.connect()

    def run_steps(self, state: TrainState) -> tuple[TrainState, bool]:
        """Run the steps (``Trainer.run_steps``), and end the parts after the last one."""
        state, finished = super().run_steps(state)
        if finished:
            for part in self.parts:
                part.finish()
        return state, finished

    def evaluates(self, state: TrainState) -> bool:
        """True where ``Trainer`` evaluates, and in place of an evaluation that was given up."""
        return self.services.evaluation.settle(state.step) or super().evaluates(state)

    def evaluate(self, state: TrainState, name: str) -> None:
        """Publish and evaluate the weights. Raises Stopped."""
        evaluation = self.services.evaluation
        if not evaluation.wait(state.step):
            raise Stopped
        synced = self.publish(state)
        if not evaluation.run(state, self.version, name):
            raise Stopped
        # Engines that keep the version are left out of the next one, which the others are given.
        self.evaluated = None if evaluation.is_open else synced

    def rolled_back(self, state: TrainState, bad: RollBack) -> TrainState:
        """Go back (``Trainer.rolled_back``); what is evaluated meanwhile is given up."""
        if self.parts:
            self.services.evaluation.settle(state.step)
        state = super().rolled_back(state, bad)
        if self.parts:
            self.services.evaluation.forget(state.step)
        return state
