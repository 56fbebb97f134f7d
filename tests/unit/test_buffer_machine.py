"""The buffer under kills: a trainer and two explorers on one store, each of which may die before or after any commit.

No group is trained twice or lost, none has two owners, and no token is older than ``sync.max_staleness``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import delete, select

from megarl.buffer.order.pacing import Pacing
from megarl.buffer.store import Claim, EndedGroup, Store, database
from megarl.buffer.store.tables import GROUPS, METADATA
from megarl.config.algorithms import AlgorithmConfig
from megarl.config.job import SyncConfig
from megarl.config.schema import Config, TrainerConfig
from megarl.core.errors import NonRetryableError
from megarl.core.schema import Reward, WeightsVersion
from megarl.learn import algorithms
from megarl.train.ranks import Reporter, RunContext, TrainState
from megarl.train.rollout.group_part import Awaited, Published
from megarl.train.rollout.reading import NodeReader, RolloutReader
from megarl.train.rollout.rollouts import Rollouts
from tests.stores import make_task, make_trajectory

EACH, STEPS, CHECKPOINT = 2, 12, 3
PACINGS = [(0, 1, "admission"), (2, 2, "admission"), (1, 1, "completion"), (2, 3, "completion"), (4, 1, "completion")]


class KilledError(Exception):
    """The process ends here."""


class Kill:
    """Ends a process before or after the n-th commit from now on."""

    def __init__(self, store: Store) -> None:
        self._write = store.database.write
        self._left: int | None = None
        self._after = False
        store.database.write = self._killed_write

    def at(self, commit: int | None, after: bool) -> None:
        self._left, self._after = commit, after

    def _killed_write(self, work: Callable[..., Any], *args: Any) -> Any:
        if self._left is None:
            return self._write(work, *args)
        self._left -= 1
        if self._left >= 0:
            return self._write(work, *args)
        self._left = None
        if self._after:
            self._write(work, *args)
        raise KilledError


class Jobs(RuleBasedStateMachine):
    """Several attempts of a job. ``url`` is set by the test."""

    url = ""

    @initialize(pacing=st.sampled_from(PACINGS), dynamic=st.booleans())
    def begin(self, pacing: tuple[int, int, str], dynamic: bool) -> None:
        k, i, order = pacing
        self.config = Config(
            algorithm=AlgorithmConfig(group_size=2, dynamic_sampling=dynamic, max_extra_rollouts=2),
            trainer=TrainerConfig(steps=STEPS, tasks_per_step=EACH, seed=5),
            sync=SyncConfig(max_staleness=k, interval=i, order=order),
        )
        self.pacing = Pacing.of(self.config.sync)
        engine = database.open_engine(self.url)
        METADATA.create_all(engine)
        with engine.begin() as connection:
            for table in METADATA.sorted_tables:
                connection.execute(delete(table))
        engine.dispose()
        self.attempt, self.saved, self.trained = 0, 0, dict[int, set[str]]()
        self.seen: set[str] = set()
        self.explorers = [Store(self.url), Store(self.url)]
        self.kills = [Kill(store) for store in self.explorers]
        self.held: list[dict[str, Claim]] = [{}, {}]
        self.store = Store(self.url)
        self.store.tasks.add("train", [make_task(i) for i in range(30)])
        self.resume()

    def teardown(self) -> None:
        for store in (*getattr(self, "explorers", ()), *([self.store] if hasattr(self, "store") else [])):
            store.close()

    def resume(self) -> None:
        """Start the job again from its newest checkpoint."""
        self.store.close()
        self.attempt += 1
        self.store = Store(self.url)
        self.kill = Kill(self.store)
        self.store.rollouts.discard(self.saved, saved=self.saved > 0)
        self.trained = {step: groups for step, groups in self.trained.items() if step <= self.saved}
        for number in (0, 1):
            self.explorer_dies(number)
        context = RunContext(self.config, Path(self.url.removeprefix("sqlite:///")).parent, self.attempt, 0)
        reader = RolloutReader(NodeReader(), self.store, lambda: False)
        reporter: Any = Reporter.__new__(Reporter)
        reporter.timeline = NoTimeline()
        self.rollouts = Rollouts(context, algorithms.get("grpo"), self.store, reporter, reader, self.wait, 64)
        self.step, self.published = self.saved, None

    def publish(self) -> None:
        """Give both explorers' engine the weights of now."""
        number = 1 if self.published is None else self.published.version.n + 1
        version = WeightsVersion(self.attempt, number)
        self.store.pacing.record_version(version, self.step)
        self.store.pacing.record_live(version)
        self.published = Published(version, self.step)

    def wait(self, look: Callable[[], Awaited], label: str, *, weights_step: int) -> None:
        """The explorers work until all is there."""
        for _ in range(200):
            if look().complete:
                return
            number = self.random.randrange(2)
            try:
                self.explore(number)
            except KilledError:
                self.explorer_dies(number)
        raise AssertionError(f"waiting without end for {label}: {look()}, {self.store.pacing.unused()}")

    def explore(self, number: int) -> None:
        """An explorer claims a group, or ends one that it holds, in any order."""
        store, held = self.explorers[number], self.held[number]
        if not held or (len(held) < 3 and self.random.random() < 0.5):
            for claim in store.groups.claim(f"e{number}", 1):
                held[claim.group_id] = claim
        if held and self.random.random() < 0.7:
            claim = held.pop(self.random.choice(sorted(held)))
            assert self.published is not None
            own = replace(claim, version=self.published.version)
            right = [self.random.random() < 0.5 for _ in claim.indices]
            members = [
                replace(make_trajectory(own, i), reward=Reward(float(r), "ok" if r else "wrong"))
                for i, r in zip(claim.indices, right, strict=True)
            ]
            store.groups.put_all([EndedGroup(claim, members)])

    def explorer_dies(self, number: int) -> None:
        """Another of its name begins, and gives back what it held."""
        self.held[number] = {}
        self.explorers[number].groups.release(f"e{number}")

    @rule(random=st.randoms(use_true_random=False), steps=st.integers(1, 4))
    @precondition(lambda self: self.step < STEPS)
    def make_steps(self, random: Any, steps: int) -> None:
        self.random = random
        for _ in range(min(steps, STEPS - self.step)):
            self.make_one()

    @rule(
        random=st.randoms(use_true_random=False), commits=st.integers(0, 12), after=st.booleans(), who=st.integers(0, 2)
    )
    @precondition(lambda self: self.step < STEPS)
    def make_step_and_die(self, random: Any, commits: int, after: bool, who: int) -> None:
        """Make a step, in which the trainer or an explorer dies."""
        self.random = random
        kills = [self.kill, *self.kills]
        kills[who].at(commits, after)
        try:
            self.make_one()
        except KilledError:  # the trainer: explorers end in ``wait``
            self.resume()
        finally:
            for kill in (self.kill, *self.kills):
                kill.at(None, False)

    def make_one(self) -> None:
        if self.pacing.publishes(self.step) or self.published is None:
            self.publish()
        state = TrainState("rl", self.step)
        try:
            found = self.rollouts.groups(state, self.published)
        except NonRetryableError:  # no group says anything: the job is started again by hand
            self.resume()
            return
        assert found is not None
        k, order = self.config.sync.max_staleness, self.config.sync.order
        steps = self.store.pacing.version_steps(
            {s.version for e in found.trajectories for t in e.turns for s in t.spans}
        )
        lags = {self.step - step for step in steps.values()}
        assert all(0 <= lag <= k for lag in lags), (lags, self.config.sync)
        used = set(found.used.consumed) | set(found.used.dropped)
        assert not used & {group for groups in self.trained.values() for group in groups}, "a group is used twice"
        if order == "completion" and not self.config.algorithm.dynamic_sampling:
            assert len(used) == EACH
        self.store.journal.record_step(self.step + 1, {}, found.used)
        self.trained[self.step + 1] = used
        after = self.step + 1
        if self.pacing.publishes(after) or after % CHECKPOINT == 0:
            self.rollouts.drain(state, weights_step=state.step + 1)
        self.step = after
        if self.step % CHECKPOINT == 0:
            self.saved = self.step

    @rule(random=st.randoms(use_true_random=False), number=st.integers(0, 1))
    @precondition(lambda self: self.published is not None)
    def explore_meanwhile(self, random: Any, number: int) -> None:
        self.random = random
        self.explore(number)

    @rule()
    @precondition(lambda self: self.step > self.saved)
    def trainer_dies(self) -> None:
        self.resume()

    @rule(number=st.integers(0, 1))
    def explorer_is_killed(self, number: int) -> None:
        self.explorer_dies(number)

    @invariant()
    def the_store_agrees(self) -> None:
        if not hasattr(self, "rollouts"):
            return
        query = select(GROUPS.c.group_id, GROUPS.c.state, GROUPS.c.used_by)
        of_steps: dict[int, set[str]] = {}
        for group, state, used_by in self.store.database.read(lambda connection: connection.execute(query).all()):
            assert (state in ("consumed", "dropped")) == (used_by is not None)
            if used_by is not None:
                of_steps.setdefault(used_by, set()).add(group)
        assert of_steps == {step: groups for step, groups in self.trained.items() if groups}, "a group was lost"
        both = set(self.held[0]) & set(self.held[1])
        assert not {g for g in both if self.held[0][g].token == self.held[1][g].token}, "a group has two owners"
        k = self.config.sync.max_staleness
        assert len(self.store.pacing.unused()) <= (k + 1) * EACH or self.config.algorithm.dynamic_sampling


class NoTimeline:
    """Phases that nobody measures."""

    def phase(self, *_: Any, **__: Any) -> Any:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/store.db"
    else:
        yield request.getfixturevalue("new_postgres")()


@pytest.mark.parametrize("examples", [5, pytest.param(300, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_no_kill_loses_or_doubles_a_group(url: str, examples: int) -> None:
    machine = type("Here", (Jobs,), {"url": url})
    checks = list(HealthCheck)
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=12, deadline=None, suppress_health_check=checks),
    )
