"""The store: what goes in comes out with its dtypes, and a group is never claimed or finished twice."""

from __future__ import annotations

import json
import math
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.buffer.store import (
    OWN_SERVER,
    Claim,
    EndedGroup,
    Store,
    Used,
    UsedGroup,
    check_url,
    database,
    is_outline,
    journal,
    outlines_of,
    with_arrays,
)
from megarl.buffer.store.codec import trajectory_from_row, trajectory_to_row
from megarl.buffer.store.database import shown
from megarl.buffer.store.engines import Silence
from megarl.buffer.store.tables import TRAJECTORIES
from megarl.config import compose
from megarl.core.errors import ConfigError, DataError, FencedError, JobError, StoreDamagedError
from megarl.core.schema import GREEDY, GroupStats, Reward, Trajectory, Turn, WeightsSpan, WeightsVersion, file_digest
from megarl.run.job_store import without_password
from tests.stores import VERSION, WRITES, finish, make_task, make_trajectory, request, rows
from tests.trajectories import one_turn


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where no store is yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store/store.db"
    made: str = request.getfixturevalue("new_postgres")()
    return made


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = Store(url)
    store.tasks.add("train", [make_task(i) for i in range(6)])
    yield store
    store.close()


def test_tasks_keep_order_and_content_and_can_be_replaced(store: Store) -> None:
    assert store.tasks.read("train") == [make_task(i) for i in range(6)]
    backwards = [make_task(i) for i in reversed(range(4))]
    store.tasks.add("train", backwards)
    assert store.tasks.ids("train") == [task.task_id for task in backwards]
    assert store.tasks.ids("eval") == []


def test_task_ids_are_unique(store: Store) -> None:
    with pytest.raises(DataError, match="'train/1' of split 'eval' belongs to split 'train'"):
        store.tasks.add("eval", [make_task(1)])
    with pytest.raises(DataError, match="'eval/1' occurs twice"):
        store.tasks.add("eval", [make_task(1, "eval"), make_task(1, "eval")])
    assert store.tasks.ids("eval") == []


def test_a_rollout_from_request_to_trajectories(store: Store) -> None:
    request(store)
    claims = store.groups.claim("a", 4)
    assert [claim.task.task_id for claim in claims] == [f"train/{i}" for i in range(4)]
    assert claims[1].sampling == {"temperature": 0.7} and claims[1].version == VERSION and claims[1].attempt == 1
    for claim in reversed(claims):  # finished in another order than asked for
        assert finish(store, claim)
    assert store.rollouts.progress("r0") == (4, 6)
    got = store.groups.trajectories("r0")
    assert [(e.group_id, e.index) for e in got] == [(f"r0/{p}", i) for p in range(4) for i in range(2)]
    assert store.rollouts.metrics("r0") == {"samples": 2.0}
    assert store.rollouts.progress("no such rollout") == (0, 0)


def with_images(claim: Claim, index: int, *files: bytes) -> Trajectory:
    """A trajectory whose prompt shows some images."""
    made = make_trajectory(claim, index)
    prompt = replace(made.turns[0], images=tuple(map(file_digest, files)))
    return replace(made, turns=(prompt, *made.turns[1:]), images={file_digest(file): file for file in files})


@pytest.mark.parametrize("end", ["deleted", "used", "discarded", "ahead", "asked again"])
def test_images_of_a_group_live_as_long_as_its_trajectories(store: Store, url: str, end: str) -> None:
    request(store, groups=2)
    claims = store.groups.claim("a", 2)
    ended = [
        EndedGroup(claims[0], [with_images(claims[0], 0, b"one", b"two"), with_images(claims[0], 1, b"two")]),
        EndedGroup(claims[1], [with_images(claims[1], 0, b"two"), make_trajectory(claims[1], 1)]),
    ]
    assert store.groups.put_all(ended) == [True, True]
    of_first = {file_digest(file): file for file in (b"one", b"two")}
    assert store.groups.images(["r0/0"]) == of_first and store.groups.images(["r0/1"]) == {file_digest(b"two"): b"two"}
    assert store.groups.images(["r0/0", "r0/1", "no group"]) == of_first
    assert len(rows(url)["group_images"]) == 3, "each once in a group"
    [first, second] = store.groups.read(["r0/0"])
    assert first.turns[0].images == tuple(of_first) and second.turns[0].images == (file_digest(b"two"),)
    if end == "used":
        store.journal.record_step(1, {}, Used(("r0/0",), {}))
        assert store.groups.images(["r0/0"]) == of_first
        assert store.selection.delete_trajectories(["r0/0", "r0/1"]) == 2
        assert store.groups.images(["r0/0", "r0/1"]) == {file_digest(b"two"): b"two"}, "an unused group stays"
    elif end == "deleted":
        store.evaluations.withdraw("r0")
    elif end == "discarded":
        store.rollouts.discard(0)
    elif end == "ahead":
        store.rollouts.discard(1, ahead=True)
    else:
        request(store, groups=1)
    if end != "used":
        assert rows(url)["group_images"] == [] and rows(url)["trajectories"] == []


def test_unknown_task(store: Store) -> None:
    with pytest.raises(DataError, match=r"1 task ids are not in the store, the first is 'train/99'"):
        store.rollouts.request("r", "train", 0, VERSION, ["train/1", "train/99"], 2, {})


ids = st.lists(st.integers(0, 2**31 - 1), min_size=0, max_size=20)


