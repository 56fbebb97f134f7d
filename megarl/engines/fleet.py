"""The engines of a run: one row each, one writer for each column, and one table of allowed changes.

A row records the plan and the last known state of an engine. Each request names the process start and weights that it
expects, and the engine refuses a mismatch. So a choice from an outdated row is either valid or refused immediately.
Code here reads neither database nor clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from megarl.core.schema import WeightsVersion

Key = tuple[str, int]
"""Program and number of an engine."""
BASE = "base"
"""Name of a model's own weights, as opposed to an adapter."""
STARTS = 1_000_000
"""Most process starts in one attempt, so that later attempts have higher start numbers."""
_ENDED = "it ended before it served; its log has its last words"


class EngineStatus(StrEnum):
    """State of an engine, set by the supervisor."""

    ABSENT = "absent"
    STARTING = "starting"
    """Its process runs but does not listen yet."""
    SERVING = "serving"
    ENDING = "ending"


class EngineTurn(StrEnum):
    """Use of devices shared with the trainer; engines with separate devices are always HERE."""

    HERE = "here"
    ASLEEP = "asleep"
    """Without weights and KV cache; a dead engine is restarted at its next turn."""
    AWAY = "away"
    """Without a process."""


class ColumnOwner(StrEnum):
    """Owner of columns: the only process that writes them."""

    SCALE = "megarl scale"
    TRAINER = "the process that delivers weights"
    SUPERVISOR = "the supervisor of the job"


class ProvenWeights(NamedTuple):
    """Weights that an engine has proven to have."""

    what: str
    """``BASE``, or an adapter's name."""
    version: WeightsVersion
    start: int
    """Process start that has proven them."""


@dataclass(frozen=True)
class EngineRow:
    """An engine of a job."""

    program: str
    number: int
    """Number of the replica, which determines its workers' ranks in the weight plan."""
    # by megarl scale
    wanted: bool = True
    wanted_workers: int = 1
    """Wanted number of workers: tp * pp."""
    order: int = 0
    """Number of changes of ``wanted`` and ``wanted_workers``; 0 for an initial engine."""
    # by the process that delivers weights
    turn: EngineTurn = EngineTurn.HERE
    turn_order: int = 0
    """Number of changes of ``turn``."""
    weights: tuple[ProvenWeights, ...] = ()
    """Last delivered and proven weights, by name; none once lost."""
    holds_for: str = ""
    """Rollout of the evaluation for which it keeps ``weights``."""
    # by the supervisor
    state: EngineStatus = EngineStatus.ABSENT
    start: int = 0
    """Number of its last start, unique in the run and known to the process."""
    url: str = ""
    """Empty until the supervisor has placed it."""
    workers: int = 0
    """Workers when it last served; 0 if it never served."""
    done: int = 0
    """Last ``order`` carried out."""
    done_turn: int = 0
    """Last ``turn_order`` carried out."""
    refused: str = ""
    """Reason why order ``done`` was not carried out."""

    @property
    def key(self) -> Key:
        """Program and number."""
        return self.program, self.number

    @property
    def is_refused(self) -> bool:
        """True if its last order was not carried out."""
        return bool(self.refused) and self.done == self.order

    @property
    def fits(self) -> int:
        """Wanted workers, or its current ones if it failed to start with the wanted number."""
        return self.workers if self.is_refused and self.workers else self.wanted_workers

    @property
    def is_present(self) -> bool:
        """True if it should have a process."""
        has_served = self.workers not in (0, self.wanted_workers)
        return self.wanted and self.turn is not EngineTurn.AWAY and (has_served or not self.is_refused)

    @property
    def is_done(self) -> bool:
        """True if its orders were carried out, or refused."""
        return self.done == self.order and self.done_turn == self.turn_order

    @property
    def has(self) -> WeightsVersion | None:
        """Version of the model's own weights proven by its current start."""
        return self.proven(BASE)

    def proven(self, what: str) -> WeightsVersion | None:
        """Return the version of ``BASE`` or an adapter proven by its current start; None without one."""
        serves = self.state is EngineStatus.SERVING
        return next((w.version for w in self.weights if w.what == what and serves and w.start == self.start), None)

    def with_weights(self, what: str, version: WeightsVersion | None) -> EngineRow:
        """Return the row after its current start proved ``version``; None: after it lost all weights. Raises
        Forbidden."""
        if self.holds_for and version not in (None, self.proven(what)):
            raise Forbidden(
                f"engine {self.number} keeps its weights for evaluation {self.holds_for}, and has got version "
                f"{version}: the evaluation would mix two versions"
            )
        others = (w for w in self.weights if w.what != what and w.start == self.start)
        weights = () if version is None else (*others, ProvenWeights(what, version, self.start))
        return change(self, "delivered", weights=tuple(sorted(weights)))


