"""Transport for plans with the ranks of one torch.distributed group on both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import distributed as dist

from megarl.weights.reshard.execute import Work


@dataclass(frozen=True)
class Received:
    """An arrival in the receiver's memory; ``release`` has nothing to do."""

    work: Work
    message: torch.Tensor

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.message

    def release(self) -> None:
        pass


@dataclass(frozen=True)
class GroupTransport:
    """Point-to-point within ``group`` (``None``: the default group); plan ranks are ranks of that group."""

    group: dist.ProcessGroup | None = None

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def isend(self, message: torch.Tensor, rank: int) -> Work:
        work = dist.isend(message, group=self.group, group_dst=rank)
        assert work is not None, "this process is not in the group"
        return work

    def irecv(self, nbytes: int, rank: int, spare: Callable[[], torch.Tensor]) -> Received:
        memory = spare()
        work = dist.irecv(memory, group=self.group, group_src=rank)
        assert work is not None, "this process is not in the group"
        return Received(work, memory[:nbytes])
