"""What agents, their clients and the policy do wrong: nothing of it trains wrong, and each pays for itself."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from megarl.buffer.experience import verify
from megarl.config.rewards import FormatConfig, RewardConfig
from megarl.config.schema import RolloutConfig
from megarl.core.errors import PromptRefused
from megarl.core.schema import End, Reward
from megarl.explore import workflows
from megarl.explore.agents import openai as protocol
from megarl.explore.agents.request import Repeated
from megarl.explore.agents.server import Session
from megarl.explore.recording.model import RenderedPrompt, TokenLimits
from megarl.rewards import Verdict
from megarl.tasks import ChatTokenizer
from megarl.tasks.tools import FORMATS
from tests.chat_battery import TOOLS, checkpoint
from tests.unit.agent_model import CLAIM, TASK, Model, client, play, recorder, trajectory

FIRST: list[Any] = [dict(TASK.prompt[0])]
MORE: list[Any] = [{"role": "user", "content": "More."}]
RECORDED = [
    ("arguments missing", '{"name": "add"}'),
    ("arguments no object", '{"name": "add", "arguments": "12"}'),
    ("arguments a list", '{"name": "add", "arguments": [1, 2]}'),
    ("nested", '{"name": "add", "arguments": {"a": ' + "[" * 900 + "]" * 900 + "}}"),
    ("not finite", '{"name": "add", "arguments": {"a": 1e999}}'),
    ("a surrogate", '{"name": "add", "arguments": {"a": "\\ud800"}}'),
    ("as text", '{"name": "add", "arguments": "{\\"a\\": 1}"}'),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.open(checkpoint(tmp_path_factory.mktemp("qwen") / "qwen2_5", "qwen2_5"))


@pytest.fixture
def agent(tmp_path: Path) -> Callable[..., Any]:
    """Run an agent's file in the workflow; returns what was recorded."""

    def run(model: Model, source: str, limit: int = 200, **settings: Any) -> Any:
        path = tmp_path / "agent.py"
        lines = "\n    ".join(source.strip().splitlines())
        head = "async def run(base_url, prompt, request_kwargs, metadata):"
        modules = "import asyncio, openai\nfrom tests.unit.agent_model import Model"
        path.write_text(f"{modules}\n{head}\n    {SETUP}\n    {lines}\n")
        rollout = RolloutConfig(workflow="agent", agent=str(path), max_prompt_tokens=100, **settings)
        recorded = recorder(model, limit)

        async def main() -> None:
            async with workflows.opened(rollout, model.tokenizer) as workflow:
                await workflow(TASK, recorded)

        asyncio.run(asyncio.wait_for(main(), 60))
        return recorded

    return run


SETUP = """client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    async def ask(messages, **settings):
        return await client.chat.completions.create(messages=messages, **{**request_kwargs, **settings})"""


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_no_response_follows_a_response(tokenizer: ChatTokenizer, path: str) -> None:
    """`…first<|im_end|>second<|im_end|>` was trained: no header stood between them."""
    model = Model(tokenizer, "first")

    async def ask(url: str) -> None:
        last = {"role": "assistant", "content": "first"}
        async with aiohttp.ClientSession() as http:
            for messages, status in ((FIRST, 200), ([*FIRST, last], 400), ([last], 400)):
                body = {"messages": messages, "max_tokens": 9}
                async with http.post(f"{url}/v1/{path}", json=body) as response:
                    assert response.status == status
                    assert status == 200 or "cannot be continued" in await response.text()

    recorded = play(model, ask)
    assert [turn.author for turn in recorded.turns] == ["user", "model"]
    with pytest.raises(ValueError, match="a response follows a response"):
        asyncio.run(recorded.generate())


