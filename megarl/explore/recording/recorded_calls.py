"""Tool calls in a turn of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megarl.core.errors import DataError
from megarl.core.schema import Turn
from megarl.core.thoughts import OPEN, as_written
from megarl.tasks import ChatTokenizer
from megarl.tasks.tools import FORMATS, ToolCall, written_by


def calls_of(
    tokenizer: ChatTokenizer, turn: Turn, in_thinking: bool, form: str | None, tools: Iterable[Mapping[str, Any]]
) -> tuple[str, list[ToolCall]]:
    """Return a turn's text around its tool calls, including the thought, and the calls. A call inside the thought is
    text.

    Args:
        in_thinking: The turn begins inside a thought.
        form: One of ``FORMATS``; None for the chat template's.
        tools: JSON schemas of the tools, which give arguments their types.

    Raises DataError if the chat template's format of calls is unknown.
    """
    found = written_by(tokenizer.template) if form is None else FORMATS[form]
    if found is None:
        raise DataError("the model's chat template writes no tool calls that megarl can read")
    written = turn.token_ids[:-1] if turn.finish_reason == "stop" else turn.token_ids
    content, calls = found.parse(as_written(tokenizer.with_calls(written), in_thinking), tools)
    return content.removeprefix(OPEN) if in_thinking else content, calls
