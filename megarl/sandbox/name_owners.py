"""Whose is each name that tests use: theirs, Python's, or the program's."""

from __future__ import annotations

import ast
import builtins
import functools
import symtable
import sys

from megarl.sandbox.interface import Checks

ALIASES = {"np": "numpy", "pd": "pandas"}
LIBRARY = {
    "Counter": "collections",
    "Decimal": "decimal",
    "Fraction": "fractions",
    "OrderedDict": "collections",
    "deepcopy": "copy",
    "defaultdict": "collections",
    "deque": "collections",
    "isclose": "math",
}
"""Names that tests use without importing them, because the programs that they were written with did. Not functions
whose names tasks have (gcd)."""


@functools.lru_cache(maxsize=64)  # the answers of a group have the same tests
def owners(checks: Checks) -> tuple[list[str], dict[str, list[str]]]:
    """Names to ask the program for; and Python's, as ``{name: [module, attribute or ""]}``. Raises SyntaxError or
    ValueError.

    No program may give the tests a ``set``, ``len`` or ``math`` of its own: builtins and modules are Python's. Only
    where the tests use no other name is a builtin's name the program's: MBPP has a task whose function is called
    ``sum``.
    """
    source = "\n".join([checks.setup, *checks.tests])
    free = [name for name in undefined(source) if name != checks.entry]
    pythons = library(source, free)
    names = [name for name in free if name not in pythons and not hasattr(builtins, name)]
    if not names and checks.entry is None:
        names = [name for name in free if name not in pythons]
    return sorted({*names, *([checks.entry] if checks.entry else [])}), pythons


def undefined(source: str) -> list[str]:
    """Names that the tests use and do not define."""
    top = symtable.symtable(source, "<tests>", "exec")
    own = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    used: set[str] = set()
    waiting = [top]
    while waiting:
        table = waiting.pop()
        waiting += table.get_children()
        used |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (s.is_global() or table is top)}
    return sorted(name for name in used - own if not name.startswith("__"))


def library(source: str, free: list[str]) -> dict[str, list[str]]:
    """Select the names that are Python's: modules used as ``name.attribute``, and what ``LIBRARY`` lists."""
    attributes = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    bases = {node.id for node in attributes if isinstance(node, ast.Name)} & set(free)
    found = {
        name: [ALIASES.get(name, name), ""] for name in bases if name in sys.stdlib_module_names or name in ALIASES
    }
    return found | {name: [LIBRARY[name], name] for name in set(LIBRARY) & set(free)}
