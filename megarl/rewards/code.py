"""Score programs by running them in a sandbox: stdin and stdout, calls, assertions.

Pure functions on untrusted text.

No set or dict is built from the program's data, and none of its methods is called to compare it.

Settings: ``reward.code`` (``CodeConfig``). A service's key: environment variable MEGARL_SANDBOX_KEY. Isolation:
docs/sandbox.md.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megarl.config.rewards import CodeConfig, RewardConfig
from megarl.core.errors import ConfigError, DataError, SandboxError
from megarl.rewards.answer.grammar import after_thinking
from megarl.rewards.code_tests import Asserts, Cases, parse
from megarl.sandbox.interface import MIB, Limits, Sandbox, Test

RELATIVE, ABSOLUTE = 1e-5, 1e-8
"""Float tolerances, as ``numpy.allclose`` in APPS' checker."""
INTEGER_ABSOLUTE = 1e-6
"""Tolerance of a float if an integer is expected: 1.9999999999 equals 2; 333333.3333 does not equal 333333 (in APPS it
does)."""
INTEGER = re.compile(r"[+-]?\d+\Z", re.ASCII)
FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\Z", re.ASCII)


def same_output(printed: str, expected: str) -> bool:
    """Compare line by line without empty lines, and each line word by word, so that white space does not matter."""
    if printed.strip() == expected.strip():
        return True
    ours, theirs = ([line.split() for line in text.splitlines() if line.strip()] for text in (printed, expected))
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(ours, theirs, strict=True)
    )


def _same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if INTEGER.match(expected):
        # integers are exact; a program may print one as a float
        return not INTEGER.match(printed) and bool(FLOAT.match(printed)) and _near(float(printed), float(expected))
    if FLOAT.match(expected) and FLOAT.match(printed):
        return _close(float(printed), float(expected))
    return False


def _near(found: float, expected: float) -> bool:
    return math.isfinite(found) and abs(expected) < 2**53 and abs(found - expected) <= INTEGER_ABSOLUTE


def _close(found: float, expected: float) -> bool:
    return found == expected or abs(found - expected) <= ABSOLUTE + RELATIVE * abs(expected)


def same_value(returned: str, expected: Any) -> bool:
    """Compare ``returned``, JSON of ``sandbox.inside.values``, with ``expected``, plain JSON (tuples are lists, keys
    strings).

    A list of one may also replace its element, as in APPS' rows.
    """
    try:
        data = json.loads(returned)
        return _same(data, expected) or (isinstance(expected, list) and len(expected) == 1 and _same(data, expected[0]))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError):
        return False  # not written by `values`


def _same(data: Any, expected: Any) -> bool:
    if isinstance(data, dict):
        return _same_tagged(data["t"], data["v"], expected)
    if isinstance(data, bool) or isinstance(expected, bool) or data is None or expected is None:
        return data is expected
    if isinstance(data, str) or isinstance(expected, str):
        return isinstance(data, str) and isinstance(expected, str) and data == expected
    if isinstance(data, list):
        return isinstance(expected, list) and len(data) == len(expected) and all(map(_same, data, expected))
    if isinstance(data, int) and isinstance(expected, int):
        return data == expected
    if isinstance(data, (int, float)) and isinstance(expected, (int, float)):
        return _near(data, expected) if isinstance(expected, int) else _close(float(data), expected)
    return False


def _same_tagged(kind: str, content: Any, expected: Any) -> bool:
    if kind in ("tuple", "iterator", "deque"):
        return _same(content, expected)
    if kind == "int":
        return isinstance(expected, int) and not isinstance(expected, bool) and int(content, 16) == expected
    if kind == "float":  # inf and nan, spelled as in Python
        return isinstance(expected, float) and content == repr(expected)
    if kind == "range":
        return (
            isinstance(expected, list) and len(range(*content)) == len(expected) and list(range(*content)) == expected
        )
    if kind == "dict":
        return isinstance(expected, dict) and len(content) == len(expected) and _same_items(content, dict(expected))
    return False


def _same_items(content: list[Any], left: dict[str, Any]) -> bool:
    """Compare the items of a dict. ``left`` shrinks, so that a repeated key matches once. JSON has string keys: 1 is
    "1"."""
    for key, value in content:
        name = key if isinstance(key, str) else json.dumps(key)
        if name not in left or not _same(value, left.pop(name)):
            return False
    return not left


PYTHON = ("python", "python3", "py", "py3", "ipython", "ipython3", "pypy", "pypy3")
_FENCE = re.compile(
    r"^(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)(?:^[ \t]*(?P=fence)|(?P<open>\Z))",
    re.DOTALL | re.MULTILINE,
)
_IN_SENTENCE = re.compile(
    rf"(?P<indent>)(?P<fence>```)[ \t]*(?P<info>{'|'.join(PYTHON)})[ \t]*\n(?P<body>.*?)(?:^[ \t]*```|(?P<open>\Z))",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
_QUOTED = re.compile(r"^> ?(?=\s*(?:```|~~~))", re.MULTILINE)
_LANGUAGE = re.compile(r"[ \t{.]*([\w+-]*)")
_TAGS = (("<answer>", "</answer>"), ("[PYTHON]", "[/PYTHON]"))


def extract(text: str) -> str:
    """Return the last fenced block marked as Python, else the last block, else the content of tags, else the whole
    text.

    Thoughts are ignored. A transcript (``>>>``) counts only if there is no other block.
    """
    text = after_thinking(text).replace("\r\n", "\n").replace("\ufeff", "")
    if _QUOTED.search(text):
        text = re.sub(r"^> ?", "", text, flags=re.MULTILINE)
    found = list(_FENCE.finditer(text)) or list(_IN_SENTENCE.finditer(text))
    blocks = [(_language(match), _body(match)) for match in found]
    programs = [block for block in blocks if not block[1].lstrip().startswith(">>>")] or blocks
    if programs:
        return next((body for language, body in reversed(programs) if language in PYTHON), programs[-1][1])
    for opening, closing in _TAGS:
        before, tag, _ = text.rpartition(closing)
        if tag:
            return before.rpartition(opening)[2]
    return text


def _language(match: re.Match[str]) -> str:
    named = _LANGUAGE.match(match["info"])
    return named[1].lower() if named else ""


def _body(match: re.Match[str]) -> str:
    """Remove the fence's indentation, and a closing fence at the end of the last line."""
    body = match["body"]
    if match["open"] is not None:
        body = re.split(rf"(?<=\S){re.escape(match['fence'])}[ \t]*$", body, maxsplit=1, flags=re.MULTILINE)[0]
    width = len(match["indent"])
    return re.sub(rf"^[ \t]{{1,{width}}}", "", body, flags=re.MULTILINE) if width else body


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
