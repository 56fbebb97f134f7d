"""Gradients reduced during the backward pass and parameters gathered during the next forward pass: the bits of
updates without either."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megarl.config.algorithms import AlgorithmConfig
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from tests.conftest import SOAK
from tests.parallel.batches import random_sequences
from tests.parallel.families import save
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB

GRIDS = {
    "dp2": ("tied", ParallelConfig(dp=2)),
    "cp2": ("tied", ParallelConfig(cp=2)),
    "ep2": ("moe", ParallelConfig(dp=2, ep=2)),
    "tp2-sp-dp2": ("tied", ParallelConfig(tp=2, dp=2, sequence_parallel=True)),
    "pp2-dp2": ("tied", ParallelConfig(pp=2, dp=2)),
    "pp2-vpp2-dp2": ("tied", ParallelConfig(pp=2, vpp=2, dp=2)),
}
SMALL = 5000
"""Elements of a bucket that make several of these tiny models."""
BUCKETS = {"one bucket": 40_000_000, "several buckets": SMALL}
SOAKED = (
    ("dp2", "several buckets"),
    ("cp2", "one bucket"),
    ("ep2", "one bucket"),
    ("tp2-sp-dp2", "several buckets"),
    ("pp2-dp2", "one bucket"),
    *(("pp2-vpp2-dp2", bucket) for bucket in BUCKETS),
)
"""Every other grid is in ``make test`` with the buckets that are left to it, and every kind of buckets on two or more
grids."""
CASES = [(grid, bucket) for grid in GRIDS for bucket in BUCKETS if SOAK or (grid, bucket) not in SOAKED]
UPDATES = 2


class Found(NamedTuple):
    """What one rank saw of ``UPDATES`` updates."""

    losses: list[float]
    norms: list[float]
    logp: torch.Tensor
    """With the weights after them."""
    weights: dict[str, torch.Tensor]
    reduced: int
    """Reductions of buckets under way at the end of backward passes."""
    stale: bool
    """Parameters were older than the optimizer's right after a step."""
    buckets: int
    predicted: bool
    """Bytes of residents are those that were computed from the layout."""


def on_grids(rank: int, folder: str, names: list[str]) -> dict[tuple[str, str, str], Found]:
    from megatron.core import parallel_state

    from megarl.learn.memory import resident_bytes
    from megarl.learn.parallel import process_groups

    found = {}
    for name in names:
        family, plain = GRIDS[name]
        process_groups.initialize(plain, seed=1)
        reduce = replace(plain, overlap_grad_reduce=True)
        ways = {"none": plain, "reduce": reduce, "gather": replace(reduce, overlap_param_gather=True)}
        for bucket in [bucket for grid, bucket in CASES if grid == name]:
            resident_bytes.OVERLAPPED_BUCKET = BUCKETS[bucket], 1
            for way, parallel in ways.items():
                clip = BUCKETS[bucket] != SMALL
                found[name, bucket, way] = updates(rank, Path(folder) / family, parallel, clip)
        torch.distributed.barrier()
        parallel_state.destroy_model_parallel()
    return found


def learner(path: Path, parallel: ParallelConfig, optimizer: OptimizerConfig) -> tuple[Any, Any, Any]:
    """A model, the sequences that it learns, and their micro-batches."""
    from megarl.learn.training.model import TrainedModel, micro_batching_for
    from megarl.learn.training.schedule import Head
    from megarl.weights.checkpoint.formats import hf

    limits = micro_batching_for(parallel, TrainerConfig(max_tokens_per_micro_batch=48))
    settings = ModelConfig(path=str(path))
    actor = TrainedModel(hf.read_hf_config(path), settings, parallel, Head(VOCAB), limits, optimizer)
    actor.model.load_hf(path)
    sequences = random_sequences(5, 12, VOCAB)
    batches = actor.model.micro_batches(sequences)
    assert len(batches) > 1
    return actor, sequences, batches


