"""Texts of responses: storable, split from the thought, and truncated ones counted.

Tools and verifiers ignore thoughts.

Other marks are rewritten to these two when a response becomes text (``tasks/templates/template.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

KINDS = 1000
"""Most kinds remembered: if each contained text from the model, they would fill the memory."""


def without_surrogates(text: str) -> str:
    """Replace surrogate characters by ``?``: UTF-8 files, databases and pipes cannot store them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def kind_of_text(text: str) -> str:
    """Return the text with ``#`` for each number, so that repeats of one message are equal."""
    return re.sub(r"\d+", "#", text)


class Repeats:
    """Remembers which texts have appeared, ignoring numbers."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def is_new(self, text: str) -> bool:
        """Return True for the first text of its kind, and count it as seen."""
        kind = kind_of_text(text)
        if kind in self._seen or len(self._seen) >= KINDS:
            return False
        self._seen.add(kind)
        return True


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


METRIC = "response_length/clip_ratio"
"""Share of a step's responses that were truncated."""
MANY = 0.25
"""Minimum share of truncated responses for a warning: the limit, not the policy, then decides what is learned."""


class TruncationWarning:
    """Warns once per start of a job."""

    def __init__(self, limit: int) -> None:
        self._limit, self._warned = limit, False

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        """Return a warning for a step with many truncated responses; ``None`` otherwise, and after the first one."""
        if self._warned or (text := truncation(metrics, self._limit)) is None:
            return None
        self._warned = True
        return text


def truncation(metrics: Mapping[str, float], limit: int) -> str | None:
    """Return a warning if many responses of a step were truncated at ``limit`` tokens, else ``None``."""
    if (share := metrics.get(METRIC, 0.0)) < MANY:
        return None
    return (
        f"{share:.0%} of the responses were truncated at rollout.max_response_tokens={limit}, before an answer could "
        "be complete; raise it, and rollout.max_trajectory_tokens where that is set"
    )
