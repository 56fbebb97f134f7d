"""Entries of a generator: questions with their answers; a user's own generator.

reasoning-gym's own are here.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megarl.config.bounds import Bound
from megarl.core.errors import ConfigError, describe
from megarl.core.imports import import_value, reasoning_gym
from megarl.tasks.image_rows import PLACEHOLDER


@dataclass(frozen=True)
class Entry:
    question: str
    answer: str
    """The verifier's ground truth, or its tests."""
    response: str
    """A right answer as a teacher writes it."""
    slip: str
    """A nearly right answer, as a careless teacher writes it."""
    data_source: str
    ability: str = "math"
    info: dict[str, Any] = field(default_factory=dict)
    """Entries of ``extra_info`` that the verifier reads, beside the question: JSON values, the same fields in every
    entry of a generator."""
    images: tuple[bytes, ...] = ()
    """Files of the pictures for the question's ``<image>`` placeholders, in order."""

    @property
    def identity(self) -> str:
        """Text equal for two entries only if question and pictures are equal."""
        return identity(self.question, self.images)


def identity(question: str, images: Sequence[bytes]) -> str:
    """Return the question, with the digest of its pictures if any."""
    if not images:
        return question
    digest = hashlib.blake2b(b"".join(hashlib.blake2b(image).digest() for image in images), digest_size=16)
    return f"{question} {digest.hexdigest()}"


Entries = Iterator[Entry | None]
"""Endless iterator of entries; None for a draw that does not fit the options, so that impossible limits are
detected."""


@dataclass(frozen=True)
class Generator:
    entries: Callable[[int, Mapping[str, int]], Entries]
    """Entries for a seed and the options."""
    options: Mapping[str, int]
    """Its options and their defaults."""
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    """Bounds of its options, in addition to ``OPTION_BOUNDS``."""


ARITHMETIC = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 2,
    "allow_negation": 0,
    "max_number": 0,
    "slip_percent": 0,
}
"""Options of the arithmetic families and their defaults. ``max_number`` > 0 keeps the questions whose numbers are all
at most that large (reasoning-gym itself only knows digits); ``allow_negation`` is 0 or 1; ``slip_percent`` of the
warm-start responses have a wrong last digit, as a careless teacher's demonstrations do (rewards never see them;
demonstrations in train and eval have none)."""
SUMS = {name: value for name, value in ARITHMETIC.items() if name != "allow_negation"}
OPTION_BOUNDS = {
    "min_terms": Bound(1, 100),
    "max_terms": Bound(1, 100),
    "min_digits": Bound(1, 100),
    "max_digits": Bound(1, 100),
    "allow_negation": Bound(0, 1),
    "max_number": Bound(0),
    "slip_percent": Bound(0, 100),
}
"""Bounds of options shared by several generators, including users'."""
SETTINGS_OF_OURS = ("max_number", "slip_percent")


def chain_sum(seed: int, settings: Mapping[str, int]) -> Entries:
    """Sums and differences: ``State the final answer to the following arithmetic problem: 12 - 5 =``."""
    return _arithmetic("chain_sum", seed, settings)


def basic_arithmetic(seed: int, settings: Mapping[str, int]) -> Entries:
    """Expressions with + - * /, brackets and negative numbers: ``Calculate 3 * ( 4 + 5 ).``"""
    return _arithmetic("basic_arithmetic", seed, settings)


def _arithmetic(family: str, seed: int, settings: Mapping[str, int]) -> Entries:
    """Return an entry with the fields of reasoning-gym's scorer: question, answer, metadata."""
    for found in gym_entries(family, seed, settings):
        if found is None:
            yield None
            continue
        answer = found["answer"]
        yield Entry(
            found["question"],
            answer,
            answer,
            slipped(answer),
            f"reasoning_gym/{family}",
            info={"metadata": found["metadata"]},
        )


def gym_entries(family: str, seed: int, settings: Mapping[str, int], **fixed: Any) -> Iterator[dict[str, Any] | None]:
    """Endless reasoning-gym entries, ``{question, answer, metadata}``; ``fixed`` are settings of the family that are no
    options of ours.

    Raises ConfigError for options that do not fit the family.
    """
    known = {name: value for name, value in settings.items() if name not in SETTINGS_OF_OURS}
    if "allow_negation" in known:
        fixed["allow_negation"] = bool(known["allow_negation"])
    try:
        dataset = reasoning_gym().create_dataset(family, seed=seed, size=1, **(known | fixed))
    except AssertionError as error:
        raise ConfigError(f"taskset.options {dict(settings)} do not fit reasoning-gym's {family}: {error}") from error
    limit = settings["max_number"]
    for index in itertools.count():
        entry = dataset[index]
        numbers = re.findall(r"\d+(?:\.\d+)?", entry["metadata"]["expression"]) if limit else []
        yield entry if all(float(number) <= limit for number in numbers) else None


def slipped(text: str) -> str:
    """The last digit one too high: 27 -> 28, -19 -> -10, 4.7 pens -> 4.8 pens."""
    place = max(at for at, character in enumerate(text) if character.isdigit())
    return text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :]


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
