"""``megarl data tokens``: the file of a step's batch, from the micro-batches, and what is counted when it is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.buffer.order.draws import ExpertRow
from megarl.buffer.store import Store, Used
from megarl.cli import main
from megarl.config import Config, compose, save_resolved
from megarl.config.algorithms import AlgorithmConfig
from megarl.core.errors import ConfigError, DataError
from megarl.core.jobs import JOBS
from megarl.core.kept_batches import KeptBatch, forget_after, kept_steps, path_of
from megarl.core.schema import Reward, Trajectory, Turn, WeightsSpan, WeightsVersion
from megarl.learn import algorithms
from megarl.learn.batching import MicroBatching, micro_batches
from megarl.run.checks.settings import check_rows_of_files
from megarl.run.data.open_run import StoredRun
from megarl.run.data.trained_tokens import TRAINED, TrainedTokens, count_trained
from megarl.train.batch.batch import StepBatch, filter_overlong, make_batch
from megarl.train.batch.batch_file import put_together, taken
from tests.stores import make_task

VERSION = WeightsVersion(1, 1)
WHOLE = MicroBatching()
OVERLONG = AlgorithmConfig(overlong_filtering=True)


def others(author: Any, follows: int, *tokens: int) -> Turn:
    return Turn(author, np.array(tokens, np.int32), follows)


def model(follows: int, *tokens: int, reason: Any = "stop") -> Turn:
    ids = np.array(tokens, np.int32)
    return Turn("model", ids, follows, np.zeros(len(ids), np.float32), (WeightsSpan(0, len(ids), VERSION),), reason)


TURNS = (
    # three turns of the model, with a tool and an environment between
    (
        others("user", -1, 1, 2, 3),
        model(0, 10, 11),
        others("tool", 1, 4, 5),
        model(2, 12),
        others("environment", 3, 6),
        model(4, 13, 14, 15),
    ),
    # a context that was rewritten: two lines that share the first response, and one that begins again
    (
        others("user", -1, 1, 2, 3),
        model(0, 20, 21),
        others("tool", 1, 7),
        model(2, 22),
        others("user", 1, 8, 9),
        model(4, 23, 24),
        others("user", -1, 1, 2, 3, 20, 21, 5),
        model(6, 25),
    ),
    # truncated, and followed by a tool that nothing follows
    (others("user", -1, 1, 2, 3), model(0, 30, reason="length"), others("tool", 1, 31)),
)
GOOD = 6 + 2 + 1 + 2 + 1
"""Tokens in the loss without the truncated trajectory."""


@pytest.fixture(scope="module")
def composed() -> Config:
    return compose(["experiment=quickstart", "run.name=compared"])


@pytest.fixture
def run(composed: Config, tmp_path: Path) -> Iterator[StoredRun]:
    """A run with one group of the trajectories ``TURNS``; one step has used it."""
    url = f"sqlite:///{tmp_path}/store.db"
    config = replace(composed, run=replace(composed.run, dir=str(tmp_path)), store=replace(composed.store, url=url))
    save_resolved(config, tmp_path / "resolved.json")
    store = Store(url)
    store.tasks.add("train", [make_task(0)])
    store.pacing.record_version(VERSION, 0)
    store.rollouts.request("train-000000", "train", 0, VERSION, store.tasks.ids("train"), len(TURNS), {})
    [claim] = store.groups.claim("a", 1)
    group = [
        Trajectory(claim.rollout_id, claim.task.task_id, claim.group_id, i, len(TURNS), turns, Reward(float(i), "ok"))
        for i, turns in enumerate(TURNS)
    ]
    assert store.groups.put(claim, group)
    store.journal.record_step(1, {TRAINED: float(GOOD)}, Used((claim.group_id,)))
    yield StoredRun(tmp_path, config, store)
    store.close()


def step_of(run: StoredRun, settings: AlgorithmConfig = OVERLONG, shown: int = 0, updates: int = 2) -> StepBatch:
    expert = [ExpertRow(np.arange(2), np.arange(3))] * shown
    algorithm = algorithms.get("mix" if shown else "grpo")
    batch = make_batch(run.store.groups.trajectories("train-000000"), expert, algorithm, settings, updates)
    filter_overlong(batch, settings)
    return batch


def kept(run: StoredRun, batch: StepBatch, micro_batching: MicroBatching = WHOLE) -> KeptBatch:
    batch_as_kept = as_kept(batch, micro_batching)
    batch_as_kept.write(path_of(run.run_dir, 1))
    return batch_as_kept


def as_kept(batch: StepBatch, micro_batching: MicroBatching) -> KeptBatch:
    """The batch as all data-parallel ranks take it."""

    def of_rank(rank: int) -> list[Any]:
        sequences, updates = batch.sequences, enumerate(batch.updates)
        return [taken(batch, micro_batches(sequences, micro_batching, rank, units), i) for i, units in updates]

    return put_together(batch, [of_rank(rank) for rank in range(micro_batching.dp)])


@pytest.mark.parametrize(
    "micro_batching",
    [
        MicroBatching(rows=2),
        MicroBatching(dp=3, rows=1),
        MicroBatching(max_tokens=32),
        MicroBatching(dp=2, cp=2, multiple=2, max_tokens=64),
    ],
)
@pytest.mark.parametrize("updates", [1, 3])
def test_nothing_differs_however_the_sequences_are_put_together(
    run: StoredRun, micro_batching: MicroBatching, updates: int
) -> None:
    kept(run, step_of(run, updates=updates), micro_batching)
    found = count_trained(run)
    # the first line of the rewritten context trains its first response, the second line does not
    assert found == TrainedTokens(steps=1, sequences=4, several_turns=3, trained=GOOD) and not found.wrong


def test_expert_rows_are_counted_apart(run: StoredRun) -> None:
    kept(run, step_of(run, AlgorithmConfig(), shown=2))
    run.store.journal.record_step(1, {TRAINED: GOOD + 1.0})
    found = count_trained(run)
    assert (found.sequences, found.trained, found.expert, found.wrong) == (7, GOOD + 1, 6, False)


def at(batch: KeptBatch, *tokens: int) -> int:
    """Position of the first of these tokens, where they follow each other."""
    ids = batch.tokens.tolist()
    return next(i for i in range(len(ids)) if ids[i : i + len(tokens)] == list(tokens))


def token(batch: KeptBatch) -> None:
    """Another token as the model's input and target."""
    place = at(batch, 13, 14, 15)
    batch.tokens[place + 1] = batch.targets[place] = 99


