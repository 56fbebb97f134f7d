"""Tests use what a user of a module uses: no private name of megarl."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import megarl

PACKAGE = Path(megarl.__file__).parent
TESTS = PACKAGE.parent / "tests"
ALLOWED = {
    "_C": "the compiled extension, whose functions the tests of kernels call",
    "_parameters": "torch's: a module's table of its parameters",
    "_buffers": "torch's: a module's table of its buffers",
    "_compared": "ColdCheck's: the public names of a part are the hooks of a step, which wait for all of the check",
}
"""Name -> why tests may use it."""
BY_NAME = {"setattr", "getattr", "delattr", "hasattr", "object"}
"""Functions that are given a name as a string: builtins, those of ``pytest.MonkeyPatch``, and ``mock.patch.object``."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def defined(tree: ast.AST) -> Iterator[str]:
    """Private names of functions, classes, attributes and variables that a file defines."""
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, FUNCTIONS):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            name = node.attr
        if is_private(name):
            yield name


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def uses(source: str, private: frozenset[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of each use of a name of ``private``, also in strings that are programs. An attribute of ``self`` is
    a class's own where the file assigns it."""
    if private.isdisjoint(re.findall(r"\b_[A-Za-z]\w*", source)):
        return
    tree = ast.parse(source)
    own = set(defined(tree))
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "megarl":
            names = [alias.name for alias in node.names if is_private(alias.name)]
        elif isinstance(node, ast.Attribute) and not (is_own(node) and node.attr in own):
            names = [node.attr]
        elif isinstance(node, ast.Call) and called(node) in BY_NAME:
            texts = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            names = [text.rpartition(".")[2] for text in texts if isinstance(text, str)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\nimport " in node.value:
            try:
                yield from ((node.lineno, name) for _, name in uses(node.value, private))
            except SyntaxError:
                continue  # part of a program
        yield from ((node.lineno, name) for name in names if name in private)  # type: ignore[attr-defined]


def test_tests_use_no_private_name_but_those_that_are_allowed() -> None:
    trees = (ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py"))
    private = frozenset(name for tree in trees for name in defined(tree)) | ALLOWED.keys()
    found = {
        f"{path.relative_to(TESTS)}:{line}": name
        for path in sorted(TESTS.rglob("*.py"))
        for line, name in uses(path.read_text(), private)
    }
    others = {where: name for where, name in found.items() if name not in ALLOWED}
    assert not others, f"{others}: call what a user calls, or make the name public"
    assert set(found.values()) == ALLOWED.keys()


def test_private_names_are_seen_wherever_they_stand() -> None:
    package = "class A:\n    def __init__(self):\n        self._a = 1\n    def _b(self): ...\n_c: int = 2\nd = 3\n"
    private = frozenset(defined(ast.parse(package)))
    assert private == {"_a", "_b", "_c"}
    source = (
        "from megarl.p import _c, d\nfrom lib import _c\na._a\na.d\na._other\n"
        "def f():\n    monkeypatch.setattr(a, '_b', 1)\n    mock.patch.object(a, '_a', 1)\n"
        "    monkeypatch.setattr('megarl.p._c', 1)\n    print('_a')\n"
        "class T:\n    def f(self):\n        self._a = self._b\nCODE = '''\nimport megarl\nmegarl.p._c\n'''\n"
    )
    assert sorted(uses(source, private)) == [
        (1, "_c"), (3, "_a"), (7, "_b"), (8, "_a"), (9, "_c"), (13, "_b"), (14, "_c"),
    ]  # fmt: skip
