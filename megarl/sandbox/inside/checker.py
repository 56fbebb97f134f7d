"""The tests' side: runs assertions in a separate sandbox and calls functions of the program in another.

What comes back is plain data (``values``) or a number for an object that stays in the program's sandbox. So no code of
the program runs here: it can neither change ``==`` or ``assert`` nor end this process nor write this process's verdict.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # without the enums of ``signal``
import builtins
import os
import time

import values  # type: ignore[import-not-found]  # a module of the bundle that the launcher brings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_REPLY_BYTES = 2**24
CONTROL = (
    (StopIteration, StopAsyncIteration, BaseExceptionGroup)
    if hasattr(builtins, "BaseExceptionGroup")
    else (StopIteration, StopAsyncIteration)
)
"""Exceptions of the program that are not re-raised here: the first two would silently end a ``map``, ``zip`` or ``for``
of the tests."""


class Gone(BaseException):
    """The program has ended or sent an invalid reply. A BaseException, so that the tests' ``except Exception`` does not
    catch it."""

    remote = True


class Unsupported(BaseException):
    """The tests need a feature that this sandbox lacks. A BaseException like ``Gone``."""


class _TooSlow(BaseException):
    """A test timed out."""


class Clock:
    """Time limits: ``wall_s`` for each test, ``total_s`` for all from now on. The program cannot affect them: the
    signal stays in this process."""

    def __init__(self, wall_s: float, total_s: float) -> None:
        self._wall_s = wall_s
        self._end = time.monotonic() + total_s
        self._runs = self._own = False
        self.struck = False
        """True if the last test exceeded its own limit."""
        self.over = False
        """True if the total time ran out first: the last test and later ones have no result."""
        signal.signal(signal.SIGALRM, self._strike)

    def run(self, action: Callable[[], None]) -> None:
        """Run an action with its limit. Raises its exceptions, or _TooSlow (if a test catches it, ``struck`` or
        ``over`` is still set)."""
        left = self._end - time.monotonic()
        self.struck, self.over, self._own = False, left <= 0, self._wall_s <= left
        if self.over:
            return
        self._runs = True
        signal.setitimer(signal.ITIMER_REAL, min(self._wall_s, left))
        try:
            action()
        finally:
            self._runs = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _strike(self, *_: Any) -> None:
        if self._runs:
            self.struck, self.over = self._own, not self._own
            raise _TooSlow("limit: wall")


class ProgramChannel:
    """Requests to the program and its replies."""

    def __init__(self, descriptor: int) -> None:
        self._requests = os.fdopen(os.dup(descriptor), "wb")
        self._replies = os.fdopen(descriptor, "rb")
        self.lost: str | None = None
        """Reason why the program is lost, or None. Once set, no test passes."""

    def ask(self, do: str, on: int = -1, args: Any = (), named: Any = None, **more: Any) -> Any:
        if self.lost is not None:
            raise Gone(self.lost)
        try:
            return self._ask(do, on, args, named, more)
        except (Gone, _TooSlow) as error:  # a late reply would be taken for the next call's
            self.lost = str(error)
            raise

    def _ask(self, do: str, on: int, args: Any, named: Any, more: dict[str, Any]) -> Any:
        request = {"do": do, "on": on, "args": [_encode(item) for item in args], **more}
        request["named"] = {name: _encode(item) for name, item in (named or {}).items()}
        data = values.dumps(request).encode()
        try:
            self._requests.write(len(data).to_bytes(4, "little") + data)
            self._requests.flush()
            size = int.from_bytes(self._replies.read(4), "little")
            if not 0 < size <= MAX_REPLY_BYTES:
                raise Gone("the program ended, or did not answer")
            data = self._replies.read(size)
            if len(data) < size:
                raise Gone("the program ended while it answered")
            reply = values.loads(data.decode())
            if "value" in reply:
                if do == "names":
                    return {name: self._decode(item) for name, item in reply["value"].items()}
                return self._decode(reply["value"])
            raised, message = reply["raised"], str(reply["message"])
        except OSError as error:
            raise Gone("the program ended") from error
        except Exception as error:
            raise Gone("the program's answer is no value") from error
        raise _exception(raised, message)

    def _decode(self, data: Any) -> Any:
        return values.decode(data, lambda kind, number: _remote(self, kind, number))


def _exception(names: Any, message: str) -> BaseException:
    """Return the nearest standard exception, but for ``CONTROL`` kinds only their base; ``remote`` marks it as the
    program's."""
    for name in names if isinstance(names, list) else []:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, CONTROL):
            made = type(
                kind.__name__,
                (kind,),
                {"remote": True, "__init__": lambda self, *_: None, "__str__": lambda self, text=message: text},
            )
            error: Exception = made(message)
            return error
        if isinstance(kind, type) and issubclass(kind, CONTROL):
            message = f"{kind.__name__}: {message}"
    return Gone(message)


