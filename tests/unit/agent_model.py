"""A rollout model that writes given texts, and agents against its endpoint."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import openai

from megarl.buffer.store import Claim
from megarl.config.schema import RolloutConfig
from megarl.core.schema import Reward, Task, Trajectory, WeightsVersion
from megarl.engines.client.frames import Completion
from megarl.engines.client.gather import SampleRequest
from megarl.explore import workflows
from megarl.explore.agents.server import AgentServer, Session
from megarl.explore.recording.model import RenderedPrompt, RolloutModel, TokenLimits
from megarl.rewards import Verdict
from megarl.tasks import ChatTokenizer

TASK = Task("t", "s", ({"role": "user", "content": "Wie viel ist 12 + 3?"},), "", {"ground_truth": "15"})


class Model:
    """A gatherer that writes given texts, and keeps what it was asked; of a text ``…`` the end is missing.

    Args:
        seconds: Time that each text takes; 0 for those beyond. ``math.inf``: until another one is given, or ``go`` is
            set.
    """

    latest: Model
    """For agents, which get no other hold of it."""

    def __init__(self, tokenizer: ChatTokenizer, *texts: str, seconds: Sequence[float] = ()) -> None:
        self.tokenizer, self.texts, self.seconds = tokenizer, iter(texts), iter(seconds)
        self.requests: list[SampleRequest] = []
        self.given: list[str] = []
        self.go = threading.Event()  # an agent may be in another thread
        Model.latest = self

    async def asked(self, count: int = 1) -> None:
        """Wait until ``count`` requests have arrived."""
        while len(self.requests) < count:
            await asyncio.sleep(0.005)

    async def sample(self, request: SampleRequest) -> Completion:
        self.requests.append(request)
        text = next(self.texts, f"text {len(self.requests)}")
        if math.isinf(seconds := next(self.seconds, 0)):
            while not self.go.is_set():
                await asyncio.sleep(0.005)
        else:
            await asyncio.sleep(seconds)
        self.given.append(text)
        self.go.set()
        ids = self.tokenizer.response_ids(text)
        ids, reason = (ids[:-1], "length") if text.endswith("…") else (ids, "stop")
        return Completion(0, 0, ids, np.full(len(ids), -0.5, np.float32), reason, ())


async def judge(text: str, in_thinking: bool, by: str | None) -> Verdict:
    return Verdict(Reward(float(text == "15"), "ok" if text == "15" else "wrong"))


CLAIM = Claim("r", "train", 0, WeightsVersion(1, 1), "g", 0, 1, {}, TASK, "w", "t", 1)
"""A group of ``TASK``."""


def recorder(model: Model, limit: int = 4096) -> RolloutModel:
    prompt = RenderedPrompt.of(TASK, model.tokenizer)
    gatherer: Any = model
    return RolloutModel(CLAIM, 0, prompt, 7, gatherer, model.tokenizer, judge, TokenLimits(trajectory=limit))


def run_workflow_of(
    rollout: RolloutConfig, tokenizer: ChatTokenizer, recorded: RolloutModel, timeout_s: float = 60.0
) -> None:
    """Run the workflow of ``rollout`` on ``TASK``."""

    async def main() -> None:
        async with workflows.opened(rollout, tokenizer) as workflow:
            await workflow(TASK, recorded)

    asyncio.run(asyncio.wait_for(main(), timeout_s))


def trajectory(recorded: RolloutModel) -> Trajectory:
    return Trajectory("r", "t", "g", 0, 1, recorded.record.ordered(), Reward(0.0, "wrong"), cause=recorded.end.cause)


def play(model: Model, agent: Callable[[str], Awaitable[Any]], limit: int = 4096) -> RolloutModel:
    """An agent that is given the base URL of its session."""
    recorded = recorder(model, limit)

    async def main() -> None:
        async with AgentServer() as server, server.serving(Session(recorded, model.tokenizer, TASK)) as url:
            await agent(url)

    asyncio.run(asyncio.wait_for(main(), 30))
    return recorded


def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
