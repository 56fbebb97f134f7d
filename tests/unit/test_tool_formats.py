"""Calls that published chat templates write are read back; what a model gets wrong is still a call."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.rewards.math.verifier import time_limit
from megarl.tasks import ChatTokenizer
from megarl.tasks.tools import FORMATS, format_of
from tests.chat_battery import CALL, TEMPLATES, TOOLS, USER, WORDS, checkpoint

SOURCES = Path(__file__).parents[1] / "data" / "chat_templates"
WITH = {
    "deepseek_r1_distill": "deepseek_v3",
    "deepseekv3": "deepseek_v3",
    "exaone4": "hermes",
    "glm4moe": "glm4",
    "gptoss": "gpt_oss",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
    "mistral_v2v3": "mistral_v3",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_training": "hermes",
}
"""Templates of the battery that write calls, and their formats."""
_FUNCTION = {**CALL["tool_calls"][0]["function"], "arguments": '{"a": 12, "b": "<3>"}'}
TEXTUAL = {**CALL, "tool_calls": [{**CALL["tool_calls"][0], "function": _FUNCTION}]}
"""A call whose arguments are JSON as text, as DeepSeek's templates take them."""
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_of_a_template_and_a_call_that_it_has_written(name: str, tmp_path: Path) -> None:
    found = format_of((SOURCES / f"{name}.jinja").read_text())
    assert found == WITH.get(name)
    if found is None:
        return
    tokenizer = ChatTokenizer.open(checkpoint(tmp_path / name, name))
    kwargs = {} if found == "deepseek_v3" else {"tools": TOOLS}  # its templates name no tools
    for message in {"gpt_oss": (WORDS,), "deepseek_v3": (TEXTUAL,)}.get(found, (CALL, WORDS)):
        prompt = tokenizer.render([USER], kwargs)
        whole = tokenizer.render([USER, message], kwargs, answered=True)
        response = whole[len(prompt.rstrip()) :]
        _, [call] = FORMATS[found].parse(tokenizer.with_calls(tokenizer.rendered_ids(response)))
        assert (call.name, call.arguments) == ("add", {"a": 12, "b": "<3>"})


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", "No call.", "No call.", []),
        ("hermes", 'So:\n<tool_call>{"name": "f", "arguments": {}}</tool_call>', "So:", [("f", {})]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call><tool_call>{"name": "g"}',
            "",
            [("f", {"x": 1}), ("g", None)],
        ),
        ("hermes", "<tool_call>f(1)</tool_call>", "", [("", None)]),
        ("glm4", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>[1]</arg_value></tool_call>", "", [("f", {"x": [1]})]),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=code>\nprint(1)\n</parameter>\n</function>\n</tool_call>",
            "",
            [("f", {"code": "print(1)"})],
        ),
        (
            "llama3",
            '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
            "",
            [("f", {"x": 1}), ("g", {})],
        ),
        ("llama3", '<|python_tag|>{"name": "f", ', "", [("", None)]),
        ("llama3", 'It is {"a": 1}.', 'It is {"a": 1}.', []),
        ("mistral_v3", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{', "", [("f", {"x": 1}), ("g", None)]),
        ("mistral_v3", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}', "", [("", None)]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call> It is 15.', "It is 15.", [("f", {})]),
        ("glm4", "So <tool_call>f</tool_call> that.<tool_call>g</tool_call>", "So\nthat.", [("f", {}), ("g", {})]),
        ("glm4", "<tool_call>f<arg_key>x</arg_key><arg_value>1", "", [("f", None)]),
        ("qwen3_coder", "So <function=f></function></tool_call>\nthat.", "So\nthat.", [("f", {})]),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter><parameter=a>2</parameter>", "", [("f", None)]),
        ("qwen3_coder", "<function=f>\n<parameter=a>\nrm", "", [("f", None)]),
        ("llama3", '{"name": "f", "parameters": {}} It is 15.', "It is 15.", [("f", {})]),
        ("mistral_v3", "So[TOOL_CALLS]f[ARGS]{} that.[TOOL_CALLS]g[ARGS]{}", "So\nthat.", [("f", {}), ("g", {})]),
        ("mistral_v3", '[TOOL_CALLS] [{"name": "f", "arguments": {}}] It is 15.', "It is 15.", [("f", {})]),
        (
            "deepseek_v3",
            "So" + DEEPSEEK.format('function<｜tool▁sep｜>f\n```json\n{"x": 1}\n```'),
            "So",
            [("f", {"x": 1})],
        ),
        (
            "deepseek_v3",
            DEEPSEEK.format('f<｜tool▁sep｜>{"x": "```json"}') + "that.",
            "that.",
            [("f", {"x": "```json"})],
        ),
        ("deepseek_v3", DEEPSEEK.format("f<｜tool▁sep｜>{"), "", [("f", None)]),
        ("deepseek_v3", DEEPSEEK.format("f"), "", [("f", None)]),
        ("kimi_k2", KIMI.format('functions.f:0<|tool_call_argument_begin|>{"x": 1}'), "", [("f", {"x": 1})]),
        ("kimi_k2", "So" + KIMI.format("a.b:12<|tool_call_argument_begin|>[]"), "So", [("a.b", None)]),
        (
            "minimax_m2",
            'So\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">[1]</parameter>\n</invoke>\n'
            '<invoke name="g"></invoke>\n</minimax:tool_call>',
            "So",
            [("f", {"x": [1]}), ("g", {})],
        ),
        ("minimax_m2", '<invoke name="f"><parameter name="x">1', "", [("f", None)]),
        (
            "qwen3_coder",
            "So\n<seed:tool_call>\n<function=f>\n<parameter=x>1</parameter>\n</function>\n</seed:tool_call>",
            "So",
            [("f", {"x": 1})],
        ),
        (
            "olmo3",
            "<function_calls>\nf(x=-1, y='é', z=[true, {\"a\": None}])\ng()\n</function_calls>So",
            "So",
            [("f", {"x": -1, "y": "é", "z": [True, {"a": None}]}), ("g", {})],
        ),
        ("olmo3", "<function_calls>f(1)</function_calls>", "", [("f", None)]),
        ("olmo3", "<function_calls>f(x=1, x=2)", "", [("f", None)]),
        ("olmo3", "<function_calls>f(x=open('/etc/passwd'))", "", [("f", None)]),
        ("olmo3", "<function_calls>f(x=1e999)\ng(x={1: 2})", "", [("f", None), ("g", None)]),
        ("olmo3", "<function_calls>f(**{'x': 1})", "", [("f", None)]),
        ("olmo3", "<function_calls>import os", "", [("", None)]),
        ("olmo3", "<function_calls>os.system('ls')", "", [("", None)]),
        ("olmo3", "<function_calls>f(x=" + 5000 * "[", "", [("", None)]),
        ("olmo3", "<function_calls>f(x=" + 20000 * "-" + "1)", "", [("", None)]),
        ("olmo3", "<function_calls>f" + 20000 * ".a" + "()", "", [("", None)]),
        ("olmo3", "<function_calls>" + 30000 * "f()\n", "", [("", None)]),
        (
            "hunyuan",
            'So<tool_calls>[{"name": "f", "arguments": {"x": 1}}, {"name": "g"}]</tool_calls>',
            "So",
            [("f", {"x": 1}), ("g", None)],
        ),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}]', "", [("f", {})]),
        ("granite", '<|tool_call|>{"name": "f", "arguments": {}}<|/tool_call|>So', "So", [("f", {})]),
        ("gpt_oss", '<|start|>functions.f<|message|>{"x": 1}<|call|>', "", [("f", {"x": 1})]),
        ("gpt_oss", "So<|start|>functions.f<|message|>{", "So", [("f", None)]),
    ],
)
def test_calls_in_a_response(form: str, text: str, content: str, calls: list[tuple[str, object]]) -> None:
    found, parsed = FORMATS[form].parse(text)
    assert found == content and [(call.name, call.arguments) for call in parsed] == calls


