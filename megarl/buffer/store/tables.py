"""The tables, in the SQL that SQLite and PostgreSQL share. JSON is kept as text, tensors as safetensors bytes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, LargeBinary, MetaData, String, Table, Text

T = TypeVar("T")

METADATA = MetaData()
SCHEMA, SCHEMA_KEY = 16, "schema"
"""Number of these tables, and its key in ``job``. Stores with another number are refused, except those in
``REMADE``."""

IDS = 1000
"""Most ids in one statement."""


class GroupState(StrEnum):
    """Life of a group in the buffer, in this order; the last two are committed with a step."""

    PENDING = "pending"
    """Requested."""
    CLAIMED = "claimed"
    """Claimed by an explorer."""
    AWAITING = "awaiting"
    """All trajectories are stored; rewards arrive later."""
    READY = "ready"
    """Whole: all trajectories are stored, with their rewards."""
    CONSUMED = "consumed"
    """Trained on by a step, or counted by an evaluation."""
    DROPPED = "dropped"
    """Dropped by a step, for ``reason``."""


OPEN = (GroupState.PENDING, GroupState.CLAIMED, GroupState.AWAITING, GroupState.READY)
"""States of groups not yet used by a step or counted by an evaluation."""
WHOLE = (GroupState.READY, GroupState.CONSUMED, GroupState.DROPPED)
"""States of groups with trajectories and rewards."""
SAMPLED = (GroupState.AWAITING, *WHOLE)
"""States of groups with trajectories."""


TASKS = Table(
    "tasks",
    METADATA,
    Column("task_id", String, primary_key=True),
    Column("split", String, nullable=False),
    Column("position", Integer, nullable=False),
    Column("data_source", String, nullable=False),
    Column("prompt", Text, nullable=False),
    Column("ability", String, nullable=False),
    Column("reward_model", Text, nullable=False),
    Column("extra_info", Text, nullable=False),
    Column("response", Text),
    Index("tasks_by_split", "split", "position"),
)

TASK_IMAGES = Table(
    "task_images",
    METADATA,
    Column("task_id", String, primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("image", LargeBinary, nullable=False),  # the file
)

EXPERT_IMPORTS = Table(
    "expert_imports",
    METADATA,
    Column("number", Integer, primary_key=True, autoincrement=False),  # from 1
    Column("token", String, nullable=False, unique=True),  # of the call that wrote it
    Column("source", String, nullable=False),  # path of a file, or run:DIR
    Column("imported_at", Float, nullable=False),
    Column("given", Integer, nullable=False),  # rows of the source
    Column("added", Integer, nullable=False),  # new rows
    Column("by_setting", Integer, nullable=False),  # 1: of taskset.expert, which replaces its earlier rows
)

EXPERTS = Table(
    "experts",
    METADATA,
    Column("experience_id", String, primary_key=True),  # digest of prompt and response
    Column("number", Integer, nullable=False),  # of its import
    Column("position", Integer, nullable=False),  # its row in the source, from 0
    Column("record", Text, nullable=False),
    Column("score", Float),
    Column("teacher_logp", LargeBinary),  # float32, little-endian, one per token of the response
    Column("tokenizer", String),  # digest of the tokenizer whose tokens have these log-probs
    Index("experts_in_order", "number", "position"),
)

ROLLOUTS = Table(
    "rollouts",
    METADATA,
    Column("sequence", Integer, primary_key=True, autoincrement=True),
    Column("rollout_id", String, nullable=False, unique=True),
    Column("kind", String, nullable=False),
    Column("step", Integer, nullable=False),
    Column("version", String, nullable=False),
    Column("num_groups", Integer, nullable=False),
    Column("group_size", Integer, nullable=False),
    Column("sampling", Text, nullable=False),
    Column("requested_at", Float, nullable=False),
)

STALE = -1
"""Value of ``versions.live`` for versions from before the trainer's last start."""

VERSIONS = Table(
    "versions",
    METADATA,
    Column("version", String, primary_key=True),  # attempt.n
    Column("attempt", Integer, nullable=False),
    Column("n", Integer, nullable=False),
    Column("step", Integer, nullable=False),  # steps of training in these weights
    Column("published_at", Float, nullable=False),
    Column("live", Integer, nullable=False),  # 1 once every engine has proven to have them; STALE after a start
    Index("versions_in_order", "attempt", "n"),
    Index("versions_by_live", "live"),
)
"""Weights published to engines in any attempt. A resume discards the weights of later steps: unused groups keep no
tokens of them."""

GROUPS = Table(
    "groups",
    METADATA,
    Column("group_id", String, primary_key=True),
    Column("rollout_id", String, nullable=False),
    Column("position", Integer, nullable=False),
    Column("task_id", String, nullable=False),
    Column("state", String, nullable=False),  # a GroupState
    Column("claimed_by", String),
    Column("claim_token", String),
    Column("attempt", Integer, nullable=False),
    Column("ended_at", Float),  # when its trajectories were put
    Column("reached", Integer),  # steps in the weights whose budget of tokens its trajectories have used up
    Column("used_by", Integer),  # number of the step, from 1, that consumed or dropped it; replays: REPLAYS
    Column("reason", String),  # why it was dropped
    Index("groups_by_rollout", "rollout_id", "position"),
    Index("groups_in_order", "state", "rollout_id", "position"),
    Index("groups_by_use", "used_by"),
)

