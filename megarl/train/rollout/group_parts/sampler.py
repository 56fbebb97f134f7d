"""Settings of the sampler for each group, beside temperature, length and seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config import Config
from megarl.train.rollout.group_part import GroupPart


class SpareAnswers(GroupPart):
    """Asks for answers beyond the size of a group (``rollout.spare``): those that end last are left out."""

    def __init__(self, config: Config) -> None:
        self._spare = config.rollout.spare

    def sampling(self) -> Mapping[str, Any]:
        return {"spare": self._spare}


class RecordedRouting(GroupPart):
    """Asks for the experts of each token (``rollout.routing_replay``)."""

    def sampling(self) -> Mapping[str, Any]:
        return {"routing": True}
