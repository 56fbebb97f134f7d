"""Checks of ``rollout.options`` for environments that have settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from megarl.core.errors import ConfigError


def refuse(name: str, value: Any, rule: str) -> NoReturn:
    """Raise ConfigError for an option."""
    raise ConfigError(f"rollout.options.{name}={value!r} {rule}")


def checked(
    environment: str, options: Mapping[str, Any], known: Mapping[str, Any], needed: Mapping[str, Any] | None = None
) -> None:
    """Raise ConfigError for an unknown option, a wrong type, or a missing required option.

    Args:
        known: Name -> its type, or a union of types.
        needed: Name of each required option -> an example.
    """
    for name, value in options.items():
        if name not in known:
            refuse(name, value, f"is no option of rollout.environment={environment}, which has {', '.join(known)}")
        if not isinstance(value, known[name]) or (isinstance(value, bool) and known[name] is not bool):
            kind = getattr(known[name], "__name__", str(known[name]))
            refuse(name, value, f"must be a {kind} for rollout.environment={environment}")
    for name, example in (needed or {}).items():
        if not options.get(name):
            raise ConfigError(
                f"rollout.options.{name} is not set, which rollout.environment={environment} needs; set it to such as "
                f"{example}"
            )
