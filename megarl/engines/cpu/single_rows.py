"""Batch-invariant single rows in the linear layers of engines on CPU.

oneDNN may multiply a single row with another kernel and another order of sums. A sequence that decodes alone would then
get other log-probs than in a batch. Two or more rows give the same bits for any count, so a single row is computed
twice. Whether a shape needs this depends on the instruction set and is tested once per shape.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

# vLLM configures only its own loggers; other loggers show warnings only.
log = logging.getLogger("vllm.megarl.single_rows")

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""``layer.cpu_linear`` of vLLM: x [..., K], the weight (empty where it is packed), bias -> [..., N]."""

TRIED_ROWS = 8

known: dict[tuple[Any, ...], bool] = {}
"""Shape, type and threads of a product -> True if a single row must be computed twice."""


def install() -> None:
    """Patch all linear layers whose weights vLLM prepares later; a second call changes nothing."""
    from vllm.model_executor.layers import utils

    prepare: Any = utils.dispatch_cpu_unquantized_gemm
    if getattr(prepare, "doubles", False):
        return

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        shape, dtype = tuple(weight.shape), weight.dtype
        is_matrix = not weight.is_meta and len(shape) == 2
        prepare(layer, remove_weight)
        if is_matrix and needs_doubling(layer.cpu_linear, layer.weight, shape, dtype):
            layer.cpu_linear = doubling(layer.cpu_linear)

    dispatch_cpu_unquantized_gemm.doubles = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def doubling(linear: Linear) -> Linear:
    """Return the same product, but with a single row computed twice."""

    def doubled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[:-1].numel() != 1:
            return linear(x, weight, bias)
        two = x.reshape(1, -1).repeat(2, 1)
        return linear(two, weight, bias)[:1].reshape(*x.shape[:-1], -1)

    return doubled


def needs_doubling(linear: Linear, weight: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return True unless single rows have the same bits as in a batch.

    Args:
        linear: The product; ``weight``: its argument.
        shape: [N, K] of the matrix, and ``dtype`` its type; each combination is tested once.
    """
    key = (*shape, dtype, torch.get_num_threads())
    if key not in known:
        rows = torch.randn(TRIED_ROWS, shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
        among = linear(rows, weight, None)
        if not among.any():
            return True  # zeros, as before weights arrive, prove nothing
        alone = torch.cat([linear(row, weight, None) for row in rows.split(1)])
        known[key] = not torch.equal(alone, among)
        if known[key]:
            log.info("Layers of %d to %d features compute a single row twice.", shape[1], shape[0])
    return known[key]
