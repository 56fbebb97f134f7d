"""Engines that are left out of updates: they keep the weights that an evaluation is made with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megarl.core.schema import WeightsVersion
from megarl.train.sync.fleet import EngineFleet


class KeptEngines:
    """Engines of a job that keep their version while the others are given newer ones. On rank 0; others have none."""

    def __init__(self) -> None:
        self._urls: list[str] = []
        """Engines of the last publication."""
        self._lost: Callable[[], None] = lambda: None
        self.versions: Mapping[str, str] = {}
        """URL of each engine that keeps a version -> that version."""

    def keep(self, count: int, version: WeightsVersion, lost: Callable[[], None]) -> list[str]:
        """Leave the first ``count`` engines, to which this version was published, out of updates until ``update_all``;
        return their URLs. At least one engine is not left out.

        ``megarl scale`` ends the last ones first: an evaluation goes on until none but its own engines would be left.

        Args:
            lost: Called where one of them has not got these weights any more, before all take newer ones.
        """
        self._lost = lost
        left_out = self._urls[: min(count, len(self._urls) - 1)]
        self.versions = dict.fromkeys(left_out, str(version))
        return left_out

    def update_all(self) -> None:
        """Leave no engine out of the next publication."""
        self.versions = {}

    def behind(self, fleet: EngineFleet, version: str) -> list[int]:
        """Numbers of the engines to publish ``version`` to (``EngineFleet.behind``): of those that keep another one
        none, or all where one of them has lost it or no other engine is left."""
        urls = self._urls = fleet.urls
        behind = fleet.behind(version, self.versions)
        if self.versions and (not self.versions.keys() < set(urls) or any(urls[i] in self.versions for i in behind)):
            self.update_all()
            self._lost()
            behind = fleet.behind(version, self.versions)
        return behind
