"""Rows with images through a real vLLM server: ids and log-probs against transformers, and rollouts into the store,
scored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from megarl.buffer.store import Store
from megarl.config import Config
from megarl.config.rewards import RewardConfig
from megarl.config.schema import ModelConfig, RolloutConfig
from megarl.core.errors import DataError, EngineError
from megarl.core.schema import Task, WeightsVersion
from megarl.engines.client.client import EngineClient, Prompt, Sampling
from megarl.explore.explorer.explorer import AskedEngines, ClaimSettings, Explorer
from megarl.rewards import RewardPool
from megarl.tasks import ChatTokenizer, chat_messages
from megarl.tasks.image_processor import Processor, check_image_prompts
from tests.engine_rows import choice_of
from tests.loop.engines import KEY, RunningEngine
from tests.loop.vision_models import (
    IMAGE,
    IMAGE_TOKENS,
    QWEN_IMAGE,
    QWEN_UNIT,
    picture,
    save_tiny_idefics3,
    save_tiny_qwen2_5_vl,
    save_tiny_qwen3_vl,
    transformers_logp,
)
from tests.loop.zygote import Zygote

GREEDY = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)


def task(i: int, *images: bytes) -> Task:
    prompt = ({"role": "user", "content": " and ".join(["<image>"] * len(images)) + " How many dogs ?"},)
    return Task(f"train/{i}", "vision/count", prompt, "", {"ground_truth": "3"}, images=images)


QWEN = ModelConfig(min_image_pixels=2 * QWEN_UNIT**2, max_image_pixels=6 * QWEN_UNIT**2)
"""Other limits than the processor's own."""


