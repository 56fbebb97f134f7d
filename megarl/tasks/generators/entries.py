"""Entries of a generator: questions with their answers, and the answers of a careless teacher. reasoning-gym's own are
here."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.config.bounds import Bound
from megarl.core.errors import ConfigError
from megarl.core.reasoning import reasoning_gym


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
