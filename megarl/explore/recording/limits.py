"""Length limits of the turns of a trajectory."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from megarl.config.lengths import context_tokens, prompt_tokens
from megarl.config.schema import RolloutConfig


@dataclass(frozen=True)
class TokenLimits:
    """Token limits; ``sys.maxsize`` for no limit."""

    prompt: int = sys.maxsize
    """Tokens of a prompt (``rollout.max_prompt_tokens``)."""
    response: int = sys.maxsize
    """Tokens of a response (``rollout.max_response_tokens``)."""
    trajectory: int = sys.maxsize
    """Tokens of a line of turns, the prompt included (``rollout.max_trajectory_tokens``)."""

    @classmethod
    def of(cls, rollout: RolloutConfig) -> TokenLimits:
        """Return the limits of the settings."""
        return cls(prompt_tokens(rollout), rollout.max_response_tokens, context_tokens(rollout))
