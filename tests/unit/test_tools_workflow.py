"""Tool calls between responses: results are turns of nobody's training, and what a model does wrong gives an error."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config.schema import RolloutConfig
from megarl.core.errors import ConfigError
from megarl.core.schema import End
from megarl.engines.client.frames import Completion
from megarl.engines.client.gather import SampleRequest
from megarl.explore import workflows
from megarl.explore.recording.model import RolloutModel
from megarl.explore.workflows.tools import knows_results
from megarl.tasks import ChatTokenizer
from megarl.tasks.tools import FORMATS, python_session
from megarl.tasks.tools.functions import OWN, calculator, template_tools, tools_of
from tests.chat_battery import TEMPLATES, checkpoint
from tests.unit.agent_model import TASK, Model, recorder, run_workflow_of, trajectory

FUNCTIONS = '''
import asyncio, time
from typing import Literal

def area(width: float, height: float = 1.0) -> float:
    """Area of a rectangle."""
    return width * height

async def unit(of: Literal["length", "area"]) -> dict:
    """Unit of a quantity."""
    await asyncio.sleep(0)
    return {"unit": {"length": "m", "area": "m²"}[of]}

def truth(task) -> str:
    """The right answer."""
    return task.ground_truth

def slow(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)

def leave(items: list[int] | None = None) -> str:
    """End the process."""
    raise SystemExit(3)

def _hidden() -> str: ...
'''


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tools") / "mine.py"
    path.write_text(FUNCTIONS)
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("qwen") / "qwen2_5", "qwen2_5")


def rollout(*tools: str, **changes: Any) -> RolloutConfig:
    return RolloutConfig(workflow="tools", tools=list(tools), max_trajectory_tokens=4096, **changes)


def play(folder: Path, settings: RolloutConfig, *texts: str, limit: int = 4096) -> tuple[RolloutModel, Model]:
    tokenizer = ChatTokenizer.open(folder, template_tools(settings))
    model = Model(tokenizer, *texts)
    recorded = recorder(model, limit)
    run_workflow_of(settings, tokenizer, recorded)
    return recorded, model


def results(recorded: RolloutModel) -> list[str]:
    """Text of each turn of tools."""
    return [recorded.text(turn) for turn in recorded.turns if turn.author == "tool"]


def test_a_loop_of_calls(folder: Path, file: str) -> None:
    texts = [f"I add. {call('calculator', expression='12 + 3')}", call("area", width=3) + call("unit", of="area"), "15"]
    recorded, model = play(folder, rollout("calculator", file), *texts)
    assert [turn.author for turn in recorded.turns] == ["user", "model", "tool", "model", "tool", "model"]
    assert "<tool_response>\n15\n</tool_response>" in results(recorded)[0]
    assert '<tool_response>\n3.0\n</tool_response>\n<tool_response>\n{"unit": "m²"}\n' in results(recorded)[1]
    assert recorded.record.num_tool_calls == 3
    prompt = ChatTokenizer.open(folder).decode(recorded.turns[0].token_ids, special=True)
    assert '"name": "calculator"' in prompt and '"enum": ["length", "area"]' in prompt and "_hidden" not in prompt
    [sample] = trajectory(recorded).samples()
    written = np.concatenate([turn.token_ids for turn in recorded.turns if turn.author == "model"])
    np.testing.assert_array_equal(sample.response_ids[sample.response_mask], written)
    whole = [*sample.prompt_ids, *sample.response_ids]
    for request in model.requests:
        assert request.token_ids.tolist() == whole[: len(request.token_ids)]


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (call("search", query="x"), "Error: there is no tool 'search'; there are calculator, area, unit, truth"),
        ("<tool_call>area(3)</tool_call>", "Error: a tool call must have the name of a tool"),
        (call("area"), "Error: area needs the argument 'width'."),
        (call("area", width="3"), "Error: the argument 'width' of area must be of type number."),
        (call("area", width=3, depth=1), "Error: area has no argument 'depth'; it has width, height."),
        (call("unit", of="time"), "Error: the argument 'of' of unit must be one of length, area."),
        (call("leave", items=[True]), "Error: the argument 'items' of leave must be of type array of integer."),
        (call("leave"), "Error: SystemExit: 3\n"),
        (call("truth"), "15"),
        (call("calculator", expression="1 / 0"), "Error: ZeroDivisionError"),
        (call("slow", seconds=0), "(no output)"),
    ],
)
def test_errors_that_the_model_gets(folder: Path, file: str, written: str, told: str) -> None:
    recorded, _ = play(folder, rollout("calculator", file), written, "15")
    assert told in results(recorded)[0]
    assert recorded.end.cause is None and recorded.text(recorded.record.last_of_model()) == "15"


def test_a_function_that_takes_too_long_is_an_error(folder: Path, file: str) -> None:
    recorded, _ = play(folder, rollout(file, tool_timeout_s=0.2), call("slow", seconds=30), "15")
    assert "Error: slow has not returned within 0.2 s." in results(recorded)[0]
    assert recorded.end.cause is None and recorded.text(recorded.record.last_of_model()) == "15"


def test_a_function_that_takes_too_long_ends_the_trajectory_by_setting(folder: Path, file: str) -> None:
    settings = rollout(file, tool_timeout_s=0.2, on_tool_timeout="end")
    recorded, _ = play(folder, settings, call("slow", seconds=30), "15")
    assert recorded.end.cause is End.TOOL_TIMEOUT and not End.TOOL_TIMEOUT.by_policy
    assert recorded.end.given is not None and "rollout.tool_timeout_s" in str(recorded.end.given.message)


def test_calls_are_counted(folder: Path) -> None:
    """Beyond the last call one warning is given; a response that calls again is the last."""
    one = call("calculator", expression="1")
    recorded, model = play(folder, rollout("calculator", max_tool_calls=2), one, one + one, one, "15")
    assert model.given == [one, one + one, one]
    assert [("no tool calls are left" in text) for text in results(recorded)] == [False, True]
    assert recorded.end.cause is None


def test_a_result_without_room_and_a_call_that_is_cut_end_the_trajectory(folder: Path) -> None:
    one = call("calculator", expression="1")
    recorded, _ = play(folder, rollout("calculator"), one, "15")
    assert recorded.end.cause is None and len(recorded.turns) == 4
    length = sum(len(turn.token_ids) for turn in recorded.turns[:2])
    recorded, _ = play(folder, rollout("calculator"), one, "15", limit=length + 5)
    assert recorded.end.cause is End.TRUNCATED and len(recorded.turns) == 2
    recorded, _ = play(folder, rollout("calculator"), f"{one} and then…", "15")
    assert len(recorded.turns) == 2


def test_long_results_are_cut(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text('def words() -> str:\n    """Words."""\n    return "word " * 1000\n')
    recorded, _ = play(folder, rollout(str(path), tool_result_chars=64), call("words"), "15")
    assert "(4936 more characters)" in results(recorded)[0]


def test_a_call_in_a_thought_is_none(folder: Path) -> None:
    one = call("calculator", expression="1")
    recorded, _ = play(folder, rollout("calculator"), f"<think>{one}</think>15")
    assert len(recorded.turns) == 2


def test_a_template_without_tools(tmp_path: Path) -> None:
    """Prompts describe the tools, calls are read in a named form, and results are a user's message."""
    folder = checkpoint(tmp_path / "chatml", "chatml")
    tokenizer = ChatTokenizer.open(folder)
    with pytest.raises(ConfigError, match=r"writes no tool calls.*set rollout\.tool_format to one of .*hermes"):
        workflows.check_template(rollout("calculator"), tokenizer)
    settings = rollout("calculator", tool_format="hermes")
    workflows.check_template(settings, tokenizer)
    recorded, _ = play(folder, settings, call("calculator", expression="12+3"), "15")
    assert "15" in results(recorded)[0] and len(recorded.turns) == 4


