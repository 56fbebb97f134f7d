"""Images in the messages of environments and agents: tokens, what an engine is asked with, and what is kept."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from megarl.buffer.store import Claim
from megarl.config.schema import FromScratchConfig, RolloutConfig, VisionTowerConfig
from megarl.core.errors import JobError
from megarl.core.schema import End, Reward, Task, Trajectory, WeightsVersion, file_digest
from megarl.engines.client.frames import Completion
from megarl.engines.client.gather import SampleRequest
from megarl.explore.agents.server import AgentServer, Session
from megarl.explore.environments import EpisodeThreads, Observation
from megarl.explore.recording.images import ImageRules
from megarl.explore.recording.model import RenderedPrompt, RolloutModel, TokenLimits
from megarl.explore.workflows.environment import environment
from megarl.learn.models.from_scratch import VISION, create
from megarl.tasks import ChatTokenizer, chat_messages
from megarl.tasks.image_processor import Processor
from tests.loop.vision_models import picture
from tests.unit.agent_model import judge

SMALL = FromScratchConfig(
    model_type=VISION, vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32,
    vision=VisionTowerConfig(depth=2, hidden_size=32, intermediate_size=48, full_attention_every=2),
)  # fmt: skip
TEXT = Task("t", "s", ({"role": "user", "content": "How many?"},), "", {"ground_truth": "3"})
PAD = 7
"""The placeholder."""
ONE, TWO, THREE = (picture(seed, 28 * seed, 28) for seed in (1, 2, 3))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model"
    create(path, SMALL, ["How many red shapes? What is it now?"], seed=1)
    return path


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> ChatTokenizer:
    return ChatTokenizer.open(model)


@pytest.fixture(scope="module")
def processor(model: Path) -> Processor:
    return Processor.open(model)


class Engine:
    """Writes given texts and expands placeholders by transformers' processor, as vLLM does."""

    def __init__(self, tokenizer: ChatTokenizer, processor: Processor, *texts: str | list[int]) -> None:
        self.tokenizer, self.processor, self.texts = tokenizer, processor, iter(texts)
        self.requests: list[SampleRequest] = []

    async def sample(self, request: SampleRequest) -> Completion:
        self.requests.append(request)
        text = next(self.texts)
        ids = self.tokenizer.response_ids(text) if isinstance(text, str) else np.array(text, np.int32)
        computed = None
        if request.images:
            last = np.flatnonzero(request.token_ids == PAD)[len(request.images) - 1]
            before, after = np.split(request.token_ids, [last + 1])
            shown = self.processor.prompt_ids(self.tokenizer.decode(before, special=True), request.images)
            computed = np.concatenate([shown, after])
        return Completion(0, 0, ids, np.full(len(ids), -0.5, np.float32), "stop", (), prompt_ids=computed)


def recorded_by(
    engine: Engine, task: Task = TEXT, limit: int = 400, rules: ImageRules | None = None, *, sees: bool = True
) -> RolloutModel:
    """``sees``: the model takes images, by ``rules`` or those of up to four."""
    claim = Claim("r", "train", 0, WeightsVersion(1, 1), "g", 0, 1, {}, task, "w", "t", 1)
    prompt, gatherer = RenderedPrompt.of(task, engine.tokenizer), engine
    rules = (rules or ImageRules(engine.processor, 4)) if sees else None
    limits = TokenLimits(prompt=100, trajectory=limit)
    return RolloutModel(claim, 0, prompt, 7, gatherer, engine.tokenizer, judge, limits, images=rules)


def kept(recorded: RolloutModel, task: Task = TEXT) -> Trajectory:
    turns = recorded.record.ordered()
    images = recorded.record.images_beside(task.images, turns)
    return Trajectory("r", "t", "g", 0, 1, turns, Reward(1.0, "ok"), cause=recorded.end.cause, images=images)


