"""End of a trajectory and the reward that its workflow gives it."""

from __future__ import annotations

import math

from megarl.core.durable import without_surrogates
from megarl.core.schema import End, Reward
from megarl.explore.recording.values import recorded_reward
from megarl.explore.rewards import Verdict
from megarl.explore.rewards.verdict import MAX_REASON


class RecordedEnd:
    """Part of a ``RolloutModel``."""

    def __init__(self) -> None:
        self.cause: End | None = None
        """End that the workflow has named, or that the limit has made."""
        self.given: Verdict | None = None
        """Reward that the workflow has given, or that it has none."""
        self._closed = False

    def close(self) -> None:
        """Take nothing any more, of tasks that a workflow has left behind: the verdict would not have seen it."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the trajectory has ended")

    @property
    def is_given(self) -> bool:
        """True if the workflow has given the reward, or none."""
        return self.given is not None

    def finish(self, reward: Reward) -> None:
        """Give the trajectory this reward; the verifier is not asked. Raises ValueError after ``fail``."""
        self._check_open()
        if self.cause is not None and not self.cause.by_policy:
            raise ValueError(f"finish after fail: the trajectory has ended as {self.cause}, which has no reward")
        self.given = Verdict(recorded_reward(reward), verifier="workflow")

    def truncate(self) -> None:
        """End the trajectory for want of room; the reward is that of its last response. One that has failed stays so:
        an end by the policy would begin nothing again, and could be trained."""
        self._check_open()
        if self.cause is None or self.cause.by_policy:
            self.cause = End.TRUNCATED

    def fail(self, reason: str, cause: End = End.WORKFLOW_ERROR) -> None:
        """Give the trajectory no verdict: the status is ``error``. It begins again ``rollout.retries`` times."""
        self._check_open()
        assert not cause.by_policy, "a trajectory that the policy ended has a reward"
        self.cause = cause
        reason = without_surrogates(reason[:MAX_REASON])
        self.given = Verdict(Reward(math.nan, "error"), reason, verifier="workflow")
