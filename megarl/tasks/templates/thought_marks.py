"""Marks of thoughts other than ``<think>`` and ``</think>``, rewritten to these two for all readers of responses.

Sources: chat templates of Seed-OSS, Magistral and Granite 3; OpenAI's harmony format for gpt-oss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from megarl.core.text import CLOSE, OPEN


class ThoughtMarks(NamedTuple):
    """Marks around the thoughts of a model family."""

    tokens: frozenset[str]
    """Special tokens that ``common`` reads."""
    common: Callable[[str], str]
    """Rewrites a response, its ``tokens`` included, to one with thoughts between ``<think>`` and ``</think>``."""


def _replaced(opening: str, closing: str) -> ThoughtMarks:
    return ThoughtMarks(frozenset((opening, closing)), lambda text: text.replace(opening, OPEN).replace(closing, CLOSE))


_PART = re.compile(r"<\|(?:start|end|call|return|message)\|>")
_RECIPIENT = re.compile(r"\bto=(functions\.[^\s<]+)")


def _of_harmony(text: str) -> str:
    """Rewrite messages of channels: ``analysis`` is thought, a message to a function stays a call, others are text.

    A call becomes ``<|start|>functions.NAME<|message|>ARGUMENTS<|call|>``. The header of a truncated message is
    dropped.
    """
    parts, header, opened, at = list[str](), "", False, 0
    for mark in [*_PART.finditer(text), None]:
        first, piece = at == 0, text[at : mark.start() if mark else len(text)]
        at, kind = (mark.end(), mark.group()) if mark else (len(text), "")
        if opened:
            parts.append(_harmony_message(header, piece, kind))
            header, opened = "", False
        elif kind == "<|message|>":
            header, opened = header + piece, True
        elif kind == "<|end|>":  # end of a thought opened by the prompt
            parts.append(piece + CLOSE)
        elif first and kind in ("", "<|return|>") and "<|channel|>" not in piece:
            parts.append(piece)  # no message, or a message opened by the prompt
    return "".join(parts)


def _harmony_message(header: str, content: str, end: str) -> str:
    if recipient := _RECIPIENT.search(header.replace("<|channel|>", " ")):
        return f"<|start|>{recipient[1]}<|message|>{content}{'<|call|>' if end == '<|call|>' else ''}"
    if header.partition("<|channel|>")[2].startswith("analysis"):
        return f"{OPEN}{content}{CLOSE if end else ''}"
    return content


_HARMONY = ThoughtMarks(
    frozenset(f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "call", "return")),
    _of_harmony,
)
_SPECIAL = (_replaced("<seed:think>", "</seed:think>"), _replaced("[THINK]", "[/THINK]"), _HARMONY)
_GRANITE = re.compile(r"Here(?: is|'s) my (?:thought process|response):")
GRANITE = ThoughtMarks(
    frozenset(), lambda text: _GRANITE.sub(lambda found: CLOSE if "response" in found[0] else OPEN, text)
)
COMMON = ThoughtMarks(frozenset(), str)
"""Marks of model families with ``<think>`` or without thoughts."""


def thought_marks(special: Collection[str], template: str) -> ThoughtMarks:
    """Return the marks of a model.

    Args:
        special: Special tokens of its tokenizer.
        template: Source of its chat template.
    """
    found = next((marks for marks in _SPECIAL if marks.tokens <= {*special, "<|constrain|>"}), COMMON)
    return GRANITE if found is COMMON and "Here is my thought process:" in template else found
