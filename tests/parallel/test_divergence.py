"""An update on divergences from two teachers' distributions against plain transformers, on every kind of grid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.buffer.experience import with_group_stats
from megarl.buffer.order.draws import ExpertRow
from megarl.config.algorithms import DistillConfig, KLConfig
from megarl.config.schema import ParallelConfig, UpdateFilterConfig
from tests.conftest import SOAK
from tests.parallel.grid import run_grid
from tests.parallel.parity import TOLERANCE
from tests.parallel.test_teachers import GRIDS as TEACHERS_GRIDS
from tests.parallel.test_teachers import TEMPERATURE, WEIGHTS, config_of, paths, taught, teacher_of

__all__ = ["paths"]
GRIDS = TEACHERS_GRIDS | {"sp2": (ParallelConfig(tp=2, sequence_parallel=True), None, None)}
EXPERTS = "jsd with expert rows"
"""With rewards too, and a teacher's term for tokens with even ids alone."""
CASES: dict[str, tuple[str, float, int]] = {
    "forward_kl": ("forward_kl", 0.5, 0),
    "reverse_kl": ("reverse_kl", 0.5, 0),
    "jsd": ("jsd", 0.3, 0),
    "jsd of 5": ("jsd", 0.3, 5),
    "reverse_kl of 5": ("reverse_kl", 0.5, 5),
    EXPERTS: ("jsd", 0.3, 0),
}
"""Divergence, β and k."""
ON_OTHER_GRIDS = ("jsd", "reverse_kl of 5")
"""Cases on grids other than one process and tensor parallelism."""


def cases_on(name: str) -> list[str]:
    """Cases on a grid. Without tensor parallelism each rank has whole distributions, and others meet one in turn."""
    if SOAK or name in ("one", "tp2"):
        return [*CASES]
    if GRIDS[name][0].tp > 1:
        return [*ON_OTHER_GRIDS]
    return [EXPERTS, *ON_OTHER_GRIDS] if name == "dp2" else [ON_OTHER_GRIDS[[*GRIDS].index(name) % 2]]


REWARD = 0.5
BUDGET = 20000
"""Bytes of logits: a few rows of a chunk."""


def algorithm_of(case: str) -> DistillConfig:
    divergence, beta, top_k = CASES[case]
    settings: dict[str, Any] = {"divergence": divergence, "beta": beta, "top_k": top_k}
    if case == EXPERTS:
        settings |= {"expert_ratio": 0.25, "reward_coef": REWARD}
    return DistillConfig(name="distill", kl=KLConfig(0.0), **settings)


def shown(case: str) -> list[ExpertRow]:
    """Expert rows of both teachers."""
    ids = np.random.default_rng(7).integers(2, 100, (7, 20)).astype(np.int32)
    rows = [ExpertRow(row[:5], row[5 : 9 + 2 * i], teacher=[*WEIGHTS][i % 2]) for i, row in enumerate(ids)]
    return rows if case == EXPERTS else []


def step(
    rank: int, paths: dict[str, str], every: list[tuple[tuple[ParallelConfig, ...], list[str]]]
) -> list[dict[str, dict[str, float]]]:
    """Runs in each rank, for each choice of grids and each of its cases: the update's metrics."""
    from megatron.core import parallel_state

    from megarl.learn import algorithms
    from megarl.learn.parallel import process_groups
    from megarl.train.inference.inference import Inference
    from megarl.train.inference.models import Models
    from megarl.train.ranks import Ranks, TrainState
    from megarl.train.update.learner import Learner, UpdateFilter

    found = []
    for grids, cases in every:
        base = config_of(paths, grids)
        process_groups.initialize(base.parallel, seed=1)
        algorithm = algorithms.get("distill")
        found.append({})
        for case in cases:
            trainer = replace(base.trainer, logits_bytes=BUDGET if case == "jsd" else None)
            config = replace(base, algorithm=algorithm_of(case), trainer=trainer)
            models = Models(config, algorithm)
            models.make_actor(None)
            models.load_beginning()
            models.build(0, None, Path("none"), lambda phase: None)
            reporter: Any = SimpleNamespace(log=lambda text: None, event=lambda kind, data: None)
            inference = Inference(config, algorithm, models, lambda phase: None)
            learner = Learner(config, algorithm, inference, UpdateFilter(UpdateFilterConfig(), reporter), Ranks())
            batch = learner.batch_of(taught(), shown(case))
            inference.fill(batch)
            if case == EXPERTS:
                batch.taught = torch.roll(batch.sequences.tokens, -1) % 2 == 0
            _, found[-1][case] = learner.train_step(TrainState("rl"), batch)
        parallel_state.destroy_model_parallel()
    return found