def turns(data: st.DataObject) -> tuple[Turn, ...]:
    """A prompt, and turns of anybody that follow any earlier one."""
    digests = st.lists(st.sampled_from(["a", "b"]), max_size=2).map(tuple)
    found = [Turn("user", np.asarray(data.draw(ids), dtype=np.int32), images=data.draw(digests))]
    for author in data.draw(st.lists(st.sampled_from(["model", "tool", "environment"]), max_size=4)):
        # Strided views must be stored by value, not as they lie in memory.
        tokens = np.repeat(np.asarray(data.draw(ids), dtype=np.int32), 2)[::2]
        turn = Turn(author, tokens, data.draw(st.integers(-1, len(found) - 1)))  # type: ignore[arg-type]
        if author != "model":
            turn = replace(turn, images=data.draw(digests))
        else:
            length, cut = len(tokens), data.draw(st.integers(0, len(tokens)))
            floats = st.lists(st.floats(width=32, allow_nan=False), min_size=length, max_size=length)
            logp = np.repeat(np.asarray(data.draw(floats), dtype=np.float32), 2)[::2]
            spans = (WeightsSpan(0, cut, VERSION), WeightsSpan(cut, length, WeightsVersion(1, 4)))
            turn = replace(turn, logp=logp, spans=spans, finish_reason="length")
            if routed := data.draw(st.none() | st.integers(0, 9)):
                chosen = np.arange(routed * 12, dtype=np.int16).reshape(2 * routed, 2, 3)[::2]
                turn = replace(turn, routing=chosen)
        found.append(turn)
    return tuple(found)


def values(turn: Turn) -> dict[str, Any]:
    """All that a turn holds, arrays as their bytes and dtypes."""
    arrays = {name: getattr(turn, name) for name in ("token_ids", "logp", "routing")}
    return vars(turn) | {n: None if a is None else (a.tobytes(), str(a.dtype)) for n, a in arrays.items()}


@settings(max_examples=50)
@given(score=st.sampled_from([0.0, -1.5, 1.0, math.nan]), stats=st.booleans(), data=st.data())
def test_trajectories_come_back_exactly(score: float, stats: bool, data: st.DataObject) -> None:
    before = Trajectory(
        rollout_id="r",
        task_id="t/0",
        group_id="r/0",
        index=1,
        group_size=2,
        turns=turns(data),
        reward=Reward(score, "error" if math.isnan(score) else "ok", {"a": 0.25}),
        group_stats=GroupStats(0.1, 0.2, 2) if stats else None,
        metadata={"k": [1, None, "ü"]},
    )
    row = type("Row", (), trajectory_to_row(before))()
    after = trajectory_from_row(row)
    assert [values(turn) for turn in after.turns] == [values(turn) for turn in before.turns]
    assert after.reward.score == score or (math.isnan(score) and row.score is None and math.isnan(after.reward.score))
    for name in ("group_stats", "metadata", "index", "group_size", "group_id", "task_id"):
        assert getattr(after, name) == getattr(before, name)


def test_a_database_gives_back_what_it_was_given(store: Store) -> None:
    """Numbers to the last bit, texts in any script, no score where there is none."""
    request(store, groups=1)
    (claim,) = store.groups.claim("a", 1)
    tiny = np.array([-1e-42, -0.1, 0, -3.4e38], dtype=np.float32)
    first = replace(
        make_trajectory(claim, 0),
        reward=Reward(math.nan, "error", {"a": 0.1 + 0.2}),
        turns=one_turn(range(5), [0] * 4, tiny),
        group_stats=GroupStats(1 / 3, 2 / 3, 2),
        metadata={"text": "ü \U0001f600 \x00 \\ '", "n": [1, None]},
    )
    second = replace(make_trajectory(claim, 1), reward=Reward(0.1 + 0.2, "ok"))
    assert store.groups.put(claim, [first, second])
    for got, wanted in zip(store.groups.trajectories("r0"), (first, second), strict=True):
        assert [values(turn) for turn in got.turns] == [values(turn) for turn in wanted.turns]
        for name in ("metadata", "group_stats"):
            assert getattr(got, name) == getattr(wanted, name)
        assert repr(got.reward) == repr(wanted.reward)


def test_a_text_that_not_every_database_keeps_is_refused(store: Store) -> None:
    with pytest.raises(DataError, match="task 'train/0': response holds a NUL character"):
        store.tasks.add("train", [replace(make_task(0), response="a\0b")])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logp": np.zeros(4)}, "logp must be a 1-D float32 array, got float64"),
        ({"logp": np.zeros((4, 1), np.float32)}, r"logp must be a 1-D float32 array, got float32 \(4, 1\)"),
        ({"logp": np.zeros(3, np.float32)}, "logp has 3 values for 4 tokens"),
        ({"token_ids": [1, 2, 3, 4]}, "token_ids must be a 1-D int32 array, got list"),
    ],
)
def test_a_wrong_array_is_refused(store: Store, changes: dict[str, Any], words: str) -> None:
    request(store)
    (claim,) = store.groups.claim("a", 1)
    members = [make_trajectory(claim, i) for i in range(2)]
    members[1] = replace(members[1], turns=(members[1].prompt, replace(members[1].response, **changes)))
    with pytest.raises(TypeError, match=rf"r0/0\[1\]: {words}"):
        store.groups.put(claim, members)
    assert store.rollouts.progress("r0") == (0, 6)


def test_an_incomplete_group_is_refused(store: Store) -> None:
    request(store)
    (claim,) = store.groups.claim("a", 1)
    with pytest.raises(AssertionError, match=r"finished with indices \[1\]"):
        store.groups.put(claim, [make_trajectory(claim, 1)])


