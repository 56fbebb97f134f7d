"""Lengths derived from settings of the rollouts."""

from __future__ import annotations

from megarl.config.schema import RolloutConfig


def prompt_tokens(rollout: RolloutConfig) -> int:
    """Most tokens of a prompt: the setting, or the longest prompt found when the job was checked
    (``run/run_dir/prepare.py``)."""
    assert rollout.max_prompt_tokens is not None, "filled in before launch, see run/run_dir/prepare.py"
    return rollout.max_prompt_tokens


def context_tokens(rollout: RolloutConfig) -> int:
    """Most tokens of a trajectory: a prompt and its response, or all its turns."""
    return rollout.max_trajectory_tokens or prompt_tokens(rollout) + rollout.max_response_tokens
