"""Probes of a weight sync, and the copy of the weights published last.

An adapter without effect passes every digest and, while B is near zero, every probe. A test adapter has a large, known
B. An engine gives other log-probs if it lacks the adapter, has it under a name that matches nothing, or scales it
twice. For an embedding A begins with zeros, and is large instead of B.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from megarl.config.derived import context_tokens, prompt_tokens
from megarl.config.job import SyncConfig
from megarl.config.schema import Config
from megarl.core.errors import WeightsDiffer, WeightSyncError
from megarl.core.schema import WeightsVersion
from megarl.engines.client.probe import DECODED, PROBE_TOLERANCES, FarText, ProbeText
from megarl.learn.batching import Sequences
from megarl.learn.training.model import Model
from megarl.learn.training.optimizer import whole_digests
from megarl.learn.training.schedule import Head
from megarl.weights.reshard import layout as boxes
from megarl.weights.reshard.adapters import TOWER, Adapted
from megarl.weights.reshard.layout import Layout


@dataclass(frozen=True, eq=False)
class SentWeights:
    """This rank's share of a version."""

    tensors: Mapping[str, torch.Tensor]
    """Megatron name -> local tensor, in host memory."""
    written: Mapping[str, int]
    """Digests of what the optimizer wrote."""
    probe: ProbeText

    @classmethod
    def copy_of(cls, tensors: Mapping[str, torch.Tensor], written: Mapping[str, int], probe: ProbeText) -> SentWeights:
        """Copy tensors to host memory: one more set of the rank's parameters, or its trained tensors of adapters."""
        if isinstance(tensors, Adapted):
            return cls(type(tensors)(tensors.model.kept()), written, probe)
        return cls({name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}, written, probe)


class SentDigests:
    """Digests of this rank's share of the version sent last."""

    def __init__(self) -> None:
        self._last: tuple[WeightsVersion, Mapping[str, int]] | None = None

    def check(self, version: WeightsVersion, written: Mapping[str, int]) -> None:
        """Record what is sent next. Raises WeightsDiffer if the same version was sent with other weights."""
        known = written if self._last is None or self._last[0] != version else self._last[1]
        if changed := sorted(name for name in known.keys() | written.keys() if known.get(name) != written.get(name)):
            raise WeightsDiffer(
                f"weights {version} would be published again with other values: {len(changed)} tensors of this rank "
                f"have changed since, the first is {changed[0]}; no engine may sample with them as that version"
            )
        self._last = version, written


def outlives_update(sync: SyncConfig) -> bool:
    """True if engines keep sampling with a version after the following update, and no other version may replace it: in
    admission order, over links."""
    return sync.max_staleness > 0 and sync.order == "admission" and sync.method == "direct"


CANDIDATES = 4
"""Number of candidate tokens after a far text."""


BLOCKS = 2
"""Blocks of an engine's cache that the repeated text fills."""


def probe_text(
    config: Config, head: Head, model: Model, decode: int = DECODED, *, far: bool = False, repeated: bool = False
) -> ProbeText:
    """Make the probe of a model's current weights. Every rank calls it.

    Args:
        head: Head of a model with the tokens that engines sample (``Models.head``).
        decode: Maximum number of tokens that an engine samples after the text.
        far: Add texts as long as half the context and the whole context.
        repeated: Add a text that an engine with a kept prefix cache answers from older weights.
    """
    tolerance = config.sync.probe_tolerance
    length = min(config.sync.probe_tokens, prompt_tokens(config.rollout))
    tokens = torch.randint(0, head.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
    text = Sequences(tokens, torch.tensor([length]), torch.arange(length) < length - 1)
    logp = model.outputs(text, [model.micro_batches(text)], temperature=1.0)
    tolerance = PROBE_TOLERANCES[config.model.dtype] if tolerance is None else tolerance
    # Text, sampled tokens and one more must fit the engine's context.
    decode = max(0, min(decode, context_tokens(config.rollout) - length - 2))
    probe = ProbeText(tokens.tolist(), logp[:-1].tolist(), tolerance, decode)
    longest = context_tokens(config.rollout) - 2
    if longest <= length or config.sync.method == "checkpoint":  # whose readers use the short text
        return probe
    sizes = sorted({longest // 2, longest}) if far else []
    texts = [_far_text(head, model, size, tolerance) for size in sizes]
    if repeated and longest > config.rollout.block_size:
        size = min(BLOCKS * config.rollout.block_size + 1, longest)
        texts.append(replace(_far_text(head, model, size, tolerance), repeated=True))
    return replace(probe, far=texts)


def _far_text(head: Head, model: Model, length: int, tolerance: float) -> FarText:
    """Make a text, and the log-probs of CANDIDATES tokens after it: one sequence for each.

    Special tokens have the lowest and the highest ids, and are left out: engines look for images at some of them.
    """
    generator, vocab = torch.Generator().manual_seed(0), head.vocab_size
    ids = torch.arange(vocab // 10, vocab - vocab // 10)
    text = ids[torch.randint(0, len(ids), (length,), generator=generator)]
    candidates = ids[torch.randperm(len(ids), generator=generator)[:CANDIDATES]]
    rows = torch.cat([torch.cat([text, candidate[None]]) for candidate in candidates])
    at = torch.arange(len(rows)) % (length + 1) == length - 1
    sequences = Sequences(rows, torch.full((len(candidates),), length + 1), at)
    logp = model.outputs(sequences, [model.micro_batches(sequences)], temperature=1.0)
    return FarText(text.tolist(), candidates.tolist(), logp[at].tolist(), tolerance)


ADAPTER_SIZE = 0.5
"""Size of the test adapter's effect, as a share of the size of a layer's inputs, or of an embedding's outputs."""
LEAST_EFFECT = 10.0
"""Multiples of the probe's tolerance by which a test adapter must change a log-prob."""


def test_adapter(
    config: Config, head: Head, actor: Model, sent: Callable[[Model], Mapping[str, torch.Tensor]]
) -> SentWeights:
    """Make a test adapter with the actor's A and another B (embedding: its B and another A), and the trainer's
    log-probs with it. Every rank calls it.

    Args:
        sent: Returns a model's tensors as delivered.

    The probe has no images, so adapters of a vision tower alone are proven by digests.

    Raises:
        WeightSyncError: on every rank, if the trainer's own log-probs do not change with it.
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
    """Give a model the test adapter within the context: other B matrices, and other A matrices of embeddings."""
    assert actor.adapters is not None
    tensors = actor.all_tensors
    sizes = {}
    for local, group in actor.adapters.local.items():
        for each in group:
            own, size = each.factors, 1.0
            if own.is_embedding:  # B of size 1 is multiplied by A; each rank's part of A has its rows' scale
                size = float(tensors[local].float().square().mean().sqrt())
            sizes[each.a if own.is_embedding else each.b] = size * ADAPTER_SIZE / (own.scale * own.rank**0.5)
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
    """Write this rank's parts of the A and B matrices named in ``sizes`` (standard deviations). Each whole matrix is
    drawn with a seed from its name."""
    rank = torch.distributed.get_rank()
    for piece in layout.pieces(rank):
        if piece.local not in sizes:
            continue
        seed = int.from_bytes(hashlib.sha256(piece.tensor.encode()).digest()[:8], "big") >> 1
        whole = torch.randn(layout.tensors[piece.tensor], generator=torch.Generator().manual_seed(seed))
        part = whole[tuple(slice(low, high) for low, high in piece.box)] * sizes[piece.local]
        tensors[piece.local][boxes.index_of(piece.at, boxes.shape_of(piece.box))].copy_(part)