def test_a_greedy_answer_belongs_to_its_group_and_comes_with_its_members(store: Store) -> None:
    request(store, greedy=True, groups=2)
    first, second = store.groups.claim("a", 2)
    assert first.indices == [GREEDY, 0, 1]
    members = [make_trajectory(first, i) for i in range(2)]
    with pytest.raises(AssertionError, match=r"finished with indices \[0, 1\]"):
        store.groups.put(first, members)
    baseline = replace(make_trajectory(first, GREEDY, length=7), reward=Reward(math.nan, "timeout"))
    assert store.groups.put(first, [*members, baseline]) and finish(store, second)
    assert not store.groups.put(first, [*members, baseline]), "written twice"
    got = store.groups.trajectories("r0")
    assert [(e.group_id, e.index) for e in got] == [(f"r0/{p}", i) for p in range(2) for i in range(2)]
    assert [len(e.greedy.response.token_ids) for e in got if e.greedy] == [7, 7, 4, 4]
    assert [e.greedy.reward.status for e in got if e.greedy] == ["timeout"] * 2 + ["ok"] * 2
    assert all(e.greedy and e.greedy.group_id == e.group_id and e.greedy.index == GREEDY for e in got)
    request(store, groups=2)  # asked for again, without: nothing of the old greedy answers stays
    for claim in store.groups.claim("a", 2):
        assert claim.indices == [0, 1] and finish(store, claim)
    assert all(e.greedy is None for e in store.groups.trajectories("r0"))


def test_claims_respect_samples_and_age(store: Store) -> None:
    request(store, "r1", step=1, group_size=4)
    request(store, "r0", step=0, group_size=2)
    assert [c.group_id for c in store.groups.claim("a", 10, max_samples=9)] == ["r1/0", "r1/1"]
    assert len(store.groups.claim("a", 10, max_samples=1)) == 1  # a group larger than the room still goes on
    assert store.groups.claim("a", 0) == []


def test_released_claims_are_free_again_and_the_old_ones_void(store: Store) -> None:
    request(store)
    held = store.groups.claim("a", 3)
    other = store.groups.claim("b", 3)
    assert store.groups.release("a") == 3
    again = store.groups.claim("b", 6)
    assert {c.group_id for c in again} == {c.group_id for c in held} and all(c.attempt == 2 for c in again)
    assert not finish(store, held[0])
    assert store.rollouts.progress("r0") == (0, 6)
    assert all(finish(store, claim) for claim in [*again, *other])
    assert not finish(store, again[0])  # not twice either
    assert store.rollouts.progress("r0") == (6, 6) and len(store.groups.trajectories("r0")) == 12
    assert store.groups.release("b") == 0


def test_claims_of_a_silent_worker_are_free(store: Store) -> None:
    request(store, groups=2)
    (slow,) = store.groups.claim("a", 1)
    (dead,) = store.groups.claim("c", 1)
    assert store.groups.claim("b", 2) == []
    assert store.groups.claim("c", 2, silent=["c"]) == [], "a slow worker is not given its own work again"
    (taken,) = store.groups.claim("b", 2, silent=["c", "nobody"])
    assert taken.group_id == dead.group_id and taken.attempt == 2
    assert not finish(store, dead) and finish(store, taken) and finish(store, slow)


def test_who_gives_heartbeats_is_never_silent(store: Store) -> None:
    """However long the claims last, and whatever the machine's clock says."""
    now = [0.0]
    silence = Silence(2.0, clock=lambda: now[0])
    request(store, groups=2)
    store.groups.claim("a", 1)
    store.groups.claim("c", 1)  # and never a heartbeat
    for _ in range(100):
        store.workers.beat("a")
        silence.look(store.workers.beats())
        now[0] += 2.0
    assert store.workers.beats() == {"a": 100, "c": 0}
    assert silence.longer_than(8.0) == {"c"} and silence.alive(8.0) == {"a"}
    for _ in range(5):
        silence.look(store.workers.beats())
        now[0] += 2.0
    assert silence.longer_than(8.0) == {"a", "c"} and silence.alive(8.0) == set()
    store.workers.beat("a")
    silence.look(store.workers.beats())
    assert silence.longer_than(8.0) == {"c"} and silence.alive(8.0) == {"a"}


def test_time_in_which_nobody_looked_is_no_silence() -> None:
    """A job that was suspended takes no claims from others that were suspended with it."""
    now = [0.0]
    silence = Silence(2.0, clock=lambda: now[0])
    silence.look({"a": 1})
    now[0] = 1000.0
    silence.look({"a": 1})
    assert silence.longer_than(8.0) == set()
    assert silence.alive(8.0) == set(), "it has given no heartbeat since it was first seen"


def test_groups_that_are_put_together_are_judged_one_by_one(store: Store) -> None:
    request(store, groups=2)
    request(store, "r1", step=1, groups=2)
    lost, kept, *others = store.groups.claim("a", 10)
    store.groups.release("a")
    again = store.groups.claim("b", 10)
    ended = [
        EndedGroup(claim, [make_trajectory(claim, i) for i in claim.indices], {"groups": number})
        for number, claim in enumerate([lost, *again[1:]])
    ]
    assert store.groups.put_all(ended) == [False, True, True, True] and store.groups.put_all([]) == []
    assert store.rollouts.progress("r0") == (1, 2) and store.rollouts.progress("r1") == (2, 2)
    assert store.rollouts.metrics("r0") == {"groups": 1.0} and store.rollouts.metrics("r1") == {"groups": 3.0}
    assert store.groups.put_all(ended[1:]) == [False] * 3 and len(store.groups.trajectories("r1")) == 4


def test_asking_again_replaces_a_rollout_and_voids_its_claims(store: Store) -> None:
    request(store)
    first, second = store.groups.claim("a", 2)
    assert finish(store, first)
    request(store)
    assert (
        store.rollouts.progress("r0") == (0, 6)
        and store.groups.trajectories("r0") == []
        and store.rollouts.metrics("r0") == {}
    )
    assert not finish(store, second)


def test_discard_rollouts_from_a_step_on(store: Store) -> None:
    for step in range(3):
        request(store, f"r{step}", step)
        store.journal.record_step(step + 1, {"reward": float(step), "bad": math.inf})
    store.rollouts.discard(1)  # one step is done: its rollout and its metrics stay
    assert [store.rollouts.progress(f"r{step}")[1] for step in range(3)] == [6, 0, 0]
    assert store.journal.steps() == [(1, {"reward": 0.0, "bad": None})]
    store.journal.record_step(1, {"reward": 9.0})
    assert store.journal.steps() == [(1, {"reward": 9.0})]


