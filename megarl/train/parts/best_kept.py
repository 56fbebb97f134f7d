"""Check that the best checkpoint of a run is kept (``trainer.keep_best``)."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

from megarl.config import Config
from megarl.core.metrics import records
from megarl.train.part import Metrics, Part
from megarl.train.ranks import Reporter, RunContext, TrainState
from megarl.weights.checkpoint.training.manifest import finished, steps_of


class BestKept(Part):
    """Compares the checkpoints on disk, on rank 0, with those that were there a step before."""

    def __init__(self, config: Config, context: RunContext, reporter: Reporter) -> None:
        self._metric, self._is_first, self._reporter = config.trainer.keep_best, context.rank == 0, reporter
        self._run_dir = context.run_dir
        self._here: frozenset[int] = frozenset()
        """Steps of the checkpoints at the last look."""
        self._lost: int | None = None

    def begin(self, state: TrainState) -> None:
        if not self._is_first or self._metric is None:
            return
        before, self._here = self._here, frozenset(steps_of(finished(self._run_dir / "checkpoints")))
        known = {step for step in before | self._here if step <= state.step}
        if not before - self._here or (best := best_of(self._run_dir, self._metric, known)) in (None, *self._here):
            return
        self._lost = best
        self._reporter.log(
            f"alarm best: step {state.step + 1}: the checkpoint of step {best} is gone, which has the best "
            f"{self._metric} of the checkpoints; look at what removes them"
        )

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        if self._lost is not None:
            metrics["alarm/best"], self._lost = float(self._lost), None


def best_of(run_dir: Path, metric: str, steps: Collection[int]) -> int | None:
    """Return the earliest step with the best value: the smallest of a loss, the largest of another metric; None without
    one. Of several values of a step the last counts."""
    values = {
        int(one["step"]): float(one[metric])
        for one in records(run_dir / "metrics.jsonl")
        if one["step"] in steps and math.isfinite(one.get(metric, math.nan))
    }
    if not values:
        return None
    best = (min if metric.endswith("loss") else max)(values.values())
    return min(step for step, value in values.items() if value == best)
