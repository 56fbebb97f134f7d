"""Teachers' log-probs from a store to the gradient of ``algorithm.expert_loss=off_policy``, and what is refused before
a job starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.buffer.order.draws import ExpertRows, data_seed, num_expert_rows
from megarl.buffer.store import ExpertExperience, Store
from megarl.config import Config
from megarl.config.algorithms import KLConfig, MixConfig
from megarl.config.schema import TeacherConfig
from megarl.core.errors import DataError
from megarl.learn import algorithms
from megarl.learn.batching import MicroBatching, micro_batches
from megarl.learn.training import objectives
from megarl.learn.training.objectives import LossTokens
from megarl.run.checks import job as checks
from megarl.run.checks.inputs import ExpertCheck
from megarl.run.launch.records import fill_experts
from megarl.tasks import ChatTokenizer, tokenizer_digest
from megarl.train.batch.batch import StepBatch, make_batch
from megarl.train.rollout.reading import NodeReader, RolloutReader
from tests.stores import expert
from tests.unit.small_job import config_of, refused
from tests.unit.test_trajectory import three_lines

OFF_POLICY = ("algorithm=mix", "algorithm.expert_loss=off_policy")


def logp_of(i: int, tokens: int) -> np.ndarray:
    """Log-probs that differ from row to row and from token to token."""
    return (-0.1 * (i + 1) - 0.01 * np.arange(tokens)).astype(np.float32)


def taught(i: int, tokenizer: ChatTokenizer) -> ExpertExperience:
    return expert(i, teacher_logp=logp_of(i, len(tokenizer.response_ids(str(i + 1)))), tokenizer="t")


@pytest.mark.parametrize("micro_batching", [MicroBatching(rows=1), MicroBatching(rows=3), MicroBatching(max_tokens=64)])
@pytest.mark.parametrize("expert_loss", ["sft", "off_policy"])
def test_log_probs_go_from_the_store_to_the_gradient(
    prepared: Path, tmp_path: Path, expert_loss: Any, micro_batching: MicroBatching
) -> None:
    """Through the trainer's draws and its batch, packed or not: −mu·f'(x)·x / tokens on each expert token."""
    tokenizer = ChatTokenizer.open(prepared / "model")
    settings = MixConfig(name="mix", mu=0.5, kl=KLConfig(0.0), expert_ratio=0.6, expert_loss=expert_loss)
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.experts.import_sources([("late", [taught(i, tokenizer) for i in (3, 4)])])
    store.experts.replace_source("file", [taught(i, tokenizer) for i in (0, 1, 2)])
    reader = RolloutReader(NodeReader(), store, lambda: False)
    rows = reader.demonstrations(tokenizer, teacher=expert_loss == "off_policy")
    assert all((row.teacher_logp is None) is (expert_loss == "sft") for row in rows)
    assert {row.teacher for row in rows} == {None}
    assert {row.teacher for row in reader.demonstrations(tokenizer, teachers={"t": TeacherConfig("/t")})} == {"t"}
    drawn = ExpertRows(rows).of_step(0, num_expert_rows(3, settings.expert_ratio), data_seed(Config().trainer.seed, 0))
    sampled = [three_lines(0, 3), three_lines(1, 2, 4)]
    batch = make_batch(sampled, drawn, algorithms.get("mix"), settings, 1)
    store.close()

    found = gradient_of(batch, settings, micro_batching)
    sequences = batch.sequences
    number = {tuple(tokenizer.response_ids(str(i + 1))): i for i in range(5)}
    by_place = {(3, 4, 0, 1, 2)[k]: row for k, row in enumerate(rows)}
    assert len(drawn) == 5 and all(by_place[number[tuple(row.response)]] is row for row in drawn)
    teacher = np.concatenate([logp_of(number[tuple(row.response)], len(row.response)) for row in drawn])
    shown = sequences.mask & ~sequences.sampled
    ratio = (logp_of_model(batch).double()[shown] - torch.from_numpy(teacher).double()).exp()
    slope = torch.ones_like(ratio) if expert_loss == "sft" else 0.1 * ratio / (ratio + 0.1) ** 2
    assert torch.allclose(found[shown].double(), -0.5 * slope / len(teacher), rtol=1e-5, atol=0)
    assert sequences.engine_logp is not None
    assert sequences.engine_logp[shown].tolist() == ([0.0] * len(teacher) if expert_loss == "sft" else teacher.tolist())


def logp_of_model(batch: StepBatch) -> torch.Tensor:
    return torch.linspace(-2.0, -0.2, len(batch.sequences.tokens))


def gradient_of(batch: StepBatch, settings: MixConfig, micro_batching: MicroBatching) -> torch.Tensor:
    """[T], of the whole step's loss."""
    sequences, logp = batch.sequences, logp_of_model(batch).requires_grad_()
    sequences.old_logp, sequences.advantages = logp.detach(), torch.ones(len(logp))
    policy = objectives.policy(algorithms.get("mix"), settings, sequences)
    batches = micro_batches(sequences, micro_batching, 0, [unit for part in batch.updates for unit in part])
    kept = [LossTokens.of(each, sequences) for each in batches]
    count = torch.stack([policy.count(k).double() for k in kept]).sum(0)
    for k in kept:
        (policy.loss(k, torch.stack([logp[k.index], -logp[k.index]], 1)).totals / count).sum().backward()
    assert logp.grad is not None
    return logp.grad