def test_turns_are_in_the_order_of_choices_whichever_ends_first(tokenizer: ChatTokenizer) -> None:
    """The verifier read the longest of n responses."""
    model = Model(tokenizer, "long", "15", seconds=[math.inf, 0.0])

    async def ask(url: str) -> None:
        both = await client(url).chat.completions.create(model="any", messages=FIRST, n=2)
        assert [choice.message.content for choice in both.choices] == ["long", "15"]
        messages = [*FIRST, both.choices[0].message, *MORE]
        await client(url).chat.completions.create(model="any", messages=messages)

    recorded = play(model, ask)
    assert model.given[:2] == ["15", "long"]
    turns = trajectory(recorded).turns
    assert [turn.follows for turn in turns] == [-1, 0, 0, 1, 3]
    assert [tokenizer.decode(turn.token_ids) for turn in turns if turn.author == "model"] == ["long", "15", "text 3"]

    def one(url: str) -> Any:
        return client(url).chat.completions.create(model="any", messages=FIRST, n=2)

    verdict = asyncio.run(play(Model(tokenizer, "long", "15", seconds=[math.inf, 0.0]), one).verdict())
    assert verdict.reward == Reward(1.0, "ok")


def test_the_retry_of_a_client_that_gave_up_gets_the_sample_under_way(tokenizer: ChatTokenizer) -> None:
    """Else only short responses would be left: a long one was sampled again until it was short."""
    model = Model(tokenizer, "long", seconds=[math.inf])

    async def ask(url: str) -> None:
        given_up = asyncio.create_task(client(url).chat.completions.create(model="any", messages=FIRST))
        await model.asked()
        given_up.cancel()
        await asyncio.wait([given_up])
        asyncio.get_running_loop().call_later(0.2, model.go.set)
        again = await client(url).chat.completions.create(model="any", messages=FIRST)
        assert again.choices[0].message.content == "long"
        other = await client(url).chat.completions.create(model="any", messages=FIRST)
        assert other.choices[0].message.content == "text 2"

    recorded = play(model, ask)
    assert len(model.requests) == 2 and [turn.follows for turn in recorded.turns] == [-1, 0, 0]


LEFT = [
    ("given up", "task = asyncio.create_task(ask(prompt))\nawait Model.latest.asked()\ntask.cancel()\nreturn 0.0"),
    ("task", "asyncio.create_task(ask(prompt))\nawait Model.latest.asked()\nreturn 1.0"),
    (
        "race",
        "tasks = [asyncio.create_task(ask(prompt)) for _ in range(2)]\n"
        "await Model.latest.asked(2)\nModel.latest.go.set()\n"
        "await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)\nreturn 1.0",
    ),
]


@pytest.mark.parametrize(("kind", "source"), LEFT)
def test_a_sample_that_nobody_waits_for_ends_the_trajectory(
    agent: Callable[..., Any], tokenizer: ChatTokenizer, kind: str, source: str
) -> None:
    seconds = [30.0] if kind != "race" else [math.inf, 30.0]
    model = Model(tokenizer, *["15"] * 3, seconds=seconds)
    recorded = agent(model, source)
    assert recorded.end.cause is End.ABANDONED
    assert "not waited for 1 of its requests" in str(asyncio.run(recorded.verdict()).message)
    written = [turn for turn in recorded.turns if turn.author == "model"]
    assert len(written) == (kind == "race") and len(model.given) == len(written)


def test_the_record_is_closed_when_the_agent_ends(tokenizer: ChatTokenizer) -> None:
    model, recorded = Model(tokenizer, "15"), None

    async def main() -> None:
        nonlocal recorded
        recorded = recorder(model)
        session = Session(recorded, tokenizer, TASK)
        asked = protocol.asked_of({"messages": FIRST}, Repeated())
        await session.complete(asked, protocol.sent_back)
        await session.close()
        with pytest.raises(Exception, match="has ended"):
            await session.complete(asked, protocol.sent_back)

    asyncio.run(main())
    assert recorded is not None and len(recorded.turns) == 2


