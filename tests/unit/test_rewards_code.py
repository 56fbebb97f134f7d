"""What needs no sandbox: finding the program, reading rows, comparing outputs and values."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.rewards import CodeConfig, RewardConfig
from megarl.core.errors import ConfigError, DataError, SandboxError
from megarl.rewards import code
from megarl.rewards.code import same_output, same_value
from megarl.rewards.code_tests import Asserts, Cases, check_row, parse
from megarl.sandbox import bubblewrap
from megarl.sandbox.inside import values
from megarl.sandbox.interface import MIB, Call, CheckResult, Checks, Limits, Result, Test, owners
from tests.system.code_cases import CASES

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
hashable = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.fractions()
    | st.dates()
)
rich = st.recursive(
    hashable | st.complex_numbers(allow_nan=False) | st.decimals(allow_nan=False) | st.datetimes() | st.timedeltas(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.frozensets(hashable, max_size=4)
        | st.sets(hashable, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
    ),
    max_leaves=12,
)


def test_there_are_enough_verdict_cases() -> None:
    names = [case[0] for case in CASES]
    assert len(names) == len(set(names)) >= 60


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("a\n```python\nx = 1\n```\nb\n```py\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\n```\nout\n```", "x = 1\n"),
        ("```\nx = 1\n```\n```\nx = 2\n```", "x = 2\n"),
        ("```cpp\nint x;\n```", "int x;\n"),
        ("```python\nx = 1", "x = 1"),
        ("```Python3 title=a.py\nx = 1\n```", "x = 1\n"),
        ("```python\ns = '`` `'\nt = '```'\n```", "s = '`` `'\nt = '```'\n"),
        ("<think>```python\nx = 1\n```</think>x = 2", "x = 2"),
        ("<think>I try\n```python\nx = 1\n```\nstill thinking", ""),
        ("<think>I try\n<answer>x = 1</answer>", ""),
        ("I try\n```python\nx = 1\n```\n</think>\n```python\nx = 2\n```", "x = 2\n"),
        ("<answer>x = 1</answer>", "x = 1"),
        ("  ```python\n  x = 1\n  ```", "x = 1\n"),
        ("1. So\n   ```python\n   if x:\n       y = 1\n   ```", "if x:\n    y = 1\n"),
        ("```python\n    return x\n```", "    return x\n"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\n"),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("```{.python}\nx = 1\n```\n```\nout\n```", "x = 1\n"),
        ("```python:main.py\nx = 1\n```", "x = 1\n"),
        ("```pypy3\nx = 1\n```\n```text\nout\n```", "x = 1\n"),
        ("> ```python\n> x = 1\n> ```", "x = 1\n"),
        ("So: ```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1```", "x = 1"),
        ("```python\nx = 1```\nIt works.", "x = 1"),
        ("```python\nx = 1\n```\n```python\n>>> f(1)\n2\n```", "x = 1\n"),
        ("```python\n>>> f(1)\n2\n```", ">>> f(1)\n2\n"),
        ("[PYTHON]\nx = 1\n[/PYTHON]", "\nx = 1\n"),
        ("\ufeffx = 1", "x = 1"),
        ("a `x = 1` b", "a `x = 1` b"),
        ("```python x = 1```", "```python x = 1```"),
        ("", ""),
    ],
)
def test_the_program_is_found(text: str, program: str) -> None:
    assert code.extract(text) == program


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3", "3\n", True),
        ("3 \n\n", "\n3", True),
        ("1  2\n3", "1 2\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("1\t2", "1 2", True),
        ("3.0", "3", True),
        ("3.0000001", "3", True),
        ("3.1", "3", False),
        ("1000001.0", "1000000", False),
        ("1000001", "1000000", False),
        ("1000000.0", "1000000", True),
        ("9007199254740993.0", "9007199254740993", False),
        ("3", "3.0", True),
        ("0.333333", "0.3333333", True),
        ("0.3334", "0.3333333", False),
        ("1e-9", "0.0", True),
        ("1E5", "100000.0", True),
        ("nan", "nan", True),
        ("nan", "1.0", False),
        ("inf", "1.0", False),
        ("1_000", "1000", False),
        ("１", "1", False),
        ("YES", "Yes", False),
        ("", "", True),
        ("x", "", False),
        ("", "x", False),
        ("+3", "3", False),
        ("a b", "a b c", False),
        ("9" * 5000 + ".0", "3", False),
        ("3.0", "9" * 5000, False),
    ],
)
def test_outputs_are_compared(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


@given(
    st.lists(
        st.lists(
            st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("abc", min_size=1), min_size=1
        ),
        min_size=1,
    )
)
def test_white_space_never_matters_and_words_do(lines: list[list[Any]]) -> None:
    text = "\n".join(" ".join(map(str, line)) for line in lines)
    assert same_output("\n\n" + "\n\n".join("\t ".join(map(str, line)) + " \r" for line in lines), text)
    assert not same_output(text + " x", text) and not same_output(text + "\nx", text)


@pytest.mark.parametrize(
    ("returned", "expected", "same"),
    [
        ((1, 2), [1, 2], True),
        ([1, 2], [[1, 2]], True),
        ([[1, 2]], [1, 2], False),
        (1, [1], True),
        (True, 1, False),
        (1, True, False),
        (1.0, 1, True),
        (1.2, 1, False),
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        ("1", 1, False),
        (None, None, True),
        (None, 0, False),
        (2**70, 2**70, True),
        (2**70, 2**70 + 1, False),
        ({1: "a"}, {"1": "a"}, True),
        ({1: "a", "1": "a"}, {"1": "a", "2": "a"}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (math.inf, math.inf, True),
        (math.nan, 1.0, False),
        (range(3), [0, 1, 2], True),
        (range(10**12), [0], False),
        ({1, 2}, [1, 2], False),
        (b"a", "a", False),
        (iter([1, 2]), [1, 2], True),
    ],
)
def test_values_are_compared(returned: Any, expected: Any, same: bool) -> None:
    assert same_value(json.dumps(values.encode(returned)), expected) is same


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "9" * 10000,
        "[" * 100000,
        '{"t": "dict", "v": 1}',
        '{"t": "range", "v": [0, 1, 0]}',
        '{"v": 1}',
        '{"t": "int", "v": "z"}',
        '{"t": [], "v": 1}',
    ],
)
def test_nonsense_is_equal_to_nothing(text: str) -> None:
    assert not same_value(text, [1])
    assert not same_value(text, {"a": 1})


@given(plain)
def test_a_plain_value_is_equal_to_itself(value: Any) -> None:
    assert same_value(json.dumps(values.encode(value)), json.loads(json.dumps(value)))


@given(rich)
def test_values_survive_the_way(value: Any) -> None:
    text = values.dumps(values.encode(value))
    assert text == json.dumps(values.encode(value)) and values.loads(text) == json.loads(text)
    back = values.decode(values.loads(text))
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize("text", ["", " ", "x", "[1", "[1]x", '{"a"}', "nul", '"\n"'])
def test_text_that_is_no_json_is_refused(text: str) -> None:
    with pytest.raises((ValueError, StopIteration)):
        values.loads(text)


@pytest.mark.parametrize(
    ("tests", "entry", "asked", "library"),
    [
        (["assert set(f(1)) == set([1])"], None, ["f"], {}),
        (["assert sum(1, 2) == 3"], None, ["sum"], {}),
        (["check(candidate)"], "f", ["candidate", "check", "f"], {}),
        (["def check(candidate):\n    assert abs(candidate(1)) == g(2)", "check(f)"], "f", ["f", "g"], {}),
        (["assert math.isclose(f(1), 2)"], None, ["f"], {"math": ["math", ""]}),
        (["assert Counter(f(1)) == np.x"], None, ["f"], {"Counter": ["collections", "Counter"], "np": ["numpy", ""]}),
        (["import re", "x = [y for y in f(1)]", "assert re.match(x[0], '')"], None, ["f"], {}),
        (["assert bisect([1], 1) == 1"], None, ["bisect"], {}),
        (["assert [len(x) for x in f(lambda z: z)]"], None, ["f"], {}),
    ],
)
def test_names_have_owners(
    tests: list[str], entry: str | None, asked: list[str], library: dict[str, list[str]]
) -> None:
    assert owners(Checks(tuple(tests), "", entry)) == (asked, library)


def test_subclasses_arrive_as_what_they_extend() -> None:
    class Equal(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            return True

    back = values.decode(json.loads(json.dumps(values.encode([Equal("x")]))))
    assert type(back[0]) is str and back[0] != "y"


def test_what_has_no_form_is_refused_or_held() -> None:
    with pytest.raises(TypeError, match="object cannot leave the sandbox"):
        values.encode([object()])
    assert values.encode([object()], lambda _: {"t": "handle", "v": 0}) == [{"t": "handle", "v": 0}]
    with pytest.raises(ValueError, match="unknown type 'handle'"):
        values.decode({"t": "handle", "v": 0})


def test_rows_are_read() -> None:
    row = parse({"fn_name": "f", "inputs": [[1, {"1": 2}], "[3]\n4"], "outputs": ["5", "[6]"]})
    assert isinstance(row, Cases)
    assert row.tests == (Test(call=Call("f", (1, {1: 2}))), Test(call=Call("f", ([3], 4))))
    assert row.expected == ("5", [6])  # text of a row whose inputs are text is JSON
    row = parse({"prompt": "Write f.", "test": "def check(candidate): pass", "entry_point": "f"})
    assert isinstance(row, Asserts) and row.prompt == "" and row.checks.tests == ("check(candidate)",)


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("42", "is no tests"),
        ({"x": 1}, r"has the fields \['x'\]"),
        ({"inputs": [], "outputs": []}, "at least one"),
        ({"inputs": "1", "outputs": ["1"]}, "lists of the same length"),
        ([{"input": "1"}], "must be a list of {input, output, testtype}"),
        ({"test_list": [1]}, "list of assertions"),
        ({"test": "assert f()"}, "needs entry_point"),
        ({"public_test_cases": "eJx"}, "pickles are not read"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "no func_name"),
    ],
)
def test_rows_without_tests_are_refused(truth: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse(truth)


@pytest.mark.parametrize(
    ("test", "name"),
    [
        ("a = [3, 1]\nf(a)\nassert a == [1, 3]", "a"),
        ("a = [3, 1]; f(a); assert a==[1,3]", "a"),
        ("a = list(range(3))\nk = f(a)\nassert a[:k] == [0]", "a"),
        ("d: dict = {}\nf(x=d)\nassert d['k'] == 1", "d"),
        ("a, b = [3, 1], [1, 3]\nf(a)\nassert a == b", "a"),
        ("a = [0] * 3\nSolution().fill(a)\nassert a == [1] * 3", "a"),
        ("s = Solution()\na = [0]\ns.fill(a)\nassert a == [1]", "a"),
        ("def test():\n    a = [[1]]\n    f(a)\n    assert a == [[2]]\ntest()", "a"),
        ("for a in ([3, 1], [2]):\n    f(a)\n    assert a == sorted(a)", "a"),
        ("a = [1]\ntry:\n    f(a)\nexcept ValueError:\n    assert a == []", "a"),
        ("a = [3, 1]\nif f(a):\n    assert a == [1, 3]", "a"),
        ("a = [3, 1]\nassert f(a) == sorted(a)", None),
        ("a = [3, 1]\nassert f(a, 1) == 1\nassert f(a, 2) == 2", None),
        ("a = [3, 1]\nassert f(list(a)) == 1\nassert a == [3, 1]", None),
        ("a = [3, 1]\na = f(a)\nassert a == [1, 3]", None),
        ("a = 3\nf(a)\nassert a == 3", None),
        ("a = (3, 1)\nr = f(a)\nassert r == sorted(a)", None),
        ("e = [(1, 2)]\ng = Graph(e)\nassert g.size() == len(e)", None),
        ("def sort(x):\n    x.sort()\na = [3, 1]\nsort(a)\nassert f(1) == a", None),
        ("a = [3, 1]\nprint(a)\nassert f(a) == 1", None),
    ],
)
def test_rows_that_look_at_arguments_are_refused(test: str, name: str | None) -> None:
    check = "def check(candidate):\n" + "".join(
        f"    {line}\n" for line in test.replace("f(", "candidate(").splitlines()
    )
    rows: list[Any] = [
        {"test_list": [test]},
        {"test_list": test.splitlines()} if "\n " not in test else {"test_list": [test]},
    ]
    rows += [] if "def " in test else [{"test": check, "entry_point": "f"}]
    for row in rows:
        if name is None:
            check_row(row)
        else:
            with pytest.raises(DataError, match=f"pass '{name}' to the program and look at it afterwards"):
                check_row(row)


def test_published_rows_of_apps_are_read() -> None:
    inner = {"fn_name": "f", "inputs": [[1]], "outputs": [2]}
    for truth in (
        {"input_output": json.dumps(inner)},
        {"input_output": inner},
        json.dumps({"input_output": json.dumps(inner)}),
    ):
        assert parse(truth) == parse(inner)
    with pytest.raises(DataError, match="input_output of a code row: 'x' is no dict"):
        parse({"input_output": "x"})


def test_only_what_a_program_seems_to_use_is_imported() -> None:
    assert code.with_imports("print(1)") == "\nprint(1)"
    assert code.with_imports("x: List = deque()").startswith("from typing import List; from collections import deque\n")
    assert code.with_imports("from __future__ import annotations\nx: List").startswith("from __future__")


def test_settings_become_limits() -> None:
    limits = code.limits_of(CodeConfig(cpu_s=2, wall_s=3.0, item_s=5.0, memory_mib=64))
    assert (limits.cpu_s, limits.wall_s, limits.total_s, limits.memory_bytes) == (2, 3.0, 5.0, 64 * MIB)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            RewardConfig(timeout_s=8.0),
            r"reward.code.item_s=8: must be below reward.timeout_s=8.*set reward.timeout_s=10",
        ),
        (
            RewardConfig(code=CodeConfig(url="http://h:1", python="/p")),
            "reward.code.python=/p: the service at reward.code.url=http://h:1",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(config: RewardConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        code.check_code(config)


class _Broken:
    """A sandbox that fails, as a service that has gone does."""

    def run(self, *_: object, **__: object) -> list[Result]:
        raise SandboxError("the service is gone")

    def check(self, *_: object) -> CheckResult:
        raise SandboxError("the service is gone")

    def describe(self) -> str:
        return "broken"


def test_a_failing_sandbox_is_an_error_and_no_wrong_answer() -> None:
    for row in ({"inputs": ["1"], "outputs": ["1"]}, {"test_list": ["assert f(1)"]}):
        verdict = code.make_scorer(_Broken(), CodeConfig())("print(1)", row, None)
        assert verdict["status"] == "error" and "the service is gone" in verdict["reason"]


@pytest.mark.parametrize(
    "limits",
    [{"cpu_s": 0}, {"cpu_s": 1.5}, {"wall_s": -1}, {"processes": True}, {"wall_s": math.nan}, {"memory_bytes": 2**50}],
)
def test_limits_are_checked(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"sandbox limit {next(iter(limits))}="):
        Limits(**limits)


@pytest.mark.parametrize("machine", list(bubblewrap.AUDIT_ARCH))
def test_the_filter_refuses_what_it_names_and_nothing_else(machine: str) -> None:
    """Interpreted here as the kernel would: (system call, arguments) -> what becomes of it."""
    program = bubblewrap.program(machine)
    column = list(bubblewrap.AUDIT_ARCH).index(machine)
    refused = {numbers[column] for numbers in bubblewrap.REFUSED.values()} - {-1}
    assert len(refused) == sum(numbers[column] >= 0 for numbers in bubblewrap.REFUSED.values())
    clone, socket_call, ioctl = bubblewrap.CLONE[column], bubblewrap.SOCKET[column], bubblewrap.IOCTL[column]
    for number in range(500):
        verdict = run_filter(program, machine, number, (2, 0))
        expected = 0x50001 if number in refused else 0x50026 if number == 435 else bubblewrap.ALLOW
        assert verdict == expected, number
    assert (
        run_filter(program, machine, clone, (0x11, 0))
        == run_filter(program, machine, clone, (0x3D0F00, 0))
        == bubblewrap.ALLOW
    )
    for flag in (0x10000000, 0x20000011, 0x40000000, 0x02000000):
        assert run_filter(program, machine, clone, (flag, 0)) == 0x50001
    for family in range(46):
        assert (run_filter(program, machine, socket_call, (family, 0)) == bubblewrap.ALLOW) == (family in (1, 2, 10))
    assert (
        run_filter(program, machine, ioctl, (0, 0x5412)) == run_filter(program, machine, ioctl, (0, 0x541C)) == 0x50001
    )
    assert run_filter(program, machine, ioctl, (0, 0x5401)) == bubblewrap.ALLOW
    assert run_filter(program, "other", 0, (0, 0)) == bubblewrap.KILL
    if machine == "x86_64":
        assert run_filter(program, machine, 0x40000000, (0, 0)) == 0x50026


def run_filter(program: bytes, machine: str, number: int, arguments: tuple[int, int]) -> int:
    import struct

    memory = {0: number, 4: bubblewrap.AUDIT_ARCH.get(machine, 0), 16: arguments[0], 24: arguments[1]}
    lines = list(struct.iter_unpack("<HBBI", program))
    at = accumulator = 0
    while True:
        operation, if_true, if_false, k = lines[at]
        at += 1
        if operation == bubblewrap.LOAD:
            accumulator = memory[k]
        elif operation == bubblewrap.RETURN:
            return k
        else:
            holds = {
                bubblewrap.EQUAL: accumulator == k,
                bubblewrap.AT_LEAST: accumulator >= k,
                bubblewrap.ANY_BIT: bool(accumulator & k),
            }[operation]
            at += if_true if holds else if_false


def test_an_unknown_machine_has_no_filter() -> None:
    with pytest.raises(SandboxError, match="no list of system calls for vax"):
        bubblewrap.program("vax")
