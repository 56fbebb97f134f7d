"""Tests of a code row, in the formats of public data sets.

- ``{"inputs": [...], "outputs": [...]}``: stdin and stdout; with ``"fn_name"`` arguments and returned value (APPS,
  TACO, CodeContests, verl's prime rows)
- ``{"input_output": ...}``: the same in JSON (APPS as it is published)
- ``[{"input": ..., "output": ..., "testtype": "stdin" or "functional"}]``, ``func_name`` in ``extra_info["metadata"]``
  (LiveCodeBench)
- ``[{"input": ..., "output": ..., "type": "stdin_stdout" or "function_call", "fn_name"?}]`` (PrimeIntellect, DeepCoder)
- ``{"test_list": [...], "test_setup_code": ..., "test_imports": [...]}``, or a list of assertions (MBPP)
- ``{"test": ..., "entry_point": ..., "prompt": ...}`` (HumanEval)
- ``{"test_code": ..., "entry_point": ..., "import_prefix": ...}`` (Skywork-OR1's LeetCode rows)
- ``{"assert_case": [...]}`` (verl's prime rows, Skywork-OR1)

Fields missing in the ground truth are read from ``extra_info``. Strings may be JSON.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megarl.core.errors import DataError
from megarl.rewards.code.inplace import looked_at_in_place
from megarl.sandbox.interface import Call, Checks, Test


@dataclass(frozen=True)
class Cases:
    """Inputs for the sandbox, and the expected results, which are never sent there."""

    tests: tuple[Test, ...]
    expected: tuple[Any, ...]
    """Expected stdout, or a call's expected return value as JSON."""


@dataclass(frozen=True)
class Asserts:
    checks: Checks
    prompt: str = ""
    """Text that HumanEval's completions continue; empty if it is not Python."""


def parse(ground_truth: Any, extra_info: dict[str, Any] | None = None) -> Cases | Asserts:
    """Read a row's tests. Raises DataError, naming the field, if tests are missing, do not parse, or check changes of
    arguments."""
    info = extra_info or {}
    truth = _json(ground_truth)
    if isinstance(truth, str) and "assert" in truth and "test" not in info:
        truth = {"test_list": [truth]}
    if isinstance(truth, str) and "assert" in truth:
        truth = {"test": truth}
    if isinstance(truth, list):
        truth = {"test_list": truth} if truth and all(isinstance(item, str) for item in truth) else {"cases": truth}
    if not isinstance(truth, dict):
        raise DataError(
            f"ground_truth of a code row: {str(ground_truth)[:80]!r} is no tests; known formats: "
            "megarl/rewards/code/tests.py"
        )
    if "input_output" in truth:
        inner = _json(truth["input_output"])
        if not isinstance(inner, dict):
            raise DataError(f"input_output of a code row: {str(inner)[:80]!r} is no dict, nor one in JSON")
        truth = {**truth, **inner}
    fields = {**info, **truth}
    known = [name for name in READERS if name in truth] or [name for name in READERS if name in info]
    given = [name for name in known if fields[name] is not None]
    filled = [name for name in given if fields[name]]  # a table has the fields of all formats in every row
    if given:
        return _usable(READERS[(filled or given)[0]](fields))
    raise DataError(
        f"ground_truth of a code row has the fields {sorted(map(str, truth))}; expected one of {', '.join(READERS)}"
    )


def check_row(ground_truth: Any, extra_info: dict[str, Any] | None = None) -> None:
    """Raise DataError for a row on which every answer would be an ``error``, before the job starts. Runs no program."""
    parse(ground_truth, extra_info)


def _usable(row: Cases | Asserts) -> Cases | Asserts:
    if isinstance(row, Cases):
        return row
    try:
        name = looked_at_in_place(row.checks)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise DataError(f"tests of a code row: the tests do not parse: {error}") from error
    if name is not None:
        raise DataError(
            f"tests of a code row: pass {name!r} to the program and look at it afterwards; what a function does to its "
            "arguments is not seen "
            "here, so a right answer could be wrong. Have the tests look at what is returned, or leave the row out"
        )
    return row


def _apps(fields: dict[str, Any]) -> Cases:
    inputs, outputs, name = fields["inputs"], fields.get("outputs"), fields.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise DataError("inputs and outputs of a code row: must be lists of the same length, at least one")
    if not name:
        return Cases(tuple(Test(_text(item)) for item in inputs), tuple(_text(item) for item in outputs))
    calls = [Test(call=Call(name, _arguments(item))) for item in inputs]
    returned = [_json(out) if isinstance(item, str) else out for item, out in zip(inputs, outputs, strict=True)]
    return Cases(tuple(calls), tuple(returned))


