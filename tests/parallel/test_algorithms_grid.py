"""Algorithms through the actor: one update on a fixed batch, under grids and micro-batches, against plain transformers.

The losses are those of ``tests/unit/test_algorithms_reference.py``; the batch's log-probs of all three kinds are
perturbed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.algorithms import (
    AlgorithmConfig,
    KLConfig,
    MirrorDescentConfig,
    MixConfig,
    OPMDConfig,
    PreferenceConfig,
)
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megarl.learn.algorithms import LossInput
from tests.parallel.batches import sequences_of
from tests.parallel.grid import run_grid
from tests.parallel.models import VOCAB, save_tiny_qwen3
from tests.parallel.parity import TOLERANCE, make_batch, next_token_logp

GRIDS = {"tp1": (ParallelConfig(), 12), "dp2": (ParallelConfig(dp=2), 2), "pp2": (ParallelConfig(pp=2), 2)}
"""With rows a micro-batch: pairs need two."""
KL = KLConfig(0.1, "k3")
SETTINGS = [
    AlgorithmConfig(name="grpo", correction="truncate", correction_cap=1.05, kl=KL),
    AlgorithmConfig(
        name="gspo", importance="sequence_mean", clip_low=0.01, clip_high=0.02, aggregation="seq_mean_token_mean", kl=KL
    ),
    AlgorithmConfig(name="cispo", clip_high=0.05, correction="mask", correction_cap=1.1, kl=KL),
    OPMDConfig(name="opmd", tau=0.5, correction="mask", correction_cap=1.1, kl=KL),
    MirrorDescentConfig(
        name="kimi_mirror_descent", tau=0.5, aggregation="seq_mean_token_sum", entropy_coef=0.01, kl=KL
    ),
    MixConfig(name="mix", mu=0.3, kl=KL),
    MixConfig(name="mix", mu=0.3, kl=KL, expert_loss="off_policy"),
    PreferenceConfig(name="dpo", beta=0.3, label_smoothing=0.1),
    PreferenceConfig(name="online_dpo", beta=0.3, preference="ipo"),
]
EXPERT = torch.arange(10) % 4 == 3
"""Demonstrated rows of the batch, for MIX: unequally many on the ranks."""


def update(
    rank: int, path: str, parallel: ParallelConfig, batch: dict[str, torch.Tensor], micro: int
) -> list[dict[str, Any]]:
    """Runs in each rank: metrics and gradient norm of every algorithm, learning rate 0."""
    import torch.distributed as dist

    from megarl.core.metrics import mean_of_sums
    from megarl.learn import algorithms
    from megarl.learn.batching import MicroBatching
    from megarl.learn.parallel import process_groups
    from megarl.learn.training import objectives
    from megarl.learn.training.model import TrainedModel
    from megarl.learn.training.schedule import Head
    from megarl.weights.checkpoint.formats import hf
    from megarl.weights.reshard.layouts import MegatronGrid, megatron_layout

    process_groups.initialize(parallel, seed=1)
    hf_config = hf.read_hf_config(Path(path))
    optimizer = OptimizerConfig(lr=0.0, weight_decay=0.0, clip_grad=1e9)
    micro_batching = MicroBatching(dp=parallel.dp, rows=micro)
    actor = TrainedModel(hf_config, ModelConfig(path=path), parallel, Head(VOCAB), micro_batching, optimizer)
    hf.load_into(
        Path(path),
        megatron_layout(hf_config, MegatronGrid(parallel.tp, parallel.pp, parallel.dp)),
        rank,
        actor.model.tensors,
    )
    actor.model.weights_changed()
    sequences = sequences_of(**batch)
    pairs = [[2 * i, 2 * i + 1] for i in range(len(sequences) // 2)]
    answers = []
    for settings in SETTINGS:
        sequences.expert = EXPERT if settings.name == "mix" else None
        batches = actor.model.micro_batches(sequences, pairs if settings.name.endswith("dpo") else None)
        sums = actor.backward(sequences, batches, objectives.policy(algorithms.get(settings.name), settings, sequences))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, sums)
        answers.append(mean_of_sums(everyone) | {"actor/grad_norm": actor.step(0.0)})
    return answers


def loss_of(settings: AlgorithmConfig, b: LossInput) -> torch.Tensor:
    """The definition, in float64; ``b`` holds the tokens in the loss alone."""
    from tests.unit.test_algorithms_reference import reference_loss  # takes 6 s, which no rank should spend

    if settings.name.endswith("dpo"):
        margins = torch.zeros(b.num_rows, dtype=torch.float64).index_add(0, b.row, b.logp - b.ref_logp)
        h = margins[::2] - margins[1::2]
        if settings.preference == "ipo":
            return (h - 1 / (2 * settings.beta)).square().mean()
        wins = torch.sigmoid(settings.beta * h)
        return -((1 - settings.label_smoothing) * wins.log() + settings.label_smoothing * (1 - wins).log()).mean()
    if settings.name == "mix":
        shown = EXPERT[b.row]
        tokens = ("logp", "entropy", "old_logp", "ref_logp", "advantages", "engine_logp", "mask", "row")
        sampled = replace(b, **{name: getattr(b, name)[~shown] for name in tokens})
        gain = b.logp[shown]
        if settings.expert_loss == "off_policy":
            ratio = (gain - b.engine_logp[shown]).exp()
            gain = ratio / (ratio + settings.expert_shaping)
        return (1 - settings.mu) * reference_loss("grpo", settings, sampled) - settings.mu * gain.mean()
    return reference_loss(settings.name, settings, b)


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
        loss = loss_of(settings, LossInput(logp, entropy, mask=kept, row=row, num_rows=len(mask), **fixed))
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
