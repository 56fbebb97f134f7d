"""Tool-call formats of model families, and their detection from a chat template.

Sources: the families' chat templates; vLLM 0.32 ``tool_parsers`` reads the same formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.core.text import split_thought
from megarl.tasks.tools.call_formats import (
    Found,
    Parameters,
    ToolCall,
    deepseek_calls,
    function_calls,
    glm4_calls,
    invoke_calls,
    json_calls,
    llama3_calls,
    mistral_calls,
    named_json_calls,
    parameters_of,
    python_calls,
)


@dataclass(frozen=True)
class ToolFormat:
    """Tool-call format of a model family."""

    marker: re.Pattern[str]
    """Pattern in the chat templates of the family."""
    start: re.Pattern[str]
    """Start of the first call in an answer."""
    calls: Callable[[str, Parameters], Found]
    """Parses calls in the text from ``start`` on. JSON values have types; XML values get the schemas' types."""

    def parse(self, text: str, tools: Iterable[Mapping[str, Any]] = ()) -> tuple[str, list[ToolCall]]:
        """Split a response, special tokens included, into the text around its calls and the calls.

        Args:
            text: As from ``thoughts.as_written``; a call inside a thought is text.
            tools: JSON schemas of the tools, as chat templates take them.
        """
        thought, answer, further = split_thought(text)
        found = self.start.search(answer)
        if found is None:
            return text, []
        calls, rest = self.calls(answer[found.start() :], parameters_of(tools))
        if not calls:
            return text, []
        before = (thought + answer[: found.start()]).rstrip()
        return "\n".join(part for part in (before, rest.strip(), further) if part), calls


def _format(marker: str, start: str, calls: Callable[[str, Parameters], Found]) -> ToolFormat:
    return ToolFormat(re.compile(marker), re.compile(start), calls)


FORMATS = {
    "gpt_oss": _format(
        r"<\|channel\|>commentary", r"<\|start\|>functions\.", named_json_calls("<|start|>", "<|call|>")
    ),
    "deepseek_v3": _format("<｜tool▁call▁begin｜>", "<｜tool▁calls?▁begin｜>", deepseek_calls),
    "kimi_k2": _format(
        r"<\|tool_call_begin\|>",
        r"<\|tool_calls?_(?:section_)?begin\|>",
        named_json_calls("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
    ),
    "minimax_m2": _format("<invoke name=", r"(?:<minimax:tool_call>\s*)?<invoke name=", invoke_calls),
    "qwen3_coder": _format("<function=", r"(?:<(?:seed:)?tool_call>\s*)?<function=", function_calls),
    "glm4": _format("<arg_key>", "<tool_call>", glm4_calls),
    "olmo3": _format("<function_calls>", "<function_calls>", python_calls),
    "hunyuan": _format("<tool_calls>", "<tool_calls>", json_calls("<tool_calls>", "</tool_calls>")),
    "hermes": _format("<tool_call>", "<tool_call>", json_calls("<tool_call>", "</tool_call>")),
    "granite": _format(r"<\|tool_call\|>", r"<\|tool_call\|>", json_calls("<|tool_call|>", "<|/tool_call|>")),
    "mistral_v3": _format(r"\[TOOL_CALLS\]", r"\[TOOL_CALLS\]", mistral_calls),
    "llama3": _format(
        r"<\|python_tag\|>|\"parameters\": dictionary", r"^\s*(<\|python_tag\|>\s*\{|\{\s*\"name\")", llama3_calls
    ),
}
"""Formats by their name in ``rollout.tool_format``, more specific ones first. Seed-OSS writes calls as ``qwen3_coder``,
SmolLM3, EXAONE 4 and ERNIE 4.5 as ``hermes``, Phi-4-mini as ``granite``."""


def format_of(template: str) -> str | None:
    """Return the name of the format that a chat template uses, or None if it uses none of ``FORMATS``."""
    return next((name for name, known in FORMATS.items() if known.marker.search(template)), None)


def written_by(template: str) -> ToolFormat | None:
    """Return the format that a chat template uses; None as ``format_of``."""
    return FORMATS.get(format_of(template) or "")
