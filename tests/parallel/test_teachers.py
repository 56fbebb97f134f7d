"""Log-probs of two teachers, and an update that learns from them, against plain transformers, on every kind of grid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config.algorithms import DistillConfig, KLConfig
from megarl.config.schema import (
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    TeacherConfig,
    TrainerConfig,
    UpdateFilterConfig,
)
from megarl.core.schema import TEACHER, Trajectory
from tests.parallel.grid import run_grid
from tests.parallel.models import save_tiny_qwen3
from tests.parallel.parity import TOLERANCE
from tests.parallel.test_step_share import trajectories_of

TEMPERATURE = 0.7
WEIGHTS = {"wide": 0.5, "short": 2.0}
NONE = ParallelConfig()
GRIDS: dict[str, tuple[ParallelConfig, ParallelConfig | None, ParallelConfig | None]] = {
    "one": (NONE, None, None),
    "tp2": (ParallelConfig(tp=2), None, None),
    "pp2": (ParallelConfig(pp=2), None, None),
    "cp2": (ParallelConfig(cp=2), None, None),
    "dp2": (ParallelConfig(dp=2), None, None),
    "own": (ParallelConfig(dp=2), ParallelConfig(tp=2), ParallelConfig(pp=2)),
    "own_dp2": (ParallelConfig(tp=2), ParallelConfig(dp=2), None),
}
"""Grids of the actor and of both teachers; None is the actor's."""


def teacher_of(number: int) -> str | None:
    """Teacher of a trajectory of the step: a third has none."""
    return (None, *WEIGHTS)[number % 3]


def taught() -> list[Trajectory]:
    """Trajectories of a step, some of two samples, with their teachers."""
    found = trajectories_of(16, 24, lines=True)
    return [replace(each, metadata={TEACHER: teacher_of(i)}) for i, each in enumerate(found)]


def config_of(paths: dict[str, str], grids: tuple[ParallelConfig, ...]) -> Config:
    """Settings of the step."""
    actor, *others = grids
    sections = zip(WEIGHTS.items(), others, strict=True)
    return Config(
        model=ModelConfig(path=paths["actor"], dtype="float32"),
        parallel=actor,
        algorithm=DistillConfig(name="distill", gamma=0.5, kl=KLConfig(0.0)),
        rollout=RolloutConfig(temperature=TEMPERATURE),
        teachers={name: TeacherConfig(paths[name], weight=w, parallel=grid) for (name, w), grid in sections},
        trainer=TrainerConfig(
            max_tokens_per_micro_batch=128, optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0, clip_grad=1e9)
        ),
    )


def step(rank: int, paths: dict[str, str], every: list[tuple[ParallelConfig, ...]]) -> list[dict[str, Any]]:
    """Runs in each rank, for each choice of grids: log-probs of the teachers by sequence, and the update's metrics."""
    from megatron.core import parallel_state

    from megarl.learn import algorithms
    from megarl.learn.parallel import process_groups
    from megarl.train.inference.inference import Inference
    from megarl.train.inference.models import Models
    from megarl.train.ranks import Ranks, TrainState
    from megarl.train.update.learner import Learner, UpdateFilter

    found = []
    for grids in every:
        config = config_of(paths, grids)
        process_groups.initialize(config.parallel, seed=1)
        algorithm = algorithms.get("distill")
        models = Models(config, algorithm)
        models.make_actor(None)
        models.load_beginning()
        models.build(0, None, Path("none"), lambda phase: None)
        reporter: Any = SimpleNamespace(log=lambda text: None, event=lambda kind, data: None)
        inference = Inference(config, algorithm, models, lambda phase: None)
        updates = UpdateFilter(UpdateFilterConfig(), reporter)
        learner = Learner(config, algorithm, inference, updates, Ranks())
        batch = learner.batch_of(taught())
        inference.fill(batch)
        held, sequences = range(len(batch.rows)), batch.sequences
        if sequences.share is not None:
            held = sequences.share.numbers.tolist()
        parts = sequences.teacher_logp.split(sequences.lengths.tolist())
        _, metrics = learner.train_step(TrainState("rl"), batch)
        found.append({
            "roles": sorted(models.by_role()),
            "logp": dict(zip(held, (part.tolist() for part in parts), strict=True)),
            "metrics": metrics,
        })  # fmt: skip
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The actor, a teacher with another width and a larger vocabulary, and one with fewer layers."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    folder = tmp_path_factory.mktemp("teachers")
    save_tiny_qwen3(folder / "actor")
    save_tiny_qwen3(folder / "short", layers=2, seed=1)
    config = Qwen3Config.from_pretrained(folder / "actor")
    config.vocab_size, config.hidden_size, config.intermediate_size = 256, 96, 64
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "wide")
    return {name: str(folder / name) for name in ("actor", *WEIGHTS)}


