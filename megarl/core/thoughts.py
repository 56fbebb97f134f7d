"""Split the thought, between ``<think>`` and ``</think>``, from a response. Tools and verifiers ignore thoughts.

Other marks are rewritten to these two when a response becomes text (``tasks/templates/thought_marks.py``).
"""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"
OPENINGS = (OPEN, "<seed:think>", "[THINK]", "<|channel|>analysis<|message|>")
"""Texts that open a thought in chat templates."""


def opens_thinking(prompt: str) -> bool:
    """Return True if a prompt, as rendered by the chat template, ends inside a thought that the response must close."""
    return prompt.rstrip().endswith(OPENINGS)


def as_written(text: str, in_thinking: bool) -> str:
    """Return a response with the ``<think>`` at the end of its prompt, if any."""
    return OPEN + text if in_thinking else text


def split_thought(text: str) -> tuple[str, str, str]:
    """Split a response (``as_written``) into the thought, the answer after it, and a further thought with all that
    follows. Joined, the three are the text.

    The answer begins after the last ``</think>``. It is empty if a thought was opened but none was closed.
    """
    before, closed, after = text.rpartition(CLOSE)
    answer, opened, further = after.partition(OPEN)
    if opened and not closed:
        return text, "", ""
    return before + closed, answer, opened + further


def without_thought(text: str) -> str:
    """Return the answer in a response (``as_written``), without the line breaks after the thought."""
    thought, answer, _ = split_thought(text)
    return answer.lstrip("\n") if thought else answer