def write(path: Path, *teacher: list[float] | None) -> str:
    rows = [
        {"prompt": f"{i} + {i} =", "response": str(i), **({} if logp is None else {"teacher_logp": logp})}
        for i, logp in enumerate(teacher)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_file_without_log_probs_is_refused_before_the_start(prepared: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [-0.5, -0.25], None)
    config = config_of(prepared, *OFF_POLICY, f"taskset.expert={path}")
    refused(DataError, config, f"{path}: line 2 (taskset.expert) has no teacher_logp", "algorithm.expert_loss=sft")
    checks.check(config_of(prepared, "algorithm=mix", f"taskset.expert={path}"))
    checks.check(config_of(prepared, *OFF_POLICY, f"taskset.expert={write(tmp_path / 'b.jsonl', [-0.5, -0.25])}"))


def test_an_import_is_named_with_its_row(prepared: Path, tmp_path: Path) -> None:
    """When it is made, and at the start of a job for which it was not made."""
    config = config_of(prepared, *OFF_POLICY, "taskset.expert=null")
    digest, tokenizer = tokenizer_digest(prepared / "model"), ChatTokenizer.of(config)
    good = replace(taught(0, tokenizer), tokenizer=digest)
    check = ExpertCheck(config)
    check.rows("run:other", [good])
    assert good.teacher_logp is not None
    for bad, words in (
        (expert(1), "run:other: row 2 .* has no teacher_logp"),
        (replace(taught(1, tokenizer), tokenizer="beef"), f"run:other: row 2 .* tokenizer beef, .* has {digest}"),
        (replace(good, teacher_logp=good.teacher_logp[:-1]), "run:other: row 1 .* has 1 log-probs, .* 2 tokens"),
    ):
        with pytest.raises(DataError, match=words):
            check.rows("run:other", [good, bad])
        ExpertCheck(config_of(prepared, "algorithm=mix", "taskset.expert=null")).rows("run:other", [good, bad])
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.experts.import_sources([("first.jsonl", [good]), ("second.jsonl", [expert(1)])])
    with pytest.raises(DataError, match="second.jsonl: row 2 .* has no teacher_logp"):
        fill_experts(config, store)
    store.close()


def test_log_probs_that_a_file_got_later_are_written(tmp_path: Path) -> None:
    store, logp = Store(f"sqlite:///{tmp_path}/store.db"), np.array([-1.0], np.float32)
    assert store.experts.replace_source("f", [expert(0), expert(1)]) is not None
    with_logp = [expert(i, teacher_logp=logp, tokenizer="t") for i in (0, 1)]
    assert store.experts.replace_source("f", with_logp) is not None
    assert store.experts.replace_source("f", with_logp) is None, "nothing has changed"
    ((first, second),) = store.experts.read()
    assert first.teacher_logp is not None and second.teacher_logp is not None
    assert store.experts.replace_source("f", [replace(each, tokenizer="other") for each in with_logp]) is not None
    store.close()
