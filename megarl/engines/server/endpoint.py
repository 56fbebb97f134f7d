"""megarl's routes in vLLM's server, through its ``vllm.endpoint_plugins`` interface. Imported by the server only.

``POST /megarl/generate`` takes many prompts and streams one frame (``megarl.engines.client.frames``) for each sample as
it ends, with heartbeats in between. vLLM's ``/inference/v1/generate`` takes one prompt per request and either waits for
all n samples or sends a line per token.

``Gate`` refuses generation, with the reason, once a weight update has failed: the engine then has mixed weights.
Requests during an update wait in vLLM's pause and are not refused. While the KV cache sleeps it also refuses requests,
and delays a publication's ``/resume`` until the cache wakes, so that requests in vLLM stay paused.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import secrets
from argparse import Namespace
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMClientError, VLLMError
from vllm.inputs import EngineInput, TokensPrompt, tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

from megarl.core.pictures import decode
from megarl.core.schema import WeightsVersion, digest_of
from megarl.engines.client.control import failures
from megarl.engines.client.frames import (
    CONTENT_TYPE,
    Completion,
    Failure,
    StreamHeartbeat,
    VersionSpan,
    encode,
    unpack_ids,
)
from megarl.engines.client.names import PROVING, START, UNTIL_PUBLISHED, App, Receive, Scope, Send, record_phase
from megarl.engines.fleet import WeightsAsked, refusal
from megarl.engines.server.routing import ExpertLayers

_GENERATION_PREFIXES = ("/megarl/generate", "/inference/", "/v1/", "/generative_scoring", "/invocations")
_JOIN_PATH = "/init_weight_transfer_engine"
_UPDATE_PATHS = (_JOIN_PATH, "/start_weight_update", "/update_weights", "/finish_weight_update")
_KV_SLEEPS = "the engine's KV cache sleeps"
_PAUSE_PATH, _RESUME_PATH = "/pause", "/resume"
DRAFT_COUNTERS = {"drafted": "vllm:spec_decode_num_draft_tokens", "accepted": "vllm:spec_decode_num_accepted_tokens"}
"""Count -> its name among vLLM's metrics."""
_HELD_S = 0.05
"""Seconds between two checks for the end of a pause."""
_request_numbers = itertools.count()


class PromptBody(msgspec.Struct, frozen=True):
    """One prompt: ``n`` samples; sample j is seeded with ``seed + j`` when a seed is given. ``greedy``: at temperature
    0.

    ``token_ids``: little-endian int32 in base64.
    ``images``: files in base64, one for each placeholder among the ids; their frames also hold the expanded
        ``prompt_ids``.
    ``routing_from``: index of the first token whose expert ids are returned; None for none.
    """

    token_ids: bytes
    n: int = 1
    seed: int | None = None
    greedy: bool = False
    images: list[bytes] = []  # msgspec copies it
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    routing_from: Annotated[int, msgspec.Meta(ge=0)] | None = None


class GenerateBody(msgspec.Struct, frozen=True):
    """The body of ``POST /megarl/generate``; ``sampling``: keyword arguments of vLLM's SamplingParams. ``heartbeat_s``:
    the longest time without a frame.

    ``start``: start of the engine that was chosen; 0 for any. ``oldest``, ``newest``: bounds of the weights that may
        sample; None for none. 409 if the engine's start or weights do not match (``fleet.refusal``).
    """

    prompts: list[PromptBody]
    sampling: dict[str, Any]
    heartbeat_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    start: int = 0
    oldest: str | None = None
    newest: str | None = None

    @property
    def weights(self) -> WeightsAsked:
        """Return the required weights. Raises ValueError for an invalid version."""
        return WeightsAsked(self.start, _version(self.oldest), _version(self.newest))


@dataclass
class Progress:
    """Progress reported by the heartbeats of all calls."""

    engine: AsyncLLM
    ended: int = 0
    """Tokens of ended samples."""
    paused: bool = False
    """True from a pause request, which may wait for running samples, until generation resumes."""
    layers: ExpertLayers | None = None
    """None if the engine records no expert ids."""

    def heartbeat(self) -> bytes:
        """Return a heartbeat frame. Counts running samples' tokens on demand, so that no work is done per token."""
        running = [state.detokenizer for state in self.engine.output_processor.request_states.values()]
        tokens = sum(detokenizer.num_output_tokens() for detokenizer in running if detokenizer is not None)
        return encode(StreamHeartbeat(self.ended + tokens, self.paused))