@pytest.mark.parametrize(("kind", "call"), RECORDED, ids=[kind for kind, _ in RECORDED])
@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_malformed_tool_calls_stay_one_line(tokenizer: ChatTokenizer, path: str, kind: str, call: str) -> None:
    """What the client sends back is the response, however it had to be written."""
    model = Model(tokenizer, f"Hm.\n<tool_call>\n{call}\n</tool_call>", "15")
    anthropic = path == "messages"
    tool = {"name": "add", "input_schema": {}} if anthropic else TOOLS[0]

    async def ask(url: str) -> None:
        body: dict[str, Any] = {"messages": list(FIRST), "tools": [tool], "max_tokens": 999}
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{url}/v1/{path}", json=body) as response:
                assert response.status == 200, await response.text()
                found = json.loads(await response.text(), parse_constant=pytest.fail)
            if anthropic:
                uses = [block for block in found["content"] if block["type"] == "tool_use"]
                result = [{"type": "tool_result", "tool_use_id": use["id"], "content": "3"} for use in uses]
                body["messages"] += [{"role": "assistant", "content": found["content"]}]
                body["messages"] += [{"role": "user", "content": [*result, {"type": "text", "text": "So?"}]}]
            else:
                message = found["choices"][0]["message"]
                ids = [one["id"] for one in message.get("tool_calls", ())]
                body["messages"] += [message, *({"role": "tool", "content": "3", "tool_call_id": i} for i in ids)]
                body["messages"] += MORE
            async with http.post(f"{url}/v1/{path}", json=body) as response:
                assert response.status == 200, await response.text()

    recorded = play(model, ask)
    assert [turn.follows for turn in recorded.turns] == [-1, 0, 1, 2]
    assert len(list(trajectory(recorded).samples())) == 1


def test_an_overflow_that_the_agent_handled_is_not_its_end(agent: Callable[..., Any], tokenizer: ChatTokenizer) -> None:
    """An unrelated error ended as truncated, with the reward of the last response."""
    handled = """
await ask(prompt)
try:
    await ask([*prompt, *prompt] * 20)
except openai.BadRequestError:
    pass
raise ConnectionError("no route")
"""
    assert agent(Model(tokenizer, "15"), handled).end.cause is End.WORKFLOW_ERROR
    caused = """
await ask(prompt)
try:
    await ask([*prompt, *prompt] * 20)
except openai.BadRequestError as error:
    raise RuntimeError("no context left") from error
"""
    assert agent(Model(tokenizer, "15"), caused).end.cause is End.TRUNCATED
    recorded = agent(Model(tokenizer, "15"), caused, agent_rewards=True)
    assert recorded.end.cause is End.TRUNCATED
    assert asyncio.run(recorded.verdict()).reward == Reward(0.0, "wrong"), "no verifier is there to ask"


def test_the_error_of_a_reward_names_the_setting(agent: Callable[..., Any], tokenizer: ChatTokenizer) -> None:
    def message(lines: str, **settings: Any) -> str:
        recorded = agent(Model(tokenizer, "15"), f"await ask(prompt)\n{lines}", **settings)
        return str(asyncio.run(recorded.verdict()).message)

    assert "set rollout.agent_rewards=false" in message("return None", agent_rewards=True)
    assert "return a number, or None" in message("return 'the answer'")


OVERFLOWS = {
    "raise ConnectionError('no route')": End.WORKFLOW_ERROR,  # while it handles the overflow
    "raise RuntimeError('the step failed') from error": End.TRUNCATED,
    "raise ExceptionGroup('tasks', [error])": End.TRUNCATED,
    "raise error from error": End.TRUNCATED,
}


@pytest.mark.parametrize("end", OVERFLOWS)
def test_an_overflow_ends_an_agent_where_it_has_caused_the_error(
    agent: Callable[..., Any], tokenizer: ChatTokenizer, end: str
) -> None:
    source = f"""
await ask(prompt)
try:
    await ask([{{"role": "user", "content": "word " * 300}}])
except openai.BadRequestError as error:
    {end}
"""
    assert agent(Model(tokenizer, "15"), source).end.cause is OVERFLOWS[end]


def test_a_timeout_of_the_agents_own_is_its_error(agent: Callable[..., Any], tokenizer: ChatTokenizer) -> None:
    recorded = agent(Model(tokenizer, "15"), "await ask(prompt)\nraise TimeoutError('a page')")
    assert recorded.end.cause is End.WORKFLOW_ERROR and "a page" in asyncio.run(recorded.verdict()).message


