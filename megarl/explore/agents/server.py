"""HTTP endpoint for agents on loopback, and the conversation of each agent as turns of a trajectory."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from aiohttp import web

from megarl.core.errors import DataError, PromptRefused
from megarl.core.schema import Author, Message, Task, Turn
from megarl.core.text import CLOSE, OPEN, as_written, opens_thinking, split_thought
from megarl.explore.agents import anthropic, openai, responses
from megarl.explore.agents.request import (
    Asked,
    BadRequest,
    Repeated,
    Reply,
    SentBack,
    bare,
    images_of,
    object_field,
    same_json,
)
from megarl.explore.recording.model import IMAGE_LIMITS, RolloutModel, calls_of
from megarl.tasks import ChatTokenizer
from megarl.tasks.templates.turns import exceeds, render_turns, turn_ids
from megarl.tasks.tools import ToolCall, written_by

NO_ROOM = "context_length_exceeded"
"""Error code of a refusal for lack of room, as agents' libraries expect."""
ROOM = "leaves no room within rollout.max_trajectory_tokens"
"""Part of that refusal's message."""
THINKING = "enable_thinking"
"""Option of chat templates that decides whether the model thinks."""
IN_LOOP = 2**16
"""Most characters of a text tokenised in the event loop; longer texts are tokenised in a thread."""


