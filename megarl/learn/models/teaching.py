"""Columns that the LM head adds to its outputs in distillation over distributions: of a teacher, the input of the loss;
of the student, the divergence from it.

Shape legend: n requested positions of a micro-batch, T positions of ``Sequences``, V columns of the vocabulary on this
rank, H and G hidden sizes of student and teacher, k likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from megarl.learn.batching import Sequences
from megarl.ops.divergence import Divergence, TopK, WholeVocabulary, linear_divergence, linear_top_k

if TYPE_CHECKING:
    from megarl.learn.models.head import Columns, Request


class Output(NamedTuple):
    """The LM head's input for a request."""

    hidden: torch.Tensor
    """[n, H], equal on all tensor-parallel ranks."""
    weight: torch.Tensor
    """[V, H]"""
    group: torch.distributed.ProcessGroup
    """Tensor-parallel group."""
    request: Request


class HiddenStates:
    """Adds the teacher's last hidden states, G columns."""

    def __init__(self, width: int) -> None:
        self.width = width

    def at(self, index: torch.Tensor) -> Columns:
        """Return the columns of the positions ``index`` [n]."""
        return lambda output: output.hidden.float()


class LikeliestTokens:
    """Adds the teacher's k likeliest tokens, as floats (exact below 2**24), and their log-probs: 2·k columns.

    ``vocab_size``: number of ids that both models have.
    """

    def __init__(self, k: int, vocab_size: int) -> None:
        self.width, self._k, self._vocab_size = 2 * k, k, vocab_size

    def at(self, index: torch.Tensor) -> Columns:
        """Return the columns of the positions ``index`` [n]."""

        def columns(output: Output) -> torch.Tensor:
            request = output.request
            ids, logp = linear_top_k(
                output.hidden,
                output.weight,
                self._k,
                group=output.group,
                vocab_start=output.group.rank() * output.weight.shape[0],
                vocab_size=self._vocab_size,
                temperature=request.temperature,
                logits_bytes=request.logits_bytes,
            )
            return torch.cat([ids.float(), logp], -1)

        return columns


@dataclass(frozen=True)
class TeacherHead:
    """What the student's head needs of a teacher."""

    vocab_size: int
    """Number of ids that both models have."""
    weight: torch.Tensor | None = None
    """[V, G]: rows of the teacher's output weight for this rank's ids; None with ``top_k``, and on ranks without a
    head."""


class DivergenceFromTeachers:
    """Adds the divergence from each sequence's teacher, 0 for a sequence without one: 1 column.

    Args:
        sequences: Has the teachers' hidden states or likeliest tokens, and each sequence's teacher as an index of
            ``heads``.
    """

    width = 1

    def __init__(self, divergence: Divergence, heads: Sequence[TeacherHead], sequences: Sequences) -> None:
        self._divergence, self._heads, self._sequences = divergence, heads, sequences
        self._weights: dict[int, torch.Tensor] = {}

    def at(self, index: torch.Tensor) -> Columns:
        """Return the columns of the positions ``index`` [n]."""
        sequences = self._sequences
        assert sequences.teacher is not None, "the inference phase fills it"
        number = torch.searchsorted(sequences.cu_seqlens, index, right=True) - 1
        teacher = sequences.teacher[number]

        def columns(output: Output) -> torch.Tensor:
            found = output.hidden.new_zeros(len(index), dtype=torch.float32)
            for which in teacher[teacher >= 0].unique().tolist():
                at = torch.nonzero(teacher == which)[:, 0]
                rows = at.to(output.hidden.device)
                value = self._of_teacher(which, index[at], output._replace(hidden=output.hidden[rows]))
                found = found.index_copy(0, rows, value.to(found.dtype))
            return found[:, None]

        return columns

    def _of_teacher(self, which: int, index: torch.Tensor, output: Output) -> torch.Tensor:
        """Return the divergence at positions ``index`` of sequences of one teacher."""
        sequences, head, device = self._sequences, self._heads[which], output.hidden.device
        teacher: WholeVocabulary | TopK
        if sequences.teacher_ids is not None and sequences.teacher_topk_logp is not None:
            ids, logp = sequences.teacher_ids[index].long(), sequences.teacher_topk_logp[index]
            teacher = TopK(ids.to(device), logp.to(device), head.vocab_size)
        else:
            assert sequences.teacher_hidden is not None and head.weight is not None, "the inference phase fills it"
            if which not in self._weights:  # on the device from the first use to the end of the update
                self._weights[which] = head.weight.to(device)
            weight = self._weights[which]
            hidden = sequences.teacher_hidden[index, : weight.shape[1]].to(device, weight.dtype)
            if output.request.float32:
                hidden, weight = hidden.float(), weight.float()
            teacher = WholeVocabulary(hidden, weight)
        return linear_divergence(
            output.hidden,
            output.weight,
            teacher,
            self._divergence,
            group=output.group,
            vocab_start=output.group.rank() * output.weight.shape[0],
            vocab_size=head.vocab_size,
            temperature=output.request.temperature,
            logits_bytes=output.request.logits_bytes,
        )
