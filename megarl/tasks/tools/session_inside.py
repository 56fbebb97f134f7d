"""Program of a Python session in the sandbox: ``run`` executes code pieces in shared globals.

It is sent as text and may run in another interpreter (Python 3.9 or later), next to untrusted code: the outside does
not trust its output.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import signal
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAMES: dict[str, Any] = {"__name__": "__main__"}
LAST = 2000
"""Characters kept of an error: its end is the most informative."""
count = 0


class Late(BaseException):
    """The call's time is over. Not an Exception, so that the code cannot catch it by ``except Exception``."""


class Printed(io.TextIOBase):
    """Keeps the first ``most`` printed characters."""

    def __init__(self, most: int) -> None:
        self.parts: list[str] = []
        self.left, self.lost = most, 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if kept := text[: self.left]:
            self.parts.append(kept)
            self.left -= len(kept)
        self.lost += len(text) - len(kept)
        return len(text)


def late(*_: Any) -> None:
    raise Late


def run(code: str, seconds: float, most: int) -> str:
    """Return the output of some code, the value of its last line, and its error."""
    printed, error = Printed(most), ""
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            execute(code)
        except Late:
            error = f"TimeoutError: the code did not end within {seconds:g} s and was stopped; its variables are kept"
        except BaseException as raised:
            error = shown(raised)[-LAST:]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    cut = f"\n({printed.lost} more characters)\n" if printed.lost else ""
    return "".join(printed.parts) + cut + error


def execute(code: str) -> None:
    """Run code; a last line that is an expression is printed as at a prompt."""
    global count
    count += 1
    name = f"<call {count}>"
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    tree = ast.parse(code, name)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, name, "exec", dont_inherit=True), NAMES)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), NAMES)
        if value is not None:
            print(repr(value))


def shown(error: BaseException) -> str:
    """Return the traceback from the code's first frame on."""
    frames = error.__traceback__
    while frames is not None and not frames.tb_frame.f_code.co_filename.startswith("<call"):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))