class Session:
    """The rollout model in one trajectory, for an agent that sends whole conversations.

    A request that continues a response extends its turns, so sampled tokens stay unchanged. Any other request is a new
    prompt, rendered whole, and starts another line of turns: a rewritten context, or a sub-agent.

    Samples belong to the session, not to the connection: a client's retry of the same request gets the sample in
    flight. Otherwise client timeouts would favour short responses. Samples without a receiver are counted in
    ``abandoned``.
    """

    def __init__(self, model: RolloutModel, tokenizer: ChatTokenizer, task: Task) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._kwargs = dict(task.chat_template_kwargs)
        self._format = written_by(tokenizer.template)
        self._known: dict[bytes, int] = {}
        """Digest of a conversation -> index of its last turn."""
        self._last: tuple[list[Message], list[bytes]] = [], []
        """Messages and digests of the last request, usually a prefix of the next one."""
        self.responses = responses.Responses()
        self.repeated = Repeated()
        """Cache of the last request's converted messages."""
        self._contexts = asyncio.Lock()
        self._open: set[asyncio.Task[list[Reply]]] = set()
        """Requests without a response yet."""
        self._left: dict[bytes, list[asyncio.Task[list[Reply]]]] = {}
        """Requests with a disconnected client, by the request's digest."""
        self._closed = False
        self.abandoned = 0
        """Number of requests without a waiting client when the session was closed."""

    async def complete(self, asked: Asked, sent_back: SentBack) -> list[Reply]:
        """Sample ``n`` responses to a conversation. Raises BadRequest; EngineError as ``generate``."""
        if self._closed:
            raise BadRequest("this session has ended", "not_found")
        if asked.tools and self._format is None:
            raise BadRequest("the model's chat template writes no tool calls that megarl can read; leave out `tools`")
        digests = self._digests(asked)
        request = digest_after(digests[-1], [asked.n, asked.max_tokens])
        if left := self._left.pop(request, []):
            work, *rest = left
            self._left |= {request: rest} if rest else {}
        else:
            work = self._begun_work(self._answered(asked, digests, sent_back))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():
                raise BadRequest("this session has ended", "not_found") from None
            self._left.setdefault(request, []).append(work)  # the client has gone
            raise

    async def count(self, asked: Asked) -> int:
        """Return the number of tokens of a conversation, rendered whole. Nothing is sampled or recorded.

        Raises BadRequest.
        """
        try:
            rendered = self._tokenizer.render(bare(asked.messages), self._options(asked))
        except (DataError, ValueError) as error:
            raise BadRequest(str(error)) from error
        token_ids = await asyncio.to_thread(self._tokenizer.rendered_ids, rendered)
        return self._model.record.length_of(token_ids, images_of(asked.messages))

    async def close(self) -> None:
        """Cancel all requests; later ones are not recorded."""
        self._closed = True
        left = {work for works in self._left.values() for work in works}
        self.abandoned = len(self._open | {work for work in left if not work.done() or work.exception() is None})
        for work in self._open:
            work.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _begun_work(self, work: Coroutine[Any, Any, list[Reply]]) -> asyncio.Task[list[Reply]]:
        task = asyncio.create_task(work)
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return task

    async def _answered(self, asked: Asked, digests: Sequence[bytes], sent_back: SentBack) -> list[Reply]:
        async with self._contexts:  # one at a time, so that a conversation is rendered once
            try:
                context = await self._context(asked, digests)
            except (DataError, ValueError) as error:
                raise BadRequest(str(error)) from error
            except RecursionError as error:
                raise BadRequest("a message or tool is nested too deeply") from error
        prompt_tokens = self._model.limits.trajectory - self._model.record.room_after(context)
        try:
            turns = await asyncio.gather(
                *(self._model.generate(after=context, max_tokens=asked.max_tokens) for _ in range(asked.n))
            )
        except PromptRefused as error:
            raise BadRequest(str(error)) from error
        replies = [self._reply(asked, turn, prompt_tokens) for turn in turns]
        for turn, reply in zip(turns, replies, strict=True):
            self._known[digest_after(digests[-1], _canonical(sent_back(reply)))] = self._index(turn)
        return replies

    def _digests(self, asked: Asked) -> list[bytes]:
        """Return the digests of the conversation up to each message, chained so that each message is hashed once.

        Raises BadRequest.
        """
        try:
            digests = [digest_after(b"", self._options(asked))]
            messages, known = self._last
            if known[:1] == digests:
                same = zip(asked.messages, messages, known[1:], strict=False)
                for message, before, digest in same:
                    if not same_json(message, before):
                        break
                    digests.append(digest)
            for message in asked.messages[len(digests) - 1 :]:
                digests.append(digest_after(digests[-1], _canonical(message)))
        except (TypeError, ValueError, RecursionError) as error:  # not valid JSON or UTF-8
            raise BadRequest(f"a message or tool cannot be written as JSON: {error}") from error
        self._last = list(asked.messages), digests
        return digests

    async def _context(self, asked: Asked, digests: Sequence[bytes]) -> int:
        """Return the index of the turn that responses to a conversation follow. Raises BadRequest, DataError."""
        if (known := self._known.get(digests[-1])) is not None:
            return known
        kwargs = self._options(asked)
        end = next((k for k in range(len(digests) - 2, 0, -1) if self._is_response(digests[k])), None)
        turn = None
        if end is not None:
            turn = await self._continued(asked.messages[end:], self._known[digests[end]], kwargs)
        if turn is None:
            turn = await self._begun(asked.messages, kwargs)
        self._known[digests[-1]] = turn
        return turn

    def _options(self, asked: Asked) -> dict[str, Any]:
        """Return the options of the chat template: the task's, then the request's, with its tools."""
        options = {**self._kwargs, **asked.template}
        if asked.thinking is not None and THINKING in self._tokenizer.template:
            options[THINKING] = asked.thinking
        return options | ({"tools": list(asked.tools)} if asked.tools else {})

    def _is_response(self, digest: bytes) -> bool:
        """Return True if a conversation ends with a response, not a prompt, of this session."""
        turn = self._known.get(digest)
        return turn is not None and self._model.turns[turn].author == "model"

    async def _continued(self, messages: Sequence[Message], after: int, kwargs: Mapping[str, Any]) -> int | None:
        """Add messages after a response; return None if they cannot follow it."""
        response = self._model.turns[after]
        if response.finish_reason != "stop" or any(message["role"] == "assistant" for message in messages):
            return None
        images = images_of(messages)
        try:
            rendered = render_turns(self._tokenizer, bare(messages), kwargs)
        except DataError:
            return None
        self._check_images(images, after)
        room = self._model.record.room_after(after)
        last = int(response.token_ids[-1])
        token_ids = await self._encoded(rendered, room, lambda: turn_ids(self._tokenizer, rendered, last))
        if (length := self._model.record.length_of(token_ids, images)) >= room:
            raise self._no_room(f"{self._model.limits.trajectory - room + length} tokens")
        author: Author = "tool" if all(message["role"] == "tool" for message in messages) else "user"
        self._model.write(author, token_ids, images=images, after=after, in_thinking=opens_thinking(rendered))
        return len(self._model.turns) - 1

    async def _begun(self, messages: Sequence[Message], kwargs: Mapping[str, Any]) -> int:
        """Add a prompt that follows nothing."""
        images = images_of(messages)
        self._check_images(images, None)
        rendered = self._tokenizer.render(bare(messages), kwargs)
        limit = self._model.limits.trajectory
        token_ids = await self._encoded(rendered, limit, lambda: self._tokenizer.rendered_ids(rendered))
        if (length := self._model.record.length_of(token_ids, images)) >= limit:
            raise self._no_room(f"{length} tokens")
        self._model.begin(token_ids, images=images, in_thinking=opens_thinking(rendered))
        return len(self._model.turns) - 1

    def _check_images(self, images: Sequence[bytes], after: int | None) -> None:
        """Raise BadRequest unless images have room after a turn, ValueError if the model takes no images."""
        if not self._model.record.takes_images(images, after):
            raise self._no_room(f"more images than {IMAGE_LIMITS}, or follows one that the model has written")

    async def _encoded(self, rendered: str, room: int, encode: Callable[[], np.ndarray]) -> np.ndarray:
        """Tokenise a text, in a thread if it is long, and only until it exceeds ``room``.

        Raises BadRequest.
        """
        if len(rendered) <= IN_LOOP:
            return encode()
        if await asyncio.to_thread(exceeds, self._tokenizer, rendered, room):
            raise self._no_room(f"more than {room} tokens")
        return await asyncio.to_thread(encode)

    def _no_room(self, what: str) -> BadRequest:
        return BadRequest(f"the context has {what}, which {ROOM}={self._model.limits.trajectory}", NO_ROOM)

    def _index(self, turn: Turn) -> int:
        turns = self._model.turns
        return next(i for i in range(len(turns) - 1, -1, -1) if turns[i] is turn)

    def _reply(self, asked: Asked, turn: Turn, prompt_tokens: int) -> Reply:
        content, calls = self._model.text(turn), list[ToolCall]()
        if asked.tools and self._format is not None:
            in_thinking = self._model.record.begins_in_thinking(turn)
            around, found = calls_of(self._tokenizer, turn, in_thinking, None, asked.tools)
            calls = [call for call in found if call.name]
            self._model.record.count_calls(turn, len(calls))
            unnamed = [call.text for call in found if not call.name]
            content = "\n".join(filter(None, [around, *unnamed])) if calls else content
        thought = None
        if asked.thinking:
            written = as_written(content, self._model.record.begins_in_thinking(turn))
            before, answer, further = split_thought(written)
            if before:
                thought, content = before.removeprefix(OPEN).removesuffix(CLOSE), answer + further
        number = self._index(turn)
        return Reply(
            content,
            thought,
            tuple(_call(call, f"c{number:04d}{i:04d}") for i, call in enumerate(calls)),
            turn.finish_reason != "stop",
            prompt_tokens,
            len(turn),
        )


