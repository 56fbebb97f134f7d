"""Recomputation of parts of layers: the very bits of loss, gradients and log-probs, and each part computed twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megarl.config.algorithms import AlgorithmConfig
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from tests.parallel.batches import random_sequences
from tests.parallel.families import save
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB

GRIDS = {
    "tp2-sp": ParallelConfig(tp=2, sequence_parallel=True),
    "pp2": ParallelConfig(pp=2),
    "cp2": ParallelConfig(cp=2),
    "ep2": ParallelConfig(dp=2, ep=2),
}
WITNESS = {
    "core_attn": "self_attention.core_attention",
    "layernorm": "input_layernorm",
    "mlp": "mlp.linear_fc1",
    "moe": "mlp.router",
    "shared_experts": "mlp.shared_experts.linear_fc1",
    "mla_up_proj": "self_attention.linear_kv_up_proj",
}
"""Module of a layer that runs once more where the part does."""
EVERY = ("core_attn", "layernorm", "mlp")
CASES = [
    *(("qwen3", grid, (module,)) for grid in ("tp2-sp", "pp2", "cp2") for module in EVERY),
    *(("deepseek_v3", grid, (module,)) for grid in ("pp2", "ep2") for module in WITNESS),
    ("deepseek_v3", "tp2-sp", tuple(WITNESS)),
]
"""(family, grid, modules); ``moe_act`` needs TransformerEngine."""
ROUNDED = ("layernorm",)
"""A norm gives its input two gradients, which are added to the residual's one after the other, or both at once where it
is computed again."""


class Found(NamedTuple):
    """What one rank saw of an update."""

    loss: float
    norm: float
    logp: torch.Tensor
    gradients: dict[str, torch.Tensor]
    calls: dict[str, int]
    """Forward passes of each witness in forward and backward."""


def updates(rank: int, folder: str, cases: list[tuple[str, str, tuple[str, ...]]]) -> dict[Any, Found]:
    """Runs in each rank: one update for each case, and one without recomputation for each family and grid."""
    from megatron.core import parallel_state

    from megarl.learn.parallel import process_groups

    found = {}
    for grid in dict.fromkeys(grid for _, grid, _ in cases):
        process_groups.initialize(GRIDS[grid], seed=1)
        mine = [case for case in cases if case[1] == grid]
        for case in [*dict.fromkeys((family, grid, ()) for family, *_ in mine), *mine]:
            found[case] = update(Path(folder) / case[0], GRIDS[grid], list(case[2]))
        torch.distributed.barrier()
        parallel_state.destroy_model_parallel()
    return found


def update(path: Path, parallel: ParallelConfig, modules: list[Any]) -> Found:
    from megarl.learn import algorithms
    from megarl.learn.models.gpt import unwrap
    from megarl.learn.training import objectives
    from megarl.learn.training.model import TrainedModel, micro_batching_for
    from megarl.learn.training.schedule import Head
    from megarl.weights.checkpoint.formats import hf

    settings = ModelConfig(
        path=str(path), recompute="selective" if modules else "none", recompute_modules=modules or ["core_attn"]
    )
    limits = micro_batching_for(parallel, TrainerConfig(max_tokens_per_micro_batch=64))
    actor = TrainedModel(
        hf.read_hf_config(path), settings, parallel, Head(VOCAB), limits, OptimizerConfig(lr=1e-3, clip_grad=0.5)
    )
    actor.model.load_hf(path)
    sequences = random_sequences(3, 8, VOCAB)
    batches = actor.model.micro_batches(sequences)
    logp = actor.model.outputs(sequences, [batches])
    calls = dict.fromkeys(WITNESS, 0)

    def count(of: str) -> Any:
        def hook(*_: Any) -> None:
            calls[of] += 1

        return hook

    for name, module in actor.model.chunks[0].named_modules():
        for of, end in WITNESS.items():
            if name.endswith(end):
                module.register_forward_pre_hook(count(of))
    sums = actor.backward(sequences, batches, objectives.policy(algorithms.get("sft"), AlgorithmConfig(), sequences))
    gradients = {name: p.main_grad.clone() for name, p in unwrap(actor.model.chunks[0]).named_parameters()}
    return Found(sums["actor/loss"][0] if sums else 0.0, actor.gradient_norm(), logp, gradients, calls)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Found]]:
    folder = tmp_path_factory.mktemp("recompute")
    for family in ("qwen3", "deepseek_v3"):
        save(family, folder / family, num_hidden_layers=2)  # of DeepSeek-V3 one has experts
    return run_grid(2, updates, str(folder), CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{'+'.join(case[2])}")
def test_a_part_computed_again_changes_no_bit(ranks: Any, case: tuple[str, str, tuple[str, ...]]) -> None:
    family, grid, modules = case
    assert any(rank[case].loss > 0 for rank in ranks)
    for rank in ranks:
        once, again = rank[family, grid, ()], rank[case]
        assert again.loss == once.loss and torch.equal(again.logp, once.logp)
        tolerance = 1e-5 if set(modules) & set(ROUNDED) else 0.0
        assert again.norm == pytest.approx(once.norm, rel=tolerance, abs=0)
        for name, gradient in once.gradients.items():
            off = (again.gradients[name] - gradient).abs().max()
            assert off <= tolerance * gradient.abs().max(), (name, float(off))
        for module in modules:  # shared experts are a part of ``moe``: with both they run three times
            times = 3 if module == "shared_experts" and "moe" in modules else 2
            assert again.calls[module] == times * once.calls[module], (module, once.calls, again.calls)
    assert all(sum(rank[case].calls[module] for rank in ranks) for module in modules)