WRITTEN = {
    "gpt_oss": "<|start|>functions.f<|message|>{}<|call|>",
    "deepseek_v3": DEEPSEEK.format("f<｜tool▁sep｜>{}"),
    "kimi_k2": KIMI.format("functions.f:0<|tool_call_argument_begin|>{}"),
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>',
    "olmo3": "<function_calls>\nf()\n</function_calls>",
    "hunyuan": '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>',
    "granite": '<|tool_call|>[{"name": "f", "arguments": {}}]',
    "qwen3_coder": "<tool_call>\n<function=f>\n</function>\n</tool_call>",
    "glm4": "<tool_call>f\n</tool_call>",
    "hermes": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "mistral_v3": '[TOOL_CALLS] [{"name": "f", "arguments": {}}]',
    "llama3": '<|python_tag|>{"name": "f", "parameters": {}}',
}
"""A call of each format."""


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_in_a_thought_is_text(form: str) -> None:
    call = WRITTEN[form]
    for text in (f"<think>\n{call}\n</think>\n\nIt is 15.", f"<think>\n{call}", f"{call}</think>15"):
        assert FORMATS[form].parse(text) == (text, [])
    content, [found] = FORMATS[form].parse(f"<think>\n{call}\n</think>\n\n{call}")
    assert found.name == "f" and content == f"<think>\n{call}\n</think>"
    content, [found] = FORMATS[form].parse(f"<think>a</think>{call}\n<think>{call}")
    assert found.name == "f" and content == f"<think>a</think>\n<think>{call}"


