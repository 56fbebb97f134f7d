"""Text of a model or a row never runs outside the sandbox: programs in 240 forms, through all that reads such text."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.util
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megarl.config.rewards import RewardConfig
from megarl.core.errors import DataError
from megarl.core.schema import Task
from megarl.explore.environments.guess import Guess
from megarl.explore.environments.gymnasium import Gymnasium
from megarl.explore.environments.types import last_number
from megarl.rewards import compute_score, procedural, routes
from megarl.rewards.judge.rubric import RUBRIC, fill, read_vote
from megarl.rewards.math.verifier import time_limit
from megarl.rewards.routes import ROUTES, check_row
from megarl.sandbox.selftest import local_sandbox
from megarl.tasks.image_rows import size_of
from megarl.tasks.tools import FORMATS
from megarl.tasks.tools.functions import calculator
from megarl.tasks.tools.python_session import PythonSession, PythonSessions

CANARY = "MEGARL_CANARY"
"""Variable that a payload sets."""

SHAPES = (
    "{0}",
    " {0}",
    "({0})",
    "[{0}]",
    "[[{0}]]",
    "[1, {0}]",
    "{{{0}}}",
    "{{'a': {0}}}",
    "{{{0}: 1}}",
    "(1, {0})",
    "-{0}",
    "not {0}",
    "1 + {0}",
    "x*{0}",
    "{0} + C",
    "{0} or 12",
    "{0} if 1 else 2",
    "1 if {0} else 2",
    "12 if not {0} else 12",
    "{0} == 24",
    "sin({0})",
    "exp({0})",
    "sqrt(x, {0})",
    "f({0})",
    "print({0})",
    "str({0})",
    "(lambda: {0})()",
    "(lambda x={0}: x)()",
    "[{0} for _ in [1]]",
    "{{{0} for _ in [1]}}",
    "[*[{0}]]",
    "f'{{{0}}}'",
    "(y := {0})",
    "list(map(lambda _: {0}, [1]))",
    "max([1], key=lambda _: {0} or 1)",
    "[1][{0} or 0]",
    "0.2[{0}]",
    "eval({0!r})",
    "exec({0!r})",
    "sympify({0!r})",
    "S({0!r})",
    "parse_expr({0!r})",
    "Symbol('x').func({0!r})",
    "Function({0!r})(x)",
    "lambdify(x, {0!r})(1)",
    "Integral({0}, x)",
    "__import__('builtins').eval({0!r})",
    "().__class__.__base__.__subclasses__()[0].__init__ or {0}",
    "{0}\n12",
    "12 # \n+ {0}",
    '["_ Q", {0}]',
    '{{"a": "{0}"}}',
    "\\frac{{{0}}}{{1}}",
    "\\text{{{0}}}",
    "\\operatorname{{eval}}({0})",
    "`{0}`",
    "$({0})$",
    "!!python/object/apply:eval [{0!r}]",
    "%({0})s {{{0}}} {{0.__class__}}",
    '<tool_call>\n{{"name": "{0}", "arguments": {{"expression": "{0}"}}}}\n</tool_call>',
)
"""Forms of a program in an answer: literals, formulas, JSON, LaTeX, YAML, templates, calls of tools."""


class Canaries:
    """What a program leaves behind where it ran: a file, a variable, a connection or a process's file."""

    def __init__(self, folder: Path) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._files = [folder / "file", folder / "process"]
        port = self._listener.getsockname()[1]
        self.programs = (
            f"open('{self._files[0]}', 'w').close()",
            f"__import__('os').environ.__setitem__('{CANARY}', '1')",
            f"__import__('socket').create_connection(('127.0.0.1', {port})).close()",
            f"__import__('os').system('touch {self._files[1]}')",
        )
        self.payloads = [shape.format(program) for shape in SHAPES for program in self.programs]

    def tripped(self) -> list[str]:
        """Names of the canaries that were met since the last call."""
        found = [file.name for file in self._files if file.exists()]
        for file in self._files:
            file.unlink(missing_ok=True)
        if os.environ.pop(CANARY, None) is not None:
            found.append("environment")
        try:
            self._listener.accept()[0].close()
            found.append("socket")
        except BlockingIOError:
            pass
        return found

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def canaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Canaries]:
    found = Canaries(tmp_path_factory.mktemp("canaries"))
    yield found
    found.close()


