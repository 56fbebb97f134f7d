"""What a person sees of failing rewards: a rate-limited line, and a short file of what functions print."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.buffer.store import Store, journal
from megarl.config.rewards import RewardConfig
from megarl.rewards import RewardPool, Verdict
from megarl.rewards.pool import child
from megarl.rewards.pool.tally import EVENT, EVERY_S, LONG_S, Tally
from megarl.train import services
from megarl.train.services import EventLines
from tests.unit.test_rewards import TASK


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_failures_are_one_line_once_in_a_while() -> None:
    clock = Clock()
    tally = Tally(clock)
    for _ in range(150):
        tally.add("ok", None)
    assert tally.line() is None, "all is well"
    for i in range(60):
        tally.add("timeout" if i % 4 else "error", f"no verdict\nwithin {i} s")
    line = "reward: 60 of the last 200 verdicts failed (timeout 45, error 15); newest: no verdict within 59 s"
    assert tally.line() == line
    tally.add("error", "another")
    assert tally.line() is None, "there was a line just now"
    clock.now += EVERY_S
    assert "61 of the last 200" in str(tally.line())
    clock.now += EVERY_S
    assert tally.line() is None, "nothing new has failed"
    tally.add("error", "another")
    assert tally.line() is None, "that failure was printed before"
    for _ in range(170):
        tally.add("error", "another")
    assert "200 of the last 200" in str(tally.line()), "many more fail"


def test_answers_that_wait_for_long_are_told_before_they_fail() -> None:
    clock = Clock()
    tally = Tally(clock)
    with tally.waiting(), tally.waiting():
        assert tally.line() is None
        clock.now += LONG_S
        assert tally.line() == f"reward: 2 answers wait for a verdict, one of them for {LONG_S:.0f} s"
        clock.now += LONG_S / 2
        assert tally.line() is None
    clock.now += LONG_S
    assert tally.line() is None


def test_the_trainer_shows_each_line_of_its_own_start_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "EVENTS_S", 0.0)
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.journal.record_event("explorer-0", EVENT, {"line": "of an earlier start"})
    event_lines = EventLines(store)
    assert event_lines.lines() == []
    store.journal.record_event("explorer-0", EVENT, {"line": "one"})
    store.journal.record_event("explorer-0", "engine_retry", {"error": "other"})
    store.journal.record_event("explorer-0", EVENT, {"line": "two"})
    assert event_lines.lines() == ["one", "two"]
    assert event_lines.lines() == []
    with monkeypatch.context() as patch:
        patch.setattr(journal.time, "time", lambda: 0.0)
        store.journal.record_event("explorer-0", EVENT, {"line": "after the clock was set back"})
    assert event_lines.lines() == ["after the clock was set back"]
    store.close()


NOISY = """
import os, sys
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    os.write(1, b"to stdout\\n"); print("to stderr", file=sys.stderr)
    if solution_str == "much":
        for i in range(64): os.write(1, b"x" * 2**14)
        print("the end", flush=True)
    if solution_str == "raise": raise KeyError("boom")
    return 1.0
"""


def test_what_a_function_prints_goes_to_a_short_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child, "MAX_BYTES", 2**18)
    monkeypatch.setattr(child, "KEPT_BYTES", 2**10)
    monkeypatch.setattr(child, "EVERY_S", 0.05)
    path, log = tmp_path / "reward.py", tmp_path / "output.log"
    path.write_text(NOISY)

    async def main() -> list[Verdict]:
        async with RewardPool(RewardConfig(path=str(path), retries=0), output=log) as pool:
            found = [await pool.score(TASK, text) for text in ("12", "raise")]
            assert log.read_bytes().count(b"to stdout") == log.read_bytes().count(b"to stderr") == 2
            assert "1 of the last 2 verdicts failed (error 1); newest: KeyError: 'boom'" in str(pool.tally.line())
            found.append(await pool.score(TASK, "much"))
            until = time.monotonic() + 30
            while log.stat().st_size > 2**18:
                assert time.monotonic() < until
                await asyncio.sleep(0.02)
            found.append(await pool.score(TASK, "12"))
            return found

    assert [verdict.reward.status for verdict in asyncio.run(main())] == ["ok", "error", "ok", "ok"]
    text = log.read_text()
    assert "bytes dropped)" in text and "the end\n" in text and text.rstrip().endswith(("to stdout", "to stderr"))
    shown = capfd.readouterr()
    assert "to std" not in shown.out + shown.err


def test_one_huge_write_does_not_outgrow_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "MAX_BYTES", 2**20)
    path, log = tmp_path / "reward.py", tmp_path / "output.log"
    path.write_text("import os\ndef compute_score(**_):\n    os.write(1, b'x' * 2**26)\n    return 1.0\n")

    async def main() -> int:
        async with RewardPool(RewardConfig(path=str(path), retries=0), output=log) as pool:
            scored, peak = asyncio.create_task(pool.score(TASK, "12")), 0
            while not scored.done():
                peak = max(peak, log.stat().st_size if log.exists() else 0)
                await asyncio.sleep(0)
            assert scored.result().reward.status == "ok"
            return max(peak, log.stat().st_size)

    assert 2**16 < asyncio.run(main()) <= 2**20
    assert log.read_bytes().count(b"bytes dropped)") == 1


def test_a_file_that_cannot_be_written_costs_no_reward(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> Any:
        async with RewardPool(RewardConfig(), output=tmp_path / "none" / "output.log") as pool:
            return await pool.score(TASK, "12")

    assert asyncio.run(main()).reward.status == "ok"
    assert "what reward functions print is dropped" in caplog.text
