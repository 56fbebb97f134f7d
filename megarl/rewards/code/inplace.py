"""Find tests that check a function's changes to its argument. The sandbox passes copies, so tests never see
such changes."""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Iterator

from megarl.sandbox.interface import Checks
from megarl.sandbox.name_owners import undefined

MAKERS = (
    "list",
    "dict",
    "set",
    "deque",
    "defaultdict",
    "Counter",
    "OrderedDict",
    "bytearray",
    "sorted",
    "copy",
    "deepcopy",
)
CHANGEABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


@functools.lru_cache(maxsize=64)  # a group's responses share tests
def looked_at_in_place(checks: Checks) -> str | None:
    """Return the name of a list, dict or set that tests pass to the program and read in a later statement. Passing it
    again is not reading. None if there is no such name.

    Within one statement the tests are assumed to check the return value (``assert f(x) == sorted(x)``). Raises
    SyntaxError or ValueError for tests that do not parse.
    """
    source = "\n".join([checks.setup, *checks.tests])
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    made = set(_changeable_names(nodes)) & {
        item.id for node in nodes if isinstance(node, ast.Call) for item in _names_given(node)
    }
    if not made:
        return None
    theirs = {name for name in undefined(source) if not hasattr(builtins, name)} | {"candidate", checks.entry}
    theirs |= {target.id for node in nodes if isinstance(node, ast.Assign) and _makes_object(node.value, theirs)
               for target in node.targets if isinstance(target, ast.Name)}  # fmt: skip
    return next((name for scope in _scopes(tree) if (name := _in_scope(scope, made, theirs))), None)


def _names_given(call: ast.Call) -> list[ast.Name]:
    return [item for item in [*call.args, *(word.value for word in call.keywords)] if isinstance(item, ast.Name)]


def _scopes(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Yield the statements of the module, and of each function."""
    yield tree.body
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.body


def _in_scope(body: list[ast.stmt], made: set[str], theirs: set[str | None]) -> str | None:
    given: set[str] = set()
    for statement in _simple(body):
        calls = [
            node
            for node in ast.walk(statement)
            if isinstance(node, ast.Call) and _root(node.func) in theirs and not _makes_object(node, theirs)
        ]
        arguments = [item for call in calls for item in _names_given(call)]
        read = {
            node.id
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node not in arguments
        }
        if found := given & read:
            return min(found)
        given |= {item.id for item in arguments} & made
        given -= {
            node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
    return None


def _simple(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield statements in order, compound ones as their heads, then their bodies. Functions and classes are skipped."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        held = [part for name in ("body", "handlers", "orelse", "finalbody") for part in getattr(statement, name, [])]
        if not held:
            yield statement
            continue
        yield from (node for name, node in ast.iter_fields(statement) if isinstance(node, ast.expr))
        inner = [part for item in held for part in (item.body if isinstance(item, ast.ExceptHandler) else [item])]
        yield from _simple(inner)


def _makes_object(node: ast.expr, theirs: set[str | None]) -> bool:
    """Return True for ``Solution()``: the name of a class of the program, and its constructor is not tested."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in theirs
        and node.func.id[:1].isupper()
    )


def _root(node: ast.expr) -> str | None:
    """Return the root name: ``Solution`` for ``Solution().sort``."""
    while isinstance(node, (ast.Attribute, ast.Call)):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else None


def _changeable_names(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign) and _changeable(node.value):
            targets = node.targets
        if isinstance(node, ast.AnnAssign) and node.value is not None and _changeable(node.value):
            targets = [node.target]
        if isinstance(node, ast.For) and any(map(_changeable, getattr(node.iter, "elts", []))):
            targets = [node.target]
        yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))


def _changeable(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple):
        return any(map(_changeable, node.elts))
    if isinstance(node, ast.BinOp):
        return _changeable(node.left) or _changeable(node.right)
    return isinstance(node, CHANGEABLE) or (
        isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in MAKERS
    )