COLUMNS: Mapping[ColumnOwner, frozenset[str]] = {
    ColumnOwner.SCALE: frozenset({"wanted", "wanted_workers", "order"}),
    ColumnOwner.TRAINER: frozenset({"turn", "turn_order", "weights", "holds_for"}),
    ColumnOwner.SUPERVISOR: frozenset({"state", "start", "url", "workers", "done", "done_turn", "refused"}),
}


class Forbidden(ValueError):
    """A change of a row that ``EVENTS`` does not allow."""


class _Rule(NamedTuple):
    """Rule of one event: writer, columns, states, and a condition on the old and new row."""

    writer: ColumnOwner
    of: frozenset[EngineStatus]
    to: EngineStatus | None
    columns: frozenset[str]
    guard: Callable[[EngineRow, EngineRow], bool]


def _rule(writer: ColumnOwner, of: str, to: str, columns: str, guard: Any = lambda old, new: True) -> _Rule:
    states = frozenset(EngineStatus) if of == "*" else frozenset(map(EngineStatus, of.split()))
    return _Rule(writer, states, EngineStatus(to) if to else None, frozenset(columns.split()), guard)


def _versions(row: EngineRow) -> dict[str, WeightsVersion]:
    return {weights.what: weights.version for weights in row.weights}


_S, _T, _C = ColumnOwner.SUPERVISOR, ColumnOwner.TRAINER, ColumnOwner.SCALE
_DONE = "done done_turn refused"
EVENTS: Mapping[str, _Rule] = {
    "ordered": _rule(_C, "*", "", "wanted wanted_workers order", lambda o, n: n.order == o.order + 1),
    "started": _rule(_S, "absent starting serving", "starting", f"start url {_DONE}", lambda o, n: n.start > o.start),
    "listens": _rule(_S, "starting serving", "serving", f"workers {_DONE}"),
    "noted": _rule(_S, "*", "", _DONE, lambda o, n: n.done >= o.done and n.done_turn >= o.done_turn),
    "ends": _rule(_S, "starting serving", "ending", ""),
    "gone": _rule(_S, "*", "absent", f"workers {_DONE}"),
    "refused": _rule(_S, "*", "absent", f"workers {_DONE}", lambda o, n: bool(n.refused)),
    "turned": _rule(_T, "*", "", "turn turn_order weights", lambda o, n: n.turn_order == o.turn_order + 1),
    "delivered": _rule(_T, "*", "", "weights", lambda o, n: not o.holds_for or _versions(n) == _versions(o)),
    "held": _rule(_T, "*", "", "holds_for", lambda o, n: not o.holds_for and bool(o.weights)),
    "freed": _rule(_T, "*", "", "holds_for", lambda o, n: not n.holds_for),
}
"""Event -> its rule. Inserts (by ``megarl scale`` and a job's start) and deletes (by the supervisor) are no events."""


def change(row: EngineRow, event: str, **values: Any) -> EngineRow:
    """Return the row after an event. Raises Forbidden."""
    rule = EVENTS[event]
    new = replace(row, **values, state=rule.to or row.state)
    if row.state not in rule.of:
        raise Forbidden(f"{event} of engine {row.number}, which is {row.state}")
    if extra := values.keys() - rule.columns:
        raise Forbidden(f"{event} does not write {', '.join(sorted(extra))}")
    if not rule.guard(row, new):
        raise Forbidden(f"{event} of {row}: {values}")
    return new


@dataclass(frozen=True)
class Fleet:
    """Engine rows from one read of the store."""

    rows: Sequence[EngineRow]
    alive: Collection[str] | None = None
    """Programs with heartbeats, for engines of other jobs; None for the job's own engines."""

    def __iter__(self) -> Iterator[EngineRow]:
        return (row for row in self.rows if self.alive is None or row.program in self.alive)

    def present(self) -> list[EngineRow]:
        """Return the engines that should have a process and have a URL."""
        return [row for row in self if row.is_present and row.url]

    def to_join(self, *, begun: bool, together: bool = False) -> list[EngineRow]:
        """Return the engines to which weights are delivered.

        Args:
            begun: True if weights were delivered before: starting engines are then skipped while others serve.
            together: True if all engines start and stop together; all are then included.
        """
        here = [row for row in self.present() if row.turn is EngineTurn.HERE]
        serving = [row for row in here if row.state is EngineStatus.SERVING]
        return here if together or not begun else serving or here

    def behind(self, version: WeightsVersion) -> list[EngineRow]:
        """Return the engines to update to ``version``, without those that keep another version."""
        return [row for row in self.to_join(begun=True) if row.has != version and not (row.holds_for and row.has)]

    def usable(self, oldest: WeightsVersion | None, rollout: str = "") -> list[EngineRow]:
        """Return the engines with weights not older than ``oldest``: those reserved for ``rollout``, or, if empty,
        those not reserved.

        Outdated rows are safe: a start's weights never get older, and it refuses until it has some.
        """
        here = (row for row in self if row.is_present and row.turn is EngineTurn.HERE and row.holds_for == rollout)
        return [row for row in here if oldest is None or (row.has is not None and row.has >= oldest)]

    def to_hold(self, count: int, version: WeightsVersion) -> list[EngineRow]:
        """Return up to ``count`` engines with this version, leaving at least one for training.

        The first ones are chosen because ``megarl scale`` ends the last ones first.
        """
        having = [row for row in self if row.is_present and row.has == version and not row.holds_for]
        return having[: min(count, len(having) - 1)] if having else []

    def ended(self) -> list[EngineRow]:
        """Return the rows to delete."""
        return [e for e in self if not e.wanted and e.state is EngineStatus.ABSENT and e.done == e.order]


