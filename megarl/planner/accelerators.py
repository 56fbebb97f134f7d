"""Accelerators that a plan can use, and constants of the cost model.

Fitted to published rows (``tests/unit/cases/planner_rows.json``) within ranges of an earlier fit to 35 of them. Two
constants can trade off against each other, so a range is part of a constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Device:
    """One accelerator and its links. Rates are the data sheet's, in one direction."""

    name: str
    bf16: float
    """Dense bfloat16 operations per second."""
    memory_bytes: float
    """Bytes of device memory that the driver reports."""
    memory_rate: float
    """Bytes per second of device memory."""
    link_rate: float
    """Bytes per second between two devices of one link domain (NVLink, or PCIe without it)."""
    link_domain: int
    """Devices that these links connect."""
    network_rate: float
    """Bytes per second of one device to another link domain."""
    host_rate: float
    """Bytes per second between device and pinned host memory."""
    fp8: float | None = None
    """Dense 8-bit operations per second; None if the device has none."""
    backend: Literal["nccl", "gloo"] = "nccl"
    """Backend of collectives and, within a node, of weights."""

    def rate_of(self, group: int) -> float:
        """Return the bytes per second of one rank in a group of ranks on neighbouring devices."""
        return self.link_rate if group <= self.link_domain else self.network_rate


DEVICES: dict[str, Device] = {
    "h100": Device("h100", 989e12, 85.0e9, 3.35e12, 450e9, 8, 50e9, 54e9, fp8=1979e12),
    "h100-500w": Device("h100-500w", 989e12 * 0.8, 102.0e9, 2.4e12, 450e9, 8, 50e9, 54e9, fp8=1979e12 * 0.8),
    "h200": Device("h200", 989e12, 150.0e9, 4.8e12, 450e9, 8, 50e9, 54e9, fp8=1979e12),
    "b200": Device("b200", 2250e12, 192.0e9, 8.0e12, 900e9, 8, 50e9, 54e9, fp8=4500e12),
    "gb200": Device("gb200", 2450e12, 198.0e9, 8.0e12, 900e9, 72, 50e9, 180e9, fp8=4900e12),
    "a100": Device("a100", 312e12, 85.0e9, 2.04e12, 300e9, 8, 25e9, 25e9),
    "l40s": Device("l40s", 362e12, 48.3e9, 0.864e12, 25e9, 8, 12.5e9, 25e9, fp8=733e12),
    "cpu": Device("cpu", 0.09e12, 12.0e9, 0.019e12, 5e9, 64, 1.25e9, 5e9, backend="gloo"),
}
"""Name for ``megarl plan --gpu`` -> device.

Sources: NVIDIA's data sheets of H100 SXM, H200, B200, GB200 NVL72, A100 SXM 80 GB and L40S; one port of 400 Gb/s for
each device (A100: 200). ``h100-500w``: the cards of torchtitan's published rows, 96 GB with HBM2e. ``cpu``: one core of
the machine that runs the tests, in float32.
"""


class Constant(NamedTuple):
    """A constant, and the range of values that fit about as well."""

    value: float
    low: float
    high: float
    meaning: str


PRODUCT_SHARE = Constant(0.71, 0.68, 0.76, "share of the peak rate that a large product reaches")
ATTENTION_SHARE = Constant(
    0.35, 0.30, 0.55, "share of the peak rate that fused attention reaches, forward and backward"
)
EXPERT_LAYER_S = Constant(2.9e-3, 2.6e-3, 3.1e-3, "seconds of a MoE layer, micro-batch and pass beyond its arithmetic")
DECODE_MEMORY_SHARE = Constant(0.56, 0.52, 0.71, "share of the memory's rate that decoding reaches")
DECODE_LAYER_S = Constant(0.18e-3, 0.15e-3, 0.21e-3, "seconds of a layer of a decoded token beyond its bytes")
MEMORY_SHARE = Constant(0.8, 0.7, 0.9, "share of the memory's rate that elementwise work reaches")
PACKED = Constant(0.95, 0.9, 1.0, "share of a packed micro-batch that is tokens")
FP8_GAIN = Constant(1.5, 1.2, 1.6, "factor by which 8-bit products are faster than bfloat16 ones, casts included")
REDUCE_LATENCY_S = Constant(15e-6, 10e-6, 30e-6, "seconds of a small all-reduce within a link domain")
FAR_LATENCY_S = Constant(35e-6, 30e-6, 100e-6, "seconds of a small all-reduce over the network")
