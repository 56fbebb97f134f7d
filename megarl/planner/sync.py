"""Seconds of a weight sync by its transport."""

from __future__ import annotations

from typing import Literal, NamedTuple

from megarl.planner.accelerators import Device
from megarl.planner.model_cost import BF16, ModelCost


class TransportRate(NamedTuple):
    """Rate of a transport: bytes per second of dense weights and of experts, of one receiver or of the whole model."""

    dense: float
    experts: float
    of: Literal["receiver", "model"]
    fixed_s: float


TRANSPORTS: dict[str, TransportRate] = {
    "nccl": TransportRate(25e9, 25e9, "receiver", 0.3),
    "gloo": TransportRate(1.9e9, 1.9e9, "receiver", 0.5),
    "gather": TransportRate(5.0e9, 1.85e9, "model", 0.0),
    "nemo": TransportRate(26e9, 26e9, "model", 0.0),
}
"""``nccl``: slices from rank to worker, half of a network port. ``gloo``: through host memory (docs/benchmarks/gpu.md).
``gather``: whole parameters gathered and sent to all workers, verl's published rows. ``nemo``: NeMo-RL's refit in
turns."""


def sync_seconds(model: ModelCost, tp: int, device: Device, transport: str) -> float:
    """Return the seconds of a sync of all weights to engines of ``tp`` devices, all engines at once."""
    rate = TRANSPORTS[transport]
    experts = sum(layer.parameters[1] for layer in model.layers) * BF16
    dense = model.parameters * BF16 - experts
    ways = tp if rate.of == "receiver" else 1
    most = min(1.0, device.network_rate / rate.dense) if rate.of == "receiver" else 1.0
    return rate.fixed_s + (dense / rate.dense + experts / rate.experts) / ways / most
