"""Check that the best checkpoint of a run is kept (``trainer.keep_best``)."""

from __future__ import annotations

import math
from pathlib import Path

from megarl.config import Config
from megarl.core.metrics import records
from megarl.train.part import Metrics, Part
from megarl.train.ranks import Reporter, RunContext, TrainState
from megarl.weights.checkpoint.training.manifest import finished, steps_of


class BestKept(Part):
    """Compares the checkpoints on disk, on rank 0, with those that were there before and with the run's metrics."""

    def __init__(self, config: Config, context: RunContext, reporter: Reporter) -> None:
        self._metric, self._is_first, self._reporter = config.trainer.keep_best, context.rank == 0, reporter
        self._run_dir = context.run_dir
        self._seen: set[int] = set()
        self._lost: int | None = None

    def begin(self, state: TrainState) -> None:
        if not self._is_first or self._metric is None:
            return
        here = set(steps_of(finished(self._run_dir / "checkpoints")))
        self._seen = {step for step in self._seen | here if step <= state.step}
        best = best_of(self._run_dir, self._metric, self._seen)
        if best is not None and best not in here:
            self._lost = best
            self._seen.discard(best)
            self._reporter.log(
                f"alarm best: step {state.step + 1}: the checkpoint of step {best} is gone, which has the best "
                f"{self._metric} of the run; look at what removes checkpoints"
            )

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        if self._lost is not None:
            metrics["alarm/best"], self._lost = float(self._lost), None


def best_of(run_dir: Path, metric: str, steps: set[int]) -> int | None:
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
