"""Pacing: when weights are published, which groups are asked for then, and which of them a step may take.

The lag of a token in step s (steps done before) is s minus the steps in the weights that sampled it; a group's
staleness is the largest lag of its tokens. With k = ``sync.max_staleness``, i = ``sync.interval``:

* **Admission order.** Step s trains on the groups of number s. A publication of the weights of t steps asks for those
  up to number t + k. All are whole before the next publication, so the lag of step s is exactly ``lag_of_step(s)``.
* **Completion order.** Groups that no step has used are at most (k + 1) · Q, Q of them for a step. A group that was
  asked for with the weights of t steps has the deadline t + k: no step after that one may train on it. A step takes
  ready groups in the order in which they ended, as ``choose`` allows.

Proof for completion order. Write c(j) for the number of unused groups with a deadline up to s + j, and m for the picks
that step s has left. The invariant is c(j) <= m + j·Q for all j >= 0. A publication adds groups of the deadline t + k
alone, and there c is at most (k + 1) · Q. A pick takes one from m and one from c(j) where the group's deadline is up
to s + j; ``choose`` allows it only where all other c(j) are below their bounds. A step that ends has m = 0, and the
next begins with Q: the same inequalities, one index on. So no group is left over after its deadline. The group with
the earliest deadline is always allowed, so a step whose groups have all ended never waits. A group that a step drops
gives its pick back when another takes its place, whose deadline is no earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config.job import SyncConfig


@dataclass(frozen=True)
class Pacing:
    """The settings k and i, of which everything else follows."""

    max_staleness: int = 0
    interval: int = 1

    @staticmethod
    def of(config: SyncConfig) -> Pacing:
        return Pacing(config.max_staleness, config.interval)

    def publishes(self, step: int) -> bool:
        """Return True if weights are published after ``step`` steps."""
        return step % self.interval == 0

    def published(self, step: int) -> int:
        """Steps in the weights that were published last when ``step`` steps are done."""
        return step - step % self.interval

    def asked(self, step: int) -> int:
        """Number of steps whose groups have been asked for when ``step`` steps are done."""
        return self.published(step) + self.max_staleness + 1

    def deadline(self, published: int) -> int:
        """Last step, counted from 0, that may train on a group that was asked for with the weights of ``published``
        steps."""
        return published + self.max_staleness

    def lag_of_step(self, step: int) -> int:
        """Lag of the groups of a step in admission order: they are sampled after the first publication that asks for
        them."""
        ahead = self.max_staleness + 1 - self.interval
        return step - self.interval * max(0, (step - ahead) // self.interval)


def choose(ready: Sequence[int], waiting: Sequence[int], step: int, picks: int, each: int) -> list[int]:
    """Choose groups for a step in completion order: numbers into ``ready``, at most ``picks``; see the module.

    Time: proportional to len(ready) · (k + 1).

    Args:
        ready: Deadlines of the groups that a step could take, in the order in which they ended.
        waiting: Deadlines of the other groups that no step has used.
        step: Steps done before.
        picks: Groups that the step still takes.
        each: Groups that every later step takes.
    """
    last = max([step, *ready, *waiting])
    room = [picks + j * each for j in range(last - step + 1)]
    for deadline in (*ready, *waiting):
        for j in range(max(deadline - step, 0), len(room)):
            room[j] -= 1
    chosen: list[int] = []
    for number, deadline in enumerate(ready):
        if len(chosen) == picks:
            break
        before = range(deadline - step)  # the others that are due before it must all find a place
        if all(room[j] > 0 for j in before):
            chosen.append(number)
            for j in before:
                room[j] -= 1
    return chosen
