"""Chats become the token ids of transformers' ``apply_chat_template``, with all that a row gives; what would be lost is
refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from megarl.buffer.store.codec import task_from_row, task_to_row
from megarl.core.errors import DataError
from megarl.core.schema import Task
from megarl.tasks import (
    ChatTokenizer,
    encode_demonstrations,
    encode_preferences,
    encode_rows,
    read_preferences,
    read_rows,
)
from megarl.tasks.templates.template import ChatTemplate
from megarl.tasks.templates.turns import messages_of, render_turns, turn_ids
from tests.chat_battery import (
    ANSWER,
    CALL,
    CELLS,
    EQUAL,
    NEXT,
    RESULT,
    SYSTEM,
    TEMPLATES,
    THOUGHT,
    TOOLS,
    USER,
    checkpoint,
    outcomes,
    table,
)
from tests.unit.small_rows import write

DOCS = Path(__file__).parents[2] / "docs" / "chat_templates.md"
Opened = Callable[..., ChatTokenizer]


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    def open_(name: str, *args: Any) -> ChatTokenizer:
        return ChatTokenizer.open(checkpoint(tmp_path / name, name), *args)

    return open_


def read_chats(path: Path) -> list[Task]:
    return read_rows(path, require_response=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_published_templates_render_as_in_transformers(name: str) -> None:
    cells = outcomes(name)
    assert cells["user"] == EQUAL and {*cells.values()} <= {EQUAL, *CELLS}, cells


def test_the_page_shows_what_is_measured() -> None:
    assert DOCS.read_text() == table({name: outcomes(name) for name in TEMPLATES})


def test_stored_truncation_and_padding_are_reset(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "qwen2_5")
    plain = ChatTokenizer.open(path)
    messages = [{"role": "user", "content": "a question of more than eight tokens"}]
    prompts, responses = (
        plain.encode_prompts([messages, [USER]]),
        plain.encode_responses(["one", "a much longer answer"]),
    )
    stored = Tokenizer.from_file(str(path / "tokenizer.json"))
    stored.enable_truncation(8)
    stored.enable_padding(length=64, pad_id=1)
    stored.save(str(path / "tokenizer.json"))
    found = ChatTokenizer.open(path)
    for got, want in zip([*found.encode_prompts([messages, [USER]]), *found.encode_responses(["one", "a much longer "
        "answer"])],
                         [*prompts, *responses], strict=True):  # fmt: skip
        assert np.array_equal(got, want)
    ids = AutoTokenizer.from_pretrained(path).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert found.prompt_ids(messages).tolist() == ids


def test_thoughts_are_told_from_answers_though_their_tags_are_special_tokens(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "qwen2_5", "qwen2_5")
    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored.add_special_tokens(["<think>", "</think>"])
    stored.save(str(folder / "tokenizer.json"))
    tokenizer = ChatTokenizer.open(folder)
    for text in (r"<think>Perhaps \boxed{5}. But", r"<think>Perhaps \boxed{5}.</think>\boxed{6}"):
        ids = tokenizer.response_ids(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, special=True) == text + str(tokenizer.token(int(ids[-1])))


@pytest.mark.parametrize("name", TEMPLATES)
def test_demonstrations_end_as_the_template_ends_answers(opened: Opened, name: str) -> None:
    tokenizer = opened(name)
    assert tokenizer.token(tokenizer.end_id) == TEMPLATES[name].end and tokenizer.end_id in tokenizer.eos_ids
    assert tokenizer.response_ids("so")[-1] == tokenizer.end_id
    assert [tokenizer.token(end) for end in tokenizer.eos_ids] == list(TEMPLATES[name].ends), (
        "sampling stops at all of them"
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_message_after_a_response_is_what_the_template_renders_there(opened: Opened, name: str) -> None:
    """Prompt, response with its end, and message: the ids are those of the whole conversation."""
    tokenizer = opened(name)
    chat = [USER, {"role": "assistant", "content": "four"}, {"role": "user", "content": "That is wrong."}]
    whole = tokenizer.prompt_ids(chat).tolist()
    rendered = render_turns(tokenizer, messages_of("user", ["That is wrong."]))
    message = turn_ids(tokenizer, rendered, tokenizer.end_id).tolist()
    before = whole[: -len(message)]
    assert whole[-len(message) :] == message and tokenizer.decode(before).rstrip().endswith("four")
    if before[-1] != tokenizer.end_id:  # the template ends with another token than sampling, or with none
        assert name in ("gptoss", "glm4moe") or tokenizer.ends_otherwise is not None
    if name == "glm4moe":  # a response of GLM-4 ends with the token that begins a user's message
        [user] = [end for end in tokenizer.eos_ids if tokenizer.token(end) == "<|user|>"]
        assert turn_ids(tokenizer, rendered, user).tolist() == message[1:] and message[0] == user


def test_one_end_for_every_kind_of_row(opened: Opened, tmp_path: Path) -> None:
    """SFT, warm start, MIX, DPO and reward model; texts and messages."""
    tokenizer = opened("llama3")
    end = tokenizer.token(tokenizer.end_id)
    texts = read_rows(write(tmp_path / "texts.jsonl", [{"prompt": "q", "response": "yes"}]), require_response=True)
    chats = read_chats(write(tmp_path / "chats.jsonl", [{"messages": [USER, ANSWER]}]))
    pairs = read_preferences(write(tmp_path / "pairs.jsonl", [{"prompt": "q", "chosen": "yes", "rejected": [ANSWER]}]))
    ids = [
        encode_demonstrations(texts, tokenizer)[0][1],
        encode_demonstrations(chats, tokenizer)[0][1],
        *encode_preferences(pairs, tokenizer)[0][1:],
    ]
    assert end == "<|eot_id|>" and [tokenizer.token(int(row[-1])) for row in ids] == [end] * 4


def test_a_template_whose_end_is_not_sampled_is_named(tmp_path: Path) -> None:
    """A base model with a chat template: sampling ends with the tokenizer's own token, so demonstrations do."""
    path = checkpoint(tmp_path, "qwen2_5")
    ids = Tokenizer.from_file(str(path / "tokenizer.json"))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids.token_to_id("<|endoftext|>")}))
    tokenizer = ChatTokenizer.open(path)
    assert tokenizer.ends_otherwise == "<|im_end|>"
    for found in (tokenizer.response_ids("It is 15."), tokenizer.answer_ids([USER], ANSWER)):
        assert tokenizer.decode(found) == "It is 15." and tokenizer.token(int(found[-1])) == "<|endoftext|>"
        assert ids.token_to_id("<|im_end|>") not in found


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_thought_is_taught(opened: Opened, tmp_path: Path, suffix: str) -> None:
    tokenizer = opened("qwen3")
    rows = read_chats(
        write(
            tmp_path / f"d.{suffix}",
            [{"messages": [SYSTEM, USER, THOUGHT]}, {"messages": [USER, ANSWER, NEXT, ANSWER]}],
        )
    )
    (prompt, thought), (_, plain) = encode_demonstrations(rows, tokenizer)
    reference = AutoTokenizer.from_pretrained(tmp_path / "qwen3")
    whole = reference.apply_chat_template([SYSTEM, USER, THOUGHT], tokenize=False)
    assert reference.decode([*prompt, *thought]) + "\n" == whole
    assert reference.decode(thought) == "<think>\n12 and 3 are 15.\n</think>\n\nIt is 15.<|im_end|>"
    assert reference.decode(plain) == "<think>\n\n</think>\n\nIt is 15.<|im_end|>", (
        "as the template renders an answer without one"
    )


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_tools_and_options_of_a_row_reach_the_template(opened: Opened, tmp_path: Path, suffix: str) -> None:
    """Parquet gives every message the fields of all, and every schema the keys of all."""
    other = {
        "type": "function",
        "function": {
            "name": "now",
            "description": "Time.",
            "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
        },
    }
    chat = [SYSTEM, USER, CALL, RESULT, THOUGHT]
    rows = [
        {"messages": chat, "tools": [*TOOLS, other], "enable_thinking": None},
        {"messages": [USER, ANSWER], "tools": None, "enable_thinking": False},
    ]
    demonstrations = encode_demonstrations(
        read_chats(write(tmp_path / f"d.{suffix}", rows)), tokenizer := opened("qwen3")
    )
    reference = AutoTokenizer.from_pretrained(tmp_path / "qwen3")
    for (prompt, answer), messages, kwargs in zip(
        demonstrations, (chat, [USER, ANSWER]), ({"tools": [*TOOLS, other]}, {"enable_thinking": False}), strict=True
    ):
        assert prompt.tolist() == reference.apply_chat_template(
            messages[:-1], add_generation_prompt=True, return_dict=False, **kwargs
        )
        assert [*prompt, *answer] == reference.apply_chat_template(messages, return_dict=False, **kwargs)[
            : len(prompt) + len(answer)
        ]
    task = {
        "data_source": "s",
        "prompt": [USER, CALL, RESULT],
        "reward_model": {"ground_truth": "15"},
        "tools": json.dumps(TOOLS),
    }
    (found,) = read_rows(write(tmp_path / f"t.{suffix}", [task | {"chat_template_kwargs": {"enable_thinking": False}}]))
    (ids,) = encode_rows([found], tokenizer)
    kwargs = {"tools": TOOLS, "enable_thinking": False}
    assert found.chat_template_kwargs == kwargs and found.question == USER["content"]
    assert ids.tolist() == reference.apply_chat_template(
        task["prompt"], add_generation_prompt=True, return_dict=False, **kwargs
    )
    assert encode_rows([stored(found)], tokenizer)[0].tolist() == ids.tolist(), (
        "the explorer renders what comes back from the store"
    )


