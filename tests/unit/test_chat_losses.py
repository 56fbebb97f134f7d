"""Nothing of a row or request is lost on its way into the prompt: messages, calls, types of arguments."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from megarl.config.taskset import TasksetConfig
from megarl.core.errors import DataError
from megarl.tasks import (
    ChatTokenizer,
    encode_demonstrations,
    encode_rows,
    processed,
    read_preferences,
    read_rows,
    read_tasks,
)
from megarl.tasks.templates.template import ChatTemplate
from megarl.tasks.tools import FORMATS
from tests.chat_battery import ANSWER, CALL, CALLS, RESULT, TEMPLATES, TOOLS, USER, WORDS, checkpoint
from tests.unit.agent_model import TASK, Model, client, play, recorder
from tests.unit.small_rows import write

DEVELOPER = {"role": "developer", "content": "a"}
"""Its one letter stands in every prompt."""
XML = ("qwen3_coder", "glm4")


def opened(tmp_path: Path, name: str) -> ChatTokenizer:
    return ChatTokenizer.open(checkpoint(tmp_path / name, name))


def as_text(message: dict[str, Any], arguments: str | None = None) -> dict[str, Any]:
    """A message with its calls in OpenAI's wire form."""

    def written(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False) if arguments is None else arguments
        return {**call, "function": {**function, "arguments": text}}

    return {**message, "tool_calls": [written(call) for call in message["tool_calls"]]}


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_that_are_json_text_are_written_once(tmp_path: Path, name: str) -> None:
    """As the template writes the object, or as the text stands where it takes texts."""
    tokenizer = opened(tmp_path, name)
    for message in (CALL, WORDS):
        chat, kwargs = [USER, as_text(message), RESULT], {"tools": TOOLS}
        try:
            text = tokenizer.render(chat, kwargs)
        except DataError:
            with pytest.raises(DataError):
                tokenizer.render([USER, message, RESULT], kwargs)
            continue
        assert '\\"a\\"' not in text
        if json.dumps(CALL["tool_calls"][0]["function"]["arguments"], ensure_ascii=False) not in text:  # type: ignore[index]
            assert text == tokenizer.render([USER, message, RESULT], kwargs)


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "mistral_v2v3", "exaone4", "qwen3"])
def test_targets_and_prompts_of_rows_have_the_object(tmp_path: Path, name: str) -> None:
    tokenizer, call = opened(tmp_path, name), CALL if name == "mistral_v2v3" else WORDS
    rows = [{"messages": [USER, call], "tools": TOOLS}, {"messages": [USER, as_text(call)], "tools": TOOLS}]
    path = write(tmp_path / "d.jsonl", rows)
    (_, objects), (_, texts) = encode_demonstrations(read_rows(path, require_response=True), tokenizer)
    assert tokenizer.decode(texts) == tokenizer.decode(objects) and '"a": 12' in tokenizer.decode(texts)
    empty = read_rows(write(tmp_path / "e.jsonl", [{"messages": [USER, as_text(call, "")]}]), require_response=True)
    assert "{}" in tokenizer.decode(encode_demonstrations(empty, tokenizer)[0][1])


@pytest.mark.parametrize("bare", [False, True])
def test_parameters_of_tools_that_are_json_text_are_written_once(tmp_path: Path, bare: bool) -> None:
    def written(parameters: Any) -> list[dict[str, Any]]:
        function = {**TOOLS[0]["function"], "parameters": parameters}  # type: ignore[dict-item]
        return [function if bare else {"type": "function", "function": function}]

    schema = TOOLS[0]["function"]["parameters"]  # type: ignore[index]
    rows = [{"prompt": "q", "response": "a", "tools": written(given)} for given in (schema, json.dumps(schema))]
    objects, texts = read_rows(write(tmp_path / "d.jsonl", rows), require_response=True)
    assert texts.chat_template_kwargs == objects.chat_template_kwargs == {"tools": written(schema)}
    bad = write(tmp_path / "bad.jsonl", [{"prompt": "q", "response": "a", "tools": written("{")}])
    with pytest.raises(DataError, match=r"line 1: tools\[0\].*parameters must be JSON"):
        read_rows(bad, require_response=True)


