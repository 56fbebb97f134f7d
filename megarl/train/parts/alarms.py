"""Alarms: what is wrong with a step though nothing failed, with causes to look at. A log line and a metric each."""

from __future__ import annotations

from megarl.config import Config
from megarl.core.metrics import records
from megarl.train.alarm_rules import RULES
from megarl.train.part import Metrics, Part
from megarl.train.ranks import Reporter, RunContext, TrainState


class Alarms(Part):
    """Tests each step's metrics by ``RULES``, on rank 0."""

    def __init__(self, config: Config, context: RunContext, reporter: Reporter) -> None:
        self._config, self._reporter, self._is_first = config, reporter, context.rank == 0
        self._path = context.run_dir / "metrics.jsonl"
        self._history: list[dict[str, float]] | None = None

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        if not self._is_first:
            return
        if self._history is None:
            steps = {one["step"]: one for one in records(self._path) if "timing_s/step" in one}
            self._history = [one for step, one in sorted(steps.items()) if step < state.step]
        now = dict(metrics)
        for rule in RULES:
            if (found := rule.test(self._config, self._history, now)) is not None:
                metrics[f"alarm/{rule.name}"] = found[0]
                self._reporter.log(f"alarm {rule.name}: step {state.step}: {found[1]}; look at {rule.look_at}")
        self._history = [*self._history, now][-self._config.alarms.window :]
