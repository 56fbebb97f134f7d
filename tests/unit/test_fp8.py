"""The trainer's linear layers in 8 bits: models and jobs that cannot have them, padded tokens, planned bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config.lora import LoraConfig
from megarl.config.schema import ModelConfig, ParallelConfig, TrainerConfig
from megarl.core.errors import ConfigError
from megarl.core.jobs import JOBS
from megarl.learn.batching import Sequences, micro_batches
from megarl.learn.memory.activation_bytes import activation_bytes
from megarl.learn.models.specs import check_fp8
from megarl.learn.training.model import micro_batching_for, padded_for
from megarl.run.checks.engine_options import check_engine_settings
from megarl.weights.architectures import architecture
from megarl.weights.architectures.complete import complete
from tests.parallel.batches import random_sequences
from tests.unit.small_job import config_of
from tests.unit.test_configs import MODELS

EIGHT = ModelConfig(dtype="bfloat16", transformer_impl="transformer_engine", fp8="tensorwise")
QWEN = "Qwen2.5-7B-Instruct"


@pytest.mark.parametrize(
    ("model", "tp", "name", "words"),
    [
        (
            replace(EIGHT, transformer_impl="local"),
            1,
            QWEN,
            r"model\.transformer_impl=local, .* set it to transformer_engine",
        ),
        (replace(EIGHT, dtype="float32"), 1, QWEN, r"model\.dtype=float32; set it to bfloat16"),
        (replace(EIGHT, lora=LoraConfig(rank=8)), 1, QWEN, r"model\.lora\.rank=8, .*; set it to 0"),
        (EIGHT, 1, "Qwen3-30B-A3B", "experts, whose tokens"),
        (EIGHT, 3, QWEN, "a MLP width of a rank of 6314, no multiple of 16"),
        (replace(EIGHT, fp8="blockwise"), 8, QWEN, "a MLP width of a rank of 2368, no multiple of 128"),
    ],
)
def test_models_without_eight_bits(model: ModelConfig, tp: int, name: str, words: str) -> None:
    hf_config = complete(MODELS[name]["config"])
    with pytest.raises(ConfigError, match=f"fp8={model.fp8} with {words}.*, or set model.fp8 to null"):
        check_fp8(model, ParallelConfig(tp=tp), hf_config)
    check_fp8(EIGHT, ParallelConfig(tp=4), complete(MODELS[QWEN]["config"]))
    check_fp8(replace(model, fp8=None), ParallelConfig(tp=tp), hf_config)


def test_engines_in_more_bits_need_a_correction(tmp_path: Path) -> None:
    more = ["model.dtype=bfloat16", "model.fp8=tensorwise"]
    with pytest.raises(ConfigError, match=r"fp8=tensorwise without algorithm\.correction: .*, or model\.fp8=null"):
        check_engine_settings(config_of(tmp_path, *more), JOBS["both"])
    more.append("algorithm.correction=truncate")
    with pytest.raises(ConfigError, match=r"fp8=tensorwise without sync\.probe_tolerance"):
        check_engine_settings(config_of(tmp_path, *more), JOBS["both"])
    more += ["sync.probe_tolerance=0.06", "sync.sample_tolerance=0.1"]
    check_engine_settings(config_of(tmp_path, *more), JOBS["both"])


@pytest.mark.parametrize("packing", [True, False])
def test_tokens_of_every_rank_come_in_whole_units(packing: bool) -> None:
    sequences: Sequences = random_sequences(5, 13, 64)
    parallel = ParallelConfig(tp=2, cp=2, sequence_parallel=True)
    trainer = TrainerConfig(packing=packing, micro_batch_size=3, max_tokens_per_micro_batch=72)
    widths: dict[Any, list[int]] = {}
    for model in (EIGHT, replace(EIGHT, fp8=None)):
        batches = micro_batches(sequences, padded_for(model, micro_batching_for(parallel, trainer)), 0)
        widths[model.fp8] = [batch.index.shape[1] for batch in batches]
    assert all(width % (2 * 2 * 16) == 0 for width in widths["tensorwise"])
    assert any(width % (2 * 2 * 16) for width in widths[None])


def test_planned_bytes_are_two_more_for_each_linear_weight() -> None:
    sizes, plain = architecture(config := complete(MODELS[QWEN]["config"])).sizes(config), replace(EIGHT, fp8=None)
    weights = 3584 * (3584 + 2 * 512 + 3584 + 3 * 18944)  # of a layer: Q, K and V, output, MLP
    for grid, layers in ((ParallelConfig(), 28), (ParallelConfig(tp=2), 14), (ParallelConfig(pp=4), 28)):
        more = activation_bytes(sizes, EIGHT, grid, 4096) - activation_bytes(sizes, plain, grid, 4096)
        assert more == 2 * weights * layers
    full = [
        activation_bytes(sizes, replace(model, recompute="full"), ParallelConfig(), 4096) for model in (EIGHT, plain)
    ]
    assert full[0] - full[1] == 2 * weights, "copies of one layer at a time"
