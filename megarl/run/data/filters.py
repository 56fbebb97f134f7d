"""Filters of ``megarl data``: ``steps=3-10 reward=0..0.5 end=truncated source=NAME kind=train``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_args

from megarl.buffer.store import Selection, Store
from megarl.buffer.store.claims import RolloutKind
from megarl.core.errors import ConfigError
from megarl.core.schema import End

N = TypeVar("N", int, float)
EXPERT = "expert"
"""Value of ``kind`` for expert rows, which are not trajectories."""
KINDS = (*get_args(RolloutKind), EXPERT)
FORMS = {
    "steps": "steps=3, steps=3-10, steps=3- or steps=-10",
    "reward": "reward=1, reward=0..0.5, reward=0.5.. or reward=..0",
    "end": f"end={','.join(End)} or some of these",
    "source": "source=NAME[,NAME] (data_source of tasks)",
    "kind": "kind=train, kind=eval or kind=expert",
}
"""Filter -> its forms."""


def selection_of(words: Sequence[str], experts: bool = False) -> tuple[Selection, bool]:
    """Parse filters; return (filters, True if they select expert rows).

    Args:
        experts: The command supports expert rows.

    Raises:
        ConfigError: a word is not a filter, or its value is invalid.
    """
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name not in FORMS or not equals:
            raise ConfigError(f"{word!r} is no filter; filters are {'; '.join(FORMS.values())}")
        if name in given:
            raise ConfigError(f"{name} is given twice; give one of {name}={given[name]} and {word}")
        given[name] = value
    kinds = _names("kind", given.pop("kind", "train,eval"), KINDS)
    if EXPERT in kinds:
        if not experts:
            raise ConfigError("kind=expert: expert rows are no trajectories; only count and export accept them")
        if given or kinds != [EXPERT]:
            raise ConfigError(
                "kind=expert takes no other filters: expert rows have no step, end or group; leave the others out"
            )
        return Selection(kinds=()), True
    values: dict[str, Any] = {"kinds": tuple(kinds)}
    readers: dict[str, tuple[str, Callable[[str], Any]]] = {
        "steps": ("steps", _steps),
        "reward": ("scores", _scores),
        "end": ("ends", lambda text: frozenset(map(End, _names("end", text, tuple(End))))),
        "source": ("sources", _sources),
    }
    for name, text in given.items():
        field, read = readers[name]
        values[field] = read(text)
    return Selection(**values), False


def _sources(text: str) -> tuple[str, ...]:
    if not all(found := text.split(",")):
        raise ConfigError(f"source={text} has an empty name; give a data source, or several with commas between them")
    return tuple(found)


def check_sources(selection: Selection, store: Store) -> None:
    """Raise ConfigError for a source that no task has."""
    if selection.sources and (lost := set(selection.sources) - set(store.tasks.data_sources())):
        raise ConfigError(f"source={min(lost)}: no task has it; sources are {', '.join(store.tasks.data_sources())}")


def _names(name: str, text: str, known: Sequence[str]) -> list[str]:
    found = text.split(",")
    if lost := [word for word in found if word not in known]:
        raise ConfigError(f"{name}={lost[0]} is none of {', '.join(known)}")
    return found


def _steps(text: str) -> tuple[int | None, int | None]:
    found = re.fullmatch(r"(\d*)(?:(-)(\d*))?", text)
    if not found or not (found[1] or found[3]):
        raise ConfigError(f"steps={text}: write {FORMS['steps']}")
    first = int(found[1]) if found[1] else None
    last = first if not found[2] else int(found[3]) if found[3] else None
    return _in_order("steps", text, first, last)


def _scores(text: str) -> tuple[float | None, float | None]:
    least, dots, largest = text.partition("..")
    try:
        bounds = [float(bound) if bound else None for bound in (least, largest if dots else least)]
    except ValueError:
        bounds = [None, None]
    if bounds == [None, None] or any(bound is not None and math.isnan(bound) for bound in bounds):
        raise ConfigError(f"reward={text}: write {FORMS['reward']}")
    return _in_order("reward", text, bounds[0], bounds[1])


def _in_order(name: str, text: str, first: N | None, last: N | None) -> tuple[N | None, N | None]:
    if first is not None and last is not None and first > last:
        raise ConfigError(f"{name}={text}: the first bound is above the second; swap them")
    return first, last