@pytest.fixture(scope="module", params=["idefics3", "qwen2_5_vl", "qwen3_vl"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, zygote: Zygote
) -> Iterator[RunningEngine]:
    directory = tmp_path_factory.mktemp("vision")
    save, model = {
        "idefics3": (save_tiny_idefics3, ModelConfig()),
        "qwen2_5_vl": (save_tiny_qwen2_5_vl, QWEN),
        "qwen3_vl": (save_tiny_qwen3_vl, QWEN),
    }[request.param]
    model = replace(model, path=str(save(directory / "model")))
    rollout = RolloutConfig(
        max_prompt_tokens=128, max_response_tokens=16, max_num_seqs=16, kv_cache_bytes=2**26, start_timeout_s=240.0
    )
    engine = RunningEngine(Config(model=model, rollout=rollout), directory / "logs", zygote)
    try:
        yield engine.ready()
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def tokenizer(engine: RunningEngine) -> ChatTokenizer:
    return ChatTokenizer.open(engine.model_path)


@pytest.fixture(scope="module")
def processor(engine: RunningEngine) -> Processor:
    model = engine.config.model
    return Processor.open(engine.model_path, model.min_image_pixels, model.max_image_pixels)


@pytest.fixture(scope="module")
def placeholder(engine: RunningEngine) -> int:
    """Token id of an image's vectors."""
    return QWEN_IMAGE if is_qwen(engine) else IMAGE


def is_qwen(engine: RunningEngine) -> bool:
    return engine.config.model.max_image_pixels is not None


def expected_logp(engine: RunningEngine, prompt: np.ndarray, response: np.ndarray, asked: Task) -> torch.Tensor:
    """transformers' log-probs, with the engine's limits of pixels."""
    limits = engine.config.model.min_image_pixels, engine.config.model.max_image_pixels
    return transformers_logp(engine.model_path, prompt, response, list(asked.images), limits)


def num_vectors(engine: RunningEngine, processor: Processor, asked: Task) -> int:
    if not is_qwen(engine):
        return IMAGE_TOKENS * len(asked.images)
    return sum(processor.num_vectors(image) for image in asked.images)


def prompt_of(tokenizer: ChatTokenizer, asked: Task, n: int = 1) -> Prompt:
    return Prompt(tokenizer.prompt_ids(chat_messages(asked)), n, seed=7, images=asked.images)


def test_the_answer_is_about_the_image_and_equals_transformers(
    engine: RunningEngine, tokenizer: ChatTokenizer, processor: Processor, placeholder: int
) -> None:
    first, second = picture(1), picture(2, 25, 50)
    tasks = [task(0, first), task(1, second), task(2, first), task(3, first, second), task(4, second, first)]
    got = engine.generate([prompt_of(tokenizer, asked) for asked in tasks], GREEDY)
    for asked, completion in zip(tasks, got, strict=True):
        assert completion.prompt_ids is not None
        expected = processor.prompt_ids(tokenizer.render(chat_messages(asked)), asked.images)
        np.testing.assert_array_equal(completion.prompt_ids, expected)
        assert (expected == placeholder).sum() == num_vectors(engine, processor, asked)
        logp = expected_logp(engine, expected, completion.token_ids, asked)
        assert (torch.from_numpy(completion.logprobs) - logp).abs().max() < 1e-4
    same, other = got[2], got[1]
    np.testing.assert_array_equal(got[0].token_ids, same.token_ids)
    assert np.abs(got[0].logprobs - same.logprobs).max() < 1e-5
    assert abs(got[0].logprobs[0] - other.logprobs[0]) > 1e-3
    assert abs(got[3].logprobs[0] - got[4].logprobs[0]) > 1e-3  # their order counts


def test_a_cached_prefix_is_of_its_image(engine: RunningEngine, tokenizer: ChatTokenizer) -> None:
    """The same ids, several blocks long, with another image: blocks of the first must not be taken for it."""
    long = ({"role": "user", "content": "<image>" + " How many dogs ?" * 20},)
    asked = [replace(task(i, picture(i)), prompt=long) for i in (1, 2, 1)]
    got = [engine.generate([prompt_of(tokenizer, one)], GREEDY)[0] for one in asked]
    assert len(got[0].prompt_ids) > 2 * engine.config.rollout.block_size
    np.testing.assert_array_equal(got[0].prompt_ids, got[1].prompt_ids)
    for one, completion in zip(asked, got, strict=True):
        logp = expected_logp(engine, completion.prompt_ids, completion.token_ids, one)
        assert (torch.from_numpy(completion.logprobs) - logp).abs().max() < 1e-4
    assert np.abs(got[0].logprobs[0] - got[1].logprobs[0]) > 1e-4


def test_a_prompt_without_images_says_no_ids(engine: RunningEngine, tokenizer: ChatTokenizer) -> None:
    text = replace(task(0), prompt=({"role": "user", "content": "How many dogs ?"},))
    [completion] = engine.generate([prompt_of(tokenizer, text)], GREEDY)
    assert completion.prompt_ids is None


@pytest.mark.parametrize(
    ("count", "images", "message"),
    [(1, [b"no image"], "cannot be decoded"), (1, [picture(1), picture(2)], "2 images do not fit the prompt")],
)
def test_a_prompt_with_the_wrong_images_is_refused_and_others_go_on(
    engine: RunningEngine, tokenizer: ChatTokenizer, count: int, images: list[bytes], message: str
) -> None:
    asked = task(0, *[picture(1)] * count)
    with pytest.raises(EngineError, match=message):
        engine.generate([replace(prompt_of(tokenizer, asked), images=images)], GREEDY)
    assert len(engine.generate([prompt_of(tokenizer, asked)], GREEDY)) == 1


def test_the_explorer_rolls_out_and_scores_rows_with_images(
    engine: RunningEngine, tokenizer: ChatTokenizer, processor: Processor, placeholder: int, tmp_path: Path
) -> None:
    store = Store(f"sqlite:///{tmp_path}/store.db")
    tasks = [task(0, picture(1)), task(1, picture(2)), task(2, picture(1), picture(3))]
    store.tasks.add("train", tasks)
    store.rollouts.request(
        "r0",
        "train",
        0,
        WeightsVersion(0, 0),
        store.tasks.ids("train"),
        3,
        {"temperature": 1.0, "max_tokens": 8, "seed": 3, "greedy": True},
    )

    async def main() -> None:
        async with EngineClient(choice_of(engine.url), KEY, 60) as client, RewardPool(RewardConfig()) as scorer:
            store.engines.register(client.engines.fleet.rows)
            asked, claims = AskedEngines(client, client.engines), ClaimSettings("e0", capacity=16)
            explorer = Explorer(store, asked, scorer, tokenizer, claims)
            running = asyncio.create_task(explorer.run())
            while not running.done() and store.rollouts.progress("r0")[0] < len(tasks):
                await asyncio.sleep(0.05)
            store.journal.close_job()
            await running

    asyncio.run(asyncio.wait_for(main(), 120))
    got = store.groups.trajectories("r0")
    assert len(got) == 9 and {e.reward.status for e in got} <= {"ok", "wrong"}
    assert store.rollouts.metrics("r0")["retries"] == 0  # though three prompts share an image
    for e in got:
        asked = tasks[int(e.task_id[-1])]
        assert (e.prompt.token_ids == placeholder).sum() == num_vectors(engine, processor, asked)
        assert e.greedy is not None and np.array_equal(e.greedy.prompt.token_ids, e.prompt.token_ids)
        if placeholder not in e.response.token_ids:  # random weights say it, and transformers would look for its image
            logp = expected_logp(engine, e.prompt.token_ids, e.response.token_ids, asked)
            assert (torch.from_numpy(e.response.logp) - logp).abs().max() < 1e-4
    assert sum(placeholder not in e.response.token_ids for e in got) > 4
    assert store.rollouts.metrics("r0")["prompt_tokens"] == sum(len(e.prompt.token_ids) for e in got) * 4 / 3


def test_lengths_are_checked_with_the_images(
    engine: RunningEngine, tokenizer: ChatTokenizer, processor: Processor
) -> None:
    tasks = [task(0, picture(1)), task(1, picture(1), picture(2))]
    lengths = [len(processor.prompt_ids(tokenizer.render(chat_messages(t)), t.images)) for t in tasks]
    assert lengths[0] < lengths[1]
    check_image_prompts(tasks, tokenizer, processor, lengths[1], path="rows.parquet")
    with pytest.raises(
        DataError,
        match=rf"rows.parquet: row 2: prompt has {lengths[1]} tokens with its 2 images, rollout.max_prompt_tokens is",
    ):
        check_image_prompts(tasks, tokenizer, processor, lengths[1] - 1, path="rows.parquet")
    messages = chat_messages(tasks[1])
    expected = AutoProcessor.from_pretrained(engine.model_path).apply_chat_template(
        messages, add_generation_prompt=True
    )
    assert tokenizer.render(messages) == expected
    cut = picture(1)[:-500]
    with pytest.raises(DataError, match="row 1: .*the image cannot be decoded"):
        check_image_prompts([replace(tasks[0], images=(cut,))], tokenizer, processor, 128, path="rows.parquet")
    with pytest.raises(DataError, match="the model's processor refuses the prompt"):
        processor.prompt_ids(tokenizer.render(chat_messages(tasks[1])), tasks[0].images)


def test_texts_reach_a_template_that_wants_parts(tokenizer: ChatTokenizer) -> None:
    assert "How many" in tokenizer.render([{"role": "user", "content": "How many"}])