MALFORMED: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"tools": 5}, "`tools`"),
    ("chat/completions", {"tools": [{"type": "function"}]}, "`tools[0].function`"),
    ("chat/completions", {"response_format": "text"}, "`response_format`"),
    ("chat/completions", {"stream_options": 5}, "`stream_options`"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "`content[0].text`"),
    ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
    ("chat/completions", {"messages": [{"role": 5, "content": "x"}]}, "`role`"),
    ("chat/completions", {"messages": "x"}, "`messages`"),
    ("chat/completions", {"messages": [5]}, "`messages[0]`"),
    ("chat/completions", {"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "`tool_call_id`"),
    (
        "chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": "add"}]}, *MORE]},
        "`tool_calls[].function`",
    ),
    ("chat/completions", {"n": 100_000}, "`n` must be at most 128"),
    ("messages", {"tool_choice": "any"}, "`tool_choice`"),
    ("messages", {"tools": [{"name": "add"}]}, "`tools[0].input_schema`"),
    ("messages", {"system": 5}, "content of a message"),
    (
        "messages",
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "x"}]}, *MORE]},
        "`content[0].input`",
    ),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "`content[0].text`"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
    ("messages", {"messages": [{"role": "user"}]}, "`content[0].text`"),
]


def test_malformed_requests_are_refused_before_anything_is_sampled(tokenizer: ChatTokenizer) -> None:
    """Status 500 is repeated by clients."""

    async def ask(url: str) -> None:
        async with aiohttp.ClientSession() as http:
            for path, changes, words in MALFORMED[:-1]:
                body = {"messages": FIRST, "max_tokens": 9} | changes
                async with http.post(f"{url}/v1/{path}", data=json.dumps(body)) as response:
                    assert response.status == 400, (path, changes)
                    assert words in json.loads(await response.text())["error"]["message"], (path, changes)
            deep = "[" * 3000 + "]" * 3000
            for text in (
                deep,
                '{"messages": ' + deep + "}",
                '{"messages": [{"role": "user", "content": ' + deep + "}]}",
            ):
                async with http.post(f"{url}/v1/chat/completions", data=text) as response:
                    assert response.status == 400, text[:40]
            head = {"Content-Encoding": "gzip"}
            async with http.post(f"{url}/v1/messages", data=b"no gzip", headers=head) as response:
                assert response.status == 400 and "cannot be read" in await response.text()

    model = Model(tokenizer)
    assert play(model, ask).turns == [] and model.requests == []


