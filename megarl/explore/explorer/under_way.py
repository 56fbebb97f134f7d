"""Samples that an explorer has in flight."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from megarl.buffer.store import Claim
from megarl.core.errors import WeightsPassed

log = logging.getLogger(__name__)


class SamplesUnderWay:
    """Counts samples in generation, at most ``capacity``; greedy answers are not counted.

    Samples of evaluations on reserved engines are counted separately, so that the other engines do not idle.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._shared = 0
        self._apart: dict[tuple[str, str], int] = {}
        """(group, token of its claim) -> samples."""

    @property
    def total(self) -> int:
        """Number of all samples in flight."""
        return self._shared + sum(self._apart.values())

    @property
    def free(self) -> int:
        """Number of further samples that may be requested."""
        return self._capacity - self._shared

    @property
    def evaluates(self) -> bool:
        """True while groups of evaluations may be claimed."""
        return sum(self._apart.values()) < self._capacity

    def begin(self, claims: Sequence[Claim], apart: Collection[str] = ()) -> None:
        """Count the samples of these groups; ``apart``: rollouts with reserved engines."""
        for claim in claims:
            if claim.rollout_id in apart:
                self._apart[claim.group_id, claim.token] = claim.num_samples
            else:
                self._shared += claim.num_samples

    def end(self, claim: Claim, samples: int = 1) -> None:
        """Subtract ended ``samples`` of a group."""
        if (key := (claim.group_id, claim.token)) in self._apart:
            self._apart[key] -= samples
        else:
            self._shared -= samples

    def suspend(self, samples: int) -> None:
        """Subtract ``samples`` while they are suspended."""
        self._shared -= samples

    def forget(self) -> None:
        """Reset all counts, after all samples were cancelled."""
        self._shared, self._apart = 0, {}

    @contextmanager
    def until_passed(self, claims: Sequence[Claim]) -> Iterator[None]:
        """Suppress WeightsPassed in the body: the trainer has cancelled these groups' evaluation, so no engine has its
        weights."""
        try:
            yield
        except* WeightsPassed as passed:
            log.warning("%d groups of %s are given up: %s", len(claims), claims[0].rollout_id, passed.exceptions[0])
        finally:
            for claim in claims:
                self._apart.pop((claim.group_id, claim.token), None)
