"""Decisions that all trainer ranks of a job take together."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist

from megarl.core.errors import JobError, MegarlError
from megarl.core.metrics import Sums
from megarl.core.processes import heartbeat

T = TypeVar("T")


class Stopped(Exception):
    """The job was asked to stop. Raised on every rank, with models and state unchanged. ``str``: an error since then,
    if any."""


class Ranks:
    """Collectives over all ranks, and the request to stop. Every rank makes the same calls."""

    def __init__(self) -> None:
        self.stopping = False
        """True if this rank was asked to stop; all ranks agree on ``stop_requested``."""

    def stop_on_sigterm(self) -> None:
        """Treat SIGTERM as a request to stop. SIGINT is ignored: the supervisor decides."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def stop_requested(self) -> bool:
        """True on every rank if any rank has been asked to stop."""
        return not self.agree(not self.stopping)

    def agree(self, yes: bool) -> bool:
        """True on all ranks if ``yes`` is True on all ranks."""
        heartbeat.beat()
        flag = torch.tensor([int(yes)])
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def gather(self, mine: Sequence[Sums]) -> list[Sums]:
        """Return all ranks' metric sums, on every rank."""
        everyone: list[list[Sums]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, list(mine))
        return [sums for rank in everyone for sums in rank]

    def wait_for_all(self) -> None:
        """Wait until every rank calls it."""
        dist.barrier()


def on_all_ranks(action: Callable[[], T]) -> T:
    """Return the result of ``action`` here, once it has returned on every rank. Every rank calls it.

    For checks of one rank's data: if only that rank raised, the others would fail on a lost connection.

    A rank that failed raises its error. The others raise the first failed rank's error: a MegarlError as it is, another
    exception as a JobError.
    """
    if not dist.is_initialized():
        return action()
    mine: Exception | None = None
    fault: tuple[type[MegarlError], str] | None = None
    try:
        result = action()
    except Exception as error:
        mine = error
        if isinstance(error, MegarlError):
            fault = type(error), str(error)
        else:
            fault = JobError, f"{type(error).__name__} on another rank: {error}"
    heartbeat.beat()
    everyone: list[tuple[type[MegarlError], str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, fault)
    if mine is not None:
        raise mine
    for met in everyone:
        if met is not None:
            raise met[0](met[1])
    return result
