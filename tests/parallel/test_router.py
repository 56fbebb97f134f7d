"""The bias of balanced routers beside the optimizer: kept where an update is left out, and the same again from a
checkpoint.

Gradients and metrics of ``model.router`` are in the parity matrix (``parity.py``).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.config.algorithms import AlgorithmConfig
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, RouterConfig
from tests.parallel.batches import sequences_of
from tests.parallel.families import save
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB
from tests.parallel.test_megatron_on_cpu import parts

GRID = ParallelConfig(pp=2, dp=2)
RATE = 0.25
"""A power of two: sums of it are exact."""


def on_ranks(rank: int, path: str, dense: str, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """Runs in each rank: what all weights are after each of some events."""
    from megarl.learn import algorithms
    from megarl.learn.batching import MicroBatching
    from megarl.learn.parallel import process_groups
    from megarl.learn.training import objectives
    from megarl.learn.training.model import TrainedModel
    from megarl.learn.training.schedule import Head
    from megarl.weights.checkpoint.formats import hf
    from megarl.weights.checkpoint.training import state

    process_groups.initialize(GRID, seed=1)
    settings = ModelConfig(path=path, router=RouterConfig(bias_update_rate=RATE))
    actor = TrainedModel(
        hf.read_hf_config(Path(path)),
        settings,
        GRID,
        Head(VOCAB),
        MicroBatching(dp=2, rows=2),
        OptimizerConfig(lr=1e-2),
    )
    actor.model.load_hf(Path(path))
    tokens = torch.randint(2, VOCAB, (8, 16), generator=torch.Generator().manual_seed(1))
    rows = sequences_of(tokens, torch.arange(16).expand(8, 16) < 15)
    objective = objectives.policy(algorithms.get("sft"), AlgorithmConfig(), rows)
    found = {}

    def now(event: str) -> None:
        found[event] = {name: tensor.clone() for name, tensor in actor.model.proven_tensors().items()}

    now("loaded")
    actor.backward(rows, actor.model.micro_batches(rows), objective)  # and the guard leaves the update out
    now("left out")
    actor.backward(rows, actor.model.micro_batches(rows), objective)
    actor.step(1e-2)
    now("updated")
    state.save(Path(folder), 1, parts(actor), {"phase": "rl"}, keep=1)
    for event in ("next", "next again"):
        actor.backward(rows, actor.model.micro_batches(rows), objective)
        actor.step(1e-2)
        now(event)
        state.load(Path(folder) / "global_step_1", parts(actor))
    # A critic without experts beside an actor with them.
    critic = TrainedModel(
        hf.read_hf_config(Path(dense)),
        settings,
        GRID,
        Head(VOCAB),
        MicroBatching(dp=2, rows=2),
        OptimizerConfig(lr=1e-2),
    )
    critic.model.load_hf(Path(dense))
    sums = critic.backward(rows, critic.model.micro_batches(rows), objective)
    found["metrics of a dense model"] = {name: torch.tensor(total) for name, (total, _) in sums.items()}
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, torch.Tensor]]]:
    folders = [tmp_path_factory.mktemp(name) for name in ("experts", "dense", "saved")]
    return run_grid(4, on_ranks, str(save("deepseek_v3", folders[0])), str(save("qwen3", folders[1])), str(folders[2]))


def test_every_update_moves_every_bias_by_the_rate(ranks: list[dict[str, dict[str, torch.Tensor]]]) -> None:
    for found in ranks:
        biases = [name for name in found["loaded"] if name.endswith("expert_bias")]
        assert biases
        for name in biases:
            assert torch.equal(found["left out"][name], found["loaded"][name])
            moves = found["updated"][name] - found["loaded"][name]
            assert bool(((moves.abs() - RATE).abs() < 1e-6).any()) and bool(
                ((moves.abs() - RATE).abs() < 1e-6).logical_or(moves == 0).all()
            )
            assert bool((moves > 0).any()) and bool((moves < 0).any())


def test_a_model_without_experts_has_nothing_to_balance(ranks: list[dict[str, dict[str, torch.Tensor]]]) -> None:
    metrics = [name for found in ranks for name in found["metrics of a dense model"]]
    assert "actor/loss" in metrics and not [name for name in metrics if "router" in name]


def test_ranks_of_a_stage_agree(ranks: list[dict[str, dict[str, torch.Tensor]]]) -> None:
    for one, other in ((0, 1), (2, 3)):
        assert ranks[one]["next"].keys() == ranks[other]["next"].keys()
        for name in ranks[one]["next"]:
            if name.endswith("expert_bias"):
                assert torch.equal(ranks[one]["next"][name], ranks[other]["next"][name])


def test_a_checkpoint_brings_the_biases_back(ranks: list[dict[str, dict[str, torch.Tensor]]]) -> None:
    for found in ranks:
        assert found["next"].keys() == found["next again"].keys()
        assert all(torch.equal(tensor, found["next again"][name]) for name, tensor in found["next"].items())
        assert any(
            not torch.equal(tensor, found["updated"][name])
            for name, tensor in found["next"].items()
            if "expert_bias" in name
        )
