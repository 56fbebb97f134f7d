"""Which consumed groups a step trains on again."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.buffer.order.group_choice import ReplayChoice, TaskChoice, drawn, replay_metrics
from megarl.buffer.store import Store, UsedGroup
from megarl.config import Config
from megarl.config.algorithms import AlgorithmConfig
from megarl.config.job import BufferConfig, ReplayConfig, SyncConfig
from megarl.config.schema import TrainerConfig
from megarl.core.errors import ConfigError
from megarl.core.schema import Reward, WeightsVersion
from megarl.learn import algorithms
from megarl.run.checks.pacing import check_replay
from megarl.train.ranks import Reporter, RunContext, TrainState
from megarl.train.rollout.group_part import Published
from megarl.train.rollout.reading import NodeReader, RolloutReader
from megarl.train.rollout.rollouts import Rollouts, StepGroups
from tests.stores import make_task, make_trajectory

GROUPS, SIZE = 4, 4
"""Groups of a step, and responses of each."""


def used(number: int, by: int = 1, accuracy: float = 0.5) -> UsedGroup:
    return UsedGroup(f"train-{by - 1:06d}", number, f"train-{by - 1:06d}/{number}", by, accuracy)


groups = st.lists(
    st.builds(used, st.integers(0, 50), st.integers(1, 12), st.sampled_from([0.0, 0.25, 0.5, 1.0])),
    max_size=30, unique_by=lambda group: group.group_id,
)  # fmt: skip


@given(
    groups=groups, replays=st.lists(st.integers(0, 5), min_size=30, max_size=30), count=st.integers(1, 8),
    uses=st.integers(2, 5), max_age=st.integers(1, 12), hardness=st.sampled_from([0.0, 1.0, 3.5]),
    bounds=st.sampled_from([(0.0, 1.0), (0.25, 1.0), (0.0, 0.5), (0.1, 0.9)]), decay=st.floats(1e-3, 1),
    seed=st.integers(0, 2**31 - 1),
)  # fmt: skip
def test_all_that_may_be_replayed_is_drawn_and_nothing_else(
    groups: list[UsedGroup],
    replays: list[int],
    count: int,
    uses: int,
    max_age: int,
    hardness: float,
    bounds: tuple[float, float],
    decay: float,
    seed: int,
) -> None:
    before = {group.group_id: n for group, n in zip(groups, replays, strict=False)}
    config = ReplayConfig(0.5, uses, max_age, decay, hardness, *bounds)
    allowed = {
        g.group_id: g
        for g in groups
        if 1 + before[g.group_id] < uses
        and 13 - g.used_by <= max_age
        and bounds[0] <= g.accuracy <= bounds[1]
        and (hardness == 0 or g.accuracy < 1)
    }
    found = drawn(groups, before, 12, count, config, seed)
    assert found == drawn(groups, before, 12, count, config, seed)
    assert len(found) == len({g.group_id for g in found}) == min(count, len(allowed))
    for group in found:
        assert group.age == 13 - allowed[group.group_id].used_by and group.uses == 2 + before[group.group_id] <= uses


def shares(candidates: list[UsedGroup], config: ReplayConfig, step: int) -> list[float]:
    """Share of the draws of one group that each candidate has, over many seeds."""
    taken = Counter(drawn(candidates, {}, step, 1, config, seed)[0].group_id for seed in range(3000))
    return [taken[group.group_id] / 3000 for group in candidates]


def test_priorities_are_shares_of_the_draws() -> None:
    old = [used(0, by=by) for by in (3, 2, 1)]
    weights = np.array([0.5, 0.25, 0.125])
    np.testing.assert_allclose(shares(old, ReplayConfig(0.5, decay=0.5), 3), weights / weights.sum(), atol=0.03)
    np.testing.assert_allclose(shares(old, ReplayConfig(0.5, decay=1.0), 3), 1 / 3, atol=0.03)
    hard = [used(i, accuracy=accuracy) for i, accuracy in enumerate((0.0, 0.5, 0.75, 1.0))]
    weights = np.array([1, 0.25, 0.0625, 0])
    np.testing.assert_allclose(
        shares(hard, ReplayConfig(0.5, decay=0.1, hardness=2.0), 3), weights / weights.sum(), atol=0.03
    )


def test_a_priority_of_a_very_old_group_is_not_zero() -> None:
    config = ReplayConfig(0.5, max_age=10**6, decay=0.01)
    assert len(drawn([used(0), used(1)], {}, 5000, 2, config, 1)) == 2


@given(hundredths=st.integers(0, 99), tasks=st.integers(1, 3000))
def test_a_share_is_counted_in_decimals(hundredths: int, tasks: int) -> None:
    assert ReplayConfig(hundredths / 100).num_groups(tasks) == int(Fraction(hundredths, 100) * tasks) < tasks


def config_of(staleness: int = 0, algorithm: dict[str, Any] | None = None, **replay: Any) -> Config:
    return Config(
        algorithm=AlgorithmConfig(group_size=SIZE, **(algorithm or {})),
        trainer=TrainerConfig(steps=9, tasks_per_step=GROUPS, seed=5),
        sync=SyncConfig(max_staleness=staleness),
        buffer=BufferConfig(ReplayConfig(**{"share": 0.5, **replay})),
    )


class ReplayJob:
    """The only rank of a job on 40 tasks that samples, trains and records steps; responses come at once."""

    def __init__(self, path: Path, config: Config, url: str | None = None) -> None:
        self.path, self.config = path, config
        self.store = Store(url or f"sqlite:///{path}/store.db")
        if not self.store.tasks.ids("train"):
            self.store.tasks.add("train", [make_task(i) for i in range(40)])
        context = RunContext(config, path, 1, 0)
        operates = bool(config.buffer.operators)
        self.reader = reader = RolloutReader(NodeReader(), self.store, lambda: False, whole=operates)
        self.rollouts = Rollouts(
            context, algorithms.get("grpo"), self.store, Reporter(context, self.store), reader, self._answered, 64
        )

    def _answered(self, *_: object, **__: object) -> None:
        for claim in reversed(self.store.groups.claim("e", 1000)):
            right = int(claim.task.task_id.split("/")[1]) % (SIZE + 1)
            rewards = [Reward(float(i < right), "ok" if i < right else "wrong") for i in claim.indices]
            version = WeightsVersion(1, claim.step)
            members = [make_trajectory(replace(claim, version=version), i) for i in claim.indices]
            assert self.store.groups.put(claim, [replace(e, reward=r) for e, r in zip(members, rewards, strict=True)])

    def step(self, number: int, *, record: bool = True) -> StepGroups:
        """Make step ``number``, from 0."""
        version = WeightsVersion(1, number)
        self.store.pacing.record_version(version, number)
        self.store.pacing.record_live(version)
        found = self.rollouts.groups(TrainState("rl", number), Published(version, number))
        if record:
            self.store.journal.record_step(number + 1, found.metrics, found.used)
        return found


@pytest.fixture(params=[0, 1], ids=["synchronous", "one_step_ahead"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ReplayJob]:
    job = ReplayJob(tmp_path, config_of(request.param, uses=3, decay=0.5, max_age=4))
    yield job
    job.store.close()


def trained(found: StepGroups) -> list[str]:
    return list(dict.fromkeys(e.group_id for e in found.trajectories))


def test_a_step_keeps_its_size_and_samples_fewer_groups(job: ReplayJob) -> None:
    steps = [job.step(number) for number in range(8)]
    first = 1 + job.config.sync.max_staleness
    born = {group: number for number, found in enumerate(steps) for group in found.used.consumed}
    uses: Counter[str] = Counter()
    for number, found in enumerate(steps):
        assert len(trained(found)) == GROUPS and len(found.trajectories) == GROUPS * SIZE
        replayed = found.used.replayed
        assert set(trained(found)) == {*found.used.consumed, *replayed}
        assert len(replayed) == (0 if number < first else 2), "the first steps have nothing to replay"
        assert job.store.rollouts.progress(f"train-{number:06d}") == (GROUPS - len(replayed),) * 2
        uses.update(trained(found))
        ages = [number - born[group] for group in replayed]
        assert all(first <= age <= 4 for age in ages) and max(uses.values()) <= 3
        metrics = {name: value for name, value in found.metrics.items() if name.startswith("replay/")}
        if not replayed:
            assert metrics == {"replay/share": 0.0}
            continue
        assert metrics == {
            "replay/share": 0.5,
            "replay/age/mean": sum(ages) / 2,
            "replay/age/max": max(ages),
            "replay/uses/mean": sum(uses[group] for group in replayed) / 2,
            "replay/uses/max": max(uses[group] for group in replayed),
        }
        assert [group in replayed for group in trained(found)] == [False, True, False, True], "each update has some"
        for e in found.trajectories:
            assert e.turns[-1].spans[0].version == WeightsVersion(1, int(e.rollout_id[-6:])), "its own"
        if not job.config.sync.max_staleness:
            assert found.metrics["rollout/stale_tokens"] == 0.5
    assert 3 in uses.values(), "no group came to its third use"


def test_steps_that_are_made_again_are_the_same(job: ReplayJob) -> None:
    """Killed after step 5, with a checkpoint of step 3: what came later is unused again."""
    found = [trained(job.step(number)) for number in range(6)]
    before = job.store.replays.counts(0, 99)
    job.step(6, record=False)
    job.store.rollouts.discard(3)
    assert job.store.replays.counts(3, 99) == {} and sum(job.store.replays.counts(0, 3).values()) < sum(before.values())
    again = ReplayJob(job.path, job.config)
    assert [trained(again.step(number)) for number in range(3, 6)] == found[3:]
    assert again.store.replays.counts(0, 99) == before


def test_a_draw_is_the_same_before_and_after_the_steps_between(job: ReplayJob) -> None:
    choice, k = ReplayChoice(job.config, job.store), job.config.sync.max_staleness
    for number in range(6):
        job.step(number)
        asked = choice.groups(number + 1 + k, 5, number + 1)
        if k:
            job.step(number + 1)
            assert asked == choice.groups(number + 2, 5, number + 2) and (number < 1 or len(asked) == 2)
            job.store.rollouts.discard(number + 1)
    assert choice.groups(6, 6, 6) != choice.groups(6, 5, 6), "another seed draws others"


def test_a_draw_far_ahead_is_the_one_after_the_steps_between_and_reads_twice_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = 10
    job = ReplayJob(tmp_path, config_of(ahead, uses=3, decay=0.5, max_age=30))
    choice = ReplayChoice(job.config, job.store)
    for number in range(12):
        job.step(number)
    calls: list[str] = []
    for name in ("counts", "consumed"):
        read = getattr(job.store.replays, name)
        monkeypatch.setattr(job.store.replays, name, lambda *a, read=read, name=name: calls.append(name) or read(*a))
    early = [choice.groups(12 + k, 5, 12) for k in range(ahead + 1)]
    assert len(calls) == sum(2 * (k + 1) for k in range(ahead + 1)) and all(early)
    for number in range(12, 12 + ahead):
        job.step(number)
    assert early == [choice.groups(12 + k, 5, 12 + k) for k in range(ahead + 1)]
    job.store.close()


def test_without_a_share_nothing_is_read_or_asked_otherwise(tmp_path: Path) -> None:
    job = ReplayJob(tmp_path, config_of(share=0.0))
    for number in range(3):
        found = job.step(number)
        assert found.used.replayed == () and not any(name.startswith("replay/") for name in found.metrics)
        assert trained(found) == [f"train-{number:06d}/{i}" for i in range(GROUPS)]


def test_tasks_in_place_of_missing_groups_are_new_to_the_step(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.tasks.add("train", [make_task(i) for i in range(40)])
    choice = TaskChoice(config_of(), store)
    assert choice.with_spare(3, 5, 2) == choice.tasks(3, 5) and len(choice.tasks(3, 5)) == 2
    assert len(set(choice.with_spare(3, 5, 4))) == 4 and choice.with_spare(3, 5, 4)[:2] == choice.tasks(3, 5)
    in_turn = [task for step in range(20) for task in choice.tasks(step, 5)]
    assert len(set(in_turn)) == 40, "an epoch leaves no task out"
    dynamic = TaskChoice(config_of(algorithm={"dynamic_sampling": True}), store)
    assert not {*dynamic.with_spare(3, 5, 4)[2:]} & {*dynamic.tasks(3, 5, 1)}


def test_dynamic_sampling_fills_the_part_that_is_sampled(tmp_path: Path) -> None:
    job = ReplayJob(tmp_path, config_of(algorithm={"dynamic_sampling": True}, uses=3))
    steps = [job.step(number) for number in range(5)]
    assert [len(found.used.replayed) for found in steps] == [0, 2, 2, 2, 2]
    assert all(len(trained(found)) == GROUPS and found.metrics["rollout/kept_groups"] <= GROUPS for found in steps)
    assert any(found.used.dropped for found in steps)
    dropped = {group for found in steps for group in found.used.dropped}
    assert not dropped & {group for found in steps for group in found.used.replayed}


def test_metrics_of_no_groups() -> None:
    assert replay_metrics([], 4) == {"replay/share": 0.0}


ONLINE, OFFLINE = algorithms.job_of(Config()), algorithms.job_of(Config(algorithm=AlgorithmConfig("sft")))


@pytest.mark.parametrize(
    ("staleness", "replay", "words"),
    [
        (0, {"share": 0.2}, r"share=0.2 is less than one of trainer.tasks_per_step=4 groups; set it to 0.25 or more"),
        (0, {"min_accuracy": 0.9, "max_accuracy": 0.1}, r"min_accuracy=0.9 is above .*max_accuracy=0.1"),
        (0, {"hardness": 1.0, "min_accuracy": 1.0}, r"hardness=1 never replays .*min_accuracy=1 no others"),
        (1, {"max_age": 1}, r"max_age=1: with sync.max_staleness=1 .* set it to 2 or more"),
        (0, {"share": 0.75}, r"share=0.75 replays 3 of .*=4 groups, but the other 1 can be replayed 1 times in all .* "
                             r"set uses to 4 or more and max_age to 3 or more"),
        (1, {"share": 0.75, "uses": 4, "max_age": 3}, r"set uses to 4 or more and max_age to 4 or more"),
    ],
)  # fmt: skip
def test_what_no_step_could_do_is_refused(staleness: int, replay: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_replay(config_of(staleness, **replay), ONLINE)


def test_an_offline_job_has_nothing_to_replay() -> None:
    with pytest.raises(ConfigError, match="share=0.5 in an offline job"):
        check_replay(config_of(), OFFLINE)


def test_replay_without_correction_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check_replay(config_of(1, {"correction": "truncate"}, share=0.75, uses=4, max_age=4), ONLINE)
    check_replay(config_of(share=0.0, max_age=1), OFFLINE)
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING):
        check_replay(config_of(), ONLINE)
    assert "buffer.replay.share=0.5 without algorithm.correction" in caplog.messages[0]


@settings(max_examples=8, deadline=None)
@given(share=st.sampled_from([0.25, 0.5, 0.75]), uses=st.integers(2, 5), max_age=st.integers(2, 6), k=st.integers(0, 1))
def test_a_share_that_is_not_refused_is_reached(
    tmp_path_factory: pytest.TempPathFactory, share: float, uses: int, max_age: int, k: int
) -> None:
    config = config_of(k, share=share, uses=uses, max_age=max_age, decay=1.0)
    try:
        check_replay(config, ONLINE)
    except ConfigError:
        return
    job = ReplayJob(tmp_path_factory.mktemp("share"), config)
    counts = [len(job.step(number).used.replayed) for number in range(8)]
    assert max(counts) == share * GROUPS
    job.store.close()