class Endpoints:
    """vLLM's EndpointPlugin: the entry point ``megarl`` of group ``vllm.endpoint_plugins``."""

    name = "megarl"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.add_api_route("/megarl/generate", _generate, methods=["POST"])
        app.add_api_route("/megarl/refuse", _refuse, methods=["POST"])
        app.add_api_route("/megarl/asleep", _asleep, methods=["POST"])
        app.add_api_route("/megarl/state", _state, methods=["GET"])
        app.add_api_route("/megarl/drafts", _drafts, methods=["GET"])
        app.add_api_route("/megarl/queued", _queued, methods=["GET"])
        app.add_middleware(Gate, state=app.state)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        # Without a supervisor, a random number makes each start unique.
        state.megarl_start = int(os.environ.get(START) or secrets.randbits(48))
        state.megarl_workers = args.tensor_parallel_size * args.pipeline_parallel_size
        record_phase("load")
        layers = ExpertLayers.of(args.model) if args.enable_return_routed_experts else None
        state.megarl_progress = Progress(engine_client, layers=layers)
        state.megarl_asleep = state.megarl_resumes = False
        state.megarl_version = None
        state.megarl_refusing = (
            "the job's weights have not been published to this engine yet" if os.environ.get(UNTIL_PUBLISHED) else None
        )


