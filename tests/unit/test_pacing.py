"""Pacing: lags are what the formulas say, and no schedule of ended groups makes one older than ``sync.max_staleness``
or stops a job."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.buffer.order.pacing import Pacing, choose
from megarl.config import Config
from megarl.config.algorithms import AlgorithmConfig
from megarl.config.job import RunConfig, SyncConfig
from megarl.config.schema import RolloutConfig
from megarl.core.errors import ConfigError
from megarl.core.jobs import JOBS
from megarl.run.checks.pacing import check_pacing

PACINGS = [Pacing(k, i) for k in (0, 1, 2, 4, 9) for i in range(1, k + 2)]
Choice = Callable[[list[int], list[int], int, int, int], list[int]]


@pytest.mark.parametrize("pacing", PACINGS, ids=str)
def test_the_lag_of_a_step_follows_from_the_publication_that_asks_for_it(pacing: Pacing) -> None:
    asked_at: dict[int, int] = {}
    for step in range(60):
        if pacing.publishes(step):
            assert pacing.published(step) == step
            for ahead in range(len(asked_at), pacing.asked(step)):
                asked_at[ahead] = step
        assert step in asked_at, "a step has nothing to train on"
        assert step - asked_at[step] == pacing.lag_of_step(step) <= pacing.max_staleness
    assert pacing.lag_of_step(0) == 0 and max(map(pacing.lag_of_step, range(40))) == pacing.max_staleness


def by_definition(ready: list[int], waiting: list[int], step: int, picks: int, each: int) -> list[int]:
    """Pick the first ready group for which all others that are due by each later step fit there; again."""
    chosen: list[int] = []
    for number, _ in enumerate(ready):
        others = [d for i, d in enumerate(ready) if i != number and i not in chosen] + waiting
        left = picks - len(chosen) - 1
        if left >= 0 and all(
            sum(d <= step + j for d in others) <= left + j * each for j in range(max([0, *others]) - step + 1)
        ):
            chosen.append(number)
    return chosen


deadlines = st.lists(st.integers(3, 8), max_size=9)


@given(ready=deadlines, waiting=deadlines, picks=st.integers(1, 4), each=st.integers(1, 4))
def test_the_rule_is_its_definition(ready: list[int], waiting: list[int], picks: int, each: int) -> None:
    unused = ready + waiting
    if all(sum(d <= 3 + j for d in unused) <= picks + j * each for j in range(6)):  # as steps before have left it
        assert choose(ready, waiting, 3, picks, each) == by_definition(ready, waiting, 3, picks, each)


@dataclass
class Schedule:
    """A job in completion order, whose groups end as chance has it. ``capacity`` of them are sampled at a time, the
    oldest first; a step drops groups and asks for others in their place."""

    pacing: Pacing
    each: int
    steps: int
    random: Random
    choice: Choice = choose
    pending: list[tuple[int, int]] = field(default_factory=list)
    """(number, deadline)"""
    sampled: list[tuple[int, int]] = field(default_factory=list)
    ready: list[tuple[int, int]] = field(default_factory=list)
    asked: int = 0
    lags: list[int] = field(default_factory=list)

    def ask(self, count: int, published: int) -> None:
        for _ in range(count):
            self.pending.append((self.asked, self.pacing.deadline(published)))
            self.asked += 1

    def sample(self, capacity: int) -> None:
        """Some groups end."""
        while self.pending and len(self.sampled) < capacity:
            self.sampled.append(self.pending.pop(0))
        self.random.shuffle(self.sampled)
        for _ in range(self.random.randint(0, len(self.sampled))):
            self.ready.append(self.sampled.pop())

    def run(self) -> list[int]:
        """Make all steps; return the staleness bound that each used group still had when it was used."""
        published, capacity = 0, self.random.randint(1, 4 * self.each)
        for step in range(self.steps):
            if self.pacing.publishes(step):
                published = step
            unused = len(self.pending) + len(self.sampled) + len(self.ready)
            self.ask(
                min(self.pacing.deadline(published) + 1, self.steps) * self.each - step * self.each - unused, published
            )
            missing = self.each
            while missing:
                for _ in range(10_000):
                    others = [due for _, due in self.pending + self.sampled]
                    chosen = self.choice([due for _, due in self.ready], others, step, missing, self.each)
                    if len(chosen) == missing:
                        break
                    self.sample(capacity)
                else:
                    raise AssertionError("the job waits without end")
                taken = [self.ready[number] for number in chosen]
                self.ready = [group for group in self.ready if group not in taken]
                dropped = self.random.choice([0, 0, self.random.randint(0, missing)])
                self.lags += [step - (due - self.pacing.max_staleness) for _, due in taken[dropped:]]
                self.ask(dropped, published)
                missing = dropped
            self.sample(capacity)
        return self.lags


@settings(max_examples=2000, deadline=None)
@given(pacing=st.sampled_from(PACINGS[1:]), each=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_no_group_is_older_than_the_bound_whatever_ends_when(pacing: Pacing, each: int, seed: int) -> None:
    """The lag that is bounded here is that of weights published last when a group was asked for: its tokens are of
    these or later ones."""
    lags = Schedule(pacing, each, 12, Random(seed)).run()
    assert len(lags) == 12 * each and max(lags) <= pacing.max_staleness


def test_without_the_rule_the_bound_is_broken() -> None:
    """So the schedules above would show it."""

    def first(ready: list[int], waiting: list[int], step: int, picks: int, each: int) -> list[int]:
        return list(range(min(picks, len(ready))))

    worst = max(max(Schedule(Pacing(2, 1), 4, 30, Random(seed), first).run()) for seed in range(200))
    assert worst > 2


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        (
            SyncConfig(interval=2),
            r"sync\.interval=2: .* set sync\.max_staleness=1 or more, or sync\.interval=1 or less",
        ),
        (SyncConfig(order="completion"), r"sync\.order=completion with sync\.max_staleness=0"),
        (SyncConfig(pause="keep"), r"sync\.pause=keep with sync\.max_staleness=0"),
        (SyncConfig(pause="keep", max_staleness=1), r"sync\.pause=keep with sync\.order=admission"),
        (
            SyncConfig(pause="keep", max_staleness=1, order="completion", method="checkpoint"),
            r"sync\.pause=keep with sync\.method=checkpoint: .* set sync\.pause=wait or sync\.method=direct",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(sync: SyncConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_pacing(Config(sync=sync), JOBS["both"])


def test_engines_that_leave_take_no_weights_in_flight() -> None:
    sync = SyncConfig(pause="keep", order="completion", max_staleness=1)
    check_pacing(Config(sync=sync), JOBS["both"])
    with pytest.raises(ConfigError, match=r"sync\.pause=keep with rollout\.placement=colocated"):
        check_pacing(Config(sync=sync, rollout=RolloutConfig(placement="colocated")), JOBS["both"])


PARTIAL = RolloutConfig(budget_tokens=8, segment_tokens=4)


@pytest.mark.parametrize(
    "sync, rollout, message",
    [
        (SyncConfig(max_staleness=1), replace(PARTIAL, segment_tokens=None), r"without rollout\.segment_tokens"),
        (SyncConfig(max_staleness=1), replace(PARTIAL, segment_tokens=9), r"set rollout\.segment_tokens=8 or less"),
        (SyncConfig(), PARTIAL, r"rollout\.budget_tokens=8 with sync\.max_staleness=0"),
        (SyncConfig(max_staleness=1, order="completion"), PARTIAL, r"with sync\.order=completion"),
        (SyncConfig(max_staleness=1, method="checkpoint"), PARTIAL, r"with sync\.method=checkpoint"),
        (SyncConfig(max_staleness=1), replace(PARTIAL, workflow="agent"), r"with rollout\.workflow=agent"),
        (
            SyncConfig(),
            RolloutConfig(budget_s=9.0, segment_tokens=4),
            r"rollout\.budget_s=9\.0 with sync\.max_staleness=0",
        ),
        (SyncConfig(max_staleness=1), RolloutConfig(budget_s=9.0), r"budget_s=9\.0 without rollout\.segment_tokens"),
    ],
)
def test_partial_rollouts_that_could_not_wait_are_refused(
    sync: SyncConfig, rollout: RolloutConfig, message: str
) -> None:
    check_pacing(Config(sync=SyncConfig(max_staleness=1), rollout=PARTIAL), JOBS["both"])
    with pytest.raises(ConfigError, match=message):
        check_pacing(Config(sync=sync, rollout=rollout), JOBS["both"])


@pytest.mark.parametrize(
    "config, named",
    [
        (Config(sync=SyncConfig(order="completion", max_staleness=1)), r"sync\.order=completion"),
        (Config(rollout=RolloutConfig(spare=2)), r"rollout\.spare=2"),
        (
            Config(sync=SyncConfig(max_staleness=1, interval=2), algorithm=AlgorithmConfig(dynamic_sampling=True)),
            r"dynamic_sampling=true, sync\.interval=2",
        ),
        (Config(rollout=RolloutConfig(workflow="agent")), r"rollout\.workflow=agent"),
        (
            Config(sync=SyncConfig(max_staleness=1), rollout=replace(PARTIAL, budget_s=2.0, spare=1)),
            r"rollout\.spare=1 and rollout\.budget_s=2\.0",
        ),
    ],
)
def test_what_time_decides_is_refused_where_a_run_shall_repeat(config: Config, named: str) -> None:
    check_pacing(Config(sync=SyncConfig(max_staleness=2, deterministic=True), rollout=PARTIAL), JOBS["both"])
    check_pacing(config, JOBS["both"])
    with pytest.raises(ConfigError, match=named):
        check_pacing(replace(config, sync=replace(config.sync, deterministic=True)), JOBS["both"])


def test_spare_trajectories_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_pacing(Config(), JOBS["both"])
        assert not caplog.text
        check_pacing(Config(rollout=RolloutConfig(spare=2)), JOBS["both"])
    assert "short responses are trained more often" in caplog.text and "no run repeats bit for bit" in caplog.text


def test_old_tokens_without_a_correction_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(sync=SyncConfig(max_staleness=3, interval=4))
    with caplog.at_level(logging.WARNING):
        check_pacing(config, JOBS["both"])
        assert "set algorithm.correction=truncate" in caplog.text
        caplog.clear()
        check_pacing(replace(config, algorithm=replace(config.algorithm, correction="truncate")), JOBS["both"])
    assert not caplog.text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rollout": RolloutConfig(placement="colocated")}, "rollout.placement=colocated"),
        ({"run": RunConfig(mode="train")}, "run.mode=train"),
        ({"sync": SyncConfig(cold_interval=5, pause="keep", max_staleness=1, order="completion")}, "sync.pause=keep"),
    ],
)
def test_no_engine_begins_with_the_weights_where_it_cannot(changes: dict[str, Any], reason: str) -> None:
    config = Config(sync=SyncConfig(cold_interval=5))
    check_pacing(config, JOBS["both"])
    with pytest.raises(ConfigError, match=rf"sync\.cold_interval=5 with {reason}"):
        check_pacing(replace(config, **changes), JOBS["both"])
