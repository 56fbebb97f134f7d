"""Texts for people that would be printed many times: the first of each kind is enough."""

from __future__ import annotations

import re

KINDS = 1000
"""Most kinds that are remembered: a text of the model's own in each would fill the memory."""


def kind_of_text(text: str) -> str:
    """Return the text without its numbers, which is the same for repeats of one message."""
    return re.sub(r"\d+", "#", text)


class Repeats:
    """Remember which texts there were, numbers aside."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def is_new(self, text: str) -> bool:
        """Return True for the first text of its kind, and count it as seen."""
        kind = kind_of_text(text)
        if kind in self._seen or len(self._seen) >= KINDS:
            return False
        self._seen.add(kind)
        return True
