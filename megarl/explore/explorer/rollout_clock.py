"""Times of a rollout: generation, rewards, and both at once."""

from __future__ import annotations

import time
from collections.abc import Callable

from megarl.core.metrics import Timeline

COUNTS = ("groups", "samples", "greedy", "prompt_tokens", "response_tokens", "retries", "restarts")
SEGMENT_COUNTS = ("resumed_tokens", "replay_diverged")
"""Recorded tokens of earlier claims that were taken, and those that were not."""
SPARE_COUNTS = ("spare_cut", "spare_replaced")
"""Trajectories that were cut because their group was whole, and those left out of it for an end without a reward."""


class RolloutClock:
    """Seconds during which a rollout had generation under way, rewards under way, and both; and what it counted."""

    def __init__(
        self,
        rollout_id: str = "",
        timeline: Timeline | None = None,
        now: Callable[[], float] = time.monotonic,
        generates: Callable[[int], None] = lambda by: None,
    ) -> None:
        """``generates``: called too with each change of the samples in generation."""
        self._generates = generates
        self._now = now
        self._timeline = timeline
        self._rollout_id = rollout_id
        self._began: dict[str, float] = {}
        self._active = {"generation": 0, "reward": 0}
        self._last = now()
        self._seconds = {"generation_s": 0.0, "reward_s": 0.0, "overlap_s": 0.0}
        self.counts = dict.fromkeys((*COUNTS, *SEGMENT_COUNTS, *SPARE_COUNTS), 0)

    def change(self, phase: str, by: int) -> None:
        """``by`` more (or fewer) samples are in ``phase``: generation or reward."""
        self._account()
        if phase == "generation":
            self._generates(by)
        before, after = self._active[phase], self._active[phase] + by
        self._active[phase] = after
        if before == 0 < after:
            self._began[phase] = time.time()
        if after == 0 < before and self._timeline is not None:
            began = self._began[phase]
            self._timeline.add(phase, began, time.time() - began, rollout=self._rollout_id)

    def metrics(self) -> dict[str, float]:
        """Seconds and counts so far."""
        self._account()
        return {**self._seconds, **{name: float(count) for name, count in self.counts.items()}}

    def _account(self) -> None:
        now = self._now()
        passed, self._last = now - self._last, now
        generating, scoring = self._active["generation"] > 0, self._active["reward"] > 0
        self._seconds["generation_s"] += passed * generating
        self._seconds["reward_s"] += passed * scoring
        self._seconds["overlap_s"] += passed * (generating and scoring)
