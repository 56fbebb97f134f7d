"""Batching of samples and demonstrations: equally many micro-batches of equal shape on every data-parallel rank."""

from megarl.learn.batching.micro import MicroBatch, MicroBatching, dealt, micro_batches
from megarl.learn.batching.sequences import (
    Sequences,
    StepShare,
    joined,
    likeliest_tokens,
    of_demonstrations,
    of_samples,
    per_token,
    score_positions,
)

__all__ = [
    "MicroBatch", "MicroBatching", "Sequences", "StepShare", "dealt", "joined", "likeliest_tokens", "micro_batches",
    "of_demonstrations", "of_samples", "per_token", "score_positions",
]  # fmt: skip
