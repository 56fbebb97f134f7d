"""Seconds in which engines sample a step's trajectories, and seconds of forward passes and updates on a grid.

A decode step reads the touched weights and the KV cache, multiplies, reduces between tensor-parallel ranks, and
launches its layers. An engine has slots for as many trajectories as its KV cache holds; one that ends gives its slot to
the next. At the end few long ones are left: the last is as long as the longest of all.

One micro-batch of the slowest pipeline stage decides; the others fill the pipeline (bubble (pp - 1) / vpp). Messages of
tensor and context parallelism and of the experts are not hidden; gradients are hidden behind a backward pass.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Self

from megarl.config.schema import ParallelConfig
from megarl.planner.model_cost import (
    ATTENTION_SHARE,
    BF16,
    DECODE_LAYER_S,
    DECODE_MEMORY_SHARE,
    EXPERT_LAYER_S,
    FAR_LATENCY_S,
    FP8_GAIN,
    MEMORY_SHARE,
    PACKED,
    PRODUCT_SHARE,
    REDUCE_LATENCY_S,
    Device,
    LayerCost,
    ModelCost,
)
from megarl.weights.reshard.grid import MegatronGrid

NORMAL = NormalDist()
SIGMA = 0.7
"""Standard deviation of a response's log length where only the mean is known. Runs of reasoning models have 0.5 to 1;
a run's own record replaces it."""
POINTS = 400
"""Quantiles that stand for the distribution."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of responses: exp(normal(mu, sigma)), at most ``cap``."""

    mu: float
    sigma: float
    cap: int

    @classmethod
    def of_mean(cls, mean: float, cap: int, sigma: float = SIGMA) -> Self:
        """Return the distribution whose truncated mean is ``mean``. A mean near the cap makes all lengths the mean."""
        if mean >= 0.97 * cap:
            return cls(math.log(mean), 0.0, max(cap, math.ceil(mean)))
        low, high = math.log(max(mean, 1)) - 3 * sigma, math.log(cap) + 6 * sigma
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if cls(middle, sigma, cap).mean < mean else (low, middle)
        return cls(low, sigma, cap)

    @classmethod
    def of_quantiles(cls, p50: float, p99: float, most: int) -> Self:
        """Return the distribution with a median and a 99th percentile, truncated at ``most``."""
        return cls(math.log(p50), max(0.0, math.log(p99 / p50)) / NORMAL.inv_cdf(0.99), most)

    @cached_property
    def quantiles(self) -> list[float]:
        """Lengths at ``POINTS`` equally likely quantiles, from the shortest."""
        if not self.sigma:
            return [min(math.exp(self.mu), self.cap)] * POINTS
        steps = ((n + 0.5) / POINTS for n in range(POINTS))
        return [min(math.exp(self.mu + self.sigma * NORMAL.inv_cdf(q)), self.cap) for q in steps]

    @cached_property
    def mean(self) -> float:
        """Mean of the truncated lengths."""
        return sum(self.quantiles) / POINTS

    def context(self, prompt: float) -> float:
        """Return the mean number of tokens that a token of prompt and response attends to."""
        totals = [prompt + length for length in self.quantiles]
        return sum(t * t for t in totals) / (2 * sum(totals))

    def longest(self, number: int) -> float:
        """Return the length that the longest of ``number`` responses has in the median."""
        if not self.sigma or number < 2:
            return self.quantiles[-1] if not self.sigma else min(math.exp(self.mu), self.cap)
        return min(math.exp(self.mu + self.sigma * NORMAL.inv_cdf(0.5 ** (1 / number))), self.cap)


SAMPLED = 256
"""Most trajectories of one engine that are simulated one by one; each stands for an equal share of all."""
OVERHEAD_BYTES = 4e9
"""Bytes of a device that activations, captured graphs and CUDA take from the share of an engine."""