def states(store: Store, rollout_id: str = "r0") -> list[str]:
    return [state for state, _, _ in store.groups.states(rollout_id).values()]


def test_a_group_from_pending_to_consumed_or_dropped(store: Store) -> None:
    request(store, groups=4)
    claims = store.groups.claim("a", 3)
    for claim in claims[1:]:
        finish(store, claim)
    assert states(store) == ["claimed", "ready", "ready", "pending"] and not store.rollouts.is_complete("r0")
    for claim in [claims[0], *store.groups.claim("a", 1)]:
        finish(store, claim)
    assert states(store) == ["ready"] * 4 and store.rollouts.is_complete("r0")
    assert store.groups.take(2, step=0) == ["r0/0", "r0/1"]
    assert store.groups.take(9, step=0, without=["r0/0"]) == ["r0/1", "r0/2", "r0/3"]
    assert states(store) == ["ready"] * 4  # a step that is killed finds them again
    store.journal.record_step(1, {"reward": 1.0}, Used(("r0/0", "r0/2"), {"r0/1": "all_right", "r0/3": "surplus"}))
    assert store.groups.states("r0") == {
        "r0/0": ("consumed", 1, None),
        "r0/1": ("dropped", 1, "all_right"),
        "r0/2": ("consumed", 1, None),
        "r0/3": ("dropped", 1, "surplus"),
    }
    assert store.groups.take(9, step=0) == [] and len(store.groups.trajectories("r0")) == 8


