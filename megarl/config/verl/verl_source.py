"""verl's settings as given: read from YAML, a script or a command line, into one flat mapping of full names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megarl.config.verl.shell_reader import read_script
from megarl.config.verl.verl_table import DEFAULTS, FALLBACKS, MEGATRON
from megarl.core.errors import ConfigError

_PROGRAM = re.compile(r"(?:[\w.]+\.|\S*/)?(?:main_\w+|fully_async_main)(?:\.py)?")
_KNOWN_PROGRAMS = ("main_ppo", "main_dapo")
_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w@]*(?:[./][\w@]+)*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\{(?:oc\.select:\s*)?(\.*[\w.]+)\s*(?:,\s*([^${}]*?)\s*)?\}")
OWN_FILES = ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer")
"""Configurations of verl itself; their values are ``verl_table.DEFAULTS``."""


@dataclass(frozen=True)
class VerlSource:
    """verl's settings by full name."""

    values: dict[str, Any]
    """Settings as given, with verl's interpolations resolved."""
    rows: int | None = None
    """Rows of ``data.train_files``, for settings that are counted in epochs."""
    notes: list[str] = field(default_factory=list)
    """Lines that the reader could not follow."""
    config_name: str = "ppo_trainer"
    """File that the given settings change."""

    def get(self, key: str) -> Any:
        """Return a setting's value, or verl's default (also for a value that needs a shell), or None."""
        if key in self.values and not needs_shell(self.values[key]):
            return self.values[key]
        return DEFAULTS.get(key, FALLBACKS.get(key.rpartition(".")[2]))

    def is_given(self, *keys: str) -> bool:
        """Return True if one of the settings was given."""
        return any(key in self.values for key in keys)

    @property
    def is_megatron(self) -> bool:
        """True if verl would train with Megatron-Core, not with FSDP."""
        strategy = self.values.get("actor_rollout_ref.actor.strategy")
        if strategy is not None:
            return bool(strategy == "megatron")
        return "megatron" in self.config_name or any(key.startswith(f"{MEGATRON}.") for key in self.values)


def needs_shell(value: Any) -> bool:
    """Return True for a text with a variable or a command that was not replaced."""
    return isinstance(value, str) and ("$" in value or "`" in value)


def read_source(
    path: str | None, words: Sequence[str], environment: Mapping[str, str], rows: int | None = None
) -> VerlSource:
    """Read verl's settings.

    ``path``: a YAML file, or a shell script; None takes ``words`` as the command line. Else ``words`` are variables of
    the script (``NAME=value``) and further settings (``a.b=value``). ``environment``: values of HOME, PWD and USER.

    Raises:
        ConfigError: the file cannot be read or starts no program of verl's.
    """
    if path is None:
        return _resolved(*_of_words(list(words), Path()), rows=rows)
    file = Path(path)
    try:
        text = file.read_text()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text ({error}); give verl's YAML file or shell script") from error
    variables = [word for word in words if re.fullmatch(r"[A-Za-z_]\w*=.*", word, re.DOTALL)]
    extra = [word for word in words if word not in variables]
    if file.suffix in (".yaml", ".yml"):
        given, notes, name = _of_words([*variables, *extra], file.parent)
        return _resolved({**_of_yaml(text, path), **given}, notes, name, rows=rows)
    known = {name: environment[name] for name in ("HOME", "PWD", "USER") if name in environment}
    script = read_script(text, known | dict(word.split("=", 1) for word in variables), list(extra))
    started = [words for words in script.commands if any(_PROGRAM.fullmatch(word) for word in words)]
    if not started:
        programs = sorted({word for words in script.commands for word in words if word.startswith("verl.")})
        found = f"; it starts {', '.join(programs)}" if programs else ""
        raise ConfigError(
            f"{path} starts no verl.trainer.main_ppo{found}; give a script of main_ppo, or its arguments after --"
        )
    given, notes, name = _of_words(started[-1], file.parent)
    if len(started) > 1:
        notes.append(f"{path} starts {len(started)} programs of verl's; the last one is imported")
    return _resolved(given, [*script.notes, *notes], name, rows=rows)


