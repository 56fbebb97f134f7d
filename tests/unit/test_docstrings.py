"""Public functions have docstrings, which begin with a verb or a plain noun."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import megarl

PACKAGE = Path(megarl.__file__).parent
SHARE = 0.85
RIDDLE = re.compile(r"(What|Of|Whether|How)\b")
"""Words that no docstring begins with: their head would be missing."""


class Documented(NamedTuple):
    where: str
    public: bool
    """A function or method without an underscore, in a class without one."""
    text: str | None


def documented(source: str, file: str) -> Iterator[Documented]:
    """The module, its classes and functions, and the texts below assignments."""
    tree = ast.parse(source)
    yield Documented(file, False, ast.get_docstring(tree))
    yield from _within(tree, file, True)


def _within(node: ast.AST, file: str, public: bool) -> Iterator[Documented]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            overload = any("overload" in ast.unparse(d) or "setter" in ast.unparse(d) for d in child.decorator_list)
            named = public and not child.name.startswith("_") and not overload
            yield Documented(f"{file}:{child.lineno} {child.name}", named, ast.get_docstring(child))
        elif isinstance(child, ast.ClassDef):
            yield Documented(f"{file}:{child.lineno} {child.name}", False, ast.get_docstring(child))
            yield from _within(child, file, public and not child.name.startswith("_"))
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _within(child, file, public)
        elif (
            isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and isinstance(child.value.value, str)
        ):
            yield Documented(f"{file}:{child.lineno}", False, child.value.value)


@functools.cache
def found() -> list[Documented]:
    return [d for path in sorted(PACKAGE.rglob("*.py")) for d in documented(path.read_text(), path.name)]


def test_most_public_functions_have_a_docstring() -> None:
    public = [d for d in found() if d.public]
    missing = [d.where for d in public if not d.text]
    assert len(public) > 1000 and len(missing) < (1 - SHARE) * len(public), missing


def test_no_docstring_begins_as_a_riddle() -> None:
    assert [(d.where, d.text[:60]) for d in found() if d.text and RIDDLE.match(d.text)] == []


def test_riddles_are_seen_wherever_they_stand() -> None:
    source = 'A = 1\n"""What A is."""\nclass B:\n    def c(self):\n        """Of c."""\n    def _d(self): ...\n'
    texts = [(d.public, d.text) for d in documented(source, "a.py")]
    assert texts == [(False, None), (False, "What A is."), (False, None), (True, "Of c."), (False, None)]