@pytest.mark.parametrize("arguments", ["a: 12", "[12]", '{"a": NaN}', '{"a": "\\ud800"}'])
def test_arguments_that_are_no_object_are_refused(tmp_path: Path, arguments: str) -> None:
    path = write(tmp_path / "d.jsonl", [{"messages": [USER, as_text(WORDS, arguments)]}])
    with pytest.raises(DataError, match=r"line 1: messages\[1\].tool_calls.arguments must be"):
        read_rows(path, require_response=True)


@pytest.mark.parametrize(
    ("name", "messages", "words"),
    [
        ("qwen3", [DEVELOPER, USER], r"leaves out message 0 \(developer\): 'a'"),
        ("qwen2_5", [{**DEVELOPER, "role": "critic"}, USER], "does not look at 'content' of message 0"),
        ("qwen3", [USER, {**DEVELOPER, "role": "critic"}, USER], r"leaves out message 1 \(critic\)"),
        ("qwen3", [{**USER, "content": [{"type": "text", "text": "a"}]}], r"leaves out message 0 \(user\)"),
        ("gptoss", [USER, CALLS, RESULT], r"leaves out call 2 of message 1 \(assistant\)"),
    ],
)
def test_a_message_or_call_that_a_template_leaves_out_is_refused(
    tmp_path: Path, name: str, messages: list[dict[str, Any]], words: str
) -> None:
    tokenizer = opened(tmp_path, name)
    for _ in range(2):
        with pytest.raises(DataError, match=words):
            tokenizer.render(messages)


