"""Room on the disk for a checkpoint: how much is free, what may go to make more, and how a full disk differs from other
faults."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from megarl.core.errors import DiskFullError, JobError
from megarl.weights.checkpoint.training.manifest import finished, remove, steps_of

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
_WORDS = tuple(os.strerror(number) for number in FULL)
"""Words in errors of libraries that raise their own (safetensors, torch)."""
RESERVE_BYTES = 2**16
_RESERVE = "reserve"


def is_full(error: BaseException) -> bool:
    """Return True if the error means a full disk or quota."""
    if isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in FULL):
        return True
    return any(word in str(error) for word in _WORDS)


def cause(error: BaseException | None) -> OSError | None:
    """The OSError after an error, if any: on a full disk torch closes its archive, and reports its position as
    wrong."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name what was being written in errors of the disk. Raises DiskFullError where it is full, else JobError."""
    try:
        yield
    except JobError:
        raise  # its text is enough
    except (OSError, RuntimeError, SafetensorError) as error:
        if is_full(error):
            raise DiskFullError(f"{path} cannot be written ({error}); make room there") from error
        if not isinstance(error, OSError):
            raise
        raise JobError(f"{path} cannot be written ({error})") from error


def free_space(folder: Path, needed: int, keep: int, *, refuse: bool, best: int | None = None) -> None:
    """Make room for a checkpoint of ``needed`` bytes, if fewer are free.

    The finished checkpoints go that ``prune`` would remove once the new one counts; the newest and that of step
    ``best`` stay. ``refuse``: raise DiskFullError if the room is still missing. Otherwise warn and try: a quota or a
    reserve may make the number of free bytes wrong.
    """
    if (free := shutil.disk_usage(folder).free) >= needed:
        return
    for checkpoint in finished(folder)[: -max(1, keep - 1)]:
        if steps_of([checkpoint]) == [best]:
            continue
        log.warning(
            "%s is removed to make room: a checkpoint of %s comes, %s are free", checkpoint, size(needed), size(free)
        )
        remove(checkpoint)
    if (free := shutil.disk_usage(folder).free) >= needed:
        return
    text = f"{folder} has no room for a checkpoint: {size(needed)} are to be written, {size(free)} are free"
    if refuse:
        raise DiskFullError(f"{text}; make room there")
    log.warning("%s; trying all the same", text)


def size(count: int) -> str:
    """Bytes for people: 12,345,678 bytes (11.8 MiB)."""
    return f"{count:,} bytes ({count / 2**20:.1f} MiB)"


def reserve(folder: Path) -> None:
    """Take the room of a checkpoint's small files, which rank 0 writes between collectives of all ranks: were the disk
    full there, the others would wait forever. Raises OSError here instead.
    """
    newest = next(reversed(finished(folder.parent)), None)
    small = [] if newest is None else [*newest.glob("*/.metadata"), *newest.glob("*/common.pt")]
    count = max(RESERVE_BYTES, 2 * sum(path.stat().st_size for path in small))
    for number in (1, 2):
        with (folder / f"{_RESERVE}_{number}").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, count)


def use_reserve(folder: Path, number: int) -> None:
    """Give the room back, right before what it was kept for: 1 what is written at the start of a checkpoint, 2 at its
    end."""
    (folder / f"{_RESERVE}_{number}").unlink(missing_ok=True)
