"""Engines on the trainer's devices (``rollout.placement=colocated``)."""

from __future__ import annotations

from megarl.buffer.store import Store
from megarl.train.memory import PhaseMemory
from megarl.train.part import Part, StepData
from megarl.train.ranks import Ranks, RunContext, TrainState
from megarl.train.rollout.rollouts import Rollouts
from megarl.train.sync.colocated import ColocatedEngines
from megarl.train.sync.publish import WeightPublisher


class Colocation(Part):
    """Makes engines and models share the devices in turn; ``PhaseMemory`` starts and ends the engines' turns."""

    def __init__(
        self,
        context: RunContext,
        store: Store,
        ranks: Ranks,
        links: WeightPublisher | None,
        memory: PhaseMemory,
        rollouts: Rollouts,
    ) -> None:
        assert links is not None, "files are for engines of other programs"
        memory.engines = ColocatedEngines(context, store, ranks, links)
        self._rollouts = rollouts

    def before_batch(self, state: TrainState, data: StepData) -> None:
        """Wait for groups requested ahead: the engines free their memory before a model computes."""
        self._rollouts.drain(state, weights_step=state.step)
