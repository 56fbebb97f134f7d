"""Compose settings with hydra, convert them strictly into the dataclasses, and check their bounds.

Rules that need a model, a grid or a machine are called by ``run/checks/job.py``.

hydra joins files and overrides; only this module decides which keys and values are allowed, so that an error can name
the nearest known key.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from megarl.config.algorithms import AlgorithmConfig, check_owners, settings_of
from megarl.config.bounds import Bound, annotations_of, bound_of, number_text
from megarl.config.hub import with_snapshots
from megarl.config.overrides import check_overrides, check_setting, force, grammar_fault, nearest, unknown
from megarl.config.schema import Config, FromScratchConfig, ModelConfig, TeacherConfig
from megarl.config.taskset import SourceConfig, by_name
from megarl.core.durable import write_text
from megarl.core.errors import ConfigError, masked_text


class Number(NamedTuple):
    """A setting that has a number, and the bound in its type."""

    name: str
    value: float
    bound: Bound | None


def validate(config: Config) -> None:
    """Raise ConfigError naming an invalid setting, its value and the allowed values."""
    for number in numbers(config):
        _check_number(number, config)
    _check_texts(config)


def numbers(group: Any, where: str = "") -> Iterator[Number]:
    """Yield every number in a dataclass and its nested dataclasses; owners of other free dicts check theirs."""
    kind: Any = type(group)
    hints = annotations_of(kind, bounds=True)
    for field in fields(group):
        name, value = where + field.name, getattr(group, field.name)
        inner = value if isinstance(value, dict) else {}
        for key, item in inner.items():
            if is_dataclass(item):
                yield from numbers(item, f"{name}.{key}.")
        if is_dataclass(value):
            yield from numbers(value, name + ".")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield Number(name, value, bound_of(hints[field.name]))


def _check_number(number: Number, config: Config) -> None:
    name, value, bound = number
    if bound is None or bound.admits(value):
        return
    usual = Config(model=ModelConfig(from_scratch=FromScratchConfig()), algorithm=type(config.algorithm)())
    defaults = {n.name: n.value for n in numbers(usual)}
    fix = f"the default is {number_text(defaults[name])}" if name in defaults else "leave it out for none"
    finite = "" if math.isfinite(value) else "a finite number, "
    raise ConfigError(f"{name}={number_text(value)} must be {finite}{bound}; {fix}")


def _check_texts(config: Config) -> None:
    name = config.run.name
    if not name.strip() or name.startswith(".") or "/" in name or not name.isprintable():
        raise ConfigError(
            f"run.name={name!r} must be one plain name, since runs/<name> is the run's directory; "
            "set it to a word such as my-run (another place is run.dir)"
        )
    for setting, text in (
        ("run.dir", config.run.dir),
        ("model.path", config.model.path),
        ("run.host", config.run.host),
    ):
        if not text.strip():
            raise ConfigError(f"{setting} is empty; give it a value or leave it out")
    masked = masked_text(config.store.url)
    if masked != config.store.url:
        raise ConfigError(
            f"store.url={masked} holds a password, which would be written to resolved.json; leave it out and "
            "set PGPASSWORD or ~/.pgpass, or export the whole URL as MEGARL_STORE_URL and set "
            "store.url=env://MEGARL_STORE_URL"
        )
    _check_teachers(config.teachers)
    for split in ("train", "eval"):
        _check_sources(f"taskset.{split}", getattr(config.taskset, split))


def _check_teachers(teachers: Mapping[str, TeacherConfig]) -> None:
    for name, teacher in teachers.items():
        if not (name.isascii() and name.isidentifier()):
            raise ConfigError(
                f"teachers: a teacher is called {name!r}; take a name of letters, digits and '_' that begins with a "
                "letter, which settings and metrics can have"
            )
        if (teacher.path is None) == (teacher.url is None):
            given = "neither" if teacher.path is None else "both"
            raise ConfigError(
                f"teachers.{name} has {given} of path and url; set teachers.{name}.path to an HF checkpoint, or "
                f"teachers.{name}.url to a vLLM server's http://HOST:PORT/v1"
            )


def _check_sources(setting: str, sources: str | Mapping[str, SourceConfig]) -> None:
    if isinstance(sources, str):
        return
    if not sources:
        raise ConfigError(f"{setting}={{}} names no file; give a file, or {{NAME: {{path: FILE}}}}")
    for name in sources:
        if not re.fullmatch(r"[\w-]+", name):
            raise ConfigError(
                f"{setting}: a source is called {name!r}; take a name of letters, digits, '_' and '-', which "
                "task ids and metrics can have"
            )


def config_dir() -> Path:
    """Return the ``configs/`` folder of the checkout, or its copy in the wheel."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parent / "configs", package / "_configs"):
        if (folder / "train.yaml").is_file():
            return folder
    raise ConfigError(f"no configs/train.yaml beside {package.parent} or in {package}; reinstall megarl")


