"""The explorer's side of the engines: it sends many prompts and yields finished samples one by one. Uses asyncio and
aiohttp."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence, Set
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Self

import aiohttp
import numpy as np

from megarl.core.errors import EngineClosed, EngineError, PromptRefused, RequestRefused, WeightsPassed
from megarl.core.schema import WeightsVersion
from megarl.engines.client.engine_choice import EngineChoice, WantedWeights
from megarl.engines.client.frames import Completion, Decoder, Failure, FrameError, StreamHeartbeat, pack_ids
from megarl.engines.client.names import bearer
from megarl.engines.fleet import EngineRow

HEARTBEAT_S = 5.0
"""Longest time in seconds between two frames of an engine; less if ``timeout_s`` is short."""
MAX_ERROR_BYTES = 2**16
"""Most bytes of an error's body that are read."""
ANSWER_S = 5.0
"""Timeout in seconds of an engine's state request."""


@dataclass(frozen=True)
class Prompt:
    """Token ids to sample ``n`` responses for. Sample j has a generator seeded with ``seed + j``. A ``greedy`` prompt
    is sampled at temperature 0."""

    token_ids: Sequence[int] | np.ndarray
    n: int = 1
    seed: int | None = None
    greedy: bool = False
    images: Sequence[bytes] = ()
    """Files of images, one for each placeholder among the ids as the chat template wrote it (not expanded)."""
    max_tokens: int | None = None
    """Most tokens of a sample, if lower than the request's limit."""
    routing_from: int | None = None
    """Index in ``token_ids`` from which expert ids are requested (``Completion.routing``); None requests none."""
    oldest: WeightsVersion | None = None
    """Weights of the last sampled token; older weights must not continue the response. None before a response."""
    home: str = ""
    """URL of the engine that may have the prompt's prefix in its cache; ``""`` for none."""


@dataclass(frozen=True)
class Sampling:
    """Sampling of all prompts of a request; temperature 0 is greedy. The end-of-sequence token always stops."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    oldest: WeightsVersion | None = None
    """Oldest weights that may sample, since an engine may have missed updates."""
    newest: WeightsVersion | None = None
    """Newest weights that may sample; set for evaluations."""
    routing: bool = False
    """True requests expert ids (``rollout.routing_replay``), except for greedy samples."""
    rollout: str = ""
    """Evaluation rollout with reserved engines; only these serve it, and they serve nothing else."""

    @property
    def wanted(self) -> WantedWeights:
        """Weights that may sample."""
        return WantedWeights(self.oldest, self.newest, self.rollout)

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


class StreamSilence:
    """Raises EngineError once an engine has generated no token, or completed no frame, for ``timeout_s``, excluding
    weight updates.

    Between frames it counts heartbeats, not seconds, because the caller may be slow.
    """

    def __init__(self, url: str, timeout_s: float, every_s: float, progressed: Callable[[], None]) -> None:
        self._url, self._timeout_s, self._every_s = url, timeout_s, every_s
        self._progressed = progressed
        self._tokens: int | None = None
        self._silent_s = 0.0
        self._frame_since: float | None = None

    def over(self) -> None:
        """Reset the silence after a sample."""
        self._silent_s = 0.0
        self._frame_since = None

    def read(self, decoder: Decoder) -> None:
        """Check the frame's time after a chunk whose records were read."""
        if not decoder.is_within_frame or self._frame_since is None:
            self._frame_since = time.monotonic() if decoder.is_within_frame else None
        elif time.monotonic() - self._frame_since > self._timeout_s:
            raise EngineError(
                f"the engine at {self._url} sent part of a frame and has not ended it for {self._timeout_s:g} s "
                f"(rollout.request_timeout_s={self._timeout_s:g}); see the end of its log"
            )

    def beat(self, heartbeat: StreamHeartbeat) -> None:
        self._frame_since = None
        before, self._tokens = self._tokens, heartbeat.tokens
        if before is None:
            return
        moved = heartbeat.tokens != before
        if moved:
            self._progressed()
        self._silent_s = 0.0 if moved or heartbeat.paused else self._silent_s + self._every_s
        if self._silent_s > self._timeout_s:
            raise EngineError(
                f"the engine at {self._url} is up, but has generated no token for {self._silent_s:g} s "
                f"(rollout.request_timeout_s={self._timeout_s:g}); see the end of its log"
            )


