"""A reference that follows the actor (``reference.refresh``)."""

from __future__ import annotations

from megarl.config import Config
from megarl.learn.memory.phases import Phase
from megarl.train.inference.models import Models
from megarl.train.memory import PhaseMemory
from megarl.train.part import Part
from megarl.train.ranks import TrainState


class ReferenceRefresh(Part):
    """Copies the actor's weights to the reference at the start of a step, when a refresh is due."""

    def __init__(self, config: Config, models: Models, memory: PhaseMemory) -> None:
        self._refresh, self._models, self._memory = config.reference.refresh, models, memory

    def begin(self, state: TrainState) -> None:
        every = isinstance(self._refresh, int) and state.step % self._refresh == 0
        if (every or self._refresh == "every_iteration") and self._models.reference is not None:
            self._memory.enter(Phase.REFRESH)
            self._models.refresh_reference()
