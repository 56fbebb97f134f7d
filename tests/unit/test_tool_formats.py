"""Calls that published chat templates write are read back; what a model gets wrong is still a call."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.explore.tasksets import ChatTokenizer
from megarl.explore.tools import FORMATS, format_of
from tests.chat_battery import CALL, TEMPLATES, TOOLS, USER, WORDS, checkpoint

SOURCES = Path(__file__).parents[1] / "data" / "chat_templates"
WITH = {
    "exaone4": "hermes",
    "glm4moe": "glm4",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
    "mistral_v2v3": "mistral_v3",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_training": "hermes",
}
"""Templates of the battery that write calls, and their formats."""


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_of_a_template_and_a_call_that_it_has_written(name: str, tmp_path: Path) -> None:
    found = format_of((SOURCES / f"{name}.jinja").read_text())
    assert found == WITH.get(name)
    if found is None:
        return
    tokenizer = ChatTokenizer.open(checkpoint(tmp_path / name, name))
    for message in (CALL, WORDS):
        prompt, whole = tokenizer.render([USER], {"tools": TOOLS}), tokenizer.render([USER, message], {"tools": TOOLS})
        response = whole[len(prompt.rstrip()) :]
        _, [call] = FORMATS[found].parse(response)
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
    ],
)
def test_calls_in_a_response(form: str, text: str, content: str, calls: list[tuple[str, object]]) -> None:
    found, parsed = FORMATS[form].parse(text)
    assert found == content and [(call.name, call.arguments) for call in parsed] == calls
