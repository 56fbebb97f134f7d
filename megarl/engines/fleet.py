"""The engines of a run: a row each, one writer for each column, and one table of what may become of a row.

A row is a plan and an account. What an engine really has is checked by the engine: each request names the start of the
process and the weights that it reckons with, and the engine refuses others. So a choice that was made from an old row
is right, or is refused at once. Nothing here reads a database or a clock.
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
"""Name of a model's own weights; an adapter has another."""
STARTS = 1_000_000
"""Most starts of processes in one attempt: the numbers of later attempts begin above those of earlier ones."""
_ENDED = "it ended before it served; its log has its last words"


class EngineStatus(StrEnum):
    """State that the supervisor has brought an engine to."""

    ABSENT = "absent"
    STARTING = "starting"
    """Its process runs, and listens nowhere yet."""
    SERVING = "serving"
    ENDING = "ending"


class EngineTurn(StrEnum):
    """Use of devices that engines share with the trainer; engines with devices of their own are always HERE."""

    HERE = "here"
    ASLEEP = "asleep"
    """Without weights and KV cache; one that dies is started again at its next turn."""
    AWAY = "away"
    """Without a process."""


class ColumnOwner(StrEnum):
    """Owner of columns."""

    SCALE = "megarl scale"
    TRAINER = "the process that delivers weights"
    SUPERVISOR = "the supervisor of the job"


class ProvenWeights(NamedTuple):
    """Weights that an engine has proven to have."""

    what: str
    """``BASE``, or an adapter's name."""
    version: WeightsVersion
    start: int
    """Start of the process that has proven them."""


@dataclass(frozen=True)
class EngineRow:
    """An engine of a job."""

    program: str
    number: int
    """Number of the replica; the ranks of its workers in the weight plan follow from it."""
    # by megarl scale
    wanted: bool = True
    wanted_workers: int = 1
    """Workers that it is to have: tp * pp."""
    order: int = 0
    """Number of changes of the two before; 0: the job began with it."""
    # by the process that delivers weights
    turn: EngineTurn = EngineTurn.HERE
    turn_order: int = 0
    """Number of changes of ``turn``."""
    weights: tuple[ProvenWeights, ...] = ()
    """Weights that were delivered last, and proven, by name; none once they are lost."""
    holds_for: str = ""
    """Rollout of the evaluation for which it keeps ``weights``."""
    # by the supervisor
    state: EngineStatus = EngineStatus.ABSENT
    start: int = 0
    """Number of its last start, which no other start in the run has. The process knows it."""
    url: str = ""
    """Empty until the supervisor has given it a place."""
    workers: int = 0
    """Workers with which it served last; 0: it never did."""
    done: int = 0
    """Last ``order`` that was carried out."""
    done_turn: int = 0
    """Last ``turn_order`` that was carried out."""
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
        """Workers that it is to have, or keeps where it did not start with others."""
        return self.workers if self.is_refused and self.workers else self.wanted_workers

    @property
    def is_present(self) -> bool:
        """True if it is to have a process."""
        has_served = self.workers not in (0, self.wanted_workers)
        return self.wanted and self.turn is not EngineTurn.AWAY and (has_served or not self.is_refused)

    @property
    def is_done(self) -> bool:
        """True if its orders were carried out, or refused."""
        return self.done == self.order and self.done_turn == self.turn_order

    @property
    def has(self) -> WeightsVersion | None:
        """The model's own weights that this start of it has proven to have."""
        return self.proven(BASE)

    def proven(self, what: str) -> WeightsVersion | None:
        """Version of ``BASE``, or of an adapter, that this start of it has proven to have."""
        serves = self.state is EngineStatus.SERVING
        return next((w.version for w in self.weights if w.what == what and serves and w.start == self.start), None)

    def with_weights(self, what: str, version: WeightsVersion | None) -> EngineRow:
        """Row once this start of it has proven ``version``; None: once it has lost all its weights."""
        others = (w for w in self.weights if w.what != what and w.start == self.start)
        weights = () if version is None else (*others, ProvenWeights(what, version, self.start))
        return change(self, "delivered", weights=tuple(sorted(weights)))


