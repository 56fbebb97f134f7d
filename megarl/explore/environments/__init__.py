"""Environments in which a model acts, turn by turn. Each is imported only if a job uses it."""

from importlib import import_module
from pathlib import Path

from megarl.config.schema import RolloutConfig
from megarl.core.errors import ConfigError
from megarl.core.imports import import_file
from megarl.explore.environments.types import (
    Environment,
    EnvironmentFault,
    Episode,
    EpisodeThreads,
    MakeEnvironment,
    Observation,
)

ENVIRONMENTS = {
    "guess": "Guess",
    "gymnasium": "Gymnasium",
    "harbor": "Harbor",
    "openenv": "OpenEnv",
    "reasoning_gym": "ReasoningGym",
    "verifiers": "Verifiers",
}
"""Value of ``rollout.environment``, a module here -> its class."""
CALL_S = 30.0
"""Seconds added to the limits of a call's parts, for starting and killing processes."""

__all__ = [
    "ENVIRONMENTS",
    "Environment",
    "EnvironmentFault",
    "Episode",
    "EpisodeThreads",
    "MakeEnvironment",
    "Observation",
    "asks_verifier",
    "check",
    "get",
]


def check(rollout: RolloutConfig, run_dir: Path) -> None:
    """Raise ConfigError unless the environment exists, its options are valid, and its first observations have room.
    Calls the environment's ``check(options)`` and ``check_run_dir(run_dir)``, if defined."""
    make = get(rollout.environment)
    if (own := getattr(make, "check", None)) is not None:
        own(rollout.options)
    if (own_run_dir := getattr(make, "check_run_dir", None)) is not None:
        own_run_dir(run_dir)
    longest = getattr(make, "longest_call_s", None)
    if longest is not None and (wanted := longest(rollout.options) + CALL_S) > rollout.environment_timeout_s:
        raise ConfigError(
            f"rollout.environment_timeout_s={rollout.environment_timeout_s:g} is too short for a call of "
            f"rollout.environment={rollout.environment}, which may take {wanted:g} s; set it to "
            "that, or lower the seconds in rollout.options"
        )
    if hasattr(make, "reset") and rollout.max_prompt_tokens is None:
        raise ConfigError(
            "rollout.max_prompt_tokens is not set: the longest prompt of the rows would leave no room for the first "
            f"observations of rollout.environment={rollout.environment}; set it to what both have together"
        )


def asks_verifier(make: MakeEnvironment) -> bool:
    """Return True if an environment's ``step`` takes the score of each response."""
    return bool(getattr(make, "asks_verifier", False))


def get(name: str) -> MakeEnvironment:
    """Return the environment ``name``: one of ``ENVIRONMENTS``, or ``make`` of a user's file.

    Raises ConfigError if it does not exist.
    """
    if name in ENVIRONMENTS:
        own: MakeEnvironment = getattr(import_module(f"{__name__}.{name}"), ENVIRONMENTS[name])
        return own
    if not name.endswith(".py"):
        raise ConfigError(
            f"rollout.environment={name!r} does not exist; choose one of {', '.join(ENVIRONMENTS)}, or give a Python "
            "file (.py)"
        )
    wanted = "make(task), which begins an episode"
    make = getattr(import_file(name, "rollout.environment", wanted), "make", None)
    if not callable(make):
        raise ConfigError(f"rollout.environment={name} has no {wanted}")
    found: MakeEnvironment = make
    return found
