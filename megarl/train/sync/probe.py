"""The text whose log-probs are compared on both sides of a weight sync, as the trainer computes it."""

from __future__ import annotations

from dataclasses import replace

import torch

from megarl.config.lengths import context_tokens, prompt_tokens
from megarl.config.schema import Config
from megarl.engines.client.probe import DECODED, PROBE_TOLERANCES, FarText, ProbeText
from megarl.learn.batching import Sequences
from megarl.learn.training.model import Model
from megarl.learn.training.schedule import Head

CANDIDATES = 4
"""Tokens after a far text."""


def probe_text(config: Config, head: Head, model: Model, decode: int = DECODED, *, far: bool = False) -> ProbeText:
    """Make the probe of a model's current weights. Every rank calls it.

    Args:
        head: Of a model with whose tokens engines sample (``Models.head``).
        decode: Most tokens that an engine samples after the text.
        far: Add texts as long as half of the context and all of it.
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
    if not far or longest <= length or config.sync.method == "checkpoint":  # whose readers compare the short text
        return probe
    return replace(probe, far=[_far_text(head, model, size, tolerance) for size in sorted({longest // 2, longest})])


def _far_text(head: Head, model: Model, length: int, tolerance: float) -> FarText:
    """Make a text, and the log-probs of some tokens after it: one sequence for each.

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
