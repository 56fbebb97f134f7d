"""Context parallelism's one collective of ours: outputs of all shares of a sequence, on every rank of the group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _Gather(torch.autograd.Function):
    """Every rank computes the same loss from what it gathers, so the gradient of its own share is its slice, not a
    sum."""

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

    ``columns``: int64 [cp, S / cp], where in S each rank's share lies. The backward pass keeps a rank's own share of a
    gradient that all ranks have alike.
    """
    if group.size() == 1:
        return mine
    result: torch.Tensor = _Gather.apply(mine, columns, group)  # type: ignore[no-untyped-call]
    return result
