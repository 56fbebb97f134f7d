"""An update with a teacher's stored scores, as one at a URL gives them, has the metrics of the same teacher's files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.config.schema import Config, ParallelConfig, TeacherConfig, UpdateFilterConfig
from megarl.core.schema import TEACHER, TeacherScores, Trajectory
from tests.parallel.grid import run_grid
from tests.parallel.test_divergence import algorithm_of
from tests.parallel.test_teachers import GRIDS, config_of, paths, taught

__all__ = ["paths"]
CASES = ("sampled", "reverse_kl of 5")


def config_for(case: str, paths: dict[str, str], grids: tuple[ParallelConfig, ...], url: bool) -> Config:
    config = config_of(paths, grids)
    if url:
        wide = TeacherConfig(url="http://nowhere/v1", weight=config.teachers["wide"].weight)
        config = replace(config, teachers={**config.teachers, "wide": wide})
    return config if case == "sampled" else replace(config, algorithm=algorithm_of(case))


def step(
    rank: int, paths: dict[str, str], grids: tuple[ParallelConfig, ...], given: dict[str, list[Trajectory]], url: bool
) -> dict[str, tuple[dict[str, float], list[list[np.ndarray]]]]:
    """Runs in each rank, for each case: the update's metrics and, of every sample that the rank holds, the teacher's
    log-probs, ids and their log-probs at its trained tokens."""
    from megarl.learn import algorithms
    from megarl.learn.parallel import process_groups
    from megarl.train.inference.inference import Inference
    from megarl.train.inference.models import Models
    from megarl.train.ranks import Ranks, TrainState
    from megarl.train.update.learner import Learner, UpdateFilter

    process_groups.initialize(grids[0], seed=1)
    algorithm, found = algorithms.get("distill"), {}
    for case, trajectories in given.items():
        config = config_for(case, paths, grids, url)
        models = Models(config, algorithm)
        models.make_actor(None)
        models.load_beginning()
        models.build(0, None, Path("none"), lambda phase: None)
        assert sorted(models.teachers) == (["short"] if url else ["short", "wide"])
        reporter: Any = SimpleNamespace(log=lambda text: None, event=lambda kind, data: None)
        inference = Inference(config, algorithm, models, lambda phase: None)
        learner = Learner(config, algorithm, inference, UpdateFilter(UpdateFilterConfig(), reporter), Ranks())
        batch = learner.batch_of(trajectories)
        inference.fill(batch)
        sequences, values = batch.sequences, []
        fields = [sequences.teacher_logp]
        if batch.distributions is not None:
            fields += [batch.distributions.teacher_ids, batch.distributions.teacher_topk_logp]
        row = sequences.row
        for i in range(len(sequences)):
            values.append([field[sequences.mask & (row == i)].numpy().copy() for field in fields])
        _, metrics = learner.train_step(TrainState("rl"), batch)
        found[case] = metrics, values
    return found


def with_scores(trajectories: list[Trajectory], values: list[list[np.ndarray]]) -> list[Trajectory]:
    """The trajectories of the teacher ``wide`` with its scores; ``values``: of each sample."""
    found, number = [], 0
    for each in trajectories:
        own = values[number : number + each.num_samples]
        number += each.num_samples
        if each.metadata[TEACHER] == "wide":
            logp, *more = (np.concatenate(parts) for parts in zip(*own, strict=True))
            none = np.zeros((len(logp), 0), np.int32), np.zeros((len(logp), 0), np.float32)
            each = replace(each, teacher_scores=TeacherScores("wide", logp, *(more or none)))
        found.append(each)
    return found


def test_stored_scores_train_as_the_teachers_files(paths: dict[str, str]) -> None:
    given = dict.fromkeys(CASES, taught())
    [files] = run_grid(1, step, paths, GRIDS["one"], given, False)
    scored = {case: with_scores(given[case], values) for case, (_, values) in files.items()}
    for name in ("one", "dp2", "tp2"):
        for answer in run_grid(GRIDS[name][0].world_size, step, paths, GRIDS[name], scored, True):
            for case, (metrics, _) in answer.items():
                expected = files[case][0]
                assert expected["actor/grad_norm"] > 0
                for key in ("actor/loss", "actor/grad_norm", "teacher/divergence"):
                    if key in expected:
                        assert metrics[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), (name, case, key)
