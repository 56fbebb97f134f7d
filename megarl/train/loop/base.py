"""The course of a training job on one rank: resume, warm start, steps, evaluation, checkpoints.

A step is made by ``step.OnlineTrainer`` or ``offline.OfflineTrainer``.
"""

from __future__ import annotations

import gc
import random
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from megarl.core import heartbeat
from megarl.core.config import Config
from megarl.core.durable import write_text
from megarl.core.phases import Phase
from megarl.core.schema import WeightsVersion
from megarl.explore.store import NOTHING_USED, Used
from megarl.learn import algorithms
from megarl.learn.parallel import groups
from megarl.train.loop.checkpoints import Checkpointer
from megarl.train.loop.warm_start import WarmStart
from megarl.train.rank.context import RunContext
from megarl.train.rank.ranks import Ranks
from megarl.train.rank.reporter import Reporter
from megarl.train.rank.state import TrainState
from megarl.train.sync.weights import Stopped
from megarl.train.update.learner import Learner
from megarl.train.update.models import Models
from megarl.train.update.phase_memory import PhaseMemory
from megarl.train.update.updates import RollBack, UpdateFilter
from megarl.weights.checkpoint.training import writer as checkpoint_writer
from megarl.weights.checkpoint.training.manifest import EXPORTED_STEP


