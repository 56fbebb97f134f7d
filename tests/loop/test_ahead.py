"""A job with sync.max_staleness=2 and sync.interval=2 samples ahead while it trains; killed and resumed between two
publications, it has the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.buffer.order.pacing import Pacing
from megarl.buffer.store import Store
from tests.loop.same_run import left_alone, steps_of, whole_and_killed
from tests.system.jobs import START_S, TINY

pytestmark = pytest.mark.timeout(4 * START_S)
STEPS = 6
SETTINGS = (
    *TINY,
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_interval=3",
    "sync.max_staleness=2",
    "sync.interval=2",
    "taskset.eval_size=8",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with left_alone(tmp_path_factory.mktemp("ahead") / "run", SETTINGS) as run_dir:
        yield run_dir


def test_lags_are_what_the_formula_says(run: Path) -> None:
    lags = [Pacing(2, 2).lag_of_step(step) for step in range(STEPS)]
    assert lags == [0, 1, 2, 1, 2, 1]
    for name in ("rollout/lag/mean", "rollout/lag/max"):
        assert [record[name] for record in steps_of(run)] == lags
    assert [record["rollout/stale_tokens"] for record in steps_of(run)] == [float(lag > 0) for lag in lags]
    store = Store(f"sqlite:///{run}/store.db", read_only=True)
    for step in range(STEPS):
        spans = {s.version for e in store.groups.trajectories(f"train-{step:06d}") for s in e.response.spans}
        assert set(store.pacing.version_steps(spans).values()) == {step - lags[step]}
        assert {(state, used) for state, used, _ in store.groups.states(f"train-{step:06d}").values()} == {
            ("consumed", step + 1)
        }
    store.close()


def test_the_engines_log_probs_are_those_of_the_weights_before(run: Path) -> None:
    differences = [record["training/rollout_logp_diff_max"] for record in steps_of(run)]
    assert differences[0] < 1e-3 < min(differences[1:])


@pytest.mark.soak  # tests/loop/test_partial.py kills a job that samples ahead too
def test_a_killed_job_has_the_same_bits(tmp_path: Path) -> None:
    """Killed in its fifth step, and resumed after its third, between two publications."""
    with whole_and_killed(tmp_path, SETTINGS, 4, 3) as runs:
        assert_same(*runs)


def assert_same(*runs: Path) -> None:
    whole, killed = (load_file(run / "hf" / "model.safetensors") for run in runs)
    assert whole.keys() == killed.keys() and all(torch.equal(whole[name], killed[name]) for name in whole)
    names = ("actor/pg_loss", "critic/score/mean", "rollout/lag/mean", "training/rollout_logp_diff_max")
    a, b = ([{name: record[name] for name in names} for record in steps_of(run)] for run in runs)
    assert a == b
