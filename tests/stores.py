"""Tasks, trajectories and writes for the tests of the store. Imports no pytest: processes that a test starts use it
too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sqlalchemy import select

from megarl.buffer.store import Claim, EndedGroup, ExpertExperience, GivenReward, Store, Used
from megarl.buffer.store.database import open_engine
from megarl.buffer.store.engines import BusyTime
from megarl.buffer.store.tables import METADATA
from megarl.core.schema import Reward, Segment, Task, Trajectory, WeightsSpan, WeightsVersion, digest_of
from megarl.engines.fleet import EngineTurn
from tests.engine_rows import serving_row
from tests.trajectories import one_turn

VERSION = WeightsVersion(0, 3)


def make_task(i: int, split: str = "train") -> Task:
    messages = ({"role": "user", "content": f"{i} + 1 ="},)
    return Task(f"{split}/{i}", "reasoning_gym/chain_sum", messages, "math", {"ground_truth": str(i + 1)}, {"index": i})


def expert(i: int, row: int | None = None, **teacher: Any) -> ExpertExperience:
    task = replace(make_task(i), task_id=f"expert/{i if row is None else row}", response=str(i + 1))
    return ExpertExperience(task, **teacher)


def make_trajectory(claim: Claim, index: int, length: int = 4) -> Trajectory:
    return Trajectory(
        rollout_id=claim.rollout_id,
        task_id=claim.task.task_id,
        group_id=claim.group_id,
        index=index,
        group_size=claim.group_size,
        turns=one_turn(
            range(5), [claim.position] * length, np.linspace(-1, 0, length, dtype=np.float32), version=claim.version
        ),
        reward=Reward(1.0, "ok", {"format": 0.5}),
        metadata={"note": "ä"},
    )


def make_segment(index: int, turn: int = 0, start: int = 0, tokens: int = 4, **fields: Any) -> Segment:
    values = {"version": VERSION, "finish_reason": None, "context": digest_of(np.arange(5, dtype=np.int32))} | fields
    return Segment(
        index,
        turn,
        start,
        values["context"],
        np.arange(start, start + tokens, dtype=np.int32),
        np.linspace(-1, 0, tokens, dtype=np.float32),
        (WeightsSpan(0, tokens, values["version"]),),
        values["finish_reason"],
        routing=values.get("routing"),
    )


def finish(store: Store, claim: Claim) -> bool:
    return store.groups.put(claim, [make_trajectory(claim, i) for i in claim.indices], {"samples": 2.0})


def request(
    store: Store,
    name: str = "r0",
    step: int = 0,
    groups: int = 6,
    group_size: int = 2,
    greedy: bool = False,
    version: WeightsVersion = VERSION,
) -> None:
    ids = store.tasks.ids("train")[:groups]
    sampling = {"temperature": 0.7} | ({"greedy": True} if greedy else {})
    store.rollouts.request(name, "train", step, version, ids, group_size, sampling)


WRITES: dict[str, Callable[[Store, Sequence[Claim]], Any]] = {
    "tasks.add": lambda store, claims: store.tasks.add("other", [make_task(9, "other")]),
    "experts.import_sources": lambda store, claims: store.experts.import_sources([("a.jsonl", [expert(0), expert(1)])]),
    "experts.replace_source": lambda store, claims: store.experts.replace_source("b.jsonl", [expert(1), expert(2)]),
    "rollouts.request": lambda store, claims: request(store, "r9", step=9),
    "pacing.record_version": lambda store, claims: store.pacing.record_version(WeightsVersion(9, 9), 9),
    "workers.record_busy": lambda store, claims: store.workers.record_busy("a", BusyTime(1.0, None, 2.0)),
    "pacing.record_live": lambda store, claims: store.pacing.record_live(WeightsVersion(9, 9)),
    "segments.append": lambda store, claims: store.segments.append([(claims[0], make_segment(0))]),
    "segments.forget": lambda store, claims: store.segments.forget(claims[0], 1),
    "segments.reach": lambda store, claims: store.segments.reach(claims[0], 1),
    "groups.claim": lambda store, claims: store.groups.claim("a", 1),
    "groups.put": lambda store, claims: finish(store, claims[0]),
    "groups.put_all": lambda store, claims: store.groups.put_all(
        [EndedGroup(claim, [make_trajectory(claim, i) for i in claim.indices]) for claim in claims[1:3]]
    ),
    "late.give": lambda store, claims: store.late.give([GivenReward("r0/3", 0, "token", Reward(1.0, "ok"))]),
    "late.stop_waiting": lambda store, claims: store.late.stop_waiting(["r0/3"]),
    "workers.beat": lambda store, claims: store.workers.beat("a"),
    "groups.release": lambda store, claims: store.groups.release("a"),
    "journal.record_step": lambda store, claims: store.journal.record_step(
        1, {"reward": 1.0}, Used(("r0/4",), {"r0/5": "surplus"}, ("r0/3",), {("r0/4", 1): "duplicate"})
    ),
    "journal.record_evaluation": lambda store, claims: store.journal.record_evaluation("a", "r0", {"step": 1}),
    "journal.record_event": lambda store, claims: store.journal.record_event("trainer", "evaluation", {"step": 1}),
    "engines.register": lambda store, claims: store.engines.register([serving_row(0, "http://e", wanted_workers=2)]),
    "engines.scale": lambda store, claims: store.engines.scale("train", 3),
    "engines.order_away": lambda store, claims: store.engines.order_away([0]),
    "engines.turn": lambda store, claims: store.engines.turn([0], EngineTurn.HERE),
    "engines.delivered": lambda store, claims: store.engines.delivered({("train", 0): 1}, WeightsVersion(1, 1)),
    "engines.hold": lambda store, claims: store.engines.hold([("train", 0)], "r0"),
    "engines.free": lambda store, claims: store.engines.free(),
    "engines.note": lambda store, claims: store.engines.note([serving_row(0, "http://f", done=1)]),
    "engines.remove": lambda store, claims: store.engines.remove(0),
    "journal.record_steps": lambda store, claims: store.journal.record_steps({2: {"reward": 1.0}, 3: {}}),
    "journal.set_run_id": lambda store, claims: store.journal.set_run_id("r" * 32),
    "sync": lambda store, claims: store.sync(),
    "journal.open_job": lambda store, claims: store.journal.open_job(),
    "journal.close_job": lambda store, claims: store.journal.close_job(),
    "rollouts.discard": lambda store, claims: store.rollouts.discard(0),
    "selection.delete_trajectories": lambda store, claims: store.selection.delete_trajectories(["r0/4", "r0/5"]),
    "evaluations.withdraw": lambda store, claims: store.evaluations.withdraw("r0"),
}
"""Every write of a store that holds ``claims`` on the rollout r0, by the method's name."""


def rows(url: str, leave_out: Sequence[str] = ()) -> dict[str, list[tuple[Any, ...]]]:
    """All that a database holds, by table, sorted; without the columns ``leave_out``."""
    engine = open_engine(url)
    with engine.connect() as connection:
        found = {
            table.name: sorted(
                tuple(row) for row in connection.execute(select(*(c for c in table.c if c.name not in leave_out)))
            )
            for table in METADATA.sorted_tables
        }
    engine.dispose()
    return found