def test_a_step_and_its_consumption_are_one_transaction(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    request(store, groups=1)
    finish(store, store.groups.claim("a", 1)[0])

    def broken(*_: Any) -> None:
        raise RuntimeError("killed here")

    monkeypatch.setattr(journal, "mark_used", broken)
    with pytest.raises(RuntimeError, match="killed here"):
        store.journal.record_step(1, {"reward": 1.0}, Used(("r0/0",)))
    assert store.journal.steps() == [] and states(store) == ["ready"]


def test_groups_that_were_asked_for_ahead(store: Store) -> None:
    """Of step 2, with weights of one step; a job that resumes at step 2 keeps them, one that resumes at step 1 not."""
    ids = store.tasks.ids("train")[:2]
    request(store, "r1", step=1, groups=2)
    store.pacing.record_version(WeightsVersion(1, 7), 1)
    store.rollouts.request("r2", "train", 2, WeightsVersion(1, 7), ids, 2, {})
    for claim in store.groups.claim("a", 9):
        finish(store, claim)
    assert (
        store.groups.take(9, step=2) == ["r2/0", "r2/1"]
        and store.rollouts.is_requested("r2")
        and not store.rollouts.is_requested("r3")
    )
    store.journal.record_step(2, {}, Used(("r1/0", "r1/1")))
    store.journal.record_step(3, {}, Used(("r2/1",), {"r2/0": "surplus"}))
    store.rollouts.discard(2)  # the step that had used them is made again
    assert states(store, "r1") == ["consumed"] * 2 and store.groups.states("r2")["r2/0"] == ("ready", None, None)
    assert store.groups.take(9, step=2) == ["r2/0", "r2/1"]
    store.rollouts.discard(2, ahead=True)  # after a rollback its tasks are others
    assert states(store, "r1") == ["consumed"] * 2 and states(store, "r2") == []
    store.rollouts.discard(1)
    assert states(store, "r1") == []


def test_replayed_groups_are_recorded_with_their_step_and_forgotten_with_it(store: Store) -> None:
    for step in range(3):
        request(store, f"r{step}", step, groups=2)
        for claim in store.groups.claim("a", 9):
            finish(store, claim)
    store.journal.record_step(1, {}, Used(("r0/0", "r0/1")))
    store.journal.record_step(2, {}, Used(("r1/0",), {"r1/1": "all_right"}, ("r0/1",)))
    for _ in range(2):  # a checkpoint records its step too
        store.journal.record_step(3, {}, Used(("r2/0",), {"r2/1": "surplus"}, ("r0/1", "r1/0")))
    assert store.replays.counts(0, 3) == {"r0/1": 2, "r1/0": 1} and store.replays.counts(2, 3) == {"r0/1": 1, "r1/0": 1}
    assert store.replays.counts(0, 1) == {} and store.replays.counts(0, 2) == {"r0/1": 1}
    assert [group.group_id for group in store.replays.consumed(0, 3)] == ["r0/0", "r0/1", "r1/0", "r2/0"], (
        "none dropped"
    )
    assert store.groups.states("r0")["r0/1"] == ("consumed", 1, None), "its first use"
    store.journal.record_step(3, {}, Used(("r2/0",)))
    assert store.replays.counts(0, 3) == {"r0/1": 1}, "a step that is made again replaces its record"
    store.journal.record_step(3, {}, Used(("r2/0",), {}, ("r0/0",)))
    store.rollouts.discard(2)
    assert store.replays.counts(0, 9) == {"r0/1": 1}
    assert [group.group_id for group in store.replays.consumed(0, 9)] == ["r0/0", "r0/1", "r1/0"]
    store.rollouts.discard(0)
    assert store.replays.counts(0, 9) == {} and store.replays.consumed(0, 9) == []


def test_excluded_members_are_recorded_with_their_step_and_forgotten_with_it(store: Store) -> None:
    request(store, groups=2)
    for claim in store.groups.claim("a", 9):
        finish(store, claim)
    excluded = {("r0/0", 1): "duplicate", ("r0/1", 0): "empty"}
    for _ in range(2):
        store.journal.record_step(1, {}, Used(("r0/0", "r0/1"), excluded=excluded))
    assert store.journal.excluded(["r0/0", "r0/1"]) == excluded and store.journal.excluded(["r0/1"]) == {
        ("r0/1", 0): "empty"
    }
    store.rollouts.discard(1)
    assert store.journal.excluded(["r0/0", "r0/1"]) == excluded
    store.rollouts.discard(0)
    assert store.journal.excluded(["r0/0", "r0/1"]) == {}


def test_a_step_and_its_replays_are_one_transaction(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    request(store, groups=1)
    finish(store, store.groups.claim("a", 1)[0])
    store.journal.record_step(1, {}, Used(("r0/0",)))

    def broken(*args: Any) -> None:
        mark_used(*args)
        raise RuntimeError("killed here")

    mark_used = journal.mark_used
    monkeypatch.setattr(journal, "mark_used", broken)
    with pytest.raises(RuntimeError, match="killed here"):
        store.journal.record_step(2, {}, Used((), {}, ("r0/0",)))
    assert [step for step, _ in store.journal.steps()] == [1] and store.replays.counts(0, 9) == {}


def test_consumed_groups_come_in_one_order_with_their_accuracy(store: Store) -> None:
    """Not in a database's collation, nor as they were asked for; a greedy response is no member."""
    for name in ("train-000001", "train-000000-1", "train-000000"):
        request(store, name, groups=2, greedy=True)
    for claim in store.groups.claim("a", 9):
        members = [make_trajectory(claim, index) for index in claim.indices]
        if claim.position:
            members[2] = replace(members[2], reward=Reward(math.nan, "error"))
        assert store.groups.put(claim, members)
    names = [f"train-{name}/{i}" for name in ("000000", "000000-1", "000001") for i in range(2)]
    store.journal.record_step(4, {}, Used(tuple(reversed(names))))
    found = store.replays.consumed(3, 4)
    assert [group.group_id for group in found] == names and [group.accuracy for group in found] == [1.0, 0.5] * 3
    assert found[1] == UsedGroup("train-000000", 1, "train-000000/1", 4, 0.5)
    assert store.replays.consumed(4, 9) == store.replays.consumed(0, 3) == []


def test_unused_groups_lose_tokens_of_weights_that_a_resume_has_undone(store: Store) -> None:
    """Groups that were asked for with weights of 1 step; one was sampled with these, one with those of 3 steps."""
    versions = [WeightsVersion(1, n) for n in range(4)]
    for step, version in enumerate(versions):
        store.pacing.record_version(version, step)
    request(store, "train-000001", step=1, groups=3, version=versions[1])
    for number, claim in enumerate(store.groups.claim("a", 2)):
        own = replace(claim, version=versions[(1, 3)[number]])
        assert store.groups.put(claim, [make_trajectory(own, i) for i in claim.indices])
    assert [(group.group_id[-1], group.weights_step, group.ready) for group in store.pacing.unused()] == [
        ("0", 1, True),
        ("1", 1, True),
        ("2", 1, False),
    ]
    store.rollouts.discard(3)
    assert states(store, "train-000001") == ["ready", "ready", "pending"]
    store.rollouts.discard(2)
    assert states(store, "train-000001") == ["ready", "pending", "pending"]
    assert len(store.groups.trajectories("train-000001")) == 2
    assert store.groups.claim("b", 9) == []  # engines may have weights that were undone
    again = WeightsVersion(2, 0)
    store.pacing.record_version(again, 2)
    store.pacing.record_live(again)
    assert [claim.position for claim in store.groups.claim("b", 9)] == [1, 2]
    assert store.pacing.version_steps(versions) == {version: step for step, version in enumerate(versions)}


def test_evaluations_are_claimed_before_training_groups(store: Store) -> None:
    request(store, "r0", groups=2)
    store.rollouts.request("eval-1", "eval", 1, VERSION, store.tasks.ids("train")[:1], 2, {})
    assert [claim.rollout_id for claim in store.groups.claim("a", 2)] == ["r0", "eval-1"]
    assert [claim.rollout_id for claim in store.groups.claim("a", 2)] == ["r0"]


def test_an_evaluation_is_recorded_once_and_with_its_groups(store: Store) -> None:
    store.rollouts.request("eval-0", "eval", 0, VERSION, store.tasks.ids("train")[:3], 2, {})
    claims = store.groups.claim("a", 9)
    for claim in claims[:2]:
        finish(store, claim)
    assert store.evaluations.to_count() == []
    finish(store, claims[2])
    assert store.evaluations.to_count() == [("eval-0", 0, 2)] and not store.rollouts.is_complete("eval-0")
    assert store.groups.take(9, step=0) == []
    for accuracy in (0.5, 0.25):  # the second explorer was late
        store.journal.record_evaluation("a", "eval-0", {"rollout_id": "eval-0", "step": 0, "accuracy": accuracy})
    assert (
        store.rollouts.is_complete("eval-0")
        and states(store, "eval-0") == ["consumed"] * 3
        and store.evaluations.to_count() == []
    )
    assert [event["data"]["accuracy"] for event in store.journal.events("evaluation")] == [0.5]
    assert store.evaluations.read("eval-0")["accuracy"] == 0.5


def test_job_state_and_events(store: Store) -> None:
    assert store.journal.job_state() == "open"
    store.journal.close_job()
    assert store.journal.job_state() == "closed"
    store.journal.open_job()
    assert store.journal.job_state() == "open"
    store.journal.record_event("explorer", "retry", {"n": 1})
    store.journal.record_event("trainer", "evaluation", {"accuracy": 0.5})
    assert [event["kind"] for event in store.journal.events()] == ["retry", "evaluation"]
    assert store.journal.events("evaluation")[0]["data"] == {"accuracy": 0.5}


def test_a_memory_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="names no file"):
        Store("sqlite://")


def test_an_older_attempt_can_change_nothing(url: str) -> None:
    first = Store(url)
    first.begin_attempt(1)
    first.tasks.add("train", [make_task(i) for i in range(6)])
    request(first)
    old = Store(url, attempt=1)
    claims = old.groups.claim("a", 2)
    new = Store(url)
    new.begin_attempt(2)
    before = rows(url)
    for store in (old, first):
        for name, write in WRITES.items():
            with pytest.raises(FencedError, match=r"attempt 1 of the job, but .* attempt 2 has begun since"):
                write(store, claims)
            assert rows(url) == before, name
    with pytest.raises(FencedError):
        Store(url, attempt=1)
    for attempt in (1, 2):
        with pytest.raises(FencedError, match=f"attempt {attempt} cannot begin: .* has seen attempt 2"):
            Store(url).begin_attempt(attempt)
    assert rows(url) == before and old.rollouts.progress("r0") == (0, 6)
    unfenced, current = Store(url), Store(url, attempt=2)
    for name, write in WRITES.items():
        for store in (new, current, unfenced):
            write(store, claims)
            assert name != "journal.close_job" or store.journal.job_state() == "closed"
    for store in (first, old, new, unfenced, current):
        store.close()


def test_a_handle_that_outlives_attempts_writes_while_its_own_is_kept(url: str) -> None:
    store = Store(url)
    store.begin_attempt(1)
    explorer, rank = Store(url, attempt=1, outlives=True), Store(url, attempt=1)
    store.begin_attempt(2, 1)
    explorer.workers.beat("explorer-0")
    with pytest.raises(FencedError, match="attempt 2 has begun since"):
        rank.workers.beat("trainer")
    store.begin_attempt(3, 1)
    explorer.workers.beat("explorer-0")
    assert explorer.workers.beats() == {"explorer-0": 2}
    store.begin_attempt(4)
    with pytest.raises(FencedError, match="attempt 4 has begun since"):
        explorer.workers.beat("explorer-0")
    for handle in (store, explorer, rank):
        handle.close()


def test_an_attempt_that_never_began_can_make_nothing(url: str) -> None:
    with pytest.raises(FencedError, match="attempt 1 of the job, but .* none has begun"):
        Store(url, attempt=1)
    engine = database.open_engine(url)
    assert sqlalchemy.inspect(engine).get_table_names() == []
    engine.dispose()


def test_a_rollout_is_read_in_parts_of_limited_size(store: Store) -> None:
    request(store)
    for claim in store.groups.claim("a", 6)[:4]:
        finish(store, claim)
    ids = [f"r0/{i}" for i in range(4)]
    done = [[group_id] for group_id in ids]
    assert store.groups.ids("r0") == ids and store.groups.ids("none") == []
    assert store.groups.parts(ids, 1) == done and store.groups.parts(ids) == [ids] and store.groups.parts([]) == []
    one = store.groups.read(done[2])
    assert [(e.group_id, e.index) for e in one] == [("r0/2", 0), ("r0/2", 1)]
    size = sum(len(trajectory_to_row(e)["tensors"]) for e in one)
    assert store.groups.parts(ids, 2 * size) == [ids[:2], ids[2:]] and store.groups.parts(ids, 2 * size - 1) == done
    assert store.groups.array_bytes([*ids[:2], "none"]) == {"r0/0": size, "r0/1": size}


@pytest.mark.parametrize("written", ["now", "by an earlier version"])
def test_an_outline_has_all_but_the_values_of_arrays(store: Store, written: str) -> None:
    request(store, groups=1)
    [claim] = store.groups.claim("a", 1)
    finish(store, claim)
    if written != "now":
        rows = TRAJECTORIES.update().values(
            record=sqlalchemy.func.replace(TRAJECTORIES.c.record, "token_bounds", "other")
        )
        store.database.write(lambda connection, again: connection.execute(rows))
    [wanted, _] = store.groups.read(["r0/0"])
    [found, _] = outlines_of(store.groups.outline_rows(["r0/0"]))
    assert is_outline(found) and not is_outline(wanted)
    for turn, full in zip(found.turns, wanted.turns, strict=True):
        assert turn.token_bounds == full.token_bounds and len(turn) == len(full) and turn.spans == full.spans
        assert set(turn.token_ids.tolist()) == {-1}, "nothing reads it"
    arrays = store.groups.arrays({"r0/0": [0]})
    assert list(arrays) == [("r0/0", 0)]
    filled = with_arrays(found, arrays["r0/0", 0])
    assert not is_outline(filled) and trajectory_to_row(filled) == trajectory_to_row(wanted)
    damaged = {name: array[::-1] - 1 for name, array in arrays["r0/0", 0].items()}
    with pytest.raises(StoreDamagedError, match="trajectory 0 of group r0/0 are not those"):
        with_arrays(found, damaged)


def test_the_success_of_tasks_is_that_of_their_newest_used_group(store: Store) -> None:
    """Of four samples so many are right; None is an error, and a greedy answer is no sample."""
    for step, right in ((1, [4, 1]), (2, [2, 0, None])):
        request(store, f"r{step}", step=step - 1, groups=len(right), group_size=4, greedy=True)
        for claim, wanted in zip(store.groups.claim("a", 9), right, strict=True):
            answers = [make_trajectory(claim, i) for i in claim.indices]
            statuses = ["error" if wanted is None else "ok" if GREEDY < e.index < wanted else "wrong" for e in answers]
            given = [replace(e, reward=Reward(0.0, s)) for e, s in zip(answers, statuses, strict=True)]  # type: ignore[arg-type]
            assert store.groups.put(claim, given)
    assert store.groups.successes(0, 9) == {}, "no step has used them"
    store.journal.record_step(1, {}, Used(("r1/0",), {"r1/1": "all_wrong"}))
    store.journal.record_step(2, {}, Used(("r2/0", "r2/1", "r2/2")))
    assert store.groups.successes(0, 1) == {"train/0": 1.0, "train/1": 0.25}
    assert store.groups.successes(0, 2) == {"train/0": 0.5, "train/1": 0.0}
    assert store.groups.successes(1, 1) == {}
    store.rollouts.discard(1)
    assert store.groups.successes(0, 2) == {"train/0": 1.0, "train/1": 0.25}
    assert store.facts.right_shares(0, 2) == store.groups.successes(0, 2)
    assert store.facts.right_shares(0, 1) == store.groups.successes(0, 1) != store.facts.right_shares(1, 2)


def test_an_evaluation_and_successes_scan_no_table_of_groups(tmp_path: Path) -> None:
    """After every finished group, at every step and every second; read from SQLite's plans."""
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.tasks.add("train", [make_task(i) for i in range(6)])
    store.rollouts.request("eval-0", "eval", 0, VERSION, store.tasks.ids("train"), 2, {})
    statements: list[tuple[str, Any]] = []
    sqlalchemy.event.listen(
        store.database.reader,
        "before_cursor_execute",
        lambda connection, cursor, statement, parameters, *_: statements.append((statement, parameters)),
    )
    assert store.evaluations.to_count("eval-0") == [] and store.groups.successes(0, 9) == {}
    assert store.evaluations.uncounted() == {"eval-0": 0}
    with sqlite3.connect(tmp_path / "store.db") as database:
        of_groups = [pair for pair in statements if "groups" in pair[0]]
        assert len(of_groups) == 3
        for statement, parameters in of_groups:
            plan = [row[3] for row in database.execute(f"explain query plan {statement}", parameters)]
            assert not [step for step in plan if step.startswith("SCAN groups")], plan
            assert [step for step in plan if "groups_in_order" in step or "groups_by_use" in step], plan
    store.close()


def test_a_claim_sorts_no_pending_groups(tmp_path: Path) -> None:
    """However many there are, under the write lock; read from SQLite's plans."""
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.tasks.add("train", [make_task(i) for i in range(6)])
    request(store, "r0")
    request(store, "r1")
    statements: list[tuple[str, Any]] = []
    sqlalchemy.event.listen(
        store.database.writer,
        "before_cursor_execute",
        lambda connection, cursor, statement, parameters, *_: statements.append((statement, parameters)),
    )
    assert [claim.group_id for claim in store.groups.claim("a", 8)] == [
        *(f"r0/{i}" for i in range(6)),
        *(f"r1/{i}" for i in range(2)),
    ]
    of_pending = [pair for pair in statements if pair[0].startswith("SELECT") and "pending" in pair[1]]
    assert len(of_pending) == 5, "three looks for rollouts, two for groups"
    with sqlite3.connect(tmp_path / "store.db") as database:
        for statement, parameters in of_pending:
            plan = [row[3] for row in database.execute(f"explain query plan {statement}", parameters)]
            assert any("groups_in_order (state=? AND rollout_id" in step for step in plan), plan
            assert not any("B-TREE" in step for step in plan), plan
    store.close()


def test_a_rollout_reads_the_tasks_that_it_asks_for_alone(store: Store) -> None:
    """Before it takes the write lock, and in statements of limited size."""
    statements: list[str] = []
    for engine in (store.database.reader, store.database.writer):
        sqlalchemy.event.listen(
            engine, "before_cursor_execute", lambda connection, cursor, statement, *_: statements.append(statement)
        )
    request(store, "r1", groups=2)
    of_tasks = [statement for statement in statements if "FROM tasks" in statement]
    assert of_tasks and all("WHERE" in statement for statement in of_tasks)
    first_write = next(i for i, statement in enumerate(statements) if statement.startswith(("DELETE", "INSERT")))
    assert all(statements.index(statement) < first_write for statement in of_tasks)


def test_every_write_is_in_the_table_of_writes(store: Store) -> None:
    reads = {
        "engines.own",
        "engines.programs",
        "engines.read",
        "engines.room",
        "evaluations.read",
        "evaluations.to_count",
        "evaluations.uncounted",
        "experts.count",
        "experts.imports",
        "experts.read",
        "experts.scored_trajectories",
        *(f"facts.{name}" for name in ("groups", "last_step", "right_shares", "seeds", "steps_of_versions")),
        *(f"facts.{name}" for name in ("task_order", "tasks")),
        "groups.array_bytes",
        "groups.arrays",
        "groups.ids",
        "groups.images",
        "groups.outline_rows",
        "groups.parts",
        "groups.read",
        "groups.states",
        "groups.successes",
        "groups.take",
        "groups.trajectories",
        "groups.whole",
        "journal.events",
        "journal.excluded",
        "journal.has_begun",
        "journal.job_state",
        "journal.last_step",
        "journal.steps",
        "late.awaiting",
        "late.count",
        "pacing.live_step",
        "pacing.num_asked",
        "pacing.unused",
        "pacing.version_steps",
        "replays.consumed",
        "replays.counts",
        "rollouts.is_complete",
        "rollouts.is_requested",
        "rollouts.metrics",
        "rollouts.progress",
        "rollouts.task_sources",
        "segments.reached",
        "segments.read",
        "selection.count",
        "selection.glances",
        "selection.group",
        "selection.groups",
        "selection.members",
        "selection.needed_again",
        "selection.newest",
        "selection.tasks_named",
        "tasks.changed",
        "tasks.data_sources",
        "tasks.ids",
        "tasks.images",
        "tasks.read",
        "workers.beats",
        "workers.busy_times",
    }
    parts = {name: part for name, part in vars(store).items() if name not in ("program", "database")}
    methods = {f"{name}.{method}" for name, part in parts.items() for method in vars(type(part))}
    methods = {method for method in methods if "._" not in method} | {"sync"}
    assert methods - reads - {"journal.run_id"} == set(WRITES)


def test_a_locked_file_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.01)
    patient, hasty = (Store(f"sqlite:///{tmp_path}/store.db", outage_s=seconds) for seconds in (300.0, 0.0))
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(JobError, match=r"could not be used for 0.01 s \(store.outage_s=0\): database is locked; bring"):
        hasty.journal.record_step(1, {})
    writing = threading.Thread(target=patient.journal.record_event, args=("trainer", "kept", {}))
    writing.start()
    while not any("database is locked; trying again for up to 300 s" in message for message in caplog.messages):
        time.sleep(0.005)
    other.execute("COMMIT")
    writing.join()
    assert [event["kind"] for event in hasty.journal.events()] == ["kept"]
    assert "back after" in caplog.messages[-1]
    other.close()