# ---- megarl scale


def scaled(rows: Sequence[EngineRow], number: int, workers: int | None = None) -> list[EngineRow]:
    """Return the rows after an order for ``number`` engines; engines with the highest numbers are removed first and
    restored last.

    Args:
        rows: Engines of a job by number.
        workers: Workers of each engine; None keeps the current number.

    Raises ValueError if the job has registered no engines, or ``number`` is below 1.
    """
    if number < 1:
        raise ValueError(f"{number} engines: a job has one or more")
    if not rows:
        raise ValueError("the job has registered no engine")
    new, left = [], number
    for row in rows:
        wanted, left = left > 0, left - 1
        values = {"wanted": wanted, "wanted_workers": workers or row.wanted_workers}
        is_same = all(getattr(row, name) == value for name, value in values.items())
        is_tried_again = row.is_refused and wanted
        new.append(row if is_same and not is_tried_again else change(row, "ordered", order=row.order + 1, **values))
    last = rows[-1]
    more = range(last.number + 1, last.number + 1 + max(0, left))
    size = workers or last.wanted_workers
    return new + [EngineRow(last.program, new_one, wanted_workers=size, order=1) for new_one in more]


def without(rows: Sequence[EngineRow], numbers: Collection[int]) -> list[EngineRow]:
    """Return the rows after an order for these engines to leave."""
    return [
        change(row, "ordered", order=row.order + 1, wanted=False) if row.number in numbers and row.wanted else row
        for row in rows
    ]


# ---- the supervisor


class EngineProcess(NamedTuple):
    """Supervisor's record of an engine's process."""

    workers: int
    served: bool = False
    """True once it has listened."""
    ended: str = ""
    """Cause of its end: "signal", "itself", or "node" for a lost node; empty while it lives."""
    why: str = _ENDED
    """Reason of an end before it served."""


class EngineAction(NamedTuple):
    """One step of the supervisor."""

    what: str
    """start, end, clear (remains of a dead engine), fail (the attempt), remove (the row), or write."""
    number: int
    event: str = ""
    values: Mapping[str, Any] = {}
    workers: int = 0
    """Workers of a start."""
    left: int = 0
    """Replacements left after this action."""
    why: str = ""
    """Reason of a failure."""
    used_up: bool = False
    """True if the failure is that no replacement is left."""


@dataclass
class Replacements:
    """Restarts of dead processes left until the next step (``cluster.replacements``)."""

    all: int
    left: int = field(init=False)
    used: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.left = self.all

    def take(self, name: str) -> bool:
        """Use one up; return False if none is left."""
        if self.left < 1:
            return False
        self.left -= 1
        self.used[name] += 1
        return True

    def refill(self) -> None:
        """Restore the full number."""
        self.left = self.all
        self.used.clear()


