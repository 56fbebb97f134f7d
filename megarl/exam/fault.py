"""A silent fault: its public report, what it breaks, the alarm that must name it, and how soon."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A fault that a job can have without an error.

    Attributes:
        name: Unique; words with hyphens.
        report: Public report, ``owner/repository#number``.
        breaks: One sentence: what the job then does wrong.
        alarm: Key of ``alarms.ALARMS``: the alarm that must name it.
        job: Key of ``jobs.JOBS``: the small job that gets the fault.
        install: Patches megarl in the process from which the job's processes are forked. None: not written yet.
        settings: Settings that the fault needs besides those of the job.
        within: Steps after the fault's first effect until the alarm; 0: before the first update.
        begins: Step of the first effect, from 1.
        unseen: Reason why no check names it; empty if one does.
        prepare: Called with the run directory before each start of the job.
    """

    name: str
    report: str
    breaks: str
    alarm: str
    job: str
    install: Callable[[], None] | None = None
    settings: tuple[str, ...] = ()
    within: int = 1
    begins: int = 1
    prepare: Callable[[Path], None] | None = None
    unseen: str = ""


def replace(original: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Put ``new`` in the place of a function of megarl, under every name that an imported module or class has for it.

    Raises LookupError where nothing has it: a fault that is not installed would count as unseen.
    """
    owners: list[Any] = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "megarl"]
    owners += [each for module in owners for each in vars(module).values() if isinstance(each, type)]
    found = 0
    for owner in owners:
        for name, value in list(vars(owner).items()):
            bare = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if bare is original:
                kind = type(value) if bare is not value else lambda function: function
                setattr(owner, name, kind(new))
                found += 1
    if not found:
        raise LookupError(f"no imported module has {original!r}")


def wrap(original: Callable[..., Any], around: Callable[..., Any]) -> None:
    """Replace a function by ``around(original, *args, **kwargs)``."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    replace(original, wrapped)


def wrap_in(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function of a library's module or class by ``around(original, *args, **kwargs)``."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped)
