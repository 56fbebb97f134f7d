"""Experiences and demonstrations to equal numbers of equally shaped micro-batches on every data-parallel rank."""

from megarl.batching.padded import (
    MicroBatch,
    Rows,
    micro_batches,
    response_values,
    shard,
    stack_demonstrations,
    stack_experiences,
)

__all__ = ["MicroBatch", "Rows", "micro_batches", "response_values", "shard", "stack_demonstrations", "stack_experiences"]
