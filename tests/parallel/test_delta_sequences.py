"""Sequences of a model with gated delta nets or short convolutions do not see each other: alone, padded and packed they
train alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.config.schema import ModelConfig, ParallelConfig
from tests.parallel.batches import random_sequences
from tests.parallel.families import VOCAB, save
from tests.parallel.grid import run_grid

TOLERANCE = 1e-5
"""Of a tensor's largest gradient."""
GRIDS = {"tp1": ParallelConfig(), "tp2-sp": ParallelConfig(tp=2, sequence_parallel=True)}


def trained(rank: int, path: str, parallel: ParallelConfig, tied: bool) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """(loss, gradients) with each sequence alone, with three padded to the longest, and packed.

    Args:
        tied: Let sequences see those before them when packed, as a layer without their bounds would.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megarl.learn.batching import MicroBatching, micro_batches
    from megarl.learn.models import delta
    from megarl.learn.models.gpt import build_chunks, named_tensors, unwrap
    from megarl.learn.parallel import process_groups
    from megarl.learn.parallel.grid import megatron_grid
    from megarl.learn.training.schedule import Head, run
    from megarl.weights.checkpoint.formats import hf
    from megarl.weights.reshard.layouts import megatron_layout

    if tied:
        places = delta.places_of
        delta.places_of = lambda lengths, device: places([sum(lengths)], device)
    process_groups.initialize(parallel, seed=1)
    [stage] = build_chunks(hf.read_hf_config(Path(path)), ModelConfig(path=path), parallel)
    layout = megatron_layout(hf.read_hf_config(Path(path)), megatron_grid(parallel))
    hf.load_into(Path(path), layout, rank, named_tensors(stage))
    sequences = random_sequences(5, 9, VOCAB)
    count = int(sequences.mask.sum())
    model = DistributedDataParallel(
        unwrap(stage).config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), stage
    )
    model.train()
    found = []
    for limits in ({}, {"rows": 3}, {"max_tokens": 100}):
        model.zero_grad_buffer()
        batches = micro_batches(sequences, MicroBatching(multiple=2, **limits), 0)

        def loss(_: object, x: torch.Tensor) -> tuple[torch.Tensor, float]:
            total = -x[..., 0].sum() / count
            return total, float(total.detach())

        losses = run([model], sequences, batches, Head(VOCAB), loss, forward_only=False)
        gradients = {name: p.main_grad.clone() for name, p in unwrap(stage).named_parameters() if p.requires_grad}
        found.append((sum(losses), gradients))
    return found


CASES = [
    ("qwen3_5", "tp1"),
    ("qwen3_5", "tp2-sp"),
    ("lfm2", "tp1"),
    pytest.param("lfm2", "tp2-sp", marks=pytest.mark.soak),
]


def largest(found: list[tuple[float, dict[str, torch.Tensor]]], which: int) -> float:
    """Largest difference from each sequence alone, of the loss or of a gradient relative to its largest entry."""
    (loss, alone), (other_loss, other) = found[0], found[which]
    errors = [float((other[n] - g).abs().max() / g.abs().max().clamp_min(1e-12)) for n, g in alone.items()]
    return max(abs(loss - other_loss) / abs(loss), *errors)


@pytest.mark.parametrize(("family", "grid"), CASES)
def test_alone_padded_and_packed_are_equal(tmp_path: Path, family: str, grid: str) -> None:
    path = save(family, tmp_path / "model")
    for found in run_grid(GRIDS[grid].world_size, trained, str(path), GRIDS[grid], False):
        assert largest(found, 1) < TOLERANCE
        assert largest(found, 2) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("lfm2", marks=pytest.mark.soak)])
def test_a_state_that_goes_on_is_seen(tmp_path: Path, family: str) -> None:
    [found] = run_grid(1, trained, str(save(family, tmp_path / "model")), GRIDS["tp1"], True)
    assert largest(found, 2) > 100 * TOLERANCE
