"""Errors with texts for the user, and descriptions of errors in the user's code.

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
    """Base of all errors in megarl. Its text is for the user, who needs no traceback."""


class InputError(MegarlError, ValueError):
    """Invalid input: a setting, a data row, a model or a checkpoint."""


class ConfigError(InputError):
    """A setting that does not exist, has the wrong type, or does not fit the model, the grid or the machine."""


class DataError(InputError):
    """A data row that cannot be used; the message contains file, row number and field."""


class ArchitectureError(InputError):
    """A model that has no table in ``megarl.weights.architectures`` or whose configuration the table does not cover."""


class PlanError(InputError):
    """A reshard plan that does not write every destination element exactly once."""


class CheckpointError(InputError):
    """A checkpoint that is missing, incomplete or from another model."""


class WeightSyncError(MegarlError, RuntimeError):
    """Weights in an engine differ from the trainer's after a sync, or the sync did not end."""


class WeightsDiffer(WeightSyncError):
    """Two live sides have different weights after a sync. Sending them again would hide a bug."""


class EngineError(MegarlError, RuntimeError):
    """The rollout engine refused a request or has died."""


class EngineClosed(EngineError):
    """The engine has other weights than requested, or no engine has them yet. No failure: the client tries others."""


class RequestRefused(EngineError):
    """The rollout engine refused a request because of its content, and would refuse it again."""


class PromptRefused(RequestRefused):
    """The engine refused one prompt of a request. The engine is healthy; only the prompt's trajectories fail."""

    def __init__(self, text: str, prompt: int = 0) -> None:
        super().__init__(text)
        self.prompt = prompt
        """Number of the prompt in its request."""


class WeightsPassed(RequestRefused):
    """Samples were requested with weights that no engine has any longer, for an evaluation that was cancelled."""


class SandboxError(MegarlError, RuntimeError):
    """Programs cannot be isolated here, or the sandbox failed. Never raised for an action of a sandboxed program."""


class JobError(MegarlError, RuntimeError):
    """A process of the job died; the message contains its last log lines."""


class DiskFullError(JobError):
    """A disk or quota has no room for a write."""


class OffloadError(JobError):
    """Memory of a model could not be moved off the device, or came back with other bytes."""


class NotResident(MegarlError, RuntimeError):
    """A model's memory was needed on the device while offloaded: a bug of ours. The text has its name and place."""


class NonRetryableError(JobError):
    """The job failed for a reason that a restart cannot remove."""

    STATUS = 4
    """Exit status of a process that ends with this error."""


class MemoryFullError(JobError):
    """A trainer rank ran out of memory during work that needs less with smaller micro-batches."""

    STATUS = 5
    """Exit status of a process that ends with this error."""


class StoreDamagedError(JobError):
    """A page or a row of the store that cannot be read."""


class FencedError(JobError):
    """A later attempt of the run has begun, so writes of this attempt are refused."""


def first_of(texts: Sequence[str], count: int) -> str:
    """Join the first ``count`` texts: ``a, b and 3 more``."""
    more = f" and {len(texts) - count} more" if len(texts) > count else ""
    return ", ".join(texts[:count]) + more


def describe(error: BaseException, path: str | None = None, function: Callable[..., Any] | None = None) -> str:
    """Return ``TypeName: text`` with a source line: the last line of the user's file ``path`` in the traceback. If the
    traceback has none (wrong signature or result), use the line that defines ``function``. Without ``path``, use the
    traceback's last line.

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
    """Replace the password in ``url`` by ``***`` (as SQLAlchemy reads it), also if the URL cannot be parsed."""
    text = re.sub(r"(://[^:/]*:).*@", r"\1***@", url)
    return re.sub(r"([?&]\w*password=)[^&]+", r"\1***", text)
