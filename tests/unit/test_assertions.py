"""Assertions only look: ``python -O`` leaves them out, and must not change what is computed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import megarl

ROOT = Path(megarl.__file__).parent
LOOKS = {
    "Path",
    "all",
    "any",
    "contains",
    "exists",
    "get_args",
    "get_vocab_size",
    "getattr",
    "is_outline",
    "isinstance",
    "len",
    "max",
    "min",
    "prod",
    "range",
    "set",
    "sorted",
    "startswith",
    "sum",
    "tuple",
    "type",
    "volume",
    "whole",
}
"""Functions and methods that an assertion may call, because they change nothing."""


def effects(source: str) -> list[str]:
    """Assertions that call something else, assign, or wait."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            inner = list(ast.walk(node.test))
            called = {ast.unparse(call.func).rpartition(".")[2] for call in inner if isinstance(call, ast.Call)}
            if called - LOOKS or any(isinstance(part, ast.NamedExpr | ast.Await | ast.Yield) for part in inner):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_no_assertion_does_work() -> None:
    found = {str(path): lines for path in sorted(ROOT.rglob("*.py")) if (lines := effects(path.read_text()))}
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "assert not optimizer.prepare_grads()",
        "assert (n := read())",
        "assert f(len(x))",
        "async def f(): assert await x",
    ],
)
def test_work_in_an_assertion_is_found(source: str) -> None:
    assert len(effects(source)) == 1
