"""Spare trajectories of a group: which become members, what is cut, and what the store and the counts have of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.buffer.experience import verify
from megarl.buffer.store import Store
from megarl.config.rewards import RewardConfig
from megarl.core.schema import GREEDY, End, Reward, Task
from megarl.engines.client.client import Prompt, Sampling
from megarl.engines.client.engine_choice import EngineChoice
from megarl.engines.client.frames import Completion, VersionSpan
from megarl.explore.explorer.explorer import AskedEngines, ClaimSettings, Explorer
from megarl.explore.explorer.segments import SegmentSettings
from megarl.explore.explorer.trajectories import TrajectorySettings
from megarl.explore.recording.model import RolloutModel, TokenLimits
from megarl.rewards import Verdict
from megarl.tasks import ChatTokenizer
from tests.chat_battery import checkpoint
from tests.stores import VERSION, make_task

SEED = 11


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.open(checkpoint(tmp_path_factory.mktemp("qwen") / "qwen2_5", "qwen2_5"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(f"sqlite:///{tmp_path}/store.db")
    store.begin_attempt(1)
    store.tasks.add("train", [make_task(0)])
    return store


class Engine:
    """Answers the calls of which it knows that they end; of all others it notes that nobody waits any more."""

    def __init__(self, tokenizer: ChatTokenizer, endless: Collection[int]) -> None:
        self.ids, self.endless, self.number = tokenizer.response_ids("1"), endless, 0
        self.aborted: list[int] = []
        """Numbers of calls."""

    async def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        number, self.number = self.number, self.number + 1
        assert [prompt.n for prompt in prompts] == [1], "each sample is a call"
        try:
            while number in self.endless:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05 if prompts[0].greedy else 0.0)
            spans = (VersionSpan(str(VERSION), 0, len(self.ids)),)
            yield Completion(0, 0, self.ids, np.full(len(self.ids), -0.1, np.float32), "stop", spans)
        except asyncio.CancelledError:
            self.aborted.append(number)
            raise


class Scorer:
    async def score(self, task: Task, text: str, *, in_thinking: bool = False) -> Verdict:
        return Verdict(Reward(1.0, "ok"))


def explored(
    store: Store, tokenizer: ChatTokenizer, engine: Engine, fails: Collection[int] = (), **sampling: Any
) -> tuple[Explorer, dict[str, float]]:
    """Explore one group of two with two spare trajectories; those of ``fails`` end with an error."""
    settings = {"temperature": 1.0, "max_tokens": 8, "seed": SEED, "spare": 2} | sampling
    store.rollouts.request("r0", "train", 0, VERSION, ["train/0"], 2, settings)

    async def workflow(task: Task, model: RolloutModel) -> None:
        model.ask(task)
        await model.generate()
        if model.index in fails:
            raise ValueError("broken")

    async def main() -> Explorer:
        limits, segments = TokenLimits(response=8, trajectory=200), SegmentSettings(tokens=8)
        explorer = Explorer(
            store,
            AskedEngines(engine, EngineChoice(())),
            Scorer(),
            tokenizer,
            ClaimSettings("e", capacity=4, poll_s=0.005),
            workflow,
            TrajectorySettings(limits=limits, segments=segments),
        )
        running = asyncio.create_task(explorer.run())
        while not store.rollouts.is_complete("r0"):
            assert not running.done(), running.result()
            await asyncio.sleep(0.005)
        assert explorer.under_way.total == 0
        while not set(engine.endless) & set(range(engine.number)) <= set(engine.aborted):  # cancelled calls end
            await asyncio.sleep(0.005)
        store.journal.close_job()
        await running
        return explorer

    return asyncio.run(asyncio.wait_for(main(), 120)), store.rollouts.metrics("r0")


@pytest.mark.parametrize("endless", [(0, 3), (2, 3), (0, 1)])
def test_those_that_end_last_are_cut(endless: tuple[int, int], store: Store, tokenizer: ChatTokenizer) -> None:
    engine = Engine(tokenizer, endless)
    _, metrics = explored(store, tokenizer, engine)
    members = store.groups.trajectories("r0")
    assert [e.index for e in members] == [i for i in range(4) if i not in endless]
    assert sorted(engine.aborted) == list(endless)
    assert (metrics["spare_cut"], metrics["spare_replaced"], metrics["samples"]) == (2, 0, 2)
    assert not store.segments.read(["r0/0"])
    found = verify(members, RewardConfig(), vocab_size=1 << 20)
    assert found.trajectories and not found.dropped


def test_a_spare_one_takes_the_place_of_one_that_failed(store: Store, tokenizer: ChatTokenizer) -> None:
    _, metrics = explored(store, tokenizer, Engine(tokenizer, (3,)), fails=(0,))
    assert [(e.index, e.end) for e in store.groups.trajectories("r0")] == [(1, End.FINISHED), (2, End.FINISHED)]
    assert (metrics["spare_cut"], metrics["spare_replaced"]) == (1, 1)


def test_a_group_with_too_few_usable_members_is_whole_and_dropped(store: Store, tokenizer: ChatTokenizer) -> None:
    _, metrics = explored(store, tokenizer, Engine(tokenizer, ()), fails=(0, 1, 3))
    members = store.groups.trajectories("r0")
    assert [e.index for e in members] == [0, 2]
    assert verify(members, RewardConfig(), vocab_size=1 << 20).dropped == {"r0/0": "workflow_error"}
    assert (metrics["spare_cut"], metrics["spare_replaced"]) == (0, 2)


def test_the_greedy_one_is_waited_for(store: Store, tokenizer: ChatTokenizer) -> None:
    _, metrics = explored(store, tokenizer, Engine(tokenizer, (3, 4)), greedy=True)
    members = store.groups.trajectories("r0")
    assert [e.index for e in members] == [0, 1] and all(e.greedy is not None for e in members)
    assert all(e.greedy.index == GREEDY for e in members if e.greedy is not None)
    assert (metrics["spare_cut"], metrics["greedy"]) == (2, 1)
