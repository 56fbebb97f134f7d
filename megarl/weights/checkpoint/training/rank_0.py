"""Work that rank 0 does alone, with one outcome for all ranks: none goes on to another collective than the rest."""

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
    """Return on every rank what ``action`` returns on rank 0, while the others wait.

    Raises:
        OSError, JobError, CheckpointError: what ``action`` raised, on every rank.
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

    Rank 0 takes part in those collectives whatever the disk does: what it raises is kept for ``check``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._error: Exception | None = None

    @contextmanager
    def written(self) -> Iterator[None]:
        """Within it errors of these files are kept."""
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
        """Raise what was kept, as OSError or JobError."""
        if self._error is None:
            return
        if (cause := disk.cause(self._error)) is not None:
            raise cause
        disk.reserve(self._folder)  # torch's archives give no reason, so the disk is asked
        raise JobError(f"{self._folder} cannot be written ({self._error})") from self._error
