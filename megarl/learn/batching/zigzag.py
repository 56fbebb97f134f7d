"""Positions of packed tokens in the shares of context-parallel ranks. Plain integer tensors."""

from __future__ import annotations

import torch


def share_rows(lengths: torch.Tensor, cp: int) -> torch.Tensor:
    """int64 [T]: position of each packed token after concatenating the shares of all ``cp`` ranks.

    A sequence is split into 2 * cp equal pieces; rank r has pieces r and 2 * cp - 1 - r (Megatron's zigzag, which gives
    every rank equal work under a causal mask). A rank's share has its two pieces of every sequence in order.
    ``lengths``: lengths of the whole sequences, multiples of 2 * cp.

    Raises:
        ValueError: a length is no multiple of 2 * cp.
    """
    lengths = lengths.to("cpu", torch.int64)
    if bool((lengths % (2 * cp)).any()):
        raise ValueError(
            f"sequence lengths {lengths.tolist()} are not all multiples of 2*cp={2 * cp}: pad each sequence"
        )
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    starts = lengths.cumsum(0) - lengths
    offset = torch.arange(len(sequence)) - starts[sequence]
    size = lengths[sequence] // (2 * cp)
    piece, within = offset // size, offset % size
    second = piece >= cp
    rank = torch.where(second, 2 * cp - 1 - piece, piece)
    return rank * (len(sequence) // cp) + starts[sequence] // cp + within + size * second
