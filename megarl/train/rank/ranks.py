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
    """The job was asked to stop; raised on every rank. Models and state are as before the call. ``str``: what failed
    meanwhile, if anything."""


class Ranks:
    """Collectives over all ranks, and the request to stop. Every rank makes the same calls."""

    def __init__(self) -> None:
        self.stopping = False
        """This rank was asked to stop; ``stop_requested`` is what all ranks agree on."""

    def stop_on_sigterm(self) -> None:
        """Take SIGTERM for a request to stop. SIGINT is ignored: the supervisor decides."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def stop_requested(self) -> bool:
        """True on every rank when any of them has been asked to stop."""
        return not self.agree(not self.stopping)

    def agree(self, yes: bool) -> bool:
        """True on all ranks when it is True on all ranks."""
        heartbeat.beat()
        flag = torch.tensor([int(yes)])
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def gather(self, mine: Sequence[Sums]) -> list[Sums]:
        """All ranks' metric sums, on every rank."""
        everyone: list[list[Sums]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, list(mine))
        return [sums for rank in everyone for sums in rank]

    def wait_for_all(self) -> None:
        """Wait until every rank calls it."""
        dist.barrier()


def on_all_ranks(action: Callable[[], T]) -> T:
    """Return what ``action`` returns here, once it has returned on every rank. Every rank calls it.

    For checks of what one rank alone has: were its error raised there only, the others would end of a lost connection.

    Raises the error of a rank that met one, and on the others that of the first rank: a MegarlError as it is, another
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
