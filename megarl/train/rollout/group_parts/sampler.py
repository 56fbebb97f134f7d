"""Sampler settings of each group, in addition to temperature, length and seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config import Config
from megarl.train.rollout.group_part import GroupPart


class SpareAnswers(GroupPart):
    """Requests more responses than the group size (``rollout.spare``); the last ones to end are dropped."""

    def __init__(self, config: Config) -> None:
        self._spare = config.rollout.spare

    def sampling(self) -> Mapping[str, Any]:
        return {"spare": self._spare}


class RecordedRouting(GroupPart):
    """Requests the experts chosen for each token (``rollout.routing_replay``)."""

    def sampling(self) -> Mapping[str, Any]:
        return {"routing": True}
