"""Trajectories and expert rows written as files, and deletion of those that a run no longer needs.

A parquet column has one type. So columns with arbitrary keys (``extra_info``, ``metadata``, ``reward_parts``, further
keys of messages) are JSON text in parquet, and nested in jsonl.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.buffer.order.group_choice import oldest_replayed
from megarl.buffer.store import ExpertExperience, Glance, Selection, Store, StoredGroup
from megarl.buffer.store.selection import USED
from megarl.core.durable import whole
from megarl.core.errors import ConfigError
from megarl.core.schema import GREEDY, Task, Trajectory, Turn
from megarl.run.data.open_run import HEAD, StoredRun, TrajectoryTally, progress, table
from megarl.tasks import ChatTokenizer
from megarl.tasks.image_rows import data_uri, without_inline_images
from megarl.tasks.row_files import is_jsonl
from megarl.weights.checkpoint.training.manifest import finished, in_order, steps_of

PART_BYTES = 2 * 2**20
"""Bytes of arrays that are read together and written as one row group; as lists of numbers they are 30 times as
large."""
OPEN = ("extra_info", "metadata", "reward_parts")
"""Columns that are JSON text in parquet."""
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_SPANS = pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32()), ("version", pa.string())]))
_TURN = pa.struct(
    [
        *(("author", pa.string()), ("text", pa.string()), ("follows", pa.int32()), ("finish_reason", pa.string())),
        *(("reward", pa.float64()), ("token_ids", pa.list_(pa.int32())), ("logp", pa.list_(pa.float32()))),
        ("versions", _SPANS),
    ]
)
TRAJECTORY = pa.schema(
    [
        *(("group_id", pa.string()), ("index", pa.int32()), ("kind", pa.string()), ("step", pa.int32())),
        *(("state", pa.string()), ("used_by", pa.int32()), ("reason", pa.string()), ("task_id", pa.string())),
        *(("data_source", pa.string()), ("prompt", _MESSAGES), ("ability", pa.string())),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        *(("extra_info", pa.string()), ("response", pa.string()), ("score", pa.float64()), ("acc", pa.bool_())),
        *(("status", pa.string()), ("end", pa.string()), ("reward_parts", pa.string()), ("group_mean", pa.float64())),
        *(("group_std", pa.float64()), ("group_size", pa.int32()), ("metadata", pa.string())),
        ("turns", pa.list_(_TURN)),
    ]
)
EXPERT = pa.schema(
    [
        *(("prompt", _MESSAGES), ("response", pa.string()), ("score", pa.float64())),
        ("teacher_logp", pa.list_(pa.float32())),
        ("images", pa.list_(pa.string())),
    ]
)
Rows = Sequence[dict[str, Any]]


def export(run: StoredRun, selection: Selection, path: Path) -> int:
    """Write the matching trajectories to a parquet or jsonl file; return their number. Raises as ``rows_to``."""
    count = 0
    with rows_to(path, TRAJECTORY) as write:
        for rows in _parts(run, selection):
            write(rows)
            count += len(rows)
    return count


def _parts(run: StoredRun, selection: Selection) -> Iterator[Rows]:
    """Yield the rows of at least one group, with at most ``PART_BYTES`` of arrays if there are several."""
    wanted: dict[str, set[int]] = {}
    groups: dict[str, StoredGroup] = {}
    nbytes = 0
    for group, members in run.glances(selection):
        found = [glance for glance in members if selection.matches(glance)]
        if not found:
            continue
        needed = sum(glance.nbytes for glance in members)
        if wanted and nbytes + needed > PART_BYTES:
            yield _rows(run, groups, wanted)
            groups, wanted, nbytes = {}, {}, 0
        groups[group.group_id], wanted[group.group_id] = group, {glance.number for glance in found}
        nbytes += needed
    if wanted:
        yield _rows(run, groups, wanted)


def _rows(run: StoredRun, groups: Mapping[str, StoredGroup], wanted: Mapping[str, set[int]]) -> Rows:
    tasks = run.store.selection.tasks_named({group.task_id for group in groups.values()})
    return [
        trajectory_row(each, groups[each.group_id], tasks.get(each.task_id), run.tokenizer)
        for each in run.store.selection.members(list(groups))
        if each.index != GREEDY and each.index in wanted[each.group_id]
    ]


def trajectory_row(
    trajectory: Trajectory, group: StoredGroup, task: Task | None, tokenizer: ChatTokenizer
) -> dict[str, Any]:
    """Return a trajectory's row; its task's columns are None if the store no longer has the task."""
    reward, stats = trajectory.reward, trajectory.group_stats
    turns = [_turn(turn, tokenizer) for turn in trajectory.turns]
    written = [turn["text"] for turn in turns if turn["author"] == "model"]
    return {
        "group_id": group.group_id,
        "index": trajectory.index,
        "kind": group.kind,
        "step": group.at_step,
        "state": group.state,
        "used_by": group.used_by,
        "reason": group.reason,
        "task_id": trajectory.task_id,
        "data_source": group.data_source,
        "prompt": None if task is None else list(task.prompt),
        "ability": None if task is None else task.ability,
        "reward_model": None if task is None else task.reward_model,
        "extra_info": None if task is None else task.extra_info,
        "response": written[-1] if written else None,
        "score": reward.score if math.isfinite(reward.score) else None,
        "acc": {"ok": True, "wrong": False}.get(reward.status),
        "status": reward.status,
        "end": str(trajectory.end),
        "reward_parts": reward.parts,
        "group_mean": stats.mean if stats else None,
        "group_std": stats.std if stats else None,
        "group_size": trajectory.group_size,
        "metadata": trajectory.metadata,
        "turns": turns,
    }


def _turn(turn: Turn, tokenizer: ChatTokenizer) -> dict[str, Any]:
    return {
        "author": turn.author,
        "text": tokenizer.decode(turn.token_ids, special=turn.author != "model"),
        "follows": turn.follows,
        "finish_reason": turn.finish_reason,
        "reward": turn.reward,
        "token_ids": turn.token_ids.tolist(),
        "logp": None if turn.logp is None else turn.logp.tolist(),
        "versions": [{"start": span.start, "end": span.end, "version": str(span.version)} for span in turn.spans],
    }


def export_experts(store: Store, path: Path) -> int:
    """Write expert rows in the format of `megarl data import-experts`; return their number. Raises as ``rows_to``."""
    count = 0
    with rows_to(path, EXPERT) as write, progress(store.experts.count(), "rows") as bar:
        for part in store.experts.read():
            write([_expert(each) for each in part])
            count += len(part)
            bar.update(len(part))
    return count


def _expert(each: ExpertExperience) -> dict[str, Any]:
    task = without_inline_images(each.task)
    return {
        "prompt": list(task.prompt),
        "response": task.response,
        "score": each.score,
        "teacher_logp": None if each.teacher_logp is None else each.teacher_logp.tolist(),
        "images": [data_uri(image) for image in task.images],
    }


@contextmanager
def rows_to(path: Path, schema: pa.Schema) -> Iterator[Callable[[Rows], None]]:
    """Yield a function that writes rows; the complete file appears when the block ends.

    Raises:
        ConfigError: the name does not end in ``.parquet`` or ``.jsonl``, or its folder is missing.
    """
    if path.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"-o {path}: end the name in .parquet or .jsonl")
    if not path.parent.is_dir():
        raise ConfigError(f"-o {path}: there is no folder {path.parent}; make it, or give another path")
    with whole(path) as temporary:
        if is_jsonl(path):
            with temporary.open("w", encoding="utf-8") as file:
                yield lambda rows: file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        else:
            with pq.ParquetWriter(temporary, schema) as writer:
                yield lambda rows: writer.write_table(pa.Table.from_pylist([_flat(row) for row in rows], schema))


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row to parquet's types."""
    flat = {**row, **{name: _text(row[name]) for name in OPEN if name in row}}
    if row["prompt"] is not None:
        flat["prompt"] = [{"role": m["role"], "content": _text(m.get("content"))} for m in row["prompt"]]
    if row.get("reward_model") is not None:
        flat["reward_model"] = {name: _text(row["reward_model"].get(name)) for name in ("style", "ground_truth")}
    return flat


