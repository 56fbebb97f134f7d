"""The predicted bytes of residents equal those of models that were built and have made a step, on every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config.algorithms import KLConfig, PPOConfig
from megarl.config.lora import ALL_LINEAR, LoraConfig
from megarl.config.schema import (
    Config,
    CriticConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ReferenceConfig,
    RewardModelConfig,
    TrainerConfig,
)
from tests.conftest import SOAK
from tests.parallel.families import save
from tests.parallel.grid import run_grid
from tests.parallel.test_value_head import hf_classifier

Case = tuple[str, ParallelConfig, str]
"""Model, grid, dtype."""
ADAPTED = {
    "qwen3, LoRA": LoraConfig(rank=3, rank_pattern={"k_proj": 5}, modules_to_save=["norm"]),
    "untied, LoRA": LoraConfig(rank=4, targets=[ALL_LINEAR, "lm_head", "embed_tokens"]),
    "moe, LoRA": LoraConfig(rank=3),
    "untied, one layer": LoraConfig(rank=4, targets=["layers.0.mlp.up_proj"]),
    "moe, one expert": LoraConfig(rank=4, targets=["layers.0.mlp.experts.1.up_proj"]),
    "deepseek, routers": LoraConfig(rank=4, modules_to_save=["mlp.gate"]),
}
"""Models with adapters. Most sizes are no multiple of 64, so that there are gaps between parameters. Of some only one
stage, or one of the ranks that share experts, has something to train; a router has a bias that is not trained."""
LM_ALONE = ("tower", "untied", "one expert", "routers", "factors", "inputs")
"""Parts of the names of models that are not built with a score head."""
CASES: dict[int, list[Case]] = {
    1: [
        ("tied", ParallelConfig(), "float32"),
        ("moe", ParallelConfig(), "bfloat16"),
        ("tower", ParallelConfig(), "float32"),
    ],
    2: [
        ("qwen3", ParallelConfig(tp=2), "float32"),
        ("qwen3", ParallelConfig(tp=2), "bfloat16"),
        ("qwen3", ParallelConfig(cp=2), "bfloat16"),
        ("tied", ParallelConfig(dp=2), "float32"),
        ("tied", ParallelConfig(dp=2), "bfloat16"),
        ("tied", ParallelConfig(pp=2), "bfloat16"),
        ("tied", ParallelConfig(pp=2, vpp=2), "float32"),
        ("uneven", ParallelConfig(dp=2), "bfloat16"),
        ("moe", ParallelConfig(dp=2), "float32"),
        ("moe", ParallelConfig(dp=2, ep=2), "bfloat16"),
        ("mixed", ParallelConfig(pp=2, vpp=2), "bfloat16"),
        ("deepseek", ParallelConfig(dp=2, ep=2), "bfloat16"),
        ("direct", ParallelConfig(dp=2), "bfloat16"),
        ("deepseek", ParallelConfig(pp=2, first_stage_layers=1), "float32"),
        ("tower", ParallelConfig(dp=2), "bfloat16"),
        ("factors", ParallelConfig(dp=2), "bfloat16"),
        ("inputs", ParallelConfig(dp=2), "bfloat16"),
        ("trained tower", ParallelConfig(dp=2), "bfloat16"),
        ("trained tower", ParallelConfig(pp=2, vpp=2), "float32"),
        ("qwen3, LoRA", ParallelConfig(tp=2), "bfloat16"),
        ("qwen3, LoRA", ParallelConfig(dp=2), "float32"),
        ("qwen3, LoRA", ParallelConfig(pp=2), "bfloat16"),
        ("untied, LoRA", ParallelConfig(pp=2, vpp=2), "bfloat16"),
        ("moe, LoRA", ParallelConfig(dp=2, ep=2), "bfloat16"),
        ("untied, one layer", ParallelConfig(pp=2), "float32"),
        ("moe, one expert", ParallelConfig(dp=2, ep=2), "float32"),
        ("deepseek, routers", ParallelConfig(dp=2, ep=2), "float32"),
    ],
    3: [("tied", ParallelConfig(dp=3), "bfloat16"), ("moe", ParallelConfig(dp=3), "float32")],
    4: [
        ("tied", ParallelConfig(pp=2, dp=2), "bfloat16"),
        ("tied", ParallelConfig(pp=2, vpp=2, dp=2), "bfloat16"),
        ("uneven", ParallelConfig(dp=4), "bfloat16"),
        ("uneven", ParallelConfig(tp=2, dp=2), "float32"),
        ("moe", ParallelConfig(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True), "bfloat16"),
        ("moe", ParallelConfig(dp=4, ep=2), "float32"),
    ],
}
HEADS = "lm", "score"


def heads(case: Case) -> tuple[str, ...]:
    """Heads that there are of a case's model; ``make soak`` has both, every run one in turn of models with both."""
    if any(part in case[0] for part in LM_ALONE):
        return HEADS[:1]
    turn = CASES[case[1].world_size].index(case) % 2
    return HEADS if SOAK else HEADS[turn : turn + 1]


