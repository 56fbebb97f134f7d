"""Partial rollouts: trajectories of later steps get a budget of tokens from each weights, and the same bits when the
job is killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.buffer.store import Store
from tests.loop.random_kills import SUPERVISOR, killed_at_random
from tests.loop.same_run import left_alone, steps_of, whole_and_killed
from tests.system.jobs import START_S, TINY

pytestmark = pytest.mark.timeout(4 * START_S)
STEPS, BUDGET, SEGMENT = 6, 4, 2
SETTINGS = (
    *TINY,
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_interval=2",
    "sync.max_staleness=2",
    "rollout.max_response_tokens=16",
    "trainer.warm_start.steps=1",
    f"rollout.budget_tokens={BUDGET}",
    f"rollout.segment_tokens={SEGMENT}",
    "algorithm.correction=truncate",
    "algorithm.group_size=4",
    "taskset.eval_size=8",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A job that was left alone, and one that was killed in its fourth step and went on from its second, with engines
    that leave while the trainer computes."""
    then = ("rollout.placement=colocated",)
    with whole_and_killed(tmp_path_factory.mktemp("partial"), SETTINGS, 3, 2, then=then) as runs:
        yield runs


def test_each_weights_sample_the_budget_of_later_steps(runs: tuple[Path, Path]) -> None:
    store = Store(f"sqlite:///{runs[0]}/store.db", read_only=True)
    of_two, longest = 0, 0
    for step in range(STEPS):
        for e in store.groups.trajectories(f"train-{step:06d}"):
            steps, tokens = store.pacing.version_steps({span.version for span in e.response.spans}), Counter[int]()
            for span in e.response.spans:
                tokens[steps[span.version]] += span.end - span.start
            first = max(0, step - 2)
            assert sorted(tokens) == list(range(first, first + len(tokens)))
            assert all(count == BUDGET for at, count in tokens.items() if at < min(step, max(tokens)))
            of_two += len(tokens) > 1
            longest = max(longest, e.response_length)
    assert of_two and longest > BUDGET
    assert store.database.read(lambda c: c.exec_driver_sql("select count(*) from segments").scalar()) == 0
    store.close()


@pytest.mark.soak
@pytest.mark.timeout(12 * START_S)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_ten_kills_at_any_moment_leave_the_same_bits(tmp_path: Path, k: int) -> None:
    """Of a job with two engines: whoever is killed, its weights and metrics are those of a job that was left alone."""
    settings = [s for s in SETTINGS if not s.startswith(("sync.", "trainer.steps", "trainer.checkpoint_interval"))]
    settings += [f"sync.max_staleness={k}", "trainer.steps=8", "trainer.checkpoint_interval=1", "rollout.replicas=2"]
    victims = ("engine", "explorer", "trainer 0", "engine", SUPERVISOR)
    with (
        left_alone(tmp_path / "whole", settings) as whole,
        killed_at_random(tmp_path / "killed", settings, victims, 10, k, further=1) as (job, _),
    ):
        assert_same_bits(whole, job.run_dir)


def test_a_killed_job_has_the_same_bits(runs: tuple[Path, Path]) -> None:
    assert_same_bits(*runs)


def assert_same_bits(*runs: Path) -> None:
    whole, killed = (load_file(run / "hf" / "model.safetensors") for run in runs)
    assert whole.keys() == killed.keys() and all(torch.equal(whole[name], killed[name]) for name in whole)
    names = ("actor/pg_loss", "critic/score/mean", "rollout/lag/mean", "training/rollout_logp_diff_max")
    a, b = ([{name: record[name] for name in names} for record in steps_of(run)] for run in runs)
    assert a == b
