"""Checks of overrides as typed, before hydra composes them, so that an error can name the nearest known key."""

from __future__ import annotations

import dataclasses
import difflib
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from megarl.config.algorithms import AlgorithmConfig, AnyAlgorithmConfig
from megarl.config.bounds import annotations_of
from megarl.config.hints import VERL, in_our_words
from megarl.config.schema import Config
from megarl.core.errors import ConfigError


def check_overrides(overrides: Sequence[str], folders: Sequence[Path]) -> None:
    """Check keys, and values of groups, against the schema and the files in ``folders`` (megarl's own first).

    Raises:
        ConfigError: an override is not ``key=value``, has an unknown key or file, or contradicts another.
    """
    for override in overrides:
        _check_override(override, folders)
    _check_given_once(overrides)


def check_experiment(overrides: Sequence[str]) -> None:
    """Raise ConfigError for ``taskset.train`` without an experiment, which would take the quickstart's settings."""
    given = {override.lstrip("+~").partition("=")[0]: override for override in overrides}
    if "taskset.train" in given and "experiment" not in given:
        raise ConfigError(
            f"{given['taskset.train']} without an experiment: the settings would be those of experiment=quickstart (a "
            "tiny model made from scratch, a warm start on its own tasks, short answers); add experiment=own for a "
            "model and rows of yours, or experiment=quickstart if you mean it"
        )


def force(override: str, folders: Sequence[Path]) -> str:
    """Return the override with ``++`` if no file names its key: hydra's tree lacks the schema's defaults."""
    key, _, _ = override.partition("=")
    return override if key in groups(folders) or override[0] in "+~" else "++" + override


def groups(folders: Sequence[Path]) -> set[str]:
    """Names of the groups of settings: the folders in megarl's own ``configs/``."""
    return {path.name for path in folders[0].iterdir() if path.is_dir()}


def grammar_fault(overrides: Sequence[str]) -> str | None:
    """Describe the first override that hydra's grammar rejects, with its value in quotes if that is a text; None if
    hydra can read all."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    for override in overrides:
        try:
            parser.parse_override(override)
        except HydraException as error:
            key, equals, value = override.partition("=")
            text = f"{override}: hydra cannot read it ({str(error).splitlines()[0]})"
            if not equals or value[:1] in ("{", "[", "'", '"'):
                return text
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            quoted = shlex.quote(f'{key}="{escaped}"')
            return (
                f"{text}; a value with characters such as = & ( ) goes in quotes, and those in the shell's: write "
                f"{quoted}"
            )
    return None


def nearest(name: str, known: Sequence[str]) -> str:
    """Return `` did you mean 'x'?`` for the known name that starts with ``name`` or is nearest to it, or ``''``."""
    longer = [each for each in known if each.startswith(name)]
    match = longer or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" did you mean {match[0]!r}?" if match else ""


def unknown(key: str, name: str, known: Sequence[str], where: str = "") -> ConfigError:
    """Return the error for an unknown setting ``key``; ``name`` is its part up to the first unknown word, ``where`` its
    source."""
    of_group = f"known: {', '.join(known)}"
    if (ours := in_our_words(key)) is not None:
        may_be_ours = "." in name and key not in VERL  # a name in one of our groups may be meant for another setting
        return ConfigError(f"{ours}; {of_group}" if may_be_ours else ours)
    return ConfigError(f"unknown setting {key!r}{where};{nearest(name, known)} {of_group}")


def check_setting(key: str, where: str = "", groups: Collection[str] = ()) -> None:
    """Raise ConfigError unless ``key`` is a setting, a group of them, or inside a free dict.

    ``where``: source of the key, for the error. ``groups``: hydra's groups, listed as known too.
    """
    cls: Any = Config
    seen: list[str] = []
    for part in key.split("."):
        if get_origin(cls) is dict and dataclasses.is_dataclass(get_args(cls)[1]):  # the part is a name, as a teacher's
            seen, cls = [*seen, part], get_args(cls)[1]
            continue
        cls = _dataclass_in(cls)
        if cls is None:
            return  # inside a free dict such as taskset.options
        names = [f.name for f in dataclasses.fields(cls)]
        if part not in names:
            known = [".".join([*seen, name]) for name in names]
            known += sorted({*groups}.difference(names)) if not seen else []  # several groups are settings too
            raise unknown(key, ".".join([*seen, part]), known, where)
        seen.append(part)
        cls = annotations_of(cls)[part]


def _check_given_once(overrides: Sequence[str]) -> None:
    """Raise ConfigError for a key with two values; hydra silently takes the last one."""
    given: dict[str, str] = {}
    for override in overrides:
        key, equals, value = override.lstrip("+").partition("=")
        if equals and given.setdefault(key, value) != value:
            raise ConfigError(f"{key}={given[key]} and {key}={value} are both given; leave one of them out")


def _check_override(override: str, folders: Sequence[Path]) -> None:
    key, equals, value = override.partition("=")
    key = key.lstrip("+~")
    if not equals and not override.startswith("~"):
        raise ConfigError(f"{override!r} is not an override; write key=value, e.g. trainer.steps=10")
    if key in groups(folders):
        found = sorted(path.stem for folder in folders for path in (folder / key).glob("*.yaml"))
        if "/" in value and any((folder / key / f"{value}.yaml").is_file() for folder in folders):
            raise ConfigError(
                f"{key}={value} is a part that files of configs/{key} share, no {key} of its own: name it in the "
                f"defaults of yours (docs/own_experiments.md), or take one of {', '.join(found)}"
            )
        if value not in found:
            raise ConfigError(f"no configs/{key}/{value}.yaml;{nearest(value, found)} there are {', '.join(found)}")
        return
    check_setting(key, groups=groups(folders))


def _dataclass_in(annotation: Any) -> Any:
    if annotation is AlgorithmConfig:
        return AnyAlgorithmConfig  # the algorithm's own settings are checked later, when all values are known
    if dataclasses.is_dataclass(annotation):
        return annotation
    return next((a for a in get_args(annotation) if dataclasses.is_dataclass(a)), None)
