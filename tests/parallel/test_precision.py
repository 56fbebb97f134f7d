"""Gradients and moments in bfloat16: their bytes, how far updates are from those in float32, and a resume."""

from __future__ import annotations

from dataclasses import replace
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

DP2 = ParallelConfig(dp=2)
PLAIN = ModelConfig(dtype="bfloat16")
MODELS = {
    "plain": PLAIN,
    "gradients": replace(PLAIN, grad_dtype="bfloat16"),
    "both": replace(PLAIN, grad_dtype="bfloat16", moments_dtype="bfloat16"),
}
GRIDS = {"dp2": DP2, "overlap": replace(DP2, overlap_grad_reduce=True, overlap_param_gather=True)}
UPDATES, LR = 6, 1e-3


class Found(NamedTuple):
    """What one rank saw of ``UPDATES`` updates."""

    losses: list[float]
    norms: list[float]
    moved: torch.Tensor
    """By how much the share of the float32 masters has changed."""
    bytes: dict[str, int]
    predicted: dict[str, int]


def masters_of(actor: Any) -> torch.Tensor:
    """This rank's share of the float32 masters."""
    from megarl.weights.checkpoint.training.state import inner_optimizers

    (inner,) = inner_optimizers(actor.optimizer.inner)
    return torch.cat([p.detach().flatten() for group in inner.param_groups for p in group["params"]])


def learner(path: Path, model: ModelConfig, parallel: ParallelConfig) -> tuple[Any, Any]:
    """A model, and a function that makes one update of it: (loss, norm)."""
    from megarl.learn import algorithms
    from megarl.learn.training import objectives
    from megarl.learn.training.model import TrainedModel, micro_batching_for
    from megarl.learn.training.schedule import Head
    from megarl.weights.checkpoint.formats import hf

    limits = micro_batching_for(parallel, TrainerConfig(max_tokens_per_micro_batch=48))
    model = replace(model, path=str(path))
    actor = TrainedModel(hf.read_hf_config(path), model, parallel, Head(VOCAB), limits, OptimizerConfig(lr=LR))
    actor.model.load_hf(path)
    sequences = random_sequences(5, 12, VOCAB)
    batches = actor.model.micro_batches(sequences)
    assert len(batches) > 1, "gradients are added too"
    objective = objectives.policy(algorithms.get("sft"), AlgorithmConfig(), sequences)

    def update() -> tuple[float, float]:
        loss = actor.backward(sequences, batches, objective).get("actor/loss", (0.0, 1.0))[0]
        return loss, actor.step(LR)

    return actor, update


def on_ranks(rank: int, folder: str) -> dict[str, Any]:
    from megarl.learn.memory.resident_bytes import model_bytes
    from megarl.learn.memory.residents import residents_of
    from megarl.learn.parallel import process_groups
    from megarl.weights.checkpoint.training import state

    process_groups.initialize(DP2, seed=1)
    path, found = Path(folder) / "model", {}
    for grid, parallel in GRIDS.items():
        for name, model in MODELS.items():
            actor, update = learner(path, model, parallel)
            start = masters_of(actor).clone()
            losses, norms = zip(*(update() for _ in range(UPDATES)), strict=True)
            actor.finish_gather()
            actor.model.proven_tensors()  # what is sent is what the optimizer wrote
            predicted = model_bytes(actor.model.hf_config, model, parallel, "lm", trained=True)[rank]
            sizes = {each.kind: each.nbytes for each in residents_of("actor", actor.model)}
            found[name, grid] = Found(list(losses), list(norms), masters_of(actor) - start, sizes, predicted)
    part = {"actor": state.CheckpointedModel(actor.model.chunks, actor.optimizer.inner)}
    state.save(Path(folder) / "checkpoints", UPDATES, part, {}, keep=1)
    on = update()
    other, update = learner(path, MODELS["both"], GRIDS["dp2"])
    at = state.latest(Path(folder) / "checkpoints")
    assert at is not None
    state.load(at, {"actor": state.CheckpointedModel(other.model.chunks, other.optimizer.inner)})
    sizes = {each.kind: each.nbytes for each in residents_of("actor", other.model)}
    assert sizes == found["both", "dp2"].bytes, "moments have been loaded in their own type"
    assert update()[0] == on[0]
    actor.finish_gather()
    assert torch.equal(masters_of(actor), masters_of(other))
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("precision")
    save("qwen3", folder / "model", tie_word_embeddings=True)
    return run_grid(2, on_ranks, str(folder), timeout_s=300.0)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", ["gradients", "both"])
def test_updates_are_near_those_in_float32(ranks: Any, name: str, grid: str) -> None:
    """docs/tuning.md states these tolerances."""
    for rank in ranks:
        plain, mine = rank["plain", grid], rank[name, grid]
        assert mine.losses == pytest.approx(plain.losses, rel=2e-3) and mine.losses != plain.losses
        assert mine.norms == pytest.approx(plain.norms, rel=1e-2)
        assert 0 < (mine.moved - plain.moved).norm() < 0.05 * plain.moved.norm()
        assert mine.losses == rank[name, "dp2"].losses, "overlap changes no bit"


@pytest.mark.parametrize(("name", "gradient", "optimizer"), [("plain", 4, 12), ("gradients", 2, 12), ("both", 2, 8)])
def test_bytes_are_those_that_were_predicted(ranks: Any, name: str, gradient: int, optimizer: int) -> None:
    for rank in ranks:
        for grid in GRIDS:
            found, plain = rank[name, grid], rank["plain", grid].bytes
            assert found.bytes == found.predicted
            assert found.bytes["gradients"] == plain["parameters"] // 2 * gradient
            assert found.bytes["optimizer"] == plain["optimizer"] // 12 * optimizer