class Gate:
    """ASGI middleware: 503 with the reason for every generation request while ``state.megarl_refusing`` is set; set
    from the start in a job's engine.

    It sets the reason when a step of a weight update fails, so that an engine refuses even if the trainer has died.
    Only ``POST /megarl/refuse`` with ``reason: null`` opens it again.

    It also refuses while ``state.megarl_asleep``, when the KV cache has no memory.
    """

    def __init__(self, app: App, state: State) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif _generates(scope) and (reason := _refusing(self._state)) is not None:
            await JSONResponse({"error": reason}, status_code=503)(scope, receive, send)
        elif scope["path"] == _RESUME_PATH and self._state.megarl_asleep:
            self._state.megarl_resumes = True
            await JSONResponse({"status": "resumes when its KV cache wakes"})(scope, receive, send)
        elif scope["path"] in _UPDATE_PATHS:
            await self._watched(scope, receive, send)
        elif scope["path"] in (_PAUSE_PATH, _RESUME_PATH):
            await self._pausing(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _pausing(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Track ``Progress.paused``, because the engine core does not reply while its workers receive weights."""
        progress: Progress = self._state.megarl_progress
        before, pausing = progress.paused, scope["path"] == _PAUSE_PATH

        async def follow(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                progress.paused = pausing if message["status"] == 200 else before
            await send(message)

        progress.paused = before or pausing
        self._state.megarl_resumes = False  # the last request counts
        await self._app(scope, receive, follow)

    async def _watched(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a step of a weight update, then query the workers for its outcome, which vLLM's reply does not
        include."""
        answer: list[MutableMapping[str, Any]] = []

        async def keep(message: MutableMapping[str, Any]) -> None:
            answer.append(message)

        failure: str | None = "no answer"
        try:
            await self._app(scope, receive, keep)
            failure = await self._failure(answer[0]["status"])
        finally:
            if failure is not None and scope["path"] != _JOIN_PATH:
                self._state.megarl_refusing = (
                    f"{scope['path']} failed: the engine's weights are incomplete until a weight update succeeds"
                )
        if failure and answer[0]["status"] == 200:
            await JSONResponse({"error": failure}, status_code=500)(scope, receive, send)
            return
        for message in answer:
            await send(message)

    async def _failure(self, status: int) -> str | None:
        if status != 200:
            return f"status {status}"
        engine: EngineClient = self._state.engine_client
        return failures(await engine.collective_rpc("megarl_outcome")) or None


def _generates(scope: Scope) -> bool:
    """Return True for requests that the gate may refuse."""
    return scope["path"].startswith(_GENERATION_PREFIXES) and (PROVING.encode(), b"1") not in scope["headers"]


async def _refuse(request: Request) -> JSONResponse:
    body, state = await request.json(), request.app.state
    state.megarl_refusing = body["reason"]
    if body["reason"] is None:
        state.megarl_version = body.get("version")
    return JSONResponse({"refusing": state.megarl_refusing})


async def _asleep(request: Request) -> JSONResponse:
    """Close the gate for the KV cache's sleep, or open it and resume if that was requested in between."""
    state = request.app.state
    state.megarl_asleep = (await request.json())["asleep"]
    if state.megarl_resumes and not state.megarl_asleep:
        state.megarl_resumes = False
        await state.engine_client.resume_generation()
        state.megarl_progress.paused = False
    return JSONResponse({"asleep": state.megarl_asleep})


def _refusing(state: State) -> str | None:
    """Return the reason why the gate is closed, or None."""
    reason: str | None = state.megarl_refusing
    return _KV_SLEEPS if reason is None and state.megarl_asleep else reason


async def _state(request: Request) -> JSONResponse:
    engine: EngineClient = request.app.state.engine_client
    version, paused = await asyncio.gather(engine.get_weight_version(), engine.is_paused())
    own = request.app.state
    return JSONResponse(
        {
            "version": version,
            "paused": paused,
            "refusing": _refusing(own),
            "start": own.megarl_start,
            "workers": own.megarl_workers,
        }
    )


async def _drafts(request: Request) -> JSONResponse:
    """Return the drafted and the accepted tokens since the engine's start (``rollout.speculative``)."""
    counted = {"drafted": 0, "accepted": 0}
    for metric in get_metrics_snapshot():
        for name in counted:
            if isinstance(metric, Counter) and metric.name == DRAFT_COUNTERS[name]:
                counted[name] += metric.value
    return JSONResponse(counted)


async def _queued(request: Request) -> JSONResponse:
    """Return JSON: True if vLLM has queued a request whose id contains ``name``; later calls then come after it."""
    requests = request.app.state.engine_client.output_processor.request_states
    return JSONResponse({"queued": any(request.query_params["name"] in taken for taken in requests)})


def sampling_params(settings: dict[str, Any]) -> SamplingParams:
    """Return the sampling parameters of one sample. Flat log-probs are lists of numbers; others take two objects per
    token."""
    return SamplingParams(
        **settings, logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


async def _generate(request: Request) -> Response:
    try:
        body = msgspec.json.decode(await request.body(), type=GenerateBody)
        sampled, greedy = map(sampling_params, (body.sampling, body.sampling | {"temperature": 0.0}))
        asked = body.weights
    except (msgspec.ValidationError, msgspec.DecodeError, TypeError, ValueError) as error:
        return JSONResponse({"error": str(error)}, status_code=400)
    state = request.app.state
    if (reason := refusal(asked, state.megarl_start, _version(state.megarl_version))) is not None:
        return JSONResponse({"error": reason}, status_code=409)
    return StreamingResponse(
        stream_frames(state.engine_client, state.megarl_progress, body, sampled, greedy), media_type=CONTENT_TYPE
    )


def _version(text: str | None) -> WeightsVersion | None:
    return None if text is None else WeightsVersion.parse(text)


async def stream_frames(
    engine: EngineClient, progress: Progress, body: GenerateBody, sampled: SamplingParams, greedy: SamplingParams
) -> AsyncIterator[bytes]:
    """Yield one frame for each sample, in the order of ends, and heartbeats. Leaving early aborts running samples."""
    frames: asyncio.Queue[bytes] = asyncio.Queue()
    number = next(_request_numbers)
    seen = {
        i: asyncio.create_task(_with_images(engine, prompt)) for i, prompt in enumerate(body.prompts) if prompt.images
    }
    tasks = [
        asyncio.create_task(
            _answer(
                engine,
                progress,
                prompt,
                seen.get(i),
                _seeded(greedy if prompt.greedy else sampled, prompt, j),
                (number, i, j),
                frames,
            )
        )
        for i, prompt in enumerate(body.prompts)
        for j in range(prompt.n)
    ]
    try:
        yield progress.heartbeat()  # baseline for later heartbeats
        remaining = len(tasks)
        while remaining:
            try:
                async with asyncio.timeout(body.heartbeat_s):
                    ready = [await frames.get()]
            except TimeoutError:
                yield progress.heartbeat()
                continue
            while not frames.empty():
                ready.append(frames.get_nowait())
            remaining -= len(ready)
            yield b"".join(ready)
    finally:
        for task in (*tasks, *seen.values()):
            task.cancel()


def _seeded(sampling: SamplingParams, prompt: PromptBody, j: int) -> SamplingParams:
    own = copy.copy(sampling)
    own.skip_clone = True  # avoids vLLM's deep copy, which costs more than the request
    if prompt.seed is not None:
        own.seed = prompt.seed + j
    if prompt.max_tokens is not None:
        own.max_tokens = min(prompt.max_tokens, own.max_tokens or prompt.max_tokens)
    if prompt.routing_from is not None:
        own.routed_experts_prompt_start = prompt.routing_from
    return own


async def _answer(
    engine: EngineClient,
    progress: Progress,
    prompt: PromptBody,
    seen: asyncio.Task[EngineInput] | None,
    sampling: SamplingParams,
    place: tuple[int, int, int],
    frames: asyncio.Queue[bytes],
) -> None:
    """Queue the frame of one sample, or of its failure."""
    number, i, j = place
    try:
        inputs = tokens_input(unpack_ids(prompt.token_ids)) if seen is None else await seen
        outputs = await _outputs(engine, progress, inputs, sampling, f"megarl-{number}-{i}-{j}")
        if not outputs:
            raise RuntimeError("vLLM ended the request without an output")
        finished = outputs[-1]  # FINAL_ONLY: the one output is the finished sample
        progress.ended += len(finished.outputs[0].token_ids)
        record = record_of(i, j, finished, expanded=seen is not None)
        routed = prompt.routing_from is not None
        if routed and isinstance(record, Completion) and record.finish_reason != "abort":
            record = replace(record, routing=_routing(progress.layers, finished.outputs[0].routed_experts))
        frames.put_nowait(encode(record))
    except Exception as error:
        refused = isinstance(error, VLLMClientError | ValueError)
        frames.put_nowait(encode(Failure(i, j, f"{type(error).__name__}: {error}", refused)))
        if not isinstance(error, VLLMError | ValueError):
            raise  # for the log; the client already has its frame


async def _outputs(
    engine: EngineClient, progress: Progress, inputs: EngineInput, sampling: SamplingParams, request: str
) -> list[RequestOutput]:
    """Return the outputs of a request. Later versions of vLLM refuse requests during a pause; they wait here, as within
    vLLM 0.32."""
    while True:
        paused = progress.paused
        try:
            return [output async for output in engine.generate(inputs, sampling, request)]
        except VLLMError as error:
            if not _is_unavailable(error) or not (paused or progress.paused):
                raise
        while progress.paused:
            await asyncio.sleep(_HELD_S)


def _is_unavailable(error: BaseException | None) -> bool:
    """Return True for status 503 of the error or one of its causes."""
    statuses = []
    while error is not None:
        statuses += [getattr(error, "status_code", None), getattr(error, "http_status", None)]
        error = error.__cause__
    return HTTPStatus.SERVICE_UNAVAILABLE in statuses


def record_of(i: int, j: int, finished: RequestOutput, *, expanded: bool) -> Completion | Failure:
    """Return the record of the ended sample ``j`` of request ``i``. ``expanded``: include the prompt's ids with
    expanded images. Raises RuntimeError if log-probs and sampled tokens do not match."""
    output = finished.outputs[0]
    if output.finish_reason == "error":
        return Failure(i, j, "finish reason error", refused=False)
    token_ids, flat = list(output.token_ids), output.logprobs
    if flat.token_ids != token_ids:
        raise RuntimeError(
            f"vLLM gave log-probs of {len(flat.token_ids)} other tokens than the {len(token_ids)} sampled ones"
        )
    return Completion(
        request=i,
        index=j,
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.array(flat.logprobs, dtype=np.float32),
        finish_reason=output.finish_reason,
        versions=tuple(VersionSpan(span.version, span.start, span.end) for span in output.weight_versions or ()),
        prompt_ids=np.array(finished.prompt_token_ids, dtype=np.int32) if expanded else None,
        computed=digest_of(np.array([*finished.prompt_token_ids, *token_ids], dtype=np.int32)),
    )


def _routing(layers: ExpertLayers | None, ids: np.ndarray | None) -> np.ndarray:
    """Return expert ids in the form of frames. Raises ValueError if the engine records none."""
    if layers is None or ids is None:
        raise ValueError("the engine records no expert ids; start it with --enable-return-routed-experts")
    return layers.of_engine(ids)


async def _with_images(engine: EngineClient, prompt: PromptBody) -> EngineInput:
    """Compute a prompt with images by vLLM, once for all its samples: images' vectors, and placeholders repeated for
    them.

    Raises ValueError if an image cannot be decoded or there are fewer placeholders than images.
    """
    images = await asyncio.to_thread(lambda: [decode(image) for image in prompt.images])
    request = TokensPrompt(prompt_token_ids=unpack_ids(prompt.token_ids), multi_modal_data={"image": images})
    try:
        # Bypass vLLM's image cache: for an image in two prompts it may omit the data of the first request to arrive,
        # which then fails with "cache drift".
        [inputs] = await engine.renderer.render_cmpl_async([request], skip_mm_cache=True)
    except MemoryError:
        raise
    except Exception as error:  # in the model's processor, before any request reached the engine
        raise ValueError(f"{len(images)} images do not fit the prompt: {error}") from error
    return inputs
