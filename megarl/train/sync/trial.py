"""A test adapter, with which an engine must compute as the trainer does before it is given a step's.

An adapter that does nothing passes every digest and, while B is near zero, every probe. A test adapter has a B that is
large and known: an engine that is not given it, has it under a name that matches nothing, or scales it twice, gives
other log-probs. Of an embedding A begins with zeros, and is large in B's place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from megarl.config.schema import Config
from megarl.core.errors import WeightSyncError
from megarl.learn.training.model import Model
from megarl.learn.training.optimizer_digests import whole_digests
from megarl.learn.training.schedule import Head
from megarl.train.sync.probe import probe_text
from megarl.train.sync.published import SentWeights
from megarl.weights.reshard import boxes
from megarl.weights.reshard.adapters import TOWER, Adapted
from megarl.weights.reshard.layout import Layout

SIZE = 0.5
"""Outputs of an adapted layer change by so many times the size of its inputs, about; those of an embedding by so many
times their own size."""
LEAST_EFFECT = 10.0
"""Multiples of the probe's tolerance by which a test adapter must change a log-prob."""


def test_adapter(
    config: Config, head: Head, actor: Model, sent: Callable[[Model], Mapping[str, torch.Tensor]]
) -> SentWeights:
    """Make a test adapter of the actor's A and another B, or of an embedding's B and another A, with what the trainer
    computes with it. Every rank calls it.

    Args:
        sent: Gives a model's tensors as they are delivered.

    The probe has no images, so adapters of a vision tower alone are proven by digests.

    Raises:
        WeightSyncError: on every rank, where the trainer's own log-probs do not move with it.
    """
    before = probe_text(config, head, actor, 0)
    with _tested(actor):
        text = probe_text(config, head, actor, 0)
        kept = SentWeights.copy_of(sent(actor), {}, text)
    assert isinstance(kept.tensors, Adapted)
    written = whole_digests(kept.tensors.model.trained)
    moved = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(text.trainer_logp, before.trainer_logp, strict=True))
    assert actor.adapters is not None
    in_text = any(not own.module.startswith(TOWER) for own in actor.adapters.factors.values())
    if torch.distributed.get_rank() == 0 and in_text and not moved > LEAST_EFFECT * text.tolerance:
        raise WeightSyncError(
            f"a test adapter changes the trainer's own log-probs by {moved:.1e} of their size at most: its adapters "
            "compute nothing, or an A is zero; begin with another adapter (model.lora.path), or a new one"
        )
    return SentWeights(kept.tensors, written, text)


@contextmanager
def _tested(actor: Model) -> Iterator[None]:
    """Within, the B's of a model, and an embedding's A, are those of the test adapter."""
    assert actor.adapters is not None
    tensors = actor.all_tensors
    sizes = {}
    for local, group in actor.adapters.local.items():
        for each in group:
            own, size = each.factors, 1.0
            if own.is_embedding:  # B of its size 1 is multiplied by A; each rank's part of A is as large as its rows
                size = float(tensors[local].float().square().mean().sqrt())
            sizes[each.a if own.is_embedding else each.b] = size * SIZE / (own.scale * own.rank**0.5)
    before = {name: tensors[name].clone() for name in sizes}
    try:
        with torch.no_grad():
            _fill(actor.adapters.layout, tensors, sizes)
        yield
    finally:
        with torch.no_grad():
            for name, values in before.items():
                tensors[name].copy_(values)


def _fill(layout: Layout, tensors: Mapping[str, torch.Tensor], sizes: Mapping[str, float]) -> None:
    """Write this rank's parts of A's and B's that are drawn whole by their names; ``sizes``: standard deviation of each
    that is written."""
    rank = torch.distributed.get_rank()
    for piece in layout.pieces(rank):
        if piece.local not in sizes:
            continue
        seed = int.from_bytes(hashlib.sha256(piece.tensor.encode()).digest()[:8], "big") >> 1
        whole = torch.randn(layout.tensors[piece.tensor], generator=torch.Generator().manual_seed(seed))
        part = whole[tuple(slice(low, high) for low, high in piece.box)] * sizes[piece.local]
        tensors[piece.local][boxes.index_of(piece.at, boxes.shape_of(piece.box))].copy_(part)
