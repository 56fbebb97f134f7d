"""Conversion between dataclasses and columns. Arrays become one safetensors blob, the rest JSON, never pickle.

A row's tensors are the concatenated ``token_ids`` of all turns, the ``logp`` and ``routing`` of turns that have them,
and the scores of a teacher at a URL (``teacher_logp``, ``teacher_ids``, ``teacher_logps``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from megarl.core.errors import DataError, StoreDamagedError
from megarl.core.schema import (
    End,
    GroupStats,
    Reward,
    RewardStatus,
    Segment,
    Task,
    TeacherScores,
    TokenBounds,
    Trajectory,
    Turn,
    WeightsSpan,
    WeightsVersion,
    name_of,
    routing_of,
)

GIVEN_LATER = "given_later"
"""Metadata key of a trajectory with a reward given after its group was sampled."""
BOUNDS = "token_bounds"
"""Key of a trajectory's record: ``TokenBounds`` of each turn. Records of earlier versions have none."""


@dataclass(frozen=True)
class OutlineRow:
    """Columns of a trajectory without its arrays."""

    group_id: str
    index: int
    rollout_id: str
    task_id: str
    score: float | None
    status: RewardStatus
    record: str


def dumps(value: Any) -> str:
    """Return strict JSON: NaN and infinity are refused, because not every database can read them."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def task_to_row(task: Task) -> dict[str, Any]:
    """Return the columns of one task; its images are rows of another table. Raises DataError for a text with a NUL
    character, which PostgreSQL cannot store."""
    texts = {
        "task_id": task.task_id,
        "data_source": task.data_source,
        "ability": task.ability,
        "response": task.response,
    }
    if broken := [name for name, text in texts.items() if text is not None and "\0" in text]:
        raise DataError(f"task {task.task_id!r}: {broken[0]} holds a NUL character; remove it")
    return {
        "task_id": task.task_id,
        "data_source": task.data_source,
        "prompt": dumps({"messages": list(task.prompt), "chat_template_kwargs": task.chat_template_kwargs}),
        "ability": task.ability,
        "reward_model": dumps(task.reward_model),
        "extra_info": dumps(task.extra_info),
        "response": task.response,
    }


def task_from_row(row: Any, images: tuple[bytes, ...] = ()) -> Task:
    """Return the task in a row, without a demonstration's message (``Task.answer``), which rollouts do not need."""
    prompt = json.loads(row.prompt)
    return Task(
        task_id=row.task_id,
        data_source=row.data_source,
        prompt=tuple(prompt["messages"]),
        ability=row.ability,
        reward_model=json.loads(row.reward_model),
        extra_info=json.loads(row.extra_info),
        response=row.response,
        images=images,
        chat_template_kwargs=prompt["chat_template_kwargs"],
    )


def stored_task(task: Task) -> Task:
    """Return a task as the store returns it. Raises as ``task_to_row``."""
    return task_from_row(SimpleNamespace(**task_to_row(task)), task.images)


def trajectory_to_row(trajectory: Trajectory) -> dict[str, Any]:
    """Return the columns of one trajectory. Raises TypeError unless each turn has 1-D int32 token ids and 1-D float32
    log-probs of the right length, and a teacher's log-probs are as many as the model's tokens."""
    where = f"trajectory {trajectory.group_id}[{trajectory.index}]"
    logp = [turn.logp for turn in trajectory.turns if turn.logp is not None]
    for turn in trajectory.turns:
        _check_array(f"{where}: token_ids", turn.token_ids, np.dtype(np.int32), None)
        if turn.logp is not None:
            _check_array(f"{where}: logp", turn.logp, np.dtype(np.float32), len(turn))
    reward, stats = trajectory.reward, trajectory.group_stats
    record = {
        "group_size": trajectory.group_size,
        "parts": reward.parts,
        "turns": [_turn_record(turn) for turn in trajectory.turns],
        BOUNDS: [TokenBounds.of(turn.token_ids, turn.logp) for turn in trajectory.turns],
        "group_stats": None if stats is None else [stats.mean, stats.std, stats.size],
        "metadata": trajectory.metadata,
    }
    if trajectory.cause is not None:
        record["cause"] = trajectory.cause
    tensors = {
        "token_ids": np.concatenate([turn.token_ids for turn in trajectory.turns]),
        "logp": np.concatenate([*logp, np.empty(0, np.float32)]),
    }
    if (routing := routing_of(trajectory.turns)) is not None:
        tensors["routing"] = np.ascontiguousarray(routing)
        record["routing"] = [None if turn.routing is None else len(turn.routing) for turn in trajectory.turns]
        record["routing_layout"] = [str(routing.dtype), *routing.shape[1:]]
    if (scores := trajectory.teacher_scores) is not None:
        _check_array(f"{where}: teacher_logp", scores.logp, np.dtype(np.float32), trajectory.response_length)
        tensors |= {"teacher_logp": scores.logp, "teacher_ids": scores.ids, "teacher_logps": scores.logps}
        record |= {"scored_by": scores.teacher, "top_k": scores.top_k}
    return {
        "group_id": trajectory.group_id,
        "index": trajectory.index,
        "rollout_id": trajectory.rollout_id,
        "task_id": trajectory.task_id,
        "score": reward.score if math.isfinite(reward.score) else None,
        "status": reward.status,
        "record": dumps(record),
        "tensors": save_tensors(tensors),
    }


