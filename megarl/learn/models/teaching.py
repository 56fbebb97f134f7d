"""Columns that the LM head adds to its outputs in distillation over distributions: of a teacher, the input of the loss;
of the student, the divergence from it.

Shape legend: n requested positions of a micro-batch, T positions of ``Sequences``, V columns of the vocabulary on this
rank, H and G hidden sizes of student and teacher, k likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from megarl.ops.divergence import Divergence, TopK, WholeVocabulary, linear_divergence, linear_top_k


class HeadInput(NamedTuple):
    """The LM head's input for the requested positions."""

    hidden: torch.Tensor
    """[n, H], equal on all tensor-parallel ranks."""
    weight: torch.Tensor
    """[V, H]"""
    group: torch.distributed.ProcessGroup
    """Tensor-parallel group."""
    temperature: float
    logits_bytes: int | None
    float32: bool
    """Compute logits in float32."""
    softcap: float | None = None
    """Bound of the student's logits."""

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of the ops, without ``vocab_size``."""
        return {
            "group": self.group,
            "vocab_start": self.group.rank() * self.weight.shape[0],
            "temperature": self.temperature,
            "logits_bytes": self.logits_bytes,
            "softcap": self.softcap,
        }


Columns = Callable[[HeadInput], torch.Tensor]
"""Makes more columns [n, j] of the outputs at the requested positions, equal on all tensor-parallel ranks."""


class MoreColumns(Protocol):
    """Adds ``width`` columns to the outputs of a language model."""

    width: int

    def at(self, index: torch.Tensor) -> Columns:
        """Return the columns of positions ``index`` [n] of the flat arrays of ``Sequences``."""
        ...


class HiddenStates:
    """Adds the teacher's last hidden states, G columns."""

    def __init__(self, width: int) -> None:
        self.width = width

    def at(self, index: torch.Tensor) -> Columns:
        """Return the columns of the positions ``index`` [n]."""
        return lambda given: given.hidden.float()


class LikeliestTokens:
    """Adds the teacher's k likeliest tokens, as floats (exact below 2**24), and their log-probs: 2·k columns.

    ``vocab_size``: number of ids that both models have.
    """

    def __init__(self, k: int, vocab_size: int) -> None:
        self.width, self._k, self._vocab_size = 2 * k, k, vocab_size

    def at(self, index: torch.Tensor) -> Columns:
        """Return the columns of the positions ``index`` [n]."""

        def columns(given: HeadInput) -> torch.Tensor:
            size = self._vocab_size
            ids, logp = linear_top_k(given.hidden, given.weight, self._k, vocab_size=size, **given.settings)
            return torch.cat([ids.float(), logp], -1)

        return columns


@dataclass(frozen=True)
class TeacherHead:
    """Vocabulary and output weight of a teacher, for the student's head."""

    vocab_size: int
    """Number of ids that both models have."""
    weight: torch.Tensor | None = None
    """[V, G]: rows of the teacher's output weight for this rank's ids; None with ``top_k``, and on ranks without a
    head."""
    softcap: float | None = None
    """Bound of the teacher's logits."""


@dataclass(frozen=True)
class TeacherDistributions:
    """Teachers' distributions at the positions of a step's ``Sequences``: ids and log-probs, or hidden states."""

    heads: Sequence[TeacherHead]
    """One for each teacher, in the order of the settings."""
    teacher: torch.Tensor
    """int16 [T]: index of the sequence's teacher in ``heads``; -1 without one."""
    teacher_ids: torch.Tensor | None = None
    """int32 [T, k]: the teacher's k likeliest tokens in place of the next one."""
    teacher_topk_logp: torch.Tensor | None = None
    """float32 [T, k]: log-probs of ``teacher_ids``."""
    teacher_hidden: torch.Tensor | None = None
    """[T, G]: the teacher's last hidden states, G the largest hidden size of the teachers; 0 to its right."""


class DivergenceFromTeachers:
    """Adds the divergence from each sequence's teacher, 0 for a sequence without one: 1 column."""

    width = 1

    def __init__(self, divergence: Divergence, distributions: TeacherDistributions) -> None:
        self._divergence, self._distributions = divergence, distributions
        self._weights: dict[int, torch.Tensor] = {}

    def at(self, index: torch.Tensor) -> Columns:
        """Return the columns of the positions ``index`` [n]."""
        teacher = self._distributions.teacher[index]

        def columns(given: HeadInput) -> torch.Tensor:
            found = given.hidden.new_zeros(len(index), dtype=torch.float32)
            for number in teacher[teacher >= 0].unique().tolist():
                at = torch.nonzero(teacher == number)[:, 0]
                rows = at.to(given.hidden.device)
                part = given._replace(hidden=given.hidden[rows])
                size, source = self._distributions.heads[number].vocab_size, self._of_teacher(number, index[at], part)
                value = linear_divergence(
                    part.hidden, part.weight, source, self._divergence, vocab_size=size, **part.settings
                )
                found = found.index_copy(0, rows, value.to(found.dtype))
            return found[:, None]

        return columns

    def _of_teacher(self, number: int, index: torch.Tensor, given: HeadInput) -> WholeVocabulary | TopK:
        """Return the distributions of one teacher at positions ``index``."""
        found, head, device = self._distributions, self._distributions.heads[number], given.hidden.device
        if found.teacher_ids is not None and found.teacher_topk_logp is not None:
            ids, logp = found.teacher_ids[index].long(), found.teacher_topk_logp[index]
            return TopK(ids.to(device), logp.to(device), head.vocab_size)
        assert found.teacher_hidden is not None and head.weight is not None, "the inference phase fills it"
        if number not in self._weights:  # on the device from the first use to the end of the update
            self._weights[number] = head.weight.to(device)
        weight = self._weights[number]
        hidden = found.teacher_hidden[index, : weight.shape[1]].to(device, weight.dtype)
        if given.float32:
            hidden, weight = hidden.float(), weight.float()
        return WholeVocabulary(hidden, weight, head.softcap)
