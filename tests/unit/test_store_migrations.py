"""Stores of earlier versions are opened, read and repaired."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from megarl.core.schema import GREEDY, WeightsSpan, WeightsVersion
from megarl.explore.store import Store, repair
from megarl.explore.store.checksums import sealed
from megarl.explore.store.codec import dumps
from megarl.explore.store.tables import JOB, TRAJECTORIES
from tests.stores import VERSION, finish, make_task, request

NUM_GROUPS = 6


INDEXES = {"groups_by_rollout", "groups_in_order", "groups_by_use"}


def as_schema_6(path: Path) -> None:
    """Make a store what that version wrote: with its indexes of states."""
    store = sqlite3.connect(path)
    store.execute("drop index groups_in_order")
    store.execute("create index groups_by_state on groups (state)")
    store.execute("create index groups_by_progress on groups (rollout_id, state)")
    number(store, 6)


def as_schema_5(path: Path) -> None:
    """Make a store what that version wrote: without the indexes of schema 6."""
    as_schema_6(path)
    store = sqlite3.connect(path)
    for index in ("groups_by_progress", "groups_by_use"):
        store.execute(f"drop index {index}")
    number(store, 5)


def as_schema_4(path: Path) -> None:
    """Make a store what that version wrote: groups that are done, whatever has become of them."""
    as_schema_5(path)
    store = sqlite3.connect(path)
    for table, column in (("groups", "used_by"), ("groups", "reason"), ("rollouts", "weights_step")):
        store.execute(f"alter table {table} drop column {column}")
    store.execute("update groups set state = 'done'")
    number(store, 4)


def number(store: sqlite3.Connection, schema: int) -> None:
    """Write the number of the schema, and close."""
    store.row_factory = sqlite3.Row
    key = dict(store.execute("select * from job where key = 'schema'").fetchone()) | {"value": str(schema)}
    store.execute(
        "update job set value = ?, checksum = ? where key = 'schema'", (key["value"], sealed(JOB, key)["checksum"])
    )
    store.commit()
    store.close()


def as_schema_3(path: Path) -> None:
    """Make a store what that version wrote: rows called experiences, with one response each."""
    as_schema_4(path)
    store = sqlite3.connect(path)
    store.execute("drop index trajectories_by_rollout")
    store.execute("alter table trajectories rename to experiences")
    store.execute("create index experiences_by_rollout on experiences (rollout_id)")
    store.execute("create table trained (group_id text primary key, old_logp blob)")
    store.row_factory = sqlite3.Row
    for row in store.execute("select * from experiences").fetchall():
        record = json.loads(row["record"]) | {"finish_reason": "stop"}
        del record["turns"]
        # earlier still, a segment had a fifth value
        record["segments"] = [[0, 1, str(VERSION), "abort", True], [1, 3, "1.2", "stop"]]
        arrays = {
            "prompt_ids": np.arange(4, dtype=np.int32),
            "response_ids": np.array([7, 8, 9], dtype=np.int32),
            "response_mask": np.ones(3, dtype=np.bool_),
            "engine_logp": np.array([-1, -2, -3], dtype=np.float32),
        }
        new = sealed(TRAJECTORIES, dict(row) | {"record": dumps(record), "tensors": save(arrays)})
        store.execute(
            'update experiences set record = ?, tensors = ?, checksum = ? where group_id = ? and "index" = ?',
            (new["record"], new["tensors"], new["checksum"], row["group_id"], row["index"]),
        )
    number(store, 3)


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A store of schema 3 with one rollout, a greedy answer in each group."""
    path = tmp_path / "store.db"
    store = Store(f"sqlite:///{path}")
    store.add_tasks("train", [make_task(i) for i in range(NUM_GROUPS)])
    request(store, groups=NUM_GROUPS, greedy=True)
    assert all(finish(store, claim) for claim in store.claim_groups("a", NUM_GROUPS))
    store.close()
    as_schema_3(path)
    return path


