"""OpenAI's chat completions: requests read, responses written. Pure functions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.core.schema import Message
from megarl.explore.agents.request import (
    MAX_N,
    Asked,
    BadRequest,
    Fields,
    Repeated,
    Reply,
    content_of,
    count_field,
    messages_field,
    object_field,
    objects_field,
    text_field,
    uses_tools,
)

ROLES = {"developer": "system", "function": "tool"}
"""Roles of the protocol -> names in chat templates."""
KEPT = ("tool_call_id", "name", "reasoning_content")
"""Further message fields used by chat templates."""
LOST = ("function_call", "audio", "refusal")
"""Message fields with content that chat templates cannot render."""
FIELDS = Fields(
    read=frozenset({
        "messages", "tools", "tool_choice", "n", "max_tokens", "max_completion_tokens", "stream", "stream_options",
        "response_format", "chat_template_kwargs", "reasoning_effort",
    }),
    unused=frozenset({
        "temperature", "top_p", "seed", "model", "user", "metadata", "store", "service_tier", "safety_identifier",
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "priority", "request_id", "cache_salt",
        "session_id",
    }),
    neutral={
        "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "length_penalty": (1,),
        "top_k": (-1, 0), "min_p": (0,), "min_tokens": (0,), "ignore_eos": (False,), "use_beam_search": (False,),
        "logit_bias": ({},), "logprobs": (False,), "top_logprobs": (0,), "stop": ([], ""), "stop_token_ids": ([],),
        "bad_words": ([],), "parallel_tool_calls": (True,), "skip_special_tokens": (True,), "echo": (False,),
        "add_generation_prompt": (True,), "continue_final_message": (False,), "add_special_tokens": (False,),
        "include_stop_str_in_output": (False,), "include_reasoning": (True,), "documents": ([],),
        "return_token_ids": (False,), "functions": ([],), "modalities": (["text"],), "verbosity": ("medium",),
    },
)  # fmt: skip


def asked_of(body: Any, repeated: Repeated) -> Asked:
    """Read a request. ``temperature``, ``top_p`` and ``seed`` come from the job, never from the request.

    ``repeated``: cache of the session's converted messages. Raises BadRequest.
    """
    FIELDS.check(body)
    messages = messages_field(body)
    form = object_field(body.get("response_format") or {"type": "text"}, "response_format")
    if form.get("type") != "text":
        raise BadRequest("`response_format` is not supported while training; leave it out")
    object_field(body.get("stream_options") or {}, "stream_options")
    with_tools = uses_tools(body.get("tool_choice") or "auto")
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(objects_field(body.get("tools"), "tools"))]
    n = count_field(body, "n") or 1
    if n > MAX_N:
        raise BadRequest(f"`n` must be at most {MAX_N}, got {n}")
    max_tokens = count_field(body, "max_completion_tokens") or count_field(body, "max_tokens")
    template = dict(object_field(body.get("chat_template_kwargs") or {}, "chat_template_kwargs"))
    if body.get("reasoning_effort") is not None:
        template["reasoning_effort"] = text_field(body["reasoning_effort"], "reasoning_effort")
    return Asked(repeated.of(messages, message_of), tools if with_tools else (), n, max_tokens, template)


def message_of(message: Any) -> Message:
    """Convert a message into the form of chat templates. Raises BadRequest."""
    role = text_field(object_field(message, "messages[]").get("role"), "role")
    if lost := next((name for name in LOST if message.get(name)), None):
        raise BadRequest(f"`messages[].{lost}` would not be in the prompt; leave it out, or give it as content")
    shows = _image_of if role in ("user", "tool", "function") else None
    found: Message = {"role": ROLES.get(role, role), "content": content_of(message.get("content"), shows)}
    if calls := objects_field(message.get("tool_calls"), "tool_calls"):
        found["tool_calls"] = [_call(call) for call in calls]
    return found | {name: text_field(message[name], name) for name in KEPT if message.get(name) is not None}


def _image_of(part: Mapping[str, Any], name: str) -> str | None:
    """Return the base64 image of an ``image_url`` part; None for other parts. Raises BadRequest."""
    if part.get("type") != "image_url":
        return None
    return image_in(object_field(part.get("image_url"), f"{name}.image_url").get("url"), f"{name}.image_url.url")


def image_in(url: Any, name: str) -> str:
    """Return the base64 image of a ``data:`` URI. Raises BadRequest."""
    head, _, data = text_field(url, name).partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise BadRequest(f"`{name}` must be a data: URI in base64, since nothing is downloaded: {url:.40}")
    return data


def sent_back(reply: Reply) -> Message:
    """Return the assistant's message as a client sends it back."""
    return message_of(_written(reply))


def response_of(replies: Sequence[Reply], number: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``chat.completion`` of the responses to one request."""
    choices = [
        {"index": i, "message": _written(reply), "finish_reason": _reason(reply), "logprobs": None}
        for i, reply in enumerate(replies)
    ]
    head = {"id": number, "object": "chat.completion", "created": int(time.time()), "model": body.get("model", "")}
    return head | {"choices": choices, "usage": _usage(replies)}


def chunks_of(replies: Sequence[Reply], number: str, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the same as server-sent events. Each response is sent in one piece, once it is complete."""
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
        message["tool_calls"] = calls_of(reply)
    return message


def calls_of(reply: Reply) -> list[dict[str, Any]]:
    """Return the calls of a response, with their arguments as texts."""
    return [
        {**call, "function": {**call["function"], "arguments": _text(call["function"]["arguments"])}}
        for call in reply.calls
    ]


def _reason(reply: Reply) -> str:
    return "length" if reply.truncated else "tool_calls" if reply.calls else "stop"


def _usage(replies: Sequence[Reply]) -> dict[str, int]:
    prompt, completion = replies[0].prompt_tokens, sum(reply.completion_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _tool(tool: dict[str, Any], name: str) -> Mapping[str, Any]:
    function = object_field(tool.get("function"), f"{name}.function")
    text_field(function.get("name"), f"{name}.function.name")
    return tool


def _call(call: Mapping[str, Any]) -> Message:
    function = object_field(call.get("function"), "tool_calls[].function")
    name = text_field(function.get("name"), "tool_calls[].function.name")
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": name, "arguments": _parsed(function.get("arguments"))},
    }


def _parsed(arguments: Any) -> Any:
    """Parse arguments into an object, as chat templates expect; invalid JSON stays a text."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments) if arguments else {}
    except ValueError:
        return arguments


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