def _text(value: Any) -> str | None:
    return value if isinstance(value, str | None) else json.dumps(value, ensure_ascii=False)


REPORTED = ("eval-before", "eval-after")
"""Evaluations with answers that the report shows."""
AT_ONCE = 200
"""Groups per transaction."""


@dataclass
class Pruned:
    """Result of a search for deletable trajectories."""

    tallies: dict[str, TrajectoryTally] = field(default_factory=dict)
    """Deletable trajectories by kind."""
    kept: Counter[str] = field(default_factory=Counter)
    """Reason -> number of groups that match the filters but are kept."""
    deleted: int = 0
    """Number of deleted trajectories."""

    def text(self, done: bool) -> str:
        """Return the table of deleted or deletable trajectories, and the reasons for kept groups."""
        rows = [[kind, *tally.cells()] for kind, tally in sorted(self.tallies.items())]
        lines = table([["deleted" if done else "to delete", *HEAD], *rows]) if rows else "nothing to delete\n"
        return lines + "".join(f"kept: {number} groups, {why}\n" for why, number in sorted(self.kept.items()))


def prune(run: StoredRun, selection: Selection, *, delete: bool) -> Pruned:
    """Find unneeded groups with only matching trajectories. With ``delete`` remove their trajectories, ``AT_ONCE``
    groups per transaction, so that a kill leaves whole groups and the same command can go on.

    Raises ConfigError for a bench, since its answers are its result.
    """
    if run.config.run.mode == "bench":
        raise ConfigError(f"{run.run_dir} belongs to a bench, which reads its answers again; remove the folder instead")
    found = Pruned()
    folder = run.run_dir / "checkpoints"
    steps, newest = steps_of(in_order(folder)), max(steps_of(finished(folder)), default=0)
    for groups in _in_parts(run, selection):
        kept = _needed(run, [group for group, _ in groups], steps, newest)
        found.kept.update(kept.values())
        free = [(group, members) for group, members in groups if group.group_id not in kept]
        for group, members in free:
            tally = found.tallies.setdefault(group.kind, TrajectoryTally())
            tally.groups += 1
            for glance in members:
                tally.add(glance)
        if delete and free:
            found.deleted += run.store.selection.delete_trajectories([group.group_id for group, _ in free])
    if found.deleted:
        groups_of = {kind: tally.groups for kind, tally in found.tallies.items()}
        run.store.journal.record_event("data", "prune", {"trajectories": found.deleted, "groups": groups_of})
    return found


