"""Program of a Python session in the sandbox: ``run`` executes one piece of code after another in the same names.

Read as a text and run there by an interpreter that may be another one (Python 3.9 or later), beside code of a model:
nothing that it says is believed outside.
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
"""Characters of an error that are kept: its end says most."""
count = 0


class Late(BaseException):
    """The time of a call is over; no ``except Exception`` of the code takes it."""


class Printed(io.TextIOBase):
    """The first characters that are printed."""

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
    """Text of what some code prints, of its last line's value, and of its error."""
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
    """Traceback from the code's own first frame on."""
    frames = error.__traceback__
    while frames is not None and not frames.tb_frame.f_code.co_filename.startswith("<call"):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))
