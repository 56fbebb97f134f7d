"""The game of ``experiment=guess`` as an agent, of which every fifth run fails in one of 20 ways."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import Any

import openai

from tests.loop.fault_kinds import EXCEPTIONS, EveryFifth

KINDS = (*EXCEPTIONS, asyncio.CancelledError(), "text", "score", "left", "timeout")
RESULTS = {"text": "good", "score": {"acc": True}}
GIVEN_UP = "not waited for|given up|asked the model for no response"
"""By whether the request had arrived, and had been answered, when the agent went on."""
WORDS = {"text": "returned no reward", "score": "without 'score'", "left": GIVEN_UP, "timeout": GIVEN_UP}
"""In the log, of those that are no exceptions."""
faults = EveryFifth(KINDS)
client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", timeout=3600.0, max_retries=0)
left = set[asyncio.Task[Any]]()


async def run(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> Any:
    """Play one game; the score is 1 where the number was found."""
    fault, fails = faults.next()
    model = client.with_options(base_url=base_url)
    number, messages = int(metadata["ground_truth"]), prompt
    for _ in range(metadata["extra_info"]["tries"]):
        if fails and fault in ("left", "timeout"):
            return await given_up(model, messages, request_kwargs, fault)
        response = await model.chat.completions.create(messages=messages, **request_kwargs)
        if isinstance(fault, BaseException):
            raise fault
        if fails:
            return RESULTS[fault]
        choice = response.choices[0]
        guesses = re.findall(r"-?\d+", choice.message.content)
        if not guesses or int(guesses[-1]) == number or choice.finish_reason != "stop":
            return float(bool(guesses) and int(guesses[-1]) == number)
        reply = "higher" if int(guesses[-1]) < number else "lower"
        messages += [choice.message, {"role": "user", "content": reply}]
    return 0.0


async def given_up(model: Any, messages: Any, request_kwargs: Any, kind: str) -> str:
    """Return before the response has come: the request is left behind, or its client has timed out.

    The result is no reward, for the case that the response was faster.
    """
    wait_s = 0.01 * (1 + faults.given % 30)
    timeout = 3600.0 if kind == "left" else wait_s
    request = model.chat.completions.create(messages=messages, **request_kwargs, n=64, timeout=timeout)
    if kind == "left":
        task = asyncio.create_task(request)
        left.add(task)
        task.add_done_callback(left.discard)
        await asyncio.sleep(wait_s)
    else:
        with suppress(openai.APITimeoutError):
            await request
    return "given up"
