"""Anthropic's messages: requests read, responses written. Pure functions."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from megarl.core.schema import Message
from megarl.core.text import CLOSE, OPEN
from megarl.explore.agents.request import (
    Asked,
    BadRequest,
    Fields,
    Repeated,
    Reply,
    content_of,
    count_field,
    joined,
    messages_field,
    object_field,
    objects_field,
    text_field,
    uses_tools,
)

FIELDS = Fields(
    read=frozenset({"messages", "system", "max_tokens", "tools", "tool_choice", "stream", "thinking"}),
    unused=frozenset({"temperature", "top_p", "top_k", "model", "metadata", "service_tier", "cache_control"}),
    neutral={"stop_sequences": ([],), "mcp_servers": ([],), "betas": ([],)},
)
SIGNATURE = "megarl"
"""Signature of thoughts. Clients send it back, and nobody reads it."""


def asked_of(body: Any, repeated: Repeated) -> Asked:
    """Read a request. ``temperature``, ``top_p`` and ``top_k`` come from the job, never from the request.

    ``repeated``: cache of the session's converted messages. Raises BadRequest.
    """
    FIELDS.check(body)
    given = messages_field(body)
    how = object_field(body.get("tool_choice") or {"type": "auto"}, "tool_choice")
    with_tools = uses_tools(how.get("type"))
    if how.get("disable_parallel_tool_use"):
        raise BadRequest("`tool_choice.disable_parallel_tool_use` cannot be enforced while training; leave it out")
    messages: list[Message] = [{"role": "system", "content": content_of(body["system"])}] if body.get("system") else []
    messages += itertools.chain.from_iterable(repeated.of(given, _messages))
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(objects_field(body.get("tools"), "tools"))]
    max_tokens = count_field(body, "max_tokens")
    if max_tokens is None:
        raise BadRequest("`max_tokens` must be a positive integer; it is missing")
    return Asked(messages, tools if with_tools else (), 1, max_tokens, thinking=_thinking(body))


def counted_of(body: Any, repeated: Repeated) -> Asked:
    """Read a request for the number of its tokens, as :func:`asked_of`; ``max_tokens`` is not needed."""
    return asked_of({**object_field(body, "body"), "max_tokens": 1}, repeated)


def _thinking(body: Mapping[str, Any]) -> bool | None:
    """Return whether a request asks for thoughts; None if it does not say. Raises BadRequest."""
    if body.get("thinking") is None:
        return None
    thinking = object_field(body["thinking"], "thinking")
    if (kind := thinking.get("type")) not in ("enabled", "adaptive", "disabled"):
        raise BadRequest(f"`thinking.type` must be enabled, adaptive or disabled, got {kind!r:.40}")
    count_field(thinking, "budget_tokens")
    return kind != "disabled"


def sent_back(reply: Reply) -> Message:
    """Return the assistant's message as a client sends it back."""
    [message] = _messages({"role": "assistant", "content": list(_blocks(reply))})
    return message


def response_of(reply: Reply, number: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the protocol's ``message`` of a response."""
    reason = "max_tokens" if reply.truncated else "tool_use" if reply.calls else "end_turn"
    return {
        "id": number,
        "type": "message",
        "role": "assistant",
        "model": body.get("model", ""),
        "content": list(_blocks(reply)),
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
    }


def events_of(reply: Reply, number: str, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield ``response_of`` as server-sent events, each block in one piece."""
    whole = response_of(reply, number, body)
    usage = whole["usage"]
    begun = whole | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
    yield _event("message_start", {"message": begun})
    for i, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty, deltas = block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
        elif block["type"] == "thinking":
            empty = block | {"thinking": "", "signature": ""}
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": SIGNATURE},
            ]
        else:
            empty = block | {"input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        yield _event("content_block_start", {"index": i, "content_block": empty})
        for delta in deltas:
            yield _event("content_block_delta", {"index": i, "delta": delta})
        yield _event("content_block_stop", {"index": i})
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", {"delta": end, "usage": {"output_tokens": usage["output_tokens"]}})
    yield _event("message_stop", {})


def _event(kind: str, value: Mapping[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **value})}\n\n"


def _blocks(reply: Reply) -> Iterator[dict[str, Any]]:
    if reply.thought is not None:
        yield {"type": "thinking", "thinking": reply.thought, "signature": SIGNATURE}
    if reply.content or not reply.calls:
        yield {"type": "text", "text": reply.content}
    for call in reply.calls:
        arguments = call["function"]["arguments"]
        value = arguments if isinstance(arguments, dict) else {"text": arguments}
        yield {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": value}


def _messages(message: Any) -> list[Message]:
    """Convert one message into chat-template messages: each tool result becomes a separate message. Raises
    BadRequest."""
    if object_field(message, "messages[]").get("role") not in ("user", "assistant"):
        raise BadRequest(f"`role` of a message must be user or assistant, got {message.get('role')!r:.40}")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else objects_field(content, "content")
    parts, found, calls = list[dict[str, str]](), list[Message](), list[Message]()
    for i, block in enumerate(blocks):
        kind, name = block.get("type"), f"content[{i}]"
        if kind == "text":
            parts.append({"type": "text", "text": text_field(block.get("text"), f"{name}.text")})
        elif kind == "thinking" and message["role"] == "assistant":
            thought = text_field(block.get("thinking"), f"{name}.thinking")
            parts.append({"type": "text", "text": f"{OPEN}{thought}{CLOSE}"})
        elif message["role"] == "user" and (image := _image_of(block, name)) is not None:
            parts.append({"type": "image", "image": image})
        elif kind == "tool_use":
            function = {
                "name": text_field(block.get("name"), f"{name}.name"),
                "arguments": object_field(block.get("input"), f"{name}.input"),
            }
            calls.append({"id": text_field(block.get("id"), f"{name}.id"), "type": "function", "function": function})
        elif kind == "tool_result":
            number = text_field(block.get("tool_use_id"), f"{name}.tool_use_id")
            found.append(
                {"role": "tool", "content": content_of(block.get("content"), _image_of), "tool_call_id": number}
            )
        else:
            raise BadRequest(f"`{name}`: blocks of type {kind!r:.40} are not supported")
    content = joined(parts)
    if message["role"] == "assistant":
        return [{"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}]
    return [*found, {"role": "user", "content": content}] if content or not found else found


def _image_of(block: Mapping[str, Any], name: str) -> str | None:
    """Return the base64 image of an ``image`` block; None for other blocks. Raises BadRequest."""
    if block.get("type") != "image":
        return None
    source = object_field(block.get("source"), f"{name}.source")
    if source.get("type") != "base64":
        raise BadRequest(f"`{name}.source` must be of type base64, since nothing is downloaded: {source!r:.60}")
    return text_field(source.get("data"), f"{name}.source.data")


def _tool(tool: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    function = {
        "name": text_field(tool.get("name"), f"{name}.name"),
        "parameters": object_field(tool.get("input_schema"), f"{name}.input_schema"),
    }
    if tool.get("description"):
        function["description"] = text_field(tool["description"], f"{name}.description")
    return {"type": "function", "function": function}
