"""Settings against those that a run directory was made with. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config import Config, load_resolved, to_dict

SHOWN = 8
HARMLESS = ("run.name", "run.host", "run.port", "run.shutdown_grace_s", "rollout.nodes", "store.outage_s", "trainer.trackers")
"""Settings that change nothing of what a run computes or where it lies."""


class Change(NamedTuple):
    setting: str
    old: Any
    new: Any


def changes(old: Mapping[str, Any], new: Mapping[str, Any], where: str = "") -> Iterator[Change]:
    """Where two trees of settings differ."""
    for key in dict.fromkeys([*old, *new]):
        before, after, name = old.get(key), new.get(key), f"{where}.{key}" if where else key
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from changes(before, after, name)
        elif before != after:
            yield Change(name, before, after)


def described(changed: Iterable[Change]) -> str:
    """``trainer.seed was 1, now 2, …``."""
    texts = [f"{c.setting} was {c.old}, now {c.new}" for c in changed]
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more


def changes_since_last_start(config: Config, run_dir: Path) -> list[Change]:
    """What differs from the settings of the run's last start and matters; [] when it never started.

    Raises:
        ConfigError: ``resolved.json`` cannot be read.
    """
    resolved = run_dir / "resolved.json"
    if not resolved.is_file():
        return []
    found = changes(to_dict(load_resolved(resolved)), to_dict(config))
    return [change for change in found if change.setting not in HARMLESS and not change.setting.startswith("cluster.")]


def has_checkpoints(run_dir: Path) -> bool:
    """Whether a run in this directory has anything to lose: a finished checkpoint, of its warm start too."""
    return any((run_dir / "checkpoints").rglob("state.json"))
