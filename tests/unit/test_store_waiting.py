"""Waits for PostgreSQL: silence ends them, data that flow do not."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import pytest

from megarl.buffer.store import postgres_waiting


def statement() -> Generator[Any, Any, None]:
    """A statement that never ends, as psycopg's generators wait for it."""
    while True:
        yield 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Monotonic time: its only entry grows by 0.5 s with every look."""
    now = [0.0]

    def monotonic() -> float:
        now[0] += 0.5
        return now[0]

    monkeypatch.setattr(time, "monotonic", monotonic)
    return now


def test_a_result_that_keeps_flowing_is_not_cut_off(clock: list[float]) -> None:
    watched = postgres_waiting.watched(statement(), "x", 2.0)
    watched.send(None)
    for tick in range(100):
        watched.send(1 if tick % 3 else 0)
    assert clock[0] > 20.0


def test_silence_is_counted_from_the_last_data(clock: list[float]) -> None:
    watched = postgres_waiting.watched(statement(), "x", 2.0)
    watched.send(None)
    for _ in range(20):
        watched.send(1)
    for _ in range(4):
        watched.send(0)
    with pytest.raises(postgres_waiting.Unanswered, match="no answer for 2 s") as raised:
        watched.send(0)
    assert raised.value.waited_s == 2.5