COLUMNS: Mapping[ColumnOwner, frozenset[str]] = {
    ColumnOwner.SCALE: frozenset({"wanted", "wanted_workers", "order"}),
    ColumnOwner.TRAINER: frozenset({"turn", "turn_order", "weights", "holds_for"}),
    ColumnOwner.SUPERVISOR: frozenset({"state", "start", "url", "workers", "done", "done_turn", "refused"}),
}


class Forbidden(ValueError):
    """A change of a row that the table does not have."""


class _Rule(NamedTuple):
    """One event: who may write which columns in which states, and what must hold of the row before and after it."""

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
"""Event -> its rule. The beginning and the end of a row are none: ``megarl scale`` and the start of a job insert rows,
the supervisor deletes them."""


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
    """Rows as one look into the store has found them."""

    rows: Sequence[EngineRow]
    alive: Collection[str] | None = None
    """Programs that give heartbeats, where the engines are other jobs'; None: the engines are the job's own."""

    def __iter__(self) -> Iterator[EngineRow]:
        return (row for row in self.rows if self.alive is None or row.program in self.alive)

    def present(self) -> list[EngineRow]:
        """Engines that are to have a process, and have a place."""
        return [row for row in self if row.is_present and row.url]

    def to_join(self, *, begun: bool, together: bool = False) -> list[EngineRow]:
        """Engines that weights are delivered to.

        Args:
            begun: Weights were delivered before: then engines that are starting are left out while others serve.
            together: All come and go at once, and are waited for.
        """
        here = [row for row in self.present() if row.turn is EngineTurn.HERE]
        serving = [row for row in here if row.state is EngineStatus.SERVING]
        return here if together or not begun else serving or here

    def behind(self, version: WeightsVersion) -> list[EngineRow]:
        """Engines that are to be given ``version``: none that keeps another one."""
        return [row for row in self.to_join(begun=True) if row.has != version and not (row.holds_for and row.has)]

    def usable(self, oldest: WeightsVersion | None, rollout: str = "") -> list[EngineRow]:
        """Engines that may be asked for tokens of weights that are not older: those that keep theirs for ``rollout``,
        or, where it is empty, those that keep none.

        A look of long ago does no harm: a start never has older weights than it had, and refuses until it has some.
        """
        here = (row for row in self if row.is_present and row.turn is EngineTurn.HERE and row.holds_for == rollout)
        return [row for row in here if oldest is None or (row.has is not None and row.has >= oldest)]

    def to_hold(self, count: int, version: WeightsVersion) -> list[EngineRow]:
        """The first ``count`` engines that have this version, so that one at least is left for training.

        ``megarl scale`` ends the last ones first: an evaluation goes on until none but its own engines would be left.
        """
        having = [row for row in self if row.is_present and row.has == version and not row.holds_for]
        return having[: min(count, len(having) - 1)] if having else []

    def ended(self) -> list[EngineRow]:
        """Rows to delete."""
        return [e for e in self if not e.wanted and e.state is EngineStatus.ABSENT and e.done == e.order]


# ---- megarl scale


def scaled(rows: Sequence[EngineRow], number: int, workers: int | None = None) -> list[EngineRow]:
    """Rows after an order for so many engines; those with the highest numbers go first, and come back last.

    Args:
        rows: Engines of a job by number.
        workers: Of each engine; None leaves them as they are.

    Raises ValueError where the job has registered none, or ``number`` is below 1.
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


# ---- the supervisor


class EngineProcess(NamedTuple):
    """An engine's process as its supervisor knows it."""

    workers: int
    served: bool = False
    """It has listened."""
    ended: str = ""
    """"signal", "itself", or "node" where its node is gone; empty while it lives."""
    why: str = _ENDED
    """Reason where it ended before it served."""


