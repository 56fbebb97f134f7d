"""Answers with code, their rows and the verdict each must get: (name, answer, ground truth, status, passed, total[,
extra_info])."""

from __future__ import annotations

import json
from typing import Any

SUM = {"inputs": ["1 2\n", "10 -3\n", "0 0\n"], "outputs": ["3\n", "7\n", "0\n"]}
ADD = "a, b = map(int, input().split())\nprint(a + b)\n"
FLOAT = {"inputs": ["2\n", "10\n"], "outputs": ["1.41421356\n", "3.16227766\n"]}
LINES = {"inputs": ["3\n1\n2\n3\n"], "outputs": ["1 2 3\nsum 6\n"]}
ECHO = {"inputs": ["héllo 世界 🎉\n"], "outputs": ["héllo 世界 🎉\n"]}
TWO_SUM = {"fn_name": "two_sum", "inputs": [[[2, 7, 11], 9], [[3, 2, 4], 6]], "outputs": [[0, 1], [1, 2]]}
TWO_SUM_CODE = """def two_sum(nums, target):
    seen = {}
    for i, n in enumerate(nums):
        if target - n in seen:
            return [seen[target - n], i]
        seen[n] = i
"""
SOLUTION = "class Solution:\n    def two_sum(self, nums: List[int], target: int) -> Optional[List[int]]:\n" + "".join(
    f"    {line}\n" for line in TWO_SUM_CODE.splitlines()[1:]
)
LCB_STDIN = [
    {"input": "1 2", "output": "3", "testtype": "stdin"},
    {"input": "5 5", "output": "10\n", "testtype": "stdin"},
]
LCB_CALL = [
    {"input": "[1,2,3]\n2", "output": "[2,4,6]", "testtype": "functional"},
    {"input": "[]\n9", "output": "[]", "testtype": "functional"},
]
LCB_INFO = {"metadata": json.dumps({"func_name": "scale"})}
SCALE = (
    "class Solution:\n    def scale(self, xs: List[int], k: int) -> List[int]:\n        return [x * k for x in xs]\n"
)
MBPP = {
    "test_list": [
        "assert set(common((3, 4, 5), (5, 4, 10))) == set((4, 5))",
        "assert set(common((1, 2), (2, 3))) == set((2,))",
        "assert set(common((1,), (3,))) == set()",
    ],
    "test_setup_code": "",
}
COMMON = "def common(a, b):\n    return tuple(set(a) & set(b))\n"
PAIRS = {
    "test_list": [
        "assert longest([Pair(5, 24), Pair(15, 25), Pair(27, 40)]) == 2",
        "assert longest([Pair(1, 2)]) == 1",
    ],
    "test_setup_code": "",
}
LONGEST = """class Pair(object):
    def __init__(self, a, b):
        self.a = a
        self.b = b
def longest(pairs):
    end, n = float("-inf"), 0
    for p in sorted(pairs, key=lambda p: p.b):
        if p.a > end:
            end, n = p.b, n + 1
    return n
"""
TREE = {
    "test_list": ["assert depth(root) == 2", "assert depth(None) == 0", "assert root.left.value == 2"],
    "test_setup_code": "root = Node(1)\nroot.left = Node(2)\n",
}
DEPTH = """class Node:
    def __init__(self, value):
        self.value, self.left, self.right = value, None, None
def depth(node):
    return 0 if node is None else 1 + max(depth(node.left), depth(node.right))
"""
HUMANEVAL = {
    "prompt": 'from typing import List\n\n\ndef below_zero(operations: List[int]) -> bool:\n    """Does the balance '
    'fall below zero?\n    >>> below_zero([1, 2, 3])\n    False\n    """\n',
    "test": "\n\nMETADATA = {'author': 'x'}\n\n\ndef check(candidate):\n    assert candidate([]) == False\n    assert "
    "candidate([1, 2, -3, 1, 2, -3]) == False\n"
    "    assert candidate([1, 2, -4, 5, 6]) == True\n",
    "entry_point": "below_zero",
}
BODY = (
    "    balance = 0\n    for op in operations:\n        balance += op\n        if balance < 0:\n            return "
    "True\n    return False\n"
)
CYCLIC = {
    "prompt": 'def encode(s: str):\n    """Reverse."""\n    return s[::-1]\n\n\ndef decode(s: str):\n    """Undo '
    'encode."""\n',
    "test": "def check(candidate):\n    for s in ('abc', '', 'xy'):\n        assert candidate(encode(s)) == s\n",
    "entry_point": "decode",
}
RAISES = {
    "test": "def check(candidate):\n    assert candidate(4) == 2.0\n    try:\n        candidate(-1)\n        assert "
    "False\n    except ValueError as error:\n        assert 'negative' in str(error)\n",
    "entry_point": "root",
}