def written(payload: str) -> Iterator[str]:
    """Responses that give a payload as the answer."""
    yield payload
    yield f"<think>2</think><answer>{payload}</answer>"
    yield f"So \\boxed{{{payload}}}"
    yield f"#### {payload}"


def test_each_program_trips_its_canary_where_it_runs(canaries: Canaries) -> None:
    met = []
    for program in canaries.programs:
        eval(program)
        met.append(canaries.tripped())
    assert met == [["file"], ["environment"], ["socket"], ["process"]]
    assert len(canaries.payloads) >= 200


def families() -> list[str]:
    import reasoning_gym

    return sorted(set(reasoning_gym.factory.DATASETS) - {"composite"})


@cache
def entry_of(family: str) -> dict[str, Any]:
    import reasoning_gym

    return dict(reasoning_gym.create_dataset(family, seed=1, size=1)[0])


def test_reasoning_gym_runs_no_answer_and_keeps_nothing_of_it(canaries: Canaries) -> None:
    for family in families():
        entry = entry_of(family)
        scorer = procedural.scorer(family)

        def verdicts(scorer: Any = scorer, entry: dict[str, Any] = entry) -> list[float]:
            texts = ("nonsense", "", str(entry["answer"]))
            return [scorer(text, entry["answer"], {"metadata": entry["metadata"]}) for text in texts]

        before = verdicts()
        for payload in canaries.payloads:
            for text in list(written(payload))[:2]:
                scorer(text, entry["answer"], {"question": entry["question"], "metadata": entry["metadata"]})
        assert canaries.tripped() == [], family
        assert verdicts() == before, family


