"""Course of a training job on one rank: resume, warm start on demonstrations, steps, evaluation, export."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from megarl.buffer.order.draws import Demonstration, data_seed, numbers_of_step
from megarl.config.algorithms import AlgorithmConfig
from megarl.core.durable import write_text
from megarl.core.metrics import mean_of_sums
from megarl.core.processes import heartbeat
from megarl.core.schema import Task, WeightsVersion
from megarl.learn import algorithms
from megarl.learn.algorithms import Algorithm
from megarl.learn.batching import of_demonstrations
from megarl.learn.memory.phases import Phase
from megarl.learn.training import objectives
from megarl.learn.training.optimizer import learning_rate
from megarl.tasks import ChatTokenizer, read_rows, with_templates
from megarl.train.batch.images import demonstrations_of
from megarl.train.inference.models import Models
from megarl.train.loop.checkpoints import Checkpointer
from megarl.train.loop.rank import TrainerRank, starting
from megarl.train.part import Part
from megarl.train.ranks import Ranks, Reporter, RunContext, Stopped, TrainState
from megarl.train.rollout.evaluation import Evaluates
from megarl.train.update.learner import RollBack, UpdateFilter
from megarl.weights.checkpoint.training.manifest import EXPORTED_STEP

PRINTED_EVERY = 100
"""Steps between two log lines when there is no progress bar."""


class WarmStart:
    """Steps of supervised fine-tuning on ``taskset.warm_start``."""

    def __init__(
        self,
        context: RunContext,
        models: Models,
        updates: UpdateFilter,
        ranks: Ranks,
        reporter: Reporter,
        checkpoints: Checkpointer,
    ) -> None:
        self._config = context.config
        self._bad_rows = context.bad_rows
        self._models = models
        self._updates = updates
        self._ranks = ranks
        self._reporter = reporter
        self._checkpoints = checkpoints
        self._sft: tuple[Algorithm, AlgorithmConfig] = (algorithms.get("sft"), AlgorithmConfig(name="sft"))
        """Always SFT with default settings, so that all algorithms start from the same weights."""

    def steps(self, state: TrainState) -> Iterator[TrainState]:
        """Make the remaining steps of ``trainer.warm_start.steps``; yield the state after each.

        Ends early when the job is asked to stop. Raises RollBack.
        """
        config = self._config.trainer.warm_start
        if config.steps == 0:
            return
        assert self._config.taskset.warm_start is not None, "checked before launch"
        path, skipped = Path(self._config.taskset.warm_start), self._bad_rows.get("warm_start", ())
        rows = read_rows(path, require_response=True, split="warm_start", skipped=skipped)
        rows = [with_templates(row, self._config.taskset) for row in rows]
        tokenizer, encoded = ChatTokenizer.of(self._config), dict[int, Demonstration]()
        actor = self._models.actor
        actor.model.head = replace(self._models.head, temperature=1.0)
        if state.step:
            actor.optimizer.set_hyperparameters(config.optimizer)
            self._checkpoints.put_random_states(self._models)
        else:
            actor.optimizer.restart(config.optimizer)
        begins = state.step
        with (
            self._reporter.progress(config.steps, "warm start", "step") as bar,
            self._reporter.timeline.phase("warm_start"),
        ):
            bar.update(state.step)
            while state.step < config.steps:
                if self._ranks.stop_requested():
                    return
                self._checkpoints.settle()
                if state.step > begins and state.step % config.checkpoint_interval == 0:
                    self._checkpoints.commit(state, self._models, interval=True)
                chosen = numbers_of_step(
                    len(rows), state.step, config.batch_size, data_seed(self._config.trainer.seed, state.rollbacks)
                )
                new = [i for i in chosen if i not in encoded]
                found = demonstrations_of([rows[i] for i in new], tokenizer, self._models.images)
                encoded.update(zip(new, found, strict=True))
                state, loss = self._step(state, [encoded[i] for i in chosen], [rows[i] for i in chosen])
                yield state
                bar.set_postfix_str(f"loss {loss:.3f}")
                bar.update(1)
                if bar.disable and state.step % PRINTED_EVERY == 0:
                    self._reporter.log(f"warm start {state.step}/{config.steps} | loss {loss:.3f}")

    def _step(self, state: TrainState, pairs: list[Demonstration], rows: list[Task]) -> tuple[TrainState, float]:
        """Make one update on rows and their token ids; return the next state and the loss, which is NaN for a skipped
        update."""
        config, actor = self._config.trainer.warm_start, self._models.actor
        batch = of_demonstrations(pairs)
        if self._models.images is not None:
            self._models.images.put(batch, [row.images for row in rows])
        sums = actor.backward(batch, actor.model.micro_batches(batch), objectives.policy(*self._sft, batch))
        lr = learning_rate(config.optimizer, state.step)
        norm = actor.gradient_norm()
        self._updates.begin()
        admitted, state = self._updates.admits(state, "actor", sums, norm)
        metrics = {}
        if admitted:
            actor.step(lr)
            actor.finish_gather()
            metrics = mean_of_sums(self._ranks.gather([sums])) | {"actor/grad_norm": norm, "actor/lr": lr}
        metrics |= {name.replace("training/", "actor/"): value for name, value in self._updates.end(state).items()}
        state = replace(state, step=state.step + 1)
        self._reporter.write(state.step, {name.replace("actor/", "sft/"): value for name, value in metrics.items()})
        return state, metrics.get("actor/loss", math.nan)


class Steps(Protocol):
    """Steps of one kind of job: ``step.OnlineSteps`` or ``offline.OfflineSteps``. Every rank makes the same calls.

    A step changes the rank's models, and returns a new ``TrainState``.
    """

    @property
    def version(self) -> WeightsVersion | None:
        """Weights published last, for the manifest of a checkpoint."""

    @property
    def evaluation(self) -> Evaluates | None:
        """Evaluations that may run in parallel to steps; None if each one ends before ``evaluate`` returns."""

    @property
    def parts(self) -> Sequence[Part]:
        """Parts of the job."""

    def prepare(self, state: TrainState) -> None:
        """Build the models that the steps need, after the warm start and after each rollback."""

    def connect(self) -> None:
        """Open everything that the steps need except models. Raises Stopped."""

    def step(self, state: TrainState) -> TrainState:
        """Make one step. Raises RollBack; raises Stopped before the update, with nothing changed."""

    def evaluate(self, state: TrainState, name: str) -> None:
        """Evaluate the actor. Raises Stopped."""


class Course:
    """Course of a job with any kind of steps."""

    def __init__(self, rank: TrainerRank, steps: Steps) -> None:
        self._rank, self._steps = rank, steps
        self._config = rank.config.trainer

    def train(self) -> None:
        """Resume from the newest checkpoint; make the rest of the warm start and of ``trainer.steps`` steps."""
        state = self.start()
        if state is not None:
            self.end(*self.run_steps(state))

    def start(self) -> TrainState | None:
        """Return the state before the next step, with all models built; None after a stop in the warm start."""
        state = self.run_warm_start(self.resume())
        if state is not None:
            self.begin(state)
            adapters = self._rank.models.actor.model.adapters
            if adapters is not None:
                self._rank.reporter.log(f"adapter: {adapters.part} are trained")
        return state

    def end(self, state: TrainState, finished: bool) -> None:
        """Checkpoint the models; if all steps are done, export the actor and close the job."""
        rank = self._rank
        rank.commit(state, self._steps.version)
        if finished:
            rank.export(rank.context.run_dir / "hf")
            rank.export_adapter(rank.context.run_dir / "adapter")
            if rank.context.rank == 0:
                write_text(rank.context.run_dir / EXPORTED_STEP, str(state.step))
                rank.store.journal.close_job()  # the explorer ends when there is no more work
            rank.ranks.wait_for_all()

    def resume(self) -> TrainState:
        """Load the newest checkpoint, or begin; return the state."""
        rank = self._rank
        heartbeat.set_phase("between steps")
        with rank.timeline.phase("load"), starting(rank.config):
            state = rank.checkpoints.resume(rank.models)
        rank.reporter.open(state)
        return state

    def run_warm_start(self, state: TrainState) -> TrainState | None:
        """Make the remaining warm-start steps; return the state of the next phase at step 0. Return None after a stop,
        with progress saved."""
        rank = self._rank
        warm_start = WarmStart(rank.context, rank.models, rank.updates, rank.ranks, rank.reporter, rank.checkpoints)
        while state.warming_up:
            try:
                for after in warm_start.steps(state):
                    state = after
            except RollBack as bad:
                state = self.rolled_back(state, bad)
                continue
            if state.step < self._config.warm_start.steps:
                if state.step:
                    rank.commit(state)
                return None
            state = replace(state, phase="rl", step=0, grad_norms={})  # norms of the warm start's loss
            rank.commit(state)
        return state

    def begin(self, state: TrainState) -> None:
        """Prepare the steps after the warm start, and again after a rollback."""
        self._steps.prepare(state)
        # Modules and models live on: a collection that walks them takes 0.3 s of every fourth step of the quickstart.
        # Objects frozen by a fork server share its pages until a collection writes to them: seconds of copying.
        gc.collect()
        gc.freeze()
        if state.step:
            self._rank.checkpoints.put_random_states(self._rank.models)

    def run_steps(self, state: TrainState) -> tuple[TrainState, bool]:
        """Make the remaining steps and the last evaluation; return the last state, and False after a stop."""
        steps = self._steps
        try:
            steps.connect()
            while state.step < self._config.steps:
                try:
                    if self._rank.ranks.stop_requested():
                        return state, False
                    given_up = steps.evaluation is not None and steps.evaluation.settle(state.step)
                    if given_up or self.evaluates(state):
                        steps.evaluate(state, f"eval-{state.step}" if state.step else "eval-before")
                    state = steps.step(state)
                except RollBack as bad:
                    state = self.rolled_back(state, bad)
            steps.evaluate(state, "eval-after")
        except Stopped as stopped:
            if text := str(stopped):
                self._rank.reporter.log(f"stopping in the middle of a weight sync ({text})")
            return state, False
        for part in steps.parts:
            part.finish()
        return state, True

    def evaluates(self, state: TrainState) -> bool:
        """True before the first step and every ``trainer.eval_interval`` steps, also right after a resume."""
        interval = self._config.eval_interval
        return not state.step or bool(interval and state.step % interval == 0)

    def rolled_back(self, state: TrainState, bad: RollBack) -> TrainState:
        """Restore models, store and metrics to the newest checkpoint, or to the run's start; return that state.

        The result equals the checkpoint to the bit, except ``rollbacks``, which changes later tasks and seeds.
        """
        rank, reporter = self._rank, self._rank.reporter
        bad.__traceback__ = None  # its frames hold models that are about to be replaced
        evaluation = self._steps.evaluation
        if evaluation is not None:
            evaluation.settle(state.step)
        rank.checkpoints.settle(wait=True)
        rank.models.finish_gathers()  # the bad update may have followed another one
        rank.memory.enter(Phase.START)
        before = state.step
        reporter.log(f"WARNING: {bad}; going back to the newest checkpoint")
        state = replace(rank.checkpoints.resume(rank.models), rollbacks=state.rollbacks + 1)
        if not state.warming_up:
            gc.unfreeze()  # so that replaced models can be freed
            self.begin(state)
            if rank.context.rank == 0:
                rank.store.rollouts.discard(state.step, ahead=True)
        event = {"from_step": before, "to_step": state.step, "rollbacks": state.rollbacks, "why": str(bad)}
        reporter.event("rollback", event)
        reporter.rewind(state)
        source = "a checkpoint" if rank.checkpoints.newest() else "the beginning"
        reporter.log(
            f"went back from step {before} to step {state.step}, by {source}; rollback {state.rollbacks}: "
            "from here on steps take other tasks"
        )
        if evaluation is not None:
            evaluation.forget(state.step)
        return state
