"""Requests of agents to the endpoint on this machine, which no proxy of the environment may take."""

from __future__ import annotations

from collections.abc import Mapping

HOSTS = ("127.0.0.1", "localhost")
NAMES = ("NO_PROXY", "no_proxy")
"""Libraries read either; where both are set, most take the one in small letters."""


def with_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """``NO_PROXY`` with the hosts of this machine, under both names and with all that either had."""
    hosts = ",".join(environment.get(name, "") for name in NAMES).split(",")
    value = ",".join(dict.fromkeys(host.strip() for host in (*hosts, *HOSTS) if host.strip()))
    return dict.fromkeys(NAMES, value)
