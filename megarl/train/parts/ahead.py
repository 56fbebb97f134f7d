"""Waiting for groups requested ahead (``sync.max_staleness``) before a checkpoint or a weight update."""

from __future__ import annotations

from contextlib import suppress

from megarl.buffer.order.pacing import Pacing
from megarl.config import Config
from megarl.train.part import Part
from megarl.train.ranks import Stopped, TrainState
from megarl.train.rollout.rollouts import Rollouts


class DrainAhead(Part):
    """Waits after an update for the groups in flight. A checkpoint then finds them in the store, and no engine samples
    while its weights change."""

    def __init__(self, config: Config, rollouts: Rollouts) -> None:
        self._config, self._rollouts = config, rollouts

    def after_update(self, state: TrainState) -> None:
        if drains(self._config, state.step + 1):
            with suppress(Stopped):  # the step counts: its update is done
                self._rollouts.drain(state, weights_step=state.step + 1)


def drains(config: Config, step: int) -> bool:
    """True if groups requested ahead must be complete after ``step`` steps: a checkpoint or new weights come next."""
    interval = config.trainer.eval_interval or config.trainer.steps
    return Pacing.of(config.sync).publishes(step) or not (step % config.trainer.checkpoint_interval and step % interval)
