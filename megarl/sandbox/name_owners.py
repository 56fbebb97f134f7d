"""Owner of each name that tests use: the tests, Python, or the program."""

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
"""Names that tests use without importing them, because their reference programs did. Without names of tasks' functions
(gcd)."""


@functools.lru_cache(maxsize=64)  # a group's responses share tests
def owners(checks: Checks) -> tuple[list[str], dict[str, list[str]]]:
    """Return the names to get from the program, and Python's names as ``{name: [module, attribute or ""]}``. Raises
    SyntaxError or ValueError.

    Builtins and modules are Python's, so that no program can replace the tests' ``set``, ``len`` or ``math``. Only if
    the tests use no other name, a builtin's name is the program's: MBPP has a task with a function ``sum``.
    """
    source = "\n".join([checks.setup, *checks.tests])
    free = [name for name in undefined(source) if name != checks.entry]
    pythons = library(source, free)
    names = [name for name in free if name not in pythons and not hasattr(builtins, name)]
    if not names and checks.entry is None:
        names = [name for name in free if name not in pythons]
    return sorted({*names, *([checks.entry] if checks.entry else [])}), pythons


def undefined(source: str) -> list[str]:
    """Return the names that the tests use but do not define."""
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
    """Return Python's names: modules used as ``name.attribute``, and names in ``LIBRARY``."""
    attributes = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    bases = {node.id for node in attributes if isinstance(node, ast.Name)} & set(free)
    found = {
        name: [ALIASES.get(name, name), ""] for name in bases if name in sys.stdlib_module_names or name in ALIASES
    }
    return found | {name: [LIBRARY[name], name] for name in set(LIBRARY) & set(free)}
