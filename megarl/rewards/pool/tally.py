"""One-line progress of scoring for the terminal: recent failures and long waits."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megarl.core.text import Repeats
from megarl.rewards.verdict import FAILURES

EVENT = "reward_failures"
"""Kind of the store's event with such a line, which the trainer shows while it waits."""
WINDOW = 200
"""Number of recent verdicts that a line covers."""
EVERY_S = 10.0
"""Minimum seconds between two lines."""
LONG_S = 60.0
"""Seconds of waiting for a verdict after which a line is logged."""
NEWEST_CHARACTERS = 300


class Tally:
    """Counts tries to score an answer. ``line`` is rate-limited, and None while there is nothing to report.

    A failure is printed once, and again when twice as many of the recent verdicts have failed.

    Args:
        subject: First word of a line.
        verdict: Noun for what is waited for.
    """

    def __init__(
        self, now: Callable[[], float] = time.monotonic, subject: str = "reward", verdict: str = "verdict"
    ) -> None:
        self._now, self._subject, self._verdict = now, subject, verdict
        self._recent: deque[str] = deque(maxlen=WINDOW)
        self._newest = ""
        self._failed = False
        """True if a verdict has failed since the last line."""
        self._repeats, self._told = Repeats(), 0
        self._waiting: dict[int, float] = {}
        self._numbers = 0
        self._told_at = float("-inf")
        self._told_wait_at = float("-inf")

    def add(self, status: str, message: str | None) -> None:
        self._recent.append(status)
        if status in FAILURES:
            self._failed = True
            self._newest = " ".join((message or status).split())[:NEWEST_CHARACTERS]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count an answer as waiting for a verdict while the block runs."""
        self._numbers = number = self._numbers + 1
        self._waiting[number] = self._now()
        try:
            yield
        finally:
            del self._waiting[number]

    def line(self) -> str | None:
        """Return a line for the terminal, or None."""
        now = self._now()
        if now - self._told_at < EVERY_S:
            return None
        parts = [*self._failures(), *self._waits(now)]
        if not parts:
            return None
        self._told_at = now
        return f"{self._subject}: " + "; ".join(parts)

    def _failures(self) -> Iterator[str]:
        if self._failed:
            self._failed = False
            counts = Counter(status for status in self._recent if status in FAILURES)
            if not self._repeats.is_new(self._newest) and counts.total() < 2 * self._told:
                return
            self._told = counts.total()
            kinds = ", ".join(f"{status} {count}" for status, count in counts.most_common())
            recent = f"{counts.total()} of the last {len(self._recent)} {self._verdict}s"
            yield f"{recent} failed ({kinds}); newest: {self._newest}"

    def _waits(self, now: float) -> Iterator[str]:
        oldest_s = now - next(iter(self._waiting.values()), now)
        if oldest_s >= LONG_S and now - self._told_wait_at >= LONG_S:
            self._told_wait_at = now
            yield f"{len(self._waiting)} answers wait for a {self._verdict}, one of them for {oldest_s:.0f} s"
