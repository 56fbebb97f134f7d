"""Agents against the endpoint: what they send back goes on from the tokens that were sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.schema import RolloutConfig
from megarl.core.errors import ConfigError
from megarl.core.schema import End, Trajectory
from megarl.explore import workflows
from megarl.explore.agents.openai import FIELDS
from megarl.explore.recording.model import RolloutModel
from megarl.tasks import ChatTokenizer
from tests.chat_battery import TOOLS, checkpoint
from tests.conftest import examples
from tests.unit.agent_model import TASK, Model, client, play, recorder, run_workflow_of, trajectory

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": "<3>"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.open(checkpoint(tmp_path_factory.mktemp("qwen") / "qwen2_5", "qwen2_5"))


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.open(checkpoint(tmp_path_factory.mktemp("qwen") / "qwen3", "qwen3"))


def lines(recorded: RolloutModel) -> list[list[int]]:
    """Token ids of all lines of turns."""
    return [[*sample.prompt_ids, *sample.response_ids] for sample in trajectory(recorded).samples()]


def contexts_are_those_recorded(model: Model, recorded: RolloutModel) -> None:
    """The engine was asked with the very tokens that the trajectory has before each of the model's turns."""
    asked = []
    for turn in (turn for turn in recorded.turns if turn.author == "model"):
        before, line = turn.follows, list[np.ndarray]()
        while before >= 0:
            line.append(recorded.turns[before].token_ids)
            before = recorded.turns[before].follows
        asked.append(np.concatenate(line[::-1]).tolist())
    assert sorted(asked) == sorted(request.token_ids.tolist() for request in model.requests)


def test_a_loop_with_tools_is_one_line_of_turns(tokenizer: ChatTokenizer) -> None:
    model = Model(tokenizer, f"I add.\n{CALL}", CALL, "15")

    async def agent(url: str) -> None:
        messages: list[Any] = [dict(TASK.prompt[0])]
        for _ in range(2):
            response = await client(url).chat.completions.create(model="any", messages=messages, tools=TOOLS)
            message = response.choices[0].message
            assert response.choices[0].finish_reason == "tool_calls" and message.tool_calls
            call = message.tool_calls[0]
            assert json.loads(call.function.arguments) == {"a": 12, "b": "<3>"} and call.function.name == "add"
            messages += [message, {"role": "tool", "content": "15", "tool_call_id": call.id}]
        last = await client(url).chat.completions.create(model="any", messages=messages, tools=TOOLS)
        assert last.choices[0].message.content == "15" and last.choices[0].finish_reason == "stop"
        assert last.usage and last.usage.prompt_tokens == len(model.requests[-1].token_ids)

    recorded = play(model, agent)
    assert [turn.author for turn in recorded.turns] == ["user", "model", "tool", "model", "tool", "model"]
    assert [turn.follows for turn in recorded.turns] == [-1, 0, 1, 2, 3, 4] and recorded.record.num_tool_calls == 2
    contexts_are_those_recorded(model, recorded)
    [sample] = trajectory(recorded).samples()
    written = np.concatenate([turn.token_ids for turn in recorded.turns if turn.author == "model"])
    np.testing.assert_array_equal(sample.response_ids[sample.response_mask], written)
    whole = tokenizer.decode([*sample.prompt_ids, *sample.response_ids], special=True)
    assert whole.count("<tool_response>\n15\n</tool_response>") == 2 and whole.count("<|im_start|>assistant") == 3