Part = list[tuple[StoredGroup, list[Glance]]]


def _in_parts(run: StoredRun, selection: Selection) -> Iterator[Part]:
    """Yield, in parts, the groups whose trajectories exist and all match."""
    part: Part = []
    for group, members in run.glances(selection):
        if members and all(map(selection.matches, members)):
            part.append((group, members))
            if len(part) == AT_ONCE:
                yield part
                part = []
    if part:
        yield part


def _needed(run: StoredRun, groups: Sequence[StoredGroup], checkpoints: Sequence[int], newest: int) -> dict[str, str]:
    """Return group id -> reason to keep it. ``newest``: step of the newest finished one of the ``checkpoints``."""
    again = run.store.selection.needed_again(groups, checkpoints)
    oldest_replay = oldest_replayed(run.config, [*checkpoints, run.store.journal.last_step()])
    found: dict[str, str] = {}
    for group in groups:
        if group.state not in USED:
            found[group.group_id] = "which no step has used"
        elif group.kind == "eval":
            if group.rollout_id in REPORTED:
                found[group.group_id] = "which the report shows (eval-before, eval-after)"
        elif run.config.taskset.order == "prioritized":
            found[group.group_id] = "whose rewards taskset.order=prioritized reads at each start"
        elif group.at_step > newest:
            found[group.group_id] = f"used after the newest checkpoint (step {newest})"
        elif group.group_id in again:
            found[group.group_id] = "which a resume from an earlier checkpoint would use again"
        elif oldest_replay is not None and group.at_step >= oldest_replay:
            found[group.group_id] = f"which steps may train on again (buffer.replay, from step {oldest_replay} on)"
    return found