def target(batch: KeptBatch) -> None:
    """Another target alone."""
    batch.targets[at(batch, 13, 14, 15)] = 99


def tool_token(batch: KeptBatch) -> None:
    """A tool's token in the loss."""
    place = at(batch, 11, 4, 5)
    batch.mask[place], batch.targets[place] = True, 4


def prompt_token(batch: KeptBatch) -> None:
    place = at(batch, 1, 2, 3)
    batch.mask[place], batch.targets[place] = True, 2


def last_place(batch: KeptBatch) -> None:
    """The end of a sequence predicts nothing."""
    batch.mask[at(batch, 13, 14, 15) + 2] = True


def left_out(batch: KeptBatch) -> None:
    """A sampled token that is not in the loss, as the step has recorded it."""
    batch.mask[at(batch, 13, 14, 15)] = False


def shifted(batch: KeptBatch) -> None:
    """The mask one position too late: each turn lacks its first token and has the one after its last."""
    batch.mask[:] = np.roll(batch.mask, 1)


def other_member(batch: KeptBatch) -> None:
    batch.indices[batch.indices == 0] = 7


@pytest.mark.parametrize(
    ("corrupt", "wanted"),
    [
        (token, {"differ": 1, "sequences_differ": 1}),
        (target, {"differ": 1}),
        (tool_token, {"of_others": {"tool": 1}, "trained": GOOD + 1, "uncounted": 1}),
        (prompt_token, {"of_others": {"user": 1}, "trained": GOOD + 1, "uncounted": 1}),
        (last_place, {"differ": 1, "trained": GOOD + 1, "uncounted": 1}),
        (left_out, {"trained": GOOD - 1, "uncounted": 1}),
        (other_member, {"absent": 1, "several_turns": 2}),
    ],
)
def test_one_wrong_bit_is_counted(
    run: StoredRun, corrupt: Callable[[KeptBatch], None], wanted: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    batch = kept(run, step_of(run))
    assert main(["data", "tokens", str(run.run_dir)]) == 0
    assert re.search(r"trained tokens that differ from those sampled +0\n", capsys.readouterr().out)
    corrupt(batch)
    batch.write(path_of(run.run_dir, 1))
    assert main(["data", "tokens", str(run.run_dir)]) == 1
    right = TrainedTokens(steps=1, sequences=4, several_turns=3, trained=GOOD)
    assert count_trained(run) == replace(right, **wanted)


def test_a_mask_that_is_shifted_is_seen(run: StoredRun) -> None:
    batch = kept(run, step_of(run))
    shifted(batch)
    batch.write(path_of(run.run_dir, 1))
    found = count_trained(run)
    assert found.differ > 0 and found.of_others["tool"] == 2 and found.of_others["environment"] == 1


def test_steps_without_a_file_are_told_and_a_run_without_any_is_refused(
    run: StoredRun, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["data", "tokens", str(run.run_dir)]) == 2
    assert "train with trainer.keep_batches=true" in caplog.messages[-1]
    kept(run, step_of(run))
    run.store.journal.record_step(2, {})
    assert (count_trained(run).steps, count_trained(run).without_file) == (1, 1)
    path = path_of(run.run_dir, 1)
    whole = KeptBatch.read(path)
    for wrong in ({"updates": whole.updates[1:]}, {"groups": whole.groups + 9}, {"lengths": whole.lengths + 1}):
        replace(whole, **wrong).write(path)
        with pytest.raises(DataError, match=r"step_000001.npz cannot be read"):
            count_trained(run)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"step_000001.npz cannot be read"):
        count_trained(run)


def test_files_of_steps_that_are_made_again_are_removed(run: StoredRun) -> None:
    batch = as_kept(step_of(run), MicroBatching())
    for step in (1, 2, 3):
        batch.write(path_of(run.run_dir, step))
    forget_after(run.run_dir, 1)
    assert kept_steps(run.run_dir) == [1]
    forget_after(run.run_dir, -1)
    assert kept_steps(run.run_dir) == []


def test_offline_jobs_refuse_the_setting() -> None:
    config = compose(["experiment=sft", "trainer.keep_batches=true"])
    with pytest.raises(ConfigError, match="trainer.keep_batches=true in an offline job"):
        check_rows_of_files(config, JOBS["offline"])
