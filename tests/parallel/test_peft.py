"""PEFT's files through a grid: the same bits in and out, and the merged model that ``megarl convert`` writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from megarl.config.lora import LoraConfig
from megarl.config.schema import ModelConfig, ParallelConfig, TrainerConfig
from megarl.weights.checkpoint.convert.adapters import merge_adapter
from megarl.weights.checkpoint.convert.convert import Settings
from megarl.weights.checkpoint.formats import hf, peft
from tests.parallel.families import save as save_family
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB, save_tiny_qwen3
from tests.parallel.peft_twin import save_adapter

Dtype = Literal["bfloat16", "float32"]
LORAS = {
    "ends": LoraConfig(
        rank=4, alpha=6.0, targets=["all-linear", "lm_head", "embed_tokens"], rank_pattern={"k_proj": 3}
    ),
    "saved": LoraConfig(rank=4, targets=["q_proj", "down_proj"], modules_to_save=["lm_head", "norm", "embed_tokens"]),
    "experts": LoraConfig(rank=3, targets=["gate_proj", "o_proj", "model.layers.1.mlp.experts.1.down_proj"]),
}
GRIDS = {
    "ends": ParallelConfig(tp=2),
    "saved": ParallelConfig(tp=2, sequence_parallel=True),
    "experts": ParallelConfig(dp=2, ep=2),
}
CASES: list[tuple[str, Dtype]] = [("ends", "bfloat16"), ("saved", "float32"), ("experts", "bfloat16")]


def through(rank: int, root: str) -> None:
    """Runs in each rank: load every case's adapter, write it again, and export the merged model."""
    from megatron.core import parallel_state

    from megarl.learn.parallel import process_groups
    from megarl.learn.training.model import Model, micro_batching_for
    from megarl.learn.training.schedule import Head
    from megarl.weights.reshard.layouts import hf_layout
    from megarl.weights.reshard.plan import build_plan

    for name, dtype in CASES:
        folder = Path(root) / name / dtype
        hf_config, parallel, lora = hf.read_hf_config(folder / "hf"), GRIDS[name], LORAS[name]
        process_groups.initialize(parallel, seed=1)
        settings = ModelConfig(path=str(folder / "hf"), dtype=dtype, lora=lora)
        micro_batching = micro_batching_for(parallel, TrainerConfig())
        model = Model(hf_config, settings, parallel, Head(VOCAB), micro_batching)
        model.load_hf(folder / "hf")
        own = model.adapters
        assert own is not None
        own.load(folder / "hf" / "adapter", model.all_tensors)
        own.save(folder / "again", model.all_tensors, base=str(folder / "hf"))
        plan = build_plan(model.layout, hf_layout(hf_config))
        hf.export_hf(plan, rank, model.proven_tensors(), folder / "hf", folder / "exported")
        parallel_state.destroy_model_parallel()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def cast(path: Path, dtype: torch.dtype) -> None:
    save_file({name: value.to(dtype) for name, value in load_file(path).items()}, path, {"format": "pt"})


def test_bits_are_kept_and_merges_agree(tmp_path: Path) -> None:
    for name, dtype in CASES:
        folder = tmp_path / name / dtype / "hf"
        if name == "experts":
            save_family("qwen3_moe", folder)
        else:
            save_tiny_qwen3(folder, layers=2)
        save_adapter(folder, LORAS[name])
        for path in (folder / "model.safetensors", folder / "adapter" / peft.TENSORS):
            cast(path, getattr(torch, dtype))
    run_grid(2, through, str(tmp_path))
    for name, dtype in CASES:
        folder = tmp_path / name / dtype
        before, after = tensors(folder / "hf" / "adapter"), tensors(folder / "again")
        assert before.keys() == after.keys(), (name, dtype)
        for key, value in before.items():
            assert value.dtype is after[key].dtype and torch.equal(value, after[key]), (name, dtype, key)
        settings: list[dict[str, Any]] = [
            json.loads((folder / each / peft.CONFIG).read_text()) for each in ("hf/adapter", "again")
        ]
        assert settings[0] == settings[1]
        assert peft.lora_of(folder / "again", hf.read_hf_config(folder / "hf")).rank == LORAS[name].rank
        merge_adapter(folder / "hf", folder / "hf" / "adapter", folder / "merged", replace(Settings(), progress=False))
        exported, merged = tensors(folder / "exported"), tensors(folder / "merged")
        assert exported.keys() == merged.keys()
        for key, value in merged.items():
            # The same sum in float32, whose last bit may be rounded to the other side.
            tolerance = 2 * torch.finfo(value.dtype).eps if dtype == "bfloat16" else 1e-6
            assert (exported[key].double() - value.double()).abs().max() <= tolerance * value.double().abs().max(), key
            if dtype == "bfloat16":
                assert (exported[key] == value).double().mean() > 0.999, key
