"""Constants of the cost model that arithmetic does not give, each with the range that measurements leave open.

Fitted to published rows (``tests/unit/cases/planner_rows.json``) within ranges of an earlier fit to 35 of them. Two
constants can trade off against each other, so a range is part of a constant.
"""

from __future__ import annotations

from typing import NamedTuple


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