def test_a_response_in_pieces_and_several_at_once(tokenizer: ChatTokenizer) -> None:
    model = Model(tokenizer, "one", "two", "three", "15")

    async def agent(url: str) -> None:
        messages: list[Any] = [dict(TASK.prompt[0])]
        both = await client(url).chat.completions.create(model="any", messages=messages, n=2, max_tokens=9)
        assert [choice.message.content for choice in both.choices] == ["one", "two"]
        messages += [both.choices[1].message, {"role": "user", "content": "More."}]
        stream = await client(url).chat.completions.create(
            model="any", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "three"
        assert chunks[-1].usage is not None and chunks[-2].choices[0].finish_reason == "stop"
        again = await client(url).chat.completions.create(model="any", messages=messages)
        assert again.choices[0].message.content == "15"

    recorded = play(model, agent)
    assert [turn.follows for turn in recorded.turns] == [-1, 0, 0, 2, 3, 3]
    assert [request.max_tokens for request in model.requests] == [9, 9, None, None]
    assert len({request.seed for request in model.requests}) == 4
    contexts_are_those_recorded(model, recorded)


def test_a_rewritten_context_and_a_sub_agent_are_samples_of_their_own(tokenizer: ChatTokenizer) -> None:
    model = Model(tokenizer, "a", "b", "c")

    async def agent(url: str) -> None:
        for messages in (
            [TASK.prompt[0]],
            [{"role": "system", "content": "Summarise."}, {"role": "user", "content": "The page."}],
            [TASK.prompt[0], {"role": "assistant", "content": "another a"}, {"role": "user", "content": "More."}],
        ):
            given: Any = [dict(message) for message in messages]
            await client(url).chat.completions.create(model="any", messages=given)

    recorded = play(model, agent)
    assert [turn.follows for turn in recorded.turns] == [-1, 0, -1, 2, -1, 4]
    assert len(lines(recorded)) == 3 and len({tuple(line) for line in lines(recorded)}) == 3
    contexts_are_those_recorded(model, recorded)


def test_a_context_without_room_is_refused_as_agents_know_it(tokenizer: ChatTokenizer) -> None:
    model = Model(tokenizer, "a")

    async def agent(url: str) -> None:
        messages: list[Any] = [dict(TASK.prompt[0])]
        first = await client(url).chat.completions.create(model="any", messages=messages)
        messages += [first.choices[0].message, {"role": "user", "content": "word " * 200}]
        with pytest.raises(openai.BadRequestError, match="leaves no room within rollout.max_trajectory_tokens=200"):
            await client(url).chat.completions.create(model="any", messages=messages)
        with pytest.raises(openai.BadRequestError) as error:
            await client(url).chat.completions.create(model="any", messages=messages[2:])
        assert error.value.code == "context_length_exceeded"

    assert len(play(model, agent, limit=200).turns) == 2


def test_what_cannot_be_honoured_is_refused(tokenizer: ChatTokenizer) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"stop": ["x"]}, "`stop` is not supported"),
        ({"logprobs": True}, "`logprobs`=true is not supported"),
        ({"presence_penalty": 1.0}, "set it to 0"),
        ({"repetition_penalty": 1.2}, "set it to 1"),
        ({"min_tokens": 5}, "`min_tokens`=5"),
        ({"ignore_eos": True}, "`ignore_eos`=true"),
        ({"parallel_tool_calls": False}, "set it to true"),
        ({"guided_json": {}}, "`guided_json` is not supported"),
        ({"unknown": "x"}, "`unknown` is not supported"),
        ({"chat_template_kwargs": {"unread": 1}}, "does not look at 'unread'"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "is set by megarl"),
        ({"reasoning_effort": "high"}, "does not look at 'reasoning_effort'"),
        ({"tool_choice": "required"}, "cannot be enforced"),
        ({"response_format": {"type": "json_object"}}, "`response_format`"),
        ({"n": 0}, "`n` must be a positive integer"),
        ({"messages": []}, "at least one message"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "image_url.url` must be a text",
        ),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "chat template"),
    ]

    async def agent(url: str) -> None:
        body = {"messages": list(TASK.prompt)}
        async with aiohttp.ClientSession() as session:
            for changes, words in refused:
                async with session.post(f"{url}/v1/chat/completions", json=body | changes) as response:
                    assert response.status == 400 and words in (await response.json())["error"]["message"], changes
            async with session.post(f"{url}x/v1/chat/completions", json=body) as response:
                assert response.status == 400 and "has ended" in await response.text()
            async with session.get(f"{url}/v1/models") as response:
                assert (await response.json())["data"][0]["id"] == "megarl"

    assert play(Model(tokenizer), agent).turns == []


def test_neutral_values_are_taken(tokenizer: ChatTokenizer) -> None:
    """What a client's library sends by itself, and every sampling field of vLLM's server at its default."""
    neutral = {name: values[0] for name, values in FIELDS.neutral.items()}

    async def agent(url: str) -> None:
        body = {"messages": list(TASK.prompt), "temperature": 0.3, "user": "me", "stop": None} | neutral
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/chat/completions", json=body) as response,
        ):
            assert response.status == 200, await response.text()

    assert len(play(Model(tokenizer, "15"), agent).turns) == 2


