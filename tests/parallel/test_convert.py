"""Converted checkpoints in real Megatron models on real grids, and checkpoints that Megatron saved converted back."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.weights.checkpoint.convert.convert import Settings, convert_hf_to_megatron, convert_megatron_to_hf
from megarl.weights.checkpoint.formats.hf import read_hf_config
from megarl.weights.checkpoint.formats.hf_source import places_in_files
from megarl.weights.megatron_private import mtp_inner
from megarl.weights.reshard.layouts import MegatronGrid, hf_layout
from tests.conftest import SOAK
from tests.parallel.families import ALIKE, FAMILIES, MOE, ONE_STAGE, save
from tests.parallel.grid import run_grid
from tests.parallel.test_families import ALL_GRIDS, build_and_load

LOADS = ("tp1", "tp2", "pp2", "pp2-vpp2", "tp2pp2")
EXPERT_LOADS = ("ep2", "tp2ep2", "tp2pp2ep2")
SAVES = [
    ("llama3", "tp2pp2"),
    ("deepseek_v3", "ep2"),
    ("qwen3_moe", "tp2ep2"),
    ("qwen3", "pp2-vpp2"),
    ("qwen3_moe_mixed", "pp2"),
    ("gemma4_small", "tp2"),
]
CUTS = {
    "whole": Settings(progress=False, vocab_multiple=8),  # other padding than any model's
    "cut": Settings(progress=False, grid=MegatronGrid(tp=2, pp=2), vocab_multiple=256, file_bytes=200_000),
}
"""How the converted checkpoints are laid out."""


def sharded(chunks: Any) -> dict[str, Any]:
    from megatron.core import parallel_state

    from megarl.learn.models.gpt import unwrap

    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return {f"model{i}": unwrap(chunk).sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}


def load_on_grids(rank: int, folder: str, cases: list[tuple[str, str, str]]) -> list[str]:
    """Runs in each rank: what differs between Megatron's own load of a converted checkpoint and the HF file's
    slices."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state

    from megarl.learn.models.gpt import unwrap
    from megarl.learn.parallel import process_groups

    wrong = []
    for grid in dict.fromkeys(grid for _, grid, _ in cases):
        process_groups.initialize(ALL_GRIDS[grid], seed=1)
        for family, _, cut in (case for case in cases if case[1] == grid):
            chunks, tensors, _ = build_and_load(Path(folder) / family, ALL_GRIDS[grid], rank)
            expected = {name: tensor.clone() for name, tensor in tensors.items()}
            for tensor in tensors.values():
                tensor.fill_(float("nan"))
            loaded = dist_checkpointing.load(sharded(chunks), f"{folder}/{family}-{cut}")
            for i, chunk in enumerate(chunks):
                unwrap(chunk).load_state_dict(loaded[f"model{i}"])
            wrong += [f"{family} {grid} {cut} {n}" for n, t in tensors.items() if not torch.equal(t, expected[n])]
        dist.barrier()
        parallel_state.destroy_model_parallel()
    return wrong


def save_on_grids(rank: int, folder: str, cases: list[tuple[str, str]]) -> None:
    """Runs in each rank: ``{family}-saved-{grid}``, as Megatron saves it (shared out over data-parallel ranks)."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    from megarl.learn.parallel import process_groups

    for family, grid in cases:
        process_groups.initialize(ALL_GRIDS[grid], seed=1)
        chunks, _, _ = build_and_load(Path(folder) / family, ALL_GRIDS[grid], rank)
        target = Path(folder) / f"{family}-saved-{grid}" / "actor"
        if rank == 0:
            target.mkdir(parents=True)
        dist.barrier()
        strategy = FullyParallelSaveStrategyWrapper(
            TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            True,
        )
        dist_checkpointing.save(sharded(chunks), str(target), strategy)
        dist.barrier()
        parallel_state.destroy_model_parallel()


CONVERTED = [family for family in FAMILIES if SOAK or family not in ALIKE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("convert")
    for family in CONVERTED:
        save(family, root / family)
        for cut, settings in CUTS.items():
            if family in ONE_STAGE and settings.grid.pp > 1:
                settings = replace(settings, grid=replace(settings.grid, pp=1))
            convert_hf_to_megatron(root / family, root / f"{family}-{cut}", settings)
    return root


def world(grid: str) -> int:
    return ALL_GRIDS[grid].world_size


def cuts(family: str, grid: str) -> list[str]:
    """One in turn: every family and every grid meets both. ``make soak`` takes both everywhere."""
    turn = CONVERTED.index(family) // 3 + loads(family).index(grid)
    return list(CUTS) if SOAK else [list(CUTS)[turn % 2]]


TURNS = (("tp2", "pp2", "pp2-vpp2", "tp2pp2"), EXPERT_LOADS)
"""Groups of grids. Each family is loaded on one grid of each group, and on one process; in ``make soak`` on all."""


def loads(family: str) -> list[str]:
    """Grids on which a family is loaded."""
    every = [*LOADS, *(EXPERT_LOADS if family in MOE else ())]
    every = [grid for grid in every if not (family in ONE_STAGE and "pp" in grid)]
    if SOAK:
        return every
    turns = [[grid for grid in some if grid in every] for some in TURNS]
    return [every[0], *(some[CONVERTED.index(family) % len(some)] for some in turns if some)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_megatron_loads_what_was_converted(folder: Path, size: int) -> None:
    cases = [
        (family, grid, cut)
        for family in CONVERTED
        for grid in loads(family)
        if world(grid) == size
        for cut in cuts(family, grid)
    ]
    for rank, wrong in enumerate(run_grid(size, load_on_grids, str(folder), cases)):
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize("size", [2, 4])
def test_what_megatron_saved_is_the_same_hf_model(folder: Path, size: int) -> None:
    cases = [(family, grid) for family, grid in SAVES if world(grid) == size]
    run_grid(size, save_on_grids, str(folder), cases)
    for family, grid in cases:
        saved, out = folder / f"{family}-saved-{grid}", folder / f"{family}-back-{grid}"
        convert_megatron_to_hf(saved, out, folder / family, Settings(progress=False, verify=True))
        got, expected = load_file(out / "model.safetensors"), load_file(folder / family / "model.safetensors")
        assert got.keys() == expected.keys(), f"{family} {grid}"
        assert all(torch.equal(got[name], expected[name]) for name in expected), f"{family} {grid}"
        shutil.rmtree(saved)


def load_value_head(rank: int, hf: str, meg: str) -> torch.Tensor | None:
    """Runs in each rank: a critic's score head on the last stage."""
    from megatron.core import dist_checkpointing, parallel_state

    from megarl.config.schema import ModelConfig
    from megarl.learn.models.gpt import build_chunks, unwrap
    from megarl.learn.parallel import process_groups

    parallel = ALL_GRIDS["tp2pp2"]
    process_groups.initialize(parallel, seed=1)
    (stage,) = build_chunks(read_hf_config(Path(hf)), ModelConfig(path=hf, dtype="float32"), parallel, "score")
    model: Any = unwrap(stage)
    loaded = dist_checkpointing.load(sharded([stage]), meg)
    model.load_state_dict(loaded["model0"])
    return model.output_layer.weight.detach() if parallel_state.is_pipeline_last_stage() else None


