"""Nouns <-> columns. Arrays become one safetensors blob, the rest JSON; nothing is pickled.

Shape legend: P prompt tokens, R response tokens.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from megarl.errors import DataError
from megarl.schema import Experience, GroupStats, Reward, Segment, Task, WeightsVersion
from megarl.store.checksums import check, sealed
from megarl.store.tables import EXPERIENCES, TASKS

ARRAYS = {"prompt_ids": np.int32, "response_ids": np.int32, "response_mask": np.bool_, "engine_logp": np.float32}
"""Fields of an Experience that are arrays, with the dtype in which they are kept."""


def dumps(value: Any) -> str:
    """Strict JSON: NaN and infinity are refused, since not every database reads them back."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def task_to_row(task: Task) -> dict[str, Any]:
    """Columns of one task; its images are rows of a table of their own. Raises DataError for a text with a NUL
    character, which PostgreSQL does not keep."""
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
        "prompt": dumps(_prompt(task)),
        "ability": task.ability,
        "reward_model": dumps(task.reward_model),
        "extra_info": dumps(task.extra_info),
        "response": task.response,
    }


def task_from_row(row: Any, images: tuple[bytes, ...] = ()) -> Task:
    """Raises StoreDamagedError. A demonstration's message (``Task.answer``) is not kept: rollouts have no use for
    it."""
    check(TASKS, row)
    prompt = json.loads(row.prompt)
    prompt = {"messages": prompt} if isinstance(prompt, list) else prompt
    return Task(
        task_id=row.task_id,
        data_source=row.data_source,
        prompt=tuple(prompt["messages"]),
        ability=row.ability,
        reward_model=json.loads(row.reward_model),
        extra_info=json.loads(row.extra_info),
        response=row.response,
        images=images,
        chat_template_kwargs=prompt.get("chat_template_kwargs", {}),
    )


def _prompt(task: Task) -> Any:
    """The messages alone, as stores from before have them, unless the template is given more."""
    messages = list(task.prompt)
    return (
        {"messages": messages, "chat_template_kwargs": task.chat_template_kwargs}
        if task.chat_template_kwargs
        else messages
    )


def experience_to_row(experience: Experience) -> dict[str, Any]:
    """Columns of one experience. Raises TypeError when an array has another dtype than ``ARRAYS`` or is not 1-D."""
    arrays = {name: getattr(experience, name) for name in ARRAYS}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype != ARRAYS[name] or array.ndim != 1:
            seen = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise TypeError(
                f"experience {experience.group_id}[{experience.index}]: {name} must be a 1-D "
                f"{np.dtype(ARRAYS[name])} array, got {seen}"
            )
    reward, stats = experience.reward, experience.group_stats
    record = {
        "group_size": experience.group_size,
        "parts": reward.parts,
        "segments": [[s.start, s.end, str(s.version), s.finish_reason] for s in experience.segments],
        "finish_reason": experience.finish_reason,
        "group_stats": None if stats is None else [stats.mean, stats.std, stats.size],
        "metadata": experience.metadata,
    }
    row = {
        "group_id": experience.group_id,
        "index": experience.index,
        "rollout_id": experience.rollout_id,
        "task_id": experience.task_id,
        "score": reward.score if math.isfinite(reward.score) else None,
        "status": reward.status,
        "record": dumps(record),
        # An owned contiguous copy: safetensors writes the buffer of a strided view as it lies in memory.
        "tensors": save_tensors({name: np.ascontiguousarray(array) for name, array in arrays.items()}),
    }
    return sealed(EXPERIENCES, row)


def experience_from_row(row: Any) -> Experience:
    """Return the experience in a row. Raises StoreDamagedError."""
    check(EXPERIENCES, row)
    record = json.loads(row.record)
    stats = record["group_stats"]
    return Experience(
        rollout_id=row.rollout_id,
        task_id=row.task_id,
        group_id=row.group_id,
        index=row.index,
        group_size=record["group_size"],
        **load_tensors(row.tensors),
        reward=Reward(score=math.nan if row.score is None else row.score, status=row.status, parts=record["parts"]),
        segments=tuple(
            Segment(start, end, WeightsVersion.parse(version), finish_reason)
            for start, end, version, finish_reason, *_ in record[
                "segments"
            ]  # rows of earlier versions have a fifth value
        ),
        finish_reason=record["finish_reason"],
        group_stats=None if stats is None else GroupStats(*stats),
        metadata=record["metadata"],
    )