class EngineAction(NamedTuple):
    """One step of the supervisor."""

    what: str
    """start, end, clear (what is left of a dead one), fail (the attempt), remove (the row), or write."""
    number: int
    event: str = ""
    values: Mapping[str, Any] = {}
    workers: int = 0
    """Workers that a start is to have."""
    left: int = 0
    """Replacements that are left after this one."""
    why: str = ""
    """Reason of a failure."""
    used_up: bool = False
    """The failure is that no replacement is left."""


@dataclass
class Replacements:
    """Starts of what has died that are left until the next step (``cluster.replacements``)."""

    all: int
    left: int = field(init=False)
    used: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.left = self.all

    def take(self, name: str) -> bool:
        """Use one up; return False where none is left."""
        if self.left < 1:
            return False
        self.left -= 1
        self.used[name] += 1
        return True

    def refill(self) -> None:
        """Have all again."""
        self.left = self.all
        self.used.clear()


def decide(
    rows: Iterable[EngineRow],
    processes: Mapping[int, EngineProcess],
    replacements: Replacements,
    *,
    stopping: bool = False,
) -> list[EngineAction]:
    """Say what the supervisor does now, having read these rows. Actions on one engine are in order.

    Engines get other workers one after another, once all others serve and one of them has weights. Engines that are
    added wait for that.

    Args:
        processes: Number of an engine -> its last process, unless it was ended or cleared.
        stopping: The job ends: none is started.
    """
    rows = list(rows)
    found: list[EngineAction] = []
    counted = [row for row in rows if row.is_present]
    if rows and not counted and not any(row.turn is EngineTurn.AWAY for row in rows) and not stopping:
        refused = next((row for row in rows if row.is_refused), rows[0])
        return [_fail(refused, f"does not start, and no other one is wanted: {refused.refused}")]
    started = [row for row in counted if row.number in processes]
    unfit = [row for row in counted if is_unfit(row, processes.get(row.number)) and not stopping]
    unfit.sort(key=lambda row: row.has is not None)  # those without weights first: nobody waits for them
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
    """Return True for an engine that lives, and is to have other workers."""
    if process is None or process.ended or row.turn is not EngineTurn.HERE:
        return False
    return process.workers != row.fits


def _alone_has_weights(row: EngineRow, rows: Sequence[EngineRow]) -> bool:
    """Return True for the only one of several engines that can generate."""
    others = [other for other in rows if other is not row]
    return row.has is not None and bool(others) and all(other.has is None for other in others)


def _refused_alike(row: EngineRow, rows: Sequence[EngineRow]) -> EngineRow | None:
    """Return an engine that keeps its workers, since it did not start with those that this one is to have."""
    keeping = (other for other in rows if other.is_refused and other.fits != other.wanted_workers)
    alike = (other for other in keeping if other is not row and other.wanted_workers == row.wanted_workers)
    return next(alike, None) if row.workers and not row.is_refused else None


def _not_started(
    row: EngineRow, process: EngineProcess, done: Mapping[str, Any], counted: Sequence[EngineRow]
) -> list[EngineAction]:
    """Decide on an engine that ended by itself before it served: it has its earlier workers again, is left out where
    it came by order and others are there, or ends the attempt."""
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
    """Start and weights of an engine that a request asks for."""

    start: int
    """0: any start."""
    oldest: WeightsVersion | None = None
    newest: WeightsVersion | None = None


def refusal(asked: WeightsAsked, start: int, version: WeightsVersion | None) -> str | None:
    """Reason why an engine of this start, with these weights, computes no answer; None where it does."""
    if asked.start not in (0, start):
        return f"this is start {start} of the engine, and start {asked.start} was asked"
    if version is None:
        return None  # weights of files, which the samples name
    if asked.oldest is not None and version < asked.oldest:
        return f"weights {version} are older than {asked.oldest}"
    if asked.newest is not None and version > asked.newest:
        return f"weights {version} are newer than {asked.newest}"
    return None