def test_options_of_the_template_are_honoured(thinking: ChatTokenizer) -> None:
    model = Model(thinking, "15", "<think>\nhm\n</think>\n\n15")

    async def agent(url: str) -> None:
        create = client(url).chat.completions.create
        for on in (False, True):
            options = {"chat_template_kwargs": {"enable_thinking": on}}
            await create(model="any", messages=[dict(TASK.prompt[0])], extra_body=options)  # type: ignore[list-item]

    recorded = play(model, agent)
    assert [turn.follows for turn in recorded.turns] == [-1, 0, -1, 2]
    off, on = (thinking.decode(recorded.turns[i].token_ids, special=True) for i in (0, 2))
    assert "<think>\n\n</think>" in off and "<think>" not in on


def test_responses(tokenizer: ChatTokenizer) -> None:
    """Items sent back, then a response named by its number, in one piece and as events."""
    model = Model(tokenizer, f"I add.\n{CALL}{CALL}", "15", "So.", "more…")
    tool: Any = {"type": "function", "strict": False, **TOOLS[0]["function"]}

    async def agent(url: str) -> None:
        create = client(url).responses.create
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "12 + 3?"}]}]
        given: dict[str, Any] = {"model": "any", "instructions": "Be brief.", "tools": [tool]}
        first = await create(input=items, **given)
        assert first.output_text == "I add." and first.status == "completed"
        calls = [item for item in first.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [{"a": 12, "b": "<3>"}] * 2
        outputs: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "15"} for call in calls]
        second = await create(input=[*items, *first.output, *outputs], **given)
        assert second.output_text == "15" and second.usage and second.usage.output_tokens == 2
        stream = await create(input="Sure?", previous_response_id=second.id, stream=True, **given)
        events = [event async for event in stream]
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "So."
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.completed" and events[-1].response.output_text == "So."
        last = await create(input="And?", previous_response_id=events[-1].response.id, max_output_tokens=9, **given)
        assert last.status == "incomplete" and last.incomplete_details
        refused: list[tuple[dict[str, Any], str]] = [
            ({"previous_response_id": "resp-9"}, "no response of this session"),
            ({"tools": [{"type": "web_search"}]}, "must be a function"),
            ({"text": {"format": {"type": "json_object"}}}, "text.format"),
            ({"truncation": "auto"}, 'set it to "disabled"'),
            ({"reasoning": {"effort": "high"}}, "does not look at 'reasoning_effort'"),
            ({"input": first.output}, "the last item is the assistant's"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference' are not supported"),
        ]
        for changes, words in refused:
            with pytest.raises(openai.BadRequestError, match=words):
                await create(**({"input": "Hm?"} | given | changes))

    recorded = play(model, agent)
    authors = ["user", "model", "tool", "model", "user", "model", "user", "model"]
    assert [turn.author for turn in recorded.turns] == authors
    assert [turn.follows for turn in recorded.turns] == [-1, *range(7)] and recorded.record.num_tool_calls == 2
    contexts_are_those_recorded(model, recorded)


def test_anthropics_thoughts_and_counts(thinking: ChatTokenizer) -> None:
    model = Model(thinking, "<think>\nhm\n</think>\n\n15", "<think>\nyes\n</think>\n\n16", "17")
    body: dict[str, Any] = {"model": "any", "max_tokens": 50, "thinking": {"type": "enabled", "budget_tokens": 20}}

    async def agent(url: str) -> None:
        async with aiohttp.ClientSession() as session:

            async def post(path: str, **changes: Any) -> dict[str, Any]:
                async with session.post(f"{url}/v1/messages{path}", json=body | changes) as response:
                    return {"status": response.status, **await response.json()}

            messages: list[Any] = [{"role": "user", "content": "12 + 3?"}]
            first = await post("", messages=messages)
            thought, answer = first["content"]
            assert thought["type"] == "thinking" and thought["thinking"] == "\nhm\n"
            assert answer == {"type": "text", "text": "\n\n15"}
            counted = await post("/count_tokens", messages=messages)
            assert counted["input_tokens"] == first["usage"]["input_tokens"]
            messages += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": "Sure?"}]
            async with session.post(
                f"{url}/v1/messages", json=body | {"messages": messages, "stream": True}
            ) as response:
                events = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: ")]
            deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
            assert [delta["type"] for delta in deltas] == ["thinking_delta", "signature_delta", "text_delta"]
            assert deltas[0]["thinking"] == "\nyes\n"
            off = await post("", messages=messages[:1], thinking={"type": "disabled"})
            assert off["content"] == [{"type": "text", "text": "17"}]
            for changes in ({"thinking": {"type": "deep"}}, {"output_config": {"effort": "low"}}):
                assert (await post("", messages=messages, **changes))["status"] == 400

    recorded = play(model, agent)
    assert [turn.follows for turn in recorded.turns] == [-1, 0, 1, 2, -1, 4]
    contexts_are_those_recorded(model, recorded)


def test_anthropics_messages(tokenizer: ChatTokenizer) -> None:
    model = Model(tokenizer, f"I add.\n{CALL}", "15", "more…")
    tool = {"name": "add", "description": "Adds.", "input_schema": TOOLS[0]["function"]["parameters"]}

    async def agent(url: str) -> None:
        messages: list[Any] = [{"role": "user", "content": "12 + 3?"}]
        body: dict[str, Any] = {"model": "any", "max_tokens": 50, "system": "Be brief.", "tools": [tool]}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{url}/v1/messages", json=body | {"messages": messages}) as response:
                found = await response.json()
            assert found["stop_reason"] == "tool_use" and found["content"][0] == {"type": "text", "text": "I add."}
            use = found["content"][1]
            assert use["name"] == "add" and use["input"] == {"a": 12, "b": "<3>"}
            result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "15"}]}
            messages += [
                {"role": "assistant", "content": found["content"]},
                {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
            ]
            streamed = body | {"messages": messages, "stream": True}
            async with session.post(f"{url}/v1/messages", json=streamed) as response:
                events = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: ")]
            assert [e["type"] for e in events][:3] == ["message_start", "content_block_start", "content_block_delta"]
            assert events[2]["delta"] == {"type": "text_delta", "text": "15"} and events[-1]["type"] == "message_stop"
            messages += [{"role": "assistant", "content": "15"}, {"role": "user", "content": "And?"}]
            async with session.post(f"{url}/v1/messages", json=body | {"messages": messages}) as response:
                assert (await response.json())["stop_reason"] == "max_tokens"
            async with session.post(f"{url}/v1/messages", json=streamed | {"max_tokens": None}) as response:
                assert response.status == 400 and "`max_tokens`" in (await response.json())["error"]["message"]

    recorded = play(model, agent)
    assert [turn.follows for turn in recorded.turns] == [-1, 0, 1, 2, 3, 4]
    contexts_are_those_recorded(model, recorded)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100)), min_size=1, max_size=12))
