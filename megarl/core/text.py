"""Text that every file, database and pipe can hold."""

from __future__ import annotations


def without_surrogates(text: str) -> str:
    """Replace surrogate characters by ``?``: UTF-8, and so files, databases and pipes, cannot hold them."""
    return text.encode("utf-8", "replace").decode("utf-8")
