"""Trainer side of an evaluation: request, wait, report. The explorer's side is ``held_out.py``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Protocol

from megarl.buffer.order.draws import evaluation_sampling
from megarl.buffer.store import Store
from megarl.config.schema import EvaluationConfig
from megarl.core.schema import WeightsVersion
from megarl.train.rank.context import RunContext
from megarl.train.rank.reporter import Reporter
from megarl.train.rank.state import TrainState
from megarl.train.rollout.awaited import whole
from megarl.train.rollout.rollouts import Wait


class Evaluates(Protocol):
    """Evaluations of a job, between its steps (``Evaluation``) or in parallel (``EvaluationMeanwhile``). Every rank
    makes the same calls."""

    @property
    def is_open(self) -> bool:
        """True while engines keep weights that are being evaluated."""

    def settle(self, step: int) -> bool:
        """Report an evaluation that has ended, after ``step`` steps. Return True if an evaluation was cancelled: then
        evaluate the actor's current weights instead."""

    def wait(self, step: int) -> None:
        """Wait until no evaluation is open. Raises Stopped."""

    def run(self, state: TrainState, version: WeightsVersion, rollout_id: str) -> None:
        """Evaluate the weights published last. Raises Stopped."""

    def forget(self, step: int) -> None:
        """Cancel an open evaluation, after a rollback to step ``step``."""


class Evaluation:
    """Requests an evaluation, waits, and reports the result. Every rank makes the same calls."""

    is_open = False

    def __init__(self, context: RunContext, store: Store, reporter: Reporter, wait: Wait) -> None:
        self._context = context
        self._store = store
        self._reporter = reporter
        self._wait = wait

    @cached_property
    def _tasks(self) -> list[str]:
        return self._store.tasks.ids("eval")

    def settle(self, step: int) -> bool:
        """Return False: every evaluation has ended."""
        return False

    def wait(self, step: int) -> None:
        """Do nothing: no evaluation is open."""

    def forget(self, step: int) -> None:
        """Do nothing: no evaluation is open."""

    def run(self, state: TrainState, version: WeightsVersion, rollout_id: str) -> None:
        """Evaluate by the settings of ``evaluation``; report ``val/accuracy``. Raises Stopped."""
        with self._reporter.timeline.phase("evaluation", step=state.step):
            self.ask(state.step, version, rollout_id)
            self._wait(partial(whole, self._store, rollout_id), "held-out tasks", weights_step=state.step)
        self.record(state.step, rollout_id)

    def ask(self, step: int, version: WeightsVersion, rollout_id: str) -> None:
        """Request responses of weights with ``step`` steps; on rank 0."""
        if self._context.rank:
            return
        config = self._context.config
        sampling, samples = evaluation_sampling(config, step), config.evaluation.samples
        self._store.rollouts.request(rollout_id, "eval", step, version, self._tasks, samples, sampling)

    def record(self, step: int, rollout_id: str, **more: float) -> None:
        """Report an evaluation that has ended, on rank 0; ``more``: metrics under ``val/``."""
        if self._context.rank:
            return
        event = self._store.evaluations.read(rollout_id)
        metrics, errors = event["metrics"], event["errors"]
        self._reporter.write(step, metrics | {f"val/{name}": value for name, value in more.items()})
        text = evaluation_text(metrics, event["right"], event["tasks"], self._context.config.evaluation)
        score = f", mean score {event['score']:.3f}" if event["graded"] and event["score"] is not None else ""
        without = f"; {errors} without a verdict" if errors else ""
        self._reporter.log(f"held-out accuracy at step {step}: {text}{score}{without}")
        if by_source := event.get("sources"):  # old events have no sources
            shown = ", ".join(f"{source} {share:.1%} (of {tasks})" for source, (share, tasks) in by_source.items())
            self._reporter.log(f"  by source: {shown}")


def evaluation_text(metrics: Mapping[str, float], right: int, tasks: int, config: EvaluationConfig) -> str:
    """Format the accuracy for users: ``45.2% ± 3.1% (avg@8 of 30 tasks, temperature 0.6), pass@8 70.0% ± 8.5%``."""
    n, how = config.samples, f"temperature {config.temperature:g}" if config.temperature else "greedy"

    def shown(name: str) -> str:
        error = metrics.get(f"{name}_se")
        return f"{metrics[name]:.1%}" + ("" if error is None else f" ± {error:.1%}")

    if n == 1:
        return f"{shown('val/accuracy')} ({right} of {tasks} tasks, {how})"
    return f"{shown('val/accuracy')} (avg@{n} of {tasks} tasks, {how}), pass@{n} {shown(f'val/pass@{n}')}"
