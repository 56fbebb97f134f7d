"""Kills at every file-system call of a piece of code, each in a process of its own."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

_CALLS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate")
_KILLED = 9


def _changes_files(event: str, args: tuple[Any, ...]) -> bool:
    return event in _CALLS or (
        event == "open" and isinstance(args[2], int) and bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    )


def killed_before(call: int, do: Callable[[], object]) -> bool:
    """Run ``do`` in a child that ends, without any clean-up, before its ``call``-th change of a file; False where it
    has fewer."""
    if (pid := os.fork()) == 0:
        left = itertools.count(call, -1)

        def end(event: str, args: tuple[Any, ...]) -> None:
            if _changes_files(event, args) and next(left) == 0:
                os._exit(_KILLED)

        try:
            sys.addaudithook(end)
            do()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, _KILLED), f"it failed before call {call}"
    return status == _KILLED


def every_kill(prepare: Callable[[], Callable[[], object]]) -> Iterator[int]:
    """``prepare()()`` killed before its first change of a file, its second, …; yields after each, and after the one
    that ended."""
    for call in itertools.count():
        killed = killed_before(call, prepare())
        yield call
        if not killed:
            return
