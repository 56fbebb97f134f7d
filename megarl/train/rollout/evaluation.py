"""Trainer side of an evaluation: request, wait, report; also in parallel to training.

The explorer's side is ``held_out.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

from megarl.buffer.order.draws import evaluation_sampling
from megarl.buffer.store import Store
from megarl.config.schema import EvaluationConfig
from megarl.core.schema import WeightsVersion
from megarl.engines.fleet import EngineRow, Fleet, Key
from megarl.train.ranks import Ranks, Reporter, RunContext, TrainState
from megarl.train.rollout.evaluation_check import EvaluationCheck
from megarl.train.rollout.group_part import Awaited, whole
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

    def __init__(
        self, context: RunContext, store: Store, reporter: Reporter, wait: Wait, check: EvaluationCheck | None = None
    ) -> None:
        self._check = check
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
            gap = None if self._check is None else self._check.greedy_gap(rollout_id)
        self.record(state.step, rollout_id, gap)

    def ask(self, step: int, version: WeightsVersion, rollout_id: str) -> None:
        """Request responses of weights with ``step`` steps; on rank 0."""
        if self._context.rank:
            return
        config = self._context.config
        sampling, samples = evaluation_sampling(config, step), config.evaluation.samples
        self._store.rollouts.request(rollout_id, "eval", step, version, self._tasks, samples, sampling)

    def record(self, step: int, rollout_id: str, gap: float | None = None, **more: float) -> None:
        """Report an evaluation that has ended, and its alarms, on rank 0.

        Args:
            gap: ``EvaluationCheck.greedy_gap``; None if unknown.
            more: Metrics under ``val/``.
        """
        if self._context.rank:
            return
        event = self._store.evaluations.read(rollout_id)
        metrics, errors = event["metrics"], event["errors"]
        alarms = self._alarms(step, rollout_id, event, gap)
        checked = {} if gap is None else {"check/greedy": gap}
        self._reporter.write(step, metrics | checked | alarms | {f"val/{name}": value for name, value in more.items()})
        text = evaluation_text(metrics, event["right"], event["tasks"], self._context.config.evaluation)
        score = f", mean score {event['score']:.3f}" if event["graded"] and event["score"] is not None else ""
        without = f"; {errors} without a verdict" if errors else ""
        self._reporter.log(f"held-out accuracy at step {step}: {text}{score}{without}")
        if by_source := event.get("sources"):  # old events have no sources
            shown = ", ".join(f"{source} {share:.1%} (of {tasks})" for source, (share, tasks) in by_source.items())
            self._reporter.log(f"  by source: {shown}")

    def _alarms(self, step: int, rollout_id: str, event: Mapping[str, Any], gap: float | None) -> dict[str, float]:
        if self._check is None:
            return {}
        found, most = self._check.alarms(rollout_id, step, event), self._context.config.alarms.greedy
        if gap is not None and most is not None and gap > most:
            found["eval-sampling"] = (
                f"tokens of greedy answers are {gap:.3g} nats less likely than the likeliest, above "
                f"alarms.greedy={most:g}; look at the sampling settings that reach the engine"
            )
        for name, text in found.items():
            self._reporter.log(f"alarm {name}: evaluation of step {step}: {text}")
        return {f"alarm/{name}": 1.0 for name in found}


def evaluation_text(metrics: Mapping[str, float], right: int, tasks: int, config: EvaluationConfig) -> str:
    """Format the accuracy for users: ``45.2% ± 3.1% (avg@8 of 30 tasks, temperature 0.6), pass@8 70.0% ± 8.5%``."""
    n, how = config.samples, f"temperature {config.temperature:g}" if config.temperature else "greedy"

    def shown(name: str) -> str:
        error = metrics.get(f"{name}_se")
        return f"{metrics[name]:.1%}" + ("" if error is None else f" ± {error:.1%}")

    if n == 1:
        return f"{shown('val/accuracy')} ({right} of {tasks} tasks, {how})"
    return f"{shown('val/accuracy')} (avg@{n} of {tasks} tasks, {how}), pass@{n} {shown(f'val/pass@{n}')}"


class OpenEvaluation(NamedTuple):
    """An evaluation that was requested and has not been reported."""

    rollout_id: str
    step: int
    """Number of training steps in its weights."""
    version: WeightsVersion
    engines: Sequence[Key] = ()
    """Engines that keep its weights; on rank 0."""


class EvaluationMeanwhile:
    """Runs at most one evaluation, on engines that keep its weights. Every rank makes the same calls.

    Only these engines have the weights. If one dies, the responses are dropped and the current weights are evaluated
    instead, so no evaluation mixes two versions.
    """

    def __init__(
        self, context: RunContext, store: Store, ranks: Ranks, reporter: Reporter, evaluation: Evaluation, wait: Wait
    ) -> None:
        self._context = context
        self._store = store
        self._ranks = ranks
        self._reporter = reporter
        self._evaluation = evaluation
        self._wait = wait
        self._open: OpenEvaluation | None = None
        self._lost = False
        """True if an engine of the evaluation has lost the weights; on rank 0."""
        self.due = False
        """True if an evaluation was cancelled, so that the current weights must be evaluated."""

    @property
    def is_open(self) -> bool:
        """True while engines keep weights that are being evaluated."""
        return self._open is not None

    def run(self, state: TrainState, version: WeightsVersion, rollout_id: str) -> None:
        """Evaluate the weights published last; between two steps, return without waiting. Raises Stopped."""
        between = 0 < state.step < self._context.config.trainer.steps
        if not (between and self.begin(state.step, version, rollout_id)):
            self._evaluation.run(state, version, rollout_id)

    def begin(self, step: int, version: WeightsVersion, rollout_id: str) -> bool:
        """Request an evaluation of the weights published last. Return False, without a request, if no engine can skip
        updates."""
        self.due = False
        engines = [] if self._context.rank else self._hold(version, rollout_id)
        if not self._ranks.agree(self._context.rank != 0 or bool(engines)):
            return False
        self._open = OpenEvaluation(rollout_id, step, version, [row.key for row in engines])
        self._evaluation.ask(step, version, rollout_id)
        return True

    def _hold(self, version: WeightsVersion, rollout_id: str) -> list[EngineRow]:
        engines = Fleet(self._store.engines.own()).to_hold(self._context.config.trainer.eval_engines, version)
        self._store.engines.hold([row.key for row in engines], rollout_id)
        return engines

    def settle(self, step: int) -> bool:
        """Report the open evaluation if it has ended, after ``step`` steps; return ``due``."""
        if self._open is not None and self._ranks.agree(self._context.rank != 0 or self._look().complete):
            self._end(step)
        return self.due

    def wait(self, step: int) -> None:
        """Wait until no evaluation is open. Raises Stopped."""
        if self._open is None:
            return
        with self._reporter.timeline.phase("evaluation", step=step):
            self._wait(self._look, f"held-out tasks of step {self._open.step}", weights_step=step)
        self._end(step)

    def forget(self, step: int) -> None:
        """Cancel the open evaluation, after a rollback of the job and the store to step ``step``."""
        if self._open is not None:
            self.due = self._open.step < step  # a later evaluation is repeated at its step
        self._open, self._lost = None, False
        self._free()

    def _look(self) -> Awaited:
        if not self._lost and self._has_lost_one():
            self._give_up()
        return Awaited(0, 0, True) if self._lost else self._answers()

    def _has_lost_one(self) -> bool:
        """True if an engine has lost the weights, is to leave, or is needed for training."""
        assert self._open is not None
        rows = {row.key: row for row in self._store.engines.own()}
        holding = [rows[key] for key in self._open.engines if key in rows]
        keep = [row.is_present and row.has == self._open.version and bool(row.holds_for) for row in holding]
        return len(holding) < len(self._open.engines) or not all(keep)

    def _free(self) -> None:
        if self._context.rank == 0:
            self._store.engines.free()

    def _answers(self) -> Awaited:
        assert self._open is not None
        return whole(self._store, self._open.rollout_id)

    def _end(self, step: int) -> None:
        assert self._open is not None
        (rollout_id, of, *_), self._open = self._open, None
        self.due = not self._ranks.agree(not self._lost)
        self._lost = False
        self._free()
        if not self.due:
            self._evaluation.record(of, rollout_id, steps_meanwhile=float(step - of))

    def _give_up(self) -> None:
        """Cancel the evaluation unless it has ended: its engines have, or soon get, other weights."""
        if self._open is None or self._answers().complete:
            return
        self._lost = True
        self._store.evaluations.withdraw(self._open.rollout_id)
        self._reporter.event("evaluation_lost", {"step": self._open.step, "rollout_id": self._open.rollout_id})
        self._reporter.log(
            f"the evaluation of step {self._open.step} is given up: an engine that had its weights for it is gone; "
            "weights of a later step are evaluated instead"
        )
