"""A thought is one thing to verifiers, tools, environments and the agents' endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from megarl.core.schema import Task
from megarl.core.text import as_written, opens_thinking, split_thought, without_thought
from megarl.explore.environments.guess import Guess
from megarl.explore.environments.types import Observation
from megarl.rewards.answer.grammar import after_thinking
from megarl.tasks import ChatTokenizer
from megarl.tasks.tools import FORMATS
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


def with_special(tmp_path: Path, name: str, tokens: list[str]) -> ChatTokenizer:
    folder = checkpoint(tmp_path / name, name)
    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored.add_special_tokens(tokens)
    stored.save(str(folder / "tokenizer.json"))
    return ChatTokenizer.open(folder)


HARMONY = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>{}<|return|>"


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (HARMONY.format("Is it 5?") + FINAL.format("6"), "<think>Is it 5?</think>6"),
        (HARMONY.format("a") + HARMONY.format("b") + FINAL.format("6"), "<think>a</think><think>b</think>6"),
        ("<|channel|>analysis<|message|>Is it 5", "<think>Is it 5"),
        (HARMONY.format("a"), "<think>a</think>"),
        (HARMONY.format("a") + "<|channel|>fin", "<think>a</think>"),
        (
            "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant to=functions.add<|channel|>commentary "
            'json<|message|>{"a": 1}<|call|>',
            'I add.<|start|>functions.add<|message|>{"a": 1}<|call|>',
        ),
        (
            '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}',
            '<|start|>functions.add<|message|>{"a": 1}',
        ),
        ("so 5<|end|><|start|>assistant" + FINAL.format("6"), "so 5</think>6"),
        ("so 5", "so 5"),
        ("so 5<|return|>", "so 5"),
        ("<|start|>assistant", ""),
        ("", ""),
    ],
)
def test_channels_of_harmony_become_thoughts_and_text(tmp_path: Path, response: str, text: str) -> None:
    tokenizer = with_special(tmp_path, "gptoss", ["<|constrain|>"])
    assert tokenizer.decode(tokenizer.rendered_ids(response)) == text
    assert tokenizer.decode(tokenizer.rendered_ids(response), special=True) == response


@pytest.mark.parametrize(
    ("opening", "closing"), [("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]")]
)
def test_marks_of_other_families_are_thoughts_to_verifiers_and_tools(
    tmp_path: Path, opening: str, closing: str
) -> None:
    tokenizer = with_special(tmp_path, "qwen2_5", [opening, closing])
    ids = tokenizer.response_ids(f"{opening}{CALL} 5{closing}6")
    text = tokenizer.decode(ids)
    assert after_thinking(text) == "6" and not FORMATS["hermes"].parse(tokenizer.with_calls(ids))[1]
    assert opens_thinking(f"<|im_start|>assistant\n{opening}\n")


def test_other_marks_are_text_to_a_model_that_has_no_such_tokens(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.open(checkpoint(tmp_path / "qwen2_5", "qwen2_5"))
    for text in ("[THINK]5[/THINK]6", "<seed:think>5</seed:think>6", "Here is my thought process: 5"):
        assert tokenizer.decode(tokenizer.rendered_ids(text)) == text


def test_a_thought_in_granites_words(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "chatml", "chatml")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{# Here is my thought process: #}")
    tokenizer = ChatTokenizer.open(folder)
    ids = tokenizer.rendered_ids("Here is my thought process: 5? Here is my response: 6")
    assert tokenizer.decode(ids) == "<think> 5? </think> 6"
