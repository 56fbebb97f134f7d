"""End of a trajectory and the reward that its workflow gives it."""

from __future__ import annotations

import math

from megarl.core.schema import End, Reward
from megarl.core.text import without_surrogates
from megarl.explore.recording.recorded_values import recorded_reward
from megarl.rewards import Verdict
from megarl.rewards.verdict import MAX_REASON


class RecordedEnd:
    """End of one trajectory, and its verdict where the workflow gives one."""

    def __init__(self) -> None:
        self.cause: End | None = None
        """End that the workflow has named, or that the limit has made."""
        self.given: Verdict | None = None
        """Reward that the workflow has given, or that it has none."""
        self._closed = False

    def close(self) -> None:
        """Take nothing any more, of tasks that a workflow has left behind: the verdict would not have seen it."""
        self._closed = True

    def check_open(self) -> None:
        """Raise RuntimeError once the trajectory is closed."""
        if self._closed:
            raise RuntimeError("the trajectory has ended")

    def finish(self, reward: Reward) -> None:
        """Keep a reward of the workflow's own. Raises ValueError after ``fail``."""
        self.check_open()
        if self.cause is not None and not self.cause.by_policy:
            raise ValueError(f"finish after fail: the trajectory has ended as {self.cause}, which has no reward")
        self.given = Verdict(recorded_reward(reward), verifier="workflow")

    def truncate(self) -> None:
        """Name the end ``truncated``. A trajectory that has failed stays failed: an end by the policy would not begin
        again, and could be trained."""
        self.check_open()
        if self.cause is None or self.cause.by_policy:
            self.cause = End.TRUNCATED

    def go_on(self) -> None:
        """Forget the end ``truncated``: the workflow has gone on from another context."""
        if self.cause is End.TRUNCATED:
            self.cause = None

    def fail(self, reason: str, cause: End) -> None:
        """Keep that there is no verdict: the status is ``error``."""
        self.check_open()
        assert not cause.by_policy, "a trajectory that the policy ended has a reward"
        self.cause = cause
        reason = without_surrogates(reason[:MAX_REASON])
        self.given = Verdict(Reward(math.nan, "error"), reason, verifier="workflow")
