"""Seconds of forward passes and updates on a grid: products, attention, elementwise work, and messages between ranks.

One micro-batch of the slowest pipeline stage decides; the others fill the pipeline (bubble (pp - 1) / vpp). Messages of
tensor and context parallelism and of the experts are not hidden; gradients are hidden behind a backward pass.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from megarl.config.schema import ParallelConfig
from megarl.planner.accelerators import (
    ATTENTION_SHARE,
    EXPERT_LAYER_S,
    FP8_GAIN,
    MEMORY_SHARE,
    PACKED,
    PRODUCT_SHARE,
    Device,
)
from megarl.planner.model_cost import BF16, LayerCost, ModelCost
from megarl.weights.reshard.grid import MegatronGrid

FLOAT = 4
OPTIMIZER_BYTES = 30
"""Bytes that AdamW reads and writes for each element of a rank's share: gradient, master, two moments, new weight."""
BACKWARD = 2.0
"""Operations of products in a backward pass, divided by operations in a forward pass."""
BACKWARD_ATTENTION = 2.5
"""Operations of attention in a backward pass, divided by operations in a forward pass."""


@dataclass(frozen=True)
class Parts:
    """Seconds of one micro-batch on one rank, by cause."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    messages: float = 0.0
    experts: float = 0.0

    def __add__(self, other: Parts) -> Parts:
        return Parts(*(a + b for a, b in zip(self.values, other.values, strict=True)))

    def __mul__(self, factor: float) -> Parts:
        return Parts(*(factor * value for value in self.values))

    @property
    def values(self) -> tuple[float, ...]:
        return self.products, self.attention, self.elementwise, self.messages, self.experts

    @property
    def total(self) -> float:
        return sum(self.values)


@dataclass(frozen=True)
class TrainingCost:
    """A model on a grid of devices.

    ``recompute`` and ``modules``: as ``model.recompute`` and ``model.recompute_modules``.
    """

    model: ModelCost
    grid: ParallelConfig
    device: Device
    recompute: str = "none"
    modules: tuple[str, ...] = ()
    eight_bits: bool = False
    """True if products of layers are in 8 bits (published rows only: megarl trains in bfloat16)."""
    tuned_experts: bool = False
    """True with DeepEP's dispatcher and captured graphs: a token goes once to a link domain for all its experts there,
    and half of the messages and of ``EXPERT_LAYER_S`` is hidden behind other work."""

    def passes(self, tokens: float, micro_batch: int, context: float) -> float:
        """Return the seconds of a forward pass over ``tokens`` of all ranks in micro-batches of ``micro_batch``."""
        return self._pipeline(tokens, micro_batch, context, trains=False)

    def update(self, tokens: float, micro_batch: int, context: float) -> float:
        """Return the seconds of one optimizer update over ``tokens`` of all ranks."""
        seconds = self._pipeline(tokens, micro_batch, context, trains=True)
        grid, device = self.grid, self.device
        dense, experts = rank_parameters(self.model, grid)
        of_dense, of_experts = copies(grid)
        sent = (_ring(of_dense) * dense + _ring(of_experts) * experts) * (FLOAT + BF16)
        exposed = sent / device.rate_of(grid.stage_size)
        if grid.overlap_grad_reduce:
            number = self.micro_batches(tokens, micro_batch)
            exposed = max(0.0, exposed - 0.7 * seconds / number)
        share = dense / of_dense + experts / of_experts
        return seconds + exposed + share * OPTIMIZER_BYTES / (device.memory_rate * MEMORY_SHARE.value)

    def micro_batches(self, tokens: float, micro_batch: float) -> int:
        """Return the number of packed micro-batches of a rank.

        Args:
            tokens: Tokens of all data-parallel ranks.
            micro_batch: ``trainer.max_tokens_per_micro_batch``.
        """
        return max(1, math.ceil(tokens / self.grid.dp / micro_batch / PACKED.value - 1e-9))

    def _pipeline(self, tokens: float, micro_batch: float, context: float, *, trains: bool) -> float:
        number = self.micro_batches(tokens, micro_batch)
        each = tokens / self.grid.dp / number
        bubble = (self.grid.pp - 1) / self.grid.vpp
        return (number + bubble) * self.micro_batch(each, context, trains=trains).total

    def micro_batch(self, tokens: float, context: float, *, trains: bool) -> Parts:
        """Return the seconds of one micro-batch on the slowest stage."""
        here = tokens / self.grid.cp
        costs = {kind: self._layer(kind, here, context, trains) for kind in self.model.kinds}
        head = self._product(self.model.hidden, self.model.vocab / self.grid.tp, here, bf16=True)
        last = Parts(products=head * (1 + BACKWARD * trains))
        slowest = Parts()
        for number, stage in enumerate(stages(self.model.layers, self.grid)):
            found = last if number == self.grid.pp - 1 else Parts()
            for layer, count in stage.items():
                found += costs[layer] * count
            slowest = max(slowest, found, key=lambda parts: parts.total)
        return slowest

    def _layer(self, layer: LayerCost, tokens: float, context: float, trains: bool) -> Parts:
        forward, backward = self._forward(layer, tokens, context), Parts()
        if trains:
            backward = replace(
                forward,
                products=forward.products * BACKWARD,
                attention=forward.attention * BACKWARD_ATTENTION,
                elementwise=forward.elementwise * BACKWARD,
                experts=0.0,
            )
            if self.recompute == "full":
                backward += replace(forward, messages=forward.messages / 2)
            elif self.recompute == "selective" and {"mlp", "moe"} & set(self.modules):
                whole = sum(2 * p.rows * p.k * p.n for p in layer.products)
                attends = sum(2 * p.k * p.n for p in layer.attention)
                backward += Parts(products=forward.products * (1 - attends / whole))
        return forward + backward

    def _forward(self, layer: LayerCost, tokens: float, context: float) -> Parts:
        grid, device = self.grid, self.device
        products = 0.0
        for p in layer.products:
            k, n, rows = float(p.k), float(p.n), tokens * p.rows
            if p.is_expert:
                products += self._experts(k, n, rows, layer.experts)
                continue
            k, n = (k / grid.tp, n) if p.cut == "row" else (k, n / grid.tp) if p.cut == "column" else (k, n)
            products += self._product(k, n, rows)
        attention = 2 * tokens * layer.seen(context) * layer.heads * layer.widths / grid.tp
        along = grid.tp if grid.sequence_parallel else 1
        elements = layer.elements[0] / along + layer.elements[1] / grid.tp
        return Parts(
            products,
            attention / (device.bf16 * ATTENTION_SHARE.value),
            tokens * elements * BF16 / (device.memory_rate * MEMORY_SHARE.value),
            self._messages(layer, tokens),
            EXPERT_LAYER_S.value * (0.5 if self.tuned_experts else 1.0) if layer.experts else 0.0,
        )

    def _product(self, k: float, n: float, rows: float, *, bf16: bool = False) -> float:
        rate = self.device.bf16 * PRODUCT_SHARE.value * (FP8_GAIN.value if self.eight_bits and not bf16 else 1.0)
        moved = BF16 * (rows * k + k * n + rows * n)
        return 2 * rows * k * n / rate + moved / self.device.memory_rate

    def _experts(self, k: float, n: float, rows: float, experts: int) -> float:
        """Return the seconds of a grouped product: a rank's experts get as many rows as its tokens choose."""
        grid = self.grid
        rate = self.device.bf16 * PRODUCT_SHARE.value * (FP8_GAIN.value if self.eight_bits else 1.0)
        here = experts / grid.ep
        rows, cut = rows * grid.expert_tp / grid.tp, k * n / grid.expert_tp
        moved = BF16 * (rows * (k + n) + here * cut)
        return 2 * rows * cut / rate + moved / self.device.memory_rate

    def _messages(self, layer: LayerCost, tokens: float) -> float:
        """Return the seconds of a forward pass's messages; a backward pass sends as many."""
        grid, device, hidden = self.grid, self.device, self.model.hidden
        seconds = 2 * 2 * _ring(grid.tp) * tokens * hidden * BF16 / device.rate_of(grid.tp)
        if grid.cp > 1:
            seconds += 0.5 * (grid.cp - 1) * tokens * layer.kv / grid.tp * BF16 / device.rate_of(grid.tp * grid.cp)
        if layer.experts and grid.ep > 1:
            ranks = grid.ep * grid.expert_tp
            domains = max(1, math.ceil(ranks / device.link_domain))
            near = layer.topk / domains
            far = layer.topk - near
            if self.tuned_experts:
                far = (domains - 1) * (1 - (1 - 1 / domains) ** layer.topk)
            sent = 2 * (1 - 1 / grid.ep) * tokens / grid.tp * hidden * BF16
            sent *= near / device.link_rate + far / device.network_rate
            seconds += sent / 2 if self.tuned_experts else sent
        return seconds


