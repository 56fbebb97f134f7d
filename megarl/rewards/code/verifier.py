"""Score programs by running them in a sandbox: stdin and stdout, calls, assertions.

Settings: ``reward.code`` (``CodeConfig``). A service's key: environment variable MEGARL_SANDBOX_KEY. Isolation:
docs/sandbox.md.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megarl.config.rewards import CodeConfig, RewardConfig
from megarl.core.errors import ConfigError, DataError, SandboxError
from megarl.rewards.code.compare import same_output, same_value
from megarl.rewards.code.extract import extract
from megarl.rewards.code.tests import Asserts, Cases, parse
from megarl.sandbox.interface import MIB, Limits, Sandbox, Test

FIRST_BATCH, BATCH = 4, 16
"""Tests per request. The first tests find most wrong programs; a start costs as much as a few tests."""

OWN_SHARE = 0.5
"""Share of ``reward.code.item_s`` above which the program, not the sandbox's starts, is blamed for a timeout."""

NAMES = {
    "typing": ("Any", "Callable", "Deque", "Dict", "Iterable", "Iterator", "List", "Optional", "Set", "Tuple", "Union"),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"),
    "heapq": ("heapify", "heappop", "heappush", "heappushpop", "heapreplace", "nlargest", "nsmallest"),
    "bisect": ("bisect_left", "bisect_right", "insort"),
    "functools": ("cache", "cmp_to_key", "lru_cache", "reduce"),
    "itertools": ("accumulate", "combinations", "permutations", "zip_longest"),
    "math": ("ceil", "comb", "floor", "gcd", "inf", "isqrt", "lcm", "sqrt"),
}
MODULES = ("bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "random", "re", "string", "sys")
"""Modules that LiveCodeBench's and verl's checkers import for a program. Only those that it seems to use are imported
here, since each takes time."""
WORD = re.compile(r"\b[A-Za-z_]\w*\b", re.ASCII)


def scorer(rest: str, config: CodeConfig) -> Callable[[str, Any, dict[str, Any] | None], dict[str, Any]]:
    """Return the scorer of every code data source; ``rest`` only names the data set. Raises SandboxError if programs
    cannot be isolated."""
    from megarl.sandbox.client import open_sandbox

    return make_scorer(open_sandbox(config.url, config.python), config)


def check_code(config: RewardConfig) -> str:
    """Check the settings before a job with rows of the family ``code``; return one line that describes where programs
    run.

    Raises:
        ConfigError: settings that do not fit together.
        SandboxError: programs cannot be isolated here, or the service does not answer or has another key.
    """
    from megarl.sandbox.client import open_sandbox

    code = config.code
    if code.item_s >= config.timeout_s:
        raise ConfigError(
            f"reward.code.item_s={code.item_s:g}: must be below reward.timeout_s={config.timeout_s:g}, or a slow "
            f"program ends its worker and has no verdict; set reward.timeout_s={code.item_s + 2:g}"
        )
    if code.url and code.python:
        raise ConfigError(
            f"reward.code.python={code.python}: the service at reward.code.url={code.url} has its own interpreter; "
            "start it with --python, and leave one of the two settings out"
        )
    return open_sandbox(code.url, code.python).describe()


def limits_of(config: CodeConfig) -> Limits:
    memory = config.memory_mib * MIB
    return Limits(
        cpu_s=config.cpu_s, wall_s=config.wall_s, total_s=config.item_s, address_space_bytes=memory, memory_bytes=memory
    )


def make_scorer(sandbox: Sandbox, config: CodeConfig) -> Callable[[str, Any, dict[str, Any] | None], dict[str, Any]]:
    def score(solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> dict[str, Any]:
        program = extract(solution_str)
        try:
            row = parse(ground_truth, extra_info)
            if isinstance(row, Cases):
                return {**_score_cases(sandbox, program, row, config), "pred": program}
            return {**_score_asserts(sandbox, program, row, config), "pred": program}
        except (DataError, SandboxError) as error:
            return {
                "score": 0.0,
                "status": "error",
                "acc": False,
                "pred": program,
                "reason": f"{type(error).__name__}: {error}",
            }

    return score


def _score_cases(sandbox: Sandbox, program: str, row: Cases, config: CodeConfig) -> dict[str, Any]:
    program = with_imports(program)
    deadline = time.monotonic() + config.item_s
    passed, done, why, struck, ran_s = 0, 0, "", False, 0.0
    for tests, expected in _batches(row):
        left = deadline - time.monotonic()
        limits = dataclasses.replace(limits_of(config), total_s=left) if left > 0 else None
        results = sandbox.run(program, tests, limits, stop=config.score == "all") if limits else []
        for result, test, right in zip(results, tests, expected, strict=False):
            done += 1
            ran_s += result.seconds
            struck = struck or result.limit is not None
            wrong = result.reason if not result.ok else _wrong(result.stdout, result.value, test, right)
            passed += not wrong
            why = why or (wrong and f"test {done}: {wrong}")
            if why and config.score == "all":
                return _verdict(passed, row.tests, config, why)
        if len(results) < len(tests):  # the total time ran out
            slow = struck or ran_s >= OWN_SHARE * config.item_s
            return _too_late(passed, done, row.tests, config, why, slow=slow)
    return _verdict(passed, row.tests, config, why)


def _batches(row: Cases) -> Iterator[tuple[Sequence[Test], Sequence[Any]]]:
    start, size = 0, FIRST_BATCH
    while start < len(row.tests):
        yield row.tests[start : start + size], row.expected[start : start + size]
        start, size = start + size, BATCH


def _wrong(stdout: str, value: str | None, test: Test, expected: Any) -> str:
    """Return the reason why a result is wrong; ``""`` if right."""
    if test.call is None:
        return "" if same_output(stdout, expected) else "other output"
    if value is None:
        return "the function returned nothing that can be compared"
    return "" if same_value(value, expected) else "other value"


def _score_asserts(sandbox: Sandbox, program: str, row: Asserts, config: CodeConfig) -> dict[str, Any]:
    result = sandbox.check(complete(program, row), row.checks, limits_of(config))
    if result.row_error is not None:
        raise DataError(f"tests of a code row: {result.row_error}")
    why = next((f"test {i + 1}: {reason}" for i, reason in enumerate(result.reasons) if reason), "")
    done, total, passed = len(result.passed), len(row.checks.tests), sum(result.passed)
    if done < total and not (why and config.score == "all"):
        slow = result.seconds >= OWN_SHARE * config.item_s
        return _too_late(passed, done, row.checks.tests, config, why, slow=slow)
    return _verdict(passed, row.checks.tests, config, why)


def _too_late(
    passed: int, done: int, tests: Sequence[object], config: CodeConfig, why: str, *, slow: bool
) -> dict[str, Any]:
    """Return the verdict if no time is left for some tests: wrong if the program is ``slow``, else timeout."""
    spent = f"{done} of {len(tests)} tests run within reward.code.item_s={config.item_s:g}"
    found = _verdict(passed, tests, config, why or spent)
    return found if slow else {**found, "reason": spent, "status": "timeout"}


def complete(program: str, row: Asserts) -> str:
    """Complete HumanEval's answers, which continue the prompt or are whole functions, with the prompt's imports and
    definitions."""
    program += _method_as_function(program, row.checks.entry)
    if not row.prompt:
        return with_imports(program)
    return f"{row.prompt.rstrip()}\n{program}" if program[:1].isspace() else f"{row.prompt}\n\n{program}"


def _method_as_function(program: str, entry: str | None) -> str:
    """Return a line that binds the requested function to a method of ``class Solution``; '' if not needed."""
    if (
        not entry
        or not re.search(r"^class Solution\b", program, re.MULTILINE)
        or not re.search(rf"^[ \t]+def {entry}\b", program, re.MULTILINE)
    ):
        return ""
    defined = re.search(rf"^(?:def {entry}\b|{entry}\s*=)", program, re.MULTILINE)
    return "" if defined else f"\n{entry} = Solution().{entry}\n"


def with_imports(program: str) -> str:
    """Return the program with imports of modules that it seems to use."""
    if "__future__" in program:
        return program  # must stand first
    words = set(WORD.findall(program))
    lines = [f"import {name}" for name in MODULES if name in words]
    lines += [
        f"from {module} import {', '.join(found)}"
        for module, names in NAMES.items()
        if (found := [n for n in names if n in words])
    ]
    return "; ".join(lines) + "\n" + program


def _verdict(passed: int, tests: Sequence[object], config: CodeConfig, why: str) -> dict[str, Any]:
    total = len(tests)
    right = passed == total
    score = passed / total if config.score == "fraction" else float(right)
    status = "ok" if right else "wrong"
    return {"score": score, "status": status, "acc": right, "passed": passed, "total": total, "reason": why}
