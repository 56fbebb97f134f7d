"""A reference that follows the actor (``reference.refresh``)."""

from __future__ import annotations

from megarl.core.phases import Phase
from megarl.train.part import Part
from megarl.train.rank.state import TrainState
from megarl.train.update.models import Models
from megarl.train.update.turns import Turns


class ReferenceRefresh(Part):
    """Gives the reference the actor's weights at the start of a step where that is due."""

    def __init__(self, models: Models, turns: Turns) -> None:
        self._models, self._turns = models, turns

    def begin(self, state: TrainState) -> None:
        if self._models.refresh_due(state.step):
            self._turns.enter(Phase.REFRESH)
            self._models.refresh_reference()
