"""Exclusion of this machine's endpoint from the environment's proxies."""

from __future__ import annotations

from collections.abc import Mapping

HOSTS = ("127.0.0.1", "localhost")
NAMES = ("NO_PROXY", "no_proxy")
"""Both spellings are in use; most libraries prefer the lower-case one if both are set."""


def with_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``NO_PROXY`` under both names: the values of both, and this machine's hosts."""
    hosts = ",".join(environment.get(name, "") for name in NAMES).split(",")
    value = ",".join(dict.fromkeys(host.strip() for host in (*hosts, *HOSTS) if host.strip()))
    return dict.fromkeys(NAMES, value)
