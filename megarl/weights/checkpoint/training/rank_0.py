"""Work of rank 0 alone, with one outcome for all ranks, so that all continue with the same collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megarl.core.errors import CheckpointError, JobError
from megarl.weights.checkpoint.training import disk_space as disk
from megarl.weights.megatron_private import common_writers

T = TypeVar("T")


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
        if (cause := disk.cause(self._error)) is not None:
            raise cause
        disk.reserve(self._folder)  # torch's archive errors give no reason, so test the disk
        raise JobError(f"{self._folder} cannot be written ({self._error})") from self._error