def updates(rank: int, path: Path, parallel: ParallelConfig, clip: bool) -> Found:
    from megarl.learn import algorithms
    from megarl.learn.memory.resident_bytes import model_bytes
    from megarl.learn.memory.residents import residents_of
    from megarl.learn.models.gpt import named_tensors, unwrap
    from megarl.learn.training import objectives

    # Cut another way, a norm's squares are added in another order: with several buckets nothing is clipped by it.
    optimizer = OptimizerConfig(lr=1e-3, clip_grad=0.5 if clip else 0.0)
    actor, sequences, batches = learner(path, parallel, optimizer)
    bucket_groups = [g for c in actor.model.chunks for g in (*c.bucket_groups, *c.expert_parallel_bucket_groups)]
    config: Any = unwrap(actor.model.chunks[0]).config
    finalize, under_way = config.finalize_model_grads_func, []

    def counted(*arguments: Any, **named: Any) -> None:
        under_way.append(sum(group.grad_reduce_handle is not None for group in bucket_groups))
        finalize(*arguments, **named)

    config.finalize_model_grads_func = counted
    objective = objectives.policy(algorithms.get("sft"), AlgorithmConfig(), sequences)
    losses, norms = [], []
    for _ in range(UPDATES):
        losses.append(actor.backward(sequences, batches, objective).get("actor/loss", (0.0, 1.0))[0])
        norms.append(actor.gradient_norm())
        actor.step(1e-3)
    before = {name: t.clone() for chunk in actor.model.chunks for name, t in named_tensors(chunk).items()}
    actor.finish_gather()
    after = {name: t for chunk in actor.model.chunks for name, t in named_tensors(chunk).items()}
    stale = any(not torch.equal(before[name], tensor) for name, tensor in after.items())
    weights = {name: t.clone() for name, t in actor.model.proven_tensors().items()}
    predicted = model_bytes(actor.model.hf_config, actor.model.model_config, parallel, "lm", trained=True)[rank]
    buckets = sum(len(group.buckets) for group in bucket_groups)
    return Found(
        losses, norms, actor.model.outputs(sequences, [batches]), weights, sum(under_way), stale, buckets,
        predicted=predicted == {each.kind: each.nbytes for each in residents_of("actor", actor.model)},
    )  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Grid -> what each of its ranks found; all grids of a world are run when the first is asked for."""
    folder = tmp_path_factory.mktemp("overlap")
    save("qwen3", folder / "tied", tie_word_embeddings=True)
    save("qwen3_moe", folder / "moe")
    found: dict[int, list[Any]] = {}

    def of(grid: str) -> list[Any]:
        world = GRIDS[grid][1].world_size
        if world not in found:
            names = [name for name, _ in CASES if GRIDS[name][1].world_size == world]
            found[world] = run_grid(world, on_grids, str(folder), list(dict.fromkeys(names)), timeout_s=400.0)
        return found[world]

    return of


@pytest.mark.parametrize(
    ("grid", "bucket"),
    [
        pytest.param(grid, bucket, marks=pytest.mark.soak if (grid, bucket) in SOAKED else ())
        for grid in GRIDS
        for bucket in BUCKETS
    ],
)
def test_overlap_changes_no_bit(ranks: Any, grid: str, bucket: str) -> None:
    found = ranks(grid)
    assert any(rank[grid, bucket, "none"].losses[0] > rank[grid, bucket, "none"].losses[-1] > 0 for rank in found)
    for way in ("reduce", "gather"):
        for rank in found:
            plain, mine = rank[grid, bucket, "none"], rank[grid, bucket, way]
            assert mine.losses == plain.losses
            assert mine.norms == pytest.approx(plain.norms, rel=0.0 if bucket == "one bucket" else 1e-6, abs=0)
            assert torch.equal(mine.logp, plain.logp)
            assert all(torch.equal(tensor, mine.weights[name]) for name, tensor in plain.weights.items())
            assert mine.predicted and plain.predicted
            # The first update only counts gradients; every later one reduces all buckets during its backward pass.
            assert plain.reduced == 0 and mine.reduced > 0
        several = [rank[grid, bucket, way].buckets > rank[grid, bucket, "none"].buckets for rank in found]
        assert any(several) is (bucket == "several buckets")
        assert any(rank[grid, bucket, way].stale for rank in found) is (way == "gather")


STAGES = ParallelConfig(pp=2, vpp=2)


def between_stages(rank: int, path: str) -> list[Found]:
    from megarl.learn.models.gpt import transformer_config
    from megarl.learn.parallel import process_groups
    from megarl.weights.checkpoint.formats import hf

    process_groups.initialize(STAGES, seed=1)
    overlapped = replace(STAGES, overlap_p2p=True)
    assert transformer_config(hf.read_hf_config(Path(path)), ModelConfig(), overlapped).overlap_p2p_comm
    return [updates(rank, Path(path), parallel, clip=True) for parallel in (STAGES, overlapped)]


def test_overlap_between_stages_changes_no_bit(tmp_path: Path) -> None:
    save("qwen3", tmp_path, tie_word_embeddings=True)
    for plain, mine in run_grid(2, between_stages, str(tmp_path)):
        assert mine.losses == plain.losses and mine.norms == plain.norms and mine.norms[0] > 0
        assert torch.equal(mine.logp, plain.logp) and mine.predicted and plain.predicted
        assert all(torch.equal(tensor, mine.weights[name]) for name, tensor in plain.weights.items())


DP2 = GRIDS["dp2"][1]
OVERLAPPED = replace(DP2, overlap_grad_reduce=True, overlap_param_gather=True)
RESUMED = {
    "overlap": (OVERLAPPED, DP2, OVERLAPPED),
    # A tied embedding has a bucket of its own, and three ranks need padding behind the others.
    "tied": (ParallelConfig(pp=2, dp=3),) * 2,
}
"""Grids of one checkpoint: who writes it, and who read it."""


def resumed(rank: int, path: str, folder: str, grids: tuple[ParallelConfig, ...]) -> list[Any]:
    """(loss, weights) of two updates after a checkpoint, by the model that wrote it and by those that read it."""
    from megarl.learn import algorithms
    from megarl.learn.memory import resident_bytes
    from megarl.learn.parallel import process_groups
    from megarl.learn.training import objectives
    from megarl.weights.checkpoint.training import state

    process_groups.initialize(grids[0], seed=1)
    resident_bytes.OVERLAPPED_BUCKET = SMALL, 1
    found = []
    for number, parallel in enumerate(grids):
        # What is cut another way has another norm in its last bits.
        actor, sequences, batches = learner(Path(path), parallel, OptimizerConfig(lr=1e-3, clip_grad=0.0))
        objective = objectives.policy(algorithms.get("sft"), AlgorithmConfig(), sequences)
        part = {"actor": state.CheckpointedModel(actor.model.chunks, actor.optimizer.inner)}

        def update(actor: Any = actor, seen: Any = (sequences, batches, objective)) -> float:
            loss: float = actor.backward(*seen).get("actor/loss", (0.0, 1.0))[0]
            actor.step(1e-3)
            return loss

        if number:
            at = state.latest(Path(folder))
            assert at is not None
            state.load(at, part)
        else:
            update(), update()
            actor.finish_gather()
            state.save(Path(folder), 2, part, {}, keep=1)
        losses = [update(), update()]
        actor.finish_gather()
        found.append((losses, {name: t.clone() for name, t in actor.model.proven_tensors().items()}))
    return found


@pytest.mark.parametrize("case", RESUMED)
def test_checkpoints_do_not_depend_on_buckets(tmp_path: Path, case: str) -> None:
    save("qwen3", tmp_path / "m", tie_word_embeddings=True)
    grids = RESUMED[case]
    for written, *read in run_grid(
        grids[0].world_size, resumed, str(tmp_path / "m"), str(tmp_path / "checkpoints"), grids
    ):
        for losses, weights in read:
            assert losses == written[0]
            assert all(torch.equal(tensor, weights[name]) for name, tensor in written[1].items())


def test_parameters_are_not_read_before_they_are_gathered() -> None:
    """Guards what sends, digests or exports a model between updates."""
    from megarl.learn.training.model import Model

    model = object.__new__(Model)
    model.gathered = False
    with pytest.raises(AssertionError, match="finish_gather"):
        _ = model.tensors