def config_dirs(own: str | os.PathLike[str] | None = None) -> list[Path]:
    """Return ``configs/``, then the user's folder with further files of its groups.

    Raises:
        ConfigError: the folder does not exist, or one of its files has the name of a file of megarl.
    """
    ours = config_dir()
    if own is None:
        return [ours]
    folder = Path(own).resolve()
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {own}: no such directory; give one with files such as experiment/mine.yaml")
    for path in sorted(folder.rglob("*.yaml")):
        if (ours / path.relative_to(folder)).exists():
            raise ConfigError(
                f"--config-dir {own}: {path.relative_to(folder)} is also the name of a file of megarl's; rename it"
            )
    return [ours, folder]


@contextmanager
def hydra_at(folders: Sequence[Path]) -> Iterator[None]:
    """Set up hydra to find files in these folders."""
    from hydra import initialize_config_dir
    from hydra._internal.hydra import Hydra
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_dir(str(folders[0]), version_base="1.3"):
        if len(folders) > 1:
            search_path = GlobalHydra.instance().config_loader().get_search_path()
            for folder in folders[1:]:
                search_path.prepend("user", f"file://{folder}", anchor="schema")
            GlobalHydra.instance().clear()  # each loader reads its search path once, at construction
            Hydra.create_main_hydra2("app", search_path)
        yield


def compose(overrides: Sequence[str], config_name: str = "train", own: str | os.PathLike[str] | None = None) -> Config:
    """Compose ``configs/<config_name>.yaml`` with hydra overrides such as ``experiment=quickstart trainer.steps=5``.

    Hub names of models in the local cache become paths there. ``own``: a folder with further files of the groups
    (``experiment/mine.yaml``).

    Raises:
        ConfigError: an unknown key (with the nearest known one), a missing mandatory value, or a value of the wrong
            type or out of bounds.
    """
    from hydra import compose as hydra_compose
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    folders = config_dirs(own)
    check_overrides(overrides, folders)
    try:
        with hydra_at(folders):
            tree = hydra_compose(config_name, [force(o, folders) for o in overrides])
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=False)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"the settings could not be composed: {grammar_fault(overrides) or error}") from error
    assert isinstance(plain, dict)
    taskset = plain.get("taskset") or {}
    for split in ("train", "eval"):
        if isinstance(files := taskset.get(split), list):
            taskset[split] = by_name(f"taskset.{split}", files)
    config: Config = from_dict(Config, {str(k): v for k, v in plain.items()})
    missing = sorted(_missing(to_dict(config)))
    if missing:
        raise ConfigError(
            f"no value for {', '.join(missing)}; set it in a configs/experiment file or as {missing[0]}=..."
        )
    if left := sorted(name for name, value in _texts(to_dict(config)) if "${" in value):
        raise ConfigError(f"{left[0]} holds an unresolved ${{...}}; give its value")
    validate(config)
    for name in config.run.allow_changes:
        check_setting(name, " in run.allow_changes")
    return with_snapshots(config)


