"""Groups that end while another is written are written together, and each task learns its own group's fate."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import JobError
from megarl.explore.explorer.store_queue import StoreQueue
from megarl.explore.store import Claim, EndedGroup, Store
from tests.stores import make_task, make_trajectory, request


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.add_tasks("train", [make_task(i) for i in range(6)])
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
        return await asyncio.to_thread(store.put_all, ended)

    ended = [EndedGroup(claim, [make_trajectory(claim, i) for i in claim.indices]) for claim in claims]

    async def main() -> Any:
        writer = StoreQueue(counted)
        return await asyncio.gather(*map(writer.put, ended), return_exceptions=True)

    return asyncio.run(asyncio.wait_for(main(), 60)), sizes


def test_they_share_a_transaction(store: Store) -> None:
    claims = store.claim_groups("a", 6)
    claims[3] = replace(claims[3], token="another")  # it has been given to somebody else
    results, sizes = put_at_once(store, claims, fails=False)
    assert results == [True, True, True, False, True, True] and sizes == [1, 5]
    assert len(store.trajectories("r0")) == 10


def test_a_failure_is_that_of_all_that_were_written_together(store: Store) -> None:
    results, sizes = put_at_once(store, store.claim_groups("a", 6), fails=True)
    assert results[0] is True and sizes == [1, 5]
    assert all(isinstance(result, JobError) for result in results[1:])