def trajectory_from_row(row: Any) -> Trajectory:
    """Return the trajectory in a row, without image files."""
    return _trajectory(row, json.loads(row.record), load_tensors(row.tensors))


def has_bounds(record: str) -> bool:
    """Return True if a trajectory's record has ``BOUNDS``."""
    return f'"{BOUNDS}":[' in record


def outline_from_row(row: OutlineRow) -> Trajectory:
    """Return the trajectory in a row whose record has ``BOUNDS``, with arrays that have only a shape."""
    record = json.loads(row.record)
    outline = _trajectory(row, record, _absent(record))
    bounds = (found and TokenBounds(*found) for found in record[BOUNDS])
    turns = tuple(replace(turn, bounds=found) for turn, found in zip(outline.turns, bounds, strict=True))
    return replace(outline, turns=turns)


def is_outline(trajectory: Trajectory) -> bool:
    """Return True if the trajectory's arrays are not read yet."""
    return any(turn.bounds is not None for turn in trajectory.turns)


def with_arrays(outline: Trajectory, tensors: Mapping[str, np.ndarray]) -> Trajectory:
    """Return an outline with the arrays in ``tensors``; expert ids only of turns that have some.

    Raises StoreDamagedError if the arrays are not those that the record describes.
    """
    tokens_at = logp_at = routing_at = 0
    turns = []
    for turn in outline.turns:
        ids, logp, routing = tensors["token_ids"][tokens_at : tokens_at + len(turn)], turn.logp, turn.routing
        tokens_at += len(turn)
        if logp is not None:
            logp = tensors["logp"][logp_at : logp_at + len(turn)]
            logp_at += len(turn)
        if routing is not None:
            routing = tensors["routing"][routing_at : routing_at + len(routing)]
            routing_at += len(routing)
        if len(ids) != len(turn) or TokenBounds.of(ids, logp) != turn.bounds:
            raise StoreDamagedError(
                f"the arrays of {name_of(outline)} are not those that its record describes; the store is damaged"
            )
        turns.append(replace(turn, token_ids=ids, logp=logp, routing=routing, bounds=None))
    scores = outline.teacher_scores
    scores = scores and _scores(scores.teacher, tensors)
    return replace(outline, turns=tuple(turns), teacher_scores=scores)


def _no_array(dtype: str, *shape: int) -> np.ndarray:
    """Make a read-only array of this shape that takes no memory; every value is -1."""
    return np.broadcast_to(np.array(-1, dtype), shape)


