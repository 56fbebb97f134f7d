"""Errors with a text for the user, and descriptions of errors in a user's own code.

Each text names the rule, the value and the fix. Invalid input raises an ``InputError`` before any process starts. A
failure of a running job raises a ``RuntimeError`` subclass, whose text ends the job.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megarl.core.text import without_surrogates


class MegarlError(Exception):
    """Base of all errors here: the text is for the user, who needs no traceback."""


class InputError(MegarlError, ValueError):
    """Invalid input: a setting, a data row, a model or a checkpoint."""


class ConfigError(InputError):
    """A setting that does not exist, has the wrong type, or does not fit the model, the grid or the machine."""


class DataError(InputError):
    """A data row that cannot be used; the message gives file, row number and field."""


class ArchitectureError(InputError):
    """A model that has no table in ``megarl.weights.architectures`` or whose configuration the table does not cover."""


class PlanError(InputError):
    """A reshard plan that would not write every destination element exactly once."""


class CheckpointError(InputError):
    """A checkpoint that is missing, incomplete or of another model."""


class WeightSyncError(MegarlError, RuntimeError):
    """Weights in an engine differ from the trainer's after a sync, or the sync did not end."""


class WeightsDiffer(WeightSyncError):
    """Two sides that both live were compared after a sync, and differ: to send the weights again would hide a fault."""


class EngineError(MegarlError, RuntimeError):
    """The rollout engine refused a request or is gone."""


class EngineClosed(EngineError):
    """The engine has other weights than were asked for, or no engine has them yet: no failure, others are asked."""


class RequestRefused(EngineError):
    """The rollout engine refused a request for what is in it, and would refuse it again."""


class PromptRefused(RequestRefused):
    """It refused one prompt of a request, the others' engine is well: the prompt's trajectories pay."""

    def __init__(self, text: str, prompt: int = 0) -> None:
        super().__init__(text)
        self.prompt = prompt
        """Number of the prompt in its request."""


class WeightsPassed(RequestRefused):
    """Samples were asked for with weights that no engine has any more: those of an evaluation that was given up."""


class SandboxError(MegarlError, RuntimeError):
    """Programs cannot be isolated here, or the sandbox failed; never something that a program in it did."""


class JobError(MegarlError, RuntimeError):
    """A process of the job died; the message carries its last lines."""


class DiskFullError(JobError):
    """No room, on a disk or in a quota, for what was to be written."""


class OffloadError(JobError):
    """Memory of a model could not leave the device, or came back as other bytes."""


class NotResident(MegarlError, RuntimeError):
    """Memory of a model was needed on the device while it was elsewhere: a fault of ours, with its name and place."""


class NonRetryableError(JobError):
    """The job ends of something that would come again however often it were started."""

    STATUS = 4
    """Exit status of a process that ends of it."""


class MemoryFullError(JobError):
    """A trainer rank ran out of memory where smaller micro-batches need less."""

    STATUS = 5
    """Exit status of a process that ends of it."""


class StoreDamagedError(JobError):
    """A page or a row of the store that cannot be read."""


class FencedError(JobError):
    """A later attempt of the run has begun: nothing that this one still does may count."""


def first_of(texts: Sequence[str], count: int) -> str:
    """``a, b and 3 more``: the first ``count``."""
    more = f" and {len(texts) - count} more" if len(texts) > count else ""
    return ", ".join(texts[:count]) + more


def describe(error: BaseException, path: str | None = None, function: Callable[..., Any] | None = None) -> str:
    """``TypeName: text`` with the last line of the user's file ``path`` on the way to it; without ``path``, the last
    line at all. Where none was reached, as with a wrong signature or result: the line where ``function`` is defined.

    Surrogate characters become ``?``, so that the text can be stored.
    """
    lines = [(f.f_code.co_filename, number) for f, number in traceback.walk_tb(error.__traceback__)]
    if path is not None:
        lines = [(file, number) for file, number in lines if Path(file).resolve() == Path(path).resolve()]
        if not lines and (code := getattr(function, "__code__", None)) is not None:
            lines = [(code.co_filename, code.co_firstlineno)]
    where = f" ({Path(lines[-1][0]).name}:{lines[-1][1]})" if lines else ""
    return without_surrogates(f"{type(error).__name__}: {error}{where}")


def masked_text(url: str) -> str:
    """``url`` without a password (as SQLAlchemy reads it), also where it cannot be parsed."""
    text = re.sub(r"(://[^:/]*:).*@", r"\1***@", url)
    return re.sub(r"([?&]\w*password=)[^&]+", r"\1***", text)
