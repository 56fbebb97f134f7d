"""The errors a user can meet, and what is said of those in a user's own code. Each message names the rule, the value seen and the mend.

A user's input raises a ``ValueError`` subclass before any process is launched; what goes wrong while a job
runs raises a ``RuntimeError`` subclass and ends the job with that text on top.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A setting that does not exist, has the wrong type, or does not fit the model, the grid or the machine."""


class DataError(ValueError):
    """A data row that cannot be used; the message gives file, row number and field."""


class ArchitectureError(ValueError):
    """A model that has no table in ``megarl.architectures`` or whose configuration the table does not cover."""


class PlanError(ValueError):
    """A reshard plan that would not write every destination element exactly once."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete or of another model."""


class WeightSyncError(RuntimeError):
    """Weights in an engine differ from the trainer's after a sync, or the sync did not end."""


class WeightsDiffer(WeightSyncError):
    """Two sides that both live were compared after a sync, and differ: to send the weights again would hide a fault."""


class EngineError(RuntimeError):
    """The rollout engine refused a request or is gone."""


class RequestRefused(EngineError):
    """The rollout engine refused a request for what is in it, and would refuse it again."""


class SandboxError(RuntimeError):
    """Programs cannot be isolated here, or the sandbox failed; never something that a program in it did."""


class JobError(RuntimeError):
    """A process of the job died; the message carries its last lines."""


class DiskFullError(JobError):
    """No room, on a disk or in a quota, for what was to be written."""


class LastingError(JobError):
    """The job ends of something that would come again however often it were started."""

    STATUS = 4
    """Exit status of a process that ends of it."""


class StoreDamagedError(JobError):
    """A page or a row of the store that is not as it was written."""


class FencedError(JobError):
    """This attempt of a run is over, because a later one has begun: nothing that it still does may count."""


def describe(error: BaseException, path: str | None = None, function: Callable[..., Any] | None = None) -> str:
    """``TypeName: text``, with the last line of the user's file ``path`` on the way to it (without ``path``: the last line
    at all); where none was reached, as with a wrong signature or result, the line where ``function`` is defined.
    """
    lines = [(f.f_code.co_filename, number) for f, number in traceback.walk_tb(error.__traceback__)]
    if path is not None:
        lines = [(file, number) for file, number in lines if Path(file).resolve() == Path(path).resolve()]
        if not lines and (code := getattr(function, "__code__", None)) is not None:
            lines = [(code.co_filename, code.co_firstlineno)]
    where = f" ({Path(lines[-1][0]).name}:{lines[-1][1]})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"


def masked_text(url: str) -> str:
    """``url`` without a password (as SQLAlchemy reads it), also where it cannot be parsed."""
    text = re.sub(r"(://[^:/]*:).*@", r"\1***@", url)
    return re.sub(r"([?&]\w*password=)[^&]+", r"\1***", text)