def _remote(channel: ProgramChannel, kind: str, number: Any) -> Any:
    if kind != "handle" or type(number) is not int:
        raise ValueError(f"unknown type {kind!r}")
    return Remote(channel, number)


def _encode(value: Any) -> Any:
    return values.encode(value, _handle)


def _handle(value: Any) -> Any:
    if isinstance(value, Remote):
        return {"t": "handle", "v": object.__getattribute__(value, "_number")}
    raise Unsupported(f"the tests pass a {type(value).__name__}, which cannot go to the program")


class Remote:
    """An object of the program. It equals only itself and is always true: its own ``__eq__`` and ``__bool__`` are not
    called."""

    def __init__(self, channel: ProgramChannel, number: int) -> None:
        object.__setattr__(self, "_link", channel)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return _ask(self, "call", args, named)

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "get", (name,))

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", (name, value))

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "item", (key,))

    def __iter__(self) -> Any:
        return iter(_ask(self, "list"))

    def __len__(self) -> int:
        return int(_ask(self, "length"))

    def __str__(self) -> str:
        return str(_ask(self, "text"))

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and _number(self) == _number(other)

    def __hash__(self) -> int:
        return hash(_number(self))


def _number(remote: Remote) -> Any:
    return object.__getattribute__(remote, "_number")


def _ask(remote: Remote, do: str, args: Any = (), named: Any = None) -> Any:
    return object.__getattribute__(remote, "_link").ask(do, _number(remote), args, named)


def check(
    tests: list[str],
    setup: str,
    entry: str | None,
    asked: list[str],
    library: dict[str, list[str]],
    times: tuple[float, float],
    channel: int,
) -> dict[str, Any]:
    """``{"passed": [bool], "reasons": [str], "row_error": str | None}``, for the tests that ran in time.

    ``asked`` and ``library`` are ``sandbox.name_owners``'; ``times`` are seconds: of one test, and of the program's
    import, setup and all tests.
    """
    namespace: dict[str, Any] = {"__name__": "tests"}
    try:
        compiled = compile(setup, "<setup>", "exec")
        parts = [compile(test, f"<test {i}>", "exec") for i, test in enumerate(tests)]
        for name, (module, attribute) in library.items():
            namespace[name] = getattr(__import__(module), attribute) if attribute else __import__(module)
    except (SyntaxError, ValueError) as error:
        return _broken(f"the tests do not parse: {error}")
    except ImportError as error:
        return _broken(f"the tests' setup fails: {error}")
    program, clock = ProgramChannel(channel), Clock(*times)

    def prepare() -> None:
        theirs = program.ask("names", names=asked)
        if entry and entry not in theirs:
            raise NameError(f"the program does not define {entry}")
        namespace.update({name: theirs[name] for name in asked if name in theirs})
        exec(compiled, namespace)
        if entry:
            namespace[entry] = namespace["candidate"] = theirs[entry]

    try:
        clock.run(prepare)
    except BaseException as error:
        if isinstance(error, (ImportError, Unsupported)) and not hasattr(error, "remote"):
            return _broken(f"the tests' setup fails: {error}")
        count = 0 if clock.over else len(tests)
        return {"passed": [False] * count, "reasons": [_message(error)] * count, "row_error": None}
    reasons: list[str] = []
    try:
        for part in parts:
            reason = _run(clock, part, namespace)
            if clock.over:
                break
            reasons.append(reason or program.lost or ("limit: wall" if clock.struck else ""))
    except Unsupported as error:
        return _broken(str(error))
    return {"passed": [not reason for reason in reasons], "reasons": reasons, "row_error": None}


def _broken(why: str) -> dict[str, Any]:
    return {"passed": [], "reasons": [], "row_error": why}


def _run(clock: Clock, part: Any, namespace: dict[str, Any]) -> str:
    try:
        clock.run(lambda: exec(part, namespace))
    except Unsupported:
        raise
    except BaseException as error:  # SystemExit too: a test that ends this process has not passed
        return _message(error)
    return ""


def _message(error: BaseException) -> str:
    if isinstance(error, _TooSlow):
        return str(error)
    try:
        text = str(error)
    except BaseException:  # a Remote in the arguments of an assertion: its text may fail
        text = ""
    return f"{type(error).__name__}: {text:.300}" if text else type(error).__name__