def rank_parameters(model: ModelCost, grid: ParallelConfig) -> tuple[float, float]:
    """Return the elements of weights on the fullest rank: without routed experts, and of routed experts."""
    most = (0.0, 0.0)
    head = model.hidden * model.vocab / grid.tp
    for number, stage in enumerate(stages(model.layers, grid)):
        dense = sum(count * layer.parameters[0] for layer, count in stage.items()) / grid.tp
        ends = (number == 0) + (number == grid.pp - 1)
        dense += head * (min(ends, 1) if model.tied else ends)
        experts = sum(count * layer.parameters[1] for layer, count in stage.items())
        most = max(most, (dense, experts / (grid.ep * grid.expert_tp)), key=sum)
    return most


def copies(grid: ParallelConfig) -> tuple[int, int]:
    """Return how many ranks have the same weights: outside experts, and of experts."""
    return grid.dp * grid.cp, grid.stage_size // (grid.ep * grid.expert_tp)


def stages(layers: tuple[LayerCost, ...], grid: ParallelConfig) -> tuple[Counter[LayerCost], ...]:
    """Return kind of layer -> number, for every pipeline stage."""
    return _stages(layers, grid.pp, grid.vpp, grid.first_stage_layers, grid.last_stage_layers)


@lru_cache(maxsize=256)
def _stages(
    layers: tuple[LayerCost, ...], pp: int, vpp: int, first: int | None, last: int | None
) -> tuple[Counter[LayerCost], ...]:
    grid = MegatronGrid(pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last)
    return tuple(Counter(layers[n] for chunk in chunks for n in chunk) for chunks in grid.layers(len(layers)))


def _ring(ranks: int) -> float:
    """Return the share of a buffer that each rank sends in a ring's gather or scatter."""
    return (ranks - 1) / ranks
