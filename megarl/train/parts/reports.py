"""Log lines about the job's responses."""

from __future__ import annotations

from megarl.buffer.store import Store
from megarl.config import Config
from megarl.core.text import TruncationWarning
from megarl.train.batch.samples import account_line
from megarl.train.part import Metrics, Part
from megarl.train.ranks import Reporter, RunContext, TrainState


class TruncationLine(Part):
    """Warns of a step with many truncated responses."""

    def __init__(self, config: Config, reporter: Reporter) -> None:
        self._warning, self._reporter = TruncationWarning(config.rollout.max_response_tokens), reporter

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        if (text := self._warning.warning(metrics)) is not None:
            self._reporter.log(f"step {state.step}: {text}")


class AccountLine(Part):
    """Logs at the end what happened to all sampled responses."""

    def __init__(self, context: RunContext, store: Store, reporter: Reporter) -> None:
        self._context, self._store, self._reporter = context, store, reporter

    def finish(self) -> None:
        if self._context.rank == 0:
            self._reporter.log(account_line(metrics for _, metrics in self._store.journal.steps()))