class Show:
    """Shows pictures in turn, until there are none left."""

    def __init__(self, first: Observation | None, *then: Observation) -> None:
        self.first, self.then = first, iter(then)

    def __call__(self, task: Task) -> Any:
        return ShownFirst(self) if self.first is not None else self

    def step(self, response: str) -> Observation:
        return next(self.then, Observation("", 1.0, done=True))

    def close(self) -> None:
        pass


class ShownFirst:
    def __init__(self, show: Show) -> None:
        self.show, self.step, self.close = show, show.step, show.close

    def reset(self) -> Observation:
        assert self.show.first is not None
        return self.show.first


def played(recorded: RolloutModel, show: Show, task: Task = TEXT) -> Trajectory:
    workflow = environment(show, EpisodeThreads(4, 30.0))
    asyncio.run(asyncio.wait_for(workflow(task, recorded), 30))
    return kept(recorded, task)


def whole(tokenizer: ChatTokenizer, processor: Processor, messages: list[Any], images: Sequence[bytes]) -> list[int]:
    """Tokens of a conversation by transformers' processor."""
    return processor.prompt_ids(tokenizer.render(messages), images).tolist()


def test_an_environment_shows_images(tokenizer: ChatTokenizer, processor: Processor) -> None:
    engine = Engine(tokenizer, processor, "red", "now", "3")
    task = replace(TEXT, images=(ONE,), prompt=({"role": "user", "content": "<image>How?"},))
    recorded = recorded_by(engine, task)
    show = Show(Observation("What is <image>?", images=[TWO]), Observation("", images=[THREE, ONE]))
    found = played(recorded, show, task)
    assert [turn.images for turn in found.turns if turn.author != "model"] == [
        (file_digest(ONE), file_digest(TWO)),
        (file_digest(THREE), file_digest(ONE)),
    ]
    assert found.images == {file_digest(TWO): TWO, file_digest(THREE): THREE}, "the task's own is not kept again"
    [sample] = found.samples()
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How?\n\nWhat is "}, {"type": "image"},
                                     {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": [{"type": "image"}, {"type": "image"}]},
    ]  # fmt: skip
    tokens = [*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]
    expected = whole(tokenizer, processor, messages, [ONE, TWO, THREE, ONE])
    assert tokens == [*expected, *tokenizer.response_ids("now").tolist()]
    assert [request.images for request in engine.requests] == [(ONE, TWO), (ONE, TWO, THREE, ONE)]
    assert [int((request.token_ids == PAD).sum()) for request in engine.requests] == [2, 4], "one for each image"
    assert [at.digests for at in sample.images] == [turn.images for turn in found.turns if turn.author != "model"]
    for at in sample.images:
        assert tokens[at.start : at.end].count(PAD) == sum(
            processor.num_vectors(f) for f in files_of(at, ONE, TWO, THREE)
        )
    assert not any(sample.response_mask[np.array(sample.response_ids) == PAD]), "no placeholder is trained"


def files_of(at: Any, *files: bytes) -> list[bytes]:
    return [{file_digest(file): file for file in files}[digest] for digest in at.digests]


@pytest.mark.parametrize(
    ("seen", "fault"),
    [
        (Observation("<image><image>", images=[ONE]), "2 <image> and 1 images"),
        (Observation("", images=[b"no picture"]), "cannot be decoded as PNG"),
        (Observation("<|image_pad|>", images=[ONE]), "has 2 <|image_pad|> and 1 images"),
    ],
)
def test_images_that_do_not_fit_are_the_environments_fault(
    tokenizer: ChatTokenizer, processor: Processor, seen: Observation, fault: str
) -> None:
    for first, then in ((seen, ()), (None, (seen,))):
        recorded = recorded_by(Engine(tokenizer, processor, "red", "now"))
        found = played(recorded, Show(first, *then))
        assert found.cause is End.ENVIRONMENT_ERROR
        message = asyncio.run(recorded.verdict()).message
        assert message is not None and fault in message


