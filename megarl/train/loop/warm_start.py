"""Supervised steps on demonstrations, through the same actor, schedule and optimizer as reinforcement learning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megarl.buffer.order.draws import Demonstration, data_seed, numbers_of_step
from megarl.config.algorithms import AlgorithmConfig
from megarl.core.metrics import mean_of_sums
from megarl.core.schema import Task
from megarl.learn import algorithms
from megarl.learn.algorithms import Algorithm
from megarl.learn.batching import of_demonstrations
from megarl.learn.training import objectives
from megarl.learn.training.optimizer import learning_rate
from megarl.tasks import ChatTokenizer, read_rows, with_templates
from megarl.train.batch.images import demonstrations_of
from megarl.train.inference.models import Models
from megarl.train.loop.checkpoints import Checkpointer
from megarl.train.rank.context import RunContext
from megarl.train.rank.ranks import Ranks
from megarl.train.rank.reporter import Reporter
from megarl.train.rank.state import TrainState
from megarl.train.update.updates import UpdateFilter

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
        pairs = demonstrations_of(rows, ChatTokenizer.of(self._config), self._models.images)
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
                state, loss = self._step(state, pairs, rows)
                yield state
                bar.set_postfix_str(f"loss {loss:.3f}")
                bar.update(1)
                if bar.disable and state.step % PRINTED_EVERY == 0:
                    self._reporter.log(f"warm start {state.step}/{config.steps} | loss {loss:.3f}")

    def _step(self, state: TrainState, pairs: list[Demonstration], rows: list[Task]) -> tuple[TrainState, float]:
        """Make one update; return the next state and the loss, which is NaN for a skipped update."""
        config, actor = self._config.trainer.warm_start, self._models.actor
        chosen = numbers_of_step(
            len(pairs), state.step, config.batch_size, data_seed(self._config.trainer.seed, state.rollbacks)
        )
        batch = of_demonstrations([pairs[i] for i in chosen])
        if self._models.images is not None:
            self._models.images.put(batch, [rows[i].images for i in chosen])
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
