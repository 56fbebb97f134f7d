"""Teachers' distributions at each token of a step, for a divergence from them (``algorithm.divergence``).

Shape legend: N sequences of a step, n of them held, T positions of these; k likeliest tokens, G the largest hidden size
of the teachers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megarl.config.algorithms import DivergenceConfig
from megarl.config.derived import path_of, teacher_role
from megarl.config.schema import TeacherConfig
from megarl.learn.algorithms.terms.reduction import repeated
from megarl.learn.batching import Sequences
from megarl.learn.models.teaching import (
    DivergenceFromTeachers,
    HiddenStates,
    LikeliestTokens,
    TeacherDistributions,
    TeacherHead,
)
from megarl.learn.training.model import token_ids
from megarl.learn.training.objectives import Taught
from megarl.ops.divergence import Divergence
from megarl.train.batch.batch import StepBatch
from megarl.train.inference.models import Models
from megarl.weights.architectures import architecture
from megarl.weights.architectures.megatron_config import multipliers
from megarl.weights.checkpoint.formats import hf


class Distributions:
    """Collects the teachers' hidden states, or with ``top_k`` their likeliest tokens, from forward passes of a step.

    Args:
        heads: Result of ``teacher_heads``.
    """

    def __init__(self, models: Models, heads: Sequence[TeacherHead], top_k: int, sequences: Sequences) -> None:
        self._heads, self._sequences, self._top_k = heads, sequences, top_k
        teachers, dtype, self._teachers = models.teachers, torch.float32, models.config.teachers
        self._columns: dict[str, HiddenStates | LikeliestTokens] = {}
        if top_k:
            sizes = {name: head.vocab_size for name, head in zip(self._teachers, heads, strict=True)}
            self._columns = {name: LikeliestTokens(top_k, sizes[name]) for name in teachers}
        else:
            self._columns = {n: HiddenStates(int(model.hf_config["hidden_size"])) for n, model in teachers.items()}
            if all(model.model_config.dtype == "bfloat16" for model in teachers.values()):
                dtype = torch.bfloat16
        width = max((columns.width for columns in self._columns.values()), default=2 * top_k)
        self._found = torch.zeros(len(sequences.tokens), width, dtype=dtype)

    def of(self, name: str) -> tuple[HiddenStates | LikeliestTokens, torch.Tensor]:
        """Return the columns to ask a teacher for, and the tensor [T, ...] that receives them."""
        columns = self._columns[name]
        return columns, self._found[:, : columns.width]

    def result(self, batch: StepBatch) -> TeacherDistributions:
        """Return the distributions after all forward passes, with the stored ones of teachers at URLs. Every rank calls
        it."""
        sequences, names, k = self._sequences, list(self._teachers), self._top_k
        numbers = torch.tensor(
            [-1 if name is None else names.index(name) for name in batch.teachers], dtype=torch.int16
        )
        teacher = repeated(sequences.held(numbers), sequences.lengths)
        # For each position one rank has the values and the others have 0, so the sum is exact.
        sequences.add_up(self._found)
        scored = repeated(scored_at_urls(batch, self._teachers), sequences.lengths)
        if scored.any():
            assert batch.teacher_top_k is not None, "TaughtGroups drops groups without the scores of a teacher"
            self._found[scored] = batch.teacher_top_k[scored]
        if not k:
            return TeacherDistributions(self._heads, teacher, teacher_hidden=self._found)
        ids, logp = self._found[:, :k].int(), self._found[:, k:].contiguous()
        return TeacherDistributions(self._heads, teacher, ids, logp)


def scored_at_urls(batch: StepBatch, teachers: Mapping[str, TeacherConfig]) -> torch.Tensor:
    """bool [n]: held sequences whose teacher is at a URL."""
    urls = {name for name, teacher in teachers.items() if teacher.url is not None}
    return batch.sequences.held(torch.tensor([name in urls for name in batch.teachers], dtype=torch.bool))


def teacher_heads(models: Models, top_k: int) -> list[TeacherHead]:
    """Return the head of each teacher in the order of the settings; for the whole vocabulary with its rows for this
    rank's part of the actor's. A teacher at a URL has the actor's ids.

    Raises CheckpointError if a teacher's files cannot be read.
    """
    found = []
    for name in models.config.teachers:
        model = models.teachers.get(name)
        if model is None:
            found.append(TeacherHead(models.head.vocab_size))
            continue
        path = path_of(models.config, teacher_role(name))
        assert model.head is not None and path is not None, "a teacher is a language model"
        vocab_size, ids = min(models.head.vocab_size, model.head.vocab_size), token_ids(models.actor.model)
        weight = None
        if not top_k and ids is not None:
            weight = hf.output_rows(Path(path), model.layout, ids, getattr(torch, model.model_config.dtype))
        teacher = architecture(model.hf_config)
        found.append(TeacherHead(vocab_size, weight, multipliers(teacher, model.hf_config).softcap))
    return found


def divergence_of(batch: StepBatch, settings: DivergenceConfig, teachers: Mapping[str, TeacherConfig]) -> Taught:
    """Return the divergence of the actor from the batch's distributions."""
    assert batch.distributions is not None, "the inference phase fills them"
    found, tokens = batch.distributions, batch.taught
    if tokens is not None:
        found = replace(found, teacher=found.teacher.masked_fill(~tokens, -1))
    return taught(settings, found, batch.sequences.held(teacher_weights(batch.teachers, teachers)), tokens)


def taught(
    settings: DivergenceConfig,
    distributions: TeacherDistributions,
    weights: torch.Tensor,
    tokens: torch.Tensor | None = None,
) -> Taught:
    """Return the divergence of the actor from ``distributions``, with the ``weights`` and ``tokens`` of ``Taught``."""
    assert settings.divergence != "sampled", "the loss has a divergence"
    return Taught(
        DivergenceFromTeachers(Divergence(settings.divergence, settings.beta), distributions), weights, tokens
    )


def teacher_weights(names: Sequence[str | None], teachers: Mapping[str, TeacherConfig]) -> torch.Tensor:
    """Return float64 [N]: ``weight`` of each sequence's teacher; 0 for a sequence without one."""
    return torch.tensor([0.0 if name is None else teachers[name].weight for name in names], dtype=torch.float64)
