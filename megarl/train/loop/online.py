"""Reinforcement learning: sync, rollout, inference, update, in turn."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from megarl.core.config import Config
from megarl.core.config.algorithms import MixConfig, reads_teacher
from megarl.core.errors import NonRetryableError
from megarl.core.metrics import spread
from megarl.core.phases import Phase
from megarl.core.schema import End, Outcome, Trajectory, WeightsVersion
from megarl.core.truncation import TruncationWarning
from megarl.engine.client.auth import KEY_VARIABLE
from megarl.explore.experience import Report, add_model_scores, with_group_stats
from megarl.explore.order.draws import ExpertRow, ExpertRows, data_seed, num_expert_rows
from megarl.explore.order.pacing import Pacing
from megarl.explore.tasksets import ChatTokenizer
from megarl.learn import algorithms
from megarl.train.loop.base import Trainer
from megarl.train.loop.waiting import RolloutWaiter
from megarl.train.rank.reporter import Reporter
from megarl.train.rank.state import TrainState
from megarl.train.rollout.asking import Awaited, Published
from megarl.train.rollout.evaluation import Evaluation
from megarl.train.rollout.meanwhile import EvaluationMeanwhile
from megarl.train.rollout.reading import NodeReader, RolloutReader
from megarl.train.rollout.rollouts import Rollouts, StepGroups
from megarl.train.sync.cold import ColdCheck
from megarl.train.sync.colocated import ColocatedEngines
from megarl.train.sync.files import FilePublisher
from megarl.train.sync.kept import KeptEngines
from megarl.train.sync.others import EnginesOfOthers
from megarl.train.sync.own import OwnEngines
from megarl.train.sync.publish import WeightPublisher
from megarl.train.sync.weights import Stopped, WeightSync
from megarl.train.update.accounts import account_line
from megarl.train.update.batch import filter_overlong, make_batch
from megarl.train.update.gap import engine_gap
from megarl.train.update.images import ImageInputs, StepImages
from megarl.train.update.kept import kept_batch
from megarl.train.update.learner import model_scores
from megarl.train.update.updates import RollBack

Rewarded = tuple[list[Trajectory], dict[str, float]]
"""Trajectories with their scores, and metrics."""


class OnlineTrainer(Trainer):
    """Trains on answers that engines sample with the weights of the step."""

    weights: WeightSync
    rollouts: Rollouts
    evaluation: Evaluation
    meanwhile: EvaluationMeanwhile
    rollbacks = 0
    """Number of rollbacks before the last publication."""
    evaluated: dict[str, float] | None = None
    """Metrics of the publication for an evaluation; the step that follows samples with that version too."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        reader = NodeReader(self.timeout_s + config.store.outage_s)
        self.reader = RolloutReader(reader, self.store, lambda: self.ranks.stopping)
        self.pacing = Pacing.of(config.sync)
        self.job = algorithms.job_of(config)
        key, silence_s = os.environ.get(KEY_VARIABLE, ""), config.cluster.heartbeat_s
        self.others = None if self.job.is_alone else EnginesOfOthers(self.store, key, silence_s)
        together = config.rollout.placement == "colocated"
        self.own = OwnEngines(self.store, key, together=together) if self.job.is_alone else None
        self.registered: Callable[[], list[str]] = self.own.registered if self.own is not None else list
        self.truncation = TruncationWarning(config.rollout.max_response_tokens)
        self.expert = expert_rows(config, self.reader, self.models.images) if "expert" in self.algorithm.needs else None

    @property
    def version(self) -> WeightsVersion:
        """Weights published last."""
        return self.weights.version if hasattr(self, "weights") else super().version

    def connect(self) -> None:
        """Join the engines, and open what asks them. Raises Stopped."""
        with self.timeline.phase("wait_for_engine"):
            publisher = self.publisher()
            doers = (self.models, publisher, self.turns, self.store.record_version)
            self.weights = WeightSync(self.context, self.ranks, self.reporter, *doers)
            services = (self.context, self.store, self.ranks, self.reporter)
            self.cold = ColdCheck(*services, self.models, self.turns, self.export)
            wait = self.wait = RolloutWaiter(*services, self.weights, self.checkpoints).wait
            self.rollouts = Rollouts(self.context, self.algorithm, self.store, self.reporter, self.reader, wait)
            self.evaluation = Evaluation(self.context, self.store, self.reporter, wait)
            kept = publisher.kept if isinstance(publisher, WeightPublisher) else KeptEngines()
            self.meanwhile = EvaluationMeanwhile(*services, self.evaluation, kept, wait, self.registered)
            if self.config.rollout.placement == "colocated":
                assert isinstance(publisher, WeightPublisher), "files are for engines of other programs"
                self.turns.engines = ColocatedEngines(self.context, self.store, self.ranks, publisher)
            self.turns.enter(Phase.SYNC)
            self.weights.connect()

    def publisher(self) -> WeightPublisher | FilePublisher:
        """Make what brings the weights to engines (``sync.method``)."""
        place = (self.config, self.models.actor.layout, self.models.hf_config, self.context.rank)
        if self.config.sync.method == "checkpoint":
            return FilePublisher(*place)
        return WeightPublisher(
            *place,
            engines=self.engines,
            registered=self.registered,
            come_and_go=not self.job.is_alone,
            stopping=lambda: self.ranks.stopping,
        )

    def engines(self) -> Sequence[str] | None:
        """URLs of the engines that are to be joined; None where all are absent by order."""
        if self.own is not None:
            return self.own.urls(begun=self.version.n > 0)
        return self.others.urls() if self.others is not None else []

    def step(self, state: TrainState) -> TrainState | None:
        """Make one step: sync, rollout, inference, update; None when the job is asked to stop."""
        phase, number = self.timeline.phase, state.step
        self.timeline.reset()
        with phase("step", step=number):
            with phase("sync", step=number):
                if self.models.refresh_due(number):
                    self.evaluated = None  # engines may have to leave for it
                    self.turns.enter(Phase.REFRESH)
                    self.models.refresh_reference()
                synced = self.publish_if_due(state)
            if synced is None:
                return None
            published = Published(self.weights.version, self.weights.step)
            groups = self.rollouts.groups(state, published, self.models.head.vocab_size)
            if groups is None:
                return None
            if self.config.rollout.placement == "colocated":  # engines leave before the update
                self.rollouts.drain(state, weights_step=number)
            check_some_left(groups, self.reporter)
            with phase("batch", step=number):
                images = self.models.images and self.models.images.of_step(self.reader.images(groups.trajectories))
            with phase("inference", step=number):
                trajectories, scored = self.rewarded(groups.trajectories, images)
            with phase("batch", step=number):
                demonstrations = self.demonstrations(state, sum(t.num_samples for t in trajectories))
                settings, updates = self.config.algorithm, self.config.trainer.updates_per_step
                given = (trajectories, demonstrations, self.algorithm, settings, updates, groups.lags, images)
                batch = make_batch(*given, self.learner.share, replays_routing=self.config.rollout.routing_replay)
                for held in (trajectories, groups.trajectories):
                    held.clear()  # their arrays are in the batch
            with phase("inference", step=number):
                self.learner.infer(batch)
                sampled = batch.sequences.sampled
                filter_overlong(batch, settings)
            with phase("update", step=number):
                self.reporter.keep_batch(number + 1, lambda: kept_batch(batch, self.models.actor))
                state, trained = self.learner.train_step(state, batch)
                differences = engine_gap(batch, sampled, self.config)
            # Rewards in the metrics of the estimate are those with the KL taken off.
            metrics = trajectory_metrics(batch.outcomes, groups.report) | scored | trained | differences | synced
            metrics |= groups.account.metrics(batch.trained, batch.excluded)
            self.drain_after_update(state)
            state = self.end_step(state, metrics, groups.used)
        metrics |= groups.metrics
        if (text := self.truncation.warning(metrics)) is not None:
            self.reporter.log(f"step {state.step}: {text}")
        self.reporter.record_step(state.step, metrics, tokens=int(batch.sequences.step_lengths.sum()), used=groups.used)
        return state

    def rewarded(self, trajectories: list[Trajectory], images: StepImages | None = None) -> Rewarded:
        """Add the reward model's scores, where there is one, and the statistics of the groups; return metrics too."""
        model = self.models.reward_model
        if model is None:
            return with_group_stats(trajectories), {}
        self.turns.enter(Phase.SCORES)
        scores = model_scores(model, trajectories, images)
        scored = add_model_scores(trajectories, scores, self.config.reward_model.coef)
        return with_group_stats(scored), spread("reward_model/score", scores)

    def run_steps(self, state: TrainState) -> tuple[TrainState, bool]:
        """Run the steps (``Trainer.run_steps``); after the last one say what became of all that was sampled."""
        state, finished = super().run_steps(state)
        if finished and self.context.rank == 0:
            self.reporter.log(account_line(metrics for _, metrics in self.store.steps()))
        return state, finished

    def evaluate_if_due(self, state: TrainState) -> bool:
        """Evaluate as ``Trainer`` does, and in place of an evaluation that was given up; report one that has ended."""
        self.meanwhile.settle(state.step)
        if self.meanwhile.due:
            return self.evaluate(state, f"eval-{state.step}")
        return super().evaluate_if_due(state)

    def evaluate(self, state: TrainState, name: str) -> bool:
        """Publish and evaluate the weights. The job waits, unless engines are set apart (``trainer.eval_engines``)."""
        if not self.meanwhile.wait(state.step) or (synced := self.publish(state)) is None:
            return False
        self.evaluated = synced
        between = 0 < state.step < self.config.trainer.steps
        if between and self.meanwhile.begin(state.step, self.weights.version, name):
            self.evaluated = None  # the other engines are given a version of their own
            return True
        return self.evaluation.run(state, self.weights.version, name)

    def rolled_back(self, state: TrainState, bad: RollBack) -> TrainState:
        """Go back (``Trainer.rolled_back``); what is evaluated meanwhile is given up."""
        if not state.warming_up:
            self.meanwhile.settle(state.step)
        state = super().rolled_back(state, bad)
        if not state.warming_up:
            self.meanwhile.forget(state.step)
        return state

    def publish_if_due(self, state: TrainState) -> dict[str, float] | None:
        """Publish the weights where the step needs other ones than were published last; None when asked to stop."""
        synced: dict[str, float] | None = {}
        if self.pacing.publishes(state.step) or self.rollbacks != state.rollbacks or not self.weights.version.n:
            synced, self.rollbacks = self.evaluated or self.publish(state), state.rollbacks
        self.evaluated = None
        if synced is not None and self.context.rank == 0:
            self.store.record_live(self.weights.version)  # also those that an evaluation has published
        return synced

    def publish(self, state: TrainState) -> dict[str, float] | None:
        """Publish the weights (``WeightSync.publish``); None when the job is asked to stop before that."""
        if self.config.sync.order == "completion" and self.config.sync.pause == "wait":
            label = "requests that end before the weights change"
            with self.weights.quieting() as ended:
                if not self.wait(lambda: Awaited(ended(), 1, ended()), label, weights_step=state.step):
                    return None
        return self.weights.publish(state.step) | self.cold.check(state.step, self.weights)

    def drain_after_update(self, state: TrainState) -> None:
        """Wait for what was asked for ahead, where a checkpoint or other weights follow the step that is being made."""
        if self.config.rollout.placement == "separate" and drains(self.config, state.step + 1):
            with suppress(Stopped):  # the step counts: its update is made
                self.rollouts.drain(state, weights_step=state.step + 1)

    def demonstrations(self, state: TrainState, usual: int) -> list[ExpertRow]:
        """Expert rows of the step beside ``usual`` samples; [] where the algorithm has none."""
        if self.expert is None:
            return []
        settings = self.config.algorithm
        assert isinstance(settings, MixConfig), "mix and algorithms of a user's file have expert rows"
        count = num_expert_rows(usual, settings.expert_ratio)
        return self.expert.of_step(state.step, count, data_seed(self.config.trainer.seed, state.rollbacks))


