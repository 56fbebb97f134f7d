"""verl's settings as an experiment of megarl, with an account of each of verl's keys."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from megarl.config.load import compose
from megarl.config.verl.verl_rules import RULES, NoEffectError, NotMappedError
from megarl.config.verl.verl_source import VerlSource, needs_shell
from megarl.config.verl.verl_table import DEFAULTS, MAPPED, NO_EFFECT, UNMAPPED, MappedKey

_PRESETS = ("cispo", "grpo", "gspo", "ppo", "reinforce_pp", "reinforce_pp_baseline", "remax", "rloo")


@dataclass(frozen=True)
class ImportedKeys:
    """Result of an import: megarl's settings, and the given keys of verl's, each in exactly one of the three tables."""

    settings: dict[str, Any]
    """megarl's settings by full name."""
    mapped: dict[str, dict[str, Any]]
    """verl's key -> settings that it decides, alone or with other keys."""
    no_effect: dict[str, str]
    """verl's key -> reason why it changes nothing here."""
    unmapped: dict[str, str]
    """verl's key -> what to do instead."""

    @property
    def is_whole(self) -> bool:
        """True if no key was left out."""
        return not self.unmapped


def convert(source: VerlSource) -> ImportedKeys:
    """Return megarl's settings for verl's; verl's defaults count where a key is not given."""
    found = ImportedKeys({}, {}, {}, {})
    for key in [*source.values, *(key for key in DEFAULTS if key not in source.values)]:
        try:
            settings = _settings_of(key, source)
        except NoEffectError as reason:
            if key in source.values:
                found.no_effect[key] = str(reason)
        except NotMappedError as todo:
            found.unmapped[key] = str(todo)
            found.settings.update({name: found.settings.get(name, value) for name, value in todo.instead.items()})
        else:
            for name, value in settings.items():
                kept = found.settings.setdefault(name, value)
                assert kept == value, f"{key} writes {name} a second time"
            if key in source.values:
                found.mapped[key] = settings
    return found


def _settings_of(key: str, source: VerlSource) -> dict[str, Any]:
    value = source.get(key)
    row = row_of(key)
    if isinstance(row, str):
        raise NoEffectError(row)
    if row is None:
        raise NotMappedError("megarl does not know this key; see docs/settings.md")
    if not isinstance(row, MappedKey):
        if value in row.neutral:
            raise NoEffectError("off")
        raise NotMappedError(row.todo)
    if needs_shell(given := source.values.get(key)):
        raise NotMappedError(f"{given} needs a shell; give the variable as NAME=value, or set {row.ours}")
    try:
        return RULES[row.rule](key, row, source)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise NotMappedError(f"{key}={value!r}, or a key beside it, has no usable value ({error})") from error


def row_of(key: str) -> MappedKey | Any | str | None:
    """Return a key's row: a ``MappedKey``, an ``UnmappedKey``, the reason of no effect, or None if it is unknown.

    Full names come before patterns, longer patterns before shorter ones.
    """
    if key in MAPPED:
        return MAPPED[key]
    rest: dict[str, Any] = {**UNMAPPED, **NO_EFFECT}
    if key in rest:
        return rest[key]
    patterns = [pattern for pattern in rest if fnmatchcase(key, pattern)]
    parents = [name for name, row in MAPPED.items() if row.rule == "mapping" and key.startswith(f"{name}.")]
    if patterns and (not parents or patterns[0] != "*"):
        return rest[max(patterns, key=len)]
    return MAPPED[parents[0]] if parents else None


def experiment(found: ImportedKeys, head: str) -> str:
    """Return the YAML file of an experiment. ``head``: one line on its source."""
    name = found.settings.get("algorithm.name", "grpo")
    lines = [
        "# @package _global_",
        f"# {head}",
        *(f"# not imported: {key}: {todo}".replace("\n", " ") for key, todo in found.unmapped.items()),
        "defaults:",
        "  - override /parallel: tp1",
        f"  - override /algorithm: {name if name in _PRESETS else 'grpo'}",
        "  - _self_",
    ]
    return "\n".join(lines) + "\n" + yaml.safe_dump(nested(found.settings), sort_keys=False, width=120)


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by full name as nested mappings."""
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        *groups, last = name.split(".")
        branch = tree
        for group in groups:
            branch = branch.setdefault(group, {})
        branch[last] = {**value, **branch.get(last, {})} if isinstance(value, dict) else value
    return tree


def check_experiment_file(text: str, found: ImportedKeys) -> None:
    """Compose an experiment as ``megarl config`` would. Raises ConfigError as ``compose``."""
    given = [f"{name}=unread" for name in ("model.path", "taskset.train", "taskset.eval") if name not in found.settings]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experiment" / "imported_from_verl.yaml"
        path.parent.mkdir()
        path.write_text(text)
        compose(["experiment=imported_from_verl", *given], own=folder)