class EngineClient:
    """Sends each call to one engine. Use as an async context manager.

    Args:
        engines: Chooses the engine of each call.
        key: The job's key.
        timeout_s: Longest time in seconds without a generated token while samples are outstanding, excluding weight
            updates.
        progressed: Called when an engine has generated tokens since its last heartbeat.
    """

    def __init__(
        self, engines: EngineChoice, key: str, timeout_s: float = 300.0, progressed: Callable[[], None] = lambda: None
    ) -> None:
        self.engines = engines
        self._headers = bearer(key)
        self._timeout_s = timeout_s
        self._heartbeat_s = min(HEARTBEAT_S, timeout_s / 4)
        self._progressed = progressed
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
        """Yield every sample of every prompt once, in the order of their ends. Leaving early cancels the others.

        Raises:
            EngineError: the engine refuses all calls, or is down; samples already yielded stay valid. EngineClosed if
                its weights differ from its row's, or no engine has the weights now: retry later.
            RequestRefused: it refused the content of this call; PromptRefused: of one prompt; WeightsPassed: no engine
                will have the requested weights again.
        """
        sampling = replace(sampling, oldest=_oldest(prompts, sampling))
        missing = {(i, j) for i, prompt in enumerate(prompts) for j in range(prompt.n)}
        total = len(missing)
        engine = await self.engines.choose(sampling.wanted, prompts[0].home if prompts else "")
        url = engine.url
        try:
            with self.engines.asking(url, total) as gave:
                async for completion in self._stream(engine, prompts, sampling):
                    _check(url, completion, missing)
                    _check_version(url, completion, sampling)
                    missing.remove((completion.request, completion.index))
                    gave()
                    yield completion
            if missing:
                raise EngineError(
                    f"the engine at {url} ended its answer with {len(missing)} of {total} samples missing"
                )
        except RequestRefused:
            raise
        except EngineClosed as error:
            self.engines.refused(engine, error)
            raise
        except EngineError as error:
            self.engines.failed(url, error)
            raise

    async def are_updated(self) -> bool:
        """Return True while an engine is paused for new weights."""
        return any(await asyncio.gather(*(self._is_paused(row.url) for row in self.engines.fleet.present())))

    async def _is_paused(self, url: str) -> bool:
        assert self._session is not None, "EngineClient is used as an async context manager"
        try:
            async with asyncio.timeout(ANSWER_S), self._session.get(f"{url}/megarl/state") as answer:
                return bool((await answer.json())["paused"])
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError):
            return False

    async def _stream(
        self, engine: EngineRow, prompts: Sequence[Prompt], sampling: Sampling
    ) -> AsyncIterator[Completion]:
        assert self._session is not None, "EngineClient is used as an async context manager"
        url = engine.url
        body = {
            "start": engine.start,
            "prompts": [_body(prompt) for prompt in prompts],
            "sampling": sampling.parameters(),
            "heartbeat_s": self._heartbeat_s,
        }
        body |= {name: str(v) for name in ("oldest", "newest") if (v := getattr(sampling, name)) is not None}
        silence = StreamSilence(url, self._timeout_s, self._heartbeat_s, self._progressed)
        decoder = Decoder()
        try:
            async with self._session.post(f"{url}/megarl/generate", json=body) as answer:
                if answer.status != HTTPStatus.OK:
                    raise _refusal(url, answer.status, await _text(answer))
                async for chunk in answer.content.iter_any():
                    for record in decoder.feed(chunk):
                        if isinstance(record, StreamHeartbeat):
                            silence.beat(record)
                            continue
                        silence.over()
                        yield _completion(url, record)
                    silence.read(decoder)
                decoder.end()
        except FrameError as error:
            raise EngineError(f"the engine at {url} sent a broken stream: {error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise EngineError(f"the engine at {url} is gone or silent ({reason}); see the end of its log") from error


def _refusal(url: str, status: int, reason: str) -> EngineError:
    """Return the error for an engine's refusal."""
    kind = EngineError
    if status in (HTTPStatus.CONFLICT, HTTPStatus.SERVICE_UNAVAILABLE):
        kind = EngineClosed
    elif 400 <= status < 500:
        kind = RequestRefused
    return kind(f"the engine at {url} answered {status} to /megarl/generate: {reason}")


def _oldest(prompts: Sequence[Prompt], sampling: Sampling) -> WeightsVersion | None:
    """Return the oldest weights that may sample all of the prompts."""
    return max((v for v in (sampling.oldest, *(p.oldest for p in prompts)) if v is not None), default=None)


def _body(prompt: Prompt) -> dict[str, Any]:
    body: dict[str, Any] = {
        "token_ids": base64.b64encode(pack_ids(prompt.token_ids)).decode(),
        "n": prompt.n,
        "seed": prompt.seed,
        "greedy": prompt.greedy,
    }
    if prompt.max_tokens is not None:
        body["max_tokens"] = prompt.max_tokens
    if prompt.routing_from is not None:
        body["routing_from"] = prompt.routing_from
    images = [base64.b64encode(image).decode() for image in prompt.images]
    return body | ({"images": images} if images else {})


async def _text(answer: aiohttp.ClientResponse) -> str:
    """Return the first ``MAX_ERROR_BYTES`` of a body, for any encoding and length."""
    body = b""
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) >= MAX_ERROR_BYTES:
            break
    return body[:MAX_ERROR_BYTES].decode(errors="replace").strip()