@pytest.mark.parametrize(
    ("form", "part", "arguments"),
    [
        ("qwen3_coder", "<function=", []),
        ("qwen3_coder", "<function=f><parameter=", [None]),
        ("qwen3_coder", "<function=f><parameter=a>", [None]),
        ("qwen3_coder", "<function=f>", [None]),
        ("glm4", "<tool_call>f<arg_key>", [None]),
        ("glm4", "<tool_call>f<arg_key>a</arg_key><arg_value>", [None]),
        ("glm4", "<tool_call>f<arg_key>a</arg_key>", [None]),
        ("hermes", "<tool_call>", [None]),
        ("hermes", '<tool_call>{"name": [', [None]),
        ("deepseek_v3", "<｜tool▁call▁begin｜>", [None]),
        ("kimi_k2", "<|tool_call_begin|>", []),
        ("kimi_k2", "<|tool_call_begin|>f<|tool_call_argument_begin|>", [None]),
        ("minimax_m2", '<invoke name="f">', [None]),
        ("minimax_m2", '<invoke name="f"><parameter name="a">', [None]),
        ("olmo3", "<function_calls>", [None]),
        ("gpt_oss", "<|start|>functions.f", []),
    ],
)
def test_calls_that_are_not_closed_are_read_in_linear_time(form: str, part: str, arguments: list[object]) -> None:
    """They hold up the explorer's event loop for hours otherwise. CPU time, so that a busy machine changes nothing."""
    last = part[part.rindex("<") :]
    with time_limit(20.0):
        calls = FORMATS[form].parse(part + 2_000_000 // len(last) * last)[1]
    assert [call.arguments for call in calls] == arguments


def test_many_calls_in_python_are_read_in_linear_time() -> None:
    """2300 calls took 5 s where each split the text into lines again."""
    with time_limit(20.0):
        calls = FORMATS["olmo3"].parse("<function_calls>" + 'f(x="é")\r\n' * 6000)[1]
    assert [(call.text, call.arguments) for call in calls] == [('f(x="é")', {"x": "é"})] * 6000


def test_a_number_with_more_digits_than_json_can_have_is_no_argument() -> None:
    [call] = FORMATS["olmo3"].parse(f"<function_calls>f(x=0x{'f' * 4000})")[1]
    assert call.name == "f" and call.arguments is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "part",
    ["<parameter=x>", "<arg_key>", "<arg_key>a</arg_key><arg_value>", "<function=", "<tool_call>", "[TOOL_CALLS]"],
)
def test_a_response_that_repeats_itself_is_read_at_once(form: str, part: str) -> None:
    """Searches from each beginning to the end of the text would take many minutes."""
    for text in (part * 30000, f"<tool_call>f<function=f>{part * 30000}"):
        _, calls = FORMATS[form].parse(text)
        assert all(call.arguments is None or call.arguments == {} for call in calls)
