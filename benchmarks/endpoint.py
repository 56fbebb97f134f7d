"""Trajectories of agents in flight in one explorer: its CPU for a request, and how long a response waits for it, by
their number. Real HTTP; the engine is a stand-in that responds after one to three seconds.

``python benchmarks/endpoint.py MODEL_DIR [--write]``; MODEL_DIR: an HF checkpoint with a tokenizer and chat template.
Agents run in a process of their own and send the whole conversation with each request, as clients do: turns of about 60
tokens and observations of as many. A figure that stays is a request whose cost does not grow with those beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import numpy as np
import page
from recording import TASK, Instant, judge

from megarl.buffer.store import Claim
from megarl.core.schema import WeightsVersion
from megarl.engines.client.frames import Completion
from megarl.engines.client.gather import SampleRequest
from megarl.explore.agents.server import AgentServer, Session
from megarl.explore.recording.model import RenderedPrompt, RolloutModel
from megarl.tasks import ChatTokenizer

IN_FLIGHT, TURNS = (64, 256, 1024), 6


class Slow(Instant):
    """An engine that takes one to three seconds; says when each response was there."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        super().__init__(tokenizer)
        self._dice, self.ready = Random(0), dict[str, float]()

    async def sample(self, request: SampleRequest) -> Completion:
        await asyncio.sleep(self._dice.uniform(1, 3))
        self.ready[f"{request.group} {request.turn}"] = time.time()
        return await super().sample(request)


async def agents(urls: list[str]) -> dict[str, float]:
    """When the response of each turn of each agent had come."""
    came: dict[str, float] = {}

    async def converse(client: aiohttp.ClientSession, number: int, url: str) -> None:
        messages: list[dict[str, Any]] = list(TASK.prompt)
        for turn in range(TURNS):
            async with client.post(f"{url}/v1/chat/completions", json={"messages": messages}) as answer:
                body = await answer.json()
            came[f"{number} {turn}"] = time.time()
            messages += [body["choices"][0]["message"], {"role": "user", "content": "an observation of " * 15}]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client, asyncio.TaskGroup() as tasks:
        for number, url in enumerate(urls):
            tasks.create_task(converse(client, number, url))
    return came


async def measured(tokenizer: ChatTokenizer, count: int) -> tuple[float, float, list[float]]:
    """(CPU seconds of the explorer for a request, seconds of all, seconds for which each response waited for it)."""
    engine: Any = Slow(tokenizer)
    async with AgentServer() as server, asyncio.TaskGroup() as tasks:
        urls: list[str] = []
        all_there, ended = asyncio.Event(), asyncio.Event()

        async def trajectory(number: int) -> None:
            claim = Claim("r", "train", 0, WeightsVersion(1, 1), str(number), 0, 1, {}, TASK, "w", "t", 1)
            prompt = RenderedPrompt.of(TASK, tokenizer)
            recorder = RolloutModel(claim, 0, prompt, number, engine, tokenizer, judge)
            async with server.serving(Session(recorder, tokenizer, TASK)) as url:
                urls.append(url)
                if len(urls) == count:
                    all_there.set()
                await ended.wait()
            assert len(recorder.record.ordered()) == 2 * TURNS

        for number in range(count):
            tasks.create_task(trajectory(number))
        await all_there.wait()
        cpu, began = time.process_time(), time.perf_counter()
        child = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--agents", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        out, _ = await child.communicate(json.dumps(urls).encode())
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - began
        ended.set()
    came = json.loads(out)
    assert came.keys() == engine.ready.keys() and len(came) == count * TURNS
    return cpu / len(came), seconds, [came[key] - engine.ready[key] for key in came]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="HF checkpoint")
    parser.add_argument("--write", action="store_true", help="also write the table into docs/benchmarks/endpoint.md")
    options = parser.parse_args()
    tokenizer = ChatTokenizer.open(Path(options.model))
    text = page.Text()
    text.say(
        f"| in flight | explorer's CPU a request | of {IN_FLIGHT[0]} | requests/s | a response waits, median | p99 |"
    )
    text.say("|---:|---:|---:|---:|---:|---:|")
    first = 0.0
    for count in IN_FLIGHT:
        cpu, seconds, waits = asyncio.run(measured(tokenizer, count))
        first = first or cpu
        median, p99 = np.percentile(waits, (50, 99))
        text.say(
            f"| {count:,} | {1e3 * cpu:.2f} ms | {cpu / first:.1f} × | {count * TURNS / seconds:,.0f} | "
            f"{1e3 * median:.0f} ms | {1e3 * p99:.0f} ms |"
        )
    if options.write:
        page.write("benchmarks/endpoint.md", str(text))


if __name__ == "__main__":
    if sys.argv[1:] == ["--agents"]:
        print(json.dumps(asyncio.run(agents(json.load(sys.stdin)))))
    else:
        main()
