"""Algorithms through the actor: one update on a fixed batch, under grids and micro-batches, against plain transformers.

The losses are those of ``tests/unit/test_algorithms_reference.py``; the batch's log-probs of all three kinds are perturbed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms import LossInput
from megarl.config.schema import AlgorithmConfig, KLConfig, ModelConfig, OptimizerConfig, ParallelConfig
from tests.parallel.batches import sequences_of
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB, save_tiny_qwen3
from tests.parallel.parity import TOLERANCE, make_batch, next_token_logp
from tests.unit.test_algorithms_reference import reference_loss

GRIDS = {
    "tp1": (ParallelConfig(), 12),
    "dp2": (ParallelConfig(dp=2), 2),
    "pp2": (ParallelConfig(pp=2), 1),
}
KL = KLConfig(0.1, "k3")
SETTINGS = [
    AlgorithmConfig(name="grpo", correction="truncate", correction_cap=1.05, kl=KL),
    AlgorithmConfig(
        name="gspo", importance="sequence_mean", clip_low=0.01, clip_high=0.02, aggregation="seq_mean_token_mean", kl=KL
    ),
    AlgorithmConfig(name="cispo", clip_high=0.05, correction="mask", correction_cap=1.1, kl=KL),
    AlgorithmConfig(name="opmd", tau=0.5, correction="mask", correction_cap=1.1, kl=KL),
    AlgorithmConfig(name="kimi_mirror_descent", tau=0.5, aggregation="seq_mean_token_sum", entropy_coef=0.01, kl=KL),
]


def update(
    rank: int, path: str, parallel: ParallelConfig, batch: dict[str, torch.Tensor], micro: int
) -> list[dict[str, Any]]:
    """Runs in each rank: metrics and gradient norm of every algorithm, learning rate 0."""
    import torch.distributed as dist

    from megarl import algorithms
    from megarl.batching import Cut
    from megarl.checkpoint import hf
    from megarl.metrics import mean_of_sums
    from megarl.parallel import groups
    from megarl.reshard.layouts import MegatronGrid, megatron_layout
    from megarl.training import objectives
    from megarl.training.model import TrainedModel
    from megarl.training.schedule import Head

    groups.initialize(parallel, seed=1)
    hf_config = hf.read_hf_config(Path(path))
    optimizer = OptimizerConfig(lr=0.0, weight_decay=0.0, clip_grad=1e9)
    cut = Cut(dp=parallel.dp, rows=micro)
    actor = TrainedModel(hf_config, ModelConfig(path=path), parallel, Head(VOCAB), cut, optimizer)
    hf.load_into(
        Path(path), megatron_layout(hf_config, MegatronGrid(parallel.tp, parallel.pp, parallel.dp)), rank, actor.tensors
    )
    actor.weights_changed()
    sequences = sequences_of(**batch)
    batches = actor.micro_batches(sequences)
    answers = []
    for settings in SETTINGS:
        sums = actor.backward(sequences, batches, objectives.policy(algorithms.get(settings.name), settings, sequences))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, sums)
        answers.append(mean_of_sums(everyone) | {"actor/grad_norm": actor.step(0.0)})
    return answers


@pytest.fixture(scope="module")
def expected(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, torch.Tensor], list[tuple[float, float]]]:
    """Model, batch, and (loss, gradient norm) of every algorithm."""
    from transformers import AutoModelForCausalLM

    path = save_tiny_qwen3(tmp_path_factory.mktemp("qwen3"), tied=False)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        batch = make_batch(lambda tokens: next_token_logp(model, tokens)[0])
    noise = torch.randn(batch["old_logp"].shape, generator=torch.Generator().manual_seed(5)) * 0.1
    batch["engine_logp"] = batch["old_logp"] + noise
    mask = batch["mask"]
    row = torch.arange(len(mask))[:, None].expand_as(mask)[mask]
    fixed = {name: batch[name][mask].double() for name in ("old_logp", "ref_logp", "advantages", "engine_logp")}
    wanted = []
    for settings in SETTINGS:
        model.zero_grad()
        logp, entropy = (x[mask].double() for x in next_token_logp(model, batch["tokens"]))
        kept = torch.ones_like(row, dtype=torch.bool)
        loss = reference_loss(
            settings.name, settings, LossInput(logp, entropy, mask=kept, row=row, num_rows=len(mask), **fixed)
        )
        loss.backward()
        norm = torch.sqrt(sum(p.grad.double().pow(2).sum() for p in model.parameters()))
        wanted.append((float(loss.detach()), float(norm)))
    return path, batch, wanted


@pytest.mark.parametrize("grid", list(GRIDS))
def test_update_equals_plain_transformers(expected: tuple[Path, Any, Any], grid: str) -> None:
    path, batch, wanted = expected
    parallel, micro = GRIDS[grid]
    for answer in run_grid(parallel.world_size, update, str(path), parallel, batch, micro):
        for settings, (loss, norm), got in zip(SETTINGS, wanted, answer, strict=True):
            assert got["actor/loss"] == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE * norm), settings.name
            assert got["actor/grad_norm"] == pytest.approx(norm, rel=TOLERANCE), settings.name
            if settings.correction != "none":
                assert (
                    0.3
                    < got["rollout_corr/rollout_is_ratio_fraction_high"]
                    + got["rollout_corr/rollout_is_ratio_fraction_low"]
                    < 0.9
                )