def stored(task: Task) -> Task:
    return task_from_row(SimpleNamespace(**task_to_row(task)))


def test_a_preference_keeps_its_thoughts(opened: Opened, tmp_path: Path) -> None:
    row = {
        "chosen": [USER, THOUGHT],
        "rejected": [USER, {**THOUGHT, "reasoning_content": "12 and 3 are 14."}],
        "enable_thinking": True,
    }
    pairs = read_preferences(write(tmp_path / "p.parquet", [row]))
    (_, chosen, rejected), tokenizer = encode_preferences(pairs, opened("qwen3"))[0], opened("qwen3")
    assert [tokenizer.decode(ids).count("are 15.") for ids in (chosen, rejected)] == [1, 0]
    with pytest.raises(DataError, match="rejected must be another answer than chosen"):
        read_preferences(write(tmp_path / "same.jsonl", [row | {"rejected": row["chosen"]}]))


def test_options_of_the_settings_and_of_a_row(opened: Opened) -> None:
    off, on = opened("qwen3", {"enable_thinking": False}), opened("qwen3")
    assert off.render([USER]) == on.render([USER], {"enable_thinking": False}) != on.render([USER])
    assert off.render([USER], {"enable_thinking": True}) == on.render([USER], {"enable_thinking": True})


@pytest.mark.parametrize(
    ("name", "messages", "kwargs", "message"),
    [
        (
            "qwen2_5",
            [USER, THOUGHT, NEXT],
            {},
            r"does not look at 'reasoning_content' of message 1 \(assistant\); drop",
        ),
        ("phi3", [USER, RESULT], {}, r"does not look at 'content' of message 1 \(tool\)"),
        (
            "qwen2_5",
            [USER],
            {"enable_thinking": False},
            "does not look at 'enable_thinking'; leave it out of the row and",
        ),
        ("llama3", [USER], {"tools": TOOLS}, "does not look at 'tools'"),
        (
            "qwen3",
            [USER],
            {"add_generation_prompt": False},
            "chat_template_kwargs.add_generation_prompt is set by megarl",
        ),
        ("gemma", [SYSTEM, USER], {}, "refuses the prompt: System role not supported"),
        ("deepseekv3", [USER, CALL, NEXT], {}, "fails on the prompt: can only concatenate str"),
    ],
)
def test_what_a_template_cannot_take_is_refused(
    opened: Opened, name: str, messages: list[dict[str, Any]], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        opened(name).render(messages, kwargs)


@pytest.mark.parametrize("copied", ["dict(message)", "dict(message, role='x')", "dict(**message)"])
def test_a_template_may_look_at_copies_of_messages(copied: str) -> None:
    loop = "{% for message in messages %}{% set m = COPIED %}".replace("COPIED", copied)
    assert ChatTemplate({"default": loop + "{{ m.content }}{% endfor %}"}, {}).render([USER], {}) == USER["content"]
    assert ChatTemplate({"default": "{{ messages[0].values() | last }}"}, {}).render([USER], {}) == USER["content"]
    with pytest.raises(DataError, match="does not look at 'content'"):
        ChatTemplate({"default": "{{ messages[0].role }}"}, {}).render([USER], {})


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        (
            "deepseek_r1_distill",
            ANSWER,
            "line 2: the model's chat template renders .* in another way once .* give the answer as a text",
        ),
        (
            "exaone4",
            THOUGHT,
            "line 2: the model's chat template drops or truncates a part of the answer: '12 and 3 are 15.'",
        ),
        (
            "qwen3",
            {**ANSWER, "content": "one<|im_end|>two"},
            "line 2: the model's chat template drops or truncates .* 'one<|im_end|>two'",
        ),
        ("qwen2_5", THOUGHT, "line 2: the model's chat template does not look at 'reasoning_content' of message 1"),
    ],
)
def test_an_answer_that_would_be_cut_is_refused(
    opened: Opened, tmp_path: Path, name: str, answer: dict[str, Any], message: str
) -> None:
    sound = {"prompt": "q", "response": "a", "messages": None}
    path = write(tmp_path / "d.jsonl", [sound, sound | {"response": None, "messages": [USER, answer]}])
    with pytest.raises(DataError, match=f"d.jsonl: {message}"):
        encode_demonstrations(read_chats(path), opened(name), path=path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tools": "[{"}, "tools must be JSON"),
        ({"tools": {"name": "add"}}, "tools must be a list, its JSON text, or null"),
        ({"tools": ["add"]}, "tools must be a list of JSON schemas"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be a struct, its JSON text, or null"),
        (
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs.messages must be left out, since megarl sets it",
        ),
        ({"enable_thinking": "no"}, "enable_thinking must be true, false or null"),
        ({"messages": [USER, {**CALL, "tool_calls": "add"}]}, r"messages\[1\].tool_calls must be a list of structs"),
        (
            {"messages": [USER, {**CALL, "tool_calls": [{"function": {"name": 5}}]}]},
            r"messages\[1\].tool_calls must be structs with a function",
        ),
        ({"messages": [USER, {**CALL, "tool_calls": []}]}, r"messages\[1\].content must be a non-empty string"),
    ],
)
def test_a_bad_option_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "d.jsonl", [{"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER]} | changes])
    with pytest.raises(DataError, match=f"d.jsonl: line 2: {message}"):
        read_chats(path)


def test_the_day_is_the_runs(opened: Opened) -> None:
    """Llama 3.2's template writes the day: a prompt that changed at midnight would be another one after a restart."""
    texts = [opened("llama3_2", None, day).render([USER]) for day in (date(2024, 2, 29), date(2024, 3, 1))]
    assert ["29 Feb 2024" in texts[0], "01 Mar 2024" in texts[1]] == [True, True]
    assert "Today Date: " + date.today().strftime("%d %b %Y") in opened("llama3_2").render([USER])


def test_tools_may_have_a_template_of_their_own(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "chatml")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text(
        "{{ tools[0].function.name }} {{ messages[0].content }}"
    )
    tokenizer, reference = ChatTokenizer.open(path), AutoTokenizer.from_pretrained(path)
    for kwargs in ({}, {"tools": TOOLS}):
        assert tokenizer.render([NEXT], kwargs) == reference.apply_chat_template(
            [NEXT], tokenize=False, add_generation_prompt=True, **kwargs
        )
    assert tokenizer.render([NEXT], {"tools": TOOLS}) == "add And 1 more?"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson(sort_keys=true, separators=(',', ':')) }}",
        "{{ messages[0] | tojson(indent=2, ensure_ascii=true) }}",
        "{% for m in messages %}{% generation %}{% set x = 1 %}{{ m.content }}{% endgeneration %}{{ x is defined }}{% "
        "endfor %}",
        "{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{ messages[0]['content'] }}{% endfor %}{{ tools "
        "is none }}{{ documents is defined }}",
        "{{ messages[0].content }}{{ ''.__class__.__mro__ }}",
        "{% for k, v in messages[0].items() %}{{ k }}{{ v }}{% endfor %}{{ bos_token is defined }}{{ pad_token }}",
    ],
)
def test_the_environment_is_that_of_transformers(tmp_path: Path, source: str) -> None:
    path = checkpoint(tmp_path, "chatml")
    (path / "chat_template.jinja").write_text(source)
    messages, options = [{"role": "user", "content": "é <b>"}], {"tokenize": False, "add_generation_prompt": True}
    try:
        expected = AutoTokenizer.from_pretrained(path).apply_chat_template(messages, **options)
    except Exception:
        with pytest.raises(DataError, match="fails on the prompt"):
            ChatTokenizer.open(path).render(messages)
    else:
        assert ChatTokenizer.open(path).render(messages) == expected