def folder_of(case: Case, folder: Path) -> Path:
    """The checkpoint of a case's model."""
    return folder / case[0].partition(",")[0]


def settings_of(case: Case, path: Path | None = None) -> ModelConfig:
    model, _, dtype = case
    lora = ADAPTED.get(model, LoraConfig())
    trained = model == "trained tower"
    return ModelConfig(path=str(path), dtype=dtype, lora=lora, train_vision_tower=trained)  # type: ignore[arg-type]


def built(case: Case, folder: Path, head: str, trained: bool) -> Any:
    from megarl.learn.training.model import Model, TrainedModel, micro_batching_for
    from megarl.learn.training.schedule import Head
    from megarl.weights.checkpoint.formats import hf
    from tests.parallel.families import VOCAB

    parallel, path = case[1], folder_of(case, folder)
    arguments = (
        hf.read_hf_config(path),
        settings_of(case, path),
        parallel,
        Head(VOCAB) if head == "lm" else None,
        micro_batching_for(parallel, TrainerConfig(packing=False, micro_batch_size=1)),
    )
    return TrainedModel(*arguments, OptimizerConfig(lr=1e-3)) if trained else Model(*arguments)


def on_grids(rank: int, folder: str, cases: list[Case]) -> list[dict[str, int]]:
    """Runs in each rank: of every case, head and way to use it, kind -> bytes of the residents after a step, which has
    written what it should have."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megarl.learn.memory.residents import residents_of
    from megarl.learn.parallel import process_groups
    from tests.parallel.test_megatron_on_cpu import sft_steps

    found = []
    for case in cases:
        process_groups.initialize(case[1], seed=1)
        for head in heads(case):
            for trained in (False, True):
                model = built(case, Path(folder), head, trained)
                if trained and head == "lm":
                    sft_steps(model, range(1))
                elif trained:
                    model.step(1e-3)
                if trained:
                    model.model.proven_tensors()
                found.append(
                    {
                        resident.kind: resident.nbytes
                        for resident in residents_of("actor", model.model if trained else model)
                    }
                )
        dist.barrier()
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resident_bytes")
    save("qwen3", folder / "qwen3")
    save("qwen3", folder / "tied", tie_word_embeddings=True)
    save("qwen3", folder / "untied", tie_word_embeddings=False)
    # Most sizes are no multiple of 64, so that there are gaps between parameters.
    save("qwen2", folder / "uneven", hidden_size=24, intermediate_size=30, tie_word_embeddings=False)
    save("qwen3_moe", folder / "moe")
    save("qwen3_moe_mixed", folder / "mixed")
    save("deepseek_v3", folder / "deepseek")
    save("deepseek_v3", folder / "direct", q_lora_rank=None, hidden_size=72)
    save("gemma4_text", folder / "factors")  # of its layers, never trained
    save("gemma4_small", folder / "inputs")
    save("qwen2_5_vl", folder / "tower")
    save("qwen2_5_vl", folder / "trained tower")
    hf_classifier("qwen3").save_pretrained(folder / "scores")
    return folder


@pytest.mark.parametrize(
    "world", [pytest.param(world, marks=pytest.mark.soak if world == 4 else ()) for world in CASES]
)
def test_predicted_bytes_are_those_of_built_models(folder: Path, world: int) -> None:
    from megarl.learn.memory.resident_bytes import model_bytes
    from megarl.weights.checkpoint.formats import hf

    measured = run_grid(world, on_grids, str(folder), CASES[world])
    number = 0
    for case in CASES[world]:
        model, parallel, _ = case
        settings = settings_of(case)
        for head in heads(case):
            for trained in (False, True):
                hf_config = hf.read_hf_config(folder_of(case, folder))
                predicted = model_bytes(hf_config, settings, parallel, head, trained=trained)  # type: ignore[arg-type]
                assert [dict(each) for each in predicted] == [rank[number] for rank in measured], (case, head, trained)
                number += 1


def job(folder: Path, adapted: bool) -> Config:
    """A job with all four roles, each on a grid or in a dtype of its own; or one whose actor and critic have adapters
    for one model, which is the reference too."""
    if adapted:
        return Config(
            model=ModelConfig(path=str(folder / "tied"), dtype="bfloat16", lora=LoraConfig(rank=3)),
            parallel=ParallelConfig(pp=2),
            algorithm=replace(PPOConfig(name="ppo"), kl=KLConfig(coef=0.1)),
        )
    return Config(
        model=ModelConfig(path=str(folder / "tied"), dtype="bfloat16"),
        parallel=ParallelConfig(pp=2),
        reference=ReferenceConfig(parallel=ParallelConfig(tp=2)),
        critic=CriticConfig(parallel=ParallelConfig(dp=2), dtype="float32"),
        reward_model=RewardModelConfig(path=str(folder / "scores"), dtype="float32"),
        algorithm=replace(PPOConfig(name="ppo"), kl=KLConfig(coef=0.1)),
    )


def all_roles(rank: int, folder: str, adapted: bool) -> dict[str, int]:
    """Runs in each rank: ``role.kind`` -> bytes of what the trainer's own ``Models`` builds; and ``parameters``, bytes
    of all parameters, those that two models share once."""
    from megarl.learn import algorithms
    from megarl.learn.memory.residents import residents_of
    from megarl.learn.parallel import process_groups
    from megarl.train.inference.models import Models

    config = job(Path(folder), adapted)
    process_groups.initialize(config.parallel, seed=1)
    models = Models(config, algorithms.get(config.algorithm.name))
    models.make_actor(None)
    models.load_beginning()
    models.build(0, None, Path(folder) / "none", lambda phase: None)
    assert models.critic is not None
    for model in (models.actor, models.critic):
        model.step(1e-3)
    found = [each for role, model in models.by_role().items() for each in residents_of(role, model)]
    chunks = [chunk for model in models.by_role().values() for chunk in model.chunks]
    storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for c in chunks for p in c.parameters()}
    return {each.name: each.nbytes for each in found} | {"parameters": sum(storages.values())}


@pytest.mark.parametrize(("adapted", "residents"), [(False, 8), (True, 6)])
def test_predicted_bytes_are_those_of_a_job_with_all_roles(folder: Path, adapted: bool, residents: int) -> None:
    from megarl.learn import algorithms
    from megarl.run.checks.memory import resident_bytes
    from megarl.weights.checkpoint.formats import hf

    config = job(folder, adapted)
    hf_configs = {"actor": hf.read_hf_config(folder / "tied"), "reward_model": hf.read_hf_config(folder / "scores")}
    predicted = resident_bytes(config, algorithms.get("ppo"), hf_configs)
    for rank, measured in zip(predicted, run_grid(2, all_roles, str(folder), adapted), strict=True):
        parameters = measured.pop("parameters")
        assert rank == measured and len(rank) == residents
        assert sum(size for name, size in rank.items() if name.endswith("parameters")) == parameters
