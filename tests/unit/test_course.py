"""Jobs that are killed, resumed and continued: the trainer's own course, pacing and store, without models and engines.

Every wait may lose an engine or the whole job. No job waits without end, no group is used twice or too late, and every
version has the weights that are written down for it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select

from megarl.buffer.order.group_choice import TaskChoice
from megarl.buffer.order.pacing import Pacing
from megarl.buffer.store import Claim, Store, Used
from megarl.buffer.store.rollouts import RolloutTable
from megarl.buffer.store.tables import GROUPS, ROLLOUTS
from megarl.config import Config
from megarl.config.alarms import AlarmsConfig
from megarl.config.algorithms import AlgorithmConfig
from megarl.config.job import SyncConfig
from megarl.config.schema import TrainerConfig
from megarl.core.schema import Reward, Trajectory, WeightsVersion
from megarl.learn import algorithms
from megarl.learn.memory.phases import Phase
from megarl.train.loop.course import Course
from megarl.train.part import Services
from megarl.train.parts import parts_of
from megarl.train.ranks import Reporter, RunContext, TrainState
from megarl.train.rollout.group_part import Awaited, Published
from megarl.train.rollout.reading import NodeReader, RolloutReader
from megarl.train.rollout.rollouts import GroupRequests, InCompletionOrder, Rollouts
from megarl.train.step import OnlineSteps
from megarl.train.sync.probe import outlives_update
from megarl.train.sync.weights import WeightSync
from tests.stores import finish, make_task
from tests.trajectories import one_turn

EACH, TASKS = 2, 97
NOTHING: Any = SimpleNamespace(
    agree=lambda yes: yes,
    stop_requested=lambda: False,
    log=lambda text: None,
    come_and_go=False,
    engines_changed=lambda: False,
    connect=lambda: None,
    enter=lambda phase: None,
    during=lambda phase: nullcontext(),
    settle=lambda step: False,
    phase=Phase.ROLLOUT,
)


NO_LAYERS = SimpleNamespace(actor=SimpleNamespace(model=SimpleNamespace(grid=nullcontext, chunks=(), hf_config={})))


class Killed(Exception):
    """The job is killed."""


class Weights(WeightSync):
    """Publications to engines that take whatever they are sent."""

    def __init__(self, context: RunContext, store: Store, job: Job) -> None:
        super().__init__(context, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, store.pacing.record_version)
        self._job, self._settings = job, context.config
        self.steps: dict[WeightsVersion, int] = {}
        """Steps of training in the weights that engines were sent under each version."""

    def send_version(self, *, abort: bool = False, sent: Any = None) -> dict[str, float]:
        steps = self._job.trained if sent is None else sent
        assert self.steps.setdefault(self.version, steps) == steps, "other weights under the same version"
        if sent is None and outlives_update(self._settings.sync):
            self.sent: Any = steps
        return {"sync/digests": 1.0}


def asked_once(rollouts: RolloutTable) -> None:
    """Whoever asks again under the same id deletes what has ended."""
    request = rollouts.request

    def once(rollout_id: str, *args: Any, **more: Any) -> None:
        assert not rollouts.is_requested(rollout_id)
        request(rollout_id, *args, **more)

    rollouts.request = once  # type: ignore[method-assign]


class Job(OnlineSteps):
    """One attempt of a job, from its newest checkpoint to its end or until it is killed."""

    def __init__(self, run: Run, attempt: int, state: TrainState) -> None:
        self.run, config, self.random, self.trained = run, run.config, run.random, state.step
        supervisor = Store(run.url)
        supervisor.begin_attempt(attempt)
        supervisor.rollouts.discard(state.step, saved=state.step > 0, claims=True)
        supervisor.close()
        self.store = Store(run.url, attempt=attempt)
        asked_once(self.store.rollouts)
        context = RunContext(config, run.path, attempt, 0)
        reporter = Reporter(context, self.store)
        rank: Any = SimpleNamespace(
            config=config, context=context, store=self.store, reporter=reporter, ranks=NOTHING, memory=NOTHING
        )
        super().__init__(rank)
        self.weights = Weights(context, self.store, self)
        reader = RolloutReader(NodeReader(), self.store, lambda: False)
        grpo, wait = algorithms.get("grpo"), self.until
        rollouts = Rollouts(context, grpo, self.store, reporter, reader, wait, 64)
        given: dict[str, Any] = dict.fromkeys((field.name for field in fields(Services)), NOTHING)
        made: dict[str, Any] = {"config": config, "context": context, "store": self.store, "reporter": reporter}
        made |= {"weights": self.weights, "rollouts": rollouts, "models": NO_LAYERS}
        self.services = Services(**given | made)
        self.parts, self.is_connected = parts_of(self.services), True
        self.claims: list[Claim] = []

    def connect(self) -> None:
        """There is nothing to join."""

    def until(self, look: Callable[[], Awaited], label: str, *, weights_step: int) -> None:
        """``RolloutWaiter.wait``, in which groups end, engines are replaced, and the job is killed."""
        assert weights_step == self.trained
        for _ in range(200):
            if look().complete:
                return
            if self.random.random() < 0.2:
                self.weights.publish_again("an engine was replaced", weights_step)
            self.may_die()
            self.explore()
        raise AssertionError(f"{label}: waits without end")

    def explore(self) -> None:
        """Claim groups, and end some."""
        self.claims += self.store.groups.claim("e", self.random.randint(1, 4))
        self.random.shuffle(self.claims)
        for _ in range(self.random.randint(0, len(self.claims))):
            claim = self.claims.pop()
            assert claim.oldest <= self.weights.version
            self.store.groups.put(claim, [self.answer(claim, i) for i in claim.indices])

    def answer(self, claim: Claim, index: int) -> Trajectory:
        turns = one_turn([1], [2] * (index + 1), version=self.weights.version)
        ids = (claim.rollout_id, claim.task.task_id, claim.group_id)
        return Trajectory(*ids, index, claim.group_size, turns=turns, reward=Reward(float(index), "ok"))

    def may_die(self) -> None:
        if self.run.kills and self.random.random() < 0.15:
            self.run.kills -= 1
            raise Killed

    def evaluate(self, state: TrainState, name: str) -> None:
        self.evaluated = self.publish(state)
        self.until(lambda: Awaited(0, 0, self.random.random() < 0.5), name, weights_step=state.step)

    def step(self, state: TrainState) -> TrainState:
        """``OnlineSteps.step`` without models."""
        self.publish_if_due(state)
        published = Published(self.weights.version, self.weights.step)
        groups = self.services.rollouts.groups(state, published)
        self.may_die()
        self.trained += 1
        for part in self.parts:
            part.after_update(state)
        self.store.journal.record_step(state.step + 1, {}, groups.used)
        self.may_die()
        after = TrainState("rl", state.step + 1)
        trainer = self.rank.config.trainer
        if after.step % trainer.checkpoint_interval == 0 or after.step == trainer.steps:
            self.run.checkpoint = after
        self.may_die()
        return after


class Run:
    """A run of several attempts."""

    def __init__(self, path: Path, config: Config, seed: int) -> None:
        self.path, self.config, self.random, self.kills = path, config, Random(seed), 4
        self.url = f"sqlite:///{path}/store.db"
        self.checkpoint = TrainState("rl", 0)
        self.attempt = 0
        self.make_store()

    def make_store(self) -> None:
        store = Store(self.url)
        store.tasks.add("train", [make_task(i) for i in range(TASKS)])
        store.close()

    def go(self, steps: int) -> None:
        """Make ``steps`` steps, in as many attempts as it takes."""
        self.config = replace(self.config, trainer=replace(self.config.trainer, steps=steps))
        ended = False
        while not ended:
            self.attempt += 1
            job = Job(self, self.attempt, self.checkpoint)
            with suppress(Killed):
                state, ended = Course(job.rank, job).run_steps(self.checkpoint)
            job.store.groups.release("e")
            job.store.close()
        assert state.step == steps


def used(run: Run) -> list[Any]:
    """Groups that steps have used, with their tasks."""
    query = select(GROUPS.c.group_id, GROUPS.c.task_id, GROUPS.c.used_by).where(GROUPS.c.used_by.is_not(None))
    with closing(Store(run.url, read_only=True)) as store:
        return list(store.database.read(lambda connection: connection.execute(query).all()))


def config_of(order: Any, pacing: Pacing, **trainer: int) -> Config:
    return Config(
        alarms=AlarmsConfig(verdicts=0),  # no process beside each simulated rank
        algorithm=AlgorithmConfig(group_size=2),
        sync=SyncConfig(
            order=order,
            max_staleness=pacing.max_staleness,
            interval=pacing.interval,
            pause="keep" if order == "completion" else "wait",
        ),
        trainer=TrainerConfig(tasks_per_step=EACH, **trainer),
    )


COURSES = [
    (order, Pacing(k, i), every, checkpoint)
    for order in ("admission", "completion")
    for k in range(4)
    for i in range(1, min(k + 1, 3) + 1)
    for every, checkpoint in itertools.product((0, 1, 3), (1, 2, 3))
    if order == "admission" or k
]


@pytest.mark.parametrize(
    ("order", "pacing", "every", "checkpoint"),
    [pytest.param(*course, marks=() if i % 15 == 6 else pytest.mark.soak) for i, course in enumerate(COURSES)],
    ids=str,
)
def test_no_job_waits_without_end_or_uses_a_group_twice(
    tmp_path: Path, order: Any, pacing: Pacing, every: int, checkpoint: int
) -> None:
    config = config_of(order, pacing, eval_interval=every, checkpoint_interval=checkpoint)
    run = Run(tmp_path, config, seed=COURSES.index((order, pacing, every, checkpoint)))
    run.go(5)
    run.go(8)
    groups = used(run)
    assert Counter(group.used_by for group in groups) == {step: EACH for step in range(1, 9)}
    assert len({group.task_id for group in groups}) == len(groups)
    with closing(Store(run.url, read_only=True)) as store:
        for group in groups:
            versions = {
                span.version for e in store.groups.read([group.group_id]) for turn in e.turns for span in turn.spans
            }
            lags = [group.used_by - 1 - step for step in store.pacing.version_steps(versions).values()]
            assert lags and min(lags) >= 0 and max(lags) <= pacing.max_staleness


def test_a_step_uses_the_version_that_its_evaluation_was_given(tmp_path: Path) -> None:
    """Four steps with evaluations before the first and the third, and after the last: one version for each state."""
    run = Run(tmp_path, config_of("admission", Pacing(), eval_interval=2), seed=0)
    run.kills = 0
    run.random.random = lambda: 0.3  # type: ignore[method-assign]  # no engine is replaced
    run.go(4)
    with closing(Store(run.url, read_only=True)) as store:
        published = store.pacing.version_steps([WeightsVersion(1, n) for n in range(9)])
    assert published == {WeightsVersion(1, n + 1): n for n in range(5)}


@pytest.mark.parametrize("order", ["admission", "completion"])
def test_tasks_go_on_after_the_store_was_lost(tmp_path: Path, order: str) -> None:
    """Rows that were trained come again once all others have."""
    run = Run(tmp_path, config_of(order, Pacing(2, 2), checkpoint_interval=1), seed=1)
    run.go(5)
    before = {group.task_id for group in used(run)}
    for file in tmp_path.glob("store.db*"):
        file.unlink()
    run.make_store()
    run.kills = 2
    run.go(9)
    after = [group.task_id for group in used(run)]
    assert len(before) == 5 * EACH and len(set(after)) == len(after) == 4 * EACH and before.isdisjoint(after)


def test_a_resume_keeps_groups_that_were_asked_for_in_its_step(tmp_path: Path) -> None:
    """A replaced engine has brought the weights of step 1 between two publications, and step 2 asked for more."""
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.tasks.add("train", [make_task(i) for i in range(TASKS)])
    config = config_of("completion", Pacing(2, 3))
    context = RunContext(config, tmp_path, 1, 0)
    asking = InCompletionOrder(GroupRequests(context, store, TaskChoice(config, store)))

    def ask(attempt: int, step: int, weights_step: int) -> None:
        version = WeightsVersion(attempt, weights_step + 1)
        store.pacing.record_version(version, weights_step)
        asking.ask(TrainState("rl", step), Published(version, weights_step))
        store.pacing.record_live(version)
        for claim in store.groups.claim("e", 99):
            assert finish(store, claim)

    ask(1, 0, 0)
    for step in (1, 2):
        store.journal.record_step(step, {}, Used(tuple(group.group_id for group in store.pacing.unused()[:EACH])))
    ask(1, 2, 1)
    before = [group.group_id for group in store.pacing.unused()]
    store.rollouts.discard(2)
    ask(2, 2, 2)
    after = [group.group_id for group in store.pacing.unused()]
    assert len(before) == 2 * EACH and after[: 2 * EACH] == before and len(after) == 3 * EACH
    tasks, sampling = (
        store.database.read(lambda connection, column=column: list(connection.scalars(select(column))))
        for column in (GROUPS.c.task_id, ROLLOUTS.c.sampling)
    )
    assert len(tasks) == len(set(tasks)) == 5 * EACH
    assert len(sampling) == len(set(sampling)) == 3, "each rollout has a seed of its own"
    store.close()
