"""OpenAI's chat completions: requests read, responses written. Pure functions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.core.schema import Message
from megarl.explore.agents.session import Asked, BadRequest, Reply

ROLES = {"developer": "system", "function": "tool"}
"""Roles of the protocol that chat templates know under another name."""
REFUSED = ("stop", "logit_bias", "logprobs", "functions", "function_call", "audio", "prediction")
"""Settings that would change which tokens are sampled, or ask for what is not recorded."""
ZERO = ("frequency_penalty", "presence_penalty")


def asked_of(body: Any) -> Asked:
    """Read a request. ``temperature``, ``top_p`` and ``seed`` are the job's, whatever the request has.

    Raises BadRequest.
    """
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise BadRequest("the body must be an object with `messages`")
    for name in REFUSED:
        if body.get(name):
            raise BadRequest(f"`{name}` is not supported while training; leave it out")
    for name in ZERO:
        if body.get(name):
            raise BadRequest(f"`{name}`={body[name]} is not supported while training; set it to 0")
    if (form := body.get("response_format")) and form.get("type") != "text":
        raise BadRequest("`response_format` is not supported while training; leave it out")
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise BadRequest(f"`tool_choice`={choice!r} cannot be enforced while training; set it to auto or none")
    tools = () if choice == "none" else tuple(body.get("tools") or ())
    n = _count(body, "n") or 1
    max_tokens = _count(body, "max_completion_tokens") or _count(body, "max_tokens")
    return Asked([message_of(message) for message in body["messages"]], tools, n, max_tokens)


def message_of(message: Any) -> Message:
    """A message in the form of chat templates. Raises BadRequest."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"a message must be an object with `role`, got {message!r:.80}")
    role = ROLES.get(message["role"], message["role"])
    found: Message = {"role": role, "content": text_of(message.get("content"))}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in calls]
    return found | {name: message[name] for name in ("tool_call_id", "name") if message.get(name)}


def text_of(content: Any) -> str:
    """Text of a content, which may come in parts. Raises BadRequest."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or any(not isinstance(p, dict) or p.get("type") != "text" for p in content):
        raise BadRequest("the content of a message must be a text, or parts of type text")
    return "".join(part["text"] for part in content)


def response_of(replies: Sequence[Reply], number: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """``chat.completion`` of some responses to one request."""
    choices = [
        {"index": i, "message": _written(reply), "finish_reason": _reason(reply), "logprobs": None}
        for i, reply in enumerate(replies)
    ]
    head = {"id": number, "object": "chat.completion", "created": int(time.time()), "model": body.get("model", "")}
    return head | {"choices": choices, "usage": _usage(replies)}


def chunks_of(replies: Sequence[Reply], number: str, body: Mapping[str, Any]) -> Iterator[str]:
    """The same as server-sent events. A response comes in one piece: it was whole before the first byte is sent."""
    head = {
        "id": number,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": body.get("model", ""),
    }
    for i, reply in enumerate(replies):
        delta = _written(reply)
        for place, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = place
        yield _event(head | {"choices": [{"index": i, "delta": delta, "finish_reason": None}]})
        yield _event(head | {"choices": [{"index": i, "delta": {}, "finish_reason": _reason(reply)}]})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield _event(head | {"choices": [], "usage": _usage(replies)})
    yield "data: [DONE]\n\n"


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _written(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if reply.calls else "")}
    if reply.calls:
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _text(call["function"]["arguments"])}}
            for call in reply.calls
        ]
    return message


def _reason(reply: Reply) -> str:
    return "length" if reply.truncated else "tool_calls" if reply.calls else "stop"


def _usage(replies: Sequence[Reply]) -> dict[str, int]:
    prompt, completion = replies[0].prompt_tokens, sum(reply.completion_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _call(call: Any) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"a tool call must have `function.name`, got {call!r:.80}")
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": _parsed(function.get("arguments"))},
    }


def _parsed(arguments: Any) -> Any:
    """Arguments as an object, as chat templates expect them; a text that is none stays one."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments) if arguments else {}
    except ValueError:
        return arguments


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _count(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise BadRequest(f"`{name}` must be a positive integer, got {value!r:.40}")
    return value
