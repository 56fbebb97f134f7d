"""Points at which trainer and engine are compared, in the order of computation.

Shape legend: T tokens of the sequence, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

STREAM = "layer input"
"""Hidden states between layers; of layer 0 the embedding."""
ATTENTION_INPUT, QUERY, KEY, VALUE = "attention input", "query projection", "key projection", "value projection"
JOINED = "query, key and value projection"
"""The three side by side, as engines compute them."""
QUERY_NORM, KEY_NORM = "query norm", "key norm"
ROTATED_QUERY, ROTATED_KEY = "rotated query", "rotated key"
ATTENTION, PROJECTION = "attention", "attention projection"
MLP_INPUT, ROUTER, MLP = "MLP input", "router", "MLP"
OPERATIONS = (
    STREAM, ATTENTION_INPUT, QUERY, KEY, VALUE, QUERY_NORM, KEY_NORM, ROTATED_QUERY, ROTATED_KEY, ATTENTION,
    PROJECTION, MLP_INPUT, ROUTER, MLP,
)  # fmt: skip
"""Operations of a layer."""
FINAL_NORM, HEAD = "final norm", "head"
Point = tuple[int, str]
"""(number of the layer from 0; the operation). What follows the last layer has its number plus one."""
Record = dict[Point, torch.Tensor]
"""Point -> float32 [T, width]."""


@dataclass
class EngineTrace:
    """Everything that the engine computed.

    Attributes:
        tokens: The sequence: prompt, response, and tokens that the engine sampled after it.
        given: Number of tokens that were given.
        whole: Record of one forward pass over the sequence.
        decoded: Record of sampled tokens alone, one forward pass each; the first is token ``given``.
        cached: Record of the last tokens, whose prefix came from the KV cache.
        logp: float32 [T - 1]: log-prob of each next token, from logits at temperature 1.
        logits: float32 [sampled, V]: logits that the sampled tokens were drawn from, computed in ``whole``.
        reported: float32 [sampled]: log-probs that the engine returned with its samples.
        facts: Settings that the engine computes with, by name.
        weights: Name of a weight that differs from the model's files -> description.
        rendered: Token ids of the row's conversation by the engine's chat template; None without one.
    """

    tokens: list[int]
    given: int
    whole: Record
    decoded: Record
    cached: Record
    logp: torch.Tensor
    logits: torch.Tensor
    reported: torch.Tensor
    facts: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    rendered: list[int] | None = None


def flat(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return a float32 copy [T, width] on the CPU, T = ``tokens``; other axes of one element may stand before T."""
    return tensor.detach().float().cpu().reshape(tokens, -1).clone()
