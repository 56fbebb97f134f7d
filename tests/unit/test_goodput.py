"""The account of a run's wall time: each moment has one cause, and the causes add up."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.metrics import COMMAND, END, NOTICE, RESTART
from megarl.run.report.goodput import CAUSES, account, account_of
from megarl.run.report.svg import TimedPhase


def command(at: float) -> list[TimedPhase]:
    """A command's phases until its processes run, 4 s."""
    names = ("import", "check", "prepare", "spawn")
    return [TimedPhase(name, at + i, at + i + 1) for i, name in enumerate(names)]


def ranks(at: float, steps: Sequence[int], cut_off: float = 0.0) -> list[TimedPhase]:
    """A rank's phases: 3 s until the engines have joined, steps of 10 s, the last second of each a checkpoint; then
    ``cut_off`` seconds of a step that never ends."""
    found = [TimedPhase(name, at + i, at + i + 1) for i, name in enumerate(("start", "load", "wait_for_engine"))]
    for i, step in enumerate(steps):
        begin = at + 3 + 10 * i
        found += [
            TimedPhase("rollout", begin, begin + 5, step), TimedPhase("checkpoint", begin + 9, begin + 10, step),
            TimedPhase("step", begin, begin + 10, step),
        ]  # fmt: skip
    end = at + 3 + 10 * len(steps)
    return [*found, *([TimedPhase("rollout", end, end + cut_off, steps[-1] + 1)] if cut_off else [])]


def spent(commands: list[TimedPhase], rank: list[TimedPhase], done: int, **more: list[TimedPhase]) -> dict[str, float]:
    found = account({COMMAND: commands, "trainer_0": rank, **more}, done)
    assert found is not None
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s)
    return found.seconds


def test_steps_checkpoints_and_start_of_a_whole_job() -> None:
    found = spent([*command(0), TimedPhase(END, 28, 28)], ranks(4, [0, 1]), 2)
    assert found == pytest.approx({"steps": 18, "checkpoints": 2, "start": 7, "between": 1})


def test_a_kill_costs_the_steps_after_the_checkpoint_and_the_time_until_the_next_start() -> None:
    """Step 1 is trained again, another process lived 2 s longer than the rank's last phase, the next start is 20 s
    later."""
    explorer = [TimedPhase("generation", 27, 33)]
    found = spent([*command(0), *command(53)], [*ranks(4, [0, 1], 4), *ranks(57, [1, 2])], 3, explorer=explorer)
    assert found == pytest.approx({"steps": 27, "checkpoints": 3, "start": 14, "lost work": 10 + 6, "down": 20})


def test_ranks_that_start_again_alone_are_no_start_of_the_job() -> None:
    """The rank lives 3 s beyond its last phase; the command starts others for 1 s."""
    found = spent([*command(0), TimedPhase(RESTART, 30, 31)], [*ranks(4, [0, 1]), *ranks(31, [1, 2])], 3)
    assert found == pytest.approx({"steps": 27, "checkpoints": 3, "start": 7, "restart": 4, "lost work": 13})


def test_a_whole_job_that_its_command_starts_again_is_a_restart() -> None:
    again = [TimedPhase("prepare", 30, 31), TimedPhase("spawn", 31, 33)]
    found = spent([*command(0), *again], [*ranks(4, [0, 1]), *ranks(33, [1, 2])], 3)
    assert found == pytest.approx({"steps": 27, "checkpoints": 3, "start": 7, "restart": 6, "lost work": 13})


def test_a_notice_counts_from_the_request_without_the_steps_that_it_keeps() -> None:
    """The request comes in the middle of step 1, which is kept; its checkpoint and the end count for the notice."""
    ended = [TimedPhase(NOTICE, 20, 30), TimedPhase(END, 29.5, 29.5)]
    commands, rank = [*command(0), *ended, *command(36)], [*ranks(4, [0, 1]), *ranks(40, [2])]
    found = spent(commands, rank, 3)
    assert found == pytest.approx({"steps": 27, "checkpoints": 2, "start": 14, "notice": 4, "down": 6})
    whole = account({COMMAND: commands, "trainer_0": rank}, 3)
    assert whole is not None and whole.notices() == [pytest.approx({"notice": 4, "down": 6, "start": 7})]