@pytest.mark.parametrize("family", ["qwen3", "llama3"])
def test_megatron_loads_a_value_head(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    model_type, settings = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **settings, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "hf")
    convert_hf_to_megatron(tmp_path / "hf", tmp_path / "meg", CUTS["cut"])
    expected = load_file(tmp_path / "hf/model.safetensors")["score.weight"]
    heads = run_grid(4, load_value_head, str(tmp_path / "hf"), str(tmp_path / "meg"))
    assert heads[0] is None and heads[1] is None
    assert all(torch.equal(head, expected) for head in heads[2:])


def load_mtp(rank: int, hf: str, meg: str) -> list[str]:
    """Runs in each rank: tensors that differ, of Megatron's model with its prediction layer."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from megarl.config.schema import ModelConfig
    from megarl.learn.models import gpt, norms, specs
    from megarl.learn.parallel import process_groups
    from megarl.learn.parallel.grid import megatron_grid
    from megarl.weights.architectures import architecture, megatron_config
    from megarl.weights.checkpoint.formats.hf import load_into
    from megarl.weights.reshard.layouts import megatron_layout

    parallel = ALL_GRIDS["pp2"]
    process_groups.initialize(parallel, seed=1)
    config, model = read_hf_config(Path(hf)), ModelConfig(path=hf, dtype="float32")
    kwargs = megatron_config.transformer_kwargs
    gpt.transformer_kwargs = lambda *a: kwargs(*a) | {"mtp_num_layers": 1}  # type: ignore[attr-defined]
    transformer = gpt.transformer_config(config, model, parallel)
    block = specs.block_spec(transformer, model)
    mtp = get_gpt_mtp_block_spec(transformer, block, use_transformer_engine=False)
    for layer in mtp.layer_specs if mtp else ():
        layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = norms.RMSNorm
    stage: torch.nn.Module = GPTModel(
        transformer,
        block,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        parallel_output=True,
        mtp_block_spec=mtp,
        **megatron_config.gpt_kwargs(architecture(config), config) | {"vocab_size": 256},
    )
    tensors = gpt.named_tensors(stage)
    load_into(Path(hf), megatron_layout(config, megatron_grid(parallel), mtp=True), rank, tensors)
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.fill_(float("nan"))
    stage.load_state_dict(dist_checkpointing.load(sharded([stage]), meg)["model0"])
    assert rank == 0 or any(f"mtp.layers.0.{mtp_inner()}mlp" in name for name in expected)
    return [name for name, tensor in tensors.items() if not torch.equal(tensor, expected[name])]


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5", "qwen3_next"])
def test_megatron_loads_prediction_layers(tmp_path: Path, family: str) -> None:
    save(family, tmp_path / "plain")
    config = read_hf_config(tmp_path / "plain") | {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
    generator = torch.Generator().manual_seed(7)
    places = places_in_files(config, hf_layout(config, mtp=True).tensors, "lm").values()
    shapes = {place.stored: place.whole for place in places}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "hf/model.safetensors")
    convert_hf_to_megatron(tmp_path / "hf", tmp_path / "meg", Settings(progress=False, mtp=True))
    assert run_grid(2, load_mtp, str(tmp_path / "hf"), str(tmp_path / "meg")) == [[], []]
