"""Teachers' distributions at each token of a step, for a divergence from them (``algorithm.divergence``).

Shape legend: N sequences of a step, n of them held, T positions of these; k likeliest tokens, G the largest hidden size
of the teachers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megarl.config.algorithms import DistillConfig
from megarl.config.schema import TeacherConfig
from megarl.learn.batching import Sequences
from megarl.learn.models.teaching import DivergenceFromTeachers, HiddenStates, LikeliestTokens
from megarl.learn.training.objectives import Taught
from megarl.ops.divergence import Divergence
from megarl.train.batch.batch import StepBatch
from megarl.train.inference.models import Models


class Distributions:
    """Collects the teachers' hidden states, or with ``top_k`` their likeliest tokens, from forward passes of a step."""

    def __init__(self, models: Models, settings: DistillConfig, sequences: Sequences) -> None:
        self._models, self._sequences, self._top_k = models, sequences, settings.top_k
        names = list(models.teachers)
        self._columns: dict[str, HiddenStates | LikeliestTokens] = {}
        dtypes = [torch.float32]
        if self._top_k:
            sizes = [head.vocab_size for head in models.teacher_heads]
            self._columns = {n: LikeliestTokens(self._top_k, size) for n, size in zip(names, sizes, strict=True)}
        else:
            self._columns = {n: HiddenStates(int(m.hf_config["hidden_size"])) for n, m in models.teachers.items()}
            dtypes = [getattr(torch, m.model_config.dtype) for m in models.teachers.values()]
        width = max(columns.width for columns in self._columns.values())
        exact = torch.float32 if torch.float32 in dtypes else dtypes[0]
        self._found = torch.zeros(len(sequences.tokens), width, dtype=exact)

    def of(self, name: str) -> tuple[HiddenStates | LikeliestTokens, torch.Tensor]:
        """Return the columns to ask a teacher for, and the tensor [T, ...] that receives them."""
        columns = self._columns[name]
        return columns, self._found[:, : columns.width]

    def fill(self, teachers: Sequence[str | None]) -> None:
        """Fill the step's fields after all forward passes. Every rank calls it.

        ``teachers``: [N], name of each sequence's teacher.
        """
        sequences, names = self._sequences, list(self._columns)
        numbers = [-1 if name is None else names.index(name) for name in teachers]
        sequences.teacher = sequences.held(torch.tensor(numbers))
        # For each position one rank has the values and the others have 0, so the sum is exact.
        sequences.add_up(self._found)
        if self._top_k:
            sequences.teacher_ids = self._found[:, : self._top_k].int()
            sequences.teacher_topk_logp = self._found[:, self._top_k :].contiguous()
        else:
            sequences.teacher_hidden = self._found


def divergence_of(batch: StepBatch, models: Models, settings: DistillConfig) -> Taught:
    """Return the divergence of the actor from the distributions that ``Distributions`` has filled."""
    assert settings.divergence != "sampled", "that one reads no distributions"
    sequences = batch.sequences
    kind = Divergence(settings.divergence, settings.beta)
    weights = teacher_weights(batch.teachers, models.config.teachers)
    return Taught(DivergenceFromTeachers(kind, models.teacher_heads, sequences), sequences.held(weights))


def teacher_weights(names: Sequence[str | None], teachers: Mapping[str, TeacherConfig]) -> torch.Tensor:
    """Return float64 [N]: ``weight`` of each sequence's teacher; 0 for a sequence without one."""
    return torch.tensor([0.0 if name is None else teachers[name].weight for name in names], dtype=torch.float64)