@dataclass(frozen=True)
class RolloutCost:
    """One engine of ``tp`` devices."""

    model: ModelCost
    tp: int
    device: Device
    share: float = 0.85
    """Share of a device's memory that the engine uses."""
    max_num_seqs: int = 1024

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights on one device."""
        return self.model.parameters * BF16 / self.tp

    @property
    def kv_bytes_free(self) -> float:
        """Bytes of one device for the KV cache; 0 if weights leave no room."""
        return max(0.0, self.device.memory_bytes * self.share - self.weight_bytes - OVERHEAD_BYTES)

    def kv_bytes(self, context: float) -> float:
        """Return the bytes on one device of the KV cache of a trajectory with ``context`` tokens."""
        layers = self.model.kinds.items()
        return sum(n * BF16 * layer.kv / min(self.tp, layer.kv_ways) * layer.seen(context) for layer, n in layers)

    def decode_step(self, batch: float, context: float) -> float:
        """Return the seconds in which each of ``batch`` trajectories of ``context`` tokens gets one more token."""
        device, model = self.device, self.model
        rate = device.memory_rate * DECODE_MEMORY_SHARE.value
        weights = flops = 0.0
        for layer, number in model.kinds.items():
            dense, experts = layer.parameters
            touched = 1 - (1 - layer.topk / layer.experts) ** batch if layer.experts else 0.0
            weights += number * (dense + experts * touched)
            flops += number * (layer.flops + 2 * layer.heads * layer.widths * layer.seen(context))
        weights += model.hidden * model.vocab
        flops += 2 * model.hidden * model.vocab
        moved = weights * BF16 / self.tp + batch * self.kv_bytes(context)
        seconds = moved / rate + batch * flops / self.tp / (device.bf16 * PRODUCT_SHARE.value)
        seconds += len(model.layers) * DECODE_LAYER_S.value
        if self.tp > 1:
            near = self.tp <= device.link_domain
            latency = REDUCE_LATENCY_S.value if near else FAR_LATENCY_S.value
            sent = 2 * (self.tp - 1) / self.tp * batch * model.hidden * BF16 / device.rate_of(self.tp)
            seconds += 2 * len(model.layers) * (latency + sent)
        return seconds

    def slots(self, prompt: float, lengths: Lengths) -> float:
        """Return how many trajectories run at a time: bounded by ``max_num_seqs`` and by the KV cache."""
        held = prompt + lengths.context(0) * 1.15
        return min(float(self.max_num_seqs), self.kv_bytes_free / self.kv_bytes(held))

    def seconds(self, trajectories: int, prompt: float, lengths: Lengths, group: int = 1, *, ahead: int = 0) -> float:
        """Return the seconds in which the engine samples ``trajectories``; infinite if its weights leave no KV cache.

        Args:
            group: Trajectories that share a prompt, which is read once.
            ahead: Steps that engines may be ahead; above 0 later trajectories fill the slots of those that end.
        """
        slots = self.slots(prompt, lengths)
        if slots < 1:
            return math.inf
        prefill = trajectories / group * prompt * self.model.flops(prompt / 2)
        seconds = prefill / self.tp / (self.device.bf16 * PRODUCT_SHARE.value)
        if ahead:
            batch = min(slots, trajectories * max(1.0, (1 + ahead) / 2))  # others that may run have ended already
            return seconds + trajectories * lengths.mean / batch * self.decode_step(batch, prompt + lengths.context(0))
        number = min(trajectories, SAMPLED)
        each = trajectories / number
        places = max(1, min(number, int(slots / each)))
        sizes = _spread([lengths.quantiles[int((n + 0.5) / number * len(lengths.quantiles))] for n in range(number)])
        sizes[sizes.index(max(sizes))] = max(max(sizes), lengths.longest(trajectories))
        waiting = iter(sizes)
        running = [(size, 0.0) for _, size in zip(range(places), waiting, strict=False)]  # (last step, first step)
        heapq.heapify(running)
        now = started = 0.0  # steps of decoding; sum of the running ones' first steps
        while running:
            end, start = running[0]
            age = (now + end) / 2 - started / len(running)
            seconds += (end - now) * self.decode_step(len(running) * each, prompt + age)
            now, started = end, started - start
            following = next(waiting, None)
            if following is None:
                heapq.heappop(running)
            else:
                heapq.heapreplace(running, (now + following, now))
                started += now
        return seconds


def _spread(values: list[float]) -> list[float]:
    """Return the values in an order in which long and short ones alternate, as random arrivals do."""
    number = len(values)
    step = next(s for s in range(int(number * 0.618) or 1, number + 2) if math.gcd(s, number) == 1)
    return [values[n * step % number] for n in range(number)]


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
