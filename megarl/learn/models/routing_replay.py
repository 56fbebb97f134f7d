"""Routing replay: the trainer's routers reuse the experts that an engine chose for each token (R3, 2510.11370).

The ids determine which experts compute a token. The router's own logits weigh them by its family's rule, so the router
is trained. A token without ids is routed normally.

Each layer gets a code for every token in the place of a padding mask [b, S]: the token's row in ``Replay``'s table, and
its sequence in the micro-batch. So a recomputed layer finds the same ids.

Shape legend: t tokens of this rank in a micro-batch, n tokens of all its micro-batches, L layers with experts, K
experts of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer

from megarl.learn.batching import MicroBatch
from megarl.learn.batching.sequences import NO_IDS
from megarl.learn.models.gpt import unwrap

_ROW_BITS = 32
_PLACE = 2**_ROW_BITS - 1


class Replay:
    """Expert ids of some micro-batches' tokens on this rank's device, for the layers of its ``chunks``."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], routing: torch.Tensor, batches: Sequence[MicroBatch], *, balanced: bool
    ) -> None:
        self.balanced = balanced
        """True if routers measure balance (``experts.balanced_router``); they then get each token's sequence."""
        self._layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)]
        found = torch.zeros(len(routing), dtype=torch.bool)
        for batch in batches:
            found[batch.index[batch.index >= 0]] = True
        self._place = found.long().cumsum(0) - 1
        config: Any = unwrap(chunks[0]).config
        every = config.moe_layer_freq == 1
        columns = [
            layer.layer_number - 1 if every else sum(config.moe_layer_freq[: layer.layer_number - 1])
            for layer in self._layers
        ]
        device = next(chunks[0].parameters()).device
        rows = routing[found][:, columns]
        self.table = torch.cat([rows, rows.new_full((1, *rows.shape[1:]), NO_IDS)]).to(device)
        """int8 or int16 [n + 1, L of this rank, K]; the last row is for padding."""
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        """(choices replayed in passes with gradients, those for which the router would have chosen other experts)."""

    def codes(self, batch: MicroBatch) -> torch.Tensor:
        """Return int64 [b, S] codes, -1 for padding."""
        place = batch.take(self._place)
        return ((batch.row << _ROW_BITS) | place).masked_fill(batch.index < 0, -1)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the routers replay the table within the context."""
        with ExitStack() as stack:
            for column, layer in enumerate(self._layers):
                router: Any = layer.router
                router.router_replay = replayed = _Replayed(self, column)
                stack.callback(setattr, router, "router_replay", None)
                # Must run before the hook of ``experts.balanced_router``, which takes the remaining mask.
                hook = layer.register_forward_pre_hook(replayed.receive, prepend=True, with_kwargs=True)
                stack.callback(hook.remove)
            yield

    def measured(self, name: str) -> dict[str, tuple[float, float]]:
        """Return the share of replayed choices (of a token in a layer) for which the router would have chosen other
        experts; the same on every rank of the model. Every rank calls it."""
        dist.all_reduce(
            self.counts, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        )
        dist.all_reduce(self.counts, group=parallel_state.get_pipeline_model_parallel_group())
        replayed, others = self.counts.tolist()
        return {f"{name}/routing_changed": (others / max(replayed, 1), 1.0)}


class _Replayed:
    """Choices of one layer's router; implements the part of Megatron's ``RouterReplay`` that routers call."""

    def __init__(self, replay: Replay, column: int) -> None:
        self._replay, self._column = replay, column

    def receive(self, layer: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        codes = named.pop("padding_mask")
        self._codes = codes.transpose(0, 1).reshape(-1)
        return arguments, named | ({"padding_mask": codes >> _ROW_BITS} if self._replay.balanced else {})

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and ids of the chosen experts, [t, K] each, for scores [t, E]."""
        _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        table = self._replay.table
        ids = table[(self._codes & _PLACE).clamp(max=len(table) - 1), self._column].long()
        known = ids[:, 0] != NO_IDS
        others = known & (ids.sort(-1).values != own.sort(-1).values).any(-1)
        ids = torch.where(others[:, None], ids, own)  # keep the router's order for equal experts: equal bits
        if torch.is_grad_enabled():  # recomputation runs a layer twice, first without gradients
            self._replay.counts += torch.stack([known.sum(), others.sum()])
        return scores.gather(1, ids), ids
