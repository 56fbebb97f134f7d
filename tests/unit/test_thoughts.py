"""A thought is one thing to verifiers, tools, environments and the agents' endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.schema import Task
from megarl.core.thoughts import as_written, split_thought, without_thought
from megarl.explore.environments.guess import Guess
from megarl.explore.environments.types import Observation
from megarl.explore.rewards.answer.grammar import after_thinking
from megarl.explore.tasksets import ChatTokenizer
from megarl.explore.tools import FORMATS
from tests.chat_battery import TOOLS, checkpoint
from tests.unit.agent_model import TASK, Model, client, play

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": "<3>"}}\n</tool_call>'
PIECES = ["<think>", "</think>", "a", "\n", CALL]


@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join), st.booleans())
def test_verifiers_and_tools_read_the_same_answer(text: str, in_thinking: bool) -> None:
    written = as_written(text, in_thinking)
    assert "".join(split_thought(written)) == written
    answer = without_thought(written)
    assert after_thinking(written) == answer and len(FORMATS["hermes"].parse(written)[1]) == answer.count(CALL)


@pytest.mark.parametrize(
    ("response", "content", "calls"),
    [
        (f"<think>\n{CALL}\n</think>\n\nIt is 15.", f"<think>\n{CALL}\n</think>\n\nIt is 15.", 0),
        (f"<think>I {CALL}</think>So\n{CALL} it is.", f"<think>I {CALL}</think>So\nit is.", 1),
        (f"{CALL}\n<tool_call>x</tool_call>\nIt is 15.", "It is 15.\nx", 1),
    ],
)
def test_the_endpoint_gives_calls_of_the_answer_and_all_other_text(
    tmp_path: Path, response: str, content: str, calls: int
) -> None:
    tokenizer = ChatTokenizer.open(checkpoint(tmp_path / "qwen2_5", "qwen2_5"))

    async def agent(url: str) -> None:
        messages: list[Any] = [dict(TASK.prompt[0])]
        given = await client(url).chat.completions.create(model="any", messages=messages, tools=TOOLS)
        message = given.choices[0].message
        assert message.content == content and len(message.tool_calls or ()) == calls
        more: list[Any] = [*messages, message, {"role": "user", "content": "More."}]
        await client(url).chat.completions.create(model="any", messages=more, tools=TOOLS)

    recorded = play(Model(tokenizer, response, "15"), agent)
    assert [turn.follows for turn in recorded.turns] == [-1, 0, 1, 2], "what the agent sends back goes on"


def test_the_endpoint_knows_that_the_prompt_has_opened_the_thought(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "qwen2_5", "qwen2_5")
    with (folder / "chat_template.jinja").open("a") as template:
        template.write("{% if add_generation_prompt %}<think>\n{% endif %}")
    tokenizer = ChatTokenizer.open(folder)

    async def agent(url: str) -> None:
        for text, calls in ((f"{CALL} and so on", 0), (f"{CALL}</think>{CALL}", 1)):
            messages: list[Any] = [dict(TASK.prompt[0])]
            given = await client(url).chat.completions.create(model="any", messages=messages, tools=TOOLS)
            message = given.choices[0].message
            assert len(message.tool_calls or ()) == calls
            assert message.content == (text if not calls else f"{CALL}</think>")

    play(Model(tokenizer, f"{CALL} and so on", f"{CALL}</think>{CALL}"), agent)


def test_a_guess_in_a_thought_is_none() -> None:
    row = Task("t", "guess", (), "", {"ground_truth": "7"}, {"tries": 4})
    assert Guess(row).step("<think>7?</think>8") == Observation("lower")
    assert Guess(row).step("<think>7") == Observation("", done=True, success=False)
