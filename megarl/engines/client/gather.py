"""Batching of concurrent sample requests of trajectories into one engine call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from megarl.core.errors import EngineClosed, EngineError, PromptRefused, RequestRefused
from megarl.core.processes import heartbeat
from megarl.core.schema import GREEDY, WeightsVersion
from megarl.engines.client.client import Prompt, Sampling
from megarl.engines.client.frames import Completion

LONGEST_RETRY_S = 4.0
"""Longest wait in seconds before a retry of samples; waits double up to it."""


class Engine(Protocol):
    """Part of ``rollout.client.EngineClient``."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> AsyncGenerator[Completion, None]: ...


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """A request of one trajectory of a group for a sample."""

    group: str
    index: int
    """Index of the trajectory in its group; ``GREEDY`` for the greedy one."""
    group_size: int
    token_ids: np.ndarray
    images: tuple[bytes, ...]
    group_seed: int | None
    turn: int = 0
    """Number of earlier samples of the trajectory."""
    max_tokens: int | None = None
    """Most tokens, if lower than the sampling's limit."""
    start: int = 0
    """Number of response tokens at the end of ``token_ids``, which are continued."""
    routed: int = 0
    """Tokens with expert ids from earlier samples of the trajectory."""
    oldest: WeightsVersion | None = None
    """Weights of the last of the ``start`` tokens; older weights must not continue."""

    @property
    def seed(self) -> int | None:
        """Group seed + index at the start of the first turn, as an engine seeds the n samples of a prompt; a different
        seed for later turns and continued responses."""
        if self.group_seed is None or self.index == GREEDY:
            return None
        if self.turn == 0 and self.start == 0:
            return self.group_seed + self.index
        place = [self.turn, self.start] if self.start else [self.turn]
        return int(np.random.SeedSequence([self.group_seed, self.index, *place]).generate_state(1)[0])


class _Ask(NamedTuple):
    """One prompt of a call, and the requests for its samples."""

    prompt: Prompt
    requests: Sequence[SampleRequest]