def _call(call: ToolCall, name: str) -> Message:
    """Return a tool call; ``name``: nine letters and digits, as Mistral's templates require."""
    arguments = call.text if call.arguments is None else call.arguments
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def digest_after(before: bytes, value: Any) -> bytes:
    """Return the digest of a conversation with digest ``before`` extended by ``value``. Raises TypeError or ValueError
    for values that JSON cannot encode."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


def _canonical(message: Message) -> list[Any]:
    """Return a canonical form of a message, independent of the agent's library."""
    calls = [
        [call.get("id"), call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls") or ()
    ]
    others = [message.get(name) for name in ("tool_call_id", "name", "reasoning_content")]
    return [message["role"], message.get("content") or "", calls, *others]


log = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_BODY_BYTES = 64 * 2**20
"""Limit of a request: a trajectory's images in base64, and 20 MiB of text."""
STOP_S = 0.5
"""Grace period in seconds, applied twice, for requests when the server stops; their agents are already cancelled."""
MODEL = "megarl"
"""Name of the model in the list of models. Requests may use any name."""


class AgentServer:
    """Serves sessions. Use as an async context manager."""

    def __init__(self, socket: Path | None = None) -> None:
        """Args:
        socket: Path of an additional UNIX socket, for sandboxes without a network.
        """
        self._socket = socket
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._served = 0

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/{session}/v1/chat/completions", self._chat),
                web.post("/{session}/v1/responses", self._responses),
                web.post("/{session}/v1/messages", self._messages),
                web.post("/{session}/v1/messages/count_tokens", self._count_tokens),
                web.get("/{session}/v1/models", self._models),
            ]
        )
        # Cancel handlers of disconnected clients, so that sessions notice.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=STOP_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0)
        await site.start()
        if self._socket is not None:
            await web.UnixSite(self._runner, self._socket).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @asynccontextmanager
    async def serving(self, session: Session) -> AsyncIterator[str]:
        """Yield a session's unguessable base URL, without the ``/v1``; close the session afterwards."""
        name = secrets.token_urlsafe(16)
        self._sessions[name] = session
        try:
            yield f"http://{HOST}:{self._port}/{name}"
        finally:
            del self._sessions[name]
            await session.close()

    def _session(self, request: web.Request) -> Session:
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise BadRequest("this session has ended", "not_found")
        return session

    def _number(self, prefix: str) -> str:
        self._served += 1
        return f"{prefix}-{self._served}"

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            session, body = self._session(request), await _body(request)
            replies = await session.complete(openai.asked_of(body, session.repeated), openai.sent_back)
        except BadRequest as error:
            return _refused_by_openai(error)
        number = self._number("chatcmpl")
        if body.get("stream"):
            return await _stream(request, openai.chunks_of(replies, number, body))
        return web.json_response(openai.response_of(replies, number, body))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        try:
            session, body = self._session(request), await _body(request)
            given = session.responses.input_of(body)
            [reply] = await session.complete(responses.asked_of(body, given, session.repeated), responses.sent_back)
        except BadRequest as error:
            return _refused_by_openai(error)
        response = responses.response_of(reply, self._number("resp"), body)
        session.responses.keep(response, given)
        if body.get("stream"):
            return await _stream(request, responses.events_of(response))
        return web.json_response(response)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        try:
            session, body = self._session(request), await _body(request)
            [reply] = await session.complete(anthropic.asked_of(body, session.repeated), anthropic.sent_back)
        except BadRequest as error:
            return _refused_by_anthropic(error)
        number = self._number("msg")
        if body.get("stream"):
            return await _stream(request, anthropic.events_of(reply, number, body))
        return web.json_response(anthropic.response_of(reply, number, body))

    async def _count_tokens(self, request: web.Request) -> web.Response:
        try:
            session, body = self._session(request), await _body(request)
            return web.json_response({"input_tokens": await session.count(anthropic.counted_of(body, Repeated()))})
        except BadRequest as error:
            return _refused_by_anthropic(error)

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL}
        return web.json_response({"object": "list", "data": [model]})


async def _body(request: web.Request) -> dict[str, Any]:
    """Return the body of a request. Raises BadRequest before sampling, because clients retry after status 500."""
    try:
        return object_field(json.loads(await request.read()), "body")
    except web.HTTPRequestEntityTooLarge as error:
        raise BadRequest(f"a request of more than {MAX_BODY_BYTES // 2**20} MiB {ROOM}", NO_ROOM) from error
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body cannot be read: {error}") from error
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error


def _refused_by_openai(error: BadRequest) -> web.Response:
    content = {"message": str(error), "type": "invalid_request_error", "code": error.code}
    return web.json_response({"error": content}, status=400)


def _refused_by_anthropic(error: BadRequest) -> web.Response:
    content = {"type": "invalid_request_error", "message": str(error)}
    return web.json_response({"type": "error", "error": content}, status=400)


async def _stream(request: web.Request, events: Iterator[str]) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    await stream.write("".join(events).encode())
    await stream.write_eof()
    return stream