@pytest.mark.parametrize("name", ["llama3_1", "mistral_v2v3", "qwen3", "glm4moe"])
def test_results_in_other_templates(tmp_path: Path, name: str) -> None:
    assert name in TEMPLATES
    assert knows_results(ChatTokenizer.open(checkpoint(tmp_path / name, name)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tools": []}, rf"needs rollout\.tools: {', '.join(OWN)}, or Python files"),
        ({"tools": ["search"]}, rf"rollout\.tools=search does not exist; choose one of {', '.join(OWN)}, or give"),
        ({"tools": ["calculator", "calculator"]}, "two tools of the name calculator"),
        ({"tools": ["calculator"], "tool_format": "xml"}, r"rollout\.tool_format='xml' does not exist; choose one of"),
        ({"tools": ["calculator"], "max_trajectory_tokens": None}, r"rollout\.max_trajectory_tokens is not set"),
        ({"tools": ["/nowhere.py"]}, "no such file"),
        ("x = 1", "has no function"),
        ("def f(a: int): ...", "the tool f has no docstring"),
        ("def f(a):\n    'F.'", "the parameter 'a'; annotate it"),
        ("def f(a: set):\n    'F.'", "annotate it with str, int"),
        ("def f(*a: int):\n    'F.'", "models name each argument"),
        ("def f(a: 'Missing'):\n    'F.'", "annotations that cannot be read"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, changes: dict[str, Any] | str, words: str) -> None:
    if isinstance(changes, str):
        path = tmp_path / "mine.py"
        path.write_text(changes)
        changes = {"tools": [str(path)]}
    settings = RolloutConfig(workflow="tools", **({"max_trajectory_tokens": 999} | changes))
    with pytest.raises(ConfigError, match=words):
        workflows.check(settings, tmp_path)


def test_tools_of_another_workflow_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.tools=\['calculator'\] does nothing .* set rollout\.workflow=tools"
    ):
        workflows.check(RolloutConfig(tools=["calculator"]), tmp_path)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(12 + 3) * 2^10", "15360"),
        ("0.1 + 0.2", "0.3"),
        ("-7 // 2 + 7 % 4", "-1"),
        ("sqrt(2)", "1.41421356237"),
        ("round(2.675, 1) + round(1.5)", "4.7"),
        ("factorial(20)", "2432902008176640000"),
        ("max(1, 2, pi)", "3.14159265359"),
        ("2^0.5 * e", "3.84423102816"),
        (" log10(10**300) ", "300"),
    ],
)
def test_the_calculator(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')", "(1).__class__", "x = 1", "2 if 1 else 3", "[1]", "9**9**9**9", "2**99999",
        "factorial(10**9)", "(-8)^0.5", "1e999", "'a' * 10**9", "round(5, -10**12)", "(" * 900, "1" * 2000,
        "exp(9999)", "abs(x=1)", "True", "5000**600 * 5000**600", "log(-1)", "1 << 10**9", "\0",
    ],
)  # fmt: skip
def test_the_calculator_refuses_the_rest_at_once(expression: str) -> None:
    began = time.monotonic()
    with pytest.raises((ValueError, ArithmeticError, TypeError, SyntaxError)):
        calculator(expression)
    assert time.monotonic() - began < 5