def test_reasoning_gym_runs_no_text_of_a_row(canaries: Canaries) -> None:
    """Every text of the row is a payload, and the answer is one, or the row's own."""

    def hostile(value: Any, payload: str) -> Any:
        if isinstance(value, dict):
            return {name: hostile(part, payload) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [hostile(part, payload) for part in value]
        return payload if isinstance(value, str) else value

    for family in families():
        entry = entry_of(family)
        for payload in canaries.payloads[::7]:
            row = hostile({"question": entry["question"], "metadata": entry["metadata"]}, payload)
            for answer in (payload, "[1]", str(entry["answer"])):
                with contextlib.suppress(Exception):  # what a scorer raises for a row is its verdict
                    procedural.scorer(family)(answer, payload, row)
        assert canaries.tripped() == [], family


@pytest.mark.parametrize(
    ("family", "field"), [(family, name) for family, (name, _) in procedural.EVALUATED_OF_ROW.items()]
)
def test_a_row_whose_text_would_run_is_refused_before_launch(family: str, field: str) -> None:
    entry = entry_of(family)
    metadata = {"metadata": entry["metadata"]}
    source = f"reasoning_gym/{family}"
    check_row(source, entry["answer"], metadata, RewardConfig())
    place = "reward_model.ground_truth" if field == "answer" else f"extra_info.metadata.{field}"
    with pytest.raises(DataError, match=rf"{place}='exit\(\)': reasoning-gym's {family} evaluates"):
        check_row(source, "exit()", {"metadata": {**entry["metadata"], field: "exit()"}}, RewardConfig())


@pytest.mark.parametrize("family", procedural.EVALUATED)
def test_right_answers_of_families_that_evaluate_keep_their_scores(family: str) -> None:
    import reasoning_gym

    score = reasoning_gym.get_score_answer_fn(family)
    for entry in reasoning_gym.create_dataset(family, seed=3, size=12):
        for answer in (entry["answer"], str(entry["answer"].split()), "12 - (3", "no"):
            if "Integral(" not in answer:  # the question itself, which no longer is an answer
                found = procedural.scorer(family)(answer, entry["answer"], {"metadata": entry["metadata"]})
                assert found == score(answer, entry), answer


@pytest.mark.parametrize(
    ("family", "numbers", "target", "right"),
    [("countdown", [2, 3, 4, 7], 27, "3*7 + 4 + 2"), ("puzzle24", [2, 3, 4, 6], 24, "6*4*(3 - 2)")],
)
def test_an_answer_computes_by_no_other_numbers_than_are_counted(
    family: str, numbers: list[int], target: int, right: str
) -> None:
    info = {"metadata": {"numbers": numbers, "target": target}}
    listed, ones = " ".join(map(str, numbers)), "+".join(["x/x"] * target)
    nothing = f"(x-x)*({'+'.join(map(str, numbers))})"
    forged = [
        f"{ones} + {nothing}",
        f"{hex(target)} # {listed}",
        f"({hex(target)} # {listed}\n)",
        f"{hex(target)} + {nothing}",
        f"exp({nothing})*{hex(target)}",
        f"{target // 10}_{target % 10} # {listed}",
    ]
    score = procedural.scorer(family)
    assert score(f"<answer>{right}</answer>", "", info) == 1.0
    assert [text for text in [*forged, "1*2*3*4", "8*3"] if score(text, "", info) > 0.05] == []


def test_a_formula_has_no_text_that_is_not_parsed(canaries: Canaries) -> None:
    for program in canaries.programs:
        for text in (f"x # {program}", f"(x # \x0c {program}\n)", f"(x #'\n) #' + {program}"):
            assert not procedural.is_formula(text), text


@pytest.mark.parametrize(
    ("family", "truths", "constants"),
    [
        ("coin_flip", ["0.375", "0.0625"], ["0", "0.0", "0."]),
        ("complex_arithmetic", ["3 - 2i", "7"], ["nan", " NaN ", "n a n", "nan+nani", "(nan)"]),
        ("game_of_life_halting", ["True", "False"], ["x", "0", "Yes", "not", "TrueFalse"]),
    ],
)
def test_no_constant_answer_is_right_whatever_the_row(family: str, truths: list[str], constants: list[str]) -> None:
    score = procedural.scorer(family)
    for truth, result in zip(truths, ([3.0, -2.0], [7.0, 0.0]), strict=True):
        info = {"metadata": {"result": result}}
        assert score(truth, truth, info) == 1.0
        assert [text for text in constants if score(text, truth, info) > 0.5] == []
    assert procedural.scorer("coin_flip")("0.37504", "0.375", {}) == 1.0
    assert procedural.scorer("coin_flip")("0.3", "0.375", {}) == 0.0


def test_an_answer_in_tags_is_found_in_linear_time() -> None:
    """Tags that are not closed cost quadratic time otherwise, in the event loop where votes are counted."""
    opened = "<answer>" * 20_000
    with time_limit(10.0):  # CPU time, so that a busy machine changes nothing
        assert procedural.answer_of(f"{opened} 5 </answer>") == opened.removeprefix("<answer>") + " 5"
        assert procedural.answer_of(f"<answer> 4</answer><answer>5 </answer> {opened}") == "5"
        assert procedural.answer_of(opened) == opened and routes.EXTRACTORS["reasoning_gym"](opened, {}) == opened[:200]


EVALUATES = {
    "eval", "exec", "compile", "parse_expr", "sympify", "nsimplify", "S", "lambdify", "parse_latex", "__import__",
    "import_module", "pickle", "yaml", "marshal", "subprocess", "system", "popen", "getattr", "attrgetter", "globals",
    "fromstring",
}  # fmt: skip
"""Names of functions and modules by which text becomes code."""


def reachable() -> dict[str, set[str]]:
    """Family -> names of EVALUATES in functions that its scorer may call, by their names: a superset."""
    import reasoning_gym

    root = Path(reasoning_gym.__file__).parent
    trees = {
        ".".join(("reasoning_gym", *file.relative_to(root).with_suffix("").parts)): ast.parse(file.read_text())
        for file in root.rglob("*.py")
    }
    functions: dict[str, list[tuple[str, set[str]]]] = defaultdict(list)
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                parts = [part for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)]
                used = {part.id if isinstance(part, ast.Name) else part.attr for part in parts}
                functions[node.name].append((module, used))
    imports = {module: imported(module, tree) & trees.keys() for module, tree in trees.items()}
    found = {}
    for family, (kind, _) in reasoning_gym.factory.DATASETS.items():
        modules = {owner.__module__ for owner in kind.__mro__} & trees.keys()
        while more := {name for module in modules for name in imports[module]} - modules:
            modules |= more
        names, seen = {"score_answer"}, set[str]()
        while names - seen:
            name = (names - seen).pop()
            seen.add(name)
            names |= {used for module, uses in functions[name] if module in modules for used in uses}
        found[family] = seen & EVALUATES
    return found