def block(code: str, language: str = "python") -> str:
    return f"Here is my solution.\n```{language}\n{code}\n```\nIt works."


CASES: list[tuple[Any, ...]] = [
    # stdin and stdout
    ("apps right", block(ADD), SUM, "ok", 3, 3),
    ("apps right, row as JSON text", block(ADD), json.dumps(SUM), "ok", 3, 3),
    ("apps without a block", ADD, SUM, "ok", 3, 3),
    ("apps block without language", block(ADD, ""), SUM, "ok", 3, 3),
    ("apps block py", block(ADD, "py"), SUM, "ok", 3, 3),
    ("apps unfinished block", "```python\n" + ADD, SUM, "ok", 3, 3),
    ("apps two blocks, the last counts", block("print(1)") + block(ADD), SUM, "ok", 3, 3),
    ("apps two blocks, the last is wrong", block(ADD) + block("print(1)"), SUM, "wrong", 0, 3),
    ("apps a block with sample output behind it", block(ADD) + "\nOutput:\n```\n3\n```", SUM, "ok", 3, 3),
    ("apps thoughts are not looked at", "<think>" + block("print(1)") + "</think>" + block(ADD), SUM, "ok", 3, 3),
    ("apps in answer tags", f"<answer>{ADD}</answer>", SUM, "ok", 3, 3),
    ("apps wrong", block("a, b = map(int, input().split())\nprint(a - b)"), SUM, "wrong", 0, 3),
    ("apps wrong at the last test", block("a, b = map(int, input().split())\nprint(a + b or 1)"), SUM, "wrong", 2, 3),
    ("apps prose", "I do not know.", SUM, "wrong", 0, 3),
    ("apps empty answer", "", SUM, "wrong", 0, 3),
    ("apps does not parse", block("print((1)"), SUM, "wrong", 0, 3),
    ("apps raises", block("1 / 0"), SUM, "wrong", 0, 3),
    ("apps right output, then raises", block(ADD + "raise ValueError"), SUM, "wrong", 0, 3),
    ("apps right output, exit code 0", block(ADD + "import sys\nsys.exit(0)"), SUM, "ok", 3, 3),
    ("apps right output, exit()", block(ADD + "exit()"), SUM, "ok", 3, 3),
    ("apps right output, exit code 3", block(ADD + "exit(3)"), SUM, "wrong", 0, 3),
    ("apps too much output", block(ADD + "print('x')"), SUM, "wrong", 0, 3),
    ("apps no output", block("input()"), SUM, "wrong", 0, 3),
    ("apps white space", block("a, b = map(int, input().split())\nprint('', a + b, '\\n\\n')"), SUM, "ok", 3, 3),
    ("apps an integer as a float", block("a, b = map(int, input().split())\nprint(float(a + b))"), SUM, "ok", 3, 3),
    ("apps an integer nearly", block("a, b = map(int, input().split())\nprint(a + b + 0.3)"), SUM, "wrong", 0, 3),
    (
        "apps forgotten imports",
        block("a, b = map(int, sys.stdin.read().split())\nd = defaultdict(int)\nprint(a + b + d[0])"),
        SUM,
        "ok",
        3,
        3,
    ),
    (
        "apps main guard",
        block("def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()"),
        SUM,
        "ok",
        3,
        3,
    ),
    ("apps open(0)", block("a, b = map(int, open(0).read().split())\nprint(a + b)"), SUM, "ok", 3, 3),
    ("apps /dev/stdin", block("a, b = map(int, open('/dev/stdin').read().split())\nprint(a + b)"), SUM, "ok", 3, 3),
    (
        "apps sys.stdin.buffer",
        block(
            "import sys\na, b = map(int, sys.stdin.buffer.read().split())\nsys.stdout.buffer.write(b'%d\\n' % (a + b))"
        ),
        SUM,
        "ok",
        3,
        3,
    ),
    (
        "apps deep recursion in a thread",
        block(
            "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**26)\ndef f(n):\n    return n "
            "and 1 + f(n - 1)\ndef main():\n    a, b = map(int, input().split())\n    f(20000)\n    print(a + "
            "b)\nthreading.Thread(target=main).start()"
        ),
        SUM,
        "ok",
        3,
        3,
    ),
    (
        "apps a subprocess by fork",
        block("import os\nif os.fork() == 0:\n    os._exit(0)\nos.wait()\n" + ADD),
        SUM,
        "ok",
        3,
        3,
    ),
    (
        "apps atexit",
        block("import atexit\na, b = map(int, input().split())\natexit.register(print, a + b)"),
        SUM,
        "ok",
        3,
        3,
    ),
    (
        "apps a file of its own",
        block("a, b = map(int, input().split())\nopen('x', 'w').write(str(a + b))\nprint(open('x').read())"),
        SUM,
        "ok",
        3,
        3,
    ),
    (
        "apps a file object of its own on stdout, never closed",
        block("import os\nout = os.fdopen(1, 'w')\na, b = map(int, input().split())\nout.write(str(a + b))"),
        SUM,
        "ok",
        3,
        3,
    ),
    (
        "apps the same in a function that exits",
        block(
            "import sys\ndef main():\n    out = open(1, 'w')\n    a, b = map(int, input().split())\n    "
            "out.write(str(a + b))\n    sys.exit()\nmain()"
        ),
        SUM,
        "ok",
        3,
        3,
    ),
    (
        "apps stdout replaced",
        block(
            "import io, os, sys\nclass Out(io.StringIO):\n    def flush(self):\n        os.write(1, "
            "self.getvalue().encode())\n        self.truncate(0)\nsys.stdout = Out()\n" + ADD
        ),
        SUM,
        "ok",
        3,
        3,
    ),
    (
        "apps print before stdout is replaced",
        block(ADD + "import io, sys\nsys.stdout = io.StringIO()"),
        SUM,
        "ok",
        3,
        3,
    ),
    ("apps stdout closed", block("import sys\n" + ADD + "sys.stdout.close()"), SUM, "ok", 3, 3),
    ("apps stdout None", block("import sys\n" + ADD + "sys.stdout = None"), SUM, "ok", 3, 3),
    (
        "apps multiprocessing",
        block(
            "import multiprocessing\ndef f(x):\n    return x\nif __name__ == '__main__':\n    a, b = map(int, "
            "input().split())\n    with multiprocessing.Pool(2) as pool:\n        print(sum(pool.map(f, [a, b])))"
        ),
        SUM,
        "ok",
        3,
        3,
    ),
    (
        "apps dataclasses",
        block(
            "from dataclasses import dataclass\n@dataclass\nclass P:\n    a: int\n    b: int\np = "
            "P(*map(int, input().split()))\nprint(p.a + p.b)"
        ),
        SUM,
        "ok",
        3,
        3,
    ),
    ("apps stderr does not count", block("import sys\nprint('debug', file=sys.stderr)\n" + ADD), SUM, "ok", 3, 3),
    ("apps loops forever", block("while True: pass"), SUM, "wrong", 0, 3),
    ("apps waits for more input", block(ADD + "input()"), SUM, "wrong", 0, 3),
    ("apps floats close", block("print(float(input()) ** 0.5)"), FLOAT, "ok", 2, 2),
    ("apps floats rounded too much", block("print(round(float(input()) ** 0.5, 2))"), FLOAT, "wrong", 0, 2),
    (
        "apps lines",
        block("n = int(input())\nxs = [int(input()) for _ in range(n)]\nprint(*xs)\nprint('sum', sum(xs))"),
        LINES,
        "ok",
        1,
        1,
    ),
    (
        "apps lines joined",
        block("n = int(input())\nxs = [int(input()) for _ in range(n)]\nprint(*xs, 'sum', sum(xs))"),
        LINES,
        "wrong",
        0,
        1,
    ),
    ("apps unicode", block("print(input())"), ECHO, "ok", 1, 1),
    ("apps inputs as lists of lines", block(ADD), {"inputs": [["1 2"]], "outputs": [["3"]]}, "ok", 1, 1),
    ("apps as published", block(ADD), {"input_output": json.dumps(SUM)}, "ok", 3, 3),
    ("apps in an unfinished thought", "<think>I try\n" + block(ADD) + "Hmm, wait", SUM, "wrong", 0, 3),
    ("taco fn_name null", block(ADD), {**SUM, "fn_name": None}, "ok", 3, 3),
    # calls
    ("call right", block(TWO_SUM_CODE), TWO_SUM, "ok", 2, 2),
    ("call of class Solution, imports forgotten", block(SOLUTION), TWO_SUM, "ok", 2, 2),
    (
        "call returns a tuple",
        block(TWO_SUM_CODE.replace("[seen[target - n], i]", "seen[target - n], i")),
        TWO_SUM,
        "ok",
        2,
        2,
    ),
    (
        "call returns the wrong order",
        block(TWO_SUM_CODE.replace("[seen[target - n], i]", "[i, seen[target - n]]")),
        TWO_SUM,
        "wrong",
        0,
        2,
    ),
    (
        "call prints instead of returning",
        block("def two_sum(nums, target):\n    print([0, 1])"),
        TWO_SUM,
        "wrong",
        0,
        2,
    ),
    ("call of a missing function", block("def three_sum(nums, target): return [0, 1]"), TWO_SUM, "wrong", 0, 2),
    ("call raises", block("def two_sum(nums, target): raise KeyError(1)"), TWO_SUM, "wrong", 0, 2),
    (
        "call output in a list of one",
        block("def f(x):\n    return x + 1"),
        {"fn_name": "f", "inputs": [[1]], "outputs": [[2]]},
        "ok",
        1,
        1,
    ),
    (
        "call returns a string for a number",
        block("def f(x):\n    return str(x + 1)"),
        {"fn_name": "f", "inputs": [[1]], "outputs": [2]},
        "wrong",
        0,
        1,
    ),
    (
        "call returns True for 1",
        block("def f(x):\n    return True"),
        {"fn_name": "f", "inputs": [[1]], "outputs": [1]},
        "wrong",
        0,
        1,
    ),
    (
        "call returns a dict",
        block("def f(x):\n    return {i: str(i) for i in range(x)}"),
        {"fn_name": "f", "inputs": [[2]], "outputs": [{"0": "0", "1": "1"}]},
        "ok",
        1,
        1,
    ),
    (
        "call returns a large integer",
        block("def f(x):\n    return 7 ** x"),
        {"fn_name": "f", "inputs": [[100]], "outputs": [7**100]},
        "ok",
        1,
        1,
    ),
    (
        "call with numbers as keys",
        block("def f(d):\n    return d[1] + d[-2]"),
        {"fn_name": "f", "inputs": [[{"1": 5, "-2": 6}]], "outputs": [11]},
        "ok",
        1,
        1,
    ),
    (
        "call returns an object",
        block("class A: pass\ndef f(x):\n    return A()"),
        {"fn_name": "f", "inputs": [[1]], "outputs": [1]},
        "wrong",
        0,
        1,
    ),
    (
        "call state does not last",
        block("n = 0\ndef f(x):\n    global n\n    n += 1\n    return n"),
        {"fn_name": "f", "inputs": [[1], [1]], "outputs": [1, 1]},
        "ok",
        2,
        2,
    ),
    # LiveCodeBench
    ("lcb stdin right", block(ADD), LCB_STDIN, "ok", 2, 2),
    ("lcb stdin wrong", block("print(3)"), json.dumps(LCB_STDIN), "wrong", 1, 2),
    ("lcb functional right", block(SCALE), LCB_CALL, "ok", 2, 2, LCB_INFO),
    ("lcb functional wrong", block(SCALE.replace("* k", "+ k")), json.dumps(LCB_CALL), "wrong", 0, 2, LCB_INFO),
    ("lcb functional without a name", block(SCALE), LCB_CALL, "error", 0, 0),
    ("prime stdin_stdout", block(ADD), [{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}], "ok", 1, 1),
    (
        "prime function_call",
        block(TWO_SUM_CODE),
        [{"type": "function_call", "fn_name": "two_sum", "input": [[2, 7], 9], "output": [[0, 1]]}],
        "ok",
        1,
        1,
    ),
    ("lcb packed tests", block(SCALE), {"private_test_cases": "eJxrYJmq"}, "error", 0, 0),
    # MBPP
    ("mbpp right", block(COMMON), MBPP, "ok", 3, 3),
    ("mbpp right, row as JSON text", block(COMMON), json.dumps(MBPP), "ok", 3, 3),
    ("mbpp right, a list of assertions", block(COMMON), MBPP["test_list"], "ok", 3, 3),
    ("mbpp right, one assertion as text", block(COMMON), "assert common((1,), (1,)) == (1,)", "ok", 1, 1),
    ("mbpp wrong", block(COMMON.replace("&", "|")), MBPP, "wrong", 0, 3),
    ("mbpp partly wrong", block("def common(a, b):\n    return (4, 5) if 5 in a else ()"), MBPP, "wrong", 2, 3),
    ("mbpp missing function", block("def comon(a, b): return ()"), MBPP, "wrong", 0, 3),
    ("mbpp does not parse", block("def common(a, b) return"), MBPP, "wrong", 0, 3),
    ("mbpp a generator", block("def common(a, b):\n    yield from set(a) & set(b)"), MBPP, "ok", 3, 3),
    ("mbpp the program's class as argument", block(LONGEST), PAIRS, "ok", 2, 2),
    ("mbpp the program's class, wrong", block(LONGEST.replace("n + 1", "n + 2")), PAIRS, "wrong", 0, 2),
    ("mbpp setup with the program's class", block(DEPTH), TREE, "ok", 3, 3),
    ("mbpp setup with the program's class, wrong", block(DEPTH.replace("1 + max", "2 + max")), TREE, "wrong", 2, 3),
    (
        "mbpp a function called sum",
        block("def sum(a, b):\n    return a * b"),
        {"test_list": ["assert sum(3, 4) == 12"]},
        "ok",
        1,
        1,
    ),
    (
        "mbpp math without import",
        block("def f(x):\n    return x / 3"),
        {"test_list": ["assert math.isclose(f(1), 0.3333333, rel_tol=1e-5)"]},
        "ok",
        1,
        1,
    ),
    (
        "mbpp Counter without import",
        block("def f(x):\n    return list(x)\ndef Counter(x):\n    return 0"),
        {"test_list": ["assert Counter(f('ab')) == Counter('ba')"]},
        "ok",
        1,
        1,
    ),
    (
        "mbpp a Counter of the program's is not believed",
        block("def f(x):\n    return []\ndef Counter(x):\n    return 0"),
        {"test_list": ["assert Counter(f('ab')) == Counter('ba')"]},
        "wrong",
        0,
        1,
    ),
    (
        "mbpp a task that is called gcd",
        block("def gcd(a, b):\n    return a if not b else gcd(b, a % b)"),
        {"test_list": ["assert gcd(12, 18) == 6"]},
        "ok",
        1,
        1,
    ),
    (
        "mbpp tests want numpy",
        block("class np:\n    allclose = lambda *a: True\ndef f(x):\n    return x"),
        {"test_list": ["assert np.allclose(f(1), [2])"]},
        "error",
        0,
        0,
    ),
    (
        "mbpp imports",
        block("def f(x):\n    return x ** 0.5"),
        {"test_list": ["assert isclose(f(4), 2)"], "test_imports": ["from math import isclose"]},
        "ok",
        1,
        1,
    ),
    ("mbpp broken tests", block(COMMON), {"test_list": ["assert common((1,), (1,) == ("]}, "error", 0, 0),
    (
        "mbpp tests import what is not there",
        block(COMMON),
        {"test_list": ["assert f(1)"], "test_setup_code": "import nosuchmodule"},
        "error",
        0,
        0,
    ),
    (
        "mbpp tests look at an argument",
        block("def s(a):\n    a.sort()"),
        {"test_list": ["a = [3, 1]\ns(a)\nassert a == [1, 3]"]},
        "error",
        0,
        0,
    ),
    (
        "mbpp a loop over the function",
        block("def f(x):\n    return x + 1"),
        {"test_list": ["for a, b in zip(map(f, [1, 2]), [2, 3]):\n    assert a == b"]},
        "ok",
        1,
        1,
    ),
    (
        "mbpp tests pass a function",
        block("def f(x):\n    return x(1)"),
        {"test_list": ["try:\n    f(lambda x: x)\nexcept Exception:\n    pass"]},
        "error",
        0,
        0,
    ),
    ("mbpp no tests", block(COMMON), {"test_list": []}, "error", 0, 0),
    ("prime assert_case", block(COMMON), {"inputs": [], "outputs": [], "assert_case": MBPP["test_list"]}, "ok", 3, 3),
    # HumanEval
    ("humaneval body alone", BODY, HUMANEVAL, "ok", 1, 1),
    ("humaneval whole function", block(HUMANEVAL["prompt"] + BODY), HUMANEVAL, "ok", 1, 1),
    (
        "humaneval function without the imports",
        block("def below_zero(operations: List[int]) -> bool:\n" + BODY),
        HUMANEVAL,
        "ok",
        1,
        1,
    ),
    ("humaneval wrong", block("def below_zero(operations):\n    return False"), HUMANEVAL, "wrong", 0, 1),
    ("humaneval nothing", "", HUMANEVAL, "wrong", 0, 1),
    ("humaneval prints instead of returning", BODY.replace("return", "print"), HUMANEVAL, "wrong", 0, 1),
    ("humaneval helper of the prompt", block("def decode(s):\n    return s[::-1]"), CYCLIC, "ok", 1, 1),
    (
        "humaneval helper redefined",
        block("def encode(s):\n    return s\ndef decode(s):\n    return s"),
        CYCLIC,
        "wrong",
        0,
        1,
    ),
    (
        "humaneval expected exception",
        block("def root(x):\n    if x < 0:\n        raise ValueError('negative')\n    return x ** 0.5"),
        RAISES,
        "ok",
        1,
        1,
    ),
    (
        "humaneval other exception",
        block("def root(x):\n    if x < 0:\n        raise KeyError('negative')\n    return x ** 0.5"),
        RAISES,
        "wrong",
        0,
        1,
    ),
    ("humaneval without entry point", block("x = 1"), {"test": "def check(candidate): pass"}, "error", 0, 0),
    (
        "humaneval fields in extra_info",
        block("def root(x):\n    if x < 0:\n        raise ValueError('negative')\n    return x ** 0.5"),
        RAISES["test"],
        "ok",
        1,
        1,
        {"entry_point": "root"},
    ),
    # ways of writing an answer, and of reading and printing
    ("form: windows line ends", block(ADD).replace("\n", "\r\n"), SUM, "ok", 3, 3),
    ("form: windows line ends in tests", block(ADD), {"inputs": ["1 2\r\n"], "outputs": ["3\r\n"]}, "ok", 1, 1),
    (
        "form: input with trailing spaces",
        block("n=int(input())\nxs=list(map(int,input().split()))\nprint(sum(xs))"),
        {"inputs": ["3 \n1 2 3  \n"], "outputs": ["6"]},
        "ok",
        1,
        1,
    ),
    (
        "form: input without final newline",
        block("import sys\nprint(sum(int(x) for x in sys.stdin))"),
        {"inputs": ["1\n2\n3"], "outputs": ["6\n"]},
        "ok",
        1,
        1,
    ),
    (
        "form: trailing spaces in output",
        block("print('1 2 ')\nprint('3')"),
        {"inputs": [""], "outputs": ["1 2\n3\n"]},
        "ok",
        1,
        1,
    ),
    (
        "form: extra blank lines at the end",
        block("print(3)\nprint()\nprint()"),
        {"inputs": [""], "outputs": ["3"]},
        "ok",
        1,
        1,
    ),
    ("form: crlf output", block("print('3\\r')"), {"inputs": [""], "outputs": ["3\n"]}, "ok", 1, 1),
    ("form: prompt printed", block("a=input('Enter: ')\nprint(a)"), {"inputs": ["5"], "outputs": ["5"]}, "wrong", 0, 1),
    (
        "form: sys.exit in main",
        block("import sys\ndef main():\n    a,b=map(int,input().split())\n    print(a+b)\n    sys.exit()\nmain()"),
        SUM,
        "ok",
        3,
        3,
    ),
    ("form: quit()", block(ADD + "quit()"), SUM, "ok", 3, 3),
    (
        "form: os._exit(0) flushes nothing",
        block("import os\na,b=map(int,input().split())\nprint(a+b,flush=True)\nos._exit(0)"),
        SUM,
        "ok",
        3,
        3,
    ),
    ("form: sys.exit text", block(ADD + "import sys\nsys.exit('bad')"), SUM, "wrong", 0, 3),
    (
        "form: recursion limit raised",
        block(
            "import sys\nsys.setrecursionlimit(10**6)\ndef f(n):\n    return 0 if n==0 else "
            "1+f(n-1)\na,b=map(int,input().split())\nf(30000)\nprint(a+b)"
        ),
        SUM,
        "ok",
        3,
        3,
    ),
    (
        "form: recursion with lru_cache",
        block(
            "import sys\nfrom functools import lru_cache\nsys.setrecursionlimit(10**6)\n@lru_cache(None)\ndef "
            "f(n):\n    return 0 if n==0 else 1+f(n-1)\na,b=map(int,input().split())\nf(5000)\nprint(a+b)"
        ),
        SUM,
        "ok",
        3,
        3,
    ),
    ("form: recursion unlimited", block("def f(n):\n    return f(n+1)\nf(0)\n" + ADD), SUM, "wrong", 0, 3),
    (
        "form: recursion 900",
        block("def f(n):\n    return 0 if n==0 else 1+f(n-1)\na,b=map(int,input().split())\nf(900)\nprint(a+b)"),
        SUM,
        "ok",
        3,
        3,
    ),
    (
        "form: call recursion 900",
        block("def depth(n):\n    return 0 if n==0 else 1+depth(n-1)"),
        {"fn_name": "depth", "inputs": [[900]], "outputs": [900]},
        "ok",
        1,
        1,
    ),
    ("form: call lambda", block("two_sum = lambda nums, target: [0,1] if target==9 else [1,2]"), TWO_SUM, "ok", 2, 2),
    (
        "form: call static",
        block(
            "class Solution:\n    @staticmethod\n    def two_sum(nums, target):\n        return "
            "[0,1] if target==9 else [1,2]"
        ),
        TWO_SUM,
        "ok",
        2,
        2,
    ),
    (
        "form: call Solution with init",
        block(
            "class Solution:\n    def __init__(self):\n        self.x=1\n    def two_sum(self, nums, target):\n        "
            "return [0,1] if target==9 else [1,2]"
        ),
        TWO_SUM,
        "ok",
        2,
        2,
    ),
    (
        "form: call Solution and helper class",
        block(
            "class Node:\n    pass\nclass Solution(object):\n    def helper(self,t): return [0,1] if t==9 else "
            "[1,2]\n    def two_sum(self, nums, target):\n        return self.helper(target)"
        ),
        TWO_SUM,
        "ok",
        2,
        2,
    ),
    (
        "form: call function and main guard reading stdin",
        block(
            TWO_SUM_CODE + "\nif __name__ == '__main__':\n    "
            "print(two_sum(list(map(int,input().split())), int(input())))"
        ),
        TWO_SUM,
        "ok",
        2,
        2,
    ),
    ("form: call with top level print", block(TWO_SUM_CODE + "\nprint(two_sum([1,2],3))"), TWO_SUM, "ok", 2, 2),
    (
        "form: call other class name",
        block(TWO_SUM_CODE and SOLUTION.replace("class Solution", "class Sol")),
        TWO_SUM,
        "wrong",
        0,
        2,
    ),
    ("form: call misnamed method", block(SOLUTION.replace("def two_sum", "def twoSum")), TWO_SUM, "wrong", 0, 2),
    (
        "form: mbpp in class Solution",
        block("class Solution:\n    def common(self, a, b):\n        return tuple(set(a) & set(b))"),
        MBPP,
        "ok",
        3,
        3,
    ),
    (
        "form: humaneval in class Solution",
        block(
            "class Solution:\n    def below_zero(self, operations):\n        b=0\n        for o in "
            "operations:\n            b+=o\n            if b<0: return True\n        return False"
        ),
        HUMANEVAL,
        "ok",
        1,
        1,
    ),
    ("form: tilde fence", "~~~python\n" + ADD + "~~~", SUM, "ok", 3, 3),
    ("form: four backticks", "````python\n" + ADD + "````", SUM, "ok", 3, 3),
    ("form: fence glued to the last line", "```python\n" + ADD.rstrip() + "```", SUM, "ok", 3, 3),
    (
        "form: indented fence",
        "1. So\n   ```python\n" + "".join("   " + line + "\n" for line in ADD.splitlines()) + "   ```\n",
        SUM,
        "ok",
        3,
        3,
    ),
    (
        "form: quoted fence",
        "> ```python\n" + "".join("> " + line + "\n" for line in ADD.splitlines()) + "> ```\n",
        SUM,
        "ok",
        3,
        3,
    ),
    ("form: fence in a sentence", "Here is it: ```python\n" + ADD + "```", SUM, "ok", 3, 3),
    ("form: transcript behind", block(ADD) + "\n```python\n>>> add(1, 2)\n3\n```", SUM, "ok", 3, 3),
    ("form: pypy3 and output", block(ADD, "pypy3") + "\n```\n3\n```", SUM, "ok", 3, 3),
    ("form: PYTHON tags", "[PYTHON]\n" + ADD + "[/PYTHON]", SUM, "ok", 3, 3),
    ("form: bom", "\ufeff" + ADD, SUM, "ok", 3, 3),
    ("form: nbsp", block(ADD.replace(" + ", "\u00a0+\u00a0")), SUM, "wrong", 0, 3),
    ("form: tabs", block("def main():\n\ta,b=map(int,input().split())\n\tprint(a+b)\nmain()"), SUM, "ok", 3, 3),
    ("form: float tolerance", block("print(1/3)"), {"inputs": [""], "outputs": ["0.333333"]}, "ok", 1, 1),
    ("form: float tolerance far", block("print(0.334)"), {"inputs": [""], "outputs": ["0.333333"]}, "wrong", 0, 1),
    ("form: YES and yes", block("print('Yes')"), {"inputs": [""], "outputs": ["YES"]}, "wrong", 0, 1),
    ("form: True text", block("print(True)"), {"inputs": [""], "outputs": ["True"]}, "ok", 1, 1),
    (
        "form: call returns set for list",
        block("def f(x):\n    return set(x)"),
        {"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [[1, 2]]},
        "wrong",
        0,
        1,
    ),
    (
        "form: call returns float",
        block("def f(x):\n    return x/3"),
        {"fn_name": "f", "inputs": [[1]], "outputs": [0.333333333]},
        "ok",
        1,
        1,
    ),
    (
        "form: call numpy ints",
        block("def f(x):\n    return True if x else False"),
        {"fn_name": "f", "inputs": [[1]], "outputs": [True]},
        "ok",
        1,
        1,
    ),
    (
        "form: two blocks joined",
        "```python\ndef add(a,b):\n    return "
        "a+b\n```\nand\n```python\na,b=map(int,input().split())\nprint(add(a,b))\n```",
        SUM,
        "wrong",
        0,
        3,
    ),
    ("form: output is a list of lines", block(ADD), {"inputs": ["1 2"], "outputs": [["3"]]}, "ok", 1, 1),
    ("form: number as output", block(ADD), {"inputs": ["1 2"], "outputs": [3]}, "ok", 1, 1),
    (
        "form: stdin iterated",
        block("import sys\nfor line in sys.stdin:\n    a,b=map(int,line.split())\n    print(a+b)"),
        SUM,
        "ok",
        3,
        3,
    ),
    (
        "form: readline",
        block("import sys\ninput=sys.stdin.readline\na,b=map(int,input().split())\nprint(a+b)"),
        SUM,
        "ok",
        3,
        3,
    ),
    (
        "form: readlines",
        block("import sys\nl=sys.stdin.readlines()\na,b=map(int,l[0].split())\nprint(a+b)"),
        SUM,
        "ok",
        3,
        3,
    ),
    (
        "form: EOFError loop",
        block(
            "while True:\n    try:\n        a,b=map(int,input().split())\n    except EOFError:\n "
            "       break\n    print(a+b)"
        ),
        SUM,
        "ok",
        3,
        3,
    ),
    # rows that are no code rows
    ("a number", block(ADD), "42", "error", 0, 0),
    ("nothing", block(ADD), None, "error", 0, 0),
    ("inputs without outputs", block(ADD), {"inputs": ["1"]}, "error", 0, 0),
    ("inputs of another length", block(ADD), {"inputs": ["1", "2"], "outputs": ["1"]}, "error", 0, 0),
]