@settings(max_examples=examples(12, 60), deadline=None)
def test_every_sampled_token_is_trained_once_whatever_an_agent_does(
    tokenizer: ChatTokenizer, steps: list[tuple[int, int]]
) -> None:
    """Conversations go on, branch, are asked again, begin again, and lose their past."""
    model = Model(tokenizer)

    async def agent(url: str) -> None:
        conversations: list[list[Any]] = [[dict(TASK.prompt[0])]]
        for kind, number in steps:
            messages = list(conversations[number % len(conversations)])
            if kind == 0:
                messages = [{"role": "user", "content": f"new {number}"}]
            elif kind == 1 and len(messages) > 2:
                messages = messages[2:]
            elif kind == 2:
                messages = messages[: 1 + 2 * (number % ((len(messages) + 1) // 2))]
            response = await client(url).chat.completions.create(model="any", messages=messages, n=1 + (kind == 3))
            message = response.choices[-1].message
            messages += [message, {"role": "user", "content": f"next {number}"}]
            conversations.append(messages)

    recorded = play(model, agent)
    contexts_are_those_recorded(model, recorded)
    written = [turn.token_ids.tolist() for turn in recorded.turns if turn.author == "model"]
    trained = [sample.response_ids[sample.response_mask].tolist() for sample in trajectory(recorded).samples()]
    assert sorted(sum(trained, [])) == sorted(sum(written, []))
    assert sum(map(len, trained)) == sum(map(len, written))


AGENT = """
import asyncio, openai
async def run(base_url, prompt, request_kwargs, metadata):
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    response = await client.chat.completions.create(messages=prompt, **request_kwargs)
    {after}
"""
COMMAND = """
import json, os, sys, urllib.request
given = json.load(sys.stdin)
assert "MEGARL_JOB_KEY" not in os.environ
body = {"messages": given["prompt"], **given["request_kwargs"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("thinking")
{after}
"""


@pytest.fixture
def agents(tmp_path: Path, tokenizer: ChatTokenizer) -> Iterator[Callable[..., RolloutModel]]:
    def run(source: str, after: str, *texts: str, command: bool = False, **changes: Any) -> RolloutModel:
        path = tmp_path / f"agent_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(source.replace("{after}", after))
        agent = f"python {path}" if command else str(path)
        rollout = RolloutConfig(workflow="agent", agent=agent, max_prompt_tokens=100, **changes)
        recorded = recorder(Model(tokenizer, *texts), limit=200)

        run_workflow_of(rollout, tokenizer, recorded)
        return recorded

    yield run


@pytest.mark.parametrize(
    ("after", "score", "end"),
    [
        ("return None", 1.0, End.FINISHED),
        ("return 0.25", 0.25, End.FINISHED),
        ("return {'score': 2.0, 'acc': False}", 2.0, End.FINISHED),
        ("return 'good'", None, End.WORKFLOW_ERROR),
        ("raise ValueError('no key')", None, End.WORKFLOW_ERROR),
        ("await asyncio.sleep(100)", None, End.WORKFLOW_TIMEOUT),
        (
            "await client.chat.completions.create(messages=[*prompt, *prompt] * 20, **request_kwargs)",
            1.0,
            End.TRUNCATED,
        ),
    ],
)
def test_an_agent_of_a_file(agents: Callable[..., RolloutModel], after: str, score: float | None, end: End) -> None:
    recorded = agents(AGENT, after, "15", agent_timeout_s=3.0 if end is End.WORKFLOW_TIMEOUT else 60.0)
    verdict = asyncio.run(recorded.verdict())
    found = Trajectory("r", "t", "g", 0, 1, tuple(recorded.turns), verdict.reward, cause=recorded.end.cause)
    assert found.end is end and len(recorded.turns) == 2, verdict.message
    assert verdict.reward.score == score if score is not None else verdict.reward.status == "error"


@pytest.mark.parametrize(
    ("after", "score", "words"),
    [
        ("", 1.0, ""),
        ("open(os.environ['MEGARL_RESULT'], 'w').write(json.dumps({'score': 0.5, 'steps': 3}))", 0.5, ""),
        ("print('MEGARL_RESULT 0.5')", 1.0, ""),  # on stdout, the policy could have written it
        ("sys.exit('no such tool')", None, "ended with status 1: no such tool"),
        ("open(os.environ['MEGARL_RESULT'], 'w').write(text + '{')", None, "JSONDecodeError"),
    ],
)
def test_an_agent_as_a_command(
    agents: Callable[..., RolloutModel], monkeypatch: pytest.MonkeyPatch, after: str, score: float | None, words: str
) -> None:
    monkeypatch.setenv("MEGARL_JOB_KEY", "secret")
    verdict = asyncio.run(agents(COMMAND, after, "15", command=True).verdict())
    assert verdict.reward.score == score if score is not None else words in str(verdict.message)


def test_an_agent_that_asks_for_nothing(agents: Callable[..., RolloutModel]) -> None:
    recorded = agents("async def run(base_url, prompt, request_kwargs, metadata):\n    return 1.0\n", "")
    assert recorded.end.cause is End.WORKFLOW_ERROR and "no response" in str(asyncio.run(recorded.verdict()).message)


@pytest.mark.parametrize(
    ("agent", "words"), [("", "needs rollout.agent"), ("nowhere.py", "nowhere.py"), ("", "async def run")]
)
def test_agents_that_are_refused(agent: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        workflows.check(RolloutConfig(workflow="agent", agent=agent, max_prompt_tokens=1), Path("runs/x"))
