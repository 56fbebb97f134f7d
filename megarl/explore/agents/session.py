"""Conversations of one agent with the rollout model, as turns of a trajectory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megarl.core.errors import DataError
from megarl.core.schema import Author, Message, Task, Turn
from megarl.explore.rewards.shape import opens_thinking
from megarl.explore.tasksets import ChatTokenizer
from megarl.explore.tasksets.turns import render_turns, turn_ids
from megarl.explore.tools import FORMATS, ToolCall, format_of


class TurnRecorder(Protocol):
    """Part of ``workflows.RolloutModel``."""

    @property
    def turns(self) -> Sequence[Turn]: ...
    @property
    def limit(self) -> int: ...
    def room_after(self, turn: int) -> int: ...
    def begin(self, token_ids: np.ndarray, *, opened: bool = False) -> Turn: ...
    def write(self, author: Author, token_ids: np.ndarray, *, after: int = -1, opened: bool = False) -> Turn: ...
    async def generate(self, *, after: int = -1, max_tokens: int | None = None) -> Turn: ...
    def text(self, turn: Turn) -> str: ...


class BadRequest(Exception):
    """A request that cannot be served, with a text for the agent's author."""

    def __init__(self, text: str, code: str = "invalid_request") -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Asked:
    """A request, whichever protocol it came by."""

    messages: Sequence[Message]
    """In the form of chat templates: texts as content, tool calls with their arguments as objects."""
    tools: Sequence[Mapping[str, Any]] = ()
    n: int = 1
    max_tokens: int | None = None


@dataclass(frozen=True)
class Reply:
    """One sampled response."""

    content: str
    calls: tuple[Message, ...]
    """Tool calls in the form of chat templates, each with an ``id``."""
    truncated: bool
    prompt_tokens: int
    completion_tokens: int

    @property
    def message(self) -> Message:
        """The assistant's message, as an agent sends it back."""
        message: Message = {"role": "assistant", "content": self.content}
        return message | ({"tool_calls": list(self.calls)} if self.calls else {})


class Session:
    """The rollout model in one trajectory, for an agent that sends whole conversations.

    A request that goes on from a response continues its turns: tokens that were sampled stay as they are. Any other
    one is a prompt of its own, rendered whole, and so another line of turns: a rewritten context, or a sub-agent.
    """

    def __init__(self, model: TurnRecorder, tokenizer: ChatTokenizer, task: Task) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._kwargs = dict(task.chat_template_kwargs)
        self._format = FORMATS.get(format_of(tokenizer.template) or "")
        self._known: dict[str, int] = {}
        """Conversations by their text -> index of their last turn."""
        self.full = False
        """A request had no room (``rollout.max_trajectory_tokens``)."""

    async def complete(self, asked: Asked) -> list[Reply]:
        """Sample ``n`` responses to a conversation. Raises BadRequest; EngineError as ``generate``."""
        if asked.tools and self._format is None:
            raise BadRequest("the model's chat template writes no tool calls that megarl can read; leave out `tools`")
        try:
            context = self._context(asked)
        except DataError as error:
            raise BadRequest(str(error)) from error
        prompt_tokens = self._length(context)
        turns = await asyncio.gather(
            *(self._model.generate(after=context, max_tokens=asked.max_tokens) for _ in range(asked.n))
        )
        return [self._reply(asked, turn, prompt_tokens) for turn in turns]

    def _context(self, asked: Asked) -> int:
        """Index of the turn that responses to a conversation follow. Raises BadRequest, DataError."""
        kwargs = self._kwargs | ({"tools": list(asked.tools)} if asked.tools else {})
        keys = [_key(asked.messages[:end], asked.tools) for end in range(len(asked.messages) + 1)]
        if (known := self._known.get(keys[-1])) is not None:
            return known
        end = next((k for k in range(len(asked.messages) - 1, 0, -1) if keys[k] in self._known), None)
        if end is None or (turn := self._continued(asked.messages[end:], self._known[keys[end]], kwargs)) is None:
            turn = self._begun(asked.messages, kwargs)
        self._known[keys[-1]] = turn
        return turn

    def _continued(self, messages: Sequence[Message], after: int, kwargs: Mapping[str, Any]) -> int | None:
        """Add messages after a response; None where they cannot follow it."""
        response = self._model.turns[after]
        if response.finish_reason != "stop" or any(message["role"] == "assistant" for message in messages):
            return None
        try:
            rendered = render_turns(self._tokenizer, messages, kwargs)
        except DataError:
            return None
        token_ids = turn_ids(self._tokenizer, rendered, int(response.token_ids[-1]))
        if len(token_ids) >= self._model.room_after(after):
            raise self._no_room(self._length(after) + len(token_ids))
        author: Author = "tool" if all(message["role"] == "tool" for message in messages) else "user"
        self._model.write(author, token_ids, after=after, opened=opens_thinking(rendered))
        return len(self._model.turns) - 1

    def _begun(self, messages: Sequence[Message], kwargs: Mapping[str, Any]) -> int:
        """Add a prompt that follows nothing."""
        rendered = self._tokenizer.render(messages, kwargs)
        token_ids = self._tokenizer.rendered_ids(rendered)
        if len(token_ids) >= self._model.limit:
            raise self._no_room(len(token_ids))
        self._model.begin(token_ids, opened=opens_thinking(rendered))
        return len(self._model.turns) - 1

    def _no_room(self, tokens: int) -> BadRequest:
        self.full = True
        return BadRequest(
            f"the context has {tokens} tokens, which leaves no room within rollout.max_trajectory_tokens="
            f"{self._model.limit}",
            "context_length_exceeded",
        )

    def _length(self, turn: int) -> int:
        return self._model.limit - self._model.room_after(turn)

    def _reply(self, asked: Asked, turn: Turn, prompt_tokens: int) -> Reply:
        number = next(i for i, one in enumerate(self._model.turns) if one is turn)
        content, calls = self._model.text(turn), list[ToolCall]()
        if asked.tools and self._format is not None:
            ended = turn.finish_reason == "stop"
            written = self._tokenizer.decode(turn.token_ids[:-1] if ended else turn.token_ids, special=True)
            before, found = self._format.parse(written)
            calls = [call for call in found if call.name]
            content = before if calls else content
        reply = Reply(
            content,
            tuple(_call(call, f"c{number:04d}{i:04d}") for i, call in enumerate(calls)),
            turn.finish_reason == "length",
            prompt_tokens,
            len(turn),
        )
        self._known[_key([*asked.messages, reply.message], asked.tools)] = number
        return reply


def _call(call: ToolCall, name: str) -> Message:
    """``name``: nine letters and digits, as Mistral's templates ask for."""
    arguments = call.text if call.arguments is None else call.arguments
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _key(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
    """Text of a conversation that is the same however an agent's library writes it."""
    return json.dumps([[_canonical(message) for message in messages], tools], sort_keys=True)


def _canonical(message: Message) -> list[Any]:
    calls = [
        [call.get("id"), call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls") or ()
    ]
    return [message["role"], message.get("content") or "", calls, message.get("tool_call_id")]
