"""Settings that had other names: a run of an earlier version keeps its ``resolved.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED = {
    "algorithm.bootstrap_cut": "algorithm.bootstrap_truncated",
    "taskset.unjudgeable": "taskset.unverifiable",
    "trainer.guard": "trainer.update_filter",
}
"""Name of an earlier version: name of today."""


def with_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``values`` in which settings have the names of today."""
    found = dict(values)
    for old, new in RENAMED.items():
        (group, name), other = old.split("."), new.split(".")[1]
        if isinstance(inner := found.get(group), Mapping) and name in inner and other not in inner:
            found[group] = {other if key == name else key: value for key, value in inner.items()}
    return found