@pytest.fixture(scope="module")
def expected(paths: dict[str, str]) -> tuple[list[list[float]], float, float]:
    """Teachers' log-probs of each sequence, the update's loss and its gradient norm, by plain transformers."""
    from transformers import AutoModelForCausalLM

    models = {
        name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        for name, path in paths.items()
    }

    def logp_of(name: str, ids: torch.Tensor) -> torch.Tensor:
        """float32 [T]: at each position that of the next token; 0 at the last."""
        logits = models[name](ids[None]).logits[0, :-1].float() / TEMPERATURE
        each = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
        return torch.cat([each, each.new_zeros(1)])

    gamma, logps, terms, number = 0.5, [], [], 0
    for i, trajectory in enumerate(taught()):
        name = teacher_of(i)
        for sample in trajectory.samples():
            ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()
            mask = torch.zeros(len(ids), dtype=torch.bool)
            first = len(sample.prompt_ids)
            mask[first - 1 : len(ids) - 1] = torch.from_numpy(sample.response_mask.copy())
            own = logp_of("actor", ids)
            with torch.no_grad():
                score = logp_of(name, ids) * mask if name else torch.zeros(len(ids))
            logps.append(score.tolist())
            number += int(mask.sum())
            if name is None:
                continue
            rewards = WEIGHTS[name] * (score - own.detach()).double()
            following = 0.0
            for t in reversed(mask.nonzero()[:, 0].tolist()):
                following = float(rewards[t]) + gamma * following
                terms.append(-following * (own[t] - own[t].detach()).exp())
    loss = torch.stack(terms).sum() / number
    loss.backward()
    norm = torch.sqrt(sum(p.grad.double().pow(2).sum() for p in models["actor"].parameters()))
    return logps, float(loss.detach()), float(norm)


def test_teachers_and_update_equal_plain_transformers(
    paths: dict[str, str], expected: tuple[list[list[float]], float, float]
) -> None:
    logps, loss, norm = expected
    assert sum(any(each) for each in logps) >= 10 and sum(not any(each) for each in logps) >= 5
    found: dict[str, list[dict[str, Any]]] = {}
    for world in (1, 2):
        names = [name for name, grids in GRIDS.items() if grids[0].world_size == world]
        by_rank = run_grid(world, step, paths, [GRIDS[name] for name in names])
        found |= {name: [answers[i] for answers in by_rank] for i, name in enumerate(names)}
    assert sorted(found) == sorted(GRIDS)
    for name, ranks in found.items():
        together: dict[int, list[float]] = {}
        for answer in ranks:
            assert answer["roles"] == ["actor", "teachers.short", "teachers.wide"]
            together |= answer["logp"]
            assert answer["metrics"]["actor/loss"] == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE * norm), name
            assert answer["metrics"]["actor/grad_norm"] == pytest.approx(norm, rel=TOLERANCE), name
        for number, wanted in enumerate(logps):
            assert together[number] == pytest.approx(wanted, abs=2e-5), (name, number)
