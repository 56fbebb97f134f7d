"""Turns of a trajectory for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.core.schema import FinishReason, Turn, WeightsSpan, WeightsVersion

VERSION = WeightsVersion(0, 1)


def one_turn(
    prompt: Sequence[int] | np.ndarray,
    response: Sequence[int] | np.ndarray,
    logp: Sequence[float] | np.ndarray | None = None,
    *,
    version: WeightsVersion = VERSION,
    finish_reason: FinishReason = "stop",
) -> tuple[Turn, Turn]:
    """A prompt and a response; log-probs are 0 unless given."""
    length = len(response)
    values = np.zeros(length, np.float32) if logp is None else np.asarray(logp, dtype=np.float32)
    return (
        Turn("user", np.asarray(prompt, dtype=np.int32)),
        Turn(
            "model",
            np.asarray(response, dtype=np.int32),
            follows=0,
            logp=values,
            spans=(WeightsSpan(0, length, version),),
            finish_reason=finish_reason,
        ),
    )
