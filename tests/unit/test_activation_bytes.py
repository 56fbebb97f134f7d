"""The estimate of activations: against peaks that one H200 showed, and its own laws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gpu import QWEN2_5_1_5B

from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.learn.memory.activation_bytes import activation_bytes, divergence_bytes
from megarl.learn.memory.resident_bytes import model_bytes
from megarl.weights.architectures import ModelSizes, architecture
from megarl.weights.architectures.complete import complete
from tests.unit.test_configs import MODELS

TOKENS = 16_384
BFLOAT16 = ModelConfig(path="unused", dtype="bfloat16")
ONE = ParallelConfig(backend="nccl")
PEAKS = {"fused, long-tailed": 64.0, "fused, one sequence": 64.0, "unfused, long-tailed": 67.8}
"""GiB; docs/benchmarks/gpu.md, the table of ``update``."""


def sizes_of(config: dict[str, Any]) -> ModelSizes:
    whole = complete(config)
    return architecture(whole).sizes(whole)


@pytest.mark.parametrize("peak", PEAKS.values(), ids=PEAKS)
def test_within_15_percent_of_peaks_of_an_h200(peak: float) -> None:
    held = sum(model_bytes(complete(QWEN2_5_1_5B), BFLOAT16, ONE, "lm", trained=True)[0].values())
    kept = activation_bytes(sizes_of(QWEN2_5_1_5B), BFLOAT16, ONE, TOKENS)
    assert (held + kept) / 2**30 == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize("name", ["Qwen2.5-7B-Instruct", "Qwen3-30B-A3B", "DeepSeek-V3-Base-bf16"])
def test_what_is_cut_or_computed_again_takes_less(name: str) -> None:
    sizes = sizes_of(MODELS[name]["config"])
    whole = activation_bytes(sizes, BFLOAT16, ONE, TOKENS)
    grids = [ParallelConfig(tp=2), ParallelConfig(tp=2, sequence_parallel=True), ParallelConfig(cp=2)]
    cut = [activation_bytes(sizes, BFLOAT16, grid, TOKENS) for grid in grids]
    assert whole > cut[0] > cut[1] and cut[2] == pytest.approx(whole / 2, rel=0.01)
    selective = replace(BFLOAT16, recompute="selective", recompute_modules=["moe" if sizes.moe_layers else "mlp"])
    full = replace(BFLOAT16, recompute="full")
    again = [activation_bytes(sizes, model, ONE, TOKENS) for model in (selective, full)]
    assert whole > again[0] > again[1] > 0
    assert activation_bytes(sizes, BFLOAT16, ONE, 2 * TOKENS) == pytest.approx(2 * whole, rel=0.01)


def test_stages_of_a_pipeline_hold_the_micro_batches_in_flight() -> None:
    sizes = sizes_of(MODELS["Qwen2.5-32B"]["config"])
    whole = activation_bytes(sizes, BFLOAT16, ONE, TOKENS, 2**28)
    staged = activation_bytes(sizes, BFLOAT16, ParallelConfig(pp=4), TOKENS, 2**28)
    assert staged == pytest.approx(whole, rel=0.05), "the first stage has as many layers times micro-batches"
    interleaved = activation_bytes(sizes, BFLOAT16, ParallelConfig(pp=4, vpp=4), TOKENS, 2**28)
    assert interleaved > staged
    light = ParallelConfig(pp=4, first_stage_layers=1)
    assert activation_bytes(sizes, BFLOAT16, light, TOKENS, 2**28) < staged


def test_by_hand() -> None:
    """A layer of Qwen2.5-7B on TP2 with sequence parallelism keeps 2 norms and 2 residuals, q, k, v, the q and k of
    the rotary embedding, the output of the attention, and the inputs and output of SwiGLU."""
    sizes = sizes_of(MODELS["Qwen2.5-7B-Instruct"]["config"])
    grid = ParallelConfig(tp=2, sequence_parallel=True)
    layer = (4 * 3584 + (3584 + 2 * 512) + (3584 + 512) + 3584 + 3 * 18944) // 2
    head = 1000 * (152064 // 2) * 2 + 40 * 1000
    assert activation_bytes(sizes, BFLOAT16, grid, 1000) == 2 * 1000 * 28 * layer + head
    chunks = 2 * 10**8 + 152064 // 2 * 3584 * 4 + 40 * 1000
    assert activation_bytes(sizes, BFLOAT16, grid, 1000, 10**8) == 2 * 1000 * 28 * layer + chunks


def test_a_divergence_from_a_whole_vocabulary() -> None:
    """GPU-sized: the teacher's rows count, and a chunk is as large as allowed; a small one takes all its tokens."""
    assert divergence_bytes(150_000, 8192, [(4096, "bfloat16")], 2**28) == 150_000 * 4096 * 2 + 2**28
    assert divergence_bytes(100, 10, [], None) == 10 * 6 * 100 * 4
