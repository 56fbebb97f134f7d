"""Settings of earlier versions: a run that was started then keeps its ``resolved.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megarl.core.config.algorithms import owners, settings_of

RENAMED = {
    "algorithm.bootstrap_cut": "algorithm.bootstrap_truncated",
    "taskset.unjudgeable": "taskset.unverifiable",
    "trainer.guard": "trainer.update_filter",
}
"""Name in an earlier version: name today."""


def upgraded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``values`` with today's names, without settings that its algorithm never read."""
    found = dict(values)
    for old, new in RENAMED.items():
        (group, name), other = old.split("."), new.split(".")[1]
        if isinstance(inner := found.get(group), Mapping) and name in inner and other not in inner:
            found[group] = {other if key == name else key: value for key, value in inner.items()}
    if isinstance(inner := found.get("algorithm"), Mapping):
        own = {field.name for field in fields(settings_of(str(inner.get("name"))))}
        found["algorithm"] = {key: value for key, value in inner.items() if key in own or not owners(key)}
    return found
