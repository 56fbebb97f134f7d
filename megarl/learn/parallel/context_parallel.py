"""A collective for context parallelism: gather the outputs of all shares of a sequence on every rank of the group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _Gather(torch.autograd.Function):
    """Gather; every rank computes the same loss from the result, so the gradient of its share is a slice, not a sum."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, columns: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.columns = columns[group.rank()]
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine.contiguous(), group=group)
        whole = mine.new_empty(mine.shape[0], columns.numel(), *mine.shape[2:])
        whole[:, columns.flatten()] = torch.cat(parts, dim=1)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0][:, ctx.columns], None, None


def gather_outputs(mine: torch.Tensor, columns: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, S / cp, k] of every rank -> [b, S, k] in the order of the sequence, the same on all ranks of ``group``.

    ``columns``: int64 [cp, S / cp], the positions in S of each rank's share. The backward pass selects a rank's own
    share of the gradient, which is equal on all ranks.
    """
    if group.size() == 1:
        return mine
    result: torch.Tensor = _Gather.apply(mine, columns, group)  # type: ignore[no-untyped-call]
    return result