def test_a_long_text_without_room_is_not_tokenised_whole(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused body of 3.8 MiB blocked the loop for 16 seconds and took 2.9 GiB."""
    read = 0
    encode = ChatTokenizer.encode

    def counted(self: ChatTokenizer, text: str) -> Any:
        nonlocal read
        read += len(text)
        return encode(self, text)

    monkeypatch.setattr(ChatTokenizer, "encode", counted)

    async def ask(url: str) -> None:
        messages: list[Any] = [{"role": "user", "content": "a b " * 500_000}]
        with pytest.raises(openai.BadRequestError, match="more than 4096 tokens"):
            await client(url).chat.completions.create(model="any", messages=messages)

    assert play(Model(tokenizer), ask, limit=4096).turns == [] and 0 < read < 500_000


def test_each_message_of_a_growing_conversation_is_read_once(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading was cubic in the turns."""
    from megarl.explore.agents import server as session

    read: list[int] = []
    digest = session.digest_after
    monkeypatch.setattr(session, "digest_after", lambda before, value: read.append(1) or digest(before, value))

    async def main(turns: int) -> int:
        read.clear()
        recorded = recorder(Model(tokenizer), 1_000_000)
        asking = Session(recorded, tokenizer, TASK)
        messages = list(FIRST)
        for _ in range(turns):
            [reply] = await asking.complete(
                protocol.asked_of({"messages": list(messages)}, asking.repeated), protocol.sent_back
            )
            messages += [{"role": "assistant", "content": reply.content}, *MORE]
        assert len(list(trajectory(recorded).samples())) == 1
        return len(read)

    few, many = asyncio.run(main(8)), asyncio.run(main(64))
    assert many <= 8 * few + 8


@pytest.mark.parametrize("on_error", ["drop", "zero"])
@pytest.mark.parametrize("cause", [None, End.TRUNCATED])
def test_a_missing_verdict_is_dropped_however_the_policy_ended(
    tokenizer: ChatTokenizer, on_error: Any, cause: End | None
) -> None:
    """With `reward.on_error=drop` a truncated trajectory without a verdict was trained with reward 0."""
    recorded = play(Model(tokenizer, "15"), lambda url: client(url).chat.completions.create(model="", messages=FIRST))
    for status, end in (("error", End.REWARD_ERROR), ("timeout", End.REWARD_TIMEOUT)):
        one = dataclasses.replace(trajectory(recorded), cause=cause, reward=Reward(float("nan"), status))
        found = verify([one], RewardConfig(on_error=on_error), vocab_size=10**6)
        assert one.end is end and found.report.ends == {end.value: 1}
        assert [e.reward.score for e in found.trajectories] == ([] if on_error == "drop" else [0.0])
        assert found.report.dropped == ({end.value: 1} if on_error == "drop" else {})


def test_calls_of_other_families_survive_what_json_cannot_hold() -> None:
    deep = "[" * 5000
    for name, text in (
        ("llama3", '{"name": "add", "parameters": ' + deep),
        ("mistral_v3", "[TOOL_CALLS] " + deep),
        ("mistral_v3", "[TOOL_CALLS]add[ARGS]" + deep),
        ("qwen3_coder", f"<function=add><parameter=a>{deep}</parameter></function>"),
        ("glm4", f"<tool_call>add<arg_key>a</arg_key><arg_value>{deep}</arg_value></tool_call>"),
    ):
        _, calls = FORMATS[name].parse(text)
        [call] = calls
        assert call.arguments in (None, {"a": deep}), "what cannot be parsed stays a text"
        json.dumps(call.arguments, allow_nan=False)


SHAPED = RewardConfig(weight=2.0, format=FormatConfig(weight=0.5, form="think_answer"))


@pytest.mark.parametrize(
    ("cause", "wrong_ends", "score", "status"),
    [
        (None, (), 2.0 * 0.25, "wrong"),
        (End.WORKFLOW_ERROR, (), None, "error"),
        (End.WORKFLOW_ERROR, (End.WORKFLOW_ERROR,), 0.0, "wrong"),
        (End.WORKFLOW_TIMEOUT, (End.WORKFLOW_ERROR,), None, "error"),
    ],
)
def test_rewards_of_a_workflow_pass_the_weights_of_all_rewards(
    tokenizer: ChatTokenizer, cause: End | None, wrong_ends: tuple[End, ...], score: float | None, status: str
) -> None:
    """`reward.weight` and `reward.format` were skipped for them."""
    from megarl.explore.explorer.claimed import ClaimedGroup, RolloutClock
    from megarl.explore.explorer.trajectories import TrajectoryRunner, TrajectorySettings

    begun = 0

    async def workflow(task: Any, model: Any) -> None:
        nonlocal begun
        begun += 1
        model.ask(task)
        await model.generate()
        model.finish(Reward(0.25, "wrong", {"turn_1": 0.25})) if cause is None else model.fail("why", cause)

    class Unasked:
        async def score(self, task: Any, text: str, *, in_thinking: bool = False) -> Verdict:
            raise AssertionError("no verifier is asked")

    async def nothing() -> None: ...

    model: Any = Model(tokenizer)
    group = ClaimedGroup(CLAIM, RenderedPrompt.of(TASK, tokenizer), 7, RolloutClock(timeline=None, rollout_id="r"))
    runner = TrajectoryRunner(
        workflow,
        Unasked(),
        tokenizer,
        TrajectorySettings(
            retries=1,
            retry_s=0.0,
            rewards=dataclasses.replace(SHAPED, on_error="drop"),
            wrong_ends=wrong_ends,
            limits=TokenLimits(trajectory=4096),
        ),
    )
    found = asyncio.run(runner.run(group, 0, model, nothing))
    assert found.reward.status == status and found.end is (cause or End.FINISHED)
    assert begun == (2 if status == "error" else 1), "what counts as wrong does not begin again"
    if score is not None:
        assert found.reward.score == score
        assert found.reward.parts["format"] == 0.0
    kept = verify([found], RewardConfig(), vocab_size=10**6).trajectories
    assert len(kept) == (status != "error")


def test_an_agent_that_speaks_both_protocols(tokenizer: ChatTokenizer) -> None:
    model = Model(tokenizer, "one", "two", "three")

    async def ask(url: str) -> None:
        body = {"messages": FIRST, "max_tokens": 8}
        async with aiohttp.ClientSession() as http:
            for path in ("chat/completions", "messages", "chat/completions"):
                async with http.post(f"{url}/v1/{path}", json=body) as response:
                    assert response.status == 200, await response.text()

    recorded = play(model, ask)
    assert [turn.follows for turn in recorded.turns] == [-1, 0, 0, 0]


def test_a_prompt_that_engines_refuse_is_refused_to_the_agent(
    agent: Callable[..., Any], tokenizer: ChatTokenizer
) -> None:
    class Refusing(Model):
        async def sample(self, request: Any) -> Any:
            self.requests.append(request)
            raise PromptRefused("ValueError: out of vocabulary")

    model = Refusing(tokenizer)
    recorded = agent(model, "await ask(prompt)")
    assert recorded.end.cause is End.WORKFLOW_ERROR and len(model.requests) == 1
    assert "out of vocabulary" in asyncio.run(recorded.verdict()).message


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
@pytest.mark.parametrize("values", [(1, True), (False, 0), (1, 1.0)])
def test_arguments_that_python_takes_for_the_same_are_another_conversation(
    tokenizer: ChatTokenizer, path: str, values: tuple[Any, Any]
) -> None:
    """The engine was asked with the arguments of the request before."""
    model = Model(tokenizer, "one", "two")

    def messages(value: Any) -> list[Any]:
        if path == "messages":
            call = {"type": "tool_use", "id": "i", "name": "add", "input": {"a": value}}
            result = {"type": "tool_result", "tool_use_id": "i", "content": "5"}
            return [*FIRST, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        function = {"name": "add", "arguments": json.dumps({"a": value})}
        calls = [{"id": "i", "type": "function", "function": function}]
        return [
            *FIRST,
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "i", "content": "5"},
        ]

    async def ask(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            for value in values:
                body = {"model": "any", "messages": messages(value), "max_tokens": 20}
                async with session.post(f"{url}/v1/{path}", json=body) as response:
                    assert response.status == 200, await response.text()

    play(model, ask)
    contexts = [tokenizer.decode(request.token_ids, special=True) for request in model.requests]
    for value, context in zip(values, contexts, strict=True):
        assert f'"a": {json.dumps(value)}}}' in context


def test_another_message_after_a_prompt_goes_on_from_the_response_before_it(tokenizer: ChatTokenizer) -> None:
    """It was rendered whole, with the response's tokens made again from its text."""
    model = Model(tokenizer, "one", "two", "three")

    async def ask(url: str) -> None:
        create = client(url).chat.completions.create
        first = (await create(model="any", messages=FIRST)).choices[0].message
        conversation: list[Any] = [*FIRST, first, *MORE]
        await create(model="any", messages=conversation)  # a response that the agent drops
        await create(model="any", messages=[*conversation, {"role": "user", "content": "As JSON."}])

    recorded = play(model, ask)
    assert [turn.follows for turn in recorded.turns] == [-1, 0, 1, 2, 1, 4]
    assert "As JSON." in recorded.text(recorded.turns[4]) and "More." in recorded.text(recorded.turns[4])