def decide(
    rows: Iterable[EngineRow],
    processes: Mapping[int, EngineProcess],
    replacements: Replacements,
    *,
    stopping: bool = False,
) -> list[EngineAction]:
    """Return the supervisor's next actions for these rows. Actions on one engine are in order.

    Changes of worker numbers run one engine at a time, while all others serve and one has weights. Added engines wait
    for them.

    Args:
        processes: Number of an engine -> its last process, unless ended or cleared.
        stopping: True if the job ends: no engine is started.
    """
    rows = list(rows)
    found: list[EngineAction] = []
    counted = [row for row in rows if row.is_present]
    if rows and not counted and not any(row.turn is EngineTurn.AWAY for row in rows) and not stopping:
        refused = next((row for row in rows if row.is_refused), rows[0])
        return [_fail(refused, f"does not start, and no other one is wanted: {refused.refused}")]
    started = [row for row in counted if row.number in processes]
    unfit = [row for row in counted if is_unfit(row, processes.get(row.number)) and not stopping]
    unfit.sort(key=lambda row: row.has is not None)  # engines without weights first: they serve no request
    for row in rows:
        process = processes.get(row.number)
        done = {"done": row.order, "done_turn": row.turn_order}
        kept = done | {"refused": row.refused if row.is_refused else ""}
        dies_asleep = row.turn is EngineTurn.ASLEEP and (process is None or process.ended)
        if not row.is_present or dies_asleep:
            if process is not None:
                found.append(EngineAction("clear" if process.ended else "end", row.number, "ends"))
            is_over = process is None and bool(Fleet([row]).ended())
            found.append(EngineAction("remove", row.number) if is_over else _write(row, "gone", kept))
        elif stopping and (process is None or process.ended):
            continue
        elif process is None or row in unfit:
            if example := _refused_alike(row, rows):
                why = f"engine {example.number} did not start with them: {example.refused}"
                found.append(_write(row, "noted", done | {"refused": why}))
                continue
            others = [processes[o.number] for o in counted if o not in unfit and o.number in processes]
            others_serve = all(o.served and not o.ended for o in others)
            if process is None and not unfit and (others_serve or row.workers in (0, row.fits)):
                found.append(EngineAction("start", row.number, "started", kept, row.fits))
            elif process is not None and row is unfit[0] and others_serve and not _alone_has_weights(row, started):
                found.append(EngineAction("end", row.number, "ends"))
                found.append(EngineAction("start", row.number, "started", {"refused": ""}, row.fits))
        elif not process.ended:
            if process.served:
                found.append(_write(row, "listens", kept | {"workers": process.workers}))
            else:
                found.append(_write(row, "noted", kept))
        elif process.ended == "node":
            return [_fail(row, "is on a node that is gone")]
        elif process.served or process.ended == "signal":
            if not replacements.take(f"engine {row.number}"):
                return [_fail(row, "is not started again", used_up=True)]
            found.append(EngineAction("clear", row.number, left=replacements.left))
            found.append(EngineAction("start", row.number, "started", kept, process.workers))
        else:
            found += _not_started(row, process, done, counted)
            if found[-1].event == "refused":
                counted.remove(row)
            if found[-1].what == "fail":
                return found[-1:]
    return found


def is_unfit(row: EngineRow, process: EngineProcess | None) -> bool:
    """Return True for a living engine whose number of workers must change."""
    if process is None or process.ended or row.turn is not EngineTurn.HERE:
        return False
    return process.workers != row.fits


def _alone_has_weights(row: EngineRow, rows: Sequence[EngineRow]) -> bool:
    """Return True for the only one of several engines that can generate."""
    others = [other for other in rows if other is not row]
    return row.has is not None and bool(others) and all(other.has is None for other in others)


def _refused_alike(row: EngineRow, rows: Sequence[EngineRow]) -> EngineRow | None:
    """Return an engine that failed to start with the same wanted workers and kept its own; None without one."""
    keeping = (other for other in rows if other.is_refused and other.fits != other.wanted_workers)
    alike = (other for other in keeping if other is not row and other.wanted_workers == row.wanted_workers)
    return next(alike, None) if row.workers and not row.is_refused else None


def _not_started(
    row: EngineRow, process: EngineProcess, done: Mapping[str, Any], counted: Sequence[EngineRow]
) -> list[EngineAction]:
    """Decide on an engine that ended by itself before it served: restart it with its earlier workers, drop it if it was
    added by order and others exist, or fail the attempt."""
    values = {**done, "refused": process.why}
    clear = EngineAction("clear", row.number)
    if row.workers not in (0, process.workers):
        return [clear, EngineAction("start", row.number, "started", values, row.workers)]
    if row.order and len(counted) > 1:
        return [clear, EngineAction("write", row.number, "refused", values | {"workers": 0})]
    return [_fail(row, f"does not start{', and no other one is wanted' if row.order else ''}: {process.why}")]


def _fail(row: EngineRow, why: str, *, used_up: bool = False) -> EngineAction:
    return EngineAction("fail", row.number, why=f"engine {row.number} {why}", used_up=used_up)


def _write(row: EngineRow, event: str, values: Mapping[str, Any]) -> EngineAction:
    return EngineAction("write", row.number, event, values)


# ---- the engine


class WeightsAsked(NamedTuple):
    """Engine start and weights required by a request."""

    start: int
    """0: any start."""
    oldest: WeightsVersion | None = None
    newest: WeightsVersion | None = None


def refusal(asked: WeightsAsked, start: int, version: WeightsVersion | None) -> str | None:
    """Return the reason why an engine with this start and weights refuses a request; None if it serves it."""
    if asked.start not in (0, start):
        return f"this is start {start} of the engine, and start {asked.start} was asked"
    if version is None:
        return None  # weights of files, named in the samples
    if asked.oldest is not None and version < asked.oldest:
        return f"weights {version} are older than {asked.oldest}"
    if asked.newest is not None and version > asked.newest:
        return f"weights {version} are newer than {asked.newest}"
    return None