SECRET = "p4ss"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://me@127.0.0.1:1/x", ["postgresql://me@127.0.0.1:1/x cannot be reached", "Connection refused"]),
        ("postgresql+nodriver://me@h/x", ["postgresql+nodriver://me@h/x", "write sqlite:///PATH"]),
        ("mysql://me@h/x", ["mysql"]),
        ("env://NOT_SET", ["env://NOT_SET", "NOT_SET is not in the environment"]),
        ("env://TEST_URL", ["postgresql://me:***@127.0.0.1:1/x cannot be reached"]),
        ("env://TEST_NONE", ["env://TEST_NONE is no database that can be opened"]),
        (
            f"postgresql://me:{SECRET}@h1:5432,h2:5432/x",
            ["me:***@h1:5432,h2:5432/x is", "(its port is not a number)", "host=A:5432&host=B:5432"],
        ),
        (
            f"postgresql://me:word@h1:{SECRET}@h2/x?sslpassword={SECRET}",
            ["me:***@h2/x?sslpassword=*** is", "(its port is not a number)"],
        ),
    ],
)
def test_urls_that_cannot_work(monkeypatch: pytest.MonkeyPatch, url: str, words: list[str]) -> None:
    monkeypatch.setenv("TEST_URL", f"postgresql://me:{SECRET}@127.0.0.1:1/x?sslpassword={SECRET}")
    monkeypatch.setenv("TEST_NONE", SECRET)
    with pytest.raises(ConfigError) as raised:
        check_url(url)
    assert all(word in str(raised.value) for word in words), raised.value
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{SECRET}@h1:5432,h2:5432/x?sslpassword={SECRET}",
        f"postgresql://me:{SECRET}@/x?host=h1:5432&host=h2:5432&password={SECRET}",
    ],
)
def test_no_password_goes_to_another_node(url: str) -> None:
    sent = without_password(url)
    assert SECRET not in sent and "h1" in sent and "h2" in sent
    assert SECRET not in shown(url)


