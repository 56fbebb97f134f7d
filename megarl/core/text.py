"""Make text storable in every file, database and pipe; recognise repeated texts."""

from __future__ import annotations

import re

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
