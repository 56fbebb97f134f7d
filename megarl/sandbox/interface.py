"""Requests to a sandbox and its results: plain values; the owner of each name that tests use."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import symtable
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Limit = Literal["wall", "cpu", "memory", "output", "processes", "file"]
"""The exceeded limit. ``processes`` and ``file`` are inferred from the program's last output, the others are
measured."""

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """Limits of one test. All are positive; the address space is per process, memory for all processes together."""

    cpu_s: int = 4
    wall_s: float = 8.0
    total_s: float = 60.0
    """Seconds of all tests of one request together, including starts; tests without time left have no result."""
    address_space_bytes: int = 1024 * MIB
    memory_bytes: int = 1024 * MIB
    """Memory of all processes of the test; checked every 50 ms."""
    processes: int = 16
    """Most processes and threads."""
    output_bytes: int = 4 * MIB
    """Bytes of stdout, and of a returned value."""
    file_bytes: int = 16 * MIB
    tmp_bytes: int = 64 * MIB
    open_files: int = 64

    def __post_init__(self) -> None:
        for name in (f.name for f in dataclasses.fields(self)):
            value = getattr(self, name)
            whole = name not in ("wall_s", "total_s")
            if (
                isinstance(value, bool)
                or not isinstance(value, int if whole else (int, float))
                or not 0 < value < 2**40
            ):
                raise ValueError(
                    f"sandbox limit {name}={value!r}: must be a positive {'integer' if whole else 'number'}"
                )


@dataclass(frozen=True)
class Call:
    """A function of the program (or a method of its class ``Solution``) and its arguments."""

    function: str
    arguments: tuple[object, ...]
    """Values that ``inside.values`` can encode."""


@dataclass(frozen=True)
class Test:
    """One start of the program, with this on its stdin; then, if there is a ``call``, that call."""

    __test__ = False  # not pytest's
    stdin: str = ""
    call: Call | None = None


@dataclass(frozen=True)
class Result:
    """Result of one start of the program."""

    exit_code: int
    """Negative: minus the signal that ended it."""
    limit: Limit | None
    stdout: str
    stderr: str
    """The last 4 KiB."""
    value: str | None
    """Return value of the call, as ``inside.values`` encodes it, in JSON; None without a call, or if it did not return.
    Untrusted: written by the program's process."""
    seconds: float
    cpu_s: float

    @property
    def ok(self) -> bool:
        """True if it ended by itself, with exit code 0 and within the limits."""
        return self.exit_code == 0 and self.limit is None

    @property
    def reason(self) -> str:
        """Short reason why it is not ``ok``."""
        if self.limit is not None:
            return f"limit: {self.limit}"
        if self.exit_code < 0:
            return f"ended by signal {-self.exit_code}"
        last = self.stderr.strip().rpartition("\n")[2]
        return f"exit code {self.exit_code}: {last:.200}"


@dataclass(frozen=True)
class Checks:
    """Python statements that call a program's functions and judge what they return (MBPP's and HumanEval's tests)."""

    tests: tuple[str, ...]
    setup: str = ""
    """Run before the tests, in their namespace; it may use the program's definitions."""
    entry: str | None = None
    """The program's function that tests may call ``candidate``. None: tests use functions' own names only."""


@dataclass(frozen=True)
class CheckResult:
    passed: tuple[bool, ...]
    """One for each test; fewer if ``limits.total_s`` ran out."""
    reasons: tuple[str, ...]
    """Reason of each test's failure; ``""`` if it passed."""
    row_error: str | None = None
    """Error of broken tests (syntax, missing imports), which must not judge any answer."""
    limit: Limit | None = None
    stderr: str = ""
    """Error output of the program."""
    seconds: float = field(default=0.0, compare=False)


class Sandbox(Protocol):
    """Runs programs. Methods raise SandboxError if the sandbox itself fails; a program's failures are in the result."""

    def run(self, program: str, tests: Sequence[Test], limits: Limits, stop: bool = False) -> list[Result]:
        """Run the program once for each test, each in a fresh process and with an empty /tmp.

        With ``stop``, the first result that is not ``ok`` is the last. There are fewer results than tests if
        ``limits.total_s`` runs out.
        """
        ...

    def check(self, program: str, checks: Checks, limits: Limits) -> CheckResult:
        """Run tests against the program, in two sandboxes, each started once for all tests.

        ``limits.wall_s`` applies to each test and to the program's import; ``cpu_s`` times the number of tests to all
        together, as do memory and the other limits.
        """
        ...

    def describe(self) -> str:
        """Return one line on the place and kind of the sandbox, for logs."""
        ...


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