def test_a_file_is_one_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_url(f"sqlite:///{tmp_path}/store.db")
    check_url(OWN_SERVER, nodes=2)
    monkeypatch.setenv("TEST_URL", f"sqlite:///{tmp_path}/store.db")
    for url in ("env://TEST_URL", f"sqlite:///{tmp_path}/store.db"):
        with pytest.raises(
            ConfigError, match=r"store.url=sqlite:///.*/store.db is a file, which 2 nodes would open.*store=postgres"
        ):
            check_url(url, nodes=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{SECRET}@h/d",
        f"postgresql://h/d?password={SECRET}&user=me",
        f"postgresql://me:{SECRET}/@h:1/d",
        f"postgresql://me@cloud:{SECRET}@h/d",
        f"postgresql://me:a@{SECRET}@h/d",
        f"postgresql://h/d?password=a@{SECRET}&user=me",
    ],
)
def test_a_password_is_never_written_down(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("TEST_URL", url)
    for setting in (url, "${oc.env:TEST_URL}"):
        with pytest.raises(
            ConfigError, match=r"store.url=postgresql://.*\*\*\*.* holds a password.*PGPASSWORD.*env://"
        ) as raised:
            compose(["experiment=quickstart", f"store.url='{setting}'"])
        assert SECRET not in str(raised.value)
    assert compose(["experiment=quickstart", "store.url=env://TEST_URL"]).store.url == "env://TEST_URL"
    assert compose(["experiment=quickstart", "store=postgres"]).store.url == OWN_SERVER


WORKERS = """
import json, os, sys, traceback
from megarl.buffer.store import Store
from tests.stores import finish
def work(worker, ready, go):
    store = Store(sys.argv[1])
    claims, done = store.groups.claim(worker, 2), []
    os.write(ready, b"r")
    os.read(go, 1)  # neither goes on before both hold a claim
    while claims:
        for claim in claims:
            assert finish(store, claim)
            done.append(claim.group_id)
        claims = store.groups.claim(worker, 2)
    sys.stdout.write(json.dumps(done) + "\\n"); sys.stdout.flush()
(ready, said), (go, tell), pids = os.pipe(), os.pipe(), []
for worker in "ab":
    pids.append(os.fork())
    if pids[-1] == 0:
        try:
            work(worker, said, go)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
for _ in pids:
    os.read(ready, 1)
os.write(tell, b"gg")
sys.exit(any([os.waitpid(pid, 0)[1] for pid in pids]))
"""
"""Forked from one process, which opens no store: its imports take a second."""


def test_two_processes_never_claim_the_same_group(store: Store, url: str) -> None:
    store.tasks.add("train", [make_task(i) for i in range(60)])
    request(store, groups=60)
    ended = subprocess.run([sys.executable, "-c", WORKERS, url], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    outputs = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(outputs) == 2
    counts = Counter(group for output in outputs for group in output)
    assert counts == {f"r0/{i}": 1 for i in range(60)}
    assert all(outputs), "both held a claim when they went on"
    assert store.rollouts.progress("r0") == (60, 60) and len(store.groups.trajectories("r0")) == 120


OPENERS = """
import os, sys, traceback
from megarl.buffer.store import Store
begin, begun = os.pipe()
pids = []
for _ in range(3):
    pids.append(os.fork())
    if pids[-1] == 0:
        try:
            os.read(begin, 1)
            Store(sys.argv[1]).journal.open_job()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
os.write(begun, b"bbb")
sys.exit(any([os.waitpid(pid, 0)[1] for pid in pids]))
"""


def test_processes_open_a_new_store_together(url: str) -> None:
    ended = subprocess.run([sys.executable, "-c", OPENERS, url], stderr=subprocess.PIPE, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
