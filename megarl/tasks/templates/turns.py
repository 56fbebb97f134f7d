"""Convert messages between a model's responses to token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megarl.core.errors import DataError
from megarl.core.schema import Message
from megarl.core.text import without_surrogates
from megarl.tasks.templates.template import Messages
from megarl.tasks.templates.tokenizer import PROBE, ChatTokenizer

PIECE = 2**14
"""Characters encoded per call to count tokens."""


def exceeds(tokenizer: ChatTokenizer, rendered: str, limit: int) -> bool:
    """Return True if a long rendered text surely has more than ``limit`` tokens; stops reading once that is certain.

    Counts by pieces; each border may add a token on either side. False for a text of one piece.
    """
    count = 0
    if len(rendered) <= max(PIECE, limit // 4):  # a character has at most four bytes, so at most four tokens
        return False
    for first in range(0, len(rendered), PIECE):
        count += max(0, len(tokenizer.rendered_ids(rendered[first : first + PIECE])) - 2)
        if count > limit:
            return True
    return False


def messages_of(role: str, texts: Sequence[str]) -> list[Message]:
    """Return messages of one role for :func:`render_turns`. Unpaired surrogates become question marks."""
    # some templates write the id of the call that a result belongs to; Mistral's id has nine letters and digits
    names: list[Message] = [{"tool_call_id": f"c{i:08d}"} if role == "tool" else {} for i in range(len(texts))]
    return [
        {"role": role, "content": without_surrogates(text), **name} for text, name in zip(texts, names, strict=True)
    ]


def render_turns(tokenizer: ChatTokenizer, messages: Messages, kwargs: Mapping[str, Any] | None = None) -> str:
    """Render the messages after a response, from the end of its text up to the start of the model's next response.

    Args:
        kwargs: Template options of the row.

    Raises:
        DataError: the template refuses a message or drops a part of it. A template that writes it as JSON (Llama 3.1:
            results of tools) drops nothing.
    """
    before = {"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}
    after = tokenizer.render([*before, *messages], kwargs).partition(PROBE)[2]
    for message in messages:
        for text in _texts(message["content"]):
            if not any(form.strip() in after for form in (text, json.dumps(text.strip(), ensure_ascii=False)[1:-1])):
                raise DataError(
                    f"the model's chat template drops a {message['role']} message after a response: {text[:60]!r}"
                )
    return after


def _texts(content: str | list[dict[str, Any]]) -> list[str]:
    """Return the texts of a message; its images are separate parts."""
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def turn_ids(tokenizer: ChatTokenizer, rendered: str, last: int) -> np.ndarray:
    """Return int32 [T]: ids of messages that ``render_turns`` has rendered, after a response that has ended.

    The token that ended the response is not repeated, even if the template writes another token there (gpt-oss:
    ``<|return|>``), or the message begins with it (GLM-4: ``<|user|>``).

    Args:
        last: Token that ended the response.
    """
    ids = tokenizer.rendered_ids(rendered)
    written = tokenizer.rendered_ids(tokenizer.suffix)
    end = next((i for i, token in enumerate(written) if token in tokenizer.eos_ids), None)
    if end is None and ids[0] == last:
        end = 0
    return ids if end is None else ids[end + 1 :]