def outcomes(log_p: torch.Tensor, log_q: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of the teacher's likeliest tokens and of all others together, of teacher and student."""
    p, q = log_p.exp(), log_q.exp()
    if not top_k:
        return p, q
    ids = p.topk(top_k).indices
    rest = torch.ones_like(p).scatter(-1, ids, 0.0)
    return tuple(torch.cat([x.gather(-1, ids), (x * rest).sum(-1, keepdim=True)], -1) for x in (p, q))


def divergence(p: torch.Tensor, q: torch.Tensor, kind: str, beta: float) -> torch.Tensor:
    if kind == "forward_kl":
        return (p * (p / q).log()).sum(-1)
    if kind == "reverse_kl":
        return (q * (q / p).log()).sum(-1)
    m = beta * p + (1 - beta) * q
    return beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)


def rows_of(case: str) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, str | None, float]]:
    """Prompt, response, its loss mask, teacher and advantage of each row."""
    for i, trajectory in enumerate(with_group_stats(taught())):
        assert trajectory.group_stats is not None
        advantage = (trajectory.reward.score - trajectory.group_stats.mean) / (trajectory.group_stats.std + 1e-6)
        for sample in trajectory.samples():
            own = REWARD * advantage if case == EXPERTS else 0.0
            yield sample.prompt_ids, sample.response_ids, sample.response_mask, teacher_of(i), own
    for row in shown(case):
        yield row.prompt, row.response, np.ones(len(row.response), bool), row.teacher, 0.0


@pytest.fixture(scope="module")
def expected(paths: dict[str, str]) -> dict[str, tuple[float, float, float]]:
    """Each case's loss, gradient norm and mean divergence."""
    from transformers import AutoModelForCausalLM

    models = {
        name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
        for name, path in paths.items()
    }
    size = models["actor"].config.vocab_size
    assert models["wide"].config.vocab_size > size, "ids that only the teacher has get no mass"
    found = {}
    for case, (kind, beta, top_k) in CASES.items():
        models["actor"].zero_grad()
        terms, plain, number = [], [], 0
        for prompt, response, mask, name, advantage in rows_of(case):
            ids = torch.from_numpy(np.concatenate([prompt, response])).long()
            at = len(prompt) - 1 + torch.from_numpy(mask.copy()).nonzero()[:, 0]
            number += len(at)
            log_q = torch.log_softmax(models["actor"](ids[None]).logits[0, at, :size] / TEMPERATURE, -1)
            if advantage:
                logp = log_q.gather(-1, ids[at + 1, None])
                terms.append(-advantage * (logp - logp.detach()).exp().sum())
            if name is None:
                continue
            with torch.no_grad():
                log_p = torch.log_softmax(models[name](ids[None]).logits[0, at, :size] / TEMPERATURE, -1)
            each = divergence(*outcomes(log_p, log_q, top_k), kind, beta)
            if case == EXPERTS:
                each = each[ids[at + 1] % 2 == 0]
            plain += each.tolist()
            terms.append(WEIGHTS[name] * each.sum())
        loss = torch.stack(terms).sum() / number
        loss.backward()
        norm = torch.sqrt(sum(p.grad.pow(2).sum() for p in models["actor"].parameters()))
        found[case] = (float(loss.detach()), float(norm), sum(plain) / len(plain))
    return found


def test_updates_equal_plain_transformers(
    paths: dict[str, str], expected: dict[str, tuple[float, float, float]]
) -> None:
    found: dict[str, list[dict[str, dict[str, float]]]] = {}
    for world in (1, 2):
        names = [name for name, grids in GRIDS.items() if grids[0].world_size == world]
        by_rank = run_grid(world, step, paths, [(GRIDS[name], cases_on(name)) for name in names])
        found |= {name: [answers[i] for answers in by_rank] for i, name in enumerate(names)}
    assert sorted(found) == sorted(GRIDS)
    for name, ranks in found.items():
        for answer in ranks:
            assert [*answer] == cases_on(name)
            for case, metrics in answer.items():
                loss, norm, mean = expected[case]
                assert metrics["actor/loss"] == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE * norm), (name, case)
                assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=TOLERANCE), (name, case)
                assert metrics["teacher/divergence"] == pytest.approx(mean, rel=1e-4), (name, case)
