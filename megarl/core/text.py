"""Text that every file, database and pipe can hold; texts that repeat."""

from __future__ import annotations

import re

KINDS = 1000
"""Most kinds that are remembered: a text of the model's own in each would fill the memory."""


def without_surrogates(text: str) -> str:
    """Replace surrogate characters by ``?``: UTF-8, and so files, databases and pipes, cannot hold them."""
    return text.encode("utf-8", "replace").decode("utf-8")


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
