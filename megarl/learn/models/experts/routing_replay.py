"""Routing replay: the experts that an engine chose for each token, chosen again by the trainer's routers (R3,
2510.11370).

The ids say which experts compute a token. The router's own logits weigh them, as its family does among chosen ones, so
the router is trained. A token without ids goes where its router sends it.

Each layer is given a code of every token in the place of a padding mask [b, S]: the row of ``Replay``'s table, and
which of the micro-batch's sequences it belongs to. So a layer that is computed again finds the same ids.

Shape legend: t tokens of this rank in a micro-batch, n tokens of all its micro-batches, L layers with experts,
K experts of a token, E experts.
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
    """Ids of the tokens of some micro-batches on this rank's device, for the layers of its ``chunks``."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], routing: torch.Tensor, batches: Sequence[MicroBatch], *, balanced: bool
    ) -> None:
        self.balanced = balanced
        """The routers measure their balance (``models.router``), and are given each token's sequence."""
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
        """int8 or int16 [n + 1, L of this rank, K]; the last row is that of padding."""
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        """(Choices replayed where gradients are computed, those of them that the router would have made otherwise)."""

    def codes(self, batch: MicroBatch) -> torch.Tensor:
        """int64 [b, S], -1 for padding."""
        place = batch.take(self._place)
        return ((batch.row << _ROW_BITS) | place).masked_fill(batch.index < 0, -1)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the routers choose by the table."""
        with ExitStack() as stack:
            for column, layer in enumerate(self._layers):
                router: Any = layer.router
                router.router_replay = replayed = _Replayed(self, column)
                stack.callback(setattr, router, "router_replay", None)
                # Before the hook of ``models.router``, which takes what this one leaves.
                hook = layer.register_forward_pre_hook(replayed.receive, prepend=True, with_kwargs=True)
                stack.callback(hook.remove)
            yield

    def measured(self, name: str) -> dict[str, tuple[float, float]]:
        """Metric of an update, the same on every rank of the model: the share of replayed choices (of a token in a
        layer) for which the router would have chosen other experts. Every rank calls it."""
        dist.all_reduce(
            self.counts, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        )
        dist.all_reduce(self.counts, group=parallel_state.get_pipeline_model_parallel_group())
        replayed, others = self.counts.tolist()
        return {f"{name}/routing_changed": (others / max(replayed, 1), 1.0)}


class _Replayed:
    """Choices of one layer's router; Megatron's ``RouterReplay`` as far as routers call it."""

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
        """Scores and ids of the chosen experts, [t, K] each, for scores [t, E]."""
        _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        table = self._replay.table
        ids = table[(self._codes & _PLACE).clamp(max=len(table) - 1), self._column].long()
        known = ids[:, 0] != NO_IDS
        others = known & (ids.sort(-1).values != own.sort(-1).values).any(-1)
        ids = torch.where(others[:, None], ids, own)  # the same experts in the router's order: the same bits
        if torch.is_grad_enabled():  # recomputation runs a layer twice, the first time without
            self._replay.counts += torch.stack([known.sum(), others.sum()])
        return scores.gather(1, ids), ids