class Gatherer:
    """Calls an engine for trajectories claimed together, and retries failed samples.

    Args:
        calls: Task group of the calls; a failed call cancels the waiting trajectories.
        change: Called with the change in the number of samples in flight.
        retried: Called with the error before a retry.
        timeout_s: Seconds of retries while engines return no samples.
        retry_s: First wait in seconds before a retry.
        awaits_weights: Exclude time in which no engine has the weights, because another program's trainer publishes
            them.
        apart: Make a separate call for each sample, so that cancelling its trajectory aborts it in the engine.
    """

    def __init__(
        self,
        engine: Engine,
        sampling: Sampling,
        calls: asyncio.TaskGroup,
        *,
        change: Callable[[int], None],
        retried: Callable[[EngineError], Awaitable[None]],
        timeout_s: float,
        retry_s: float,
        awaits_weights: bool = False,
        apart: bool = False,
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._calls = calls
        self._change = change
        self._retried = retried
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._awaits_weights = awaits_weights
        self._apart = apart
        self._waiting: dict[SampleRequest, asyncio.Future[Completion]] = {}
        """Requests not yet in a call."""
        self._homes: dict[tuple[str, int], str] = {}
        """(group, index) of a trajectory -> engine of its last sample."""

    async def sample(self, request: SampleRequest) -> Completion:
        """Return the complete sample. Raises PromptRefused for a prompt that no engine accepts; other errors are raised
        in ``calls``."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._start)
        future = self._waiting[request] = loop.create_future()
        return await future

    def _start(self) -> None:
        taken = {request: future for request, future in self._waiting.items() if not future.cancelled()}
        self._waiting = {}
        if self._apart:
            for request, future in taken.items():
                call = self._calls.create_task(self._persist({request: future}))
                future.add_done_callback(partial(_end, call))
            return
        of_homes: dict[str, dict[SampleRequest, asyncio.Future[Completion]]] = {}
        for request, future in taken.items():
            of_homes.setdefault(self._home(request), {})[request] = future
        for part in of_homes.values():
            self._calls.create_task(self._persist(part))

    def _home(self, request: SampleRequest) -> str:
        return self._homes.get((request.group, request.index), "")

    async def _persist(self, missing: dict[SampleRequest, asyncio.Future[Completion]]) -> None:
        since, left, delay_s = time.monotonic(), -1, self._retry_s
        while missing:
            try:
                await self._call(missing)
            except RequestRefused:
                raise
            except EngineError as error:
                is_closed = isinstance(error, EngineClosed)
                if len(missing) != left or (is_closed and self._awaits_weights):
                    since, left, delay_s = time.monotonic(), len(missing), self._retry_s
                if time.monotonic() - since > self._timeout_s:
                    raise
                if is_closed:  # the next choice waits for an engine with the weights
                    continue
                await self._retried(error)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, max(self._retry_s, LONGEST_RETRY_S))

    async def _call(self, missing: dict[SampleRequest, asyncio.Future[Completion]]) -> None:
        """Make one call for all missing samples, and remove those returned or refused. Raises EngineError."""
        asks = _asks(list(missing), self._home, self._sampling.routing)
        outstanding, aborted = len(missing), 0
        self._change(outstanding)
        try:
            async with aclosing(self._engine.generate([a.prompt for a in asks], self._sampling)) as completions:
                async for completion in completions:
                    outstanding -= 1
                    heartbeat.count_work()
                    self._change(-1)
                    if completion.finish_reason == "abort":
                        aborted += 1
                        continue
                    request = asks[completion.request].requests[completion.index]
                    future = missing.pop(request)
                    self._homes[request.group, request.index] = completion.engine
                    if not future.done():  # a cancelled trajectory
                        future.set_result(completion)
        except PromptRefused as error:
            asked = asks[error.prompt].requests if 0 <= error.prompt < len(asks) else ()
            refused = [missing.pop(request) for request in asked if request in missing]
            if not refused:
                raise
            for future in refused:
                if not future.done():
                    future.set_exception(PromptRefused(str(error)))
        finally:
            self._change(-outstanding)
        if aborted:
            raise EngineError(f"the engine cut {aborted} samples short")


def _end(call: asyncio.Task[None], future: asyncio.Future[Completion]) -> None:
    """Cancel a call if its sample is no longer awaited."""
    if future.cancelled():
        call.cancel()


def _asks(requests: Sequence[SampleRequest], home: Callable[[SampleRequest], str], routing: bool) -> list[_Ask]:
    """Return the first turns of a whole group as one prompt, so that its tokens are computed once; all others
    separately, with the same seeds."""
    groups: dict[str, list[SampleRequest]] = {}
    for request in requests:
        groups.setdefault(request.group, []).append(request)
    asks: list[_Ask] = []
    for members in groups.values():
        sampled = [r for r in members if r.index != GREEDY]
        asks += [_Ask(_prompt(r, False, greedy=True, home=home(r)), [r]) for r in members if r.index == GREEDY]
        if sampled and _is_one_prompt(sampled):
            first, whole = sampled[0], sorted(sampled, key=lambda r: r.index)
            asks.append(_Ask(_prompt(first, routing, n=len(whole), seed=first.group_seed), whole))
        else:
            asks += [_Ask(_prompt(r, routing, seed=r.seed, home=home(r)), [r]) for r in sampled]
    return asks


def _prompt(request: SampleRequest, routing: bool, **settings: Any) -> Prompt:
    settings["routing_from"] = request.routed if routing else None
    settings["oldest"] = request.oldest
    return Prompt(request.token_ids, images=request.images, max_tokens=request.max_tokens, **settings)


def _is_one_prompt(requests: Sequence[SampleRequest]) -> bool:
    first = requests[0]
    return len(requests) == first.group_size and all(
        r.turn == 0 == r.start and r.max_tokens == first.max_tokens and np.array_equal(r.token_ids, first.token_ids)
        for r in requests
    )
