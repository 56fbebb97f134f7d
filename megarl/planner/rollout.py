"""Seconds in which engines sample a step's trajectories, and lengths of responses as a distribution.

A decode step reads the touched weights and the KV cache, multiplies, reduces between tensor-parallel ranks, and
launches its layers. An engine has slots for as many trajectories as its KV cache holds; one that ends gives its slot to
the next. At the end few long ones are left: the last is as long as the longest of all.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Self

from megarl.planner.accelerators import (
    DECODE_LAYER_S,
    DECODE_MEMORY_SHARE,
    FAR_LATENCY_S,
    PRODUCT_SHARE,
    REDUCE_LATENCY_S,
    Device,
)
from megarl.planner.model_cost import BF16, ModelCost

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
