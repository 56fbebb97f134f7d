"""Check the values of composed settings against the bounds in their types, and texts against a few rules.

Rules that need a model, a grid or a machine are called by ``run/checks/job.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from megarl.config.bounds import Bound, annotations_of, bound_of, number_text
from megarl.config.schema import Config, FromScratchConfig, ModelConfig, TeacherConfig
from megarl.config.taskset import SourceConfig
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
