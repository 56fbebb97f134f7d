"""Disk space of a checkpoint, and work of rank 0 alone with one outcome for all ranks."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from megarl.core.errors import CheckpointError, DiskFullError, JobError
from megarl.weights.checkpoint.training.manifest import finished, remove, steps_of
from megarl.weights.megatron_private import common_writers

log = logging.getLogger(__name__)

T = TypeVar("T")

FULL = (errno.ENOSPC, errno.EDQUOT)
_WORDS = tuple(os.strerror(number) for number in FULL)
"""Texts in errors of libraries with their own types (safetensors, torch)."""
LOOK_S = 1.0
"""Seconds between two attempts to write on a full disk."""
RESERVE_BYTES = 2**16
_RESERVE = "reserve"


def is_full(error: BaseException) -> bool:
    """True if the error means a full disk or quota."""
    if isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in FULL):
        return True
    return any(word in str(error) for word in _WORDS)


def cause(error: BaseException | None) -> OSError | None:
    """Find the OSError behind an error. On a full disk torch closes its archive and reports only a wrong position."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add ``path`` to disk errors in the body. Raises DiskFullError if the disk is full, else JobError."""
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


def written(path: Path, write: Callable[[], T], outage_s: float, stopping: Callable[[], bool] = lambda: False) -> T:
    """Return ``write()``, which writes ``path``. Repeat it for up to ``store.outage_s`` while the disk is full.

    Raises JobError if ``path`` cannot be written.
    """
    end, warned = time.monotonic() + outage_s, False
    while True:
        try:
            with writing(path):
                return write()
        except DiskFullError as error:
            if stopping() or time.monotonic() > end:
                raise
            if not warned:
                log.warning("%s; waiting for it (store.outage_s=%g)", error, outage_s)
            warned = True
            time.sleep(LOOK_S)


def free_space(folder: Path, needed: int, keep: int, *, refuse: bool, best: int | None = None) -> None:
    """Make room for a checkpoint of ``needed`` bytes, if fewer are free.

    Removes finished checkpoints that ``prune`` would remove after the new one; keeps the newest and step ``best``'s.
    ``refuse``: raise DiskFullError if there is still no room. Otherwise log a warning: with a quota or a reserve the
    number of free bytes may be wrong.
    """
    if (free := shutil.disk_usage(folder).free) >= needed:
        return
    for checkpoint in finished(folder)[: -max(1, keep - 1)]:
        if steps_of([checkpoint]) == [best]:
            continue
        log.warning(
            "%s is removed to make room: the next checkpoint needs %s, %s are free",
            checkpoint,
            size(needed),
            size(free),
        )
        remove(checkpoint)
    if (free := shutil.disk_usage(folder).free) >= needed:
        return
    text = f"{folder} has no room for a checkpoint: {size(needed)} are to be written, {size(free)} are free"
    if refuse:
        raise DiskFullError(f"{text}; make room there")
    log.warning("%s; trying anyway", text)


def size(count: int) -> str:
    """Format bytes for people: 12,345,678 bytes (11.8 MiB)."""
    return f"{count:,} bytes ({count / 2**20:.1f} MiB)"


def reserve(folder: Path) -> None:
    """Reserve disk space for a checkpoint's small files, which rank 0 writes between collectives. If the disk were full
    there, the other ranks would wait forever. Raises OSError here instead."""
    newest = next(reversed(finished(folder.parent)), None)
    small = [] if newest is None else [*newest.glob("*/.metadata"), *newest.glob("*/common.pt")]
    count = max(RESERVE_BYTES, 2 * sum(path.stat().st_size for path in small))
    for number in (1, 2):
        with (folder / f"{_RESERVE}_{number}").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, count)


def use_reserve(folder: Path, number: int) -> None:
    """Release reserved space just before its use: 1 for writes at a checkpoint's start, 2 for its end."""
    (folder / f"{_RESERVE}_{number}").unlink(missing_ok=True)


def on_rank_0(action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 while the others wait; return its result on every rank.

    Raises:
        OSError, JobError, CheckpointError: raised by ``action``, on every rank.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except (OSError, JobError, CheckpointError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, 0)
    if outcome[1] is not None:
        raise outcome[1]
    found: T = outcome[0]
    return found


class SmallFiles:
    """common.pt, .metadata and metadata.json, which Megatron-Core writes on rank 0 between collectives of all ranks.

    After a disk error rank 0 still joins those collectives; the error is stored for ``check``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._error: Exception | None = None

    @contextmanager
    def written(self) -> Iterator[None]:
        """Store errors of these files in the body."""
        from megatron.core.dist_checkpointing import serialization
        from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

        writers = (*common_writers(), (FileSystemWriterAsync, "finish"), (serialization, "save_config"))
        with ExitStack() as stack:
            for owner, name in writers:
                write = getattr(owner, name)
                stack.callback(setattr, owner, name, write)
                setattr(owner, name, self._keeping(write))
            yield

    def _keeping(self, write: Callable[..., None]) -> Callable[..., None]:
        def keeping(*args: Any, **options: Any) -> None:
            try:
                write(*args, **options)
            except (OSError, RuntimeError) as error:
                self._error = self._error or error

        return keeping

    def check(self) -> None:
        """Raise the stored error, as OSError or JobError."""
        if self._error is None:
            return
        if (reason := cause(self._error)) is not None:
            raise reason
        reserve(self._folder)  # torch's archive errors give no reason, so test the disk
        raise JobError(f"{self._folder} cannot be written ({self._error})") from self._error
