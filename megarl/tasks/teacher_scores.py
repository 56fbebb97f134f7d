"""Columns with a teacher's scores of demonstrations: ``megarl data teach`` writes them, ``algorithm=sft`` with a
``divergence`` reads them.

Shape legend: R tokens of a response with its end token, k likeliest tokens of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.core.errors import DataError
from megarl.core.schema import Task, TeacherScores, digest_of
from megarl.tasks.row_files import RowLocation, is_json

COLUMNS = pa.schema(
    [
        *(("teacher", pa.string()), ("teacher_files", pa.string()), ("teacher_tokenizer", pa.string())),
        *(("teacher_tokens", pa.string()), ("teacher_vocab_size", pa.int32())),
        ("teacher_logp", pa.list_(pa.float32())),
        ("teacher_ids", pa.list_(pa.list_(pa.int32()))),
        ("teacher_topk_logp", pa.list_(pa.list_(pa.float32()))),
    ]
)
TEACH = "score the rows (megarl data teach FILE teachers.NAME.path=... top_k=K)"
Pair = tuple[np.ndarray, np.ndarray]
"""Token ids of a prompt and of its response."""


class Scored(NamedTuple):
    """Scores of one row."""

    scores: TeacherScores
    """[R]"""
    vocab_size: int
    """Number of ids that teacher and student both have; the likeliest tokens are among them."""


Score = Callable[[str, Sequence[Pair]], list[Scored]]
"""(name of a teacher, tokens of rows) -> scores of their responses."""


def columns_of(scored: Scored, pair: Pair, files: str, tokenizer: str) -> dict[str, Any]:
    """Return the values of ``COLUMNS`` of one row.

    Args:
        files: Digest of the teacher's files, or name of its model at a server.
        tokenizer: Digest of the student's tokenizer.
    """
    scores = scored.scores
    return {
        "teacher": scores.teacher,
        "teacher_files": files,
        "teacher_tokenizer": tokenizer,
        "teacher_tokens": digest_of(np.concatenate(pair)),
        "teacher_vocab_size": scored.vocab_size,
        "teacher_logp": scores.logp,
        "teacher_ids": list(scores.ids),
        "teacher_topk_logp": list(scores.logps),
    }


def read_scores(
    path: Path, tasks: Sequence[Task], pairs: Sequence[Pair], *, top_k: int, vocab_size: int, tokenizer: str
) -> tuple[Scored, ...]:
    """Read the scores of the file's rows ``tasks``, whose tokens are ``pairs``.

    Args:
        top_k: Likeliest tokens to read; 0 for as many as the first row has.
        vocab_size: Number of the student's ids.
        tokenizer: Digest of the student's tokenizer.

    Raises:
        DataError: a row has no scores, or scores of other tokens, or too few of the likeliest tokens, or an invalid
            value; names file, row and fix.
    """
    table = _read(path)
    found: list[Scored] = []
    for task, pair in zip(tasks, pairs, strict=True):
        number = int(task.task_id.rpartition("/")[2])
        row = {name: table.column(name)[number] for name in table.column_names}
        found.append(_scored(RowLocation(path, number), row, pair, top_k, vocab_size, tokenizer))
        top_k = found[-1].scores.top_k
    return tuple(found)


def _read(path: Path) -> pa.Table:
    """Return ``COLUMNS`` of a file as arrow's arrays: Python's lists of numbers would be ten times as large."""
    if is_json(path):
        raise DataError(f"{path}: algorithm.divergence reads a teacher's scores from parquet; {TEACH}")
    with pq.ParquetFile(path) as file:
        if missing := [name for name in COLUMNS.names if name not in file.schema_arrow.names]:
            raise DataError(f"{path}: column {missing[0]!r} is missing, which algorithm.divergence reads; {TEACH}")
        table = file.read(columns=COLUMNS.names).select(COLUMNS.names)
    try:
        return table.cast(COLUMNS)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{path}: {error}; {TEACH} again") from error


def _scored(
    location: RowLocation, row: Mapping[str, pa.Scalar], pair: Pair, top_k: int, vocab_size: int, tokenizer: str
) -> Scored:
    if not all(scalar.is_valid for scalar in row.values()):
        absent = next(name for name, scalar in row.items() if not scalar.is_valid)
        location.refuse(absent, f"a value of the teacher; {TEACH}", None)
    if (seen := row["teacher_tokenizer"].as_py()) != tokenizer:
        expected = f"{tokenizer}, the digest of model.path's tokenizer.json; take the model that the rows are for, or"
        location.refuse("teacher_tokenizer", f"{expected} {TEACH} again", seen)
    if (seen := row["teacher_tokens"].as_py()) != digest_of(np.concatenate(pair)):
        expected = "the digest of the row's tokens; text, chat template or its options have changed:"
        location.refuse("teacher_tokens", f"{expected} {TEACH} again", seen)
    length, size = len(pair[1]), row["teacher_vocab_size"].as_py()
    logp = row["teacher_logp"].values.to_numpy(zero_copy_only=False)
    if len(logp) != length:
        location.refuse("teacher_logp", f"{length} log-probs, one for each token; {TEACH} again", len(logp))
    ids, logps = (_matrix(location, name, row[name].values, length) for name in ("teacher_ids", "teacher_topk_logp"))
    if ids.shape != logps.shape or ids.shape[1] < max(top_k, 1):
        expected = f"at least {max(top_k, 1)} ids for each token (algorithm.top_k; 0: as the first row)"
        location.refuse("teacher_ids", f"{expected}, with as many log-probs; lower it, or {TEACH} again", ids.shape[1])
    if not 1 <= size <= vocab_size or ids.min() < 0 or ids.max() >= size:
        expected = f"at most {vocab_size}, the vocab_size of model.path, and above all teacher_ids"
        location.refuse("teacher_vocab_size", f"{expected}; {TEACH} again", size)
    if not np.isfinite(logp).all() or not np.isfinite(logps).all() or max(logp.max(), logps.max()) > LARGEST_LOGP:
        location.refuse("teacher_topk_logp", f"finite log-probs, none above 0; {TEACH} again", float(logps.max()))
    k = top_k or ids.shape[1]
    return Scored(TeacherScores(row["teacher"].as_py(), logp, ids[:, :k], logps[:, :k]), size)


def _matrix(location: RowLocation, name: str, values: pa.ListArray, length: int) -> np.ndarray:
    """Return [R, k] of a row's lists."""
    flat, lengths = values.flatten(), set(values.value_lengths().to_pylist())
    if len(values) != length or len(lengths) != 1 or flat.null_count:
        location.refuse(
            name, f"k values for each of {length} tokens; {TEACH} again", (len(values), sorted(map(str, lengths)))
        )
    found: np.ndarray = flat.to_numpy().reshape(length, -1)
    return found


LARGEST_LOGP = 1e-3
"""Largest log-prob that counts as a rounding error above 0."""