def test_a_template_that_reads_contents_is_looked_at_with_the_real_ones() -> None:
    source = (
        "{% for m in messages %}{% if m.content not in ('yes', 'no') %}{{ raise_exception('what?') }}"
        "{% elif m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    template = ChatTemplate({"default": source}, {})
    assert template.render([{"role": "user", "content": "yes"}], {}) == "yes"
    with pytest.raises(DataError, match="leaves out message 1"):
        template.render([{"role": "user", "content": "yes"}, {"role": "tool", "content": "no"}], {})


@pytest.mark.parametrize("role", ["critic", "developer2"])
def test_the_endpoint_refuses_a_message_that_would_vanish(tmp_path: Path, role: str) -> None:
    tokenizer = opened(tmp_path, "qwen3")
    lost = {"role": role, "content": "Be brief."}

    async def agent(url: str) -> None:
        user = dict(TASK.prompt[0])
        first = await client(url).chat.completions.create(model="any", messages=[user])  # type: ignore[list-item]
        for messages in ([lost, user], [user, first.choices[0].message, lost, user], [user, ANSWER, lost, user]):
            given: Any = messages
            with pytest.raises(openai.BadRequestError, match=rf"leaves out message \d \({role}\): 'Be brief.'"):
                await client(url).chat.completions.create(model="any", messages=given)

    assert len(play(Model(tokenizer, "15"), agent).turns) == 2


@pytest.mark.parametrize("field", ["function_call", "audio", "refusal", "reasoning_content"])
def test_the_endpoint_drops_no_field_of_a_message(tmp_path: Path, field: str) -> None:
    """A thought is written by templates that know it, and refused by others."""
    values: dict[str, Any] = {"function_call": {"name": "add", "arguments": "{}"}, "audio": {"id": "x"}}
    lost = {"role": "assistant", "content": "so", field: values.get(field, "I add.")}
    user = dict(TASK.prompt[0])
    for name in ("qwen2_5", "qwen3_training"):

        async def agent(url: str) -> None:
            given: Any = [user, lost, {**RESULT, "content": "15"}]
            await client(url).chat.completions.create(model="any", messages=given)

        model = Model(opened(tmp_path / name, name), "15")
        if field == "reasoning_content" and name == "qwen3_training":
            play(model, agent)
            assert "I add." in model.tokenizer.decode(model.requests[0].token_ids)
        else:
            with pytest.raises(openai.BadRequestError, match=field):
                play(model, agent)


MESSAGES = [{"role": "system", "content": "Be brief."}, USER]


def test_messages_as_json_text_are_messages(tmp_path: Path) -> None:
    tokenizer, text = opened(tmp_path, "qwen2_5"), json.dumps(MESSAGES, indent=1)
    task = {"data_source": "math", "reward_model": {"ground_truth": "15"}}
    tasks = read_rows(write(tmp_path / "t.jsonl", [task | {"prompt": MESSAGES}, task | {"prompt": text}]))
    assert tasks[0].prompt == tasks[1].prompt
    assert (encode_rows(tasks, tokenizer)[0] == encode_rows(tasks, tokenizer)[1]).all()
    chats = [
        {"messages": [*MESSAGES, ANSWER]},
        {"messages": json.dumps([*MESSAGES, ANSWER])},
        {"prompt": text, "response": json.dumps([ANSWER])},
        {"prompt": text, "completion": json.dumps([ANSWER])},
    ]
    rows = read_rows(write(tmp_path / "d.jsonl", chats), require_response=True)
    assert len({(json.dumps(row.prompt), row.response, json.dumps(row.answer)) for row in rows}) == 1
    pair = {"prompt": text, "chosen": json.dumps([ANSWER]), "rejected": json.dumps([{**ANSWER, "content": "14"}])}
    (read,) = read_preferences(write(tmp_path / "p.jsonl", [pair]))
    assert (read.chosen, read.rejected) == ("It is 15.", "14") and list(read.prompt) == MESSAGES


def test_messages_as_another_text_are_refused(tmp_path: Path) -> None:
    row = {"data_source": "math", "prompt": str(MESSAGES), "reward_model": {"ground_truth": "15"}}
    with pytest.raises(DataError, match="line 1: prompt must be a list of messages, their JSON text"):
        read_rows(write(tmp_path / "t.jsonl", [row]))
    row["prompt"] = "[1, 2] and {'role': 'x'}: sort"
    assert read_rows(write(tmp_path / "u.jsonl", [row]))[0].prompt == ({"role": "user", "content": row["prompt"]},)


@pytest.mark.parametrize(
    "text",
    [
        '[{"content": "Paris", "type": "place"}]',
        '[{"role": "admin", "name": "Bob"}]',
        '[{"role": m.role, "content": m.content} for m in messages]',
        f"{json.dumps(MESSAGES)} Which message is the user's?",
    ],
)
def test_lists_that_are_no_messages_are_texts(tmp_path: Path, text: str) -> None:
    rows = [{"prompt": text, "response": text}, {"prompt": "List them.", "completion": text}]
    first, second = read_rows(write(tmp_path / "d.jsonl", rows), require_response=True)
    assert first.prompt == ({"role": "user", "content": text},)
    assert first.response == second.response == text
    (read,) = read_preferences(write(tmp_path / "p.jsonl", [{"prompt": text, "chosen": text, "rejected": "no"}]))
    assert read.chosen == text


PARAMETERS = {
    "$defs": {"color": {"enum": ["1", "2"]}},
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "integer"},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "color": {"$ref": "#/$defs/color"},
        "flag": {"type": "boolean"},
        "items": {"type": ["array", "null"]},
        "free": {},
    },
}


