"""Tasks of a step: shares of sources, orders within one, and the choice from a store."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.buffer.order import draws as data
from megarl.buffer.order.group_choice import (
    Draw,
    Shares,
    TaskChoice,
    curriculum,
    in_file_order,
    prioritized,
    shuffled,
    whole_parts,
)
from megarl.buffer.store import Store, Used
from megarl.config.schema import Config, TrainerConfig
from megarl.config.taskset import SourceConfig, TasksetConfig
from megarl.core.errors import ConfigError, DataError
from megarl.core.schema import Reward
from tests.stores import VERSION, make_task, make_trajectory

parts = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(weights=parts, start=st.integers(0, 200), count=st.integers(0, 60))
def test_slots_before_and_of_a_step_agree(weights: list[int], start: int, count: int) -> None:
    shares = Shares(weights)
    found = Counter(shares.of(start, count))
    assert sum(shares.before(start)) == start
    after = [before + found[source] for source, before in enumerate(shares.before(start))]
    assert shares.before(start + count) == after
    assert all(found[source] <= most for source, most in enumerate(shares.most(count)))


@given(weights=parts, start=st.integers(0, 50))
def test_a_round_has_each_source_as_often_as_its_weight(weights: list[int], start: int) -> None:
    exact = whole_parts(weights)
    found = Counter(Shares(weights).of(start, sum(exact)))
    assert [found[source] for source in range(len(weights))] == exact


def test_the_most_of_a_source_occurs() -> None:
    shares = Shares([5, 2, 1])
    seen = [Counter(shares.of(start, 5)) for start in range(8)]
    assert shares.most(5) == [max(found[source] for found in seen) for source in range(3)]


def test_weights_are_taken_in_decimals() -> None:
    assert whole_parts([0.7, 0.2, 0.1]) == [7, 2, 1] and whole_parts([2.0, 4.0]) == [1, 2]
    with pytest.raises(ConfigError, match=r"weights 0.123457, 1 make .* parts, at most 100000 .* rounder numbers"):
        whole_parts([0.1234567, 1.0])


sizes, steps, counts, seeds = st.integers(1, 40), st.integers(0, 30), st.integers(1, 12), st.integers(0, 1000)


@given(size=sizes, step=steps, count=counts, seed=seeds, extra=st.integers(0, 3))
def test_one_file_in_shuffled_order_is_as_ever(size: int, step: int, count: int, seed: int, extra: int) -> None:
    ids = [str(i) for i in range(size)]
    draw = Draw(step, step * count, count, extra, seed)
    expected = data.extra_tasks(ids, step, extra, count, seed) if extra else data.tasks_of_step(ids, step, count, seed)
    assert [ids[i] for i in shuffled(size, draw)] == expected


def test_the_tasks_of_old_runs_are_as_they_were() -> None:
    """Numbers written down before there were orders."""
    ids = [str(i) for i in range(40)]
    assert data.tasks_of_step(ids, 3, 8, 5) == ["31", "3", "32", "8", "33", "13", "21", "1"]


@given(size=sizes, count=counts)
def test_file_order_goes_through_the_file(size: int, count: int) -> None:
    taken = [i for step in range(3) for i in in_file_order(size, Draw(step, step * count, count, 0, 1))]
    assert taken == [i % size for i in range(3 * count)]


@given(size=st.integers(5, 60), length=st.integers(1, 20), count=st.integers(1, 5), seed=seeds)
def test_a_curriculum_takes_from_the_easiest_share(size: int, length: int, count: int, seed: int) -> None:
    by_difficulty = list(range(size))[::-1]
    for step in range(length):
        taken = curriculum(by_difficulty, length, Draw(step, step * count, count, 0, seed))
        reached = max(count, -(-size * (step + 1) // length))
        assert set(taken) <= set(by_difficulty[:reached]) and len(set(taken)) == count
    after = Draw(length, length * count, count, 0, seed)
    assert curriculum(by_difficulty, length, after) == shuffled(size, after)


@given(size=st.integers(8, 40), step=steps, seed=seeds)
def test_extra_rollouts_of_ranked_orders_are_new_to_the_step(size: int, step: int, seed: int) -> None:
    weights, draws = np.linspace(0.1, 1.1, size), [Draw(step, 0, 4, extra, seed) for extra in range(2)]
    for order in (
        lambda draw: curriculum(range(size), 1000, draw),
        lambda draw: prioritized(weights, draw),
        lambda draw: in_file_order(size, draw),
    ):
        first, second = (order(draw) for draw in draws)
        assert not set(first) & set(second) and len(set(first + second)) == 8


def test_priorities_are_shares_of_the_draws() -> None:
    """One of three tasks a step: the solved one has 0.1 of 0.1 + 0.6 + 1.1."""
    weights = np.array([0.1, 0.6, 1.1])
    taken = Counter(prioritized(weights, Draw(step, step, 1, 0, 7))[0] for step in range(4000))
    np.testing.assert_allclose([taken[i] / 4000 for i in range(3)], weights / weights.sum(), atol=0.025)


def config_of(count: int = 4, staleness: int = 0, **taskset: Any) -> Config:
    config = Config(trainer=TrainerConfig(tasks_per_step=count), taskset=TasksetConfig(**taskset))
    return replace(config, sync=replace(config.sync, max_staleness=staleness))


def choice_of(path: Path, config: Config, names: tuple[str, ...] = ("",), size: int = 12) -> TaskChoice:
    store = Store(f"sqlite:///{path}/store.db")
    ids = [f"train/{name}/{i}" if name else f"train/{i}" for name in names for i in range(size)]
    tasks = [replace(make_task(i), task_id=task_id, extra_info={"n": i % size}) for i, task_id in enumerate(ids)]
    store.tasks.add("train", tasks)
    return TaskChoice(config, store)


def sources(**weights: float) -> dict[str, SourceConfig]:
    return {name: SourceConfig(f"{name}.parquet", weight) for name, weight in weights.items()}


def test_sources_have_their_shares_and_epochs_of_their_own(tmp_path: Path) -> None:
    choice = choice_of(tmp_path, config_of(4, train=sources(a=3, b=1)), ("a", "b"))
    asked = [choice.tasks(step, 5) for step in range(12)]
    names = [Counter(task.split("/")[1] for task in tasks) for tasks in asked]
    assert names == [Counter(a=3, b=1)] * 12
    of = {name: [t for tasks in asked for t in tasks if t.startswith(f"train/{name}/")] for name in "ab"}
    assert len(set(of["b"])) == 12, "12 steps take each of the 12 tasks of b once"
    assert [len(set(of["a"][i : i + 12])) for i in (0, 12, 24)] == [12, 12, 12]
    numbers = [[t.split("/")[2] for t in of[name][:12]] for name in "ab"]
    assert numbers[0] != numbers[1], "sources are shuffled apart"
    assert choice.metrics(0, asked[0]) == {"taskset/tasks/a": 3.0, "taskset/tasks/b": 1.0}


def test_a_choice_forgets_nothing_and_remembers_nothing(tmp_path: Path) -> None:
    config = config_of(5, train=sources(a=0.3, b=0.7), order="curriculum", difficulty="n", curriculum_steps=9)
    first = choice_of(tmp_path, config, ("a", "b"))
    asked = [first.tasks(step, 5, extra) for step in range(12) for extra in range(2)]
    again = TaskChoice(config, Store(f"sqlite:///{tmp_path}/store.db"))
    later = [again.tasks(step, 5, extra) for step in reversed(range(12)) for extra in (1, 0)]
    assert later == asked[::-1]


def test_the_difficulty_of_a_curriculum_rises(tmp_path: Path) -> None:
    config = config_of(2, order="curriculum", difficulty="n", curriculum_steps=6)
    choice = choice_of(tmp_path, config)
    means = [choice.metrics(step, choice.tasks(step, 1))["taskset/difficulty"] for step in range(6)]
    assert means[0] == 0.5 and all(mean <= 2 * (step + 1) - 1 for step, mean in enumerate(means))
    with pytest.raises(DataError, match=r"task train/0 has no number in extra_info.m"):
        TaskChoice(config_of(2, order="curriculum", difficulty="m", curriculum_steps=6), choice.store).tasks(0, 1)


def answered(store: Store, step: int, right: dict[str, int], *, dropped: str = "") -> None:
    """A step whose groups of 4 have so many right responses; the group of the task ``dropped`` is left out."""
    name = f"train-{step - 1:06d}"
    store.rollouts.request(name, "train", step - 1, VERSION, list(right), 4, {"temperature": 1.0})
    for claim in store.groups.claim("e", 100):
        wanted = right[claim.task.task_id]
        rewards = [Reward(float(i < wanted), "ok" if i < wanted else "wrong") for i in claim.indices]
        store.groups.put(claim, [replace(make_trajectory(claim, i), reward=rewards[i]) for i in claim.indices])
    groups = {f"{name}/{position}": task for position, task in enumerate(right)}
    used = tuple(group for group, task in groups.items() if task != dropped)
    store.journal.record_step(
        step, {}, Used(used, {group: "all_right" for group, task in groups.items() if task == dropped})
    )


def test_success_is_that_of_the_newest_group_that_a_step_has_used(tmp_path: Path) -> None:
    choice = choice_of(tmp_path, config_of(order="prioritized"))
    store = choice.store
    answered(store, 1, {"train/0": 4, "train/1": 1}, dropped="train/0")
    answered(store, 2, {"train/1": 3, "train/2": 0})
    store.rollouts.request("train-000002", "train", 2, VERSION, ["train/3"], 4, {})
    assert store.groups.successes(0, 1) == {"train/0": 1.0, "train/1": 0.25}, "dropped groups count too"
    assert store.groups.successes(0, 2) == {"train/0": 1.0, "train/1": 0.75, "train/2": 0.0}
    assert store.groups.successes(1, 2) == {"train/1": 0.75, "train/2": 0.0}
    found = choice.metrics(2, ["train/0", "train/1", "train/9"])
    assert found["taskset/seen"] == 0.25 and found["taskset/success"] == pytest.approx(1.75 / 3)
    assert found["taskset/success_all"] == pytest.approx(1.75 / 12)


def test_solved_tasks_come_less_often(tmp_path: Path) -> None:
    choice = choice_of(tmp_path, config_of(3, order="prioritized", priority_floor=0.01))
    answered(choice.store, 1, {f"train/{i}": 4 for i in range(6)})
    taken = Counter(task for seed in range(100) for task in choice.tasks(1, seed))
    solved = sum(taken[f"train/{i}"] for i in range(6))
    assert solved < 15, "6 of 12 tasks, and 1 % of the weight"


@pytest.mark.parametrize("staleness", [0, 1])
def test_priorities_of_a_step_do_not_depend_on_when_it_is_asked_for(tmp_path: Path, staleness: int) -> None:
    """A step that is asked for ahead, a resumed run and one that went back choose alike."""
    config = config_of(3, staleness, order="prioritized")
    choice = choice_of(tmp_path, config)
    asked: list[list[str]] = []
    for step in range(1, 5):
        asked += [choice.tasks(number, 7) for number in range(len(asked), step + staleness)]
        assert choice.tasks(step - 1, 7) == asked[step - 1], "asked for ahead, and now"
        answered(choice.store, step, {task: (step + i) % 5 for i, task in enumerate(asked[step - 1])})
    assert [choice.tasks(step, 7) for step in (3, 1, 2, 0)] == [asked[step] for step in (3, 1, 2, 0)]
    resumed = Store(f"sqlite:///{tmp_path}/store.db")
    resumed.rollouts.discard(2)
    assert TaskChoice(config, resumed).tasks(2, 7) == asked[2]
