"""An idle explorer asks only whether the store has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.buffer.store import Store
from megarl.engines.client.engine_choice import EngineChoice
from megarl.explore.explorer import explorer
from megarl.explore.explorer.explorer import AskedEngines, ClaimSettings, Explorer
from tests.stores import VERSION, make_task
from tests.unit.test_spare import Scorer

IDLE, MOST = 60, 20


def counted(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> list[None]:
    """Count the calls of a method."""
    calls: list[None] = []
    method: Callable[..., Any] = getattr(place, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return method(*args, **kwargs)

    monkeypatch.setattr(place, name, count)
    return calls


def test_it_looks_for_groups_only_after_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explorer, "LOOK_S", 3600.0)
    url = f"sqlite:///{tmp_path}/store.db"
    store, trainer = Store(url), Store(url)
    store.begin_attempt(VERSION.attempt)
    store.tasks.add("train", [make_task(0, "train")])
    marks = counted(monkeypatch, store.database, "mark")
    looks = counted(monkeypatch, store.groups, "claim")
    none: Any = None
    asked = AskedEngines(none, EngineChoice(()))

    async def idle() -> None:
        running = asyncio.create_task(
            Explorer(store, asked, Scorer(), none, ClaimSettings("e", capacity=4, poll_s=0.001)).run()
        )
        while len(marks) < IDLE:
            assert not running.done(), running.result()
            await asyncio.sleep(0.001)
        assert 0 < len(looks) < MOST
        before = len(looks)
        trainer.workers.beat("another")
        while len(looks) == before:
            await asyncio.sleep(0.001)
        trainer.journal.close_job()
        await running

    asyncio.run(asyncio.wait_for(idle(), 60))
    for handle in (store, trainer):
        handle.close()


def test_a_mark_differs_after_a_commit_of_any_handle(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store, other = Store(url), Store(url)
    marks = [store.database.mark()]
    for handle in (store, other, store, other):
        store.journal.job_state()
        assert store.database.mark() == marks[-1]
        handle.workers.beat("a worker")
        marks.append(store.database.mark())
    assert None not in marks
    assert len(set(marks)) == len(marks)
    for handle in (store, other):
        handle.close()
