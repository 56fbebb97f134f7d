"""Groups that end while another is written are written together, and each task learns its own group's fate."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.buffer.store import Claim, EndedGroup, Store
from megarl.core.errors import JobError
from megarl.explore.explorer.claimed import StoreQueue
from tests.stores import make_task, make_trajectory, request


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.tasks.add("train", [make_task(i) for i in range(6)])
    request(store)
    yield store
    store.close()


def put_at_once(store: Store, claims: list[Claim], fails: bool) -> tuple[Any, list[int]]:
    """Results of writing all claims' groups at once, and how many groups each call had."""
    sizes: list[int] = []

    async def counted(ended: Sequence[EndedGroup]) -> list[bool]:
        sizes.append(len(ended))
        if fails and len(sizes) > 1:
            raise JobError("the store is gone")
        return await asyncio.to_thread(store.groups.put_all, ended)

    ended = [EndedGroup(claim, [make_trajectory(claim, i) for i in claim.indices]) for claim in claims]

    async def main() -> Any:
        queue = StoreQueue(counted)
        first = asyncio.create_task(queue.put(ended[0]))
        while not sizes:
            await asyncio.sleep(0)
        return await asyncio.gather(first, *map(queue.put, ended[1:]), return_exceptions=True)

    return asyncio.run(asyncio.wait_for(main(), 60)), sizes


def test_they_share_a_transaction(store: Store) -> None:
    claims = store.groups.claim("a", 6)
    claims[3] = replace(claims[3], token="another")  # it has been given to somebody else
    results, sizes = put_at_once(store, claims, fails=False)
    assert results == [True, True, True, False, True, True] and sizes == [1, 5]
    assert len(store.groups.trajectories("r0")) == 10


def test_a_failure_is_that_of_all_that_were_written_together(store: Store) -> None:
    results, sizes = put_at_once(store, store.groups.claim("a", 6), fails=True)
    assert results[0] is True and sizes == [1, 5]
    assert all(isinstance(result, JobError) for result in results[1:])


def test_whoever_is_cancelled_takes_nobody_with_it(store: Store) -> None:
    """The first task is cancelled while its write is under way, another one while it waits for its turn."""
    claims = store.groups.claim("a", 4)
    began, go_on = asyncio.Event(), asyncio.Event()

    async def slow(ended: Sequence[EndedGroup]) -> list[bool]:
        began.set()
        await go_on.wait()
        return await asyncio.to_thread(store.groups.put_all, ended)

    async def main() -> list[Any]:
        queue = StoreQueue(slow)
        ended = [EndedGroup(claim, [make_trajectory(claim, i) for i in claim.indices]) for claim in claims]
        tasks = [asyncio.create_task(queue.put(group)) for group in ended[:2]]
        await began.wait()
        tasks += [asyncio.create_task(queue.put(group)) for group in ended[2:]]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[2].cancel()
        go_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(asyncio.wait_for(main(), 60))
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [True, False, True, False]
    assert results[1] is True and results[3] is True
    states = [state for state, _, _ in store.groups.states("r0").values()]
    assert states[:4] == ["ready"] * 4, "what was queued is written all the same"
