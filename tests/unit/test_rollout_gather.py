"""Requests of one moment go to an engine in one call; what nobody waits for is not asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.errors import EngineError, PromptRefused, RequestRefused
from megarl.core.schema import GREEDY
from megarl.engines.client.client import Prompt, Sampling
from megarl.engines.client.frames import Completion
from megarl.engines.client.gather import Gatherer, SampleRequest

PROMPT = np.array([1, 2, 3], dtype=np.int32)


class Engine:
    """Answers with the seed of each sample, after ``fail`` failures of ``error``."""

    def __init__(self, fail: int = 0, error: Exception | None = None) -> None:
        self.calls: list[list[Prompt]] = []
        self._fail, self._error = fail, error or EngineError("gone")

    async def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        self.calls.append(list(prompts))
        if len(self.calls) <= self._fail:
            raise self._error
        for i, prompt in enumerate(prompts):
            for j in range(prompt.n):
                await asyncio.sleep(0)
                seed = -1 if prompt.greedy else (prompt.seed or 0) + j
                yield Completion(i, j, np.array([seed]), np.zeros(1, np.float32), "stop", ())


def request(index: int, group: str = "g", size: int = 4, seed: int | None = 100, **changes: Any) -> SampleRequest:
    values: dict[str, Any] = {"token_ids": PROMPT, "images": (), "group_seed": seed} | changes
    return SampleRequest(group, index, size, **values)


def gathered(
    engine: Engine, work: Callable[[Gatherer], Coroutine[Any, Any, Any]], timeout_s: float = 5.0
) -> tuple[Any, list[int]]:
    """(result of ``work``, changes of the number of samples under way)."""
    changes: list[int] = []

    async def retried(error: EngineError) -> None:
        pass

    async def main() -> Any:
        async with asyncio.TaskGroup() as calls:
            gatherer = Gatherer(
                engine,
                Sampling(max_tokens=4),
                calls,
                change=changes.append,
                retried=retried,
                timeout_s=timeout_s,
                retry_s=0.0,
            )
            return await work(gatherer)

    return asyncio.run(asyncio.wait_for(main(), 20)), changes


async def all_of(gatherer: Gatherer, requests: Sequence[SampleRequest]) -> list[int]:
    found = await asyncio.gather(*[gatherer.sample(r) for r in requests])
    return [int(completion.token_ids[0]) for completion in found]


def test_a_whole_group_is_one_prompt_and_its_greedy_sample_another() -> None:
    engine = Engine()
    requests = [request(GREEDY), *[request(i) for i in (2, 0, 3, 1)]]
    seeds, changes = gathered(engine, lambda g: all_of(g, requests))
    assert [[(p.n, p.seed, p.greedy) for p in call] for call in engine.calls] == [[(1, None, True), (4, 100, False)]]
    assert seeds == [-1, 102, 100, 103, 101] and sum(changes) == 0 and changes[0] == 5


@pytest.mark.parametrize(
    ("requests", "prompts"),
    [
        ([request(0), request(2)], [(1, 100), (1, 102)]),
        ([request(i, token_ids=np.array([i], np.int32)) for i in range(4)], [(1, 100), (1, 101), (1, 102), (1, 103)]),
        ([request(0, "a", 1), request(0, "b", 1, 200)], [(1, 100), (1, 200)]),
        ([request(i, seed=None) for i in range(2)], [(1, None), (1, None)]),
    ],
)
def test_others_are_prompts_of_their_own(requests: list[SampleRequest], prompts: list[tuple[int, int | None]]) -> None:
    engine = Engine()
    gathered(engine, lambda g: all_of(g, requests))
    assert [[(p.n, p.seed) for p in call] for call in engine.calls] == [prompts]


@given(turns=st.integers(1, 4), size=st.integers(1, 4))
def test_every_turn_of_every_trajectory_has_a_seed_of_its_own(turns: int, size: int) -> None:
    seeds = [request(i, size=size, turn=turn).seed for i in range(size) for turn in range(turns)]
    assert len(set(seeds)) == turns * size and None not in seeds


def test_a_trajectory_goes_on_at_the_engine_that_gave_its_last_sample() -> None:
    """Trajectories of two homes are two calls; one of a trajectory without a home goes by itself."""

    class Two(Engine):
        async def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> AsyncGenerator[Completion, None]:
            async for completion in super().generate(prompts, sampling):
                seed = int(completion.token_ids[0])
                yield replace(completion, engine="a" if seed % 2 else "b")

    engine = Two()

    async def turns(gatherer: Gatherer) -> None:
        await all_of(gatherer, [request(i) for i in range(4)])
        await all_of(gatherer, [*[request(i, turn=1) for i in range(4)], request(0, "new", 2)])

    gathered(engine, turns)
    assert [prompt.home for prompt in engine.calls[0]] == [""]
    assert [[prompt.home for prompt in call] for call in engine.calls[1:]] == [["b", "b"], ["a", "a"], [""]]


def test_later_requests_are_another_call() -> None:
    engine = Engine()

    async def twice(gatherer: Gatherer) -> list[int]:
        first = await all_of(gatherer, [request(i) for i in range(4)])
        return first + await all_of(gatherer, [request(i, turn=1) for i in range(4)])

    seeds, _ = gathered(engine, twice)
    assert [[p.n for p in call] for call in engine.calls] == [[4], [1] * 4] and len(set(seeds)) == 8


def test_what_nobody_waits_for_is_not_asked() -> None:
    engine = Engine()

    async def given_up(gatherer: Gatherer) -> None:
        waiting = asyncio.create_task(gatherer.sample(request(0, size=1)))
        await asyncio.sleep(0)  # it is asked for, and the call would start next
        waiting.cancel()
        await asyncio.sleep(0.01)

    gathered(engine, given_up)
    assert engine.calls == []


def test_a_failure_is_asked_again_and_a_refusal_is_not() -> None:
    engine = Engine(fail=3)
    seeds, changes = gathered(engine, lambda g: all_of(g, [request(i) for i in range(4)]))
    assert seeds == [100, 101, 102, 103] and len(engine.calls) == 4 and sum(changes) == 0
    refusing = Engine(fail=1, error=RequestRefused("too long"))
    with pytest.raises(BaseExceptionGroup) as caught:
        gathered(refusing, lambda g: all_of(g, [request(0, size=1)]))
    assert caught.value.subgroup(RequestRefused) is not None and len(refusing.calls) == 1


def test_who_asked_for_a_refused_prompt_is_told_and_others_get_their_samples() -> None:
    """An image that cannot be decoded, or whose vectors leave no room, ended the job."""

    class Refusing(Engine):
        async def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> AsyncGenerator[Completion, None]:
            async for completion in super().generate(prompts, sampling):
                if prompts[completion.request].images:
                    raise PromptRefused("ValueError: image 0 cannot be decoded", completion.request)
                yield completion

    engine = Refusing()

    async def work(gatherer: Gatherer) -> list[Any]:
        bad = [request(i, "bad", 2, images=(b"no image",)) for i in range(2)]
        asked = [request(0, "a", 1), *bad, request(0, "b", 1, 200)]
        return await asyncio.gather(*[gatherer.sample(r) for r in asked], return_exceptions=True)

    (first, *refused, last), changes = gathered(engine, work)
    assert (first.token_ids.tolist(), last.token_ids.tolist()) == ([100], [200]) and sum(changes) == 0
    assert all(isinstance(error, PromptRefused) and "cannot be decoded" in str(error) for error in refused)
    assert [len(call) for call in engine.calls] == [3, 1]


def test_an_engine_that_stays_silent_for_too_long_ends_the_wait() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        gathered(Engine(fail=10**6), lambda g: all_of(g, [request(0, size=1)]), timeout_s=0.05)
    assert caught.value.subgroup(EngineError) is not None
