"""Teachers of a step's trajectories (``teachers.NAME``): which one each has, and how far the actor is from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from megarl.config import Config
from megarl.config.derived import teacher_of, teachers_at
from megarl.config.schema import TeacherConfig
from megarl.core.schema import TEACHER, Trajectory
from megarl.learn.algorithms.terms.reduction import Tokens, repeated
from megarl.train.batch.batch import StepBatch
from megarl.train.part import Metrics, Part, StepData
from megarl.train.ranks import TrainState
from megarl.train.rollout.reading import RolloutReader


class Teachers(Part):
    """Chooses the teacher of each trajectory by its task's data source; measures the KL of the actor to it."""

    def __init__(self, config: Config, reader: RolloutReader) -> None:
        self._teachers, self._reader = config.teachers, reader
        self._measured: Metrics = {}

    def before_batch(self, state: TrainState, data: StepData) -> None:
        sources = self._reader.data_sources(data.trajectories)
        now = teachers_at(self._teachers, state.step)
        data.trajectories = [
            replace(each, metadata={**each.metadata, TEACHER: self._teacher_of(each, sources[each.task_id], now)})
            for each in data.trajectories
        ]

    def _teacher_of(self, trajectory: Trajectory, data_source: str, now: Mapping[str, TeacherConfig]) -> str | None:
        """Return the teacher that has scored the trajectory, else the one that will; None for a weight of 0."""
        scores = trajectory.teacher_scores
        name = teacher_of(self._teachers, data_source) if scores is None else scores.teacher
        return None if name is None or not now[name].weight else name

    def before_update(self, state: TrainState, batch: StepBatch) -> None:
        sequences = batch.sequences
        if sequences.old_logp is None or sequences.teacher_logp is None:
            return  # an algorithm of the user's that needs no old_logp
        names, metrics = batch.teachers, Metrics()
        for place, chosen in [("teacher/kl", {*self._teachers}), *((f"teacher/kl/{n}", {n}) for n in self._teachers)]:
            mask = sequences.sampled & repeated(
                sequences.held(torch.tensor([name in chosen for name in names])), sequences.lengths
            )
            kept = Tokens(mask, sequences.lengths, sequences.together)
            found = kept.totals(
                lambda old, taught: old.double() - taught.double(), sequences.old_logp, sequences.teacher_logp
            )
            if found.number:
                metrics[place] = found.mean
        for name, teacher in teachers_at(self._teachers, state.step).items():
            if teacher.decay_steps is not None:
                metrics[f"teacher/weight/{name}"] = teacher.weight
        self._measured = metrics

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        metrics |= self._measured