@pytest.mark.parametrize("form", XML)
@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *(("text", text, text) for text in ("2134", "true", '{"a": 1}', "null", '"quoted"', "a b", " 1.0")),
        ("number", "2134", 2134),
        ("number", "many", "many"),
        ("either", "2134", "2134"),
        ("either", "null", None),
        ("either", "None", None),
        ("color", "1", "1"),
        ("flag", "True", True),
        ("flag", "false", False),
        ("items", "[1]", [1]),
        ("free", "2134", 2134),
        ("free", "True", "True"),
        ("other", '{"a": 1}', {"a": 1}),
    ],
)
def test_arguments_in_xml_have_the_types_of_the_schema(form: str, name: str, text: str, value: Any) -> None:
    written = {
        "qwen3_coder": f"<function=f>\n<parameter={name}>\n{text}\n</parameter>\n</function>",
        "glm4": f"<tool_call>f\n<arg_key>{name}</arg_key>\n<arg_value>{text}</arg_value></tool_call>",
    }[form]
    for tool in (
        {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}},
        {"name": "f", "parameters": PARAMETERS},
    ):
        _, [call] = FORMATS[form].parse(written, [tool])
        assert call.arguments == {name: value} and type(call.arguments[name]) is type(value)


def test_the_endpoint_gives_a_declared_text_as_text(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, "glm4moe")
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in (("a", 12), ("b", 2134))
    )
    call = f"<tool_call>add\n{pairs}</tool_call>"

    async def agent(url: str) -> None:
        messages: list[Any] = [dict(TASK.prompt[0])]
        given = await client(url).chat.completions.create(model="any", messages=messages, tools=TOOLS)  # type: ignore[arg-type]
        [found] = given.choices[0].message.tool_calls or ()
        assert json.loads(found.function.arguments) == {"a": 12, "b": "2134"}  # type: ignore[union-attr]

    play(Model(tokenizer, call), agent)


HALVES = "so \ud83d"


@pytest.mark.parametrize("field", ["prompt", "response", "extra_info", "tools"])
def test_half_a_character_in_a_row_is_refused(tmp_path: Path, field: str) -> None:
    value = {"prompt": HALVES, "response": HALVES, "extra_info": {"a": [HALVES]}, "tools": json.dumps([{"a": HALVES}])}
    demonstration = {"prompt": "q", "response": "a", field: value[field], "unused": HALVES}
    with pytest.raises(DataError, match=rf"line 1: {field} (has|must be made of JSON values)"):
        read_rows(write(tmp_path / "d.jsonl", [demonstration]), require_response=True)
    whole = {"prompt": "q", "response": "so \U0001f600", "unused": HALVES}
    assert read_rows(write(tmp_path / "w.jsonl", [whole]), require_response=True)[0].response == whole["response"]


def test_half_a_character_of_a_users_function_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\n"
        "def process(task):\n"
        "    return replace(task, prompt=({'role': 'user', 'content': '\\ud83d'},))\n"
    )
    task = {"data_source": "math", "prompt": "q", "reward_model": {"ground_truth": "15"}}
    taskset = TasksetConfig(train=str(write(tmp_path / "t.jsonl", [task])), process=str(tmp_path / "mine.py"))
    with pytest.raises(DataError, match=r"t.jsonl: line 1: taskset.process=.* half of a character"):
        processed(read_tasks(taskset, "train"), taskset, "train")


def test_half_a_character_of_a_setting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="half of a character"):
        opened(tmp_path, "qwen2_5").render([{"role": "system", "content": HALVES}, USER])


def test_half_a_character_that_a_tool_or_environment_gives_becomes_a_question_mark(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, "qwen2_5")
    recorded = recorder(Model(tokenizer, "one", "two"))
    recorded.ask(TASK, HALVES)

    async def main() -> None:
        for author in ("tool", "environment"):
            await recorded.generate()
            assert recorded.add(author, HALVES) is not None  # type: ignore[arg-type]

    asyncio.run(main())
    assert ["so ?" in recorded.text(turn) for turn in recorded.turns] == [True, False, True, False, True]
    assert recorded.count_tokens(HALVES) == recorded.count_tokens("so ?")