def _livecodebench(fields: dict[str, Any]) -> Cases:
    metadata = _json(fields.get("metadata")) or {}
    cases: list[Any] = []
    for key in ("cases", "public_test_cases", "private_test_cases"):
        found = _json(fields.get(key) or [])
        if isinstance(found, str):
            raise DataError(
                f"{key} of a code row: is packed (zlib and pickle); unpack it when the rows are made, pickles are not "
                "read here"
            )
        cases += found
    if not cases or not all(isinstance(case, dict) and {"input", "output"} <= set(case) for case in cases):
        raise DataError("tests of a code row: must be a list of {input, output, testtype}, at least one")
    tests, expected = [], []
    for case in cases:
        if (case.get("testtype") or case.get("type") or "stdin") in ("stdin", "stdin_stdout"):
            tests.append(Test(_text(case["input"])))
            expected.append(_text(case["output"]))
            continue
        name = (
            case.get("fn_name")
            or (case.get("metadata") or {}).get("func_name")
            or metadata.get("func_name")
            or fields.get("fn_name")
        )
        if not name:
            raise DataError("a functional test of a code row: no func_name in extra_info['metadata']")
        tests.append(Test(call=Call(name, _arguments(case["input"]))))
        expected.append(_json(case["output"]))
    return Cases(tuple(tests), tuple(expected))


def _mbpp(fields: dict[str, Any]) -> Asserts:
    tests = _json(fields.get("test_list") or fields.get("assert_case"))
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise DataError("test_list of a code row: must be a list of assertions, at least one")
    imports = _json(fields.get("test_imports") or [])
    setup = "\n".join([*imports, fields.get("test_setup_code") or ""])
    return Asserts(Checks(tuple(tests), setup, fields.get("entry_point")))


def _humaneval(fields: dict[str, Any]) -> Asserts:
    entry, test = fields.get("entry_point"), fields["test"]
    if not isinstance(entry, str) or not isinstance(test, str):
        raise DataError("a code row with 'test': needs entry_point too, both text")
    prompt = fields.get("prompt")
    prompt = prompt if isinstance(prompt, str) and _is_python(prompt) else ""
    setup = f"{prompt}\n{test}" if "def check(" in test else prompt
    tests = ("check(candidate)",) if "def check(" in test else (test,)
    return Asserts(Checks(tests, setup, entry), prompt)


def _skywork(fields: dict[str, Any]) -> Asserts:
    """Skywork-OR1's rows: ``test_code`` defines ``check(candidate)``, and each of its lines is a test."""
    code, entry = fields["test_code"], fields.get("entry_point")
    prefix = fields.get("import_prefix") or ""
    if not isinstance(code, str) or not isinstance(entry, str) or not isinstance(prefix, str):
        raise DataError("a code row with 'test_code': needs entry_point too; these and import_prefix are texts")
    name = entry.removeprefix("Solution().")
    if not name.isidentifier():
        raise DataError(f"entry_point of a code row: {entry[:80]!r} must be a function's name, or Solution().NAME")
    try:
        tests = _statements(code)
        defined = {node.name for node in ast.parse(prefix).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    except (SyntaxError, ValueError, RecursionError) as error:
        raise DataError(f"tests of a code row: test_code or import_prefix do not parse: {error}") from error
    if used := sorted(defined & set(re.findall(r"[^\W\d]\w*", code))):
        raise DataError(
            f"test_code of a code row: uses {used[0]!r} of import_prefix, which makes or reads objects (linked lists, "
            "trees), and these cannot go to the program; leave the row out"
        )
    return Asserts(Checks(tests, entry=name), prefix)


def _statements(code: str) -> tuple[str, ...]:
    """Return the tests of a function ``check(candidate)``: its assertions if it has only these, else one call of it."""
    body = next((node.body for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)), [])
    if body and all(isinstance(node, ast.Assert) for node in body):
        return tuple(ast.get_source_segment(code, node) or "" for node in body)
    return (f"{code}\ncheck(candidate)",)


READERS: dict[str, Callable[[dict[str, Any]], Cases | Asserts]] = {
    "inputs": _apps,
    "cases": _livecodebench,
    "public_test_cases": _livecodebench,
    "private_test_cases": _livecodebench,
    "test_list": _mbpp,
    "assert_case": _mbpp,
    "test": _humaneval,
    "test_code": _skywork,
}
"""Field that identifies a format -> its reader."""


def _json(value: Any) -> Any:
    """Parse a string if it is JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _text(value: Any) -> str:
    """Return a text, also if it is a list of lines (some of APPS' rows)."""
    if isinstance(value, list):
        return "\n".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value)


def _arguments(value: Any) -> tuple[Any, ...]:
    """Return the arguments of a list, or of JSON lines with one each. Whole-number keys of a dict become numbers, as in
    APPS."""
    items: Iterable[Any] = value if isinstance(value, list) else map(_json, _text(value).split("\n"))
    return tuple(_number_keys(item) for item in items)


def _number_keys(value: Any) -> Any:
    if isinstance(value, dict) and value and all(key.lstrip("-").isdecimal() for key in value):
        return {int(key): item for key, item in value.items()}
    return value


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True
