"""Rollouts that a trainer waits for: ids, weights, progress."""

from __future__ import annotations

from typing import NamedTuple

from megarl.buffer.store import Store
from megarl.core.schema import WeightsVersion


class Published(NamedTuple):
    """Weights published last."""

    version: WeightsVersion
    step: int
    """Number of training steps in these weights."""


class Awaited(NamedTuple):
    """Progress of a wait."""

    done: int
    total: int
    complete: bool


def whole(store: Store, rollout: str, *, awaiting: bool = False) -> Awaited:
    """Return a rollout's progress in groups; ``awaiting``: count groups that lack only late rewards as done."""
    done, total = store.rollouts.progress(rollout, awaiting=awaiting)
    return Awaited(done, total, done == total and store.rollouts.is_complete(rollout, awaiting=awaiting))


def rollout_id(step: int, extra: int = 0) -> str:
    """Return the id of a training rollout."""
    return f"train-{step:06d}" + (f"-{extra}" if extra else "")


def rollout_of(group_id: str) -> str:
    """Return the rollout id of a group."""
    return group_id.rpartition("/")[0]
