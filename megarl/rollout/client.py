"""The explorer's side of the engines: many prompts in, finished samples out, one by one. asyncio and aiohttp."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import aiohttp
import numpy as np

from megarl.errors import EngineError, RequestRefused
from megarl.rollout.auth import bearer
from megarl.schema import FinishReason

LEFT_OUT_S = 5.0
"""How long an engine that failed is asked nothing while others live: one that is dead has the fewest unfinished samples of all."""


class VersionSpan(NamedTuple):
    """Response tokens ``[start, end)`` that weights of this name sampled (``default``: those of the model's files)."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Prompt:
    """Token ids to answer ``n`` times. Sample j draws from a generator of its own, seeded with ``seed + j``. A ``greedy`` one
    is answered at temperature 0, whatever the request's is."""

    token_ids: Sequence[int] | np.ndarray
    n: int = 1
    seed: int | None = None
    greedy: bool = False
    images: Sequence[bytes] = ()
    """Files of images, one for each placeholder among the ids as the chat template wrote it (not expanded)."""


@dataclass(frozen=True)
class Sampling:
    """How all prompts of a request are answered; temperature 0 is greedy. The end-of-sequence token always stops."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def parameters(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's SamplingParams."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop_token_ids": list(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
        }


@dataclass(frozen=True, eq=False)
class Completion:
    """One finished sample, exactly as the engine sampled it."""

    request: int
    """Index of its prompt in the call."""
    index: int
    """0 .. n-1 within its prompt."""
    token_ids: np.ndarray
    """int32 [R], with the end-of-sequence token when that ended it."""
    logprobs: np.ndarray
    """float32 [R], of the distribution sampled from (temperature, top_p and top_k applied)."""
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    """Tile [0, R); empty when no token was sampled."""
    prompt_ids: np.ndarray | None = None
    """int32 [P]; of a prompt with images the ids that the engine computed, placeholders expanded. None for other prompts."""


class EngineClient:
    """Sends each call to the engine with the fewest unfinished samples, of those that have not just failed. Use as an async context
    manager.

    Args:
        urls: Engine servers, all with the same weights.
        key: The job's key.
        timeout_s: Longest silence of an engine while samples are outstanding.
    """

    def __init__(self, urls: Sequence[str], key: str, timeout_s: float = 300.0) -> None:
        self._outstanding = dict.fromkeys(urls, 0)
        self._left_out = dict.fromkeys(urls, 0.0)
        """Until when."""
        self._headers = bearer(key)
        self._timeout = aiohttp.ClientTimeout(total=None, sock_read=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout, connector=connector)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        """Yields every sample of every prompt once, in the order in which they end. Leaving early aborts the others.

        Raises:
            EngineError: the engine refuses all calls, or is gone; samples already yielded stay good.
            RequestRefused: it refused this call, or a prompt of it, for what is in it.
        """
        total = sum(prompt.n for prompt in prompts)
        now = time.monotonic()
        url = min(self._outstanding, key=lambda url: (max(now, self._left_out[url]), self._outstanding[url]))
        self._outstanding[url] += total
        left = total
        try:
            async for completion in self._stream(url, prompts, sampling):
                left -= 1
                self._outstanding[url] -= 1
                yield completion
            if left:
                raise EngineError(f"the engine at {url} ended its answer with {left} of {total} samples missing")
        except RequestRefused:
            raise
        except EngineError:
            self._left_out[url] = time.monotonic() + LEFT_OUT_S
            raise
        finally:
            self._outstanding[url] -= left

    async def _stream(self, url: str, prompts: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Completion]:
        assert self._session is not None, "EngineClient is used as an async context manager"
        body = {
            "prompts": [_body(prompt) for prompt in prompts],
            "sampling": sampling.parameters(),
        }
        try:
            async with self._session.post(f"{url}/megarl/generate", json=body) as answer:
                if answer.status != 200:
                    said = (await answer.text()).strip()
                    kind = RequestRefused if 400 <= answer.status < 500 else EngineError
                    raise kind(f"the engine at {url} answered {answer.status} to /megarl/generate: {said}")
                async for line in answer.content:
                    yield _completion(url, json.loads(line))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise EngineError(
                f"the engine at {url} is gone or silent ({reason}); its log has its last words"
            ) from error


def _body(prompt: Prompt) -> dict[str, Any]:
    body = {"token_ids": [int(t) for t in prompt.token_ids], "n": prompt.n, "seed": prompt.seed, "greedy": prompt.greedy}
    images = [base64.b64encode(image).decode() for image in prompt.images]
    return body | ({"images": images} if images else {})


def _completion(url: str, record: dict[str, Any]) -> Completion:
    if "error" in record or record["finish_reason"] == "error":
        place = f"prompt {record['request']}, sample {record['index']}"
        kind = RequestRefused if record.get("refused") else EngineError
        raise kind(f"the engine at {url} failed at {place}: {record.get('error', 'finish reason error')}")
    prompt_ids = record.get("prompt_ids")
    return Completion(
        request=record["request"],
        index=record["index"],
        token_ids=np.asarray(record["token_ids"], dtype=np.int32),
        logprobs=np.asarray(record["logprobs"], dtype=np.float32),
        finish_reason=record["finish_reason"],
        versions=tuple(VersionSpan(*span) for span in record["versions"]),
        prompt_ids=None if prompt_ids is None else np.asarray(prompt_ids, dtype=np.int32),
    )