def from_dict(cls: Any, values: Mapping[str, Any], where: str = "") -> Any:
    """Build dataclass ``cls`` from plain ``values``, strictly.

    Raises:
        ConfigError: ``cls`` has no such key, or its annotation does not allow the value.
    """
    names = [f.name for f in dataclasses.fields(cls)]
    hints = annotations_of(cls)
    for key in values:
        if key not in names:
            raise unknown(where + key, where + key, [f"{where}{n}" for n in names])
    return cls(**{k: _convert(hints[k], v, where + k) for k, v in values.items()})


def _convert(annotation: Any, value: Any, where: str) -> Any:
    if annotation is Any:
        return value
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        errors = []
        for option in get_args(annotation):
            try:
                return _convert(option, value, where)
            except ConfigError as error:
                errors.append(str(error))
        raise ConfigError(errors[0] if len(errors) == 1 else f"{where}={value!r} fits none of: {'; '.join(errors)}")
    if dataclasses.is_dataclass(annotation):
        if isinstance(value, Mapping):
            return from_dict(_class_of(annotation, value), value, where + ".")
        raise ConfigError(f"{where}={value!r} must be a group of settings")
    if annotation is type(None):
        if value is None:
            return None
        raise ConfigError(f"{where}={value!r} must be null")
    if origin is Literal:
        if value in get_args(annotation):
            return value
        allowed = [str(a) for a in get_args(annotation)]
        raise ConfigError(
            f"{where}={value!r} is not one of {', '.join(allowed)};{nearest(str(value), allowed)}".rstrip(";")
        )
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}={value!r} must be a mapping")
        key_type, item_type = get_args(annotation)
        return {_convert(key_type, k, where): _convert(item_type, v, f"{where}.{k}") for k, v in value.items()}
    if origin is list:
        if not isinstance(value, list):
            raise ConfigError(f"{where}={value!r} must be a list")
        (item_type,) = get_args(annotation)
        return [_convert(item_type, item, f"{where}[{i}]") for i, item in enumerate(value)]
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if annotation is float and isinstance(value, str):
        try:
            return float(value)  # YAML reads 1e-4 as a string
        except ValueError:
            pass
    if isinstance(value, annotation) and not (annotation is int and isinstance(value, bool)):
        return value
    raise ConfigError(f"{where}={value!r} must be of type {annotation.__name__}")


def to_dict(config: Any) -> dict[str, Any]:
    """Return settings as plain dictionaries and lists."""
    return dataclasses.asdict(config)


def _class_of(annotation: Any, values: Mapping[str, Any]) -> Any:
    """Return the dataclass of a group of settings; for ``algorithm`` the dataclass of the chosen algorithm."""
    if annotation is not AlgorithmConfig:
        return annotation
    check_owners(values)
    return settings_of(str(values.get("name", AlgorithmConfig.name)))


def _missing(tree: Mapping[str, Any], where: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _missing(value, f"{where}{key}.")
        elif value == "???":
            yield where + key


def _texts(tree: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _texts(value, f"{where}{key}.")
        elif isinstance(value, str):
            yield f"{where}{key}", value


def save_resolved(config: Config, path: Path) -> None:
    """Write the settings as JSON, atomically."""
    write_text(path, json.dumps(to_dict(config), indent=1))


def load_resolved(path: str | Path) -> Config:
    """Read what ``save_resolved`` wrote; every process of a job starts from this file.

    Raises:
        ConfigError: the file is damaged, or has settings that this version does not know.
    """
    fix = (
        "it only records the settings of the last start: remove it, and `megarl train` with those settings writes it "
        "again"
    )
    try:
        values = json.loads(Path(path).read_text())
        if not isinstance(values, dict):
            raise ValueError(f"it holds {type(values).__name__}, not settings")
    except ValueError as error:  # also for invalid UTF-8
        raise ConfigError(f"{path} cannot be read: {error}; {fix}") from error
    try:
        config: Config = from_dict(Config, values)
    except ConfigError as error:
        raise ConfigError(f"{path} was written by another version of megarl: {error}; {fix}") from error
    return config
