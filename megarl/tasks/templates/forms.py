"""Conversations in other projects' formats, converted to chat messages ``{role, content}``.

- ShareGPT: ``{from: human | gpt | system | …, value}`` in the column ``conversations``, and a column ``system``
- Open-Reasoner-Zero (ORZ): a row is ``[{from: human, value}, {from: assistant, ground_truth: {value}}]``; in parquet
  its two messages are the columns ``0`` and ``1``
- Anthropic's HH-RLHF: a text of turns that begin with ``Human:`` and ``Assistant:`` after an empty line

Values in other forms are returned unchanged: the reader of the row refuses them by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's ``from`` -> role of a message, if they differ."""
SPEAKERS = (*ROLES, "system", "user", "assistant", "developer", "tool")
"""Every ``from`` of a message: ShareGPT's names and roles."""
CONVERSATION = "conversations"
PAIR = ("0", "1")
"""Columns of ORZ's two messages in parquet."""
COLUMNS = (CONVERSATION, "system", *PAIR)
"""Columns to read for these forms."""
TURN = re.compile(r"\n\n(Human|Assistant):")
OF_TURNS = {"Human": "user", "Assistant": "assistant"}


def is_conversation(value: Any) -> bool:
    """Return True for a list of messages in ShareGPT's or ORZ's form."""
    return isinstance(value, list) and bool(value) and all(_is_sharegpt(message) for message in value)


def as_messages(value: Any) -> Any:
    """Return a conversation as a list of messages ``{role, content}``. It may be ShareGPT's list, a single message or
    an HH-RLHF text."""
    if isinstance(value, dict) and (_is_sharegpt(value) or value.get("role") is not None):
        return [_message(value)]
    if isinstance(value, list):
        return [_message(message) for message in value]
    return transcript(value) if isinstance(value, str) and value.startswith("\n\nHuman:") else value


def transcript(text: str) -> list[dict[str, Any]]:
    """Return the messages of an HH-RLHF text, with contents stripped. A last assistant turn without text is dropped:
    the text is then a prompt."""
    _, *parts = TURN.split(text)
    turns = [
        {"role": OF_TURNS[speaker], "content": content.strip()}
        for speaker, content in zip(parts[::2], parts[1::2], strict=True)
    ]
    return turns[:-1] if turns and turns[-1] == {"role": "assistant", "content": ""} else turns


def with_conversations(
    names: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return (column names, rows) with a column ``conversations`` of chat messages if the file has one of these forms,
    and ``reward_model`` if ORZ's rows have a ground truth. Files in other forms are unchanged."""
    found = [dict(row) for row in rows]
    pairs = CONVERSATION not in names and any(_is_sharegpt(row.get(PAIR[0])) for row in found)
    if not pairs and CONVERSATION not in names:
        return list(names), found
    for row in found:
        if pairs:
            row[CONVERSATION] = [row.get(name) for name in PAIR]
        conversation, system = row.get(CONVERSATION), row.get("system")
        truth = _ground_truth(conversation)
        if truth is not None and row.get("reward_model") is None:
            row["reward_model"] = {"style": "rule", "ground_truth": truth}
        messages = as_messages(conversation)
        if isinstance(system, str) and system and isinstance(messages, list) and messages[:1] != []:
            first = messages[0].get("role") if isinstance(messages[0], dict) else None
            messages = messages if first == "system" else [{"role": "system", "content": system}, *messages]
        row[CONVERSATION] = messages
    added = [CONVERSATION] if pairs else []
    if "reward_model" not in names and any("reward_model" in row for row in found):
        added.append("reward_model")
        for row in found:
            row.setdefault("reward_model", None)
    return [*names, *added], found


def without_response(messages: Any) -> Any:
    """Return the messages without the assistant's last ones: the prompt of a task."""
    if not isinstance(messages, list):
        return messages
    last = len(messages)
    while last and isinstance(messages[last - 1], dict) and messages[last - 1].get("role") == "assistant":
        last -= 1
    return messages[:last]


def _is_sharegpt(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(speaker := message.get("from"), str):
        return False
    return message.get("role") is None and speaker.lower() in SPEAKERS


def _message(message: Any) -> Any:
    """Return a message with ``role`` and ``content``. ShareGPT's ``weight`` is dropped, since only the last message is
    learned."""
    if not _is_sharegpt(message):
        return message
    rest = {
        name: value
        for name, value in message.items()
        if name not in ("from", "value", "role", "content", "weight", "ground_truth")
    }
    speaker, value = message["from"], message.get("value")
    role = ROLES.get(speaker.lower(), speaker.lower())
    if speaker == "function_call" and isinstance(value, str):
        return {"role": role, "content": "", "tool_calls": _calls(value), **rest}
    return {"role": role, "content": value, **rest}


def _calls(text: str) -> Any:
    """Parse the calls of a ShareGPT message: JSON of one ``{name, arguments}`` or a list of them; other texts are
    unchanged."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    calls = found if isinstance(found, list) else [found]
    return [{"type": "function", "function": call} for call in calls]


def _ground_truth(conversation: Any) -> Any:
    """Return the ground truth in ORZ's assistant message; None without one."""
    last = conversation[-1] if isinstance(conversation, list) and conversation else None
    found = last.get("ground_truth") if isinstance(last, dict) else None
    return found.get("value") if isinstance(found, dict) else found
