"""A user's own generator: a Python file with ``GENERATOR = Generator(...)``, named by ``taskset.generate``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megarl.core.errors import ConfigError, describe
from megarl.core.user_file import import_value
from megarl.tasks.generators.entries import Entries, Entry, Generator
from megarl.tasks.images.rows import PLACEHOLDER

TEXTS = ("question", "answer", "response", "slip", "data_source", "ability")


def is_file(name: str) -> bool:
    """Return True if ``taskset.generate`` names a file instead of one of megarl's generators."""
    return name.endswith(".py")


def digest(path: str) -> str:
    """Return the file's digest: rows made by another version are stale."""
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()


def load(path: str) -> Generator:
    """``GENERATOR`` of a file, whose entries are checked as they are drawn. Raises ConfigError naming what the file
    lacks."""
    where = f"taskset.generate={path}"
    generator = import_value(path, "taskset.generate", "GENERATOR", Generator)
    if not all(isinstance(value, int) for value in generator.options.values()):
        raise ConfigError(f"{where}: GENERATOR.options must be names and whole numbers, got {dict(generator.options)}")
    return replace(generator, entries=lambda seed, options: _checked(generator, path, seed, options))


def _checked(generator: Generator, path: str, seed: int, options: Mapping[str, int]) -> Entries:
    where = f"taskset.generate={path}"
    try:
        for entry in generator.entries(seed, options):
            if entry is not None:
                _check(entry, where)
            yield entry
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where}: {describe(error, path, generator.entries)}") from error


def _check(entry: Entry, where: str) -> None:
    if not isinstance(entry, Entry):
        raise ConfigError(f"{where} must yield megarl.tasks.Entry or None, got a {type(entry).__name__}")
    for name in TEXTS:
        if not isinstance(value := getattr(entry, name), str):
            raise ConfigError(f"{where}: Entry.{name} must be a text, got {value!r}")
    if not isinstance(entry.images, tuple) or not all(isinstance(image, bytes) for image in entry.images):
        raise ConfigError(f"{where}: Entry.images must be a tuple of files' bytes, got {entry.images!r:.60}")
    if entry.images and entry.question.count(PLACEHOLDER) != len(entry.images):
        raise ConfigError(
            f"{where}: Entry.question must have as many {PLACEHOLDER} as there are images ({len(entry.images)}), got "
            f"{entry.question!r}"
        )
