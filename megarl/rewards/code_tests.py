"""Tests of a code row, in the formats of public data sets; tests of changes to an argument.

The sandbox passes copies, so tests never see such changes.

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
import builtins
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megarl.core.errors import DataError
from megarl.sandbox.interface import Call, Checks, Test, undefined

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
            "megarl/rewards/code_tests.py"
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
