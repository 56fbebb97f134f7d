"""Checks of a trajectory before it is trained on."""

from __future__ import annotations

import math

from megarl.core.schema import Trajectory, Turn

LARGEST_LOGP = 1e-3
"""Largest log-prob that counts as a rounding error above 0."""
LARGEST_SCORE = 1e30
"""Bound of a verdict's score: advantages are float32, at most 3.4e38."""


def check_trajectory(trajectory: Trajectory, vocab_size: int) -> str | None:
    """Return the reason why a trajectory cannot be trained on, or None. Every turn must be whole and follow an earlier
    one; the model must have written at least one, but not the first."""
    turns = trajectory.turns
    if not any(turn.author == "model" for turn in turns):
        return "no turn is the model's"
    for i, turn in enumerate(turns):
        reason = _order_fault(turn, i) or _token_fault(turn, vocab_size)
        if turn.author == "model":
            reason = reason or _logp_fault(turn) or _span_fault(turn)
        elif turn.logp is not None or turn.spans:
            reason = reason or "it has log-probs or versions, which are a model's"
        if reason is not None:
            return f"turn {i} ({turn.author}): {reason}"
    return None


def _order_fault(turn: Turn, i: int) -> str | None:
    if not -1 <= turn.follows < i:
        return f"it follows turn {turn.follows}, which is not an earlier one"
    if turn.author == "model" and turn.follows < 0:
        return "nothing comes before it that could predict its first token"
    return None


def _token_fault(turn: Turn, vocab_size: int) -> str | None:
    if len(turn) == 0:
        return "it has no tokens"
    smallest, largest, *_ = turn.token_bounds
    if smallest < 0 or largest >= vocab_size:
        return f"it has ids {smallest}..{largest}, the vocabulary has {vocab_size}"
    return None


def _logp_fault(turn: Turn) -> str | None:
    logp = turn.logp
    if logp is None or len(logp) != len(turn):
        return f"it has {0 if logp is None else len(logp)} log-probs for {len(turn)} tokens"
    bounds = turn.token_bounds
    if not float(bounds.logp) <= LARGEST_LOGP or math.isinf(float(bounds.logp)):
        return f"{bounds.logp} at token {bounds.at} is not a log-probability"
    return None if turn.finish_reason is not None else "it has no finish reason"


def _span_fault(turn: Turn) -> str | None:
    end, version = 0, None
    for span in turn.spans:
        where = f"span {span.start}..{span.end}"
        if span.start != end or span.end <= span.start:
            return f"{where} does not follow on token {end}"
        if version is not None and span.version < version:
            return f"{where} has weights {span.version}, older than {version} of the span before it"
        end, version = span.end, span.version
    return None if end == len(turn) else f"spans cover {end} of {len(turn)} tokens"
