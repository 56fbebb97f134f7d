"""OpenAI's responses: requests read, responses written, and those of a session kept for ``previous_response_id``."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.core.schema import Message
from megarl.explore.agents import openai
from megarl.explore.agents.request import (
    Asked,
    BadRequest,
    Fields,
    Repeated,
    Reply,
    content_of,
    count_field,
    object_field,
    objects_field,
    text_field,
    uses_tools,
)

FIELDS = Fields(
    read=frozenset({
        "input", "instructions", "tools", "tool_choice", "max_output_tokens", "stream", "previous_response_id",
        "reasoning", "text",
    }),
    unused=frozenset({
        "temperature", "top_p", "model", "user", "metadata", "store", "service_tier", "safety_identifier",
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "stream_options", "max_tool_calls",
    }),
    neutral={
        "parallel_tool_calls": (True,), "truncation": ("disabled",), "background": (False,), "top_logprobs": (0,),
        "include": ([], ["reasoning.encrypted_content"]),
    },
)  # fmt: skip
TEXTS = ("input_text", "output_text", "text")


class Responses:
    """The responses of a session, which later requests name instead of sending them back."""

    def __init__(self) -> None:
        self._items: dict[str, list[Any]] = {}

    def input_of(self, body: Mapping[str, Any]) -> list[Any]:
        """Return the items of a request's input, after those of ``previous_response_id``. Raises BadRequest."""
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else objects_field(given, "input")
        before = body.get("previous_response_id")
        if before is None:
            return items
        if before not in self._items:
            raise BadRequest(f"`previous_response_id`={before!r:.60} is no response of this session", "not_found")
        return [*self._items[before], *items]

    def keep(self, response: Mapping[str, Any], given: Sequence[Any]) -> None:
        """Keep a response, with the input that it answers."""
        self._items[response["id"]] = [*given, *response["output"]]


def asked_of(body: Any, given: Sequence[Any], repeated: Repeated) -> Asked:
    """Read a request. ``temperature`` and ``top_p`` come from the job, never from the request.

    Args:
        given: Items of the input, from :meth:`Responses.input_of`.
        repeated: Cache of the session's converted items.

    Raises BadRequest.
    """
    FIELDS.check(body)
    if not given:
        raise BadRequest("`input` must be a text, or a list with at least one item")
    form = object_field(object_field(body.get("text") or {}, "text").get("format") or {"type": "text"}, "text.format")
    if form.get("type") != "text":
        raise BadRequest("`text.format` is not supported while training; leave it out")
    with_tools = uses_tools(body.get("tool_choice") or "auto")
    messages = list(_joined(itertools.chain.from_iterable(repeated.of(given, _messages))))
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": text_field(body["instructions"], "instructions")})
    if not messages or messages[-1]["role"] == "assistant":
        raise BadRequest(
            "the last item is the assistant's; a response that has ended cannot be continued while training. Add a "
            "message of the user, or the output of a call"
        )
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(objects_field(body.get("tools"), "tools"))]
    effort = object_field(body.get("reasoning") or {}, "reasoning").get("effort")
    template = {} if effort is None else {"reasoning_effort": text_field(effort, "reasoning.effort")}
    count = count_field(body, "max_output_tokens")
    return Asked(messages, tools if with_tools else (), 1, count, template)


def sent_back(reply: Reply) -> Message:
    """Return the assistant's message as a client sends it back."""
    [message] = _joined(itertools.chain.from_iterable(map(_messages, _output(reply, ""))))
    return message