@pytest.mark.parametrize("rules", [{"images": 1}, {"images": 4, "patches": 47}, {"images": 4, "nbytes": len(ONE) + 9}])
def test_an_image_without_room_truncates(tokenizer: ChatTokenizer, processor: Processor, rules: dict[str, Any]) -> None:
    recorded = recorded_by(Engine(tokenizer, processor, "red", "now"), rules=ImageRules(processor, **rules))
    found = played(recorded, Show(Observation("", images=[ONE]), Observation("", 0.5, images=[TWO])))
    assert found.cause is End.TRUNCATED and len(found.turns) == 2


def test_vectors_of_an_image_count_as_tokens(tokenizer: ChatTokenizer, processor: Processor) -> None:
    show = (Observation("", images=[ONE]), Observation("", images=[THREE]))
    room = len(played(recorded_by(Engine(tokenizer, processor, "red", "now")), Show(*show)).samples().__next__()[0])
    found = kept_lengths(tokenizer, processor, show, 400)
    last = found[-1]
    short = kept_lengths(tokenizer, processor, show, sum(found[:-1]))
    assert found[:2] == short and room == found[0] and last == len(tokenizer.response_ids("now"))


def kept_lengths(
    tokenizer: ChatTokenizer, processor: Processor, show: tuple[Observation, ...], limit: int
) -> list[int]:
    found = played(recorded_by(Engine(tokenizer, processor, "red", "now"), limit=limit), Show(*show))
    return [len(turn) for turn in found.turns]


def test_no_image_follows_a_placeholder_of_the_models(tokenizer: ChatTokenizer, processor: Processor) -> None:
    """An engine would put the image in its place."""
    end = tokenizer.end_id
    for after, cause in (("", None), ("<image>", End.TRUNCATED)):
        recorded = recorded_by(Engine(tokenizer, processor, [PAD, 9, end], "now"))
        images = [TWO] if after else []
        found = played(recorded, Show(Observation("", images=[ONE]), Observation(after or "now", images=images)))
        assert found.cause is cause and len(found.turns) == (2 if after else 4)


def test_an_engine_that_resizes_otherwise_ends_the_job(tokenizer: ChatTokenizer, processor: Processor) -> None:
    engine = Engine(tokenizer, processor, "red")

    async def other(request: SampleRequest) -> Completion:
        found = await Engine.sample(engine, request)
        assert found.prompt_ids is not None
        return replace(found, prompt_ids=np.append(found.prompt_ids, np.int32(PAD)))

    recorded = recorded_by(engine)
    engine.sample = other  # type: ignore[method-assign]
    with pytest.raises(JobError, match="another number of tokens of an image"):
        played(recorded, Show(Observation("", images=[ONE])))


def uri(image: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def test_an_openai_agent_sends_images(tokenizer: ChatTokenizer, processor: Processor) -> None:
    engine = Engine(tokenizer, processor, "red", "now", "3")
    recorded = recorded_by(engine)

    async def agent(url: str) -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "How "}, uri(ONE)]}]
        first = await client.chat.completions.create(model="any", messages=messages)
        messages += [first.choices[0].message, {"role": "user", "content": [uri(TWO), uri(THREE)]}]
        second = await client.chat.completions.create(model="any", messages=messages)
        assert second.usage is not None and second.usage.prompt_tokens == sum(map(len, recorded.turns[:3]))
        with pytest.raises(openai.BadRequestError, match="nothing is downloaded"):
            far = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]}]
            await client.chat.completions.create(model="any", messages=far)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError, match="cannot be read"):
            await client.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": [uri(b"no picture")]}],  # type: ignore[list-item, arg-type]
            )
        with pytest.raises(openai.BadRequestError) as full:
            await client.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": [uri(ONE)] * 5}],  # type: ignore[list-item, arg-type]
            )
        assert full.value.code == "context_length_exceeded" and "rollout.max_images" in str(full.value)
        with pytest.raises(openai.BadRequestError, match="messages with 1025 images; send at most 1024"):
            await client.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": [uri(ONE)] * 1025}],  # type: ignore[list-item, arg-type]
            )
        large = "x" * (64 * 2**20)
        with pytest.raises(openai.BadRequestError) as error:
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": large}])
        assert error.value.code == "context_length_exceeded" and "more than 64 MiB" in str(error.value)

    serve(recorded, tokenizer, agent)
    found = kept(recorded)
    assert [turn.follows for turn in found.turns] == [-1, 0, 1, 2] and sorted(found.images) == sorted(
        map(file_digest, (ONE, TWO, THREE))
    )
    [sample] = found.samples()
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "image"}]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": [{"type": "image"}, {"type": "image"}]},
    ]
    expected = whole(tokenizer, processor, messages, [ONE, TWO, THREE])
    tokens = [*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]
    assert tokens == [*expected, *tokenizer.response_ids("now").tolist()]


