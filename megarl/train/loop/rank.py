"""A trainer rank: its models, and the services that every kind of job uses."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from megarl.buffer.store import NOTHING_USED, Used
from megarl.config import Config
from megarl.core.processes import heartbeat
from megarl.core.schema import WeightsVersion
from megarl.learn import algorithms
from megarl.learn.memory.phases import Phase
from megarl.learn.parallel import process_groups
from megarl.train.inference.inference import Inference
from megarl.train.inference.models import REFERENCE, Models, trains_scores
from megarl.train.loop.checkpoints import Checkpointer
from megarl.train.memory import PhaseMemory
from megarl.train.ranks import Ranks, Reporter, RunContext, TrainState
from megarl.train.update.learner import Learner, UpdateFilter
from megarl.weights.checkpoint.training import writer as checkpoint_writer


class TrainerRank:
    """Models and services of one rank. Use as a context manager. Every rank makes the same calls."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.ranks = Ranks()
        self.ranks.stop_on_sigterm()
        if config.trainer.async_checkpoint:
            checkpoint_writer.of_process()  # before models and CUDA: the writer is a fork of this process
        self.timeout_s = process_groups.collective_timeout_s(config.cluster.stall_s)
        # seeds torch's generators too
        position = process_groups.initialize(config.parallel, seed=config.trainer.seed, timeout_s=self.timeout_s)
        random.seed(config.trainer.seed)
        np.random.seed(config.trainer.seed)
        self.context = RunContext.of(config, position.rank)
        self.store = self.context.open_store()
        self.reporter = Reporter(self.context, self.store)
        self.reporter.record_start()
        self.timeline = self.reporter.timeline
        self.algorithm = algorithms.get(config.algorithm.name)
        self.models = Models(config, self.algorithm)
        self.checkpoints = Checkpointer(self.context, self.store, self.ranks, self.reporter)
        self.updates = UpdateFilter(config.trainer.update_filter, self.reporter)
        self.memory = PhaseMemory(self.context, self.models, self.ranks, self.timeline)
        self.inference = Inference(config, self.algorithm, self.models, self.memory.enter)
        self.learner = Learner(config, self.algorithm, self.inference, self.updates, self.ranks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.checkpoints.give_up()  # one is pending only after an error
        self.memory.close()
        self.reporter.close()
        self.store.close()

    def build_models(self, state: TrainState) -> None:
        """Build the other models, and start to manage the memory of all.

        At step 0 the optimizer is fresh, and the other models begin with the weights of the warm start.
        """
        models = self.models
        if state.step == 0:
            models.actor.optimizer.restart(self.config.trainer.optimizer)
            self.leave_warm_start(state)
        models.actor.model.head = models.head
        self.memory.begin()
        with self.timeline.phase("load"), starting(self.config):
            models.build(state.step, self.checkpoints.newest(), self.context.run_dir / REFERENCE, self.memory.enter)

    def leave_warm_start(self, state: TrainState) -> None:
        """At step 0 end the warm start: export the model if it is needed later, then switch to the model to train."""
        if state.step:
            return
        lora, reward = self.config.model.lora.is_used, trains_scores(self.algorithm)
        if self.config.trainer.warm_start.steps if lora else not reward:
            self.export(self.context.run_dir / REFERENCE)
        self.models.leave_warm_start()

    def end_step(
        self, state: TrainState, metrics: dict[str, float], version: WeightsVersion | None, used: Used = NOTHING_USED
    ) -> TrainState:
        """Count the step and checkpoint if one is due; return the state after the step. Adds to ``metrics``.

        Args:
            version: Weights published last.
            used: Groups that the step has used.
        """
        config, number = self.config.trainer, state.step
        self.checkpoints.settle()
        state = replace(state, step=number + 1)
        metrics |= {"training/global_step": float(state.step), "training/attempt": float(self.context.attempt)}
        metrics |= self.memory.metrics() | {"checkpoint/failed": float(self.checkpoints.failed)}
        is_due, keeps = state.step % config.checkpoint_interval == 0, config.keep_state != "off"
        if (is_due or keeps) and state.step < config.steps:
            # A job killed after this checkpoint resumes after this step: its metrics must be stored before.
            self.reporter.keep(state.step, metrics, used)
            if keeps:
                self.checkpoints.keep(state, self.models, self.memory.enter, version, step=number)
            if is_due:
                self.commit(state, version, interval=True, step=number)
            metrics["checkpoint/failed"] = float(self.checkpoints.failed)
        return state

    def commit(
        self, state: TrainState, version: WeightsVersion | None = None, *, interval: bool = False, **labels: int
    ) -> None:
        """Checkpoint the models under ``state`` (``Checkpointer.commit``)."""
        self.checkpoints.commit(state, self.models, self.memory.enter, version=version, interval=interval, **labels)

    def export(self, target: Path) -> None:
        """Write the actor as an ordinary HF checkpoint."""
        self.memory.enter(Phase.SAVE)
        with self.timeline.phase("export"):
            self.models.export(self.models.actor.model, target, self.context.rank)
            self.ranks.wait_for_all()  # rank 0 writes; the others may read it next

    def export_adapter(self, target: Path) -> None:
        """Write the actor's adapters as PEFT's files; nothing to do without adapters."""
        if self.models.actor.model.adapters is None:
            return
        with self.timeline.phase("export"):
            self.models.export_adapter(target)
            self.ranks.wait_for_all()


def starting(config: Config) -> AbstractContextManager[None]:
    """Extend the heartbeat timeout to ``rollout.start_timeout_s`` during a start."""
    return heartbeat.timeout(config.rollout.start_timeout_s)