class Trainer(ABC):
    """A trainer rank's models and services, and the course of its job. Use as a context manager.

    Every rank makes the same calls. What a step changes is in its models and in the ``TrainState`` that it returns.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.ranks = Ranks()
        self.ranks.stop_on_sigterm()
        if config.trainer.async_checkpoint:
            checkpoint_writer.of_process()  # before models and a GPU: it is a fork of this process
        self.timeout_s = groups.collective_timeout_s(config.cluster.stall_s)
        # seeds torch's generators too
        position = groups.initialize(config.parallel, seed=config.trainer.seed, timeout_s=self.timeout_s)
        random.seed(config.trainer.seed)
        np.random.seed(config.trainer.seed)
        self.context = RunContext.of(config, position.rank)
        self.store = self.context.open_store()
        self.reporter = Reporter(self.context, self.store)
        self.reporter.record_start()
        self.timeline = self.reporter.timeline
        self.algorithm = algorithms.get(config.algorithm.name)
        self.models = self.make_models()
        self.checkpoints = Checkpointer(self.context, self.store, self.ranks, self.reporter)
        self.updates = UpdateFilter(config.trainer.update_filter, self.reporter)
        self.memory = PhaseMemory(self.context, self.models, self.ranks, self.timeline)
        self.learner = Learner(config, self.algorithm, self.models, self.updates, self.ranks, self.memory.enter)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.checkpoints.give_up()  # one is pending only after an error
        self.memory.close()
        self.reporter.close()
        self.store.close()

    def make_models(self) -> Models:
        """The job's models, not yet built."""
        return Models(self.config, self.algorithm)

    @abstractmethod
    def connect(self) -> None:
        """Open what the steps need beside models. Raises Stopped."""

    @abstractmethod
    def step(self, state: TrainState) -> TrainState:
        """Make one step. Raises RollBack; Stopped before the update begins: nothing has changed then."""

    @abstractmethod
    def evaluate(self, state: TrainState, name: str) -> None:
        """Evaluate the actor. Raises Stopped."""

    @property
    def version(self) -> WeightsVersion:
        """Weights published last."""
        return WeightsVersion(self.context.attempt, 0)

    def train(self) -> None:
        """Warm start when there is none yet, then ``trainer.steps`` steps; resumes from the newest checkpoint."""
        state = self.run_warm_start(self.resume())
        if state is None:
            return
        self.begin(state)
        state, finished = self.run_steps(state)
        self.commit(state)
        if finished:
            self.export(self.context.run_dir / "hf")
            if self.context.rank == 0:
                write_text(self.context.run_dir / EXPORTED_STEP, str(state.step))
                self.store.journal.close_job()  # the explorer ends when no more work comes
            self.ranks.wait_for_all()

    def resume(self) -> TrainState:
        """Restore the newest checkpoint, or begin; return its state."""
        heartbeat.set_phase("between steps")
        with self.timeline.phase("load"), starting(self.config):
            state = self.checkpoints.resume(self.models)
        self.reporter.open(state)
        return state

    def run_warm_start(self, state: TrainState) -> TrainState | None:
        """Make the remaining steps of the warm start; return the state of step 0 of what follows, or None when the job
        was asked to stop before that: what was reached is saved."""
        warm_start = WarmStart(self.config, self.models, self.updates, self.ranks, self.reporter, self.checkpoints)
        while state.warming_up:
            try:
                for after in warm_start.steps(state):
                    state = after
            except RollBack as bad:
                state = self.rolled_back(state, bad)
                continue
            if state.step < self.config.trainer.warm_start.steps:
                if state.step:
                    self.commit(state)
                return None
            state = replace(state, phase="rl", step=0, grad_norms={})  # norms of another loss
            self.commit(state)
        return state

    def begin(self, state: TrainState) -> None:
        """Prepare the steps that follow the warm start, again after a rollback.

        At step 0 the optimizer is fresh, and the other models begin with the weights that the warm start left.
        """
        models, reference = self.models, self.context.run_dir / "reference"
        if state.step == 0:
            models.actor.optimizer.restart(self.config.trainer.optimizer)
            self.export(reference)
        models.actor.model.head = models.head
        self.memory.begin()
        with self.timeline.phase("load"), starting(self.config):
            models.build(state.step, self.checkpoints.newest(), reference, self.memory.enter)
        # Modules and models stay: a collection that walks them takes 0.3 s of every fourth step of the quickstart.
        # Those that a fork server has frozen are shared with it until a collection writes to them: seconds of copies.
        gc.collect()
        gc.freeze()
        if state.step:
            self.checkpoints.put_random_states(models)

    def run_steps(self, state: TrainState) -> tuple[TrainState, bool]:
        """Make the steps that are left and the last evaluation; return the last state, and False after a stop."""
        try:
            self.connect()
            while state.step < self.config.trainer.steps:
                try:
                    if self.ranks.stop_requested():
                        return state, False
                    if self.evaluates(state):
                        self.evaluate(state, f"eval-{state.step}" if state.step else "eval-before")
                    state = self.step(state)
                except RollBack as bad:
                    state = self.rolled_back(state, bad)
            self.evaluate(state, "eval-after")
        except Stopped as stopped:
            if text := str(stopped):
                self.reporter.log(f"stopping in the middle of a weight sync ({text})")
            return state, False
        return state, True

    def evaluates(self, state: TrainState) -> bool:
        """True before the first step and every ``trainer.eval_interval`` steps, also after a resume there."""
        interval = self.config.trainer.eval_interval
        return not state.step or bool(interval and state.step % interval == 0)

    def end_step(self, state: TrainState, metrics: dict[str, float], used: Used = NOTHING_USED) -> TrainState:
        """Count the step, and checkpoint where that is due; return the state after it. Adds to ``metrics``."""
        config, number = self.config.trainer, state.step
        self.checkpoints.settle()
        state = replace(state, step=number + 1)
        metrics |= {"training/global_step": float(state.step), "training/attempt": float(self.context.attempt)}
        metrics |= self.memory.metrics() | {"checkpoint/failed": float(self.checkpoints.failed)}
        if state.step % config.checkpoint_interval == 0 and state.step < config.steps:
            # A job that is killed after its checkpoint resumes after this step: its metrics must be there by then.
            self.reporter.keep(state.step, metrics, used)
            self.commit(state, interval=True, step=number)
            metrics["checkpoint/failed"] = float(self.checkpoints.failed)
        return state

    def commit(self, state: TrainState, *, interval: bool = False, **labels: int) -> None:
        """Checkpoint the models under ``state`` (``Checkpointer.commit``)."""
        self.checkpoints.commit(
            state, self.models, self.memory.enter, version=self.version, interval=interval, **labels
        )

    def rolled_back(self, state: TrainState, bad: RollBack) -> TrainState:
        """Bring models, store and metrics to the newest checkpoint, or the run's start; return its state.

        Equal to the checkpoint to the bit, but for the count of rollbacks: what follows has other tasks and seeds.
        """
        bad.__traceback__ = None  # its frames hold models that are to be replaced
        self.checkpoints.settle(wait=True)
        self.models.finish_gathers()  # the bad update may have followed another one
        self.memory.enter(Phase.START)
        before = state.step
        self.reporter.log(f"WARNING: {bad}; going back to the newest checkpoint")
        state = replace(self.checkpoints.resume(self.models), rollbacks=state.rollbacks + 1)
        if not state.warming_up:
            gc.unfreeze()  # models that are replaced
            self.begin(state)
            if self.context.rank == 0:
                self.store.rollouts.discard(state.step, ahead=True)
        event = {"from_step": before, "to_step": state.step, "rollbacks": state.rollbacks, "why": str(bad)}
        self.reporter.event("rollback", event)
        self.reporter.rewind(state)
        source = "a checkpoint" if self.checkpoints.newest() else "the beginning"
        self.reporter.log(
            f"went back from step {before} to step {state.step}, by {source}; rollback {state.rollbacks}: "
            "from here on steps take other tasks"
        )
        return state

    def export(self, target: Path) -> None:
        """Write the actor as an ordinary HF checkpoint."""
        self.memory.enter(Phase.SAVE)
        with self.timeline.phase("export"):
            self.models.export_actor(target, self.context.rank)
            self.ranks.wait_for_all()  # rank 0 writes; the others may read it next


def starting(config: Config) -> AbstractContextManager[None]:
    """Allow what a start waits for to take its time."""
    return heartbeat.timeout(config.rollout.start_timeout_s)
