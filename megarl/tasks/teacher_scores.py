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

from megarl.core.schema import Task, TeacherScores, digest_of
from megarl.tasks.row_files import RowLocation, read_table

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
    _, rows = read_table(path, COLUMNS.names)
    found: list[Scored] = []
    for task, pair in zip(tasks, pairs, strict=True):
        number = int(task.task_id.rpartition("/")[2])
        location = RowLocation(path, number)
        found.append(_scored(location, rows[number], pair, top_k, vocab_size, tokenizer))
        top_k = found[-1].scores.top_k
    return tuple(found)


def _scored(
    location: RowLocation, row: Mapping[str, Any], pair: Pair, top_k: int, vocab_size: int, tokenizer: str
) -> Scored:
    if row.get("teacher_logp") is None or not row.get("teacher_ids"):
        seen = {name: row.get(name) for name in ("teacher_logp", "teacher_ids")}
        location.refuse("teacher_ids", f"the teacher's likeliest tokens; {TEACH}", seen)
    if row.get("teacher_tokenizer") != tokenizer:
        expected = f"{tokenizer}, the digest of model.path's tokenizer.json; take the model that the rows are for, or"
        location.refuse("teacher_tokenizer", f"{expected} {TEACH} again", row.get("teacher_tokenizer"))
    if row.get("teacher_tokens") != digest_of(np.concatenate(pair)):
        expected = "the digest of the row's tokens; text, chat template or its options have changed:"
        location.refuse("teacher_tokens", f"{expected} {TEACH} again", row.get("teacher_tokens"))
    try:
        logp = np.array(row["teacher_logp"], np.float32)
        ids, logps = np.array(row["teacher_ids"], np.int32), np.array(row["teacher_topk_logp"], np.float32)
    except (ValueError, TypeError) as error:
        location.refuse("teacher_ids", f"lists of one length ({error}); {TEACH} again", row["teacher_ids"][:1])
    length, size = len(pair[1]), row.get("teacher_vocab_size")
    if logp.shape != (length,) or ids.ndim != 2 or ids.shape != logps.shape or len(ids) != length:
        shapes = (logp.shape, ids.shape, logps.shape)
        location.refuse("teacher_ids", f"k ids for each of {length} tokens, as the log-probs; {TEACH} again", shapes)
    if ids.shape[1] < max(top_k, 1):
        expected = f"{top_k} ids for each token (algorithm.top_k, 0: as the first row); lower it, or"
        location.refuse("teacher_ids", f"{expected} {TEACH} again", ids.shape[1])
    if not isinstance(size, int) or not 1 <= size <= vocab_size or ids.min() < 0 or ids.max() >= size:
        expected = f"at most {vocab_size}, the vocab_size of model.path, and above all teacher_ids"
        location.refuse("teacher_vocab_size", f"{expected}; {TEACH} again", size)
    if not np.isfinite(logp).all() or not np.isfinite(logps).all() or max(logp.max(), logps.max()) > LARGEST_LOGP:
        location.refuse("teacher_topk_logp", f"finite log-probs, none above 0; {TEACH} again", float(logps.max()))
    k = top_k or ids.shape[1]
    return Scored(TeacherScores(str(row.get("teacher")), logp, ids[:, :k], logps[:, :k]), size)


LARGEST_LOGP = 1e-3
"""Largest log-prob that counts as a rounding error above 0."""
