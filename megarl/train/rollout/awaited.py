"""Rollouts that a trainer waits for: their ids, their weights, their progress."""

from __future__ import annotations

from typing import NamedTuple

from megarl.buffer.store import Store
from megarl.core.schema import WeightsVersion


class Published(NamedTuple):
    """Weights that were published last."""

    version: WeightsVersion
    step: int
    """Steps of training in them."""


class Awaited(NamedTuple):
    """Progress of what is waited for."""

    done: int
    total: int
    complete: bool


def whole(store: Store, rollout: str, *, awaiting: bool = False) -> Awaited:
    """Progress of a rollout, in groups; ``awaiting``: without the rewards that are to come."""
    done, total = store.rollouts.progress(rollout, awaiting=awaiting)
    return Awaited(done, total, done == total and store.rollouts.is_complete(rollout, awaiting=awaiting))


def rollout_id(step: int, extra: int = 0) -> str:
    """Id of a training rollout."""
    return f"train-{step:06d}" + (f"-{extra}" if extra else "")


def rollout_of(group_id: str) -> str:
    """Id of the rollout of a group."""
    return group_id.rpartition("/")[0]
