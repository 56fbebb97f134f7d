"""Padded arrays of a test as the trainer's ``Sequences``."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megarl.learn.batching import Sequences, StepShare


def bytes_of(sequences: Sequences) -> int:
    """Bytes of all tensors that the sequences have, images and share included."""
    return sum(value.nbytes for field in fields(sequences) if (value := getattr(sequences, field.name)) is not None)


def sequences_of(
    tokens: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor | None = None, **fields: torch.Tensor
) -> Sequences:
    """Rows [N, S] without their padding; all of them whole where no ``lengths`` are given."""
    from megarl.learn.batching import Sequences

    lengths = torch.full((len(tokens),), tokens.shape[1]) if lengths is None else lengths
    real = torch.arange(tokens.shape[1]) < lengths[:, None]
    return Sequences(tokens[real], lengths, mask[real], **{name: values[real] for name, values in fields.items()})


def random_sequences(seed: int, rows: int, vocab: int) -> Sequences:
    """Sequences of 10 to 24 tokens, six in ten of which are in the loss."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, 24, generator=g) < 0.6
    mask[:, -1] = False
    lengths = torch.randint(10, 25, (rows,), generator=g)
    return sequences_of(torch.randint(2, vocab, (rows, 24), generator=g), mask, lengths)


def held_by(sequences: Sequences, share: StepShare) -> Sequences:
    """The sequences of a share, out of all of a step."""
    kept = torch.isin(sequences.row, share.numbers)
    whole, values = len(sequences.tokens), dict[str, Any]()
    for field in fields(sequences):
        if isinstance(value := getattr(sequences, field.name), torch.Tensor):
            values[field.name] = value[kept] if len(value) == whole else value[share.numbers]
    return replace(sequences, **values, share=share)
