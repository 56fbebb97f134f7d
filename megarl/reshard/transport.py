"""Transport for plans whose two sides are the ranks of one torch.distributed group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed as dist

from megarl.reshard.execute import Work


@dataclass(frozen=True)
class GroupTransport:
    """Point-to-point within ``group`` (None: the default group); plan ranks are ranks of that group."""

    group: dist.ProcessGroup | None = None

    def isend(self, tensor: torch.Tensor, rank: int) -> Work:
        work = dist.isend(tensor, group=self.group, group_dst=rank)
        assert work is not None, "this process is not in the group"
        return work

    def recv(self, tensor: torch.Tensor, rank: int) -> None:
        dist.recv(tensor, group=self.group, group_src=rank)
