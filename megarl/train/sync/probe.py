"""The text whose log-probs are compared on both sides of a weight sync, as the trainer computes it."""

from __future__ import annotations

import torch

from megarl.core.config.lengths import context_tokens, prompt_tokens
from megarl.core.config.schema import Config
from megarl.engine.client.probe import DECODED, PROBE_TOLERANCES, ProbeText
from megarl.learn.batching import Sequences
from megarl.train.update.models import Models


def probe_text(config: Config, models: Models, decode: int = DECODED) -> ProbeText:
    """Make the probe of the actor's weights of now, after which an engine samples at most ``decode`` tokens. Every rank
    calls it."""
    actor, tolerance = models.actor, config.sync.probe_tolerance
    length = min(config.sync.probe_tokens, prompt_tokens(config.rollout))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, models.head.vocab_size, (length,), generator=generator)
    text = Sequences(tokens, torch.tensor([length]), torch.arange(length) < length - 1)
    logp = actor.outputs(text, [actor.micro_batches(text)], temperature=1.0)
    tolerance = PROBE_TOLERANCES[config.model.dtype] if tolerance is None else tolerance
    # Text, sampled tokens and one more must fit the engine's context.
    decode = max(0, min(decode, context_tokens(config.rollout) - length - 2))
    return ProbeText(tokens.tolist(), logp[:-1].tolist(), tolerance, decode)
