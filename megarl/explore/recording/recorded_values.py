"""Checks of values recorded by workflows: an invalid value fails one trajectory, not the explorer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, get_args

import numpy as np

from megarl.core.schema import Author, Reward, plain
from megarl.core.text import without_surrogates
from megarl.explore.recording.turn_log import TurnLog
from megarl.rewards.verdict import MAX_NAME, MAX_PARTS, NO_VERDICT

LARGEST_LIMIT = 2**31 - 1


def recorded_ids(author: Author, token_ids: Sequence[int] | np.ndarray, largest: int) -> np.ndarray:
    """Return a copy of a turn's token ids, int32 [T]. Raises TypeError or ValueError for invalid ids."""
    if author == "model" or author not in get_args(Author):
        others = ", ".join(name for name in get_args(Author) if name != "model")
        raise ValueError(f"a turn that a workflow writes has one of the authors {others}, got {author!r:.60}")
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise TypeError(f"token ids must be a row of integers, got {ids.dtype} {ids.shape}")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= largest:
        raise ValueError(f"token ids must lie between 0 and {largest}, got {ids.min()} to {ids.max()}")
    return ids.astype(np.int32)


def recorded_reward(reward: Reward) -> Reward:
    """Return a workflow's reward with plain floats. Raises TypeError or ValueError for values that the store cannot
    keep."""
    if not isinstance(reward, Reward):
        raise TypeError(f"finish takes a Reward(score, status, parts), got {reward!r:.60}")
    if reward.status not in NO_VERDICT and not math.isfinite(reward.score):
        raise ValueError(f"the reward {reward.score} with the status {reward.status} must be finite")
    if len(reward.parts) > MAX_PARTS:
        raise ValueError(f"a reward has {len(reward.parts)} parts; at most {MAX_PARTS} are kept")
    for name, value in reward.parts.items():
        if not isinstance(name, str) or len(name) > MAX_NAME or name != without_surrogates(name):
            raise ValueError(f"the reward part {name!r:.60} needs a name of up to {MAX_NAME} characters of valid text")
        if not isinstance(plain(value), Real) or not math.isfinite(value):
            raise ValueError(f"the reward part {name!r:.60} must be a finite number, got {value!r:.60}")
    parts = {name: float(value) for name, value in reward.parts.items()}
    return Reward(float(reward.score), reward.status, parts)


class NoRoom(Exception):
    """A response was requested when the model's turns had used up the trajectory's room."""


def recorded_limit(max_tokens: Any) -> int | None:
    """Return the most tokens of a response as an int. Raises ValueError for values that an engine would refuse."""
    if max_tokens is None:
        return None
    if not isinstance(max_tokens, Integral) or max_tokens < 1:
        raise ValueError(f"generate takes max_tokens of 1 or more, a whole number, got {max_tokens!r:.40}")
    return min(int(max_tokens), LARGEST_LIMIT)


def check_request(log: TurnLog, after: int, limit: int) -> None:
    """Raise NoRoom or ValueError for a response that cannot follow a turn, or that an engine would refuse."""
    if log.turns[after].author == "model":
        raise ValueError("a response follows a response; add a message between them")
    tokens = log.length(after)
    if not tokens:
        raise ValueError("a response follows a prompt of one token or more")
    if tokens >= limit and any(log.turns[i].author == "model" for i in log.line(after)):
        raise NoRoom(f"no room for a response (rollout.max_trajectory_tokens={limit})")
    if tokens >= limit:
        raise ValueError(
            f"a prompt of {tokens} tokens leaves no room for a response; shorten it, or set "
            f"rollout.max_trajectory_tokens above its {limit}"
        )
