"""Updates that a filter admits, and when it ends a job; data and seeds after a rollback. A world of one rank."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megarl.buffer.order.draws import data_seed, tasks_of_step
from megarl.config.schema import UpdateFilterConfig
from megarl.core.errors import JobError
from megarl.train.ranks import TrainState
from megarl.train.update.learner import RollBack, UpdateFilter


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Steps:
    """A filter and the state of its run; each number is the norm of an update."""

    def __init__(self, **settings: Any) -> None:
        self.state = TrainState("rl", 0)
        self.said: list[str] = []
        self.events: list[dict[str, Any]] = []
        reporter: Any = SimpleNamespace(log=self.said.append, event=lambda kind, data: self.events.append(data))
        self.filter = UpdateFilter(UpdateFilterConfig(**settings), reporter)

    def step(self, *norms: float, model: str = "actor", loss: float = 0.5) -> list[bool]:
        self.filter.begin()
        sums = {f"{model}/loss": (loss, 1.0)}
        admitted = []
        for i, norm in enumerate(norms):
            yes, self.state = self.filter.admits(self.state, model, sums, norm, i)
            admitted.append(yes)
        self.metrics = self.filter.end(self.state)
        self.state = replace(self.state, step=self.state.step + 1)
        return admitted


def test_what_is_not_finite_is_left_out() -> None:
    s = Steps()
    assert s.step(1.0, math.nan, 2.0, math.inf) == [True, False, True, False]
    assert s.metrics == {"training/skipped_updates": 2.0, "training/rollbacks": 0.0}
    assert (
        s.step(1.0, loss=math.nan) == [False] and "the loss is nan on rank 0, the gradient's norm is 1.0" in s.said[-1]
    )
    assert s.step(1e30) == [True], "no spikes are looked for unless that is asked for"
    assert s.state.grad_norms == {}


def test_a_spike_is_measured_by_the_median_of_a_full_window() -> None:
    s = Steps(spike_factor=3.0, spike_window=4)
    assert s.step(1.0, 900.0, 2.0) == [True] * 3, "the window is not full"
    assert s.step(3.0) == [True]  # the median is 2.5
    assert s.step(7.51) == [False] and "7.51, above 3 times the median 2.5 of the last 4 updates" in s.said[-1]
    assert s.state.grad_norms["actor"] == [1.0, 900.0, 2.0, 3.0], "what is left out is no measure for others"
    assert s.step(7.5) == [True]
    assert s.state.grad_norms["actor"] == [900.0, 2.0, 3.0, 7.5]
    assert s.step(100.0, model="critic") == [True], "each model has a window of its own"


def test_updates_without_gradient_are_no_measure() -> None:
    """Of tasks that are hardly ever solved, most groups have one reward and no gradient; what is learnt comes with the
    others."""
    s = Steps(spike_factor=3.0, spike_window=2)
    for _ in range(4):
        assert s.step(0.0, 1.0, 0.0, 0.0) == [True] * 4
    assert s.state.grad_norms["actor"] == [1.0, 1.0]
    assert s.step(3.5) == [False]


def test_the_windows_go_with_a_checkpoint() -> None:
    s = Steps(spike_factor=3.0, spike_window=2)
    s.step(0.1, 1 / 3)
    saved = json.loads(json.dumps({**asdict(s.state), "made": {}}))
    assert TrainState.from_manifest(saved) == s.state
    assert TrainState.from_manifest({"phase": "rl", "step": 3}) == TrainState("rl", 3)


def test_a_row_of_bad_steps_ends_the_job() -> None:
    s = Steps(max_bad_steps=3)
    s.step(math.nan, math.nan, math.nan)
    s.step(math.nan)
    s.step(1.0)
    s.step(math.nan)
    s.step(math.nan)
    with pytest.raises(JobError, match=r"step 6, update 1 of the actor: .*3 steps in a row.*max_bad_steps=3"):
        s.step(math.nan)


def test_steps_that_are_done_again_end_no_row() -> None:
    """A fault that comes again and again at step 4 must not send the run back forever."""
    s = Steps(on_nonfinite="rollback", max_bad_steps=2)
    for _ in range(3):
        s.step(1.0)
    with pytest.raises(RollBack, match="step 4"):
        s.step(math.nan)
    s.state = TrainState("rl", 2, rollbacks=1)
    s.step(1.0)
    with pytest.raises(JobError, match="2 steps in a row"):
        s.step(math.nan)
    s = Steps(on_nonfinite="rollback", max_bad_steps=2)
    with pytest.raises(RollBack):
        s.step(math.nan)
    s.step(1.0)
    with pytest.raises(RollBack):
        s.step(math.nan)


def test_stop_names_the_setting() -> None:
    with pytest.raises(
        JobError,
        match=r"warm start, step 1, update 1 of the critic: .*nan.*trainer\.update_filter\.on_nonfinite=stop.*set it "
        r"to skip",
    ):
        s = Steps(on_nonfinite="stop")
        s.state = TrainState()
        s.step(math.nan, model="critic")
    s = Steps(on_spike="stop", spike_factor=2.0, spike_window=2)
    with pytest.raises(JobError, match=r"on_spike=stop"):
        s.step(1.0, 1.0, 5.0)


def test_a_rollback_gives_other_tasks_and_none_gives_those_of_ever() -> None:
    ids = [str(i) for i in range(40)]

    def asked(count: int, seed: int = 5) -> list[str]:
        return tasks_of_step(ids, 3, 8, data_seed(seed, count))

    assert asked(0) == tasks_of_step(ids, 3, 8, 5) == ["31", "3", "32", "8", "33", "13", "21", "1"]
    assert len({tuple(asked(count, seed)) for count in range(4) for seed in (5, 6)}) == 8
