"""Environments that a model acts in, turn by turn."""

from megarl.core.errors import ConfigError
from megarl.core.user_file import import_file
from megarl.explore.environments.episode import Episode, EpisodeThreads
from megarl.explore.environments.guess import Guess
from megarl.explore.environments.types import Environment, EnvironmentFault, MakeEnvironment, Observation

ENVIRONMENTS: dict[str, MakeEnvironment] = {"guess": Guess}
"""By the names of ``rollout.environment``."""

__all__ = [
    "ENVIRONMENTS",
    "Environment",
    "EnvironmentFault",
    "Episode",
    "EpisodeThreads",
    "MakeEnvironment",
    "Observation",
    "get",
]


def get(name: str) -> MakeEnvironment:
    """Environment of ``rollout.environment``: one of ``ENVIRONMENTS``, or ``make`` of a user's file.

    Raises ConfigError where there is none.
    """
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    if not name.endswith(".py"):
        raise ConfigError(
            f"rollout.environment={name!r} is not there; there are {', '.join(ENVIRONMENTS)}, or give a Python file "
            "(.py)"
        )
    wanted = "make(task), which begins an episode"
    make = getattr(import_file(name, "rollout.environment", wanted), "make", None)
    if not callable(make):
        raise ConfigError(f"rollout.environment={name} has no {wanted}")
    found: MakeEnvironment = make
    return found
