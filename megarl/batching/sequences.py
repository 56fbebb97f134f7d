"""The sequences of a step, one behind the other: token ids and what is known of every token.

Position i holds the log-prob, mask and advantage of the token at i + 1, because the model's output at i predicts it.
Shape legend: N sequences, T their tokens together, P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megarl.schema import Experience

IGNORED = -100


@dataclass
class Sequences:
    """Every rank holds a whole step: at most 40 bytes a token. Whoever computes something for a share of the sequences puts
    it together for all (``training.model``), so nothing here depends on a grid.
    """

    tokens: torch.Tensor
    """int64 [T]"""
    lengths: torch.Tensor
    """int64 [N], at least 1 each."""
    mask: torch.Tensor
    """bool [T]; positions whose next token is in the loss, never the last of a sequence. (Where scores are trained: ``scored`` alone.)"""
    advantages: torch.Tensor | None = None
    """float32 [T], as all that follow."""
    returns: torch.Tensor | None = None
    engine_logp: torch.Tensor | None = None
    old_logp: torch.Tensor | None = None
    ref_logp: torch.Tensor | None = None
    values: torch.Tensor | None = None
    expert: torch.Tensor | None = None
    """bool [N]; demonstrations among answers (mix)."""

    @property
    def sampled(self) -> torch.Tensor:
        """bool [T]: positions in the loss whose token an engine sampled."""
        return self.mask if self.expert is None else self.mask & ~self.expert[self.row]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """int64 [N + 1]: sequence i is positions ``cu_seqlens[i] .. cu_seqlens[i + 1]``."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    @property
    def targets(self) -> torch.Tensor:
        """int64 [T]: the next token where it is in the loss, ``IGNORED`` elsewhere."""
        following = torch.roll(self.tokens, -1)
        return following.masked_fill(~self.mask, IGNORED)

    def scored(self, pad: int | None) -> torch.Tensor:
        """int64 [N]: where a score model reads each sequence's score, as in transformers: its last token that is not ``pad``, or its
        first one where all are."""
        if pad is None:
            return self.cu_seqlens[1:] - 1
        index = torch.arange(len(self.tokens)).masked_fill(self.tokens == pad, -1)
        return torch.maximum(torch.segment_reduce(index.double(), "max", lengths=self.lengths).long(), self.cu_seqlens[:-1])

    @property
    def row(self) -> torch.Tensor:
        """int64 [T]: the sequence that each position belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)


def _join(sequences: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Sequences:
    """(prompt ids [P], response ids [R], whether each response token is in the loss [R]) of every sequence."""
    tokens = [part for prompt, response, _ in sequences for part in (prompt, response)]
    mask = [
        part
        for prompt, _, kept in sequences
        for part in (np.zeros(len(prompt) - 1, dtype=bool), kept, np.zeros(1, dtype=bool))
    ]
    lengths = [len(prompt) + len(response) for prompt, response, _ in sequences]
    return Sequences(
        torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
        torch.tensor(lengths, dtype=torch.int64),
        torch.from_numpy(np.concatenate(mask).astype(bool)),
    )


def of_demonstrations(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Sequences:
    """Prompt and response ids; the loss is on the whole response."""
    return _join([(p, r, np.ones(len(r), dtype=bool)) for p, r in pairs])


def of_experiences(experiences: Sequence[Experience]) -> Sequences:
    """Experiences with the log-probs of the engine that sampled them; the rest is for the trainer to fill in."""
    result = _join([(e.prompt_ids, e.response_ids, e.response_mask) for e in experiences])
    logp = [
        part
        for e in experiences
        for part in (np.zeros(len(e.prompt_ids) - 1), e.engine_logp, np.zeros(1))
    ]
    result.engine_logp = torch.from_numpy(np.concatenate(logp).astype(np.float32))
    return result


def joined(sampled: Sequences, demonstrated: Sequences) -> Sequences:
    """One behind the other, the second marked as ``expert``; what only the first knows is 0 for the second."""

    def together(name: str) -> torch.Tensor | None:
        value = getattr(sampled, name)
        return None if value is None else torch.cat([value, value.new_zeros(len(demonstrated.tokens))])

    return Sequences(
        torch.cat([sampled.tokens, demonstrated.tokens]),
        torch.cat([sampled.lengths, demonstrated.lengths]),
        torch.cat([sampled.mask, demonstrated.mask]),
        **{name: together(name) for name in ("advantages", "returns", "engine_logp", "old_logp", "ref_logp", "values")},
        expert=torch.arange(len(sampled) + len(demonstrated)) >= len(sampled),
    )


def response_values(values: torch.Tensor, experiences: Sequence[Experience]) -> list[np.ndarray]:
    """Per-position values [T] of ``of_experiences(experiences)`` as one array [R] per response."""
    array, answers, start = values.cpu().numpy(), [], 0
    for e in experiences:
        first = start + len(e.prompt_ids) - 1
        answers.append(array[first : first + len(e.response_ids)])
        start += len(e.prompt_ids) + len(e.response_ids)
    return answers
