"""Anthropic's messages: requests read, responses written. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megarl.core.schema import Message
from megarl.explore.agents.openai import text_of
from megarl.explore.agents.session import Asked, BadRequest, Reply

REFUSED = ("stop_sequences", "mcp_servers", "thinking")


def asked_of(body: Any) -> Asked:
    """Read a request. ``temperature``, ``top_p`` and ``top_k`` are the job's, whatever the request has.

    Raises BadRequest.
    """
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise BadRequest("the body must be an object with `messages`")
    for name in REFUSED:
        if body.get(name) and body[name] != {"type": "disabled"}:
            raise BadRequest(f"`{name}` is not supported while training; leave it out")
    choice = (body.get("tool_choice") or {"type": "auto"}).get("type")
    if choice not in ("auto", "none"):
        raise BadRequest(f"`tool_choice`={choice!r} cannot be enforced while training; set it to auto or none")
    messages: list[Message] = [{"role": "system", "content": text_of(body["system"])}] if body.get("system") else []
    for message in body["messages"]:
        messages += _messages(message)
    tools = () if choice == "none" else tuple(_tool(tool) for tool in body.get("tools") or ())
    max_tokens = body.get("max_tokens")
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise BadRequest(f"`max_tokens` must be a positive integer, got {max_tokens!r:.40}")
    return Asked(messages, tools, 1, max_tokens)


def response_of(reply: Reply, number: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """``message`` of a response."""
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
    """The same as server-sent events, each block in one piece."""
    whole = response_of(reply, number, body)
    usage = whole["usage"]
    begun = whole | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
    yield _event("message_start", {"message": begun})
    for i, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _event("content_block_start", {"index": i, "content_block": empty})
        yield _event("content_block_delta", {"index": i, "delta": delta})
        yield _event("content_block_stop", {"index": i})
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", {"delta": end, "usage": {"output_tokens": usage["output_tokens"]}})
    yield _event("message_stop", {})


def _event(kind: str, value: Mapping[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **value})}\n\n"


def _blocks(reply: Reply) -> Iterator[dict[str, Any]]:
    if reply.content or not reply.calls:
        yield {"type": "text", "text": reply.content}
    for call in reply.calls:
        arguments = call["function"]["arguments"]
        value = arguments if isinstance(arguments, dict) else {"text": arguments}
        yield {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": value}


def _messages(message: Any) -> list[Message]:
    """One message as those of a chat template: results of tools are messages of their own. Raises BadRequest."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
        raise BadRequest(f"a message must have the role user or assistant, got {message!r:.80}")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or any(not isinstance(block, dict) for block in blocks):
        raise BadRequest(f"the content of a message must be a text or blocks, got {content!r:.80}")
    text, found, calls = "", list[Message](), list[Message]()
    for block in blocks:
        if block.get("type") == "text":
            text += block["text"]
        elif block.get("type") == "tool_use":
            function = {"name": block["name"], "arguments": block["input"]}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif block.get("type") == "tool_result":
            result = text_of(block.get("content"))
            found.append({"role": "tool", "content": result, "tool_call_id": block["tool_use_id"]})
        else:
            raise BadRequest(f"blocks of type {block.get('type')!r} are not supported")
    if message["role"] == "assistant":
        return [{"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}]
    return [*found, {"role": "user", "content": text}] if text or not found else found


def _tool(tool: Any) -> Mapping[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("input_schema"), dict):
        raise BadRequest(f"a tool must have `name` and `input_schema`, got {tool!r:.80}")
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}