def _check(url: str, sample: Completion, missing: Set[tuple[int, int]]) -> None:
    """Check that the sample is one of the ``missing`` and that its versions tile its tokens. Raises EngineError."""
    if (sample.request, sample.index) not in missing:
        raise EngineError(
            f"the engine at {url} sent sample {sample.index} of prompt {sample.request}, which was not asked for or "
            "came before"
        )
    edges = [0, *(edge for span in sample.versions for edge in (span.start, span.end)), len(sample.token_ids)]
    if sample.versions and (edges != sorted(edges) or edges[::2] != edges[1::2]):
        raise EngineError(
            f"the engine at {url} failed at prompt {sample.request}, sample {sample.index}: its versions do not tile "
            f"its {len(sample.token_ids)} tokens: {sample.versions}"
        )


def _check_version(url: str, sample: Completion, sampling: Sampling) -> None:
    """Raise EngineError for a sample of too old weights, WeightsPassed for one of too new weights."""
    oldest, newest = sampling.oldest, sampling.newest
    if oldest is None and newest is None:
        return
    for span in sample.versions:
        try:
            version = WeightsVersion.parse(span.version)
        except ValueError:  # weights of the model's files, never published
            version = WeightsVersion(0, 0)
        if oldest is not None and version < oldest:
            raise EngineError(f"the engine at {url} samples with weights {span.version}, which are older than {oldest}")
        if newest is not None and version > newest:
            raise WeightsPassed(
                f"the engine at {url} samples with weights {span.version}, which are newer than {newest}"
            )


def _completion(url: str, record: Completion | Failure) -> Completion:
    if isinstance(record, Completion):
        return replace(record, engine=url)
    text = f"the engine at {url} failed at prompt {record.request}, sample {record.index}: {record.message}"
    raise PromptRefused(text, record.request) if record.refused else EngineError(text)