REPLAYS = Table(
    "replays",
    METADATA,
    Column("step", Integer, primary_key=True, autoincrement=False),  # number of the step, from 1
    Column("group_id", String, primary_key=True),
)
"""Consumed groups replayed by a later step."""

EXCLUDED = Table(
    "excluded",
    METADATA,
    Column("step", Integer, primary_key=True, autoincrement=False),  # number of the step, from 1
    Column("group_id", String, primary_key=True),
    Column("index", Integer, primary_key=True, autoincrement=False),
    Column("reason", String, nullable=False),
    Index("excluded_by_group", "group_id"),
)
"""Trajectories that a step excluded from the groups it trained on."""

TRAJECTORIES = Table(
    "trajectories",
    METADATA,
    Column("group_id", String, primary_key=True),
    Column("index", Integer, primary_key=True),
    Column("rollout_id", String, nullable=False),
    Column("task_id", String, nullable=False),
    Column("score", Float),  # NULL where there is no verdict (error, timeout)
    Column("status", String, nullable=False),
    Column("record", Text, nullable=False),
    Column("tensors", LargeBinary, nullable=False),
    Index("trajectories_by_rollout", "rollout_id"),
)

GROUP_IMAGES = Table(
    "group_images",
    METADATA,
    Column("group_id", String, primary_key=True),
    Column("digest", String, primary_key=True),  # of the file
    Column("rollout_id", String, nullable=False),
    Column("image", LargeBinary, nullable=False),  # the file
    Index("group_images_by_rollout", "rollout_id"),
)
"""Images of a group's trajectories that are not its task's; deleted with the trajectories."""

SEGMENTS = Table(
    "segments",
    METADATA,
    Column("group_id", String, primary_key=True),
    Column("index", Integer, primary_key=True),
    Column("turn", Integer, primary_key=True),  # number of the response among those that the trajectory asked for
    Column("start", Integer, primary_key=True),  # tokens of the response before it
    Column("rollout_id", String, nullable=False),
    Column("record", Text, nullable=False),
    Column("tensors", LargeBinary, nullable=False),
    Index("segments_by_rollout", "rollout_id"),
)
"""Tokens of unfinished trajectories, deleted once their group is whole."""

ROLLOUT_METRICS = Table(
    "rollout_metrics",
    METADATA,
    Column("rollout_id", String, primary_key=True),
    Column("worker", String, primary_key=True),
    Column("metrics", Text, nullable=False),
)

STEPS = Table(
    "steps",
    METADATA,
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("recorded_at", Float, nullable=False),
    Column("metrics", Text, nullable=False),
)

EVENTS = Table(
    "events",
    METADATA,
    Column("event_id", Integer, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    Column("source", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("data", Text, nullable=False),
)

ENGINES = Table(
    "engines",
    METADATA,
    Column("program", String, primary_key=True),  # of the job that owns it
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("wanted", Boolean, nullable=False),
    Column("wanted_workers", Integer, nullable=False),
    Column("order", Integer, nullable=False),
    Column("turn", String, nullable=False),  # an EngineTurn
    Column("turn_order", Integer, nullable=False),
    Column("holds_for", String, nullable=False),
    Column("state", String, nullable=False),  # an EngineStatus
    Column("start", BigInteger, nullable=False),
    Column("url", String, nullable=False),
    Column("workers", Integer, nullable=False),
    Column("done", Integer, nullable=False),
    Column("done_turn", Integer, nullable=False),
    Column("refused", String, nullable=False),
)
"""Engines of all running jobs, as ``EngineRow``; each start of a job rewrites its rows."""
ENGINE_WEIGHTS = Table(
    "engine_weights",
    METADATA,
    Column("program", String, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("what", String, primary_key=True),  # the model's own, or an adapter
    Column("version", String, nullable=False),
    Column("start", BigInteger, nullable=False),
)
"""Weights that engines have proven to have, as ``ProvenWeights``."""

WORKERS = Table(
    "workers",
    METADATA,
    Column("name", String, primary_key=True),  # of an explorer, or of a program's supervisor
    Column("program", String, nullable=False),
    Column("attempt", Integer),
    Column("beat", Integer, nullable=False),  # heartbeats so far
)
"""Heartbeats. Readers measure with their own clock how long a number stays unchanged."""

REMADE = {"14": (ENGINES,), "15": (ENGINES,)}
"""Number of an earlier schema -> tables that are dropped and recreated. Each start of a job rewrites them; the other
tables are unchanged."""

JOB = Table("job", METADATA, Column("key", String, primary_key=True), Column("value", Text, nullable=False))


def chunks(ids: Sequence[T]) -> list[Sequence[T]]:
    """Split ids into parts for one statement each."""
    return [ids[i : i + IDS] for i in range(0, len(ids), IDS)]
