"""Waiting for requests in flight before weights change, with ``sync.order=completion`` and ``sync.pause=wait``."""

from __future__ import annotations

from megarl.train.part import Part
from megarl.train.ranks import TrainState
from megarl.train.rollout.group_part import Awaited
from megarl.train.rollout.rollouts import Wait
from megarl.train.sync.weights import WeightSync


class Quiet(Part):
    """Waits until the engines have no request in flight."""

    def __init__(self, weights: WeightSync, wait: Wait) -> None:
        self._weights, self._wait = weights, wait

    def before_publish(self, state: TrainState) -> None:
        label = "requests that end before the weights change"
        with self._weights.quieting() as ended:
            self._wait(lambda: Awaited(ended(), 1, ended()), label, weights_step=state.step)
