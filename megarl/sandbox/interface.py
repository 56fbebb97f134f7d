"""Requests to a sandbox and its results: plain values, the same on this machine and over HTTP."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Limit = Literal["wall", "cpu", "memory", "output", "processes", "file"]
"""The limit that was exceeded. ``processes`` and ``file`` are read in the program's own last output, the others are
seen."""

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """Limits of one test. All are positive; of bytes, the address space is per process and memory that of all
    together."""

    cpu_s: int = 4
    wall_s: float = 8.0
    total_s: float = 60.0
    """Seconds of all tests of one request together, their starts included; tests that no time is left for have no
    result."""
    address_space_bytes: int = 1024 * MIB
    memory_bytes: int = 1024 * MIB
    """Memory of all processes of the test; looked at every 50 ms."""
    processes: int = 16
    """Threads count too."""
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
    """Whatever ``inside.values`` can write."""


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
    """Return value of the call, as ``inside.values`` encodes it, in JSON; None without a call, or when it did not
    return. Written by the program's own process: believe nothing about it."""
    seconds: float
    cpu_s: float

    @property
    def ok(self) -> bool:
        """Ended by itself, with exit code 0 and within the limits."""
        return self.exit_code == 0 and self.limit is None

    @property
    def reason(self) -> str:
        """Reason why it is not ``ok``, in a few words."""
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
    """Run before the tests, in their namespace; it may use what the program defines."""
    entry: str | None = None
    """The program's function that the tests know as ``candidate``; also under its own name. None: only by their own
    names."""


@dataclass(frozen=True)
class CheckResult:
    passed: tuple[bool, ...]
    """One for each test; fewer when ``limits.total_s`` was over before a test's own time was."""
    reasons: tuple[str, ...]
    """Reasons, as many: why each test failed; empty where it passed."""
    row_error: str | None = None
    """The tests themselves are broken (do not parse, import what is not there): nobody's answer is judged by them."""
    limit: Limit | None = None
    stderr: str = ""
    """Error output of the program."""
    seconds: float = field(default=0.0, compare=False)


class Sandbox(Protocol):
    """Both methods raise SandboxError when the sandbox itself fails; whatever the program does is in the result."""

    def run(self, program: str, tests: Sequence[Test], limits: Limits, stop: bool = False) -> list[Result]:
        """Run the program once for each test, each in a fresh process and with an empty /tmp.

        With ``stop``, the first result that is not ``ok`` is the last. There are fewer results than tests when
        ``limits.total_s`` is over.
        """
        ...

    def check(self, program: str, checks: Checks, limits: Limits) -> CheckResult:
        """Run tests against the program: they in one sandbox, the program in another, each once for all tests.

        ``limits.wall_s`` is each test's, and that of the program's import; ``cpu_s`` times the number of tests is that
        of all together; memory and the like, too, are of all together.
        """
        ...

    def describe(self) -> str:
        """One line for a person: where programs run, and in what."""
        ...
