"""Public functions have docstrings, which begin with a verb or a plain noun."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import megarl

PACKAGE = Path(megarl.__file__).parent
SHARE = 0.85
RIDDLE = re.compile(r"(What|Of|Whether|How|Whose|Which|Those|As|None where)\b")
"""Words that no docstring begins with: their head would be missing."""
READ_TWICE = re.compile(
    r"\bbe (it|they) |\bof now\b|\bfor ever\b|\bwhom\b|\bthere or not\b|\bno more(?=[,.;:]|$)|\bof which\b"
    r"|\bso (many|much|often)\b(?! (that|as))|\b(those|all) that there are\b|\b(whoever|somebody)\b"
)
"""Words of sentences that a reader reads twice."""


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


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def test_no_docstring_and_no_comment_must_be_read_twice() -> None:
    texts = [(d.where, d.text) for d in found() if d.text]
    for path in sorted(PACKAGE.rglob("*.py")):
        texts += [(f"{path.name}:{line}", text) for line, text in comments(path.read_text())]
    assert len(texts) > 7000
    assert [(where, text[:80]) for where, text in texts if READ_TWICE.search(" ".join(text.split()))] == []


@pytest.mark.parametrize("text", ["those\n  of now", "None, be it absent", "rows, of which some", "so many engines"])
def test_sentences_to_be_read_twice_are_seen(text: str) -> None:
    assert READ_TWICE.search(" ".join(text.split()))


def test_riddles_are_seen_wherever_they_stand() -> None:
    source = 'A = 1\n"""What A is."""\nclass B:\n    def c(self):\n        """Of c."""\n    def _d(self): ...\n'
    texts = [(d.public, d.text) for d in documented(source, "a.py")]
    assert texts == [(False, None), (False, "What A is."), (False, None), (True, "Of c."), (False, None)]