def test_an_anthropic_agent_sends_images(tokenizer: ChatTokenizer, processor: Processor) -> None:
    engine = Engine(tokenizer, processor, "red")
    recorded = recorded_by(engine)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(ONE).decode()}

    async def agent(url: str) -> None:
        content = [{"type": "image", "source": source}, {"type": "text", "text": "How?"}]
        body = {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": content}]}
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{url}/v1/messages", json=body) as response:
                assert (await response.json())["content"] == [{"type": "text", "text": "red"}]
            far = [{"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}]
            body["messages"] = [{"role": "user", "content": far}]
            async with http.post(f"{url}/v1/messages", json=body) as response:
                assert response.status == 400 and "nothing is downloaded" in await response.text()

    serve(recorded, tokenizer, agent)
    expected = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How?"}]}]
    assert recorded.turns[0].token_ids.tolist() == whole(tokenizer, processor, expected, [ONE])


def serve(recorded: RolloutModel, tokenizer: ChatTokenizer, agent: Any) -> None:
    async def main() -> None:
        async with AgentServer() as server, server.serving(Session(recorded, tokenizer, TEXT)) as url:
            await agent(url)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_an_agent_is_given_the_images_of_its_task(tokenizer: ChatTokenizer, processor: Processor) -> None:
    from megarl.explore.agents.openai import message_of
    from megarl.explore.agents.request import images_of, prompt_of

    task = replace(TEXT, images=(ONE, TWO), prompt=({"role": "user", "content": "<image>How<image>?"},))
    sent = prompt_of(task)
    assert [part["type"] for part in sent[0]["content"]] == ["image_url", "text", "image_url", "text"]
    assert images_of([message_of(message) for message in sent]) == (ONE, TWO)
    assert prompt_of(TEXT) == list(TEXT.prompt) and chat_messages(task)[0]["content"][0] == {"type": "image"}


def test_a_model_of_text_is_shown_none(tokenizer: ChatTokenizer, processor: Processor) -> None:
    engine = Engine(tokenizer, processor, "red", "now")
    recorded = recorded_by(engine, sees=False)
    found = played(recorded, Show(Observation("", images=[ONE])))
    assert found.cause is End.ENVIRONMENT_ERROR
    assert "need a model that takes images" in str(asyncio.run(recorded.verdict()).message)


def test_rules_are_those_of_the_job(model: Path, tmp_path: Path) -> None:
    from megarl.config.schema import ModelConfig
    from tests.unit.test_vision_processor import config_of

    def rules(workflow: str, path: Path = model) -> ImageRules | None:
        rollout = RolloutConfig(workflow=workflow, max_images=3)
        return ImageRules.of(config_of(path, model=ModelConfig(path=str(path)), rollout=rollout))

    found = rules("environment")
    assert found is not None and found.images == 3 and found.processor.placeholder == PAD
    assert rules("single_turn") is None and rules("environment", tmp_path) is None
