"""``megarl data teach`` and an update of sft on its rows against plain transformers, on several grids."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from megarl.config import Config
from megarl.config.algorithms import SFTConfig
from megarl.config.schema import OptimizerConfig, ParallelConfig, UpdateFilterConfig
from megarl.run.run_dir.prepare import make
from megarl.tasks import ChatTokenizer, encode_demonstrations, read_rows
from tests.parallel.grid import run_grid
from tests.parallel.parity import TOLERANCE
from tests.parallel.test_divergence import divergence, outcomes
from tests.unit.small_job import config_of
from tests.unit.test_distill_checks import save

TOP_K, ROWS = 5, 12
GRIDS = {"one": ParallelConfig(), "dp2": ParallelConfig(dp=2), "tp2": ParallelConfig(tp=2)}
CASES: dict[str, dict[str, Any]] = {
    "beside": {"divergence": "forward_kl", "cross_entropy_coef": 0.5},
    "alone": {"divergence": "forward_kl", "cross_entropy_coef": 0.0, "top_k": 3},
    "jsd": {"divergence": "jsd", "beta": 0.3, "aggregation": "seq_mean_token_mean"},
}


def score(rank: int, file: str, teacher: str, model: str, out: str) -> None:
    """Runs in a process of its own, as the command does."""
    from megarl.run.data.teach import teach

    words = [f"model.path={model}", f"teachers.large.path={teacher}", "model.dtype=float32"]
    teach(Path(file), words, top_k=str(TOP_K), out=out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, a teacher with more ids and rows that the teacher has scored; one row is an assistant's message."""
    folder = tmp_path_factory.mktemp("teach")
    make(config_of(folder, "algorithm.name=sft"))
    save(folder, folder / "teacher", 160)
    dice, lines = random.Random(3), []
    for i in range(ROWS):
        question = [{"role": "user", "content": f"{i} + {dice.randint(10, 99)} ="}]
        answer = str(dice.randint(1, 10 ** (i % 5 + 1)))
        row = {"prompt": question, "response": answer}
        lines.append(json.dumps(row if i else {"messages": [*question, {"role": "assistant", "content": answer}]}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    names = (folder / "rows.jsonl", folder / "teacher", folder / "model", folder / "taught.parquet")
    run_grid(1, score, *map(str, names))
    return folder


@pytest.fixture(scope="module")
def logits(folder: Path) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each row's response, and float64 logits of teacher and student at its tokens."""
    return list(by_transformers(folder, load(folder / "teacher"), load(folder / "model")))


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")


def by_transformers(
    folder: Path, teacher: Any, student: Any
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    tasks = read_rows(folder / "rows.jsonl", require_response=True)
    for prompt, response in encode_demonstrations(tasks, ChatTokenizer.open(folder / "model")):
        ids = torch.from_numpy(np.concatenate([prompt, response])).long()
        at = slice(len(prompt) - 1, len(ids) - 1)
        with torch.no_grad():
            taught = teacher(ids[None]).logits[0, at]
        yield ids[len(prompt) :], taught, student(ids[None]).logits[0, at]


def test_scores_are_those_of_transformers(folder: Path, logits: list[tuple[torch.Tensor, ...]]) -> None:
    with pq.ParquetFile(folder / "taught.parquet") as file:
        rows = file.read().to_pylist()
    assert len(rows) == ROWS and not (folder / "taught.parquet.parts").exists()
    for row, (ids, taught, student) in zip(rows, logits, strict=True):
        own = torch.log_softmax(taught, -1).gather(-1, ids[:, None])[:, 0]
        assert row["teacher_logp"] == pytest.approx(own.tolist(), abs=1e-5)
        both = torch.log_softmax(taught[:, : student.shape[-1]], -1).topk(TOP_K)
        assert row["teacher_ids"] == both.indices.tolist()
        assert np.array(row["teacher_topk_logp"]) == pytest.approx(both.values.numpy(), abs=1e-5)
        assert row["teacher"] == "large" and row["teacher_vocab_size"] == student.shape[-1] < taught.shape[-1]
    again = read_rows(folder / "taught.parquet", require_response=True)
    given = read_rows(folder / "rows.jsonl", require_response=True)
    assert [replace(row, task_id="") for row in again] == [replace(row, task_id="") for row in given]


def expected(folder: Path, case: str) -> tuple[float, float, float]:
    """Loss, gradient norm and mean divergence of an update on all rows."""
    settings = SFTConfig(name="sft", **CASES[case])
    student = load(folder / "model")
    terms, each = [], []
    for ids, taught, own in by_transformers(folder, load(folder / "teacher"), student):
        log_q = torch.log_softmax(own, -1)
        log_p = torch.log_softmax(taught[:, : own.shape[-1]], -1)
        found = divergence(*outcomes(log_p, log_q, settings.top_k or TOP_K), settings.divergence, settings.beta)
        terms.append(found - settings.cross_entropy_coef * log_q.gather(-1, ids[:, None])[:, 0])
        each += found.tolist()
    by_row = settings.aggregation == "seq_mean_token_mean"
    loss = torch.stack([term.mean() for term in terms]).mean() if by_row else torch.cat(terms).mean()
    loss.backward()
    norm = torch.sqrt(sum(p.grad.pow(2).sum() for p in student.parameters()))
    return float(loss.detach()), float(norm), sum(each) / len(each)


def updates(rank: int, base: Config, grids: list[ParallelConfig]) -> list[dict[str, dict[str, float]]]:
    """Runs in each rank, for each grid and case: metrics of an update, and of an evaluation."""
    from megatron.core import parallel_state

    from megarl.learn import algorithms
    from megarl.learn.parallel import process_groups
    from megarl.train.batch.batch import StepBatch, updates_of
    from megarl.train.inference.inference import Inference
    from megarl.train.inference.models import Models
    from megarl.train.loop.offline import OfflineSteps
    from megarl.train.ranks import Ranks, TrainState
    from megarl.train.update.learner import Learner, UpdateFilter

    def phase(name: str) -> AbstractContextManager[None]:
        return nullcontext()

    found: list[dict[str, dict[str, float]]] = []
    for grid in grids:
        process_groups.initialize(grid, seed=1)
        found.append({})
        for case, settings in CASES.items():
            config = replace(base, parallel=grid, algorithm=SFTConfig(name="sft", **settings))
            algorithm = algorithms.get("sft")
            models = Models(config, algorithm)
            models.make_actor(None)
            models.load_beginning()
            reporter: Any = SimpleNamespace(log=lambda text: None, event=lambda kind, data: None)
            inference = Inference(config, algorithm, models, lambda phase: None)
            learner = Learner(config, algorithm, inference, UpdateFilter(UpdateFilterConfig(), reporter), Ranks())
            timeline, context = SimpleNamespace(phase=phase), SimpleNamespace(bad_rows={})
            given = {"timeline": timeline, "context": context, "reporter": reporter}
            rank_of: Any = SimpleNamespace(config=config, algorithm=algorithm, models=models, **given)
            steps = OfflineSteps(rank_of)
            steps.connect()
            batch = steps.batch_of(steps.rows, range(ROWS))
            step = StepBatch([], [], batch.sequences, updates_of(batch.units, 1), [])
            _, metrics = learner.update(TrainState("rl"), step, steps.objective_of(batch), config.algorithm)
            assert steps.test.distributions is None and steps.objective_of(steps.test).columns is None
            found[-1][case] = metrics
        parallel_state.destroy_model_parallel()
    return found


def test_updates_of_sft_are_those_of_transformers(folder: Path) -> None:
    base = config_of(folder, "algorithm.name=sft", f"taskset.train={folder / 'taught.parquet'}")
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.0, clip_grad=1e9)
    base = replace(base, trainer=replace(base.trainer, max_tokens_per_micro_batch=128, optimizer=optimizer))
    base = replace(base, model=replace(base.model, dtype="float32"))
    wanted = {case: expected(folder, case) for case in CASES}
    found: dict[str, list[dict[str, dict[str, float]]]] = {}
    for world in (1, 2):
        names = [name for name, grid in GRIDS.items() if grid.world_size == world]
        by_rank = run_grid(world, updates, base, [GRIDS[name] for name in names])
        found |= {name: [answers[i] for answers in by_rank] for i, name in enumerate(names)}
    assert sorted(found) == sorted(GRIDS)
    for name, ranks in found.items():
        for answer in ranks:
            assert sorted(answer) == sorted(CASES)
            for case, metrics in answer.items():
                loss, norm, mean = wanted[case]
                assert metrics["actor/loss"] == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE * norm), (name, case)
                assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=TOLERANCE), (name, case)
                assert metrics["teacher/divergence"] == pytest.approx(mean, rel=1e-4), (name, case)
