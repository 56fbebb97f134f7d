"""End of a trajectory and the reward given by its workflow."""

from __future__ import annotations

import math

from megarl.core.schema import End, Reward
from megarl.core.text import without_surrogates
from megarl.explore.recording.recorded_values import recorded_reward
from megarl.rewards import Verdict
from megarl.rewards.verdict import MAX_REASON


class RecordedEnd:
    """End of one trajectory, and its verdict if the workflow gives one."""

    def __init__(self) -> None:
        self.cause: End | None = None
        """End named by the workflow or caused by a limit."""
        self.given: Verdict | None = None
        """Verdict given by the workflow."""
        self._closed = False

    def close(self) -> None:
        """Refuse further turns, from tasks that a workflow left running: the verdict would not include them."""
        self._closed = True

    def check_open(self) -> None:
        """Raise RuntimeError once the trajectory is closed."""
        if self._closed:
            raise RuntimeError("the trajectory has ended")

    def finish(self, reward: Reward) -> None:
        """Record the workflow's reward. Raises ValueError after ``fail``."""
        self.check_open()
        if self.cause is not None and not self.cause.by_policy:
            raise ValueError(f"finish after fail: the trajectory has ended as {self.cause}, which has no reward")
        self.given = Verdict(recorded_reward(reward), verifier="workflow")

    def truncate(self) -> None:
        """Name the end ``truncated``. A failed trajectory stays failed: truncation would prevent its retry and allow
        training on it."""
        self.check_open()
        if self.cause is None or self.cause.by_policy:
            self.cause = End.TRUNCATED

    def go_on(self) -> None:
        """Clear the end ``truncated``: the workflow has continued from another context."""
        if self.cause is End.TRUNCATED:
            self.cause = None

    def fail(self, reason: str, cause: End) -> None:
        """Record that there is no verdict: the status is ``error``."""
        self.check_open()
        assert not cause.by_policy, "a trajectory that the policy ended has a reward"
        self.cause = cause
        reason = without_surrogates(reason[:MAX_REASON])
        self.given = Verdict(Reward(math.nan, "error"), reason, verifier="workflow")
