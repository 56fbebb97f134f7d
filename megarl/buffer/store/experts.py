"""Expert experiences: demonstrations from files and other runs, drawn by steps in addition to sampled trajectories."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, delete, func, insert, select, update

from megarl.buffer.store.codec import dumps, task_from_row, trajectory_from_row
from megarl.buffer.store.tables import (
    EXPERT_IMPORTS,
    EXPERTS,
    GROUP_IMAGES,
    GROUPS,
    IDS,
    ROLLOUTS,
    TASK_IMAGES,
    TASKS,
    TRAJECTORIES,
    chunks,
)
from megarl.buffer.store.transactions import Transactions
from megarl.core.schema import Task, Trajectory

LOGP = np.dtype("<f4")
_LOCK = 0x657870657274  # any unused number


@dataclass(frozen=True, eq=False)
class ExpertExperience:
    """A demonstration, with its score and its teacher's log-probs if known."""

    task: Task
    """Prompt and response. The number at the end of its id is its row in the source."""
    score: float | None = None
    teacher_logp: np.ndarray | None = None
    """float32 [R]: log-prob of each token of the response, including its end."""
    tokenizer: str | None = None
    """Digest of the tokenizer of these tokens."""

    @property
    def position(self) -> int:
        """Row in the source, from 0."""
        return int(self.task.task_id.rpartition("/")[2])

    @property
    def experience_id(self) -> str:
        """Digest of prompt and response, template options included."""
        text = json.dumps(self._record, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def _record(self) -> dict[str, Any]:
        task = self.task
        return {
            "prompt": list(task.prompt),
            "chat_template_kwargs": task.chat_template_kwargs,
            "response": task.response,
            "answer": task.answer,
        }

    def columns(self) -> dict[str, Any]:
        """Return the columns of its row, without the import's columns."""
        logp = self.teacher_logp
        return {
            "experience_id": self.experience_id,
            "position": self.position,
            "record": dumps(self._record),
            "score": self.score,
            "teacher_logp": None if logp is None else logp.astype(LOGP).tobytes(),
            "tokenizer": self.tokenizer,
        }

    @classmethod
    def of_row(cls, row: Any) -> ExpertExperience:
        """Read a row of the table."""
        record, logp = json.loads(row.record), row.teacher_logp
        task = Task(
            f"expert/{row.position}",
            "",
            tuple(record["prompt"]),
            "",
            {},
            response=record["response"],
            chat_template_kwargs=record["chat_template_kwargs"],
            answer=record["answer"],
        )
        array = None if logp is None else np.frombuffer(logp, LOGP).astype(np.float32)
        return cls(task, row.score, array, row.tokenizer)


class ImportedSource(NamedTuple):
    """One import: a file, or another run."""

    number: int
    """From 1; 0 if no row was new, so none was written."""
    source: str
    given: int
    """Rows of the source."""
    added: int
    """New rows; the others were already stored, or duplicates within the source."""
    stored: int
    """Rows in the store now."""
    by_setting: bool
    """True for ``taskset.expert``, which replaces its earlier rows."""


Sources = Sequence[tuple[str, Sequence[ExpertExperience]]]
"""(name of a source, its rows in order)."""


class ExpertTable:
    """Expert experiences, each once, by the digest of prompt and response."""

    def __init__(self, database: Transactions) -> None:
        self._database = database

    def import_sources(self, sources: Sources, *, advance: Callable[[int], object] = int) -> list[ImportedSource]:
        """Add new rows, as one import per source, in one transaction; return each source's result.

        Safe to repeat: a repetition finds an import by its token.

        Args:
            advance: Called with the number of rows processed; restarts from 0 if the connection was lost.
        """
        tokens = [secrets.token_hex(8) for _ in sources]
        prepared = [(source, _distinct(rows), len(rows)) for source, rows in sources]

        def work(connection: Connection, again: bool) -> list[ImportedSource]:
            _take_turns(connection)
            found = [] if not again else [_by_token(connection, token) for token in tokens]
            if any(found):
                return [done or _nothing(name, given) for done, (name, _, given) in zip(found, prepared, strict=True)]
            return [
                _add(connection, source, rows, given, token, advance=advance)
                for (source, rows, given), token in zip(prepared, tokens, strict=True)
            ]

        return self._database.write(work)

    def replace_source(self, source: str, rows: Sequence[ExpertExperience]) -> ImportedSource | None:
        """Replace the rows of ``taskset.expert`` by ``rows``, in this order; return None if they are the same.

        Rows of other imports stay unchanged, with their log-probs. Safe to repeat: the second call finds the rows of
        the first.
        """
        wanted, token = _distinct(rows), secrets.token_hex(8)
        of_setting = select(EXPERT_IMPORTS.c.number).where(EXPERT_IMPORTS.c.by_setting == 1)

        def work(connection: Connection, again: bool) -> ImportedSource | None:
            _take_turns(connection)
            if again and (done := _by_token(connection, token)) is not None:
                return done
            columns_of = (EXPERTS.c.experience_id, EXPERTS.c.position, EXPERTS.c.teacher_logp, EXPERTS.c.tokenizer)
            mine = select(*columns_of).where(EXPERTS.c.number.in_(of_setting))
            held = {row.experience_id: _place_and_teacher(row._asdict()) for row in connection.execute(mine)}
            taken = _stored(connection, list(wanted)) - held.keys()
            if held == {row: _place_and_teacher(columns) for row, columns in wanted.items() if row not in taken}:
                return None
            connection.execute(delete(EXPERTS).where(EXPERTS.c.number.in_(of_setting)))
            return _add(connection, source, wanted, len(rows), token, by_setting=True)

        return self._database.write(work)

    def imports(self) -> list[ImportedSource]:
        """Return all imports in order, with the current number of rows of each."""
        return self._database.read(lambda connection: [_imported(row) for row in connection.execute(_imports())])

    def count(self) -> int:
        """Number of expert experiences."""
        query = select(func.count()).select_from(EXPERTS)
        return self._database.read(lambda connection: connection.scalar(query)) or 0

    def read(self, number: int | None = None) -> Iterator[list[ExpertExperience]]:
        """Yield expert experiences in the order of import and row, in parts; of one import, or of all."""
        after = (-1, -1)
        while True:
            found = self._rows(_next(number, after))
            if not found:
                return
            yield [ExpertExperience.of_row(row) for row in found]
            after = (found[-1].number, found[-1].position)

    def scored_trajectories(self, min_score: float) -> Iterator[tuple[Task, Trajectory]]:
        """Yield training trajectories with at least this score and no images, in the order of their requests."""
        query = (
            select(TRAJECTORIES)
            .join(GROUPS, GROUPS.c.group_id == TRAJECTORIES.c.group_id)
            .where(TRAJECTORIES.c.score >= min_score, TRAJECTORIES.c.index >= 0)
            .where(TRAJECTORIES.c.group_id.not_in(select(GROUP_IMAGES.c.group_id)))
            .order_by(GROUPS.c.position, TRAJECTORIES.c.index)
        )
        rollouts = select(ROLLOUTS.c.rollout_id).where(ROLLOUTS.c.kind == "train").order_by(ROLLOUTS.c.sequence)
        seen = select(TASK_IMAGES.c.task_id)
        tasks = {row.task_id: row for row in self._rows(select(TASKS).where(TASKS.c.task_id.not_in(seen)))}
        for rollout_id in self._database.read(lambda connection: list(connection.scalars(rollouts))):
            rows = query.where(TRAJECTORIES.c.rollout_id == rollout_id)
            for row in self._rows(rows):
                if row.task_id in tasks:  # a later start may have replaced the tasks
                    yield task_from_row(tasks[row.task_id]), trajectory_from_row(row)

    def _rows(self, query: Any) -> Sequence[Any]:
        return self._database.read(lambda connection: connection.execute(query).all())


def _take_turns(connection: Connection) -> None:
    """Wait for a concurrent import, so that import numbers are consecutive and each row is new to one import. SQLite
    serialises writers itself."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))


def _place_and_teacher(row: Mapping[str, Any]) -> tuple[int, bytes | None, str | None]:
    """Return the columns of a row of ``taskset.expert`` that may change without a change of its id."""
    logp = row["teacher_logp"]
    return row["position"], None if logp is None else bytes(logp), row["tokenizer"]


def _distinct(rows: Sequence[ExpertExperience]) -> dict[str, dict[str, Any]]:
    """Return the columns of each row by id; of equal rows the first counts."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        columns = row.columns()
        found.setdefault(columns["experience_id"], columns)
    return found


def _add(
    connection: Connection,
    source: str,
    rows: dict[str, dict[str, Any]],
    given: int,
    token: str,
    *,
    by_setting: bool = False,
    advance: Callable[[int], object] = int,
) -> ImportedSource:
    number = (connection.scalar(select(func.max(EXPERT_IMPORTS.c.number))) or 0) + 1
    row = {
        "number": number,
        "token": token,
        "source": source,
        "imported_at": time.time(),
        "given": given,
        "added": 0,
        "by_setting": int(by_setting),
    }
    connection.execute(insert(EXPERT_IMPORTS), [row])
    added = 0
    for part in chunks(list(rows)):
        there = _stored(connection, part)
        new = [rows[experience_id] | {"number": number} for experience_id in part if experience_id not in there]
        if new:
            connection.execute(insert(EXPERTS), new)
        added += len(new)
        advance(len(part))
    advance(given - len(rows))
    mine = EXPERT_IMPORTS.c.number == number
    if not added and not by_setting:
        connection.execute(delete(EXPERT_IMPORTS).where(mine))
        return _nothing(source, given)
    connection.execute(update(EXPERT_IMPORTS).where(mine).values(added=added))
    return ImportedSource(number, source, given, added, added, by_setting)


def _nothing(source: str, given: int) -> ImportedSource:
    return ImportedSource(0, source, given, 0, 0, False)


def _stored(connection: Connection, ids: Sequence[str]) -> set[str]:
    """Return the ``ids`` that are in the table."""
    found: set[str] = set()
    for part in chunks(ids):
        found |= set(connection.scalars(select(EXPERTS.c.experience_id).where(EXPERTS.c.experience_id.in_(part))))
    return found


def _next(number: int | None, after: tuple[int, int]) -> Any:
    """Return the query of at most ``IDS`` rows after position ``after``."""
    last, position = after
    later = (EXPERTS.c.number > last) | ((EXPERTS.c.number == last) & (EXPERTS.c.position > position))
    query = select(EXPERTS).where(later).order_by(EXPERTS.c.number, EXPERTS.c.position).limit(IDS)
    return query if number is None else query.where(EXPERTS.c.number == number)


def _imports() -> Any:
    count = select(func.count()).where(EXPERTS.c.number == EXPERT_IMPORTS.c.number).scalar_subquery()
    return select(EXPERT_IMPORTS, count.label("stored")).order_by(EXPERT_IMPORTS.c.number)


def _by_token(connection: Connection, token: str) -> ImportedSource | None:
    row = connection.execute(_imports().where(EXPERT_IMPORTS.c.token == token)).first()
    return None if row is None else _imported(row)


def _imported(row: Any) -> ImportedSource:
    return ImportedSource(row.number, row.source, row.given, row.added, row.stored, bool(row.by_setting))