def test_schemas_are_those_of_functions(file: str) -> None:
    found = {name: tool.schema["function"] for name, tool in tools_of(rollout("python", file)).items()}
    assert list(found) == ["python", "area", "unit", "truth", "slow", "leave"]
    assert found["area"] == {
        "name": "area",
        "description": "Area of a rectangle.",
        "parameters": {
            "type": "object",
            "properties": {"width": {"type": "number"}, "height": {"type": "number"}},
            "required": ["width"],
        },
    }
    assert found["truth"]["parameters"]["properties"] == {} and found["python"]["parameters"]["required"] == ["code"]
    assert found["leave"]["parameters"]["properties"] == {"items": {"type": "array", "items": {"type": "integer"}}}
    assert set(FORMATS) >= {"hermes"}


@pytest.mark.sandbox
class TestPython:
    """One session for each trajectory."""

    def test_a_session_lives_through_the_turns(self, folder: Path) -> None:
        codes = ["x = 41\nprint('set')", "x + 1", "import os\nopen('/tmp/a', 'w').write('b')", "open('/tmp/a').read()"]
        codes += ["1 / 0", "import sys\nsys.exit(3)", "", "'\\ud800'", "x"]
        recorded, _ = play(folder, rollout("python"), *(call("python", code=code) for code in codes), "42")
        for expected, text in zip(
            ["set\n", "42\n", "1\n", "'b'\n", "ZeroDivisionError", "SystemExit: 3", "(no output)", "\\ud800", "41"],
            results(recorded),
            strict=True,
        ):
            assert expected in text
        assert 'File "<call 5>", line 1, in <module>\n    1 / 0' in results(recorded)[4]

    def test_sessions_see_nothing_of_each_other_or_of_the_machine(self, folder: Path) -> None:
        settings, tokenizer = rollout("python"), ChatTokenizer.open(folder, template_tools(rollout("python")))
        code = call("python", code="import os\nprint('y' in dir(), os.listdir('/tmp'), os.path.exists('/etc'))\ny = 1")
        write = call("python", code="open('/tmp/left', 'w').close()")
        all_open = asyncio.Barrier(4)

        class Together(Model):
            async def sample(self, request: SampleRequest) -> Completion:
                if len(self.requests) in (1, 2):  # the first call has opened its session, the second has written
                    await all_open.wait()
                return await super().sample(request)

        models = [Together(tokenizer, code, write, code, "1") for _ in range(4)]
        recorders = [recorder(model) for model in models]

        async def main() -> None:
            async with workflows.opened(settings, tokenizer) as workflow:
                await asyncio.gather(*(workflow(TASK, one) for one in recorders))
                again = recorder(Model(tokenizer, code, "1"))
                await workflow(TASK, again)
                recorders.append(again)

        asyncio.run(asyncio.wait_for(main(), 60))
        for one in recorders:
            assert "False [] False" in results(one)[0]
        for one in recorders[:4]:
            assert "True ['left'] False" in results(one)[2]

    @pytest.mark.parametrize(
        ("code", "told", "stays"),
        [
            ("while True: pass", "TimeoutError: the code did not end within 2 s", True),
            (
                "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass",
                "has ended (the call did not",
                False,
            ),
            ("import os\nos._exit(0)", "The session has ended (it has ended itself)", False),
            ("a = bytearray(10**10)", "MemoryError", True),
            ("import os\nos.kill(os.getpid(), 9)", "The session has ended", False),
            ("import os\nos.close(3)", "The session has ended", False),
            ("import os\nos.write(3, b'\\xff\\xff\\xff\\xff')", "The session has ended", False),
            ("print('a' * 10**6)", "(999745 more characters)", True),
            ("raise Exception('b' * 10**6)", "bbb", True),
            ("import sys\nsys.setrecursionlimit(10**6)\ndef f(): f()\nf()", "The session has ended", None),
        ],
    )
    def test_limits(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, told: str, stays: bool | None
    ) -> None:
        endless, deaf = "while" in code or stays is None, "SIG_IGN" in code or stays is None
        monkeypatch.setattr(python_session, "LATE_S", 0.5 if deaf else 30.0)
        monkeypatch.setattr(python_session, "LAST_WORDS_S", 30.0 if "itself" in told else 0.5)
        settings = rollout("python", tool_timeout_s=2.0 if endless else 30.0, tool_result_chars=256)
        calls = [call("python", code=one) for one in ("z = 5", code, "z", "1 + 1")]
        recorded, _ = play(folder, settings, *calls, "42")
        _, second, third, fourth = results(recorded)
        assert stays is None or told in second
        assert stays is None or ("5" if stays else "NameError") in third
        assert "2" in fourth and recorded.end.cause is None and len(second) < 4000

    def test_a_cancelled_trajectory_ends_its_session(self, folder: Path) -> None:
        """Also while a call runs, which could go on for ten minutes."""
        settings = rollout("python", tool_timeout_s=600.0)
        tokenizer = ChatTokenizer.open(folder, template_tools(rollout("python")))
        model = Model(tokenizer, call("python", code="x = 1"), call("python", code="import time\ntime.sleep(600)"))
        recorded = recorder(model)

        async def main() -> None:
            async with workflows.opened(settings, tokenizer) as workflow:
                work = asyncio.ensure_future(workflow(TASK, recorded))
                while len(model.given) < 2:
                    await asyncio.sleep(0.01)
                work.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await work
                again = recorder(Model(tokenizer, call("python", code="x"), "1"))
                await workflow(TASK, again)
                assert "NameError" in results(again)[0]

        asyncio.run(asyncio.wait_for(main(), 60))
