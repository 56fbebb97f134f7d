"""Ranks that wait for a rollout meet again and again: a collective gives up long before a long rollout ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tqdm import tqdm

from megarl.loop import rollouts


class FakeSession:
    """Rank ``rank`` of a session in which the other ranks say yes."""

    def __init__(self, rank: int, progress: list[tuple[int, int]], stop_at: int | None = None) -> None:
        self.position = SimpleNamespace(rank=rank)
        self.config = SimpleNamespace(store=SimpleNamespace(poll_s=0.001))
        self.store = SimpleNamespace(progress=lambda rollout_id: progress.pop(0) if len(progress) > 1 else progress[0])
        self.answers: list[bool] = []
        self._stop_at = stop_at

    @property
    def stop_flag(self) -> bool:
        return self._stop_at is not None and len(self.answers) >= self._stop_at

    def progress(self, total: int | None, label: str, unit: str) -> Any:
        return tqdm(total=total, disable=True)

    def agree(self, yes: bool) -> bool:
        self.answers.append(yes)
        return yes

    def stop_requested(self) -> bool:
        return self.stop_flag


@pytest.fixture(autouse=True)
def meets_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "MEET_S", 0.0)


def test_a_long_rollout_meets_in_between() -> None:
    s: Any = FakeSession(0, [(0, 2), (1, 2), (1, 2), (2, 2)])
    assert rollouts.wait_for_rollout(s, "r", "rollout")
    assert s.answers[-1] and 1 <= s.answers.count(False) <= 3


def test_other_ranks_wait_for_the_first() -> None:
    s: Any = FakeSession(1, [])
    assert rollouts.wait_for_rollout(s, "r", "rollout")
    assert s.answers == [True]


def test_a_stop_ends_the_wait() -> None:
    s: Any = FakeSession(0, [(0, 2)], stop_at=2)
    assert not rollouts.wait_for_rollout(s, "r", "rollout")
    assert s.answers == [False, False]


def test_tasks_of_a_step_go_on_over_epochs() -> None:
    ids = [str(i) for i in range(7)]
    asked = [task for step in range(7) for task in rollouts.tasks_of_step(ids, step, 3, seed=1)]
    assert all(sorted(asked[epoch * 7 : epoch * 7 + 7]) == ids for epoch in range(3))
    assert asked[:7] != asked[7:14]