def drains(config: Config, step: int) -> bool:
    """True if what was asked for ahead must be there when ``step`` steps are done: a checkpoint or other weights come
    next."""
    interval = config.trainer.eval_interval or config.trainer.steps
    return Pacing.of(config.sync).publishes(step) or not (step % config.trainer.checkpoint_interval and step % interval)


def check_some_left(groups: StepGroups, reporter: Reporter) -> None:
    """Log why trajectories were dropped. Raises NonRetryableError where a step has nothing to train on."""
    if not groups.trajectories:
        raise NonRetryableError(
            f"rollout {groups.rollout_ids[-1]} left nothing to train on: {groups.report.dropped}; "
            f"{'; '.join(groups.report.messages)}"
        )
    for message in groups.report.messages:
        reporter.log(f"dropped from training: {message}")


def expert_rows(config: Config, reader: RolloutReader, images: ImageInputs | None) -> ExpertRows:
    """Read the store's expert rows, with the placeholders of their images."""
    tokenizer, teacher = ChatTokenizer.of(config), reads_teacher(config.algorithm)
    return ExpertRows(reader.demonstrations(tokenizer, images and images.expand, teacher=teacher))


def trajectory_metrics(trajectories: list[Outcome], verified: Report) -> dict[str, float]:
    """Scores, lengths and ends of a step's trajectories."""
    lengths = [float(e.response_length) for e in trajectories]
    scores = [e.reward.score for e in trajectories]
    metrics = spread("critic/score", scores) | spread("critic/rewards", scores)
    metrics |= spread("response_length", lengths)
    metrics |= spread("prompt_length", [float(e.prompt_length) for e in trajectories])
    metrics["response_length/clip_ratio"] = sum(e.truncated for e in trajectories) / len(trajectories)
    metrics["training/accuracy"] = sum(e.reward.status == "ok" for e in trajectories) / len(trajectories)
    errors = sum(count for end, count in verified.ends.items() if End(end).by_reward)
    metrics["reward/error_rate"] = errors / max(1, sum(verified.ends.values()))
    metrics |= {f"ends/{end}": float(verified.ends.get(end, 0)) for end in End}
    metrics["reward/dropped_groups"] = float(verified.groups - verified.kept)
    metrics |= {f"buffer/excluded/{reason}": float(number) for reason, number in verified.excluded.items()}
    return metrics
