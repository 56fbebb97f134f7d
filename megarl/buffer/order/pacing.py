"""Pacing: steps that publish weights, groups requested then, and groups that a step may take.

The lag of a token in step s (steps done before) is s minus the steps in the weights that sampled it; a group's
staleness is the largest lag of its tokens. With k = ``sync.max_staleness``, i = ``sync.interval``:

* **Admission order.** Step s trains on the groups of number s. A publication of the weights of t steps requests groups
  up to number t + k. All are whole before the next publication, so the lag of step s is exactly ``lag_of_step(s)``.
* **Completion order.** Groups that no step has used are at most (k + 1) · Q, Q of them for a step. A group requested
  with the weights of t steps has the deadline t + k: no later step may train on it. A step takes ready groups in the
  order in which they ended, as ``choose`` allows.

Proof for completion order. Let c(j) be the number of unused groups with a deadline up to s + j, and m the picks left in
step s. The invariant is c(j) <= m + j·Q for all j >= 0. A publication adds only groups with the deadline t + k, where c
is at most (k + 1) · Q. A pick lowers m by one, and c(j) by one if the group's deadline is at most s + j; ``choose``
allows it only if all other c(j) are below their bounds. A step that ends has m = 0, and the next begins with Q: the
same inequalities, one index on. So no group is left over after its deadline. The group with the earliest deadline is
always allowed, so a step whose groups have all ended never waits. A dropped group returns its pick when another group,
with no earlier deadline, replaces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config.job import SyncConfig


@dataclass(frozen=True)
class Pacing:
    """The settings k and i, which determine the pacing."""

    max_staleness: int = 0
    interval: int = 1

    @staticmethod
    def of(config: SyncConfig) -> Pacing:
        return Pacing(config.max_staleness, config.interval)

    def publishes(self, step: int) -> bool:
        """Return True if weights are published after ``step`` steps."""
        return step % self.interval == 0

    def published(self, step: int) -> int:
        """Return the steps in the last published weights when ``step`` steps are done."""
        return step - step % self.interval

    def asked(self, step: int) -> int:
        """Return the number of steps whose groups have been requested when ``step`` steps are done."""
        return self.published(step) + self.max_staleness + 1

    def deadline(self, published: int) -> int:
        """Return the last step, from 0, that may train on a group requested with the weights of ``published`` steps."""
        return published + self.max_staleness

    def lag_of_step(self, step: int) -> int:
        """Return the lag of a step's groups in admission order: they are sampled after the first publication that
        requests them."""
        ahead = self.max_staleness + 1 - self.interval
        return step - self.interval * max(0, (step - ahead) // self.interval)


def choose(ready: Sequence[int], waiting: Sequence[int], step: int, picks: int, each: int) -> list[int]:
    """Choose groups for a step in completion order: at most ``picks`` indices into ``ready``; see the module.

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
        before = range(deadline - step)  # the other groups due before it must all find a place
        if all(room[j] > 0 for j in before):
            chosen.append(number)
            for j in before:
                room[j] -= 1
    return chosen