def _of_words(words: list[str], folder: Path) -> tuple[dict[str, Any], list[str], str]:
    """Return (settings, notes, name of the configuration) of the words of a command line."""
    if len(words) == 1 and " " in words[0]:
        words = shlex.split(words[0])  # the whole command line in quotes
    values: dict[str, Any] = {}
    notes: list[str] = []
    options = {"config-name": "ppo_trainer", "config-path": ""}
    start = next((i for i, word in enumerate(words) if _PROGRAM.fullmatch(word)), -1)
    if start >= 0 and (program := words[start].removesuffix(".py")) and not program.endswith(_KNOWN_PROGRAMS):
        values["-m"] = program
    rest = iter(words[start + 1 :])
    for word in rest:
        if found := re.fullmatch(r"--(config-name|config-path)(?:=(.*))?", word):
            options[found[1]] = found[2] if found[2] is not None else next(rest, "")
        elif found := _OVERRIDE.fullmatch(word):
            name = found[2].replace("/", ".")
            values |= {f"~{name}": True} if found[1] == "~" else dict(_flat(name, _value(found[3])))
        elif word.startswith("~"):
            values[word] = True
        elif word.strip():
            notes.append(f"the word {word} is no setting; it is left out")
    name = options["config-name"].removesuffix(".yaml")
    if name not in OWN_FILES:
        file = next((f for f in _places(folder, options["config-path"], name) if f.is_file()), None)
        if file is None:
            values["--config-name"] = name
        else:
            values = {**_of_yaml(file.read_text(), str(file)), **values}
    return values, notes, name


def _places(folder: Path, given: str, name: str) -> Iterator[Path]:
    for base in (Path(given), folder / given, folder / "config", folder):
        yield base / f"{name}.yaml"


def _of_yaml(text: str, path: str) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML file: {error}; give verl's configuration") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds {type(tree).__name__}, not settings; give verl's configuration")
    return dict(_flat("", tree))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (full name, value) of every setting in nested mappings; an empty mapping is a value."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), item)
    else:
        yield name, _number(value) if isinstance(value, str) else value


def _value(text: str) -> Any:
    """Return the value of an override, read as YAML; a text that is no YAML stays."""
    try:
        return yaml.safe_load(text.replace("\\'", "'").replace('\\"', '"')) if text else text
    except yaml.YAMLError:
        return text


def _number(text: str) -> Any:
    """Return a number written as 1e-6, which YAML takes for a text, or the text."""
    return float(text) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", text) else text


def _resolved(given: dict[str, Any], notes: list[str], name: str, rows: int | None) -> VerlSource:
    """Replace verl's references to other settings, ``${a.b}`` and ``${oc.select:a.b,default}``."""
    values = dict(given)
    for _ in range(8):
        changed = {key: _replaced(key, value, values) for key, value in values.items() if _refers(value)}
        if all(values[key] == value for key, value in changed.items()):
            break
        values |= changed
    return VerlSource(values, rows, notes, name)


def _refers(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _replaced(key: str, value: str, values: Mapping[str, Any]) -> Any:
    if whole := _REFERENCE.fullmatch(value):
        return _referred(key, whole, values)
    return _REFERENCE.sub(lambda found: str(_referred(key, found, values)), value)


def _referred(key: str, found: re.Match[str], values: Mapping[str, Any]) -> Any:
    """Return the value of the setting that a reference names, or its default; the reference itself if unknown."""
    dots = len(found[1]) - len(found[1].lstrip("."))
    parents = key.split(".")[:-dots] if dots else []
    name = ".".join([*parents, found[1].lstrip(".")])
    if name in values:
        return values[name]
    below = {other.removeprefix(f"{name}."): value for other, value in values.items() if other.startswith(f"{name}.")}
    if below or name in DEFAULTS:
        return below or DEFAULTS[name]
    if found[2] is not None:
        return _value(found[2])
    return None if found[0].startswith("${oc.select:") else found[0]