def imported(module: str, tree: ast.Module) -> set[str]:
    """Modules that one imports, or imports names from; of a package its ``__init__`` but for that of all families."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), module.rpartition(".")[0])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found | {f"{name}.__init__" for name in found - {"reasoning_gym"}}


def test_the_tables_name_every_family_that_evaluates_text() -> None:
    found = reachable()
    evaluate = {family for family, names in found.items() if names}
    assert found.keys() == procedural.PLAIN | procedural.EVALUATED.keys() | {"composite"}
    assert not procedural.PLAIN & procedural.EVALUATED.keys()
    assert evaluate - {"propositional_logic"} == procedural.EVALUATED.keys() | procedural.EVALUATED_OF_ROW.keys()
    # Its own function of this name, which reads formulas of logic.
    assert found["propositional_logic"] == {"parse_expr"}


def test_a_release_or_family_that_was_not_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="reasoning_gym/composite': megarl does not know .* set reward.path"):
        compute_score("reasoning_gym/composite", "1", "1")
    monkeypatch.setattr(procedural, "VERSION", "0.1.24")
    procedural.scorer.cache_clear()
    with pytest.raises(DataError, match=r"reasoning-gym 0.1.25 is installed, .* pip install reasoning-gym==0.1.24"):
        compute_score("reasoning_gym/chain_sum", "1", "1")
    procedural.scorer.cache_clear()


TRUTHS: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "k12": [("B", {"options": {"A": "6", "B": "7"}}), ("7 cm", {}), ("water", {})],
    "vision/count": [("3", {})],
    "vision/anls": [('["a", "b"]', {})],
    "vision/box": [("[0, 0, 1, 1]", {})],
    "vision/point": [("[0, 0, 1, 1]", {})],
    "vision/choice": [("B", {"options": {"A": "6", "B": "7"}})],
    "vision/math": [("x^2+1", {})],
}
OF_MATH = [("977", {}), ("x^2+1", {}), ("\\frac{1}{2}", {}), ("(1, 2]", {})]


@pytest.mark.parametrize(
    "source", [*(s for s in ROUTES if s in ("math", "math_dapo", "lighteval/MATH", "openai/gsm8k")), *TRUTHS]
)
def test_own_verifiers_run_no_answer(source: str, canaries: Canaries) -> None:
    truths = TRUTHS.get(source, OF_MATH)
    for i, payload in enumerate(canaries.payloads):
        for text in written(payload):
            truth, info = truths[i % len(truths)]
            assert compute_score(source, text, truth, info)["score"] < 1
    assert canaries.tripped() == []


def test_votes_judges_tools_and_environments_run_no_response(canaries: Canaries) -> None:
    gym = Gymnasium(
        Task("t/0", "", ({"role": "user", "content": ""},), "", {"ground_truth": ""}), 0, {"id": "FrozenLake-v1"}
    )
    for payload in canaries.payloads:
        task = Task(
            "t/0", "reasoning_gym/countdown", ({"role": "user", "content": payload},), "", {"ground_truth": "5"}
        )
        for text in written(payload):
            for read in routes.EXTRACTORS.values():
                read(text, {})
            read_vote(text)
            fill(RUBRIC, payload, text, payload)
            last_number(text)
            Guess(task).step(text)
            for form in FORMATS.values():
                form.parse(text)
            gym.reset()
            gym.step(text)
        refused(lambda payload=payload: calculator(payload))
    gym.close()
    assert canaries.tripped() == []


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError, ArithmeticError)):
        call()


def test_no_image_starts_an_interpreter(canaries: Canaries) -> None:
    """Pillow gives PostScript to Ghostscript."""
    for program in canaries.programs:
        refused(
            lambda program=program: size_of(
                b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%pipe%" + program.encode()
            )
        )
    assert canaries.tripped() == []


@pytest.mark.sandbox
def test_the_sandbox_keeps_what_a_program_does(canaries: Canaries) -> None:
    sessions = PythonSessions(local_sandbox(), 1024, 10.0, 1000, 1000)

    async def session() -> None:
        python = PythonSession(sessions)
        for payload in canaries.payloads:
            await python.run(payload)
        await python.close()

    asyncio.run(session())
    sessions.close()
    for payload in canaries.payloads:
        score = compute_score("code", f"```python\n{payload}\n```", '{"inputs": ["1"], "outputs": ["2"]}')
        assert (score["score"], score["status"]) == (0.0, "wrong")
    assert canaries.tripped() == []
