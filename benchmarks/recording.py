"""Time and memory of recording an agent's conversation, by its number of turns, with a stand-in engine that answers at
once: all that the explorer does for a request but HTTP.

``python benchmarks/recording.py MODEL_DIR [--write]``; MODEL_DIR: an HF checkpoint with a tokenizer and chat template.
Each turn has a response and an observation of about 60 tokens each. The figure is linear if a turn's cost stays.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
import tracemalloc
from typing import Any

import numpy as np
import page

from megarl.buffer.store import Claim
from megarl.core.schema import Reward, Task, WeightsVersion
from megarl.engines.client.frames import Completion
from megarl.engines.client.gather import SampleRequest
from megarl.explore.agents import openai
from megarl.explore.agents.server import Session
from megarl.explore.recording.model import RenderedPrompt, RolloutModel
from megarl.rewards import Verdict
from megarl.tasks import ChatTokenizer

TURNS = (16, 64, 128, 256)
ROUNDS = 7
TASK = Task("task", "benchmark", ({"role": "user", "content": "Begin."},), "", {"ground_truth": ""})


class Instant:
    """An engine that has every response at once."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._ids = tokenizer.response_ids("a word of " * 20)

    async def sample(self, request: SampleRequest) -> Completion:
        logprobs = np.full(len(self._ids), -0.5, np.float32)
        return Completion(0, 0, self._ids, logprobs, "stop", ())


async def judge(text: str, in_thinking: bool, by: str | None) -> Verdict:
    return Verdict(Reward(0.0, "wrong"))


async def converse(tokenizer: ChatTokenizer, turns: int) -> tuple[float, float]:
    """(seconds of all requests, seconds of the longest)."""
    claim = Claim("r", "train", 0, WeightsVersion(1, 1), "g", 0, 1, {}, TASK, "w", "t", 1)
    engine: Any = Instant(tokenizer)
    recorder = RolloutModel(claim, 0, RenderedPrompt.of(TASK, tokenizer), 7, engine, tokenizer, judge)
    session = Session(recorder, tokenizer, TASK)
    messages: list[Any] = list(TASK.prompt)
    seconds = []
    for number in range(turns):
        body = {"messages": [dict(message) for message in messages]}
        start = time.perf_counter()
        [reply] = await session.complete(openai.asked_of(body, session.repeated), openai.sent_back)
        seconds.append(time.perf_counter() - start)
        messages += [
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": f"{number}: " + "an observation of " * 15},
        ]
    assert len(recorder.record.ordered()) == 2 * turns
    return sum(seconds), max(seconds)


def peak_bytes(tokenizer: ChatTokenizer, turns: int) -> int:
    tracemalloc.start()
    asyncio.run(converse(tokenizer, turns))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="HF checkpoint")
    parser.add_argument("--write", action="store_true", help="also write the table into docs/benchmarks/recording.md")
    options = parser.parse_args()
    tokenizer = ChatTokenizer.open(options.model)
    asyncio.run(converse(tokenizer, TURNS[0]))  # warm
    text = page.Text()
    text.say("| turns | trajectory | a turn | longest request | against 16 turns | peak memory |")
    text.say("|---|---|---|---|---|---|")
    first = 0.0
    for turns in TURNS:
        found = [asyncio.run(converse(tokenizer, turns)) for _ in range(ROUNDS)]
        total, longest = (statistics.median(values) for values in zip(*found, strict=True))
        first = first or total
        text.say(
            f"| {turns} | {1e3 * total:.1f} ms | {1e3 * total / turns:.2f} ms | {1e3 * longest:.1f} ms "
            f"| {total / first:.1f} × | {peak_bytes(tokenizer, turns) / 2**20:.1f} MiB |"
        )
    if options.write:
        page.write("benchmarks/recording.md", str(text))


if __name__ == "__main__":
    main()