def check_rollout(store: Store) -> None:
    found = store.trajectories("r0")
    assert len(found) == 2 * NUM_GROUPS
    for one in found:
        prompt, response = one.turns
        assert (prompt.author, prompt.token_ids.tolist(), prompt.follows) == ("user", [0, 1, 2, 3], -1)
        assert (response.author, response.token_ids.tolist(), response.follows) == ("model", [7, 8, 9], 0)
        assert response.logp is not None and response.logp.tolist() == [-1, -2, -3]
        assert response.spans == (WeightsSpan(0, 1, VERSION), WeightsSpan(1, 3, WeightsVersion(1, 2)))
        assert one.finish_reason == "stop" and one.metadata == {"note": "ä"}
        assert one.greedy is not None and one.greedy.index == GREEDY


def names(path: Path) -> set[str]:
    with sqlite3.connect(path) as store:
        return {name for (name,) in store.execute("select name from sqlite_master")}


def test_a_store_of_the_schema_before_goes_on(earlier: Path) -> None:
    store = Store(f"sqlite:///{earlier}")
    check_rollout(store)
    request(store, "r1", step=1)
    assert all(finish(store, claim) for claim in store.claim_groups("a", NUM_GROUPS))
    assert len(store.trajectories("r1")) == 2 * NUM_GROUPS
    store.close()
    assert {"trajectories", "trajectories_by_rollout"} <= names(earlier)
    assert not {"experiences", "experiences_by_rollout", "trained"} & names(earlier)
    Store(f"sqlite:///{earlier}").close()  # and once more


@pytest.mark.parametrize("earlier_schema", [as_schema_5, as_schema_6])
def test_a_store_of_an_earlier_schema_gets_todays_indexes(
    tmp_path: Path, earlier_schema: Callable[[Path], None]
) -> None:
    path = tmp_path / "store.db"
    store = Store(f"sqlite:///{path}")
    store.add_tasks("train", [make_task(i) for i in range(NUM_GROUPS)])
    request(store, groups=NUM_GROUPS)
    store.close()
    earlier_schema(path)
    assert {name for name in names(path) if name.startswith("groups_")} != INDEXES
    store = Store(f"sqlite:///{path}")
    assert store.progress("r0") == (0, NUM_GROUPS)
    store.close()
    assert {name for name in names(path) if name.startswith("groups_")} == INDEXES


def test_it_is_read_without_a_change(earlier: Path) -> None:
    before = earlier.read_bytes()
    store = Store(f"sqlite:///{earlier}", read_only=True)
    check_rollout(store)
    store.close()
    assert earlier.read_bytes() == before


def test_it_is_repaired(earlier: Path) -> None:
    assert repair.fault(earlier) is None
    repair.rebuild(earlier)
    store = Store(f"sqlite:///{earlier}")
    check_rollout(store)
    store.close()


def test_groups_of_schema_4_that_recorded_steps_had_trained_on_are_consumed(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = Store(f"sqlite:///{path}")
    store.add_tasks("train", [make_task(i) for i in range(2)])
    for step in range(3):
        request(store, f"r{step}", step, groups=2)
    assert all(finish(store, claim) for claim in store.claim_groups("a", 6))
    store.record_step(2, {"reward": 1.0})
    store.close()
    as_schema_4(path)
    read_only = Store(f"sqlite:///{path}", read_only=True)
    assert len(read_only.trajectories("r2")) == 4 and read_only.progress("r2") == (2, 2)
    read_only.close()
    store = Store(f"sqlite:///{path}")
    consumed = [set(store.group_states(f"r{step}").values()) for step in range(3)]
    assert consumed == [{("consumed", 1, None)}, {("consumed", 2, None)}, {("ready", None, None)}]
    assert store.take(9, step=2, min_weights=2) == ["r2/0", "r2/1"]
    store.close()
