"""Trained parameters that get no gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megarl.learn.models.gpt import unwrap
from megarl.learn.training.model import TrainedModel

SOMETIMES = (".experts.", "vision", "mtp")
"""Parts of names of parameters that get none in steps without their tokens or images."""
UPDATES = 2
"""Updates after which each parameter has had a gradient: an adapter's first matrix has none while the second is 0."""


def _has_gradient(parameter: Any) -> bool:
    gradient = getattr(parameter, "main_grad", None)  # of Megatron's buffers
    return gradient is None or bool(gradient.any())


class FrozenParameters:
    """Finds trained parameters whose gradient was 0 in every update so far. Every rank makes one for a job."""

    def __init__(self) -> None:
        self._alive: torch.Tensor | None = None
        self._updates = 0

    def add(self, trained: TrainedModel) -> None:
        """Look at the gradients of an update; nothing is left to look at once each parameter has had one."""
        from megatron.core import parallel_state

        if self._alive is not None and bool(self._alive.all()):
            return
        with trained.model.grid():
            found = torch.tensor([
                any(part in name for part in SOMETIMES) or _has_gradient(parameter)
                for chunk in trained.model.chunks
                for name, parameter in unwrap(chunk).named_parameters()
                if parameter.requires_grad
            ])  # fmt: skip
            shared = found.to(torch.int32)
            if len(shared):
                dist.all_reduce(shared, dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        alive = shared.bool()
        self._updates += bool(alive.any())
        self._alive = alive if self._alive is None else self._alive | alive

    def metrics(self) -> dict[str, float]:
        """Return ``check/frozen``: this rank's parameters without a gradient; 0 before ``UPDATES`` updates."""
        known = self._alive is not None and self._updates >= UPDATES
        return {"check/frozen": float((~self._alive).sum()) if self._alive is not None and known else 0.0}
