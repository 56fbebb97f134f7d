"""Time in which engines have samples, from the explorer's changes to the trainer's share."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megarl.buffer.store import Store
from megarl.buffer.store.engines import BusyTime
from megarl.explore.explorer.claimed import SHORTEST_S, EngineTime, RolloutClock
from megarl.train.ranks import SILENCE_S, EngineIdleness


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"sqlite:///{tmp_path / 'store.db'}", attempt=None)


async def call(function: Any, *args: Any) -> Any:
    return function(*args)


def test_rollouts_that_overlap_count_once(store: Store) -> None:
    clock = Clock()
    engines = EngineTime(store, "a", call, clock)
    one, other = (RolloutClock(generates=engines.change) for _ in range(2))
    for seconds, rollout, phase, by in (
        (1.0, one, "generation", 2),  # begins at 1
        (1.0, other, "generation", 1),
        (1.0, other, "reward", 1),
        (1.0, one, "generation", -2),
        (1.0, other, "generation", -1),  # ends at 5
        (2.0, one, "generation", 1),  # begins at 7
        (0.5, one, "reward", 1),
    ):
        clock.now += seconds
        rollout.change(phase, by)
    found = engines.report()
    assert found == BusyTime(4.0, 1007.0, 1007.5) and found.until(1009.0) == 6.0


def test_a_change_is_in_the_store_soon(store: Store) -> None:
    async def main() -> list[BusyTime]:
        engines = EngineTime(store, "a", call)
        keeping = asyncio.create_task(engines.keep())
        found = []
        for by in (0, 3, -3):
            engines.change(by)
            while "a" not in (noted := store.workers.busy_times()) or (noted["a"].since is None) is (by > 0):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            found.append(store.workers.busy_times()["a"])
        keeping.cancel()
        return found

    before, under_way, after = asyncio.run(asyncio.wait_for(main(), 60))
    assert (before.seconds, before.since) == (0.0, None)
    assert under_way.since is not None and after.since is None and after.seconds > 0.4


def test_a_change_just_before_the_end_keeps_nobody_waiting(store: Store) -> None:
    """An explorer's last sample often ends as its job does."""

    async def main() -> None:
        engines = EngineTime(store, "a", call)
        keeping = asyncio.create_task(engines.keep())
        await asyncio.sleep(SHORTEST_S + 0.1)  # it waits for a change by now
        engines.change(1)
        await asyncio.sleep(0)  # its wait has ended, and it has not gone on
        keeping.cancel()
        done, _ = await asyncio.wait([keeping], timeout=60)
        assert done == {keeping} and keeping.cancelled()

    asyncio.run(main())


def test_the_share_is_of_the_time_since_the_last_look() -> None:
    clock = Clock()
    engines = EngineIdleness(clock)
    assert engines.share({"a": BusyTime(5.0, None, 1000.0)}) is None  # the first look has nothing to compare with
    clock.now += 10
    assert engines.share({"a": BusyTime(9.0, 1008.0, 1008.0)}) == pytest.approx(0.4)  # 4 s and 2 s more
    clock.now += 10
    assert engines.share({"a": BusyTime(9.0, 1008.0, 1018.0)}) == pytest.approx(0.0)
    clock.now += 10
    two = {"a": BusyTime(0.5, None, 1029.0), "b": BusyTime(7.0, None, 1029.0)}  # a has begun again
    assert engines.share(two) is None
    clock.now += 10
    two = {"a": BusyTime(5.5, None, 1039.0), "b": BusyTime(7.0, None, 1039.0)}
    assert engines.share(two) == pytest.approx(0.75)


def test_explorers_that_have_ended_count_no_more() -> None:
    clock = Clock()
    engines = EngineIdleness(clock)
    dead = BusyTime(5.0, 990.0, 1000.0)
    engines.share({"a": dead, "b": BusyTime(0.0, None, 1000.0)})
    clock.now += SILENCE_S
    assert engines.share({"a": dead, "b": BusyTime(0.0, None, clock.now)}) == 1.0


def test_each_explorer_has_its_own_time(store: Store) -> None:
    for _ in range(2):
        store.workers.record_busy("a", BusyTime(1.5, None, 3.0))
        store.workers.record_busy("b", BusyTime(2.5, 2.0, 3.0))
    assert store.workers.busy_times() == {"a": BusyTime(1.5, None, 3.0), "b": BusyTime(2.5, 2.0, 3.0)}
