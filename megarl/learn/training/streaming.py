"""An optimizer step whose state comes to the device bucket by bucket (``trainer.stream_optimizer_bytes``).

Adam updates each element by itself, and Megatron clips gradients by their norm before the step. So a streamed step
gives the bits of a step on the whole state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megarl.core.errors import NonRetryableError, OffloadError
from megarl.learn.memory.residents import Residents
from megarl.ops import slice_digests
from megarl.weights.megatron_private import first_element, without_master_copies

Watch = Callable[[Sequence[torch.Tensor]], AbstractContextManager[None]]
"""Makes a context around the step of parameters whose state is on the device."""


def unwatched(_parameters: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Do nothing around a step."""
    return nullcontext()


class StreamedStep:
    """One step of Megatron's optimizer. Every rank makes it."""

    def __init__(self, residents: Residents, watch: Watch) -> None:
        self._residents, self._watch = residents, watch
        self._failure: OffloadError | NonRetryableError | None = None
        self.digests: dict[torch.nn.Parameter, torch.Tensor] = {}
        """Parameter -> digest of this rank's share, as the step wrote it."""

    @contextmanager
    def within(self, optimizer: Any) -> Iterator[None]:
        """Make steps of Megatron's ``optimizer`` streamed within the context."""
        with ExitStack() as stack:
            for distributed in getattr(optimizer, "chained_optimizers", [optimizer]):
                if distributed.is_stub_optimizer:
                    continue
                inner = distributed.optimizer
                inner.step = partial(self._step, distributed, inner.step)
                stack.callback(delattr, inner, "step")
                stack.enter_context(without_master_copies(distributed))
            yield

    def _step(self, distributed: Any, step: Callable[[], object]) -> None:
        """Step a distributed optimizer's buckets one after the other. After a failure the other ranks still expect this
        one in their collectives, so ``check`` raises it."""
        inner = distributed.optimizer
        targets = {}
        for p, (group, place) in distributed.model_param_group_index_map.items():
            targets[inner.param_groups[group]["params"][place]] = p
        begins = [(group, group["params"], group.get("step")) for group in inner.param_groups]
        counts = [count for _, _, count in begins]
        try:
            for bucket in self._residents.streamed(inner):
                own = {id(p) for p in bucket.parameters}
                for group, parameters, count in begins:
                    group["params"] = [p for p in parameters if id(p) in own]
                    _put_count(group, count)
                with self._watch(bucket.parameters):
                    step()
                counts = [
                    group["step"] if group["params"] else count
                    for (group, _, _), count in zip(begins, counts, strict=True)
                ]
                for share in bucket.parameters:
                    self._write(distributed, targets[share], share)
        except (OffloadError, NonRetryableError) as error:
            self._failure = error
        finally:
            for (group, parameters, _), count in zip(begins, counts, strict=True):
                group["params"] = parameters
                _put_count(group, count)

    def _write(self, distributed: Any, p: torch.nn.Parameter, share: torch.Tensor) -> None:
        """Copy a parameter's stepped master into the parameter, and take its digest."""
        start = first_element(distributed, p)
        p.data.view(-1)[start : start + share.numel()].copy_(share)
        self.digests[p] = share_digest(distributed, p, share)

    def check(self) -> None:
        """Raise the failure of a bucket on every rank. Every rank calls it after the step."""
        flag = torch.tensor([int(self._failure is None)])
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        if not flag:
            raise self._failure or OffloadError(
                "a bucket of an optimizer could not be moved on another trainer rank, whose log says why"
            )


def _put_count(group: dict[str, Any], count: int | None) -> None:
    """Set the number of a group's steps; a group that was never stepped has none."""
    group.pop("step", None)
    if count is not None:
        group["step"] = count


def share_digest(optimizer: Any, p: torch.nn.Parameter, share: torch.Tensor) -> torch.Tensor:
    """Return the digest, in the parameter's dtype, of this rank's share of a distributed optimizer's parameter."""
    return slice_digests([(share.to(p.dtype), (first_element(optimizer, p),), (p.numel(),))])[0]