def _absent(record: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return tensors with the shapes of those in a row with this record."""
    tokens = sum(turn[LENGTH] for turn in record["turns"])
    found = {"token_ids": _no_array("int32", tokens), "logp": _no_array("float32", tokens)}
    if "routing" in record:
        dtype, *layout = record["routing_layout"]
        found["routing"] = _no_array(dtype, sum(filter(None, record["routing"])), *layout)
    if "scored_by" in record:
        number, k = sum(turn[LENGTH] for turn in record["turns"] if turn[0] == "model"), record["top_k"]
        found |= {"teacher_logp": _no_array("float32", number), "teacher_ids": _no_array("int32", number, k)}
        found["teacher_logps"] = _no_array("float32", number, k)
    return found


def _trajectory(row: Any, record: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Trajectory:
    stats = record["group_stats"]
    return Trajectory(
        rollout_id=row.rollout_id,
        task_id=row.task_id,
        group_id=row.group_id,
        index=row.index,
        group_size=record["group_size"],
        turns=tuple(_routed(_turns(record["turns"], tensors), record.get("routing"), tensors)),
        reward=Reward(score=math.nan if row.score is None else row.score, status=row.status, parts=record["parts"]),
        group_stats=None if stats is None else GroupStats(*stats),
        metadata=record["metadata"],
        cause=End(record["cause"]) if "cause" in record else None,
        teacher_scores=_scores(record["scored_by"], tensors) if "scored_by" in record else None,
    )


def _scores(teacher: str, tensors: Mapping[str, np.ndarray]) -> TeacherScores:
    return TeacherScores(teacher, tensors["teacher_logp"], tensors["teacher_ids"], tensors["teacher_logps"])


def segment_to_row(group_id: str, rollout_id: str, segment: Segment) -> dict[str, Any]:
    """Columns of one segment."""
    spans = [[span.start, span.end, str(span.version)] for span in segment.spans]
    tensors = {"token_ids": segment.token_ids, "logp": segment.logp}
    if segment.prompt_ids is not None:
        tensors["prompt_ids"] = segment.prompt_ids
    if segment.routing is not None:
        tensors["routing"] = segment.routing
    return {
        "group_id": group_id,
        "index": segment.index,
        "turn": segment.turn,
        "start": segment.start,
        "rollout_id": rollout_id,
        "record": dumps({"context": segment.context, "spans": spans, "finish_reason": segment.finish_reason}),
        "tensors": save_tensors(tensors),
    }


def segment_from_row(row: Any) -> Segment:
    """Return the segment in a row."""
    record, tensors = json.loads(row.record), load_tensors(row.tensors)
    return Segment(
        index=row.index,
        turn=row.turn,
        start=row.start,
        context=record["context"],
        token_ids=tensors["token_ids"],
        logp=tensors["logp"],
        spans=_spans(record["spans"]),
        finish_reason=record["finish_reason"],
        prompt_ids=tensors.get("prompt_ids"),
        routing=tensors.get("routing"),
    )


def versions_in(record: str) -> set[str]:
    """Return the weights versions that sampled tokens of the trajectory with this record."""
    return {span[2] for turn in json.loads(record)["turns"] for span in turn[SPANS]}


def end_in(status: RewardStatus, record: str) -> End:
    """Return the end of the trajectory with this status and record, without reading its tokens."""
    found = json.loads(record)
    turns = tuple(Turn(turn[0], _NO_TOKENS, turn[2], finish_reason=turn[FINISH_REASON]) for turn in found["turns"])
    cause = End(found["cause"]) if "cause" in found else None
    return Trajectory("", "", "", 0, found["group_size"], turns, Reward(math.nan, status), cause=cause).end


_NO_TOKENS = np.empty(0, np.int32)
LENGTH = 1
"""Index of the number of tokens in a turn's record."""
FINISH_REASON = 4
"""Index of the finish reason in a turn's record."""
SPANS = 5
"""Index of the spans in a turn's record."""


def _turn_record(turn: Turn) -> list[Any]:
    spans = [[span.start, span.end, str(span.version)] for span in turn.spans]
    record = [turn.author, len(turn), turn.follows, turn.logp is not None, turn.finish_reason, spans, turn.reward]
    return [*record, list(turn.images)] if turn.images else record


def _turns(records: Sequence[Sequence[Any]], tensors: Mapping[str, np.ndarray]) -> Iterator[Turn]:
    tokens_at, logp_at = 0, 0
    for author, length, follows, has_logp, finish_reason, spans, reward, *images in records:
        logp = tensors["logp"][logp_at : logp_at + length] if has_logp else None
        yield Turn(
            author,
            tensors["token_ids"][tokens_at : tokens_at + length],
            follows,
            logp,
            _spans(spans),
            finish_reason,
            reward,
            tuple(*images),
        )
        tokens_at, logp_at = tokens_at + length, logp_at + length * has_logp


def _routed(
    turns: Iterator[Turn], lengths: Sequence[int | None] | None, tensors: Mapping[str, np.ndarray]
) -> Iterator[Turn]:
    """Yield turns with their expert ids. ``lengths``: tokens with ids of each turn; None without any."""
    if lengths is None:
        yield from turns
        return
    start = 0
    for turn, length in zip(turns, lengths, strict=True):
        if length is None:
            yield turn
            continue
        yield replace(turn, routing=tensors["routing"][start : start + length])
        start += length


def _spans(records: Sequence[tuple[int, int, str]]) -> tuple[WeightsSpan, ...]:
    return tuple(WeightsSpan(start, end, WeightsVersion.parse(version)) for start, end, version in records)


def _check_array(name: str, array: Any, dtype: np.dtype[Any], length: int | None) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        seen = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name} must be a 1-D {dtype} array, got {seen}")
    if length is not None and len(array) != length:
        raise TypeError(f"{name} has {len(array)} values for {length} tokens")