def response_of(reply: Reply, number: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``response`` of a reply."""
    counts = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}
    usage = counts | {
        "total_tokens": sum(counts.values()),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return {
        "id": number,
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if reply.truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if reply.truncated else None,
        "error": None,
        "model": body.get("model", ""),
        "output": _output(reply, number),
        "usage": usage,
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
        "parallel_tool_calls": True,
        **{
            name: body.get(name)
            for name in ("instructions", "metadata", "previous_response_id", "temperature", "top_p")
        },
    }


def events_of(response: Mapping[str, Any]) -> Iterator[str]:
    """Yield a response as server-sent events, each item in one piece."""
    numbers = itertools.count()

    def event(kind: str, **value: Any) -> str:
        found = {"type": f"response.{kind}", "sequence_number": next(numbers), **value}
        return f"event: {found['type']}\ndata: {json.dumps(found)}\n\n"

    begun = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for i, item in enumerate(response["output"]):
        at = {"output_index": i, "item_id": item["id"]}
        if item["type"] == "message":
            [part] = item["content"]
            begun = {**item, "status": "in_progress", "content": []}
            yield event("output_item.added", output_index=i, item=begun)
            yield event("content_part.added", **at, content_index=0, part={**part, "text": ""})
            yield event("output_text.delta", **at, content_index=0, delta=part["text"], logprobs=[])
            yield event("output_text.done", **at, content_index=0, text=part["text"], logprobs=[])
            yield event("content_part.done", **at, content_index=0, part=part)
        else:
            arguments = item["arguments"]
            yield event("output_item.added", output_index=i, item={**item, "status": "in_progress", "arguments": ""})
            yield event("function_call_arguments.delta", **at, delta=arguments)
            yield event("function_call_arguments.done", **at, name=item["name"], arguments=arguments)
        yield event("output_item.done", output_index=i, item=item)
    yield event("incomplete" if response["status"] == "incomplete" else "completed", response=response)


def _output(reply: Reply, number: str) -> list[dict[str, Any]]:
    """Return the items of a response."""
    status = "incomplete" if reply.truncated else "completed"
    items: list[dict[str, Any]] = []
    if reply.content or not reply.calls:
        part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg-{number}", "role": "assistant", "status": status, "content": [part]}
        items.append(message)
    for call in openai.calls_of(reply):
        name = {"id": f"fc-{call['id']}", "call_id": call["id"]}
        items.append({"type": "function_call", **name, **call["function"], "status": "completed"})
    return items


def _messages(item: Any) -> list[Message]:
    """Convert an item of the input into messages of chat templates. Raises BadRequest."""
    kind = object_field(item, "input[]").get("type") or "message"
    if kind == "message":
        role = text_field(item.get("role"), "role")
        return [{"role": openai.ROLES.get(role, role), "content": _content(item.get("content"))}]
    if kind == "function_call":
        call = {"id": item.get("call_id"), "function": {name: item.get(name) for name in ("name", "arguments")}}
        return [openai.message_of({"role": "assistant", "content": None, "tool_calls": [call]})]
    if kind == "function_call_output":
        number = text_field(item.get("call_id"), "call_id")
        return [{"role": "tool", "content": _content(item.get("output")), "tool_call_id": number}]
    if kind == "reasoning" and not (item.get("content") or item.get("encrypted_content") or item.get("summary")):
        return []
    raise BadRequest(f"items of type {kind!r:.40} are not supported in `input`; leave them out")


def _content(content: Any) -> Any:
    """Convert a content into the form of chat templates. Raises BadRequest."""
    if not isinstance(content, list):
        return content_of(content)
    parts = [object_field(part, f"content[{i}]") for i, part in enumerate(content)]
    texts = [part | {"type": "text"} if part.get("type") in TEXTS else part for part in parts]
    return content_of(texts, _image_of)


def _image_of(part: Mapping[str, Any], name: str) -> str | None:
    """Return the base64 image of an ``input_image`` part; None for other parts. Raises BadRequest."""
    if part.get("type") != "input_image":
        return None
    return openai.image_in(part.get("image_url"), f"{name}.image_url")


def _joined(messages: Iterator[Message]) -> Iterator[Message]:
    """Yield messages; the assistant's text and the calls that follow it are one message."""
    last: Message | None = None
    for message in messages:
        if last is not None and last["role"] == message["role"] == "assistant" and not message["content"]:
            last = {**last, "tool_calls": [*last.get("tool_calls", ()), *message["tool_calls"]]}
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last


def _tool(tool: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Convert a tool into the form of chat templates. Raises BadRequest."""
    if tool.get("type") != "function":
        raise BadRequest(f"`{name}` must be a function, got type {tool.get('type')!r:.40}: nothing else is run here")
    text_field(tool.get("name"), f"{name}.name")
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}