def test_a_step_that_a_notice_cuts_off_is_lost() -> None:
    """Step 1 ends without an update 4 s after the request: its first 6 s are lost work, the rest is the notice's."""
    cut = [*ranks(4, [0]), TimedPhase("step", 17, 27, 1), *ranks(40, [1])]
    ended = [TimedPhase(NOTICE, 23, 30), TimedPhase(END, 29.5, 29.5)]
    found = spent([*command(0), *ended, *command(36)], cut, 2)
    assert found == pytest.approx({"steps": 18, "checkpoints": 2, "start": 14, "lost work": 6, "notice": 7, "down": 6})
    assert spent([*command(0), *ended], cut[:-6], 1)["lost work"] == pytest.approx(6), "also before the next start"


def test_an_evaluation_done_again_is_lost_and_its_weights_count_for_it() -> None:
    def evaluation(at: float) -> list[TimedPhase]:
        return [TimedPhase("sync", at, at + 1, 1), TimedPhase("evaluation", at + 1, at + 3, 1)]

    rank = [*ranks(4, [0]), *evaluation(17), *ranks(44, []), *evaluation(47)]
    found = spent([*command(0), *command(40)], rank, 1)
    assert found["evaluations"] == pytest.approx(1 + 3) and found["lost work"] == pytest.approx(2)


def test_a_running_job_is_under_way_until_now() -> None:
    begin = time.time() - 30
    phases = {COMMAND: command(begin), "trainer_0": ranks(begin + 4, [0])}
    found, ended = account(phases, 1, running=True), account(phases, 1)
    assert found is not None and ended is not None
    assert found.seconds["under way"] == pytest.approx(found.wall_s - ended.wall_s) and found.wall_s >= 30


def test_files_of_a_run_and_a_start_that_was_refused(tmp_path: Path) -> None:
    (tmp_path / "timeline").mkdir()
    assert account_of(tmp_path) is None
    refused = [TimedPhase("import", 40, 41)]
    for name, phases in ((COMMAND, command(0) + refused), ("trainer_0", ranks(4, [0, 1]))):
        rows = [{"phase": p.name, "start": p.start, "seconds": p.end - p.start, "step": p.step} for p in phases]
        (tmp_path / "timeline" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"ph')
    (tmp_path / "metrics.jsonl").write_text('{"step": 9, "sft/loss": 1}\n{"step": 2, "training/global_step": 2}\n')
    found = account_of(tmp_path)
    assert found is not None and found.wall_s == pytest.approx(27) and found.seconds["steps"] == pytest.approx(18)
    assert found.line() == "goodput: 66.7% of 27 s in steps that are kept (start 25.9%, checkpoints 7.4%)"


moments = st.integers(0, 60)
phases_of = st.lists(
    st.tuples(st.sampled_from(("start", "load", "step", "rollout", "checkpoint", "evaluation", "export")), moments,
              st.integers(1, 9), st.none() | st.integers(0, 3)), min_size=1, max_size=12,
)  # fmt: skip
starts_of = st.lists(st.tuples(st.sampled_from(("import", "prepare", "spawn", NOTICE, RESTART, END)), moments,
                               st.integers(0, 5)), min_size=1, max_size=8)  # fmt: skip


@given(starts_of, phases_of, st.integers(0, 4))
def test_every_moment_has_one_cause(
    starts: list[tuple[str, int, int]], rank: list[tuple[str, int, int, int | None]], done: int
) -> None:
    """Whatever a kill has left: spans follow one another without gap from the first phase to the last."""
    commands = [TimedPhase(name, at, at + s) for name, at, s in starts]
    phases = [TimedPhase(name, at, at + s, step) for name, at, s, step in rank]
    found = account({COMMAND: commands, "trainer_0": phases}, done)
    begin, end = min(p.start for p in (*commands, *phases)), max(p.end for p in (*commands, *phases))
    if found is None:
        assert begin == end
        return
    assert (found.spans[0].start, found.spans[-1].end) == (begin, end)
    assert all(one.end == after.start for one, after in zip(found.spans, found.spans[1:], strict=False))
    assert all(span.cause in CAUSES and span.end > span.start for span in found.spans)
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s)
