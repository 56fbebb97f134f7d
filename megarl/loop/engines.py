"""A job's engines as all its trainer ranks see them together: joined, given the weights, and given them again when one was replaced.

Every rank makes the same calls and comes out of them alike: with a result, or with an error (or ``Stopped``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from megarl.errors import EngineError, WeightsDiffer, WeightSyncError
from megarl.rollout.watch import EngineWatch

if TYPE_CHECKING:
    from megarl.loop.session import Session

T = TypeVar("T")
TRIES = 4
"""Of one publication, each but the first after an engine has died in the one before."""


class Stopped(Exception):
    """A call failed after the job was asked to stop; raised on every rank. Model and state are as before the call."""


def connect(s: Session) -> None:
    """Wait for the engines, and join them for weight syncs. Raises EngineError, WeightSyncError."""
    _again_if_one_dies(s, lambda: None, join=True)


def publish(s: Session) -> dict[str, float]:
    """The actor's weights as the session's version to every engine, proven equal; sync metrics. Raises EngineError, WeightSyncError."""
    return _again_if_one_dies(s, lambda: _publish(s), join=False)


def publish_again(s: Session, why: str | None) -> None:
    """The same weights under the same version, for an engine that has replaced one that had them; what others are computing they are
    asked for again.

    Args:
        why: How it is, on the rank that saw it.
    """
    s.say(f"{why}: it has replaced one that died; joining it")
    _again_if_one_dies(s, lambda: _publish(s, abort=True), join=True)
    s.say(f"published {s.version} again; the rollout goes on")


def watch(s: Session) -> EngineWatch:
    """Of the engines while they answer, on rank 0."""
    assert s.publisher is not None, "connect first"
    return s.publisher.watch(s.version)


def _publish(s: Session, *, abort: bool = False) -> dict[str, float]:
    assert s.publisher is not None, "connect first"
    publisher, written = s.publisher, s.actor.written()
    report = _together(s, lambda: publisher.publish(s.actor.tensors, s.version, written=written, abort=abort))
    return report.metrics() | {"sync/probe_diff_max": _together(s, s.probe)}


def _again_if_one_dies(s: Session, do: Callable[[], T], *, join: bool) -> T:
    """``do``; where an engine died in it, once more when the one that replaces it has been joined.

    What goes wrong while all engines live is raised at once, above all that weights differ. A job that is asked to
    stop gets no other engine: then any failure but a difference of weights raises ``Stopped``.
    """
    assert s.publisher is not None, "connect first"
    for left in reversed(range(TRIES)):
        try:
            if join:
                _together(s, s.publisher.connect)
            return do()
        except (EngineError, WeightSyncError) as error:
            differ = not s.agree(not isinstance(error, WeightsDiffer))
            if not differ and s.stop_requested():
                raise Stopped(str(error)) from error
            found = [] if differ else s.publisher.died()
            if s.agree(not found):  # only rank 0 finds any
                raise
            if not left:
                died = "".join(f"; {fate}" for fate in found)
                raise WeightSyncError(f"{error} (tried {TRIES} times, an engine died each time{died})") from error
            s.say(f"an engine died in a weight sync ({'; '.join(found)}); waiting for the one that replaces it")
            join = True
    raise AssertionError("unreachable")


def _together(s: Session, do: Callable[[], T]) -> T:
    """``do``, which has failed on every rank when it has on one."""
    failure: EngineError | WeightSyncError | None = None
    try:
        result = do()
    except (EngineError, WeightSyncError) as error:
        failure = error
    try:
        if s.agree(failure is None):
            return result
        raise failure or WeightSyncError("a weight sync failed on another trainer rank, whose log says why")
    finally:
        failure = None  # its traceback holds this frame
